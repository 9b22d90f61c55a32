"""Comparisons, extremes, CLAMP and SELECT against the reference model; NaN at every place, INT32 beyond 2^24."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from graphs import Const, single
from lowered import run
from numpy.typing import NDArray
from oracle import reference

from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.schema import NanMode
from virtaccel.tosa_graph.write import GraphWriter

Array = NDArray[Any]

FLOATS = {DType.FP32: np.dtype(np.float32), DType.FP16: np.dtype(np.float16)}
MODES = [NanMode.PROPAGATE, NanMode.IGNORE]
COMPARISONS = [Op.EQUAL, Op.GREATER, Op.GREATER_EQUAL]
INTEGERS = np.array(
    [0, 1, -1, 2**24, 2**24 + 1, -(2**24) - 1, 2**31 - 1, 2**31 - 2, -(2**31), -(2**31) + 1, 777777777], np.int32
)


def same(got: Array, expected: Array) -> bool:
    """Equal, any NaN for a NaN, any sign of zero."""
    return got.shape == expected.shape and np.array_equal(got, expected, equal_nan=got.dtype.kind == "f")


def pairs(values: Array) -> tuple[Array, Array]:
    table = np.array(list(itertools.product(values, values)), values.dtype)
    return np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("op", COMPARISONS, ids=lambda op: op.name)
def test_n4_comparisons_with_nan_are_false_and_zeros_are_equal(op: Op, dtype: DType) -> None:
    a, b = pairs(np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1, 1.001, -3], FLOATS[dtype]))
    tosa = single(op, [(a.shape, dtype), (b.shape, dtype)], (a.shape, DType.BOOL))
    (got,) = run(tosa, [a, b])
    assert not got[np.isnan(a) | np.isnan(b)].any()
    assert same(got, reference(tosa, [a, b])[0])
    broadcast = single(op, [((1,), dtype), (b.shape, dtype)], (b.shape, DType.BOOL))
    for number in (np.nan, 0.0):
        first = np.array([number], FLOATS[dtype])
        assert same(run(broadcast, [first, b])[0], reference(broadcast, [first, b])[0])


@pytest.mark.parametrize("op", COMPARISONS, ids=lambda op: op.name)
def test_n8_int32_comparisons_are_exact_beyond_2_24(op: Op) -> None:
    a, b = pairs(INTEGERS)
    rng = np.random.default_rng(11)
    near = rng.integers(-(2**31), 2**31 - 2, 5000).astype(np.int32)
    a, b = np.concatenate([a, near]), np.concatenate([b, near + rng.integers(0, 2, 5000).astype(np.int32)])
    tosa = single(op, [(a.shape, DType.INT32), (b.shape, DType.INT32)], (a.shape, DType.BOOL))
    expected = {Op.EQUAL: a == b, Op.GREATER: a > b, Op.GREATER_EQUAL: a >= b}[op]
    (got,) = run(tosa, [a, b])
    assert np.array_equal(got, expected)
    constant = single(op, [(a.shape, DType.INT32), Const(b)], (a.shape, DType.BOOL))
    assert np.array_equal(run(constant, [a])[0], expected)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("op", [Op.MAXIMUM, Op.MINIMUM], ids=lambda op: op.name)
def test_n3_maximum_and_minimum_of_nan(op: Op, dtype: DType, mode: NanMode) -> None:
    values = np.array([np.nan, 1, -2, np.inf, -np.inf, 0.0, 5, np.nan, 7], FLOATS[dtype])
    a, b = pairs(values)
    attributes = {"nan_mode": mode}
    spec = (a.shape, dtype)
    tosa = single(op, [spec, spec], spec, attributes)
    expected = reference(tosa, [a, b])[0]
    assert same(run(tosa, [a, b])[0], expected)
    for fixed in (b, np.where(np.isnan(b), FLOATS[dtype].type(3), b)):
        for operands in ([spec, Const(fixed)], [Const(fixed), spec]):
            tosa = single(op, operands, spec, attributes)
            assert same(run(tosa, [a])[0], reference(tosa, [a])[0])


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("bounds", [(0.0, 6.0), (0.0, 65504.0), (-np.inf, 2.0), (-1.0, np.inf), (2.0, 2.0)])
def test_n3_clamp_of_nan(bounds: tuple[float, float], dtype: DType, mode: NanMode) -> None:
    x = np.array([np.nan, 1, -2, np.inf, -np.inf, 0.0, -0.0, 5, np.nan, 7, 6, 65504, np.nan], FLOATS[dtype])
    low, high = (np.array(bound, FLOATS[dtype]).tobytes() for bound in bounds)
    attributes = {"min_val": low, "max_val": high, "nan_mode": mode}
    tosa = single(Op.CLAMP, [(x.shape, dtype)], (x.shape, dtype), attributes)
    (got,) = run(tosa, [x])
    assert same(got, reference(tosa, [x])[0])
    expected = np.clip(x, *(FLOATS[dtype].type(bound) for bound in bounds))
    if mode is NanMode.IGNORE:
        expected = np.where(np.isnan(x), FLOATS[dtype].type(bounds[0]), expected)
    assert same(got, expected)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_n3_clamp_after_a_convolution(mode: NanMode) -> None:
    writer = GraphWriter()
    x = np.zeros((1, 4, 4, 16), np.float32)
    x[0, 1, 1, :4], x[0, 2, 2, :4] = [np.nan, 7, -3, np.inf], [1, 2, -np.inf, 6]
    none = np.zeros(1, np.float32)
    names = [writer.input("x", x.shape, DType.FP32)]
    weights, bias = np.ones((1, 1, 16, 1), np.float32), np.zeros(16, np.float32)
    names += [writer.constant(array) for array in (weights, bias, none, none)]
    attributes = {"pad": (0, 0, 0, 0), "stride": (1, 1), "dilation": (1, 1), "acc_type": DType.FP32}
    summed = writer.operator(Op.DEPTHWISE_CONV2D, names, (x.shape, DType.FP32), attributes)
    bound = {"min_val": np.float32(0).tobytes(), "max_val": np.float32(6).tobytes(), "nan_mode": mode}
    writer.output(writer.operator(Op.CLAMP, [summed], (x.shape, DType.FP32), bound))
    tosa = writer.to_bytes()
    assert same(run(tosa, [x])[0], reference(tosa, [x])[0])


def test_integer_extremes_and_clamps() -> None:
    a, b = pairs(INTEGERS)
    spec = (a.shape, DType.INT32)
    for op, expected in ((Op.MAXIMUM, np.maximum(a, b)), (Op.MINIMUM, np.minimum(a, b))):
        assert same(run(single(op, [spec, spec], spec, {"nan_mode": NanMode.PROPAGATE}), [a, b])[0], expected)
    for dtype, kind in ((DType.INT8, np.int8), (DType.INT16, np.int16)):
        x = np.arange(np.iinfo(kind).min, np.iinfo(kind).max + 1).astype(kind)
        for low, high in ((-100, 17), (0, 0), (np.iinfo(kind).min, 100)):
            attributes = {
                "min_val": np.array(low, kind).tobytes(),
                "max_val": np.array(high, kind).tobytes(),
                "nan_mode": NanMode.PROPAGATE,
            }
            tosa = single(Op.CLAMP, [(x.shape, dtype)], (x.shape, dtype), attributes)
            assert same(run(tosa, [x])[0], np.clip(x, low, high))


SELECTED = {
    DType.BOOL: np.bool_, DType.INT8: np.int8, DType.INT16: np.int16, DType.INT32: np.int32, DType.FP16: np.float16,
    DType.FP32: np.float32,
}  # fmt: skip


@pytest.mark.parametrize("dtype", SELECTED, ids=lambda dtype: dtype.name)
def test_select_moves_values_as_they_are(dtype: DType) -> None:
    rng = np.random.default_rng(12)
    condition = rng.random((1, 300, 1)) < 0.5
    raw = rng.integers(0, 2**32, (2, 4, 300, 5), dtype=np.uint32)
    kind = np.dtype(SELECTED[dtype])
    if kind == np.bool_:
        a, b = raw > 2**31
    else:
        a, b = (part.astype(f"u{kind.itemsize}").view(kind) for part in raw)
    tosa = single(Op.SELECT, [(condition.shape, DType.BOOL), (a.shape, dtype), (b.shape, dtype)], (a.shape, dtype))
    assert same(run(tosa, [condition, a, b])[0], np.where(condition, a, b))


def test_int32_select_between_sums_stays_exact() -> None:
    """Select goes through FP32 in the CPU plugin and takes along what is fused with it."""
    rng = np.random.default_rng(13)
    a, b = rng.integers(-(2**31), 2**31, (2, 4000)).astype(np.int32)
    writer = GraphWriter()
    x, y = writer.input("x", a.shape, DType.INT32), writer.input("y", a.shape, DType.INT32)
    spec, zero = (a.shape, DType.INT32), writer.constant(np.zeros(1, np.int8))
    larger = writer.operator(Op.GREATER, [x, y], (a.shape, DType.BOOL))
    total = writer.operator(Op.BITWISE_XOR, [x, y], spec)
    product = writer.operator(Op.MUL, [x, y, zero], spec)
    chosen = writer.operator(Op.SELECT, [larger, total, product], spec)
    writer.output(writer.operator(Op.BITWISE_OR, [chosen, x], spec))
    tosa = writer.to_bytes()
    with np.errstate(over="ignore"):
        expected = np.where(a > b, a ^ b, a * b) | a
    assert np.array_equal(run(tosa, [a, b])[0], expected)


def _prelu(slope: Array, shape: tuple[int, ...]) -> bytes:
    writer = GraphWriter()
    x, zero = writer.input("x", shape, DType.FP32), writer.constant(np.zeros((1,) * len(shape), np.float32))
    factor, none = writer.constant(slope), writer.constant(np.zeros(1, np.int8))
    rising = writer.operator(Op.GREATER_EQUAL, [x, zero], (shape, DType.BOOL))
    scaled = writer.operator(Op.MUL, [x, factor, none], (shape, DType.FP32))
    writer.output(writer.operator(Op.SELECT, [rising, x, scaled], (shape, DType.FP32)))
    return writer.to_bytes()


@pytest.mark.parametrize("slope_shape", [(1, 1, 1, 8), (1, 1, 1, 1), (1, 5, 6, 8), (1, 5, 1, 1)])
def test_prelu_made_of_three_operators(slope_shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(14)
    x = rng.standard_normal((2, 5, 6, 8)).astype(np.float32)
    x[0, 0, 0, :4], x[1, 2, 3, :2] = [np.nan, np.inf, -np.inf, -0.0], [1e-40, -1e-40]
    slope = rng.uniform(-1, 1, slope_shape).astype(np.float32)
    tosa = _prelu(slope, x.shape)
    assert same(run(tosa, [x])[0], reference(tosa, [x])[0])


@pytest.mark.parametrize("slopes", [[0.25, -1.5, 1.0], [0.25, -3.0, 2.5], [0.5, 0.5, 0.5]])
def test_prelu_of_numbers_is_exact_whatever_the_slopes(slopes: list[float]) -> None:
    values = np.array([0.0, 1e-3, 1.0, 1e30, 3.4e38, 1.2e-38], np.float32)
    x = np.stack([np.concatenate([values, -values])] * 3, axis=-1)
    tosa = _prelu(np.array([slopes], np.float32), x.shape)
    names = {tensor.name for tensor in read(tosa).main.tensors.values()}
    [got] = run(tosa, [x], names)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got, np.where(x >= 0, x, x * np.array(slopes, np.float32)))


def test_prelu_of_an_infinite_slope_is_left_alone() -> None:
    x = np.array([[-1.0, 0.0, -0.0, 2.0]], np.float32)
    tosa = _prelu(np.array([[np.inf]], np.float32), x.shape)
    assert same(run(tosa, [x])[0], np.array([[-np.inf, 0, 0, 2]], np.float32))
