"""Make a graph concrete: shapes for its -1 dimensions, data for constants kept apart from it. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from virtaccel.tosa_graph.flatbuffer import short
from virtaccel.tosa_graph.graph import Block, Graph, Op, Operator, Shape, TosaError, packed_bytes
from virtaccel.tosa_graph.node import UNKNOWN, Dims, size
from virtaccel.tosa_graph.target import EVERYTHING, Target
from virtaccel.tosa_graph.walk import DEFAULT_BUDGET, Budget, Scope, Walk


def specialise(
    graph: Graph,
    input_shapes: Sequence[tuple[int, ...]],
    target: Target = EVERYTHING,
    budget: Budget = DEFAULT_BUDGET,
) -> Graph:
    """The same graph for inputs of these shapes (elements, in input order), every tensor's shape concrete.

    A RESHAPE to a shape with a -1 gets a shape of its own without. Raises TosaError if the shapes do not fit the
    inputs, or if an operator refuses them: everything `validate` checks is checked again.
    """
    for tensor, shape in zip(graph.inputs, input_shapes, strict=False):
        if UNKNOWN in shape:
            raise TosaError(f"input {short(tensor.name)}: shape {list(shape)} is not concrete")
    walk = Walk(graph, target, budget)
    walk.run(input_shapes)
    regions = tuple(
        replace(region, blocks=(_block(walk.scopes[region.name]),)) if region.name in walk.scopes else region
        for region in graph.regions
    )
    return replace(graph, regions=regions)


def fill_constants(graph: Graph, constants: Mapping[str, bytes]) -> Graph:
    """The same graph with packed data put into CONST tensors of these names.

    Files whose constants are kept apart list those as inputs of the program too; there they are dropped. Raises
    TosaError for a name that no CONST produces, or data that do not fit the shape.
    """
    missing = set(constants)
    regions = []
    for region in graph.regions:
        (block,) = region.blocks
        tensors = dict(block.tensors)
        made = {operator.outputs[0] for operator in block.operators if operator.op == Op.CONST and operator.outputs}
        for name in made & set(constants):
            tensor = tensors[name]
            if len(constants[name]) != packed_bytes(tensor.dtype, size(tensor.shape)):
                raise TosaError(f"{len(constants[name])} bytes do not fit the constant {short(name)}")
            tensors[name] = replace(tensor, data=constants[name])
        inputs = tuple(name for name in block.inputs if name not in made)
        regions.append(replace(region, blocks=(replace(block, tensors=tensors, inputs=inputs),)))
        missing -= made
    if missing:
        raise TosaError(f"there is no constant {short(min(missing))}")
    return replace(graph, regions=tuple(regions))


def _block(scope: Scope) -> Block:
    block = scope.block
    tensors = dict(block.tensors)
    for name, shape in scope.shapes.items():
        tensor = tensors.get(name)
        if tensor is not None and tensor.shape != shape:
            tensors[name] = replace(tensor, shape=shape)
    if not scope.resolved:
        return replace(block, tensors=tensors)
    shapes = dict(block.shapes)
    operators: list[Operator] = []
    for index, operator in enumerate(block.operators):
        if index in scope.resolved:
            name = _fresh(f"{operator.outputs[0]}.shape", block)
            shapes[name] = _constant(name, scope.resolved[index])
            operators.append(Operator(Op.CONST_SHAPE, {}, (), (name,)))
            operator = replace(operator, inputs=(operator.inputs[0], name))
        operators.append(operator)
    return replace(block, operators=tuple(operators), tensors=tensors, shapes=shapes)


def _constant(name: str, shape: Dims) -> Shape:
    return Shape(name, len(shape), shape)


def _fresh(name: str, block: Block) -> str:
    while name in block.shapes or name in block.tensors:
        name += "'"
    return name
