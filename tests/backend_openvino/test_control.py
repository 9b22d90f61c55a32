"""COND_IF and WHILE_LOOP against Arm's reference model, and through the device where runs have to end."""

from __future__ import annotations

import lowered
import numpy as np
import oracle
import pytest

from virtaccel.backend_openvino import open_backend
from virtaccel.backend_openvino.lowering import builder
from virtaccel.backend_openvino.lowering.builder import MAX_REGIONS, lower
from virtaccel.backend_openvino.lowering.registry import Refused
from virtaccel.guest_tools.arrays.accelerator import Accelerator
from virtaccel.guest_tools.errors import ExecutionFailed
from virtaccel.guest_tools.session import Session
from virtaccel.guest_tools.transport.in_process import InProcessTransport
from virtaccel.tosa_graph.elements import pack, unpack
from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.write import GraphWriter, Spec

I32 = ((3,), DType.INT32)
COUNT = ((), DType.INT32)
FLAG = ((), DType.BOOL)
NUMPY: dict[DType, type[np.generic]] = {
    DType.BOOL: np.bool_,
    DType.INT8: np.int8,
    DType.INT16: np.int16,
    DType.INT32: np.int32,
    DType.FP32: np.float32,
    DType.FP16: np.float16,
}


def assert_like_reference(tosa: bytes, *inputs: np.ndarray) -> None:
    for got, want in zip(lowered.run(tosa, inputs), oracle.reference(tosa, inputs), strict=True):
        np.testing.assert_array_equal(got, want)


# ---- COND_IF


def choice(dtype: DType) -> bytes:
    """Two values, and a condition: as they are with a third that is constant, or exchanged with one of them again."""
    spec = ((2, 3), dtype)
    writer = GraphWriter()
    condition, a, b = writer.input("condition", (1,), DType.BOOL), writer.input("a", *spec), writer.input("b", *spec)
    writer.output(
        *writer.operator(Op.COND_IF, [condition, a, b], [spec] * 3, {"then_graph": "then", "else_graph": "else"})
    )
    then, other = writer.region("then"), writer.region("else")
    x, y = then.input("x", *spec), then.input("y", *spec)
    then.output(x, y, then.constant(np.ones((2, 3)), dtype))
    x, y = other.input("x", *spec), other.input("y", *spec)
    other.output(y, x, other.operator(Op.IDENTITY, [x], spec))
    return writer.to_bytes()


@pytest.mark.parametrize("dtype", NUMPY)
def test_cond_if_passes_on_and_exchanges(dtype: DType) -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.integers(0, 2, (2, 3)).astype(NUMPY[dtype]) for _ in range(2))
    for condition in (True, False):
        assert_like_reference(choice(dtype), np.array([condition]), a, b)


def test_cond_if_in_cond_if() -> None:
    writer = GraphWriter()
    outer, inner = writer.input("outer", (), DType.BOOL), writer.input("inner", (), DType.BOOL)
    x = writer.input("x", *I32)
    names = {"then_graph": "nested", "else_graph": "plus"}
    writer.output(writer.operator(Op.COND_IF, [outer, inner, x], [I32], names)[0])
    for name, sign in (("plus", Op.ADD), ("minus", Op.SUB)):
        region = writer.region(name)
        if name == "plus":
            region.input("unused", (), DType.BOOL)
        value = region.input("value", *I32)
        region.output(region.operator(sign, [value, region.constant(np.full(3, 5, np.int32))], I32))
    nested = writer.region("nested")
    flag, value = nested.input("flag", (), DType.BOOL), nested.input("value", *I32)
    doubled = nested.operator(Op.ADD, [value, value], I32)
    nested.output(
        nested.operator(Op.COND_IF, [flag, doubled], [I32], {"then_graph": "minus", "else_graph": "minus"})[0]
    )
    x_values = np.array([1, -7, 1 << 30], np.int32) // 2
    for flags in ((True, True), (True, False), (False, True)):
        assert_like_reference(writer.to_bytes(), *(np.array(flag) for flag in flags), x_values)


# ---- WHILE_LOOP


def loop_regions(writer: GraphWriter, names: tuple[str, ...], specs: list[Spec], limit: int) -> None:
    """The region `below`: the first value is less than `limit`."""
    below = writer.region("below")
    first, *_ = [below.input(name, *spec) for name, spec in zip(names, specs, strict=True)]
    below.output(below.operator(Op.GREATER, [below.constant(np.array(limit, np.int32)), first], FLAG))


