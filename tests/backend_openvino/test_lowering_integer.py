"""Integer operators, bit for bit, against the reference model and exact arithmetic in wider integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import Const, single
from lowered import run
from numpy.typing import NDArray
from oracle import reference

from virtaccel.backend_openvino.lowering.registry import Refused
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.schema import RoundingMode
from virtaccel.tosa_graph.write import GraphWriter

Array = NDArray[Any]

KINDS = {DType.INT8: np.dtype(np.int8), DType.INT16: np.dtype(np.int16), DType.INT32: np.dtype(np.int32)}
EVERY_TYPE = pytest.mark.parametrize("dtype", KINDS, ids=lambda dtype: dtype.name)
LOW, HIGH = -(2**31), 2**31 - 1
EDGES = [
    0, 1, -1, 2, -2, 3, 7, -7, 255, 65535, 65536, -65536, 2**24, 2**24 + 1, -(2**24) - 1, LOW, LOW + 1, HIGH, HIGH - 1,
]  # fmt: skip


def pairs(count: int = 4000, seed: int = 51) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    a, b = (part.ravel() for part in np.meshgrid(EDGES, EDGES))
    size = np.exp2(rng.uniform(0, 31, (2, count))) * rng.choice([-1, 1], (2, count))
    return np.concatenate([a, size[0]]).astype(np.int32), np.concatenate([b, size[1]]).astype(np.int32)


def binary(op: Op, a: Array, b: Array, dtype: DType, out: DType | None = None, **attributes: int) -> Array:
    shift = [Const(np.zeros(1, np.int8))] if op is Op.MUL else []
    tosa = single(op, [(a.shape, dtype), (b.shape, dtype), *shift], (a.shape, out or dtype), attributes)
    return run(tosa, [a, b])[0]


def wrap32(x: Array) -> Array:
    return (x & 0xFFFFFFFF).astype(np.uint32).view(np.int32)


def test_int32_sums_differences_products_wrap() -> None:
    a, b = pairs()
    wide = a.astype(np.int64), b.astype(np.int64)
    assert np.array_equal(binary(Op.ADD, a, b, DType.INT32), wrap32(wide[0] + wide[1]))
    assert np.array_equal(binary(Op.SUB, a, b, DType.INT32), wrap32(wide[0] - wide[1]))
    assert np.array_equal(binary(Op.MUL, a, b, DType.INT32), wrap32(wide[0] * wide[1]))


@pytest.mark.parametrize("dtype", [DType.INT8, DType.INT16], ids=lambda dtype: dtype.name)
def test_products_of_narrow_integers(dtype: DType) -> None:
    rng = np.random.default_rng(52)
    info = np.iinfo(KINDS[dtype])
    a, b = rng.integers(info.min, info.max + 1, (2, 3000)).astype(KINDS[dtype])
    a[:3], b[:3] = [info.min, info.min, info.max], [info.min, info.max, info.max]
    assert np.array_equal(binary(Op.MUL, a, b, dtype, DType.INT32), a.astype(np.int32) * b.astype(np.int32))


@pytest.mark.parametrize("shift", [1, 2, 15, 16, 17, 18, 30, 31, 32, 33, 47, 48, 49, 61, 62])
def test_products_with_a_shift_are_rounded_in_64_bits(shift: int) -> None:
    a, b = pairs()
    product = [int(x) * int(y) for x, y in zip(a, b, strict=True)]
    expected = np.array([(value + (1 << (shift - 1))) >> shift for value in product], object)
    fits = np.array([LOW <= value <= HIGH for value in expected])  # others TOSA leaves open
    a, b, expected = a[fits], b[fits], expected[fits].astype(np.int32)
    operands = [(a.shape, DType.INT32), (b.shape, DType.INT32), Const(np.array([shift], np.int8))]
    (got,) = run(single(Op.MUL, operands, (a.shape, DType.INT32)), [a, b])
    assert np.array_equal(got, expected)


def test_n10_integer_division() -> None:
    a, b = pairs(20000)
    possible = (b != 0) & ~((a == LOW) & (b == -1))
    a, b = a[possible], b[possible]
    expected = np.trunc(a.astype(np.longdouble) / b).astype(np.int64).astype(np.int32)
    assert np.array_equal(binary(Op.INTDIV, a, b, DType.INT32), expected)
    known = single(Op.INTDIV, [Const(np.array([LOW, 777777777], np.int32)), Const(np.array([-1, 11], np.int32))],
                   ((2,), DType.INT32))  # fmt: skip
    assert run(known, [])[0][1] == 70707070
    zeros = np.zeros(3, np.int32)
    binary(Op.INTDIV, np.array([1, LOW, 0], np.int32), zeros, DType.INT32)  # any value, but no trap


@EVERY_TYPE
def test_shifts(dtype: DType) -> None:
    rng = np.random.default_rng(53)
    kind, bits = KINDS[dtype], KINDS[dtype].itemsize * 8
    a = rng.integers(np.iinfo(kind).min, np.iinfo(kind).max + 1, 2000).astype(kind)
    a[:5] = [np.iinfo(kind).min, np.iinfo(kind).max, -1, 0, 1]
    b = rng.integers(0, bits, 2000).astype(kind)
    b[:5] = bits - 1
    spec = (a.shape, dtype)
    for op, attributes in (
        (Op.ARITHMETIC_RIGHT_SHIFT, {"round": False}),
        (Op.ARITHMETIC_RIGHT_SHIFT, {"round": True}),
        (Op.LOGICAL_LEFT_SHIFT, {}),
        (Op.LOGICAL_RIGHT_SHIFT, {}),
    ):
        tosa = single(op, [spec, spec], spec, attributes)
        assert np.array_equal(run(tosa, [a, b])[0], reference(tosa, [a, b])[0]), (op, attributes)


@EVERY_TYPE
def test_bitwise(dtype: DType) -> None:
    rng = np.random.default_rng(54)
    info = np.iinfo(KINDS[dtype])
    a, b = rng.integers(info.min, info.max + 1, (2, 2000)).astype(KINDS[dtype])
    for op, expected in ((Op.BITWISE_AND, a & b), (Op.BITWISE_OR, a | b), (Op.BITWISE_XOR, a ^ b)):
        assert np.array_equal(binary(op, a, b, dtype), expected)
    assert np.array_equal(run(single(Op.BITWISE_NOT, [(a.shape, dtype)], (a.shape, dtype)), [a])[0], ~a)


def test_leading_zeros_and_absolute_values() -> None:
    a, _ = pairs()
    powers = np.int64(1) << np.arange(32)
    a = np.concatenate([a, powers[:31], powers - 1]).astype(np.int32)
    expected = [32 - (int(value) & 0xFFFFFFFF).bit_length() for value in a]
    spec = (a.shape, DType.INT32)
    assert run(single(Op.CLZ, [spec], spec), [a])[0].tolist() == expected
    magnitudes = a[a != LOW]
    spec = (magnitudes.shape, DType.INT32)
    assert np.array_equal(run(single(Op.ABS, [spec], spec), [magnitudes])[0], np.abs(magnitudes))


@pytest.mark.parametrize("zeros", [(0, 0), (-128, -128), (127, 127), (-128, 127), (5, -9)])
def test_negate_int8_with_zero_points(zeros: tuple[int, int]) -> None:
    x = np.arange(-128, 128).astype(np.int8)
    operands = [(x.shape, DType.INT8), *(Const(np.array([zero], np.int8)) for zero in zeros)]
    tosa = single(Op.NEGATE, operands, (x.shape, DType.INT8))
    expected = np.clip(-(x.astype(int) - zeros[0]) + zeros[1], -128, 127)
    assert np.array_equal(run(tosa, [x])[0], expected)


@pytest.mark.parametrize("dtype", [DType.INT16, DType.INT32], ids=lambda dtype: dtype.name)
def test_negate_wider_integers(dtype: DType) -> None:
    info = np.iinfo(KINDS[dtype])
    x = np.array([info.min + (dtype is DType.INT32), info.max, 0, 1, -1, 2**24 % info.max, info.max - 1], KINDS[dtype])
    zero = Const(np.zeros(1, KINDS[dtype]))
    expected = np.clip(-x.astype(np.int64), info.min, info.max)
    assert np.array_equal(run(single(Op.NEGATE, [(x.shape, dtype), zero, zero], (x.shape, dtype)), [x])[0], expected)


@pytest.mark.parametrize("constant", [True, False])
def test_tables(constant: bool) -> None:
    rng = np.random.default_rng(55)
    x = np.arange(-128, 128).astype(np.int8).reshape(2, 128)
    table = rng.integers(-128, 128, 256).astype(np.int8)
    operand, rest = (Const(table), []) if constant else (((256,), DType.INT8), [table])
    tosa = single(Op.TABLE, [(x.shape, DType.INT8), operand], (x.shape, DType.INT8))
    assert np.array_equal(run(tosa, [x, *rest])[0], table[x.astype(int) + 128])
    wide = np.concatenate([rng.integers(-32768, 32768, 4000), [-32768, 32767]]).astype(np.int16)
    steps = np.cumsum(rng.integers(-60, 60, 513)).astype(np.int16)
    operand, rest = (Const(steps), []) if constant else (((513,), DType.INT16), [steps])
    tosa = single(Op.TABLE, [(wide.shape, DType.INT16), operand], (wide.shape, DType.INT32))
    assert np.array_equal(run(tosa, [wide, *rest])[0], reference(tosa, [wide, *rest])[0])


# ---- RESCALE


def rescale(
    shape: tuple[int, ...],
    source: DType,
    target: DType,
    multiplier: Array,
    shift: Array,
    zeros: tuple[int, int] = (0, 0),
    rounding: RoundingMode = RoundingMode.SINGLE_ROUND,
    scale32: bool = True,
    unsigned: tuple[bool, bool] = (False, False),
) -> bytes:
    attributes = {
        "scale32": scale32, "rounding_mode": rounding, "per_channel": multiplier.size > 1,
        "input_unsigned": unsigned[0], "output_unsigned": unsigned[1],
    }  # fmt: skip
    in_zero, out_zero = (
        np.array([zero]).astype(KINDS[dtype]) for zero, dtype in zip(zeros, (source, target), strict=True)
    )
    operands = [
        (shape, source), Const(multiplier.astype(np.int32 if scale32 else np.int16)), Const(shift.astype(np.int8)),
        Const(in_zero), Const(out_zero),
    ]  # fmt: skip
    return single(Op.RESCALE, operands, (shape, target), attributes)


def test_n9_single_rounding_to_int8() -> None:
    x = np.array([3, -3, 1, -1, 255, -257, -259, 2**30 - 1], np.int32)
    tosa = rescale(x.shape, DType.INT32, DType.INT8, np.array([1 << 30]), np.array([31]))
    assert run(tosa, [x])[0].tolist() == [2, -1, 1, 0, 127, -128, -128, 127]


def test_n9_uint8_is_zero_extended() -> None:
    x = np.array([0, 1, 127, 128, 254, 255], np.uint8).view(np.int8)
    unit = np.array([1 << 30]), np.array([30])
    tosa = rescale(x.shape, DType.INT8, DType.INT16, *unit, zeros=(255, 0), unsigned=(True, False))
    assert run(tosa, [x])[0].tolist() == [-255, -254, -128, -127, -1, 0]


def test_n9_what_tosa_forbids_is_refused() -> None:
    unit = np.array([1 << 30]), np.array([30])
    x = np.zeros(3, np.int32)
    for tosa in (
        rescale(x.shape, DType.INT32, DType.INT8, *unit, zeros=(1, 0)),
        rescale(x.shape, DType.INT8, DType.INT32, *unit, zeros=(0, 1)),
        rescale(x.shape, DType.INT8, DType.INT8, *unit, unsigned=(True, True)),
        rescale(x.shape, DType.INT8, DType.INT32, *unit, unsigned=(True, False)),
        rescale(x.shape, DType.INT16, DType.INT8, *unit, zeros=(7, 0), unsigned=(True, False)),
        rescale(
            x.shape, DType.INT32, DType.INT8, np.array([5]), np.array([14]), (0, 0), RoundingMode.DOUBLE_ROUND, False
        ),
        rescale(x.shape, DType.INT32, DType.INT8, np.array([-5]), np.array([14])),
        rescale(x.shape, DType.INT32, DType.INT8, np.array([5]), np.array([63])),
    ):
        with pytest.raises(Refused, match="RESCALE"):
            run(tosa, [x])


SHIFTS = (4, 8, 15, 16), (17, 20, 29, 30, 31), (32, 33, 37, 46, 47, 48, 55, 62), (9, 31, 32, 40)
MULTIPLIERS = (1 << 30, 0x7FFFFFFF, 0x5A827999, 1)


def _spread(source: DType, shift: Array, rows: int = 400) -> Array:
    """(rows, channels) operands of every size for which TOSA defines the result: less than 2^(shift-1)."""
    rng = np.random.default_rng(56)
    info = np.iinfo(KINDS[source])
    x = np.exp2(rng.uniform(0, 31, (rows, shift.size))) * rng.choice([-1, 1], (rows, shift.size))
    x[:5] = np.array([info.min, info.max, 0, 1, -1])[:, None]
    limit = np.exp2(np.minimum(shift - 2, 31))
    return np.clip(np.clip(x, -limit, limit - 1), info.min, info.max).astype(KINDS[source])


@pytest.mark.parametrize("rounding", [RoundingMode.SINGLE_ROUND, RoundingMode.DOUBLE_ROUND], ids=lambda mode: mode.name)
@pytest.mark.parametrize("target", KINDS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("source", KINDS, ids=lambda dtype: dtype.name)
def test_rescale_with_32_bit_scales(source: DType, target: DType, rounding: RoundingMode) -> None:
    zeros = (-3 if source is DType.INT8 else 0, 11 if target is DType.INT8 else 0)
    for shifts in SHIFTS:
        shift, multiplier = (part.ravel() for part in np.meshgrid(shifts, MULTIPLIERS))
        x = _spread(source, shift)
        tosa = rescale(x.shape, source, target, multiplier, shift, zeros, rounding)
        assert np.array_equal(run(tosa, [x])[0], reference(tosa, [x])[0]), shifts
    tosa = rescale(x.shape, source, target, np.array([0x5A827999]), np.array([34]), zeros, rounding)
    assert np.array_equal(run(tosa, [x])[0], reference(tosa, [x])[0])


@pytest.mark.parametrize("source", KINDS, ids=lambda dtype: dtype.name)
def test_rescale_with_16_bit_scales(source: DType) -> None:
    info = np.iinfo(KINDS[source])
    shift, multiplier = (part.ravel() for part in np.meshgrid((15, 16, 17, 31, 40), (1 << 14, 0x7FFF, 3)))
    x = np.random.default_rng(57).integers(info.min, info.max + 1, (400, shift.size)).astype(KINDS[source])
    for target in KINDS:
        tosa = rescale(x.shape, source, target, multiplier, shift, scale32=False)
        assert np.array_equal(run(tosa, [x])[0], reference(tosa, [x])[0]), target


def test_rescale_of_each_channel_in_any_layout() -> None:
    rng = np.random.default_rng(58)
    x = rng.integers(-(2**20), 2**20, (2, 3, 4, 6)).astype(np.int32)
    multiplier = rng.integers(1 << 30, 1 << 31, 6)
    shift = np.array([31, 33, 30, 40, 47, 35])
    tosa = rescale(x.shape, DType.INT32, DType.INT8, multiplier, shift, (0, -5))
    assert np.array_equal(run(tosa, [x])[0], reference(tosa, [x])[0])
    writer = GraphWriter()
    stored = np.ascontiguousarray(np.transpose(x, (0, 3, 1, 2)))
    turned = writer.operator(
        Op.TRANSPOSE, [writer.input("x", stored.shape, DType.INT32)], (x.shape, DType.INT32), {"perms": (0, 2, 3, 1)}
    )
    constants = [multiplier.astype(np.int32), shift.astype(np.int8), np.zeros(1, np.int32), np.array([-5], np.int8)]
    attributes = {"scale32": True, "rounding_mode": RoundingMode.SINGLE_ROUND, "per_channel": True}
    names = [turned, *(writer.constant(array) for array in constants)]
    writer.output(writer.operator(Op.RESCALE, names, (x.shape, DType.INT8), attributes))
    assert np.array_equal(run(writer.to_bytes(), [stored])[0], reference(tosa, [x])[0])


@pytest.mark.parametrize(
    ("source", "target"), [(DType.INT8, DType.INT8), (DType.INT16, DType.INT16), (DType.INT8, DType.INT16)]
)
@pytest.mark.parametrize("unsigned", [(True, False), (False, True)], ids=["from unsigned", "to unsigned"])
def test_rescale_unsigned(source: DType, target: DType, unsigned: tuple[bool, bool]) -> None:
    rng = np.random.default_rng(59)
    info = np.iinfo(KINDS[source])
    x = rng.integers(info.min, info.max + 1, 1000).astype(KINDS[source])
    wide = {DType.INT8: 128, DType.INT16: 32768}
    zeros = (wide[source] if unsigned[0] else 0, wide[target] if unsigned[1] else 0)
    for multiplier, shift in ((1 << 30, 30), (0x7000_0000, 31), (1 << 30, 29)):
        tosa = rescale(x.shape, source, target, np.array([multiplier]), np.array([shift]), zeros, unsigned=unsigned)
        assert np.array_equal(run(tosa, [x])[0], reference(tosa, [x])[0])


def test_a_quantised_addition_as_converters_write_it() -> None:
    """Chains of integer operators fuse in the CPU plugin; the result must stay that of each by itself."""
    rng = np.random.default_rng(60)
    a, b = rng.integers(-128, 128, (2, 2, 7, 9, 16)).astype(np.int8)
    writer = GraphWriter()
    x, y = writer.input("a", a.shape, DType.INT8), writer.input("b", b.shape, DType.INT8)
    zero8, zero32 = writer.constant(np.zeros(1, np.int8)), writer.constant(np.zeros(1, np.int32))

    def scaled(name: str, source: DType, target: DType, multiplier: int, shift: int) -> str:
        scale = writer.constant(np.array([multiplier], np.int32)), writer.constant(np.array([shift], np.int8))
        zeros = [zero8 if dtype is DType.INT8 else zero32 for dtype in (source, target)]
        attributes = {"scale32": True, "rounding_mode": RoundingMode.DOUBLE_ROUND}
        return writer.operator(Op.RESCALE, [name, *scale, *zeros], (a.shape, target), attributes)

    left = scaled(x, DType.INT8, DType.INT32, 1073741824, 11)
    right = scaled(y, DType.INT8, DType.INT32, 1879048192, 12)
    total = writer.operator(Op.ADD, [left, right], (a.shape, DType.INT32))
    larger = writer.operator(Op.MAXIMUM, [total, left], (a.shape, DType.INT32), {"nan_mode": 1})
    chosen = writer.operator(Op.GREATER, [larger, right], (a.shape, DType.BOOL))
    mixed = writer.operator(Op.SELECT, [chosen, total, larger], (a.shape, DType.INT32))
    writer.output(scaled(mixed, DType.INT32, DType.INT8, 1518500250, 50), mixed)
    tosa = writer.to_bytes()
    for got, expected in zip(run(tosa, [a, b]), reference(tosa, [a, b]), strict=True):
        assert np.array_equal(got, expected)
