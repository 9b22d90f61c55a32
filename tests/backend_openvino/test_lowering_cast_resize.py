"""CAST and RESIZE against the reference model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from graphs import Dims, single
from lowered import run
from numpy.typing import NDArray
from oracle import reference
from precision import absolute, violations

from virtaccel.backend_openvino.lowering.cast import _PAIRS as PAIRS
from virtaccel.backend_openvino.lowering.registry import Refused
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.schema import ResizeMode
from virtaccel.tosa_graph.write import GraphWriter

Array = NDArray[Any]

KINDS = {
    DType.BOOL: np.dtype(np.bool_), DType.INT8: np.dtype(np.int8), DType.INT16: np.dtype(np.int16),
    DType.INT32: np.dtype(np.int32), DType.FP16: np.dtype(np.float16), DType.FP32: np.dtype(np.float32),
}  # fmt: skip

N11 = [0.5, 1.5, 2.5, -0.5, -1.5, 127.6, -128.7, 300, 3e9, -3e9, math.inf, -math.inf]


def cast(x: Array, source: DType, target: DType) -> tuple[bytes, Array]:
    tosa = single(Op.CAST, [(x.shape, source)], (x.shape, target))
    return tosa, run(tosa, [x])[0]


def test_n11_floats_are_rounded_to_even_and_saturated() -> None:
    x = np.array(N11, np.float32)
    got = cast(x, DType.FP32, DType.INT8)[1]
    assert got.tolist() == [0, 2, 2, 0, -2, 127, -128, 127, 127, -128, 127, -128]
    got = cast(x, DType.FP32, DType.INT32)[1]
    low, high = -(2**31), 2**31 - 1
    assert got.tolist() == [0, 2, 2, 0, -2, 128, -129, 300, high, low, high, low]
    assert cast(np.array([300], np.int32), DType.INT32, DType.INT8)[1].tolist() == [44]


def _operands(source: DType, target: DType) -> Array:
    rng = np.random.default_rng(41)
    kind = KINDS[source]
    if kind == np.bool_:
        return np.array([True, False, True])
    if kind.kind == "i":
        info = np.iinfo(kind)
        edges = [0, 1, -1, info.min, info.max, 127, -128, 2049 % info.max]
        values = [np.array(edges), rng.integers(info.min, info.max + 1, 3000), rng.integers(-70, 70, 200)]
        if info.bits > 16:
            values.append(rng.integers(-70000, 70000, 1000))
        return np.concatenate(values).astype(kind)
    with np.errstate(over="ignore"):
        x = np.concatenate([
            np.array([*N11, 2.0**31, -(2.0**31), 2147483520.0, 32767.5, 32766.5, -32768.5, 65519, 65520, 1e-8, 0.0]),
            rng.uniform(-300, 300, 2000), rng.uniform(-70000, 70000, 2000), rng.uniform(-(2**32), 2**32, 2000),
            rng.integers(-40000, 40000, 500) + 0.5, np.exp(rng.uniform(-20, 0, 500)),
        ]).astype(kind)  # fmt: skip
    return np.append(x, np.array([np.nan, np.nan], kind)) if target in (DType.FP16, DType.FP32) else x


TESTED = sorted(pair for pair in PAIRS if KINDS.keys() >= set(pair))


@pytest.mark.parametrize(("source", "target"), TESTED, ids=lambda dtype: dtype.name)
def test_every_cast(source: DType, target: DType) -> None:
    x = _operands(source, target)
    tosa, got = cast(x, source, target)
    expected = reference(tosa, [x])[0]
    assert np.array_equal(got, expected, equal_nan=got.dtype.kind == "f"), x[got != expected][:9]


def test_a_cast_to_fp16_and_back_rounds() -> None:
    x = np.concatenate([np.random.default_rng(42).standard_normal(2000) * 100, [70000, -65520, 65519, 3e-8, 1e-9]])
    x = x.astype(np.float32)
    writer = GraphWriter()
    half = writer.operator(Op.CAST, [writer.input("x", x.shape, DType.FP32)], (x.shape, DType.FP16))
    writer.output(writer.operator(Op.CAST, [half], (x.shape, DType.FP32)))
    with np.errstate(over="ignore"):
        assert np.array_equal(run(writer.to_bytes(), [x])[0], x.astype(np.float16).astype(np.float32))


def resize(
    shape: tuple[int, int, int, int],
    dtype: DType,
    mode: ResizeMode,
    scale: tuple[int, int, int, int],
    offset: tuple[int, int] = (0, 0),
    border: tuple[int, int] = (0, 0),
    out: DType | None = None,
) -> bytes:
    n, h, w, c = shape
    rows = ((h - 1) * scale[0] - offset[0] + border[0]) // scale[1] + 1
    columns = ((w - 1) * scale[2] - offset[1] + border[1]) // scale[3] + 1
    operands = [(shape, dtype), Dims(scale), Dims(offset), Dims(border)]
    return single(Op.RESIZE, operands, ((n, rows, columns, c), out or dtype), {"mode": mode})


GRIDS = {
    "half_pixel_2x": ((4, 2, 4, 2), (-1, -1), (1, 1)),
    "half_pixel_3x_1x": ((6, 2, 2, 2), (-2, 0), (2, 0)),
    "asymmetric_2x": ((2, 1, 2, 1), (0, 0), (1, 1)),
    "align_corners": ((6, 3, 8, 4), (0, 0), (0, 0)),
    "down_half_pixel": ((1, 2, 1, 2), (0, 0), (-1, -1)),
    "odd": ((5, 3, 7, 4), (2, -3), (-1, 5)),
    "identity": ((1, 1, 1, 1), (0, 0), (0, 0)),
    "past_the_edge": ((3, 1, 3, 1), (-3, 5), (2, -4)),
}
SHAPES = {"odd": (2, 6, 9, 3), "align_corners": (1, 5, 6, 8), "down_half_pixel": (1, 6, 8, 4)}


def _grid(name: str) -> tuple[Any, ...]:
    """A grid, its border moved so that the sizes divide."""
    scale, offset, border = GRIDS[name]
    shape = SHAPES.get(name, (2, 5, 7, 3))
    fixed = []
    for axis in (0, 1):
        numerator, denominator = scale[2 * axis], scale[2 * axis + 1]
        length = (shape[1 + axis] - 1) * numerator - offset[axis] + border[axis]
        fixed.append(border[axis] - length % denominator)
    return shape, scale, offset, tuple(fixed)


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16], ids=lambda dtype: dtype.name)
def test_bilinear_resize_stays_within_its_bound(dtype: DType, name: str) -> None:
    shape, *grid = _grid(name)
    x = np.random.default_rng(43).uniform(-4, 4, shape).astype(KINDS[dtype])
    tosa = resize(shape, dtype, ResizeMode.BILINEAR, *grid)
    got, expected = run(tosa, [x])[0], reference(tosa, [x])[0].astype(np.float64)
    assert got.shape == expected.shape
    # TOSA allows 0.006 of the largest operand as well; a few units in the last place are met here.
    bound = absolute(got.dtype, np.abs(x.astype(np.float64)).max(), 20.0)
    assert not violations(got, expected, bound).any(), np.abs(got - expected).max()


@pytest.mark.parametrize("name", GRIDS)
def test_bilinear_resize_spreads_nan_as_far_as_the_reference_does(name: str) -> None:
    shape, *grid = _grid(name)
    x = np.random.default_rng(46).uniform(-4, 4, shape).astype(np.float32)
    x[0, 2, 3, 0], x[0, 0, 4, 2], x[0, 0, 0, 1], x[0, -1, -1, 2] = np.nan, np.nan, np.inf, -np.inf
    tosa = resize(shape, DType.FP32, ResizeMode.BILINEAR, *grid)
    got, expected = run(tosa, [x])[0], reference(tosa, [x])[0]
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    odd = np.isinf(expected)
    assert np.array_equal(got[odd], expected[odd])
    # With finite operands, which a caller may vouch for, one node samples the same grids.
    x = np.random.default_rng(47).uniform(-4, 4, shape).astype(np.float32)
    finite, expected = run(tosa, [x], bounded=["in0"])[0], reference(tosa, [x])[0].astype(np.float64)
    assert not violations(finite, expected, absolute(finite.dtype, np.array(4.0), 20)).any()


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16, DType.INT8, DType.INT16], ids=lambda dtype: dtype.name)
def test_nearest_resize_picks_the_very_element(dtype: DType, name: str) -> None:
    shape, *grid = _grid(name)
    x = np.random.default_rng(44).integers(-100, 100, shape).astype(KINDS[dtype])
    tosa = resize(shape, dtype, ResizeMode.NEAREST, *grid)
    assert np.array_equal(run(tosa, [x])[0], reference(tosa, [x])[0])


@pytest.mark.parametrize("name", GRIDS)
def test_int8_bilinear_resize_is_exact(name: str) -> None:
    shape, *grid = _grid(name)
    x = np.random.default_rng(45).integers(-128, 128, shape).astype(np.int8)
    tosa = resize(shape, DType.INT8, ResizeMode.BILINEAR, *grid, out=DType.INT32)
    assert np.array_equal(run(tosa, [x])[0], reference(tosa, [x])[0])


def test_int8_resize_to_the_type_of_the_other_mode_is_refused() -> None:
    tosa = resize((1, 4, 4, 1), DType.INT8, ResizeMode.BILINEAR, (2, 1, 2, 1), (0, 0), (0, 0), DType.INT8)
    with pytest.raises(Refused, match="RESIZE"):
        run(tosa, [np.zeros((1, 4, 4, 1), np.int8)])