def exchanging(dtype: DType) -> bytes:
    """Counts up to 4; each iteration exchanges two values and gives a constant for a third."""
    spec = ((2, 3), dtype)
    specs = [COUNT, spec, spec, spec]
    names = ("count", "a", "b", "c")
    writer = GraphWriter()
    inputs = [writer.input(name, *one) for name, one in zip(names, specs, strict=True)]
    writer.output(*writer.operator(Op.WHILE_LOOP, inputs, specs, {"cond_graph": "below", "body_graph": "body"}))
    body = writer.region("body")
    count, a, b, _ = [body.input(name, *one) for name, one in zip(names, specs, strict=True)]
    more = body.operator(Op.ADD, [count, body.constant(np.array(1, np.int32))], COUNT)
    body.output(more, b, a, body.constant(np.ones((2, 3)), dtype))
    loop_regions(writer, names, specs, 4)
    return writer.to_bytes()


@pytest.mark.parametrize("dtype", NUMPY)
def test_while_loop_exchanges_values_at_any_number_of_iterations(dtype: DType) -> None:
    rng = np.random.default_rng(1)
    values = [rng.integers(0, 2, (2, 3)).astype(NUMPY[dtype]) for _ in range(3)]
    for start in (9, 4, 3, 2, 1, 0):
        assert_like_reference(exchanging(dtype), np.array(start, np.int32), *values)


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
def test_short_floats_are_rounded_in_every_iteration(dtype: DType) -> None:
    """Bodies of loops run other kernels than the main graph: x and y are added and multiplied up to overflow."""
    spec = ((4, 300), dtype)
    specs, names = [COUNT, spec, spec], ("count", "x", "y")
    writer = GraphWriter()
    inputs = [writer.input(name, *one) for name, one in zip(names, specs, strict=True)]
    writer.output(*writer.operator(Op.WHILE_LOOP, inputs, specs, {"cond_graph": "below", "body_graph": "body"}))
    body = writer.region("body")
    count, x, y = [body.input(name, *one) for name, one in zip(names, specs, strict=True)]
    more = body.operator(Op.ADD, [count, body.constant(np.array(1, np.int32))], COUNT)
    shift = body.constant(np.zeros(1, np.int8))
    body.output(more, body.operator(Op.ADD, [x, y], spec), body.operator(Op.MUL, [y, x, shift], spec))
    loop_regions(writer, names, specs, 4)
    rng = np.random.default_rng(1)
    highest = 12 if dtype is DType.FP16 else 120
    x_values, y_values = (rng.normal(size=spec[0]) * 2.0 ** rng.uniform(-6, highest, spec[0]) for _ in range(2))
    narrow = [unpack(pack(values.astype(np.float32), dtype), dtype, spec[0]) for values in (x_values, y_values)]
    assert_like_reference(writer.to_bytes(), np.array(0, np.int32), *narrow)


def counting(limit: int, step: int = 1) -> bytes:
    """Adds `step` until `limit` is reached; doubles a vector each time."""
    specs = [COUNT, I32]
    writer = GraphWriter()
    inputs = [writer.input("count", *COUNT), writer.input("x", *I32)]
    writer.output(*writer.operator(Op.WHILE_LOOP, inputs, specs, {"cond_graph": "below", "body_graph": "body"}))
    body = writer.region("body")
    count, x = body.input("count", *COUNT), body.input("x", *I32)
    more = body.operator(Op.ADD, [count, body.constant(np.array(step, np.int32))], COUNT)
    body.output(more, body.operator(Op.ADD, [x, x], I32))
    loop_regions(writer, ("count", "x"), specs, limit)
    return writer.to_bytes()


def test_while_loop_in_a_loop_and_behind_a_layout() -> None:
    """Powers by repeated doubling: the outer loop runs the inner one three times, and turns the vector round."""
    specs = [COUNT, I32]
    writer = GraphWriter()
    inputs = [writer.input("count", *COUNT), writer.input("x", *I32)]
    writer.output(*writer.operator(Op.WHILE_LOOP, inputs, specs, {"cond_graph": "below", "body_graph": "outer"}))
    outer = writer.region("outer")
    count, x = outer.input("count", *COUNT), outer.input("x", *I32)
    zero = outer.constant(np.array(0, np.int32))
    _, doubled = outer.operator(Op.WHILE_LOOP, [zero, x], specs, {"cond_graph": "below", "body_graph": "inner"})
    turned = outer.operator(Op.REVERSE, [doubled], I32, {"axis": 0})
    outer.output(outer.operator(Op.ADD, [count, outer.constant(np.array(1, np.int32))], COUNT), turned)
    inner = writer.region("inner")
    count, x = inner.input("count", *COUNT), inner.input("x", *I32)
    more = inner.operator(Op.ADD, [count, inner.constant(np.array(1, np.int32))], COUNT)
    inner.output(more, inner.operator(Op.ADD, [x, x], I32))
    loop_regions(writer, ("count", "x"), specs, 3)
    assert_like_reference(writer.to_bytes(), np.array(0, np.int32), np.array([1, 2, -3], np.int32))


