"""COND_IF and WHILE_LOOP: TOSA 1.0, section 2.16 (extension EXT-CONTROLFLOW).

A region becomes the body of an If or Loop node. Beside its own operands every body carries the variables and the number
of iterations that are left: the runtime cannot stop a loop from outside, so each stops itself in time, and the run is
known to be good only if some iterations were left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import openvino as ov

from virtaccel.backend_openvino.lowering import nodes as ops
from virtaccel.backend_openvino.lowering.builder import MAX_STEPS, Builder
from virtaccel.backend_openvino.lowering.exact import f32, i32
from virtaccel.backend_openvino.lowering.numbers import ELEMENT_TYPES
from virtaccel.backend_openvino.lowering.operands import operand
from virtaccel.backend_openvino.lowering.registry import Record, Site, Value, register
from virtaccel.tosa_graph.graph import Block, DType, Op, packed_bytes

_STEP_BYTES = 1 << 16
"""An iteration counts once, and once more for so many bytes of its tensors."""


class Carried(NamedTuple):
    """What goes into a region and comes out: TOSA's values, variables in the graph's order, iterations left."""

    values: list[Value]
    variables: list[Value]
    steps: ov.Output | None

    def nodes(self, builder: Builder) -> list[ov.Output]:
        """In TOSA's axis order and element types."""
        nodes = [_plain(builder, value) for value in (*self.values, *self.variables)]
        return nodes if self.steps is None else [*nodes, self.steps]

    def like(self, builder: Builder, nodes: Sequence[ov.Output]) -> Carried:
        """The same held by other nodes."""
        kinds = [(value.dtype, value.shape) for value in (*self.values, *self.variables)]
        held = [builder.value(node, *kind) for node, kind in zip(nodes, kinds, strict=False)]
        count = len(self.values)
        return Carried(held[:count], held[count:], None if self.steps is None else nodes[-1])


def _plain(builder: Builder, value: Value) -> ov.Output:
    node = builder.tosa(value)
    element = ELEMENT_TYPES[value.dtype]
    return node if node.get_element_type() == element else ops.convert(node, element).output(0)


def _carried(site: Site, first: int) -> Carried:
    values = [operand(site, index) for index in range(first, len(site.inputs))]
    builder = site.builder
    variables = [builder.variables[tensor.variable_name] for tensor in builder.graph.variables]
    return Carried(values, variables, builder.steps)


def _region(site: Site, attribute: str) -> str:
    name = site.attributes.get(attribute)
    if not isinstance(name, str):
        raise site.refuse(f"{attribute} names no region")
    return name


def _run(parent: Builder, name: str, given: Carried) -> tuple[Builder, Carried]:
    """The region's operators on what is given."""
    child = parent.nested(name)
    names = [tensor.variable_name for tensor in parent.graph.variables]
    child.values.update(zip(child.block.inputs, given.values, strict=True))
    child.variables = dict(zip(names, given.variables, strict=True))
    child.steps = given.steps
    child.run()
    values = [child.operand(output) for output in child.block.outputs]
    return child, Carried(values, [child.variables[one] for one in names], child.steps)


def _taken_over(site: Site, result: Carried) -> tuple[Value, ...]:
    """Variables and iterations are the calling block's now; the values are the operator's results."""
    builder = site.builder
    for tensor, value in zip(builder.graph.variables, result.variables, strict=True):
        builder.variables[tensor.variable_name] = value
    builder.steps = result.steps
    return tuple(result.values)


def _parameters(nodes: Sequence[ov.Output]) -> list[ov.op.Parameter]:
    return [ops.parameter(list(node.get_shape()), node.get_element_type()) for node in nodes]


def _first(nodes: Sequence[ov.Node]) -> list[ov.Output]:
    return [node.output(0) for node in nodes]


# ---- COND_IF


def _cond_if(site: Site) -> tuple[Value, ...]:
    given = _carried(site, 1)
    sources = given.nodes(site.builder)
    condition = ops.reshape(site.builder.tosa(operand(site, 0)), np.array([1], np.int64), special_zero=False)
    bodies = [_branch(site, _region(site, name), given, sources) for name in ("then_graph", "else_graph")]
    node = ops.if_op(condition.output(0))
    node.set_then_body(ov.Model(bodies[0].results, bodies[0].parameters, "then"))
    node.set_else_body(ov.Model(bodies[1].results, bodies[1].parameters, "else"))
    for source, *inner in zip(sources, bodies[0].parameters, bodies[1].parameters, strict=True):
        node.set_input(source, *inner)
    outputs = [node.set_output(*pair) for pair in zip(bodies[0].results, bodies[1].results, strict=True)]
    return _taken_over(site, bodies[0].gives.like(site.builder, outputs))


