"""Reductions and ARGMAX against the reference model: NaN at every place, ties, INT32 beyond 2^24, laid-out operands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import single
from lowered import run
from numpy.typing import NDArray
from oracle import reference
from precision import product_bound, sum_bound, violations

from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.schema import NanMode
from virtaccel.tosa_graph.write import GraphWriter

Array = NDArray[Any]

FLOATS = {DType.FP32: np.dtype(np.float32), DType.FP16: np.dtype(np.float16)}
MODES = [NanMode.PROPAGATE, NanMode.IGNORE]


def reduction(op: Op, shape: tuple[int, ...], dtype: DType, axis: int, mode: NanMode | None = None) -> bytes:
    out = tuple(1 if i == axis else n for i, n in enumerate(shape))
    attributes = {"axis": axis} if mode is None else {"axis": axis, "nan_mode": mode}
    return single(op, [(shape, dtype)], (out, dtype), attributes)


def argmax(shape: tuple[int, ...], dtype: DType, axis: int, mode: NanMode) -> bytes:
    out = tuple(n for i, n in enumerate(shape) if i != axis)
    return single(Op.ARGMAX, [(shape, dtype)], (out, DType.INT32), {"axis": axis, "nan_mode": mode})


def with_nans(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    x = np.random.default_rng(21).integers(-9, 9, shape).astype(dtype)
    x[0, 0, 0, 0] = x[0, 1, -1, 2] = x[-1, -1, -1, -1] = np.nan
    x[1, :, 3, 3] = x[1, 2, :, 4] = x[:, 0, 1, 1] = x[1, 1, 2, :] = np.nan
    x[0, 2, 2, :] = -np.inf
    x[0, 1, 2, :] = np.inf
    x[0, 1, 0, 0] = np.inf
    return x


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("op", [Op.REDUCE_MAX, Op.REDUCE_MIN, Op.ARGMAX], ids=lambda op: op.name)
def test_n3_extremes_of_nan_along_every_axis(op: Op, dtype: DType, mode: NanMode) -> None:
    x = with_nans((2, 3, 8, 5), FLOATS[dtype])
    for axis in range(4):
        make = argmax if op is Op.ARGMAX else lambda *rest: reduction(op, *rest)
        tosa = make(x.shape, dtype, axis, mode)
        got, expected = run(tosa, [x])[0], reference(tosa, [x])[0]
        assert np.array_equal(got, expected, equal_nan=op is not Op.ARGMAX), axis


def test_extremes_of_nothing_but_infinity() -> None:
    for sign in (-1, 1):
        x = np.full((3, 70), sign * np.inf, np.float32)
        for op in (Op.REDUCE_MAX, Op.REDUCE_MIN):
            assert (run(reduction(op, x.shape, DType.FP32, 1, NanMode.PROPAGATE), [x])[0] == sign * np.inf).all()


def test_n5_argmax_takes_the_first_of_equals_and_minds_nan() -> None:
    x = np.random.default_rng(22).uniform(-5, 5, (1, 5000)).astype(np.float32)
    x[0, [10, 20, 4000]] = 9
    for mode in MODES:
        assert run(argmax(x.shape, DType.FP32, 1, mode), [x])[0] == [10]
        assert run(argmax((1, 7), DType.FP32, 1, mode), [np.full((1, 7), 4, np.float32)])[0] == [0]
    nans = np.array([[1, np.nan, 3, np.nan, 0, 9]], np.float32)
    assert run(argmax(nans.shape, DType.FP32, 1, NanMode.PROPAGATE), [nans])[0] == [1]
    assert run(argmax(nans.shape, DType.FP32, 1, NanMode.IGNORE), [nans])[0] == [5]


@pytest.mark.parametrize(("dtype", "kind"), [(DType.INT8, np.int8), (DType.INT16, np.int16)], ids=["INT8", "INT16"])
def test_narrow_integers(dtype: DType, kind: type[np.generic]) -> None:
    rng = np.random.default_rng(23)
    x = rng.integers(np.iinfo(kind).min, np.iinfo(kind).max + 1, (3, 40, 5)).astype(kind)
    x[0, :, 0] = np.iinfo(kind).min
    for axis in range(3):
        for op, expected in ((Op.REDUCE_MAX, x.max(axis)), (Op.REDUCE_MIN, x.min(axis))):
            got = run(reduction(op, x.shape, dtype, axis, NanMode.PROPAGATE), [x])[0]
            assert np.array_equal(got, np.expand_dims(expected, axis))
        assert np.array_equal(run(argmax(x.shape, dtype, axis, NanMode.PROPAGATE), [x])[0], x.argmax(axis))


def test_n7_int32_reductions_are_exact() -> None:
    x = np.array([[16777216, 16777217]], np.int32)
    assert run(reduction(Op.REDUCE_MAX, x.shape, DType.INT32, 1, NanMode.PROPAGATE), [x])[0] == [[16777217]]
    ramp = np.arange(20000, dtype=np.int32)[None]
    assert run(reduction(Op.REDUCE_SUM, ramp.shape, DType.INT32, 1), [ramp])[0] == [[199990000]]
    rng = np.random.default_rng(24)
    for length in (1, 2, 3, 255, 256, 257, 4097):
        x = rng.integers(-(2**31), 2**31, (3, length, 2)).astype(np.int32)
        x[0, : length // 2] |= np.int32(0x7FFF0000)
        for op, expected in ((Op.REDUCE_MAX, x.max(1)), (Op.REDUCE_MIN, x.min(1))):
            got = run(reduction(op, x.shape, DType.INT32, 1, NanMode.PROPAGATE), [x])[0]
            assert np.array_equal(got[:, 0], expected), (op, length)
        got = run(reduction(Op.REDUCE_SUM, x.shape, DType.INT32, 1), [x])[0]
        assert np.array_equal(got[:, 0], x.sum(1, dtype=np.int32)), length  # wraps as 32 bits do


def test_int32_sum_over_more_than_2_16_values() -> None:
    x = np.random.default_rng(25).integers(-(2**31), 2**31, (2, 200_001)).astype(np.int32)
    got = run(reduction(Op.REDUCE_SUM, x.shape, DType.INT32, 1), [x])[0]
    assert np.array_equal(got[:, 0], x.sum(1, dtype=np.int32))


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
def test_sums_and_products_stay_within_their_bounds(dtype: DType) -> None:
    rng = np.random.default_rng(26)
    x = rng.uniform(-1, 1, (3, 50, 4, 70)).astype(FLOATS[dtype])
    for axis in range(4):
        got = run(reduction(Op.REDUCE_SUM, x.shape, dtype, axis), [x])[0]
        expected = x.astype(np.float64).sum(axis=axis, keepdims=True)
        assert not violations(got, expected, sum_bound(got.dtype, x, axis)).any()
        got = run(reduction(Op.REDUCE_PRODUCT, x.shape, dtype, axis), [x])[0]
        expected = x.astype(np.float64).prod(axis=axis, keepdims=True)
        assert not violations(got, expected, product_bound(got.dtype, expected, x.shape[axis])).any()
    nan = with_nans((2, 3, 8, 5), FLOATS[dtype])
    for op, numpy_op in ((Op.REDUCE_SUM, np.sum), (Op.REDUCE_PRODUCT, np.prod)):
        with np.errstate(invalid="ignore"):
            expected = numpy_op(nan.astype(np.float64), axis=2, keepdims=True)
        assert np.array_equal(np.isnan(run(reduction(op, nan.shape, dtype, 2), [nan])[0]), np.isnan(expected))


def test_booleans() -> None:
    x = np.random.default_rng(27).random((2, 3, 4, 5)) < 0.7
    x[0, 0], x[1, 2] = True, False
    for axis in range(4):
        for op, expected in ((Op.REDUCE_ALL, x.all(axis)), (Op.REDUCE_ANY, x.any(axis))):
            got = run(reduction(op, x.shape, DType.BOOL, axis), [x])[0]
            assert np.array_equal(got, np.expand_dims(expected, axis))


@pytest.mark.parametrize("op", [Op.REDUCE_MAX, Op.REDUCE_SUM, Op.ARGMAX], ids=lambda op: op.name)
def test_axes_are_found_in_a_transposed_operand(op: Op) -> None:
    x = np.random.default_rng(28).integers(-50, 50, (2, 3, 4, 5)).astype(np.float32)
    turned = np.transpose(x, (2, 0, 3, 1))
    for axis in range(4):
        writer = GraphWriter()
        moved = writer.operator(
            Op.TRANSPOSE, [writer.input("x", x.shape, DType.FP32)], (turned.shape, DType.FP32), {"perms": (2, 0, 3, 1)}
        )
        kept = tuple(1 if i == axis else n for i, n in enumerate(turned.shape))
        attributes: dict[str, int] = {"axis": axis}
        if op is not Op.REDUCE_SUM:
            attributes["nan_mode"] = NanMode.PROPAGATE
        if op is Op.ARGMAX:
            spec = (tuple(n for i, n in enumerate(turned.shape) if i != axis), DType.INT32)
            expected = turned.argmax(axis)
        else:
            spec = (kept, DType.FP32)
            expected = (turned.max if op is Op.REDUCE_MAX else turned.sum)(axis=axis, keepdims=True)
        writer.output(writer.operator(op, [moved], spec, attributes))
        assert np.array_equal(run(writer.to_bytes(), [x])[0], expected), axis
