"""RESCALE, bit for bit: TOSA 1.0, section 2.11 and the scaling functions of its pseudocode library.

(value - zero point) * multiplier is a 64-bit product, kept in 16-bit limbs of INT32 nodes; multiplier and shift are
for the whole tensor or for each element of the last axis.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import openvino as ov

from virtaccel.backend_openvino.lowering import int48
from virtaccel.backend_openvino.lowering import layout as axes
from virtaccel.backend_openvino.lowering import nodes as ops
from virtaccel.backend_openvino.lowering.exact import (
    Shift,
    Wide,
    as_i32,
    by_shift,
    clipped_i32,
    i32,
    low_bits,
    product,
    scaled,
    shifted_left,
    shifted_right,
    wrapped,
)
from virtaccel.backend_openvino.lowering.integer import BITS, back
from virtaccel.backend_openvino.lowering.operands import known_integer, operand
from virtaccel.backend_openvino.lowering.registry import Record, Site, Value, register
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.schema import RoundingMode


def _zero_point(site: Site, index: int, dtype: DType, unsigned: bool) -> int | ov.Output:
    """A zero point as it counts: of the operand's width, signed or not, and one that TOSA allows there. Where TOSA
    allows 0 only, that is taken for granted if it is not known."""
    value = operand(site, index)
    if value.constant is None:
        if dtype is not DType.INT8 and not (unsigned and dtype is DType.INT16):
            return 0
        node = as_i32(ops.reshape(value.output, np.zeros(0, np.int64), special_zero=False).output(0))
        return low_bits(node, BITS[dtype]) if unsigned else node
    zero = known_integer(site, index, "zero point")
    if unsigned:
        zero &= (1 << BITS[dtype]) - 1
    if zero and dtype is not DType.INT8 and not (unsigned and dtype is DType.INT16 and zero == 32768):
        raise site.refuse(f"zero point {zero} of {'unsigned ' if unsigned else ''}{dtype.name}")
    return zero


def _check(site: Site, source: DType, target: DType) -> RoundingMode:
    flags = {name: bool(site.attributes.get(name)) for name in ("scale32", "input_unsigned", "output_unsigned")}
    if flags["input_unsigned"] and flags["output_unsigned"]:
        raise site.refuse("both sides unsigned")
    if flags["input_unsigned"] and DType.INT32 in (source, target):
        raise site.refuse("unsigned operand with INT32")
    if flags["output_unsigned"] and DType.INT32 in (source, target):
        raise site.refuse("unsigned result with INT32")
    mode = site.attributes.get("rounding_mode")
    if mode not in (RoundingMode.SINGLE_ROUND, RoundingMode.DOUBLE_ROUND, RoundingMode.INEXACT_ROUND):
        raise site.refuse("unknown rounding mode")
    if mode == RoundingMode.DOUBLE_ROUND and not flags["scale32"]:
        raise site.refuse("double rounding of a 16-bit scale")
    return RoundingMode(mode)


class Scale(NamedTuple):
    """Multipliers and shifts, shaped to broadcast over the operand as it is stored: known, or nodes of INT32."""

    multiplier: Shift
    shift: Shift

    @property
    def multiplier_node(self) -> ov.Output:
        return self.multiplier if isinstance(self.multiplier, ov.Output) else i32(self.multiplier)


def _scales(site: Site, value: Value) -> Scale:
    per_channel = bool(site.attributes.get("per_channel"))
    if per_channel and not value.shape:
        raise site.refuse("one scale for each channel of a scalar")
    count = value.shape[-1] if per_channel else 1
    given = operand(site, 1), operand(site, 2)
    if any(math.prod(one.shape) != count for one in given):
        raise site.refuse(f"{given[0].shape} multipliers and {given[1].shape} shifts instead of {count}")
    last = axes.stored_axis(value.layout, len(value.shape) - 1) if per_channel else None
    shape = [count if axis == last else 1 for axis in range(len(value.shape))] if per_channel else []
    multiplier, shift = (_shaped(one, shape) for one in given)
    if not isinstance(multiplier, ov.Output) and multiplier.min() < 0:
        raise site.refuse("a multiplier is negative")
    if not isinstance(shift, ov.Output) and (shift.min() < 2 or shift.max() > 62):
        raise site.refuse("a shift is outside 2..62")
    return Scale(multiplier, shift)


def _shaped(value: Value, shape: list[int]) -> Shift:
    if value.constant is not None:
        return value.constant.astype(np.int64).reshape(shape)
    return as_i32(ops.reshape(value.output, np.array(shape, np.int64), special_zero=False).output(0))


def _scaled(x: ov.Output, scale: Scale, double: bool, bits: int) -> ov.Output:
    """INT32 (x * multiplier + rounding) >> shift. `bits`: x takes that many with its sign."""
    multiplier, shift = scale
    known = not isinstance(multiplier, ov.Output) and not isinstance(shift, ov.Output)
    if known and bits <= 9 and not double and np.min(shift) > 16:
        # Products of 39 bits: those below 16 cannot carry into the result, and without them INT32 holds it.
        below = shifted_right(ops.multiply(x, i32(multiplier & 0xFFFF)).output(0), 16)
        floor = ops.add(ops.multiply(x, i32(multiplier >> 16)), below)
        rest = np.minimum(shift - 16, 30)  # any shift of 30 or more gives 0
        return shifted_right(ops.add(floor, i32(np.int64(1) << (rest - 1))).output(0), i32(rest))
    wide = product(x, scale.multiplier_node)
    if double:
        # 2^30 with the sign of x: bit 14 of the middle limb, which may go negative until it is carried.
        sign = ops.bitwise_or(shifted_right(x, 31), i32(1)).output(0)
        extra = ops.bitwise_and(shifted_left(sign, 14), by_shift(shift, lambda amount: np.where(amount > 31, -1, 0)))
        wide = Wide(wide.low, ops.add(wide.middle, extra).output(0), wide.high)
    return scaled(wide, shift)


def _scaled_48(x: Wide, scale: Scale) -> ov.Output:
    """INT32 (x * multiplier + rounding) >> shift of INT48; the multiplier has 15 bits."""
    low, middle, high = (ops.multiply(word, scale.multiplier_node).output(0) for word in x)
    middle_sum = ops.add(low_bits(middle, 16), shifted_right(low, 16)).output(0)
    wide = Wide(low_bits(low, 16), middle_sum, ops.add(high, shifted_right(middle, 16)).output(0))
    return scaled(wide, scale.shift)


def _node(zero: int | ov.Output) -> ov.Output:
    return i32(zero) if isinstance(zero, int) else zero


def _clipped(x: ov.Output, target: DType, zero: int | ov.Output, unsigned: bool) -> ov.Output:
    """Moved by the zero point into what the target holds. Clipped before, so that the sum cannot overflow."""
    half = 1 << (BITS[target] - 1)
    low, high = (0, 2 * half - 1) if unsigned else (-half, half - 1)
    if isinstance(zero, int):
        x = clipped_i32(x, low - zero, high - zero)
        x = ops.add(x, i32(zero)).output(0) if zero else x
    else:
        x = clipped_i32(ops.add(clipped_i32(x, -(1 << 20), 1 << 20), zero).output(0), low, high)
    return wrapped(x, BITS[target]) if unsigned else x


def _rescale(site: Site) -> tuple[Value, ...]:
    value, target = operand(site, 0), site.out_dtypes[0]
    mode = _check(site, value.dtype, target)
    in_unsigned, out_unsigned = bool(site.attributes["input_unsigned"]), bool(site.attributes["output_unsigned"])
    in_zero = _zero_point(site, 3, value.dtype, in_unsigned)
    out_zero = _zero_point(site, 4, target, out_unsigned)
    scale = _scales(site, value)
    if value.dtype is DType.INT48:
        x = _scaled_48(int48.words(value.output), scale)
    else:
        x = as_i32(value.output)
        if in_unsigned:
            x = low_bits(x, BITS[value.dtype])
        if not isinstance(in_zero, int) or in_zero:
            x = ops.subtract(x, _node(in_zero)).output(0)
        x = _scaled(x, scale, mode is RoundingMode.DOUBLE_ROUND, min(BITS[value.dtype] + 1, 32))
    if target is not DType.INT32:
        x = _clipped(x, target, out_zero, out_unsigned)
    return (site.builder.value(back(x, target), target, value.shape, value.layout),)


_RESULTS = (DType.INT8, DType.INT16, DType.INT32)
_OPERANDS = (*_RESULTS, DType.INT48)

register(
    Record(
        Op.RESCALE, frozenset((source, target) for source in _OPERANDS for target in _RESULTS), _rescale,
        "64-bit product in limbs of INT32", True,
    ),
)  # fmt: skip