class Branch(NamedTuple):
    parameters: list[ov.op.Parameter]
    results: list[ov.op.Result]
    gives: Carried


def _branch(site: Site, name: str, given: Carried, sources: Sequence[ov.Output]) -> Branch:
    parameters = _parameters(sources)
    child, gives = _run(site.builder, name, given.like(site.builder, _first(parameters)))
    return Branch(parameters, [ops.result(node) for node in gives.nodes(child)], gives)


# ---- WHILE_LOOP


def _cost(block: Block) -> int:
    """What one iteration counts: 1, and more for large tensors. Iterations of loops inside count by themselves."""
    size = sum(packed_bytes(tensor.dtype, math.prod(tensor.shape)) for tensor in block.tensors.values())
    return min(1 + size // _STEP_BYTES, MAX_STEPS)


def _goes_on(child: Builder, condition: Value, steps: ov.Output) -> ov.Output:
    """Whether there is another iteration: what the condition says, and some iterations are left."""
    asked = ops.reshape(child.tosa(condition), np.array([1], np.int64), special_zero=False)
    left = ops.less(f32([0.0]), ops.convert(steps, ov.Type.f32))
    return ops.logical_and(asked, left).output(0)


def _copied(result: ov.Output, parameter: ov.op.Parameter, nothing: ov.Output) -> ov.Output:
    """A body's result in memory of its own: looked up among it and the parameter it will be the value of, at an index
    (always 0) that nobody can know while compiling.

    A result that is a parameter, or its memory under another name, would be overwritten before it is read when the next
    iteration starts. A constant one, or one whose parameter nobody reads, would spoil the value of a loop that never
    runs.
    """
    shape = [int(size) for size in result.get_shape()]
    rows = [ops.reshape(node, np.array([1, *shape], np.int64), special_zero=False) for node in (result, parameter)]
    taken = ops.gather(ops.concat(rows, 0), nothing, np.array(0, np.int64))
    return ops.reshape(taken, np.array(shape, np.int64), special_zero=False).output(0)


def _while_loop(site: Site) -> tuple[Value, ...]:
    builder, condition, body = site.builder, _region(site, "cond_graph"), _region(site, "body_graph")
    given = _carried(site, 0)
    if given.steps is None:
        raise site.refuse("the graph was not prepared for loops")
    # The condition runs before the loop, and at the end of each iteration.
    asking, asked = _run(builder, condition, given)
    start = Carried(given.values, asked.variables, asked.steps)
    assert start.steps is not None  # it was given
    sources = start.nodes(asking)
    parameters = _parameters(sources)
    inner = start.like(builder, _first(parameters))
    assert inner.steps is not None  # it was given
    nothing = ops.minimum(ops.maximum(inner.steps, i32(0)), i32(0)).output(0)
    block = builder.nested(body).block
    inner = inner._replace(steps=ops.subtract(inner.steps, i32(_cost(block))).output(0))
    running, done = _run(builder, body, inner)
    again, verdict = _run(running, condition, done)
    after = Carried(done.values, verdict.variables, verdict.steps)
    assert after.steps is not None  # it was given
    pairs = zip(after.nodes(again), parameters, strict=True)
    results = [ops.result(_copied(result, parameter, nothing)) for result, parameter in pairs]
    more = ops.result(_goes_on(again, verdict.values[0], after.steps))
    node = ops.loop(ops.constant(np.array(-1, np.int64)).output(0), _goes_on(asking, asked.values[0], start.steps))
    node.set_function(ov.Model([more, *results], parameters, "iteration"))
    node.set_special_body_ports([-1, 0])
    for parameter, source, result in zip(parameters, sources, results, strict=True):
        node.set_merged_input(parameter, source, result.output(0))
    outputs = [node.get_iter_value(result.output(0), -1) for result in results]
    return _taken_over(site, start.like(builder, outputs))


# ---- rows

_ANY: frozenset[tuple[DType, ...]] = frozenset()

register(
    Record(Op.COND_IF, _ANY, _cond_if, "If", True),
    Record(Op.WHILE_LOOP, _ANY, _while_loop, "Loop, ended after a bounded number of iterations", True),
)
