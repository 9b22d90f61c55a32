"""Every single-operator graph of the shared fixtures: the reference model's answer, or a refusal that says why.

Bit for bit where TOSA is exact, otherwise within the operator's bound around float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from lowered import run
from numpy.typing import NDArray
from oracle import reference
from precision import UNARY, Bound, power_bound, product_bound, sum_bound, violations

from virtaccel.backend_openvino.lowering.registry import Refused
from virtaccel.tosa_graph.elements import CARRIER
from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import DType, Op, Operator, Tensor

Array = NDArray[Any]

REFUSED: dict[str, str] = {}
"""Fixtures that are refused, with what the reason must say. None is."""

_FLOAT64: dict[Op, Callable[[Array], Array]] = {
    Op.COS: np.cos,
    Op.ERF: np.vectorize(math.erf),
    Op.EXP: np.exp,
    Op.LOG: np.log,
    Op.RECIPROCAL: lambda x: 1 / x,
    Op.RSQRT: lambda x: 1 / np.sqrt(x),
    Op.SIGMOID: lambda x: 1 / (1 + np.exp(-x)),
    Op.SIN: np.sin,
    Op.TANH: np.tanh,
}


def _operand(tensor: Tensor, op: Op, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    kind = CARRIER[tensor.dtype]
    if kind == np.bool_:
        return rng.random(tensor.shape) < 0.5
    if kind.kind == "i":
        low, high = (-7, 8) if tensor.dtype is DType.INT4 else (np.iinfo(kind).min, np.iinfo(kind).max + 1)
        return rng.integers(low, high, tensor.shape).astype(kind)
    if tensor.dtype in (DType.FP8E4M3, DType.FP8E5M2):
        return rng.choice([-1.5, 0.0, 0.25, 16.0, -0.125], tensor.shape).astype(kind)
    x = rng.uniform(-3, 3, tensor.shape).astype(kind)
    if op in (Op.POW, Op.LOG, Op.RSQRT):
        return np.abs(x) + kind.type(0.25)
    if op is not Op.MATMUL and x.size > 3:
        x.reshape(-1)[seed % 2 * 2] = np.nan
        x.reshape(-1)[1] = np.inf
    return x


def _bounded(operator: Operator, inputs: list[Array], got: Array) -> tuple[Array, Array | float] | None:
    """Expected value in float64 and allowed error; None where TOSA is exact."""
    exact = [x.astype(np.float64) for x in inputs]
    name, op = operator.op.name, operator.op
    if op in _FLOAT64:
        expected = _FLOAT64[op](exact[0])
        bound: Bound = UNARY[name]
        return expected, bound(got.dtype, exact[0], expected)
    if op is Op.POW:
        expected = exact[0] ** exact[1]
        return expected, power_bound(got.dtype, *np.broadcast_arrays(*exact), expected)
    if op in (Op.REDUCE_SUM, Op.REDUCE_PRODUCT):
        axis = operator.attributes["axis"]
        assert isinstance(axis, int)
        if op is Op.REDUCE_SUM:
            return exact[0].sum(axis, keepdims=True), sum_bound(got.dtype, inputs[0], axis)
        expected = exact[0].prod(axis, keepdims=True)
        return expected, product_bound(got.dtype, expected, inputs[0].shape[axis])
    if op is Op.MATMUL and got.dtype.kind == "f":
        depth = inputs[0].shape[2]
        rounding = 2.0 ** -(11 if got.dtype == np.float16 else 24)
        return exact[0] @ exact[1], 2 * depth * rounding * (np.abs(exact[0]) @ np.abs(exact[1]))
    return None


def _assert_right(path: Path) -> None:
    tosa = path.read_bytes()
    graph = read(tosa)
    operator = [one for one in graph.main.operators if one.op not in (Op.CONST, Op.CONST_SHAPE)][-1]
    small = all(np.prod(tensor.shape) < 1 << 20 for tensor in graph.inputs)
    for seed in (0, 1) if small else (0,):
        inputs = [_operand(tensor, operator.op, seed + 2 * i) for i, tensor in enumerate(graph.inputs)]
        (got,) = run(tosa, inputs)
        with np.errstate(all="ignore"):
            judged = _bounded(operator, inputs, got)
            if judged is None:
                # The reference model does not take INT4 operands from outside; IDENTITY needs no oracle.
                expected = inputs[0] if operator.op is Op.IDENTITY else reference(tosa, inputs)[0]
                assert np.array_equal(got, expected, equal_nan=got.dtype.kind == "f"), (path.name, got, expected)
            else:
                assert not violations(got, *judged).any(), (path.name, got, judged)


def test_every_fixture_is_right_or_refused(shared: Path) -> None:
    paths = sorted((shared / "fixtures" / "tosa").glob("*.tosa"))
    assert paths
    refused: dict[str, str] = {}
    for path in paths:
        try:
            _assert_right(path)
        except Refused as reason:
            refused[path.name] = str(reason)
    print(f"{len(paths) - len(refused)} of {len(paths)} fixtures right, refused: {refused or 'none'}")
    assert refused.keys() == REFUSED.keys()
    assert all(text in refused[name] for name, text in REFUSED.items())
