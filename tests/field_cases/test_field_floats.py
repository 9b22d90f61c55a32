"""Cases N1 to N6 and N11: floating point, NaN, ties, rounding. Expectations are the cases' own numbers or float64."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import openvino as ov
import pytest
from graphs import Const, single
from through_device import run, run_bytes

from virtaccel.backend_openvino import compile as runtime
from virtaccel.guest_tools.arrays.accelerator import Accelerator
from virtaccel.tosa_graph.elements import Array
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.schema import NanMode
from virtaccel.tosa_graph.write import GraphWriter

FLOATS = {DType.FP32: np.dtype(np.float32), DType.FP16: np.dtype(np.float16)}
EITHER_FLOAT = pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
EITHER_MODE = pytest.mark.parametrize("mode", [NanMode.PROPAGATE, NanMode.IGNORE], ids=lambda mode: mode.name)


# ---- N1


def test_n1_matmul_of_fp32_is_computed_in_fp32(accelerator: Accelerator) -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((1, 64, 256)), rng.standard_normal((1, 256, 64))
    zero = Const(np.zeros(1, np.float32))
    specs = (a.shape, DType.FP32), (b.shape, DType.FP32)
    tosa = single(Op.MATMUL, [*specs, zero, zero], ((1, 64, 64), DType.FP32))
    left, right = a.astype(np.float32), b.astype(np.float32)
    (got,) = run(accelerator, tosa, [left, right])
    assert np.abs(got - left.astype(np.float64) @ right.astype(np.float64)).max() < 1e-3


def test_n1_a_device_that_computes_in_bf16_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime is a stand-in here: what it would say on such a device cannot be had from every processor."""
    compiled = SimpleNamespace(get_property=lambda name: ov.Type.bf16)
    monkeypatch.setattr(runtime, "core", lambda: SimpleNamespace(compile_model=lambda *given: compiled))
    assert "not FP32" in (runtime.probe.__wrapped__("CPU") or "")


# ---- N2

PATTERNS = {
    DType.FP32: [0x7FC00001, 0xFFA00123, 0x7F800001, 0x80000000, 0, 1, 0x007FFFFF, 0x80000001, 0x7F800000, 0x3F800000],
    DType.FP16: [0x7E01, 0xFD23, 0x7C01, 0x8000, 0, 1, 0x03FF, 0x8001, 0x7C00, 0x3C00],
}
"""Quiet and signalling NaNs with payloads, -0, denormals, infinity, 1."""


def bits(dtype: DType) -> Array:
    return np.array(PATTERNS[dtype], f"<u{FLOATS[dtype].itemsize}").view(FLOATS[dtype])


@EITHER_FLOAT
def test_n2_identity_gives_the_bytes_of_its_input(accelerator: Accelerator, dtype: DType) -> None:
    x = bits(dtype)
    spec = (x.shape, dtype)
    assert run_bytes(accelerator, single(Op.IDENTITY, [spec], spec), [x.tobytes()]) == [x.tobytes()]


EVERY_CODE = {DType.FP16: "<u2", DType.BF16: "<u2", DType.FP8E4M3: "u1", DType.FP8E5M2: "u1"}


@pytest.mark.parametrize("dtype", EVERY_CODE, ids=lambda dtype: dtype.name)
def test_n2_every_code_of_the_narrow_types(accelerator: Accelerator, dtype: DType) -> None:
    kind = np.dtype(EVERY_CODE[dtype])
    codes = np.arange(256**kind.itemsize, dtype=kind).tobytes()
    spec = ((256**kind.itemsize,), dtype)
    assert run_bytes(accelerator, single(Op.IDENTITY, [spec], spec), [codes]) == [codes]
    writer = GraphWriter()
    writer.output(writer.tensor("c", *spec, codes))
    writer.place(Op.CONST, [], ["c"])
    assert run_bytes(accelerator, writer.to_bytes(), []) == [codes]


