"""Cases N7 to N10 and N12: integers, bit for bit. Expectations are the cases' own numbers or wider integers."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import Const, single
from through_device import run

from virtaccel.device.wire import Status
from virtaccel.guest_tools.arrays.accelerator import Accelerator
from virtaccel.guest_tools.artifact import target_words
from virtaccel.guest_tools.errors import Refused
from virtaccel.tosa_graph.elements import Array
from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.schema import NanMode, RoundingMode
from virtaccel.tosa_graph.target import Profile, Target, to_words
from virtaccel.tosa_graph.write import GraphWriter

LOW, HIGH = -(2**31), 2**31 - 1


# ---- N7


@pytest.mark.parametrize("depth", [259, 515, 1031, 4096])
def test_n7_int8_matmul_of_extremes(accelerator: Accelerator, depth: int) -> None:
    zero = Const(np.array([127], np.int8))
    specs = ((1, 2, depth), DType.INT8), ((1, depth, 2), DType.INT8)
    tosa = single(Op.MATMUL, [*specs, zero, zero], ((1, 2, 2), DType.INT32))
    (got,) = run(accelerator, tosa, [np.full(shape, -128, np.int8) for shape, _ in specs])
    assert (got == 65025 * depth).all()


def test_n7_int32_sum_and_maximum_beyond_2_24(accelerator: Accelerator) -> None:
    writer = GraphWriter()
    many, two = writer.input("many", (1, 20000), DType.INT32), writer.input("two", (1, 2), DType.INT32)
    writer.output(writer.operator(Op.REDUCE_SUM, [many], ((1, 1), DType.INT32), {"axis": 1}))
    largest = {"axis": 1, "nan_mode": NanMode.PROPAGATE}
    writer.output(writer.operator(Op.REDUCE_MAX, [two], ((1, 1), DType.INT32), largest))
    ramp, pair = np.arange(20000, dtype=np.int32)[None], np.array([[16777216, 16777217]], np.int32)
    total, larger = run(accelerator, writer.to_bytes(), [ramp, pair])
    assert (int(total[0, 0]), int(larger[0, 0])) == (199990000, 16777217)


def test_n7_int8_convolution_of_extremes(accelerator: Accelerator) -> None:
    weights = Const(np.full((1, 5, 5, 64), 127, np.int8))
    zero, bias = Const(np.zeros(1, np.int8)), Const(np.zeros(1, np.int32))
    attributes = {"pad": (0, 0, 0, 0), "stride": (1, 1), "dilation": (1, 1), "acc_type": DType.INT32}
    operands = [((1, 5, 5, 64), DType.INT8), weights, bias, zero, zero]
    tosa = single(Op.CONV2D, operands, ((1, 1, 1, 1), DType.INT32), attributes)
    (got,) = run(accelerator, tosa, [np.full((1, 5, 5, 64), -127, np.int8)])
    assert got.reshape(-1).tolist() == [-25806400]


# ---- N8


def test_n8_comparisons_of_large_integers(accelerator: Accelerator) -> None:
    a = np.array([2**24 + 1, 2**24, HIGH, HIGH - 1, LOW, LOW + 1, HIGH, LOW, LOW], np.int32)
    b = np.array([2**24, 2**24 + 1, HIGH - 1, HIGH, LOW + 1, LOW, HIGH, LOW, HIGH], np.int32)
    writer = GraphWriter()
    names = [writer.input("a", a.shape, DType.INT32), writer.input("b", b.shape, DType.INT32)]
    for op in (Op.EQUAL, Op.GREATER, Op.GREATER_EQUAL):
        writer.output(writer.operator(op, names, (a.shape, DType.BOOL)))
    for got, expected in zip(run(accelerator, writer.to_bytes(), [a, b]), (a == b, a > b, a >= b), strict=True):
        np.testing.assert_array_equal(got, expected)


# ---- N9


def rescale(
    shape: tuple[int, ...],
    types: tuple[DType, DType],
    multiplier: list[int],
    shift: list[int],
    zeros: tuple[int, int] = (0, 0),
    unsigned: tuple[bool, bool] = (False, False),
    rounding: RoundingMode = RoundingMode.SINGLE_ROUND,
) -> bytes:
    attributes = {
        "scale32": True, "rounding_mode": rounding, "per_channel": len(multiplier) > 1,
        "input_unsigned": unsigned[0], "output_unsigned": unsigned[1],
    }  # fmt: skip
    scale = [Const(np.array(multiplier, np.int32)), Const(np.array(shift, np.int8))]
    points = [Const(np.array([zero]), dtype) for zero, dtype in zip(zeros, types, strict=True)]
    return single(Op.RESCALE, [(shape, types[0]), *scale, *points], (shape, types[1]), attributes)


def test_n9_rescale_with_single_rounding(accelerator: Accelerator) -> None:
    x = np.array([3, -3, 1, -1, 255, -257, -259, 2**30 - 1], np.int32)
    tosa = rescale(x.shape, (DType.INT32, DType.INT8), [2**30], [31])
    assert run(accelerator, tosa, [x])[0].tolist() == [2, -1, 1, 0, 127, -128, -128, 127]


def test_n9_unsigned_input_is_zero_extended(accelerator: Accelerator) -> None:
    x = np.array([0, 1, 127, 128, 254, 255], np.uint8).view(np.int8)
    tosa = rescale(x.shape, (DType.INT8, DType.INT16), [2**30], [30], zeros=(-1, 0), unsigned=(True, False))
    assert run(accelerator, tosa, [x])[0].tolist() == [-255, -254, -128, -127, -1, 0]


def test_n9_one_scale_for_each_channel_of_the_last_axis(accelerator: Accelerator) -> None:
    x = np.arange(-12, 12, dtype=np.int32).reshape(2, 4, 3) * 100
    tosa = rescale(x.shape, (DType.INT32, DType.INT32), [2**30, 2**29, 3 * 2**28], [30, 30, 30])
    (got,) = run(accelerator, tosa, [x])
    # (x * m + half) >> 30 with m = 2^30, 2^29, 3 * 2^28
    expected = np.stack([x[..., 0], (x[..., 1] + 1) >> 1, (3 * x[..., 2] + 2) >> 2], -1)
    np.testing.assert_array_equal(got, expected)


def expect_refused(accelerator: Accelerator, tosa: bytes, words: tuple[int, ...]) -> str:
    with pytest.raises(Refused) as caught:
        accelerator.offer(tosa, words, "case")
    assert caught.value.status in (Status.INCOMPATIBLE, Status.INVALID_ARGUMENT)
    return str(caught.value)


def test_n9_what_tosa_forbids_is_refused_while_loading(accelerator: Accelerator) -> None:
    shape, unit = (3,), ([2**30], [30])
    integer = to_words(Target(Profile.INTEGER))
    double = rescale(shape, (DType.INT32, DType.INT8), *unit, rounding=RoundingMode.DOUBLE_ROUND)
    for tosa in (
        double,
        rescale(shape, (DType.INT32, DType.INT8), *unit, zeros=(1, 0)),
        rescale(shape, (DType.INT8, DType.INT32), *unit, zeros=(0, 1)),
        rescale(shape, (DType.INT8, DType.INT8), *unit, unsigned=(True, True)),
    ):
        assert "RESCALE" in expect_refused(accelerator, tosa, integer)
    words = target_words(read(double))  # with its extension
    session = accelerator.session
    session.call(session.client.unload_program(accelerator.offer(double, words, "double rounding")))


# ---- N10


def test_n10_division_that_overflows_harms_nothing(accelerator: Accelerator) -> None:
    a, b = np.array([LOW, 777777777], np.int32), np.array([-1, 11], np.int32)
    spec = (a.shape, DType.INT32)
    given = single(Op.INTDIV, [spec, spec], spec)
    for tosa, inputs in ((single(Op.INTDIV, [Const(a), Const(b)], spec), []), (given, [a, b])):
        assert run(accelerator, tosa, inputs)[0][1] == 70707070
        assert accelerator.session.call(accelerator.session.client.get_device_info())


# ---- N12

INSIDE = np.arange(1, 13, dtype=np.float32).reshape(1, 4, 3)
OUTSIDE = [-1, 4, LOW, HIGH]


@pytest.mark.parametrize("constant", [False, True])
def test_n12_gather_of_indices_outside(accelerator: Accelerator, constant: bool) -> None:
    rows = np.array([[*OUTSIDE, 0, 3]], np.int32)
    values, result = (INSIDE.shape, DType.FP32), ((1, 6, 3), DType.FP32)
    tosa = single(Op.GATHER, [values, Const(rows) if constant else (rows.shape, DType.INT32)], result)
    (got,) = run(accelerator, tosa, [INSIDE] if constant else [INSIDE, rows])
    np.testing.assert_array_equal(got[0, 4:], INSIDE[0, [0, 3]])
    assert_known_rows(got, INSIDE)


def test_n12_scatter_of_indices_outside_and_duplicates(accelerator: Accelerator) -> None:
    rows = np.array([[1, 1, *OUTSIDE]], np.int32)
    update = -np.arange(1, 19, dtype=np.float32).reshape(1, 6, 3)
    specs = [(INSIDE.shape, DType.FP32), (rows.shape, DType.INT32), (update.shape, DType.FP32)]
    (got,) = run(accelerator, single(Op.SCATTER, specs, specs[0]), [INSIDE, rows, update])
    np.testing.assert_array_equal(got[0, 2], INSIDE[0, 2])
    assert_known_rows(got, np.concatenate([INSIDE, update], 1))


def assert_known_rows(got: Array, known: Array) -> None:
    """No row from outside: indices outside leave the result open, not what it is made of."""
    rows = [*known[0].tolist(), [0.0, 0.0, 0.0]]
    assert all(row in rows for row in got[0].tolist()), got
