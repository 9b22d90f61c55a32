"""Structure, regions, variables, targets, levels and budgets: what validation says of whole graphs."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import Const, Dims, single

from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import DType, Op, TosaError
from virtaccel.tosa_graph.schema import RoundingMode
from virtaccel.tosa_graph.target import (
    ALL_PROFILES,
    LEVEL_8K,
    NO_EXTENSION,
    NO_LEVEL,
    Extension,
    Profile,
    Target,
)
from virtaccel.tosa_graph.validate import Budget, required, validate
from virtaccel.tosa_graph.write import GraphWriter, RegionWriter

F32, BOOL, I32 = DType.FP32, DType.BOOL, DType.INT32
SHAPE = ((2, 3), F32)


def expect_refused(writer: GraphWriter | bytes, reason: str, target: Target | None = None, **budget: int) -> None:
    data = writer if isinstance(writer, bytes) else writer.to_bytes()
    with pytest.raises(TosaError, match=reason):
        validate(read(data), target or Target(ALL_PROFILES, Extension((1 << 11) - 1)), Budget(**budget))


def test_operand_used_before_it_is_defined() -> None:
    writer = GraphWriter()
    x, a, b = writer.input("x", *SHAPE), writer.tensor("a", *SHAPE), writer.tensor("b", *SHAPE)
    writer.place(Op.ABS, [a], [b])
    writer.place(Op.ABS, [x], [a])
    writer.output(b)
    expect_refused(writer, r"operator 0, ABS -> 'b': input1 'a' is used before it is defined")


def test_operand_that_does_not_exist() -> None:
    writer = GraphWriter()
    writer.output(writer.operator(Op.ABS, ["nothing"], SHAPE))
    expect_refused(writer, "'nothing' is used before")


def test_result_that_does_not_exist() -> None:
    writer = GraphWriter()
    writer.place(Op.ABS, [writer.input("x", *SHAPE)], ["nothing"])
    expect_refused(writer, "neither a tensor nor a shape")


@pytest.mark.parametrize("twice", ["input", "result"])
def test_value_defined_twice(twice: str) -> None:
    writer = GraphWriter()
    x = writer.input("x", *SHAPE)
    y = writer.operator(Op.ABS, [x], SHAPE)
    writer.place(Op.ABS, [x], [x if twice == "input" else y])
    writer.output(y)
    expect_refused(writer, "defined twice")


def test_input_listed_twice() -> None:
    writer = GraphWriter()
    writer.inputs(writer.input("x", *SHAPE))
    expect_refused(writer, "listed twice")


def test_output_never_produced() -> None:
    writer = GraphWriter()
    writer.output(writer.tensor("y", *SHAPE))
    expect_refused(writer, "'y' is never produced")


def test_outputs_may_be_inputs_constants_and_listed_twice() -> None:
    writer = GraphWriter()
    x, c = writer.input("x", *SHAPE), writer.constant(np.zeros(3, np.float32))
    writer.output(x, c, c)
    validate(read(writer.to_bytes()))


def test_constant_without_data() -> None:
    writer = GraphWriter()
    writer.place(Op.CONST, [], [writer.tensor("c", *SHAPE)])
    expect_refused(writer, "no data")


def test_computed_tensor_with_data() -> None:
    writer = GraphWriter()
    x = writer.input("x", (1,), DType.INT8)
    writer.place(Op.IDENTITY, [x], [writer.tensor("y", (1,), DType.INT8, b"\1")])
    expect_refused(writer, "has data though it is computed")


def test_shape_where_a_tensor_belongs_and_the_reverse() -> None:
    writer = GraphWriter()
    shape = writer.const_shape((6,))
    writer.output(writer.operator(Op.ABS, [shape], ((1,), F32)))
    expect_refused(writer, "is a shape")
    writer = GraphWriter()
    x = writer.input("x", *SHAPE)
    writer.output(writer.operator(Op.RESHAPE, [x, writer.constant(np.array([6], np.int32))], ((6,), F32)))
    expect_refused(writer, "is not a shape")


def test_constant_operands_must_be_constant_unless_dynamic() -> None:
    data = single(
        Op.PAD, [SHAPE, Dims((0, 0, 0, 0)), ((1,), F32)], SHAPE
    )
    validate(read(data))
    expect_refused(data, "pad_const is not a compile time constant", Target(Profile.FLOATING_POINT))
    identity = GraphWriter()
    x, c = identity.input("x", *SHAPE), identity.constant(np.zeros(1, np.float32))
    c2 = identity.operator(Op.IDENTITY, [c], ((1,), F32))
    identity.output(identity.operator(Op.PAD, [x, identity.const_shape((0, 0, 0, 0)), c2], SHAPE))
    expect_refused(identity, "compile time constant", Target(Profile.FLOATING_POINT))


def branch(writer: GraphWriter, name: str, op: Op = Op.ABS, shape: tuple[int, ...] = (2, 3)) -> RegionWriter:
    region = writer.region(name)
    region.output(region.operator(op, [region.input(f"{name}_in", shape, F32)], (shape, F32)))
    return region


def conditional(
    condition: tuple[tuple[int, ...], DType] = ((1,), BOOL), names: tuple[str, str] = ("t", "e")
) -> GraphWriter:
    writer = GraphWriter()
    go, x = writer.input("go", *condition), writer.input("x", *SHAPE)
    attributes = {"then_graph": names[0], "else_graph": names[1]}
    writer.output(writer.operator(Op.COND_IF, [go, x], SHAPE, attributes))
    return writer


def test_conditional() -> None:
    writer = conditional()
    branch(writer, "t")
    branch(writer, "e", Op.CEIL)
    data = writer.to_bytes()
    validate(read(data))
    expect_refused(data, "CONTROLFLOW", Target(Profile.FLOATING_POINT))


@pytest.mark.parametrize(("condition", "reason"), [(((1,), I32), "BOOL"), (((2,), BOOL), "one element")])
def test_condition_is_one_bool(condition: tuple[tuple[int, ...], DType], reason: str) -> None:
    writer = conditional(condition)
    branch(writer, "t")
    branch(writer, "e")
    expect_refused(writer, reason)


def test_region_that_does_not_exist() -> None:
    writer = conditional(names=("t", "nowhere"))
    branch(writer, "t")
    expect_refused(writer, "'nowhere' does not exist")


def test_branch_with_another_shape_or_type() -> None:
    writer = conditional()
    branch(writer, "t")
    branch(writer, "e", shape=(3, 2))
    expect_refused(writer, "else_graph")
    writer = conditional()
    branch(writer, "t")
    region = writer.region("e")
    region.output(region.operator(Op.CAST, [region.input("a", *SHAPE)], ((2, 3), DType.FP16)))
    expect_refused(writer, "the outputs of else_graph")


def test_regions_that_call_each_other() -> None:
    writer = conditional(names=("t", "t"))
    region = writer.region("t")
    go, x = region.input("g", (1,), BOOL), region.input("a", *SHAPE)
    region.output(region.operator(Op.COND_IF, [go, x], SHAPE, {"then_graph": "t", "else_graph": "t"}))
    expect_refused(writer, "'t' calls itself")
    writer = conditional(names=("main", "main"))
    expect_refused(writer, "'main' calls itself")


def nested(depth: int) -> GraphWriter:
    writer = conditional(names=("r1", "r1"))
    for level in range(1, depth + 1):
        region = writer.region(f"r{level}")
        x = region.input(f"x{level}", *SHAPE)
        if level == depth:
            region.output(region.operator(Op.ABS, [x], SHAPE))
            continue
        go = region.constant(np.array([True]))
        attributes = {"then_graph": f"r{level + 1}", "else_graph": f"r{level + 1}"}
        region.output(region.operator(Op.COND_IF, [go, x], SHAPE, attributes))
    return writer


def test_nesting() -> None:
    """Twelve regions that call the next one twice are four thousand paths, walked as twelve."""
    validate(read(nested(6).to_bytes()))
    expect_refused(nested(7), "MAX_NESTING 6")
    loose = Target(ALL_PROFILES, Extension.CONTROLFLOW, NO_LEVEL)
    validate(read(nested(30).to_bytes()), loose)
    expect_refused(nested(200), "MAX_NESTING 32", loose)


def loop(step: int = 1, shape: tuple[int, ...] = ()) -> GraphWriter:
    writer = GraphWriter()
    i, x = writer.input("i", (), I32), writer.input("x", *SHAPE)
    results = [((), I32), SHAPE]
    writer.output(*writer.operator(Op.WHILE_LOOP, [i, x], results, {"cond_graph": "c", "body_graph": "b"}))
    region = writer.region("c")
    i, x = region.input("ci", (), I32), region.input("cx", *SHAPE)
    region.output(region.operator(Op.GREATER, [i, region.constant(np.int32(0))], (shape, BOOL)))
    region = writer.region("b")
    i, x = region.input("bi", (), I32), region.input("bx", *SHAPE)
    region.output(region.operator(Op.SUB, [i, region.constant(np.int32(step))], ((), I32)), x)
    return writer


def test_loop() -> None:
    validate(read(loop().to_bytes()))
    expect_refused(loop(shape=(1,)), "GREATER")


def test_loop_condition_is_one_bool() -> None:
    writer = GraphWriter()
    x = writer.input("x", *SHAPE)
    writer.output(writer.operator(Op.WHILE_LOOP, [x], SHAPE, {"cond_graph": "c", "body_graph": "b"}))
    region = writer.region("c")
    a = region.input("a", *SHAPE)
    region.output(region.operator(Op.GREATER, [a, a], ((2, 3), BOOL)))
    branch(writer, "b")
    expect_refused(writer, "one BOOL element")


def test_loop_body_changes_the_shape() -> None:
    writer = loop()
    region = next(region for region in writer._regions if region.name == "b")
    region._outputs.reverse()
    expect_refused(writer, "the outputs of body_graph")


def stateful(dtype: DType = F32) -> GraphWriter:
    writer = GraphWriter()
    x = writer.input("x", (3,), dtype)
    state = writer.variable(np.zeros(3, np.float32), dtype)
    writer.place(Op.VARIABLE_READ, [state], [writer.tensor("old", (3,), dtype)])
    new = writer.operator(Op.ADD, [x, "old"], ((3,), dtype))
    writer.place(Op.VARIABLE_WRITE, [new], [state])
    writer.output(new)
    return writer


def test_variables() -> None:
    data = stateful().to_bytes()
    graph = read(data)
    validate(graph)
    assert [tensor.shape for tensor in graph.variables] == [(3,)]
    expect_refused(data, "VARIABLE", Target(Profile.FLOATING_POINT))
    expect_refused(stateful(DType.BF16), "types BF16")


def test_variable_used_without_its_operators() -> None:
    writer = GraphWriter()
    state = writer.variable(np.zeros(3, np.float32))
    writer.output(writer.operator(Op.ABS, [state], ((3,), F32)))
    expect_refused(writer, "is a variable")
    writer = GraphWriter()
    x = writer.input("x", (3,), F32)
    writer.place(Op.VARIABLE_READ, [x], [writer.tensor("y", (3,), F32)])
    expect_refused(writer, "is no variable")
    writer = GraphWriter()
    x = writer.input("x", (3,), F32)
    writer.place(Op.VARIABLE_WRITE, [x], [writer.tensor("y", (3,), F32)])
    expect_refused(writer, "is no variable")


@pytest.mark.parametrize(
    ("op", "dtype", "needed", "target"),
    [
        (Op.ABS, F32, "FLOATING_POINT", Target(Profile.INTEGER)),
        (Op.CLZ, I32, "INTEGER", Target(Profile.FLOATING_POINT)),
        (Op.ABS, DType.BF16, "BF16", Target(ALL_PROFILES)),
        (Op.IDENTITY, DType.INT4, "INT4", Target(ALL_PROFILES)),
        (Op.IDENTITY, DType.INT48, "INT16", Target(ALL_PROFILES)),
        (Op.IDENTITY, DType.FP8E4M3, "FP8E4M3", Target(ALL_PROFILES, Extension.FP8E5M2)),
    ],
)
def test_outside_the_target(op: Op, dtype: DType, needed: str, target: Target) -> None:
    expect_refused(single(op, [((4,), dtype)], ((4,), dtype)), f"needs (profile )?{needed}", target)


def test_cast_may_need_two_extensions() -> None:
    data = single(Op.CAST, [((4,), DType.BF16)], ((4,), DType.FP8E4M3))
    for extension in (Extension.BF16, Extension.FP8E4M3):
        expect_refused(data, "BF16 and FP8E4M3", Target(ALL_PROFILES, extension))
    validate(read(data), Target(Profile.FLOATING_POINT, Extension.BF16 | Extension.FP8E4M3))


@pytest.mark.parametrize(
    ("mode", "extension"),
    [(RoundingMode.DOUBLE_ROUND, Extension.DOUBLEROUND), (RoundingMode.INEXACT_ROUND, Extension.INEXACTROUND)],
)
def test_rounding_modes_are_extensions(mode: RoundingMode, extension: Extension) -> None:
    one = [Const(np.array([value], dtype)) for value, dtype in ((1 << 30, "i4"), (31, "i1"), (0, "i4"), (0, "i1"))]
    data = single(Op.RESCALE, [((4,), I32), *one], ((4,), DType.INT8), {"scale32": True, "rounding_mode": mode})
    expect_refused(data, str(extension.name), Target(Profile.INTEGER))
    assert required(read(data)) == Target(Profile.INTEGER, extension, LEVEL_8K)


def test_required() -> None:
    assert required(read(single(Op.ADD, [((4,), F32)] * 2, ((4,), F32)))) == Target(Profile.FLOATING_POINT)
    assert required(read(single(Op.ADD, [((4,), I32)] * 2, ((4,), I32)))) == Target(Profile.INTEGER)
    assert required(read(single(Op.ABS, [((1,) * 7, F32)], ((1,) * 7, F32)))).level == NO_LEVEL
    target = required(read(stateful().to_bytes()))
    assert target == Target(Profile.FLOATING_POINT, Extension.VARIABLE)
    assert required(read(single(Op.ABS, [((4,), DType.BF16)], ((4,), DType.BF16)))) == Target(
        Profile.FLOATING_POINT, Extension.BF16
    )


def test_h2_tile_to_2_to_the_31_elements() -> None:
    writer = GraphWriter()
    c = writer.constant(np.zeros((1, 1), np.int8))
    big = writer.operator(Op.TILE, [c, writer.const_shape((1 << 16, 1 << 15))], ((1 << 16, 1 << 15), DType.INT8))
    small = writer.operator(Op.REDUCE_MAX, [big], ((1, 1 << 15), DType.INT8), {"axis": 0})
    writer.output(small)
    assert len(writer.to_bytes()) < 1000
    expect_refused(writer, "MAX_LOG2_SIZE")
    expect_refused(writer, "exceeds 1000", Target(ALL_PROFILES, level=NO_LEVEL), max_tensor_bytes=1000)


def test_h2_many_large_tensors() -> None:
    writer = GraphWriter()
    value = writer.input("x", (1 << 20,), F32)
    for _ in range(20):
        value = writer.operator(Op.ABS, [value], ((1 << 20,), F32))
    writer.output(value)
    validate(read(writer.to_bytes()))
    expect_refused(writer, "all tensors together exceed", max_total_bytes=64 << 20)


def test_reason_names_operator_and_region() -> None:
    writer = conditional()
    branch(writer, "t")
    region = writer.region("e")
    region.output(region.operator(Op.CLZ, [region.input("a", *SHAPE)], SHAPE))
    expect_refused(writer, r"operator 0, COND_IF -> 'cond_if1': operator 0 of region 'e', CLZ -> 'e_clz1': types FP32")


def test_no_extension_is_the_default() -> None:
    assert Target(Profile.INTEGER).extensions == NO_EXTENSION