@EITHER_FLOAT
def test_n2_identity_beside_a_sum(accelerator: Accelerator, dtype: DType) -> None:
    x = np.array([1.5, -2, 0.25, 1000], FLOATS[dtype])
    writer = GraphWriter()
    name = writer.input("x", x.shape, dtype)
    same = writer.operator(Op.IDENTITY, [name], (x.shape, dtype))
    more = writer.operator(Op.ADD, [name, writer.constant(np.ones(4, FLOATS[dtype]))], (x.shape, dtype))
    writer.output(same, more)
    first, second = run(accelerator, writer.to_bytes(), [x])
    np.testing.assert_array_equal(first, x)
    np.testing.assert_array_equal(second, x + 1)


@EITHER_FLOAT
def test_n2_constants_and_repeated_tensors_as_outputs(accelerator: Accelerator, dtype: DType) -> None:
    x, held = np.array([1, 2, 3], FLOATS[dtype]), bits(dtype)
    writer = GraphWriter()
    name, constant = writer.input("x", x.shape, dtype), writer.constant(held, dtype)
    double = writer.operator(Op.ADD, [name, name], (x.shape, dtype))
    writer.output(constant, double, double, constant, name, name)
    got = run_bytes(accelerator, writer.to_bytes(), [x.tobytes()])
    twice = (x + x).tobytes()
    assert got == [held.tobytes(), twice, twice, held.tobytes(), x.tobytes(), x.tobytes()]


# ---- N3

NAN = np.nan
ROWS = np.array(
    [
        [NAN, 3, -2, 5, 0, 1, 7],
        [4, 3, -2, NAN, 0, 1, 7],
        [4, 3, -2, 5, 0, 1, NAN],
        [NAN, 3, NAN, -5, NAN, 1, NAN],
        [NAN, NAN, NAN, NAN, NAN, NAN, NAN],
        [4, 3, -2, 5, 0, 1, 7],
        [-np.inf, NAN, np.inf, 1, 2, 3, 4],
    ]
)  # fmt: skip
LOW, HIGH = -1.0, 4.0


def extremes(dtype: DType, mode: NanMode) -> bytes:
    """MAXIMUM, MINIMUM of a and b; CLAMP, REDUCE_MAX, REDUCE_MIN along the rows and MAX_POOL2D over them, of a."""
    shape, count = ROWS.shape, len(ROWS)
    writer = GraphWriter()
    a, b = writer.input("a", shape, dtype), writer.input("b", shape, dtype)
    nan = {"nan_mode": mode}
    low, high = (np.array(bound, FLOATS[dtype]).tobytes() for bound in (LOW, HIGH))
    image = writer.operator(
        Op.RESHAPE, [a, writer.const_shape((1, *shape, 1))], ((1, *shape, 1), dtype)
    )
    window = {"kernel": (1, shape[1]), "stride": (1, 1), "pad": (0, 0, 0, 0), **nan}
    writer.output(
        writer.operator(Op.MAXIMUM, [a, b], (shape, dtype), nan),
        writer.operator(Op.MINIMUM, [a, b], (shape, dtype), nan),
        writer.operator(Op.CLAMP, [a], (shape, dtype), {"min_val": low, "max_val": high, **nan}),
        writer.operator(Op.REDUCE_MAX, [a], ((count, 1), dtype), {"axis": 1, **nan}),
        writer.operator(Op.REDUCE_MIN, [a], ((count, 1), dtype), {"axis": 1, **nan}),
        writer.operator(Op.MAX_POOL2D, [image], ((1, count, 1, 1), dtype), window),
    )
    return writer.to_bytes()


@EITHER_FLOAT
@EITHER_MODE
def test_n3_nan_at_every_place_and_in_either_operand(accelerator: Accelerator, mode: NanMode, dtype: DType) -> None:
    a = ROWS.astype(FLOATS[dtype])
    b = np.ascontiguousarray(a[:, ::-1])  # NaN meets numbers, numbers meet NaN, NaN meets NaN
    pick = (np.maximum, np.minimum) if mode is NanMode.PROPAGATE else (np.fmax, np.fmin)
    clamped = np.clip(a, LOW, HIGH) if mode is NanMode.PROPAGATE else np.fmin(np.fmax(a, LOW), HIGH)
    rows = [function.reduce(a, axis=1, keepdims=True) for function in pick]
    expected = [pick[0](a, b), pick[1](a, b), clamped.astype(a.dtype), rows[0], rows[1], rows[0].reshape(1, -1, 1, 1)]
    got = run(accelerator, extremes(dtype, mode), [a, b])
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.isnan(got[3][4]), "nothing but NaN is NaN"


