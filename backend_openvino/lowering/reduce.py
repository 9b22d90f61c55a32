"""Reductions and ARGMAX: TOSA 1.0, sections 2.2 and 2.8.

The kernels of ReduceMax and ReduceMin drop NaN or keep it as it falls, so they only ever see numbers, and a second
reduction tells what else there was. INT32 is reduced in parts that FP32, in which these kernels count, holds exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np
import openvino as ov

from virtaccel.backend_openvino.lowering import layout as axes
from virtaccel.backend_openvino.lowering import nodes as ops
from virtaccel.backend_openvino.lowering.exact import as_i32, f32, i32, low_bits, mask, shifted_left, shifted_right
from virtaccel.backend_openvino.lowering.half import narrowed, widened
from virtaccel.backend_openvino.lowering.operands import FLOATS, FP8, axis_of, operand, propagates_nan, types
from virtaccel.backend_openvino.lowering.registry import Record, Site, Value, register
from virtaccel.tosa_graph.graph import DType, Op

_F32_EXACT = 1 << 24

Reduction: TypeAlias = Callable[[ov.Output], ov.Output]
"""One node that reduces the axis at hand and keeps it with size 1."""


def _reduction(node: Callable[..., ov.Node], stored_axis: int) -> Reduction:
    return lambda x: node(x, np.array([stored_axis], np.int64)).output(0)


def _result(site: Site, output: ov.Output, value: Value) -> tuple[Value, ...]:
    return (site.builder.value(output, site.out_dtypes[0], site.out_shapes[0], value.layout),)


# ---- sums, products, logic


def _plain(site: Site, node: Callable[..., ov.Node]) -> tuple[Value, ...]:
    value = operand(site, 0)
    axis = axis_of(site, len(value.shape))
    reduce = _reduction(node, axes.stored_axis(value.layout, axis))
    if value.dtype is DType.BOOL:
        return _result(site, reduce(value.output), value)
    return _result(site, narrowed(site, reduce(widened(value.output, value.dtype))), value)


def _sum(site: Site) -> tuple[Value, ...]:
    value = operand(site, 0)
    if value.dtype is not DType.INT32:
        return _plain(site, ops.reduce_sum)
    axis = axis_of(site, len(value.shape))
    stored, length = axes.stored_axis(value.layout, axis), value.shape[axis]
    total: ov.Output | None = None
    for start in range(0, length, 1 << 16):
        part = value.output
        if length > 1 << 16:
            bounds = (np.array([bound], np.int64) for bound in (start, min(start + (1 << 16), length), 1, stored))
            part = ops.slice(part, *bounds).output(0)
        piece = _sum_of_words(part, _reduction(ops.reduce_sum, stored), min(length, 1 << 16))
        total = piece if total is None else ops.add(total, piece).output(0)
    if total is None:
        raise site.refuse("the axis is empty")
    return _result(site, total, value)


def _sum_of_words(x: ov.Output, reduce: Reduction, length: int) -> ov.Output:
    """INT32 sum over up to 2^16 values: of bit fields narrow enough that their sums stay within 2^24, then joined."""
    width = 24 - max((length - 1).bit_length(), 1)
    total: ov.Output | None = None
    for start in range(0, 32, width):
        field = shifted_right(x, start) if start else x
        if start + width < 32:
            field = low_bits(field, width)
        part = as_i32(reduce(ops.convert(field, ov.Type.f32).output(0)))
        part = shifted_left(part, start) if start else part
        total = part if total is None else ops.add(total, part).output(0)
    assert total is not None  # the loop runs at least once
    return total


# ---- extremes


def _extreme(site: Site, node: Callable[..., ov.Node], is_maximum: bool) -> tuple[Value, ...]:
    value = operand(site, 0)
    axis = axis_of(site, len(value.shape))
    stored = axes.stored_axis(value.layout, axis)
    reduce = _reduction(node, stored)
    if value.dtype is DType.INT32:
        return _result(site, _extreme_i32(value.output, reduce, is_maximum), value)
    if value.dtype not in FLOATS:
        return _result(site, reduce(value.output), value)
    x = widened(value.output, value.dtype)
    if not site.builder.may_be_nan(value):
        return _result(site, narrowed(site, reduce(x), exact=True), value)
    output = _float_extreme(x, stored, is_maximum, propagates_nan(site))
    return _result(site, narrowed(site, output, exact=True), value)


def _float_extreme(x: ov.Output, stored: int, is_maximum: bool, propagate: bool) -> ov.Output:
    """The extreme of any FP32 values along one axis.

    The kernel starts from the largest finite magnitude, so that it knows neither NaN nor an axis of nothing but the
    worst infinity. Each element is ranked as that infinity, a NaN or another number; the highest rank there is decides.
    """
    node = ops.reduce_max if is_maximum else ops.reduce_min
    worst = f32(-math.inf if is_maximum else math.inf)
    of_worst, of_number, of_nan = (f32(rank) for rank in ((0, 1, 2) if propagate else (1, 2, 0)))
    is_number = ops.equal(x, x).output(0)
    best = _reduction(node, stored)(ops.select(is_number, x, worst).output(0))
    ranks = ops.select(is_number, ops.select(ops.equal(x, worst), of_worst, of_number), of_nan).output(0)
    top = _reduction(ops.reduce_max, stored)(ranks)
    odd = ops.select(ops.equal(top, of_nan), f32(math.nan), worst)
    return ops.select(ops.equal(top, of_number), best, odd).output(0)


def _extreme_i32(x: ov.Output, reduce: Reduction, is_maximum: bool) -> ov.Output:
    """The upper halves' extreme, then the lower halves' among the values that have it."""

    def reduced(field: ov.Output) -> ov.Output:
        return as_i32(reduce(ops.convert(field, ov.Type.f32).output(0)))

    upper = shifted_right(x, 16)
    best = reduced(upper)
    tied = ops.equal(ops.convert(upper, ov.Type.f32), ops.convert(best, ov.Type.f32)).output(0)
    lower = low_bits(x, 16)
    if is_maximum:  # -1 where not tied
        candidates = ops.bitwise_or(lower, ops.bitwise_not(mask(tied))).output(0)
    else:  # 65536 + what it was where not tied
        candidates = ops.bitwise_or(lower, ops.bitwise_and(ops.bitwise_not(mask(tied)), i32(1 << 16))).output(0)
    return ops.bitwise_or(shifted_left(best, 16), reduced(candidates)).output(0)


# ---- ARGMAX


def _argmax(site: Site) -> tuple[Value, ...]:
    """The first place where the value is the maximum, or, where NaN counts, a NaN."""
    value = operand(site, 0)
    axis = axis_of(site, len(value.shape))
    length = value.shape[axis]
    if not 0 < length < _F32_EXACT:
        raise site.refuse(f"axis of {length} elements")
    stored = axes.stored_axis(value.layout, axis)
    highest, lowest = _reduction(ops.reduce_max, stored), _reduction(ops.reduce_min, stored)
    x = widened(value.output, value.dtype)
    if value.dtype in (*FLOATS, *FP8) and site.builder.may_be_nan(value):
        propagate = propagates_nan(site)
        best = _float_extreme(x, stored, True, propagate)
        wanted = ops.equal(x, best).output(0)
        if propagate:
            wanted = ops.select(ops.equal(best, best), wanted, ops.not_equal(x, x)).output(0)
    else:
        wanted = ops.equal(x, highest(x)).output(0)
    places = np.arange(length, dtype=np.float32).reshape([-1 if i == stored else 1 for i in range(len(value.shape))])
    first = lowest(ops.select(wanted, f32(places), f32(float(_F32_EXACT))).output(0))
    first = ops.select(ops.less(first, f32(float(length))), first, f32(0.0)).output(0)  # nothing but NaN, ignored: 0
    layout = tuple(a - (a > axis) for a in value.layout if a != axis)
    shape = np.array(axes.stored(site.out_shapes[0], layout), np.int64)
    output = ops.reshape(as_i32(first), shape, special_zero=False).output(0)
    return (site.builder.value(output, DType.INT32, site.out_shapes[0], layout),)


# ---- rows

_BOOL, _FLOAT = types(DType.BOOL), types(*FLOATS)
_ORDERED = types(*FLOATS, DType.INT8, DType.INT16, DType.INT32)

register(
    Record(
        Op.ARGMAX, frozenset((dtype, DType.INT32) for dtype in (*FLOATS, *FP8, DType.INT8, DType.INT16)), _argmax,
        "ReduceMax, then ReduceMin over the places that reach it", True,
    ),
    Record(Op.REDUCE_ALL, _BOOL, partial(_plain, node=ops.reduce_logical_and), "ReduceLogicalAnd", True),
    Record(Op.REDUCE_ANY, _BOOL, partial(_plain, node=ops.reduce_logical_or), "ReduceLogicalOr", True),
    Record(
        Op.REDUCE_MAX, _ORDERED, partial(_extreme, node=ops.reduce_max, is_maximum=True),
        "ReduceMax of the numbers and of what they are; INT32 in two halves", True,
    ),
    Record(
        Op.REDUCE_MIN, _ORDERED, partial(_extreme, node=ops.reduce_min, is_maximum=False),
        "ReduceMin of the numbers and ReduceMax of what they are; INT32 in two halves", True,
    ),
    Record(Op.REDUCE_PRODUCT, _FLOAT, partial(_plain, node=ops.reduce_prod), "ReduceProd", False),
    Record(
        Op.REDUCE_SUM, types(*FLOATS, DType.INT32), _sum,
        "ReduceSum; INT32 in bit fields whose sums stay within 2^24", False,
    ),
)  # fmt: skip
