"""Floating-point arithmetic, activation functions and logic, element by element: TOSA 1.0, sections 2.3 to 2.6.

Rules take and give FP32 nodes in one common layout; operands of FP16 are widened before and the result rounded after.
Comparing operators (minimum, clamp and the like) are in compare.py, integers in integer.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import openvino as ov

from virtaccel.backend_openvino.lowering import integer
from virtaccel.backend_openvino.lowering import nodes as ops
from virtaccel.backend_openvino.lowering.exact import f32, magnitude
from virtaccel.backend_openvino.lowering.half import narrowed, widened
from virtaccel.backend_openvino.lowering.operands import FLOATS, known_integer, operand, types
from virtaccel.backend_openvino.lowering.registry import Record, Site, Value, register
from virtaccel.tosa_graph.graph import DType, Op

Rule: TypeAlias = Callable[..., ov.Output]


# ---- one operand


def _exp(x: ov.Output) -> ov.Output:
    """The kernel overflows above 88.38 and takes NaN for infinity: half the argument, squared, and NaN selected."""
    root = ops.exp(ops.multiply(x, f32(0.5)))
    return ops.select(ops.equal(x, x), ops.multiply(root, root), x).output(0)


def _sigmoid(x: ov.Output) -> ov.Output:
    """The kernel is 0 below -87, where results are still normal numbers; there it is sigmoid(x/2) squared."""
    low = ops.less(x, f32(-80.0))
    y = ops.sigmoid(ops.select(low, ops.multiply(x, f32(0.5)), x))
    return ops.select(low, ops.multiply(y, y), y).output(0)


_ERF_NEAR = (
    1.1283791065216064, -0.3761262595653534, 0.11283600330352783, -0.026854444295167923, 0.005189535208046436,
    -0.0008020841050893068, 7.889119297033176e-05,
)  # fmt: skip
"""erf(x)/x in powers of x squared, |x| < 1, error 1.2e-9; fitted to the error function by least weighted squares."""
_ERF_FAR = (
    0.00035169022157788277, 1.1270478963851929, 0.6382130980491638, 0.10304781794548035, -0.021810097619891167,
    0.002940747421234846, -0.00018568481027614325,
)  # fmt: skip
"""-log(1 - erf(x)) in powers of x, 1 <= x <= 4; the error of erf is 1.1e-9."""


def _polynomial(x: ov.Output, coefficients: tuple[float, ...]) -> ov.Output:
    total = f32(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total = ops.add(ops.multiply(total, x), f32(coefficient)).output(0)
    return total


def _erf(x: ov.Output) -> ov.Output:
    """The kernel is 0 below 7e-8 and misses the bound elsewhere, so two polynomials. NaN takes the first."""
    near = ops.multiply(x, _polynomial(ops.multiply(x, x).output(0), _ERF_NEAR))
    size = ops.clamp(magnitude(x), 1.0, 4.0)
    tail = ops.subtract(f32(1.0), ops.exp(ops.negative(_polynomial(size.output(0), _ERF_FAR))))
    far = ops.select(ops.less(x, f32(0.0)), ops.negative(tail), tail)
    return ops.select(ops.less_equal(f32(1.0), magnitude(x)), far, near).output(0)


def _reciprocal(x: ov.Output) -> ov.Output:
    return ops.divide(f32(1.0), x).output(0)


def _rsqrt(x: ov.Output) -> ov.Output:
    return ops.divide(f32(1.0), ops.sqrt(x)).output(0)


def _plain(node: Callable[[ov.Output], ov.Node]) -> Rule:
    return lambda x: node(x).output(0)


class Unary(NamedTuple):
    """How a function of one FP32 operand is emitted. `keeps_type`: the result of an FP16 value is an FP16 value."""

    rule: Rule
    how: str
    exact: bool = False
    keeps_type: bool = False


_UNARY: dict[Op, Unary] = {
    Op.ABS: Unary(magnitude, "Abs", True, True),
    Op.CEIL: Unary(_plain(ops.ceiling), "Ceiling", True, True),
    Op.COS: Unary(_plain(ops.cos), "Cos"),
    Op.ERF: Unary(_erf, "two polynomials and Exp"),
    Op.EXP: Unary(_exp, "Exp of half the operand, squared; NaN selected"),
    Op.FLOOR: Unary(_plain(ops.floor), "Floor", True, True),
    Op.LOG: Unary(_plain(ops.log), "Log"),
    Op.RECIPROCAL: Unary(_reciprocal, "1 / x"),
    Op.RSQRT: Unary(_rsqrt, "1 / Sqrt"),
    Op.SIGMOID: Unary(_sigmoid, "Sigmoid; of half the operand, squared, below -80"),
    Op.SIN: Unary(_plain(ops.sin), "Sin"),
    Op.TANH: Unary(_plain(ops.tanh), "Tanh"),
}


def _unary(site: Site, row: Unary) -> tuple[Value, ...]:
    value = operand(site, 0)
    if value.dtype is DType.INT32:
        return integer.absolute(site)
    result = row.rule(widened(value.output, value.dtype))
    output = narrowed(site, result, row.keeps_type)
    return (site.builder.value(output, site.out_dtypes[0], value.shape, value.layout),)


def _negate(site: Site) -> tuple[Value, ...]:
    value = operand(site, 0)
    if value.dtype not in FLOATS:
        return integer.negate(site)
    for index in (1, 2):
        zero = operand(site, index).constant
        if zero is not None and np.any(zero != 0):
            raise site.refuse("zero point of a floating-point operand is not 0")
    output = narrowed(site, ops.negative(widened(value.output, value.dtype)).output(0), exact=True)
    return (site.builder.value(output, value.dtype, value.shape, value.layout),)


# ---- two operands

_LINEAR = frozenset({"Add", "Subtract", "Multiply"})
_DOT_PRODUCTS = frozenset({"Convolution", "GroupConvolution", "ConvolutionBackpropData", "MatMul"})


def _constant_of(node: ov.Node) -> bool:
    return any(source.get_node().get_type_name() == "Constant" for source in node.input_values())


def _fenced(a: ov.Output, b: ov.Output) -> ov.Output:
    """`a`, kept from being merged with the arithmetic on the constant `b` that follows.

    OpenVINO merges (x + c) + d, (x + c) * d and (x * c) * d into one operation on merged constants, whose rounding can
    be off by any number of units in the last place. PRelu of slope 1 copies and stops it. Bias of a dot product needs
    no fence: there merging stays inside the bound, which grows with the terms.
    """
    node = a.get_node()
    if b.get_node().get_type_name() != "Constant" or node.get_type_name() not in _LINEAR or not _constant_of(node):
        return a
    if any(source.get_node().get_type_name() in _DOT_PRODUCTS for source in node.input_values()):
        return a
    return ops.prelu(a, f32([1.0])).output(0)


def unfenced(x: ov.Output) -> ov.Output:
    """The value inside a fence; `x` itself where there is none."""
    node = x.get_node()
    if node.get_type_name() != "PRelu":
        return x
    slope = node.input_value(1).get_node()
    fence = isinstance(slope, ov.op.Constant) and np.array_equal(slope.data, [1.0])
    return node.input_value(0) if fence else x


def linear(node: Callable[[ov.Output, ov.Output], ov.Node], a: ov.Output, b: ov.Output) -> ov.Output:
    """Sum, difference or product of FP32 nodes that broadcast, rounded as one operation."""
    return node(_fenced(a, b), _fenced(b, a)).output(0)


_BINARY: dict[Op, Rule] = {
    Op.ADD: partial(linear, ops.add),
    Op.SUB: partial(linear, ops.subtract),
    Op.MUL: partial(linear, ops.multiply),
    Op.POW: lambda a, b: ops.power(a, b).output(0),
}


def _binary(site: Site, rule: Rule) -> tuple[Value, ...]:
    left, right = operand(site, 0), operand(site, 1)
    if left.dtype not in FLOATS:
        return integer.arithmetic(site)
    nodes, layout = site.builder.align(left, right)
    result = rule(*(widened(node, left.dtype) for node in nodes))
    return (site.builder.value(narrowed(site, result), site.out_dtypes[0], site.out_shapes[0], layout),)


def _multiply(site: Site) -> tuple[Value, ...]:
    known = len(site.inputs) > 2 and operand(site, 2).constant is not None
    if operand(site, 0).dtype in FLOATS and known and known_integer(site, 2, "shift") != 0:
        raise site.refuse("shift of a floating-point product is not 0")
    return _binary(site, _BINARY[Op.MUL])


# ---- booleans

_LOGIC: dict[Op, tuple[Rule, str]] = {
    Op.LOGICAL_AND: (ops.logical_and, "LogicalAnd"),
    Op.LOGICAL_OR: (ops.logical_or, "LogicalOr"),
    Op.LOGICAL_XOR: (ops.logical_xor, "LogicalXor"),
    Op.LOGICAL_NOT: (ops.logical_not, "LogicalNot"),
}


def _logic(site: Site, node: Rule) -> tuple[Value, ...]:
    nodes, layout = site.builder.align(*(operand(site, index) for index in range(len(site.inputs))))
    return (site.builder.value(node(*nodes), DType.BOOL, site.out_shapes[0], layout),)


# ---- rows

_FLOAT = types(*FLOATS)
_ARITHMETIC = types(*FLOATS, DType.INT32)
_PRODUCTS = frozenset({(dtype, dtype) for dtype in FLOATS}) | {
    (DType.INT8, DType.INT32), (DType.INT16, DType.INT32), (DType.INT32, DType.INT32),
}  # fmt: skip

register(
    *(
        Record(op, _ARITHMETIC if op is Op.ABS else _FLOAT, partial(_unary, row=row), row.how, row.exact)
        for op, row in _UNARY.items()
    ),
    Record(
        Op.NEGATE, types(*FLOATS, DType.INT8, DType.INT16, DType.INT32), _negate,
        "Negative; integers as INT32, clipped", True,
    ),
    Record(Op.ADD, _ARITHMETIC, partial(_binary, rule=_BINARY[Op.ADD]), "Add", True),
    Record(Op.SUB, _ARITHMETIC, partial(_binary, rule=_BINARY[Op.SUB]), "Subtract", True),
    Record(Op.MUL, _PRODUCTS, _multiply, "Multiply; INT32 with a shift as 64-bit product in limbs", True),
    Record(Op.POW, _FLOAT, partial(_binary, rule=_BINARY[Op.POW]), "Power", False),
    *(Record(op, types(DType.BOOL), partial(_logic, node=node), how, True) for op, (node, how) in _LOGIC.items()),
)  # fmt: skip