# ---- N4, N5, N6


@EITHER_FLOAT
def test_n4_comparisons_with_nan_are_false(accelerator: Accelerator, dtype: DType) -> None:
    a = np.array([np.nan, 1, np.nan, 0.0, -0.0, 2, np.inf, np.nan], FLOATS[dtype])
    b = np.array([1, np.nan, np.nan, -0.0, 0.0, 1, np.inf, -np.inf], FLOATS[dtype])
    writer = GraphWriter()
    names = [writer.input("a", a.shape, dtype), writer.input("b", b.shape, dtype)]
    for op in (Op.GREATER, Op.GREATER_EQUAL, Op.EQUAL):
        writer.output(writer.operator(op, names, (a.shape, DType.BOOL)))
    greater, greater_equal, equal = run(accelerator, writer.to_bytes(), [a, b])
    assert greater.tolist() == [False, False, False, False, False, True, False, False]
    assert greater_equal.tolist() == [False, False, False, True, True, True, True, False]
    assert equal.tolist() == [False, False, False, True, True, False, True, False]


def test_n5_argmax_takes_the_first_of_equals(accelerator: Accelerator) -> None:
    many = np.random.default_rng(5).uniform(-5, 5, (1, 5000)).astype(np.float32)
    many[0, [10, 20, 4000]] = 9
    for mode in (NanMode.PROPAGATE, NanMode.IGNORE):
        writer = GraphWriter()
        for name, shape in (("many", (1, 5000)), ("nans", (1, 6)), ("level", (1, 7))):
            x = writer.input(name, shape, DType.FP32)
            writer.output(writer.operator(Op.ARGMAX, [x], ((1,), DType.INT32), {"axis": 1, "nan_mode": mode}))
        nans = np.array([[1, np.nan, 3, np.nan, 0, 9]], np.float32)
        got = run(accelerator, writer.to_bytes(), [many, nans, np.full((1, 7), 4, np.float32)])
        assert [int(value[0]) for value in got] == [10, 1 if mode is NanMode.PROPAGATE else 5, 0]


def test_n6_exp_of_nan_and_around_overflow(accelerator: Accelerator) -> None:
    x = np.array([np.nan, 88.5, 88.72, 89, -87.5], np.float32)
    (got,) = run(accelerator, single(Op.EXP, [(x.shape, DType.FP32)], (x.shape, DType.FP32)), [x])
    assert np.isnan(got[0])
    assert np.isfinite(got[1:3]).all()
    assert got[3] == np.inf
    np.testing.assert_allclose(got[1:3], np.exp(x[1:3].astype(np.float64)), rtol=3e-5)
    assert abs(got[4] - math.exp(-87.5)) < 1e-40 + 3e-5 * math.exp(-87.5)


# ---- N11


def test_n11_casts_round_to_even_and_saturate(accelerator: Accelerator) -> None:
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 127.6, -128.7, 300, 3e9, -3e9, np.inf, -np.inf], np.float32)
    writer = GraphWriter()
    name, whole = writer.input("x", x.shape, DType.FP32), writer.input("i", (1,), DType.INT32)
    for source, target, shape in ((name, DType.INT8, x.shape), (name, DType.INT32, x.shape), (whole, DType.INT8, (1,))):
        writer.output(writer.operator(Op.CAST, [source], (shape, target)))
    narrow, wide, wrapped = run(accelerator, writer.to_bytes(), [x, np.array([300], np.int32)])
    assert narrow.tolist() == [0, 2, 2, 0, -2, 127, -128, 127, 127, -128, 127, -128]
    low, high = -(2**31), 2**31 - 1
    assert wide.tolist() == [0, 2, 2, 0, -2, 128, -129, 300, high, low, high, low]
    assert wrapped.tolist() == [44]
