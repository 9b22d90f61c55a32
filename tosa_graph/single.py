"""Programs of one operator, cut out of a model: how to ask a device about each operator by itself.

Knows graphs (tosa_graph) and nothing of devices. An operand that is constant in the model stays constant; any other
becomes an input. Operators that make no sense alone (constants, control flow, state) are left out.
"""

from __future__ import annotations

from typing import NamedTuple

from virtaccel.tosa_graph.graph import Block, DType, Graph, Op, Operator
from virtaccel.tosa_graph.write import GraphWriter

NOT_ALONE = frozenset(
    (Op.CONST, Op.CONST_SHAPE, Op.VARIABLE, Op.VARIABLE_READ, Op.VARIABLE_WRITE, Op.COND_IF, Op.WHILE_LOOP)
)


class Signature(NamedTuple):
    """An operator with the types and shapes around it, as people read them."""

    op: Op
    operands: str
    results: str


def signature(operator: Operator, block: Block) -> Signature:
    """Equal for operators that a device must judge alike up to attributes and constants."""
    return Signature(operator.op, _spell(operator.inputs, block), _spell(operator.outputs, block))


def _spell(names: tuple[str, ...], block: Block) -> str:
    words = []
    for name in names:
        tensor = block.tensors.get(name)
        if tensor is not None:
            words.append(f"{tensor.dtype.name}[{','.join(map(str, tensor.shape))}]")
        elif name in block.shapes:
            words.append(f"SHAPE{list(block.shapes[name].values or ())}".replace(" ", ""))
    return " ".join(words) or "-"


def alone(operator: Operator, block: Block, graph: Graph) -> bytes:
    """A file with just this operator of one of the graph's blocks."""
    version = graph.version
    writer = GraphWriter((version.major, version.minor, version.patch), version.draft)
    for name in dict.fromkeys(operator.inputs):
        _declare(writer, name, block)
    for name in operator.outputs:
        tensor = block.tensors[name]
        writer.tensor(name, tensor.shape, tensor.dtype)
    writer.place(operator.op, operator.inputs, operator.outputs, operator.attributes)
    writer.output(*operator.outputs)
    return writer.to_bytes()


def _declare(writer: GraphWriter, name: str, block: Block) -> None:
    tensor = block.tensors.get(name)
    if tensor is None:
        writer.const_shape(block.shapes[name].values or (), name)
    elif tensor.data is not None and tensor.dtype != DType.SHAPE:
        writer.tensor(name, tensor.shape, tensor.dtype, tensor.data)
        writer.place(Op.CONST, (), (name,))
    else:
        writer.input(name, tensor.shape, tensor.dtype)

