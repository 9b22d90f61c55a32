"""Comparisons, and the operators built on them (MAXIMUM, MINIMUM, CLAMP, SELECT): TOSA 1.0, sections 2.3 to 2.7.

The kernels of Maximum, Minimum, Clamp, Greater and GreaterEqual treat NaN as they like, those of Less, LessEqual, Equal
and Select as IEEE 754 says; everything here is made of the latter. A NaN never compares, so in select(less(a, b), ...)
it takes the last branch: that alone makes most forms right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np
import openvino as ov

from virtaccel.backend_openvino.lowering import nodes as ops
from virtaccel.backend_openvino.lowering.elementwise import linear, unfenced
from virtaccel.backend_openvino.lowering.exact import (
    blend_i32,
    equal_i32,
    f32,
    greater_equal_i32,
    greater_i32,
)
from virtaccel.backend_openvino.lowering.half import narrowed, widened
from virtaccel.backend_openvino.lowering.operands import FLOATS, operand, propagates_nan, scalar_attribute, types
from virtaccel.backend_openvino.lowering.registry import Array, Record, Site, Value, register
from virtaccel.tosa_graph.graph import DType, Op

Rule: TypeAlias = Callable[[ov.Output, ov.Output], ov.Output]


# ---- comparisons

_COMPARISONS: dict[Op, tuple[Rule, Rule, str]] = {
    Op.EQUAL: (lambda a, b: ops.equal(a, b).output(0), equal_i32, "Equal; INT32: their bitwise difference is 0"),
    Op.GREATER: (
        lambda a, b: ops.less(b, a).output(0), greater_i32,
        "Less, operands swapped; INT32: the maximum is not the second",
    ),
    Op.GREATER_EQUAL: (
        lambda a, b: ops.less_equal(b, a).output(0), greater_equal_i32,
        "LessEqual, operands swapped; INT32: the maximum is the first",
    ),
}  # fmt: skip


def _compare(site: Site, floats: Rule, integers: Rule) -> tuple[Value, ...]:
    left, right = operand(site, 0), operand(site, 1)
    (a, b), layout = site.builder.align(left, right)
    integral = left.dtype is DType.INT32
    result = integers(a, b) if integral else floats(widened(a, left.dtype), widened(b, right.dtype))
    return (site.builder.value(result, DType.BOOL, site.out_shapes[0], layout),)


# ---- minimum, maximum, clamp


def _is_number(site: Site, value: Value) -> bool:
    """True if the value cannot hold a NaN."""
    if value.constant is not None:
        return not np.any(np.isnan(value.constant))
    return not site.builder.may_be_nan(value)


def _extreme(site: Site, is_maximum: bool) -> tuple[Value, ...]:
    left, right = operand(site, 0), operand(site, 1)
    if left.dtype is DType.INT32:
        (a, b), layout = site.builder.align(left, right)
        node = ops.maximum(a, b) if is_maximum else ops.minimum(a, b)
        return (site.builder.value(node, left.dtype, site.out_shapes[0], layout),)
    if _is_number(site, left):
        left, right = right, left
    (a, b), layout = site.builder.align(left, right)
    a, b = widened(a, left.dtype), widened(b, right.dtype)
    result = _float_extreme(a, b, is_maximum, propagates_nan(site), _is_number(site, right))
    return (site.builder.value(narrowed(site, result, exact=True), left.dtype, site.out_shapes[0], layout),)


def _float_extreme(a: ov.Output, b: ov.Output, is_maximum: bool, propagate: bool, b_is_number: bool) -> ov.Output:
    """`better` drops a NaN in `b` if `a` is a number and keeps one in `a`; each mode mends the other half."""
    if propagate or not b_is_number:
        better = ops.select(ops.less(a, b) if is_maximum else ops.less(b, a), b, a)
        if propagate and b_is_number:
            return better.output(0)
        judge, other = (b, b) if propagate else (a, b)
        return ops.select(ops.equal(judge, judge), better, other).output(0)
    return ops.select(ops.less(b, a) if is_maximum else ops.less(a, b), a, b).output(0)


def _clamp(site: Site) -> tuple[Value, ...]:
    value = operand(site, 0)
    low, high = scalar_attribute(site, "min_val", value.dtype), scalar_attribute(site, "max_val", value.dtype)
    if not low <= high:
        raise site.refuse("bounds are not ordered numbers")
    x = widened(value.output, value.dtype) if value.dtype in FLOATS else value.output
    if value.dtype not in FLOATS:
        kind = np.int8 if value.dtype is DType.INT8 else np.int16
        bounds = [ops.constant(np.array(bound, kind)) for bound in (low, high)]
        output = ops.minimum(ops.maximum(x, bounds[0]), bounds[1]).output(0)
    elif propagates_nan(site) and not _is_number(site, value):
        output = narrowed(site, _clamped(x, low, high), exact=True)
    elif _is_number(site, value):
        output = narrowed(site, ops.clamp(x, low, high).output(0), exact=True)
    else:
        # Ignoring makes NaN the lower bound. So does the kernel of Clamp, but not what folds constants.
        x = ops.select(ops.less(f32(low), x), x, f32(low)).output(0)
        output = narrowed(site, _clamped(x, -math.inf, high), exact=True)
    return (site.builder.value(output, value.dtype, value.shape, value.layout),)


def _clamped(x: ov.Output, low: float, high: float) -> ov.Output:
    """x between finite or infinite bounds, NaN kept."""
    if high < math.inf:
        x = ops.select(ops.less(f32(high), x), f32(high), x).output(0)
    if low > -math.inf:
        x = ops.select(ops.less(x, f32(low)), f32(low), x).output(0)
    return x


# ---- select


def _select(site: Site) -> tuple[Value, ...]:
    condition, on_true, on_false = (operand(site, index) for index in range(3))
    (c, a, b), layout = site.builder.align(condition, on_true, on_false)
    slope = _prelu_slope(c, a, b) if on_true.shape == site.out_shapes[0] else None
    if slope is not None:
        node = _prelu(a, slope, site.builder.may_be_nan(on_true))
    elif on_true.dtype is DType.INT32:
        node = blend_i32(c, a, b)
    else:
        node = ops.select(c, a, b).output(0)
    return (site.builder.value(node, on_true.dtype, site.out_shapes[0], layout),)


def _prelu(x: ov.Output, slope: ov.Output, may_be_nan: bool) -> ov.Output:
    """x >= 0 ? x : x * slope.

    PRelu becomes part of the convolution or sum before it, which with a slope for each channel makes that up to four
    times slower (a single slope is no trouble). For numbers there are forms that stay apart, as one cheap pass over
    memory that is still in the cache: where no slope is above 1, the larger of x and x * slope; else the sum of the two
    halves, one of which is 0. Both are exact but for the sign of a zero.
    """
    slopes = _array(slope)
    if may_be_nan or slopes is None or (slopes == slopes.flat[0]).all():
        return ops.prelu(x, slope).output(0)
    if (slopes <= 1).all():
        return ops.maximum(x, linear(ops.multiply, x, slope)).output(0)
    zero = f32(0.0)
    return ops.add(ops.maximum(x, zero), ops.multiply(ops.minimum(x, zero), slope)).output(0)


def _source(output: ov.Output, index: int) -> ov.Output:
    return output.get_node().input_value(index)


def _kind(output: ov.Output) -> str:
    return str(output.get_node().get_type_name())


def _array(output: ov.Output) -> Array | None:
    node = output.get_node()
    return np.asarray(node.data) if isinstance(node, ov.op.Constant) else None


def _prelu_slope(condition: ov.Output, on_true: ov.Output, on_false: ov.Output) -> ov.Output | None:
    """The slope if x >= 0 ? x : x * slope is being selected in FP32, for a finite constant slope; else None.

    PRelu gives what the three operators give, NaN included; at 0 only the sign may differ, and infinite slopes are left
    alone.
    """
    if _kind(condition) != "LessEqual" or _kind(on_false) != "Multiply" or on_true.get_element_type() != ov.Type.f32:
        return None
    zero = _array(_source(condition, 0))
    if zero is None or zero.any() or _source(condition, 1) != on_true:
        return None
    factors = [unfenced(_source(on_false, 0)), unfenced(_source(on_false, 1))]
    if factors[1] == on_true:
        factors.reverse()
    slope = _array(factors[1])
    if factors[0] != on_true or slope is None or not np.isfinite(slope).all():
        return None
    return factors[1]


# ---- rows

_COMPARED = types(*FLOATS, DType.INT32)
_SELECTED = types(DType.BOOL, DType.INT8, DType.INT16, DType.INT32, *FLOATS)

register(
    *(
        Record(op, _COMPARED, partial(_compare, floats=floats, integers=integers), how, True)
        for op, (floats, integers, how) in _COMPARISONS.items()
    ),
    Record(Op.MAXIMUM, _COMPARED, partial(_extreme, is_maximum=True), "Select by Less; INT32 Maximum", True),
    Record(Op.MINIMUM, _COMPARED, partial(_extreme, is_maximum=False), "Select by Less; INT32 Minimum", True),
    Record(
        Op.CLAMP, types(*FLOATS, DType.INT8, DType.INT16), _clamp,
        "Select by Less; Clamp of what is never NaN; integers Maximum and Minimum", True,
    ),
    Record(Op.SELECT, _SELECTED, _select, "Select, or PRelu for x >= 0 ? x : x * slope; INT32 by masks", True),
)  # fmt: skip
