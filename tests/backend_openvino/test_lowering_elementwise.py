"""Floating-point elementwise operators and logic, run on the CPU, against float64 and the reference model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import Const, single
from lowered import run
from numpy.typing import NDArray
from oracle import reference
from precision import UNARY, power_bound, ulp, violations

from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.write import GraphWriter

Array = NDArray[Any]

FLOATS = {DType.FP32: np.dtype(np.float32), DType.FP16: np.dtype(np.float16)}
EDGES = [
    math.nan, math.inf, -math.inf, 0.0, -0.0, 1, -1, 0.5, -0.5, 1.5, 2.5, -2.5, 88, 88.3, 88.4, 88.5, 88.72, 89, -87,
    -87.1, -87.3, -87.5, -88, -103, -104, 1e-8, -1e-8, 6e-8, 1e-10, 3e-39, 1e-40, -1e-40, 1e-45, 3e38, -3e38, 65504,
    65519, 65520, 11.09, 11.1, -17, 1e30,
]  # fmt: skip
ZERO8 = Const(np.zeros(1, np.int8))


def samples(dtype: np.dtype[Any]) -> Array:
    rng = np.random.default_rng(5)
    wide = np.exp(rng.uniform(-90, 88, 8000)) * rng.choice([-1, 1], 8000)
    values = [np.array(EDGES), rng.uniform(-1, 1, 8000), rng.uniform(-10, 10, 8000), rng.uniform(-100, 100, 8000), wide]
    with np.errstate(over="ignore", under="ignore"):
        return np.concatenate(values).astype(dtype)


def _rsqrt(x: Array) -> Array:
    return np.where(x < 0, np.nan, 1 / np.sqrt(x))


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "ABS": np.abs,
    "CEIL": np.ceil,
    "COS": np.cos,
    "ERF": np.vectorize(math.erf),
    "EXP": np.exp,
    "FLOOR": np.floor,
    "LOG": np.log,
    "NEGATE": np.negative,
    "RECIPROCAL": lambda x: 1 / x,
    "RSQRT": _rsqrt,
    "SIGMOID": lambda x: 1 / (1 + np.exp(-x)),
    "SIN": np.sin,
    "TANH": np.tanh,
}


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_one_operand_stay_within_their_bounds(name: str, dtype: DType) -> None:
    x = samples(FLOATS[dtype])
    zeros = [Const(np.zeros(1, FLOATS[dtype]))] * 2 if name == "NEGATE" else []
    (got,) = run(single(Op[name], [(x.shape, dtype), *zeros], (x.shape, dtype)), [x])
    exact = x.astype(np.float64)
    with np.errstate(all="ignore"):
        expected = FUNCTIONS[name](exact)
        bad = violations(got, expected, UNARY[name](got.dtype, exact, expected))
    assert not bad.any(), list(zip(x[bad][:5], got[bad][:5], expected[bad][:5], strict=True))


def test_n6_exp_of_nan_and_around_overflow() -> None:
    x = np.array([np.nan, 88.5, 88.72, 89, -87.5], np.float32)
    (got,) = run(single(Op.EXP, [(x.shape, DType.FP32)], (x.shape, DType.FP32)), [x])
    assert np.isnan(got[0])
    assert got[3] == np.inf
    assert got[[1, 2, 4]] == pytest.approx([math.exp(88.5), math.exp(88.72), math.exp(-87.5)], rel=1e-4)


def test_signs_of_zero_and_infinity_follow_the_tables() -> None:
    x = np.array([-np.inf, np.inf, -0.0, 0.0], np.float32)
    tables = {
        "ABS": [np.inf, np.inf, 0.0, 0.0],
        "CEIL": [-np.inf, np.inf, -0.0, 0.0],
        "FLOOR": [-np.inf, np.inf, -0.0, 0.0],
        "EXP": [0.0, np.inf, 1.0, 1.0],
        "RECIPROCAL": [-0.0, 0.0, -np.inf, np.inf],
        "SIN": [np.nan, np.nan, -0.0, 0.0],
        "COS": [np.nan, np.nan, 1.0, 1.0],
        "SIGMOID": [0.0, 1.0, 0.5, 0.5],
        "TANH": [-1.0, 1.0, -0.0, 0.0],
        "ERF": [-1.0, 1.0, -0.0, 0.0],
        "LOG": [np.nan, np.inf, -np.inf, -np.inf],
        "RSQRT": [np.nan, 0.0, -np.inf, np.inf],
    }
    for name, table in tables.items():
        (got,) = run(single(Op[name], [(x.shape, DType.FP32)], (x.shape, DType.FP32)), [x])
        expected = np.array(table, np.float32)
        assert np.array_equal(got, expected, equal_nan=True), name
        regular = ~np.isnan(expected)
        assert np.array_equal(np.signbit(got[regular]), np.signbit(expected[regular])), name


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("op", [Op.ADD, Op.SUB, Op.MUL], ids=lambda op: op.name)
def test_arithmetic_is_rounded_once(op: Op, dtype: DType) -> None:
    rng = np.random.default_rng(6)
    x = samples(FLOATS[dtype])
    y = rng.permutation(x)
    shift = [ZERO8] if op is Op.MUL else []
    (got,) = run(single(op, [(x.shape, dtype), (x.shape, dtype), *shift], (x.shape, dtype)), [x, y])
    a, b = x.astype(np.float64), y.astype(np.float64)
    with np.errstate(all="ignore"):
        expected = {Op.ADD: a + b, Op.SUB: a - b, Op.MUL: a * b}[op]
        bad = violations(got, expected, ulp(got.dtype, expected) * 0.5)
    assert not bad.any(), list(zip(x[bad][:5], y[bad][:5], got[bad][:5], strict=True))


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
def test_power_stays_within_its_bound(dtype: DType) -> None:
    rng = np.random.default_rng(7)
    x = np.concatenate([np.exp(rng.uniform(-8, 8, 6000)), [0.0, 1.0, 2.0, 5.0, 1e-3]]).astype(FLOATS[dtype])
    y = np.concatenate([rng.uniform(-8, 8, 6000), [0.5, 100.0, 10.0, 0.0, -2.0]]).astype(FLOATS[dtype])
    (got,) = run(single(Op.POW, [(x.shape, dtype), (y.shape, dtype)], (x.shape, dtype)), [x, y])
    with np.errstate(all="ignore"):
        expected = x.astype(np.float64) ** y.astype(np.float64)
        bound = power_bound(got.dtype, x.astype(np.float64), y.astype(np.float64), expected)
    bound = np.where(x == 0, 0, bound)
    bad = violations(got, expected, bound)
    assert not bad.any(), list(zip(x[bad][:5], y[bad][:5], got[bad][:5], strict=True))


def test_broadcasting_over_every_axis_of_rank_6() -> None:
    rng = np.random.default_rng(8)
    shape = (2, 3, 1, 2, 3, 2)
    for axis in range(6):
        other = tuple(1 if i == axis else n for i, n in enumerate(shape))
        a, b = rng.standard_normal(shape).astype(np.float32), rng.standard_normal(other).astype(np.float32)
        (got,) = run(single(Op.SUB, [(other, DType.FP32), (shape, DType.FP32)], (shape, DType.FP32)), [b, a])
        assert np.array_equal(got, b - a)
    scalar = np.array(1.5, np.float32)
    (got,) = run(single(Op.ADD, [((), DType.FP32), ((), DType.FP32)], ((), DType.FP32)), [scalar, scalar])
    assert np.array_equal(got, np.array(3, np.float32))


def _chain(dtype: DType, steps: list[tuple[Op, float]]) -> bytes:
    writer = GraphWriter()
    value = writer.input("x", (5,), dtype)
    for op, number in steps:
        operands = [value, writer.constant(np.full(1, number, FLOATS[dtype]))]
        if op is Op.MUL:
            operands.append(writer.constant(np.zeros(1, np.int8)))
        value = writer.operator(op, operands, ((5,), dtype))
    writer.output(value)
    return writer.to_bytes()


@pytest.mark.parametrize(
    "steps",
    [
        [(Op.ADD, 1e8), (Op.ADD, 0.3)],
        [(Op.ADD, 1e8), (Op.SUB, 1e8)],
        [(Op.SUB, 127.5), (Op.MUL, 0.0078431)],
        [(Op.MUL, 1e30), (Op.MUL, 1e-30)],
        [(Op.MUL, 3.1), (Op.SUB, 2.9), (Op.MUL, 0.1), (Op.ADD, 7.0)],
    ],
    ids=["add-add", "add-sub", "sub-mul", "mul-mul", "mul-sub-mul-add"],
)
def test_constants_of_a_chain_are_not_merged(steps: list[tuple[Op, float]]) -> None:
    x = np.array([-1e8, 127.6, 127.50001, 3, 1e30], np.float32)
    expected = x.astype(np.float64)
    for op, number in steps:
        with np.errstate(over="ignore"):
            step = {Op.ADD: np.add, Op.SUB: np.subtract, Op.MUL: np.multiply}[op]
            expected = step(expected.astype(np.float32), np.float32(number))
    (got,) = run(_chain(DType.FP32, steps), [x])
    # A multiplication followed by an addition may be fused, which rounds once instead of twice.
    assert np.allclose(got, expected, rtol=2e-7, atol=0), (got, expected)


def test_fp16_chains_are_rounded_at_every_operator() -> None:
    rng = np.random.default_rng(9)
    x = (rng.standard_normal(4000) * np.exp(rng.uniform(-12, 8, 4000))).astype(np.float16)
    y = (rng.standard_normal(4000) * np.exp(rng.uniform(-8, 8, 4000))).astype(np.float16)
    x[:6] = [60000, -60000, 6e-8, 1e-6, np.inf, np.nan]
    y[:6] = [60000, -60000, 6e-8, -1e-5, 1, 1]
    writer = GraphWriter()
    a, b = writer.input("a", x.shape, DType.FP16), writer.input("b", x.shape, DType.FP16)
    zero = writer.constant(np.zeros(1, np.int8))
    total = writer.operator(Op.ADD, [a, b], (x.shape, DType.FP16))
    rest = writer.operator(Op.SUB, [total, b], (x.shape, DType.FP16))
    scaled = writer.operator(Op.MUL, [rest, a, zero], (x.shape, DType.FP16))
    again = writer.operator(Op.EQUAL, [rest, a], (x.shape, DType.BOOL))
    writer.output(total, rest, scaled, again)
    tosa = writer.to_bytes()
    for got, expected in zip(run(tosa, [x, y]), reference(tosa, [x, y]), strict=True):
        assert np.array_equal(got, expected, equal_nan=got.dtype != np.bool_)


def test_fp16_zeros_keep_their_sign_between_operators() -> None:
    x = np.array([-np.inf, np.inf, -0.0, 0.0, -60000, 60000], np.float16)
    writer = GraphWriter()
    once = writer.operator(Op.RECIPROCAL, [writer.input("x", x.shape, DType.FP16)], (x.shape, DType.FP16))
    writer.output(writer.operator(Op.RECIPROCAL, [once], (x.shape, DType.FP16)))
    (got,) = run(writer.to_bytes(), [x])
    assert np.array_equal(got, reference(writer.to_bytes(), [x])[0])


@pytest.mark.parametrize("op", [Op.LOGICAL_AND, Op.LOGICAL_OR, Op.LOGICAL_XOR, Op.LOGICAL_NOT], ids=lambda op: op.name)
def test_logic(op: Op) -> None:
    operands = [np.array([[0, 0, 1, 1]], np.bool_), np.array([[0], [1]], np.bool_)][: 1 if op is Op.LOGICAL_NOT else 2]
    shape = np.broadcast_shapes(*(x.shape for x in operands))
    tosa = single(op, [(x.shape, DType.BOOL) for x in operands], (shape, DType.BOOL))
    assert np.array_equal(run(tosa, operands)[0], reference(tosa, operands)[0])
