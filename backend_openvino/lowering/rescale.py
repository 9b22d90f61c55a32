"""RESCALE, bit for bit: TOSA 1.0, section 2.11 and the scaling functions of its pseudocode library.

(value - zero point) * multiplier is a 64-bit product, kept in 16-bit limbs of INT32 nodes; multiplier and shift are
constants, for the whole tensor or for each element of the last axis.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from virtaccel.backend_openvino.lowering import int48
from virtaccel.backend_openvino.lowering import layout as axes
from virtaccel.backend_openvino.lowering.exact import (
    Wide,
    as_i32,
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
from virtaccel.backend_openvino.lowering.operands import known, known_integer, operand
from virtaccel.backend_openvino.lowering.registry import Array, Record, Site, Value, register
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.schema import RoundingMode


def _zero_point(site: Site, index: int, dtype: DType, unsigned: bool) -> int:
    """A zero point as it counts: of the operand's width, signed or not, and one that TOSA allows there."""
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


def _scales(site: Site, value: Value) -> tuple[Array, Array]:
    """Multipliers and shifts, shaped to broadcast over the operand as it is stored."""
    multiplier, shift = known(site, 1, "multiplier").astype(np.int64), known(site, 2, "shift").astype(np.int64)
    per_channel = bool(site.attributes.get("per_channel"))
    if per_channel and not value.shape:
        raise site.refuse("one scale for each channel of a scalar")
    count = value.shape[-1] if per_channel else 1
    if multiplier.size != count or shift.size != count:
        raise site.refuse(f"{multiplier.size} multipliers and {shift.size} shifts instead of {count}")
    if multiplier.min() < 0 or shift.min() < 2 or shift.max() > 62:
        raise site.refuse("a multiplier is negative or a shift outside 2..62")
    if not per_channel:
        return multiplier.reshape(()), shift.reshape(())
    last = axes.stored_axis(value.layout, len(value.shape) - 1)
    shape = [-1 if axis == last else 1 for axis in range(len(value.shape))]
    return multiplier.reshape(shape), shift.reshape(shape)


def _scaled(x: ov.Output, multiplier: Array, shift: Array, double: bool, bits: int) -> ov.Output:
    """INT32 (x * multiplier + rounding) >> shift. `bits`: x takes that many with its sign."""
    if bits <= 9 and not double and shift.min() > 16:
        # Products of 39 bits: those below 16 cannot carry into the result, and without them INT32 holds it.
        below = shifted_right(ops.multiply(x, i32(multiplier & 0xFFFF)).output(0), 16)
        floor = ops.add(ops.multiply(x, i32(multiplier >> 16)), below)
        rest = np.minimum(shift - 16, 30)  # any shift of 30 or more gives 0
        return shifted_right(ops.add(floor, i32(np.int64(1) << (rest - 1))).output(0), i32(rest))
    wide = product(x, i32(multiplier))
    if double:
        # 2^30 with the sign of x: bit 14 of the middle limb, which may go negative until it is carried.
        sign = ops.bitwise_or(shifted_right(x, 31), i32(1)).output(0)
        extra = ops.bitwise_and(shifted_left(sign, 14), i32(np.where(shift > 31, -1, 0)))
        wide = Wide(wide.low, ops.add(wide.middle, extra).output(0), wide.high)
    return scaled(wide, shift)


def _scaled_48(x: Wide, multiplier: Array, shift: Array) -> ov.Output:
    """INT32 (x * multiplier + rounding) >> shift of INT48; the multiplier has 15 bits."""
    low, middle, high = (ops.multiply(word, i32(multiplier)).output(0) for word in x)
    middle_sum = ops.add(low_bits(middle, 16), shifted_right(low, 16)).output(0)
    return scaled(Wide(low_bits(low, 16), middle_sum, ops.add(high, shifted_right(middle, 16)).output(0)), shift)


def _rescale(site: Site) -> tuple[Value, ...]:
    value, target = operand(site, 0), site.out_dtypes[0]
    mode = _check(site, value.dtype, target)
    in_unsigned, out_unsigned = bool(site.attributes["input_unsigned"]), bool(site.attributes["output_unsigned"])
    in_zero = _zero_point(site, 3, value.dtype, in_unsigned)
    out_zero = _zero_point(site, 4, target, out_unsigned)
    multiplier, shift = _scales(site, value)
    if value.dtype is DType.INT48:
        x = _scaled_48(int48.words(value.output), multiplier, shift)
    else:
        x = as_i32(value.output)
        if in_unsigned:
            x = low_bits(x, BITS[value.dtype])
        if in_zero:
            x = ops.subtract(x, i32(in_zero)).output(0)
        x = _scaled(x, multiplier, shift, mode is RoundingMode.DOUBLE_ROUND, min(BITS[value.dtype] + 1, 32))
    if target is not DType.INT32:
        half = 1 << (BITS[target] - 1)
        low, high = (0, 2 * half - 1) if out_unsigned else (-half, half - 1)
        # Clipped before the zero point is added, which then cannot overflow.
        x = clipped_i32(x, low - out_zero, high - out_zero)
        x = ops.add(x, i32(out_zero)).output(0) if out_zero else x
        x = wrapped(x, BITS[target]) if out_unsigned else x
    return (site.builder.value(back(x, target), target, value.shape, value.layout),)


_RESULTS = (DType.INT8, DType.INT16, DType.INT32)
_OPERANDS = (*_RESULTS, DType.INT48)

register(
    Record(
        Op.RESCALE, frozenset((source, target) for source in _OPERANDS for target in _RESULTS), _rescale,
        "64-bit product in limbs of INT32", True,
    ),
)  # fmt: skip
