"""Small TOSA graphs for tests: one operator, its operands given as inputs, constants or shapes.

    single(Op.ADD, [((2, 3), DType.FP32), Const(np.ones((2, 3), np.float32))], ((2, 3), DType.FP32))
    single(Op.RESHAPE, [((2, 3), DType.FP32), Dims((6,))], ((6,), DType.FP32))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from numpy.typing import ArrayLike

from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.write import Attribute, GraphWriter, RegionWriter, Spec


class Const(NamedTuple):
    """An operand that is a CONST; the element type is numpy's own unless given."""

    array: ArrayLike
    dtype: DType | None = None


class Dims(NamedTuple):
    """An operand that is a CONST_SHAPE."""

    values: Sequence[int]


def operand(writer: RegionWriter, given: Spec | Const | Dims, name: str) -> str:
    """Declare one operand; a (shape, dtype) pair becomes a graph input called `name`."""
    if isinstance(given, Const):
        return writer.constant(given.array, given.dtype)
    if isinstance(given, Dims):
        return writer.const_shape(given.values)
    shape, dtype = given
    return writer.input(name, shape, dtype)


def single(
    op: Op,
    operands: Sequence[Spec | Const | Dims],
    outputs: Spec | list[Spec],
    attributes: Mapping[str, Attribute] | None = None,
) -> bytes:
    """A graph of one operator and the constants it takes; graph inputs are called in0, in1... by operand position."""
    writer = GraphWriter()
    names = [operand(writer, given, f"in{position}") for position, given in enumerate(operands)]
    results = [outputs] if isinstance(outputs, tuple) else outputs
    writer.output(*writer.operator(op, names, results, attributes))
    return writer.to_bytes()
