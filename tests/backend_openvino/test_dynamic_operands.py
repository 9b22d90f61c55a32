"""Operands that are constants in most programs, told by a call (EXT-DYNAMIC): the same answers as constant ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import lowered
import numpy as np
import oracle
import pytest

from virtaccel.tosa_graph.elements import Array
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.schema import RoundingMode
from virtaccel.tosa_graph.write import Attribute, GraphWriter, Spec

Operand = tuple[Array, DType]


def assert_like_reference(
    op: Op, inputs: Sequence[Operand], told: Sequence[Operand], out: Spec, attributes: Mapping[str, Attribute]
) -> None:
    """Against the reference model on constants: `told` as constants, then as inputs."""
    writer = GraphWriter()
    names = [writer.input(f"x{index}", array.shape, dtype) for index, (array, dtype) in enumerate(inputs)]
    constant = GraphWriter()
    held = [constant.input(f"x{index}", array.shape, dtype) for index, (array, dtype) in enumerate(inputs)]
    names += [writer.input(f"t{index}", array.shape, dtype) for index, (array, dtype) in enumerate(told)]
    held += [constant.constant(array, dtype) for array, dtype in told]
    writer.output(writer.operator(op, names, out, attributes))
    constant.output(constant.operator(op, held, out, attributes))
    data = [array for array, _ in inputs]
    [want] = oracle.reference(constant.to_bytes(), data)
    np.testing.assert_array_equal(lowered.run(constant.to_bytes(), data)[0], want)
    np.testing.assert_array_equal(lowered.run(writer.to_bytes(), data + [array for array, _ in told])[0], want)


@pytest.mark.parametrize("shift", [0, 1, 7, 31, 32, 33, 40, 62, 63])
def test_mul_shift(shift: int) -> None:
    rng = np.random.default_rng(shift)
    a = (rng.integers(-(2**31), 2**31, 400) >> rng.integers(0, 31, 400)).astype(np.int32)
    b = (rng.integers(-(2**31), 2**31, 400) >> rng.integers(0, 31, 400)).astype(np.int32)
    exact = a.astype(np.int64) * b + ((1 << shift) >> 1)
    fits = np.abs(exact >> shift) < 1 << 31
    a, b = a[fits], b[fits]
    told = [(np.array([shift], np.int8), DType.INT8)]
    assert_like_reference(Op.MUL, [(a, DType.INT32), (b, DType.INT32)], told, (a.shape, DType.INT32), {})


def test_negate_zero_points() -> None:
    data = np.arange(-128, 128).astype(np.int8)
    for zeros in ((-128, 127), (0, 0), (127, 127)):
        told = [(np.array([zero], np.int8), DType.INT8) for zero in zeros]
        assert_like_reference(Op.NEGATE, [(data, DType.INT8)], told, (data.shape, DType.INT8), {})


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
def test_rescale(per_channel: bool, double: bool) -> None:
    data = np.random.default_rng(3).integers(-(2**23), 2**23, (50, 4)).astype(np.int32)
    count = 4 if per_channel else 1
    multipliers = np.array([1 << 30, 1_518_500_250, 3 << 12, (1 << 31) - 1][:count], np.int32)
    shifts = np.array([46, 47, 30, 62][:count], np.int8)
    attributes = {
        "scale32": True, "per_channel": per_channel, "input_unsigned": False, "output_unsigned": False,
        "rounding_mode": RoundingMode.DOUBLE_ROUND if double else RoundingMode.SINGLE_ROUND,
    }  # fmt: skip
    told = [
        (multipliers, DType.INT32), (shifts, DType.INT8), (np.zeros(1, np.int32), DType.INT32),
        (np.array([-100], np.int8), DType.INT8),
    ]  # fmt: skip
    assert_like_reference(Op.RESCALE, [(data, DType.INT32)], told, (data.shape, DType.INT8), attributes)
