"""Nodes of the runtime's opset 15, made by its factory directly.

The functions of `openvino.opset15` look at the types of their arguments, make a factory for each call and constants by
way of lists; for graphs of hundreds of nodes that takes longer than making the nodes. What is used often is therefore
here, with the same names, arguments and results but for what nobody here needs: operands are nodes, outputs or arrays.
Knows nothing of TOSA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino.opset15 import avg_pool as avg_pool
from openvino.opset15 import convolution_backprop_data as convolution_backprop_data
from openvino.opset15 import if_op as if_op
from openvino.opset15 import interpolate as interpolate
from openvino.opset15 import loop as loop
from openvino.opset15 import max_pool as max_pool
from openvino.opset15 import parameter as parameter
from openvino.opset15 import result as result
from openvino.opset15 import round as round
from openvino.opset15 import scatter_nd_update as scatter_nd_update
from openvino.opset15 import split as split
from openvino.utils.node_factory import NodeFactory

Operand: TypeAlias = ov.Output | ov.Node | NDArray[Any]

_create: Final = NodeFactory("opset15").factory.create
_NO_ATTRIBUTES: Final[dict[str, Any]] = {}
_BROADCASTS: Final = {"auto_broadcast": "NUMPY"}
_KEEPS_DIMENSIONS: Final = {"keep_dims": True}


def constant(array: NDArray[Any] | np.generic) -> ov.op.Constant:
    """A Constant with a copy of the array, of the element type that corresponds to numpy's. Of arrays of rank 0 numpy
    makes scalars."""
    return ov.op.Constant(np.asarray(array, order="C"), shared_memory=False)


def _output(operand: Operand) -> ov.Output:
    if isinstance(operand, ov.Output):
        return operand
    return (constant(operand) if isinstance(operand, (np.ndarray, np.generic)) else operand).output(0)


def _made(name: str, *operands: Operand) -> ov.Node:
    """A node without attributes."""
    node: ov.Node = _create(name, [_output(operand) for operand in operands], _NO_ATTRIBUTES)
    return node


def _broadcast(name: str, *operands: Operand) -> ov.Node:
    """A node whose operands broadcast."""
    node: ov.Node = _create(name, [_output(operand) for operand in operands], _BROADCASTS)
    return node


def _reduced(name: str, data: Operand, axes: Operand) -> ov.Node:
    """A node that reduces axes and keeps them with size 1."""
    node: ov.Node = _create(name, [_output(data), _output(axes)], _KEEPS_DIMENSIONS)
    return node


# ---- one operand


def abs(x: Operand) -> ov.Node:
    return _made("Abs", x)


def bitwise_not(x: Operand) -> ov.Node:
    return _made("BitwiseNot", x)


def ceiling(x: Operand) -> ov.Node:
    return _made("Ceiling", x)


def clamp(x: Operand, low: float, high: float) -> ov.Node:
    node: ov.Node = _create("Clamp", [_output(x)], {"min": low, "max": high})
    return node


def convert(x: Operand, element: ov.Type) -> ov.Node:
    node: ov.Node = _create("Convert", [_output(x)], {"destination_type": element})
    return node


def cos(x: Operand) -> ov.Node:
    return _made("Cos", x)


def exp(x: Operand) -> ov.Node:
    return _made("Exp", x)


def floor(x: Operand) -> ov.Node:
    return _made("Floor", x)


def is_nan(x: Operand) -> ov.Node:
    return _made("IsNaN", x)


def log(x: Operand) -> ov.Node:
    return _made("Log", x)


def logical_not(x: Operand) -> ov.Node:
    return _made("LogicalNot", x)


def negative(x: Operand) -> ov.Node:
    return _made("Negative", x)


def sigmoid(x: Operand) -> ov.Node:
    return _made("Sigmoid", x)


def sin(x: Operand) -> ov.Node:
    return _made("Sin", x)


def sqrt(x: Operand) -> ov.Node:
    return _made("Sqrt", x)


def tanh(x: Operand) -> ov.Node:
    return _made("Tanh", x)


# ---- operands that broadcast


def add(a: Operand, b: Operand) -> ov.Node:
    return _broadcast("Add", a, b)


def bitwise_and(a: Operand, b: Operand) -> ov.Node:
    return _broadcast("BitwiseAnd", a, b)


def bitwise_or(a: Operand, b: Operand) -> ov.Node:
    return _broadcast("BitwiseOr", a, b)


def bitwise_xor(a: Operand, b: Operand) -> ov.Node:
    return _broadcast("BitwiseXor", a, b)


def divide(a: Operand, b: Operand) -> ov.Node:
    return _broadcast("Divide", a, b)


def equal(a: Operand, b: Operand) -> ov.Node:
    return _broadcast("Equal", a, b)


def less(a: Operand, b: Operand) -> ov.Node:
    return _broadcast("Less", a, b)


def less_equal(a: Operand, b: Operand) -> ov.Node:
    return _broadcast("LessEqual", a, b)


def logical_and(a: Operand, b: Operand) -> ov.Node:
    return _broadcast("LogicalAnd", a, b)


def logical_or(a: Operand, b: Operand) -> ov.Node:
    return _broadcast("LogicalOr", a, b)


def logical_xor(a: Operand, b: Operand) -> ov.Node:
    return _broadcast("LogicalXor", a, b)


def maximum(a: Operand, b: Operand) -> ov.Node:
    return _broadcast("Maximum", a, b)


def minimum(a: Operand, b: Operand) -> ov.Node:
    return _broadcast("Minimum", a, b)


def multiply(a: Operand, b: Operand) -> ov.Node:
    return _broadcast("Multiply", a, b)


def not_equal(a: Operand, b: Operand) -> ov.Node:
    return _broadcast("NotEqual", a, b)


def power(a: Operand, b: Operand) -> ov.Node:
    return _broadcast("Power", a, b)


def select(condition: Operand, a: Operand, b: Operand) -> ov.Node:
    return _broadcast("Select", condition, a, b)


def subtract(a: Operand, b: Operand) -> ov.Node:
    return _broadcast("Subtract", a, b)


# ---- products and reductions


def convolution(
    data: Operand,
    kernel: Operand,
    strides: Sequence[int],
    begin: Sequence[int],
    end: Sequence[int],
    dilations: Sequence[int],
) -> ov.Node:
    return _windowed("Convolution", data, kernel, strides, begin, end, dilations)


def group_convolution(
    data: Operand,
    kernel: Operand,
    strides: Sequence[int],
    begin: Sequence[int],
    end: Sequence[int],
    dilations: Sequence[int],
) -> ov.Node:
    return _windowed("GroupConvolution", data, kernel, strides, begin, end, dilations)


def _windowed(
    name: str,
    data: Operand,
    kernel: Operand,
    strides: Sequence[int],
    begin: Sequence[int],
    end: Sequence[int],
    dilations: Sequence[int],
) -> ov.Node:
    attributes = {
        "strides": strides, "pads_begin": begin, "pads_end": end, "dilations": dilations, "auto_pad": "EXPLICIT",
    }  # fmt: skip
    node: ov.Node = _create(name, [_output(data), _output(kernel)], attributes)
    return node


def matmul(a: Operand, b: Operand, transpose_a: bool, transpose_b: bool) -> ov.Node:
    attributes = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    node: ov.Node = _create("MatMul", [_output(a), _output(b)], attributes)
    return node


def prelu(x: Operand, slope: Operand) -> ov.Node:
    return _made("PRelu", x, slope)


def reduce_logical_and(x: Operand, axes: Operand) -> ov.Node:
    return _reduced("ReduceLogicalAnd", x, axes)


def reduce_logical_or(x: Operand, axes: Operand) -> ov.Node:
    return _reduced("ReduceLogicalOr", x, axes)


def reduce_max(x: Operand, axes: Operand) -> ov.Node:
    return _reduced("ReduceMax", x, axes)


def reduce_min(x: Operand, axes: Operand) -> ov.Node:
    return _reduced("ReduceMin", x, axes)


def reduce_prod(x: Operand, axes: Operand) -> ov.Node:
    return _reduced("ReduceProd", x, axes)


def reduce_sum(x: Operand, axes: Operand) -> ov.Node:
    return _reduced("ReduceSum", x, axes)


# ---- moving


def concat(operands: Sequence[Operand], axis: int) -> ov.Node:
    node: ov.Node = _create("Concat", [_output(operand) for operand in operands], {"axis": axis})
    return node


def gather(data: Operand, indices: Operand, axis: Operand) -> ov.Node:
    node: ov.Node = _create("Gather", [_output(data), _output(indices), _output(axis)], {"batch_dims": 0})
    return node


def pad(data: Operand, begin: Operand, end: Operand, mode: str, filler: Operand) -> ov.Node:
    operands = [_output(data), _output(begin), _output(end), _output(filler)]
    node: ov.Node = _create("Pad", operands, {"pad_mode": mode.upper()})
    return node


def reshape(data: Operand, shape: Operand, special_zero: bool) -> ov.Node:
    node: ov.Node = _create("Reshape", [_output(data), _output(shape)], {"special_zero": special_zero})
    return node


def slice(data: Operand, start: Operand, stop: Operand, step: Operand, axes: Operand) -> ov.Node:
    return _made("Slice", data, start, stop, step, axes)


def tile(data: Operand, repeats: Operand) -> ov.Node:
    return _made("Tile", data, repeats)


def transpose(data: Operand, order: Operand) -> ov.Node:
    return _made("Transpose", data, order)
