"""Graphs made concrete: -1 dimensions from input shapes, constants from elsewhere; against the reference model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from graphs import Dims, single
from oracle import reference

from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import DType, Op, TosaError
from virtaccel.tosa_graph.specialise import fill_constants, specialise
from virtaccel.tosa_graph.target import ALL_PROFILES
from virtaccel.tosa_graph.validate import Budget, Target, validate
from virtaccel.tosa_graph.write import GraphWriter, encode

F32 = DType.FP32


@pytest.mark.parametrize("batch", [1, 2, 7, 1000])
def test_sine_float_at_every_batch(shared: Path, batch: int) -> None:
    graph = read((shared / "models" / "sine_float.tosa").read_bytes())
    validate(graph)
    assert [tensor.shape for tensor in graph.inputs] == [(-1, 1)]
    concrete = specialise(graph, [(batch, 1)])
    validate(concrete)
    assert not any(-1 in tensor.shape for tensor in concrete.main.tensors.values())
    assert [tensor.shape for tensor in concrete.outputs] == [(batch, 1)]
    for operator in concrete.main.operators:
        if operator.op == Op.RESHAPE:
            assert concrete.main.shapes[operator.inputs[1]].values == concrete.main.tensors[operator.outputs[0]].shape
    angles = np.linspace(0, 6.28, batch, dtype=np.float32).reshape(batch, 1)
    (outputs,) = reference(encode(concrete), [angles])
    assert np.abs(outputs - np.sin(angles)).max() < 0.2


def test_shape_that_does_not_fit(shared: Path) -> None:
    graph = read((shared / "models" / "sine_float.tosa").read_bytes())
    for shapes, reason in (
        ([(3, 2)], "shape"),
        ([(3,)], "rank"),
        ([], "0 are given"),
        ([(3, 1), (1, 1)], "2 are given"),
        ([(0, 1)], "empty dimension"),
        ([(-1, 1)], "not concrete"),
    ):
        with pytest.raises(TosaError, match=reason):
            specialise(graph, shapes)


def two_inputs() -> bytes:
    writer = GraphWriter()
    a, b = writer.input("a", (-1, 4), F32), writer.input("b", (-1, 4), F32)
    writer.output(writer.operator(Op.CONCAT, [a, b], ((-1, 8), F32), {"axis": 1}))
    return writer.to_bytes()


def test_batches_that_disagree() -> None:
    graph = read(two_inputs())
    assert [tensor.shape for tensor in specialise(graph, [(5, 4), (5, 4)]).outputs] == [(5, 8)]
    with pytest.raises(TosaError, match=r"CONCAT.*dimension 0"):
        specialise(graph, [(5, 4), (6, 4)])


def test_size_that_does_not_divide() -> None:
    graph = read(single(Op.RESHAPE, [((-1,), F32), Dims((-1, 3))], ((-1, 3), F32)))
    assert specialise(graph, [(9,)]).outputs[0].shape == (3, 3)
    with pytest.raises(TosaError, match=r"RESHAPE.*10 elements"):
        specialise(graph, [(10,)])


def test_one_shape_shared_by_two_reshapes() -> None:
    writer = GraphWriter()
    a, b, shape = writer.input("a", (-1, 2), F32), writer.input("b", (-1, 3), F32), writer.const_shape((-1, 6))
    for name in (a, b):
        writer.output(writer.operator(Op.RESHAPE, [name, shape], ((-1, 6), F32)))
    concrete = specialise(read(writer.to_bytes()), [(3, 2), (8, 3)])
    validate(concrete)
    assert [tensor.shape for tensor in concrete.outputs] == [(1, 6), (4, 6)]
    assert read(encode(concrete)) == concrete


def test_a_dimension_that_no_input_explains() -> None:
    writer = GraphWriter()
    x = writer.input("x", (4,), F32)
    writer.output(writer.operator(Op.CUSTOM, [x], ((-1,), F32)))
    with pytest.raises(TosaError, match="unknown though all inputs are known"):
        validate(read(writer.to_bytes()))


def test_budget_holds_for_the_concrete_graph() -> None:
    graph = read(two_inputs())
    target = Target(ALL_PROFILES)
    specialise(graph, [(1000, 4), (1000, 4)], target, Budget(max_total_bytes=64_000))
    with pytest.raises(TosaError, match="64000"):
        specialise(graph, [(1001, 4), (1001, 4)], target, Budget(max_total_bytes=64_000))


def test_regions_are_made_concrete_too() -> None:
    writer = GraphWriter()
    go, x = writer.input("go", (1,), DType.BOOL), writer.input("x", (-1, 3), F32)
    attributes = {"then_graph": "t", "else_graph": "e"}
    writer.output(writer.operator(Op.COND_IF, [go, x], ((-1, 3), F32), attributes))
    for name in ("t", "e"):
        region = writer.region(name)
        region.output(region.operator(Op.ABS, [region.input("a", (-1, 3), F32)], ((-1, 3), F32)))
    graph = read(writer.to_bytes())
    validate(graph)
    concrete = specialise(graph, [(1,), (5, 3)])
    for region_ in concrete.regions:
        assert not any(-1 in tensor.shape for tensor in region_.blocks[0].tensors.values())
    values = np.arange(-7, 8, dtype=np.float32).reshape(5, 3)
    (outputs,) = reference(encode(concrete), [np.array([True]), values])
    assert np.array_equal(outputs, np.abs(values))


def apart() -> bytes:
    """As the conformance suite writes constants kept in files: no data, and listed as inputs."""
    writer = GraphWriter()
    x, c = writer.input("x", (3,), F32), writer.input("c", (3,), F32)
    writer.place(Op.CONST, [], [c])
    writer.output(writer.operator(Op.ADD, [x, c], ((3,), F32)))
    return writer.to_bytes()


def test_constants_from_elsewhere() -> None:
    graph = read(apart())
    with pytest.raises(TosaError):
        validate(graph)
    filled = fill_constants(graph, {"c": np.array([1, 2, 3], "<f4").tobytes()})
    validate(filled)
    assert [tensor.name for tensor in filled.inputs] == ["x"]
    (outputs,) = reference(encode(filled), [np.ones(3, np.float32)])
    assert outputs.tolist() == [2, 3, 4]


def test_constants_that_do_not_fit() -> None:
    graph = read(apart())
    with pytest.raises(TosaError, match="8 bytes do not fit"):
        fill_constants(graph, {"c": bytes(8)})
    with pytest.raises(TosaError, match="no constant 'x'"):
        fill_constants(graph, {"c": bytes(12), "x": bytes(12)})


def test_encoding_reads_back_the_same(shared: Path) -> None:
    for path in sorted((shared / "models").glob("*.tosa")) + sorted((shared / "fixtures" / "tosa").glob("*.tosa")):
        graph = read(path.read_bytes())
        assert read(encode(graph)) == graph