def test_regions_called_from_many_places_do_not_explode() -> None:
    """Each region calls the next one twice: 2^20 copies, if nobody counts."""
    writer = GraphWriter()
    condition, x = writer.input("condition", (), DType.BOOL), writer.input("x", *I32)
    depth = 20
    writer.output(*writer.operator(Op.COND_IF, [condition, condition, x], [I32], dict.fromkeys(BRANCHES, "r0")))
    for level in range(depth):
        region = writer.region(f"r{level}")
        flag, value = region.input("flag", (), DType.BOOL), region.input("value", *I32)
        if level + 1 < depth:
            names = dict.fromkeys(BRANCHES, f"r{level + 1}")
            (value,) = region.operator(Op.COND_IF, [flag, flag, value], [I32], names)
        region.output(value)
    with pytest.raises(Refused, match=str(MAX_REGIONS)):
        lower(read(writer.to_bytes()))


BRANCHES = ("then_graph", "else_graph")


# ---- through the device


def test_an_endless_loop_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "MAX_STEPS", 5000)
    with Accelerator(Session(InProcessTransport(lambda: open_backend("CPU")))) as accelerator:
        program = accelerator.load(counting(4), "counting")
        got = program(np.array(1, np.int32), np.array([1, 2, 3], np.int32))
        assert got[0] == 4
        np.testing.assert_array_equal(got[1], [8, 16, 24])
        endless = accelerator.load(counting(4, step=0), "endless")
        with pytest.raises(ExecutionFailed):
            endless(np.array(1, np.int32), np.array([1, 2, 3], np.int32))
        assert program(np.array(3, np.int32), np.array([1, 2, 3], np.int32))[0] == 4


def test_variables_written_in_loops_and_branches() -> None:
    with Accelerator(Session(InProcessTransport(lambda: open_backend("CPU")))) as accelerator:
        accumulating = accelerator.load(accumulator(), "accumulator")
        state = accumulating.new_state()
        total = 0.0
        for count, flag in ((3, True), (2, False), (0, True)):
            (seen,) = accumulating(np.array(count, np.int32), np.array(flag), state=state)
            total += max(4 - count, 0) + (100.0 if flag else 0.0)
            assert seen == total
            assert state.read()["total"] == total


def accumulator() -> bytes:
    """A variable that a loop adds 1 to until its count is 4, and a branch 100 to or nothing."""
    total = ((), DType.FP32)
    writer = GraphWriter()
    start, flag = writer.input("start", *COUNT), writer.input("flag", (), DType.BOOL)
    state = writer.variable(np.array(0, np.float32), name="total")
    writer.place(Op.VARIABLE, [], [state])
    names = {"cond_graph": "below", "body_graph": "body"}
    (count,) = writer.operator(Op.WHILE_LOOP, [start], [COUNT], names)
    writer.operator(Op.COND_IF, [flag, count], [COUNT], {"then_graph": "add", "else_graph": "pass"})
    seen = writer.tensor("seen", *total)
    writer.place(Op.VARIABLE_READ, [state], [seen])
    writer.output(seen)
    for name, amount in (("body", 1.0), ("add", 100.0)):
        region = writer.region(name)
        value = region.input("value", *COUNT)
        inner = region.tensor("inner", *total, variable="total")
        old = region.tensor("old", *total)
        region.place(Op.VARIABLE_READ, [inner], [old])
        new = region.operator(Op.ADD, [old, region.constant(np.array(amount, np.float32))], total)
        region.place(Op.VARIABLE_WRITE, [new], [inner])
        region.output(region.operator(Op.ADD, [value, region.constant(np.array(1, np.int32))], COUNT))
    other = writer.region("pass")
    other.output(other.input("value", *COUNT))
    loop_regions(writer, ("value",), [COUNT], 4)
    return writer.to_bytes()
