"""CAST: TOSA 1.0, section 2.11 (type conversion).

The kernel of Convert truncates and wraps, or saturates, as it likes, so it is only given values that need neither:
floating point is rounded to even and clipped before, integers are wrapped before. Converting to floating point rounds
to nearest even, which is right.
"""

from __future__ import annotations

from collections.abc import Callable

import openvino as ov

from virtaccel.backend_openvino.lowering import nodes as ops
from virtaccel.backend_openvino.lowering.exact import (
    as_i32,
    blend_i32,
    f32,
    i32,
    low_bits,
    nonzero,
    shifted_left,
    shifted_right,
    wrapped,
)
from virtaccel.backend_openvino.lowering.half import narrowed, widened
from virtaccel.backend_openvino.lowering.numbers import ELEMENT_TYPES
from virtaccel.backend_openvino.lowering.operands import FLOATS, FP8, operand
from virtaccel.backend_openvino.lowering.registry import Record, Site, Value, register
from virtaccel.tosa_graph.graph import DType, Op

_BITS = {DType.INT8: 8, DType.INT16: 16, DType.INT32: 32}
_BELOW_2_31 = 2147483520.0
"""The largest FP32 number below 2^31."""


def _float_to_integer(x: ov.Output, target: DType) -> ov.Output:
    """Rounded to nearest even and saturated. TOSA promises nothing for NaN."""
    whole = ops.round(x, "half_to_even")
    if target is not DType.INT32:
        limit = float(1 << (_BITS[target] - 1))
        return ops.convert(ops.clamp(whole, -limit, limit - 1), ELEMENT_TYPES[target]).output(0)
    inside = as_i32(ops.clamp(whole, -(2.0**31), _BELOW_2_31).output(0))
    above = as_i32(ops.less_equal(f32(2.0**31), x).output(0))
    return ops.add(inside, ops.multiply(above, i32(127))).output(0)


def _integer_to_integer(x: ov.Output, source: DType, target: DType) -> ov.Output:
    wide = as_i32(x)
    if _BITS[target] < _BITS[source]:
        wide = wrapped(wide, _BITS[target])
    return wide if target is DType.INT32 else ops.convert(wide, ELEMENT_TYPES[target]).output(0)


def _odd(x: ov.Output) -> ov.Output:
    """INT32 with the last 8 bits of numbers beyond 2^24 made one that is set if any was: FP32 then holds all of them,
    and rounding them to a shorter type is rounding the numbers themselves."""
    upper = shifted_right(x, 24)
    beyond = nonzero(ops.multiply(upper, ops.add(upper, i32(1))).output(0))
    sticky = shifted_left(as_i32(nonzero(low_bits(x, 8))), 8)
    return blend_i32(beyond, ops.bitwise_or(ops.bitwise_and(x, i32(-256)), sticky).output(0), x)


def _converted(site: Site, x: ov.Output, source: DType, target: DType) -> ov.Output:
    if target is DType.BOOL:
        return ops.not_equal(as_i32(x), i32(0)).output(0)
    if source is DType.BOOL:
        return ops.convert(x, ELEMENT_TYPES[target]).output(0)
    if source in _BITS and target in _BITS:
        return _integer_to_integer(x, source, target)
    if source is DType.INT32 and target is not DType.FP32:
        x = _odd(x)
    if source in _BITS:
        exact = target is DType.FP32 or source is DType.INT8
        return narrowed(site, ops.convert(x, ov.Type.f32).output(0), exact=exact)
    if target in _BITS:
        return _float_to_integer(widened(x, source), target)
    return narrowed(site, widened(x, source))


def _cast(site: Site) -> tuple[Value, ...]:
    value, target = operand(site, 0), site.out_dtypes[0]
    output = _converted(site, value.output, value.dtype, target)
    return (site.builder.value(output, target, value.shape, value.layout),)


_INTEGERS = (DType.INT8, DType.INT16, DType.INT32)
_RULES: tuple[Callable[[DType], frozenset[tuple[DType, DType]]], ...] = (
    lambda whole: frozenset({(DType.BOOL, whole), (whole, DType.BOOL)}),
    lambda whole: frozenset((whole, other) for other in _INTEGERS if other is not whole),
    lambda whole: frozenset((whole, real) for real in FLOATS),
    lambda whole: frozenset((real, whole) for real in FLOATS),
)
_PAIRS = frozenset(pair for rule in _RULES for whole in _INTEGERS for pair in rule(whole))
_REAL = frozenset((one, other) for one in (DType.FP16, DType.BF16) for other in (DType.FP32, *FP8))
_REALS = _REAL | frozenset((other, one) for one, other in _REAL) | frozenset((DType.FP32, small) for small in FP8)
_WIDENED = frozenset((small, DType.FP32) for small in FP8)

register(
    Record(
        Op.CAST, _PAIRS | _REALS | _WIDENED, _cast,
        "Convert of what was rounded to even and clipped, or wrapped, before", True,
    ),
)  # fmt: skip
