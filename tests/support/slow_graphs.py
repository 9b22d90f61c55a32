"""Programs that take a while, for tests that need a submission to be under way."""

from __future__ import annotations

import numpy as np

from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.write import GraphWriter


def rotations(size: int, steps: int) -> bytes:
    """x -> x * P * P ... with a cyclic permutation P: `steps` matrix products whose exact result is known.

    x has shape (1, size, size) of FP32; the result is x with its columns moved round by `steps` places.
    """
    writer = GraphWriter()
    value = writer.input("x", (1, size, size), DType.FP32)
    permutation = writer.constant(np.roll(np.eye(size, dtype=np.float32), 1, axis=1)[np.newaxis])
    zero = writer.constant(np.zeros(1, np.float32))
    for _ in range(steps):
        value = writer.operator(Op.MATMUL, [value, permutation, zero, zero], ((1, size, size), DType.FP32))
    writer.output(value)
    return writer.to_bytes()


def rotated(x: np.ndarray, steps: int) -> np.ndarray:
    """The right answer, without any arithmetic."""
    return np.roll(x, steps, axis=2)
