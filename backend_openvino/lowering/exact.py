"""Building blocks that are exact in the CPU plugin's kernels, and constants for them.

INT32 addition, multiplication, minimum, maximum and bitwise operators are exact and wrap; comparisons and Select of
INT32 go through FP32, and so does whatever is fused with them. So INT32 is compared by bitwise difference with zero,
which FP32 tells exactly, and selected by masks. Shifts are exact too, but slow, and are made of the others. 64-bit
products are kept in 16-bit limbs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import openvino as ov
from numpy.typing import ArrayLike, NDArray

from virtaccel.backend_openvino.lowering import nodes as ops


def f32(value: ArrayLike) -> ov.Output:
    """An FP32 constant."""
    return ops.constant(np.asarray(value, np.float32)).output(0)


def i32(value: ArrayLike) -> ov.Output:
    """An INT32 constant; values of 2^31 and above mean their low 32 bits."""
    return ops.constant(np.asarray(value, np.int64).astype(np.int32)).output(0)


def magnitude(x: ov.Output) -> ov.Output:
    """Absolute values. Where there is one axis, the runtime takes an Abs for arithmetic on shapes: it pushes it through
    a Concat that others read too, or drops it behind a constant. With a second axis it lets it be."""
    shape = x.get_partial_shape()
    if shape.rank.get_length() != 1:
        return ops.abs(x).output(0)
    column = ops.reshape(x, np.array([-1, 1], np.int64), special_zero=False)
    return ops.reshape(ops.abs(column), np.array([-1], np.int64), special_zero=False).output(0)


def as_i32(x: ov.Output) -> ov.Output:
    """Integers or booleans as INT32."""
    return ops.convert(x, ov.Type.i32).output(0)


def nonzero(x: ov.Output) -> ov.Output:
    """Whether INT32 values differ from 0: the one comparison that going through FP32 cannot spoil."""
    return ops.not_equal(x, i32(0)).output(0)


def equal_i32(a: ov.Output, b: ov.Output) -> ov.Output:
    return ops.equal(ops.bitwise_xor(a, b), i32(0)).output(0)


def greater_i32(a: ov.Output, b: ov.Output) -> ov.Output:
    return nonzero(ops.bitwise_xor(ops.maximum(a, b), b).output(0))


def greater_equal_i32(a: ov.Output, b: ov.Output) -> ov.Output:
    return equal_i32(ops.maximum(a, b).output(0), a)


def mask(condition: ov.Output) -> ov.Output:
    """INT32 with all bits set where the boolean holds, else 0."""
    return ops.subtract(i32(0), as_i32(condition)).output(0)


def blend_i32(condition: ov.Output, a: ov.Output, b: ov.Output) -> ov.Output:
    """INT32 `a` where the condition holds, else `b`."""
    return ops.bitwise_xor(b, ops.bitwise_and(ops.bitwise_xor(a, b), mask(condition))).output(0)


_EXACT_SHIFT = 7
"""From here on, what a shift keeps of INT32 is no more than FP32 holds."""


def _amounts(bits: ov.Output | int) -> NDArray[np.int64] | None:
    """The amounts of a shift if they are known."""
    if isinstance(bits, int):
        return np.array(bits, np.int64)
    node = bits.get_node()
    return node.data.astype(np.int64) if isinstance(node, ov.op.Constant) else None


def _power(bits: ov.Output | int, of: Callable[[NDArray[np.int64]], ov.Output]) -> ov.Output:
    """A constant made of the amounts, or a row of one for amounts 0 to 31."""
    known = _amounts(bits)
    if known is not None:
        return of(known)
    return ops.gather(of(np.arange(32)), clipped_i32(as_i32(bits), 0, 31), np.array(0, np.int64)).output(0)


def shifted_left(x: ov.Output, bits: ov.Output | int) -> ov.Output:
    """Amounts 0 to 31. A product, since the kernels of shifts take a hundred times as long as others."""
    if isinstance(bits, int) and bits == 0:
        return x
    return ops.multiply(x, _power(bits, lambda amount: i32(np.int64(1) << amount))).output(0)


def shifted_right(x: ov.Output, bits: ov.Output | int) -> ov.Output:
    """Arithmetic shift by 0 to 31, in FP32: of what it keeps, or of the two halves."""
    if isinstance(bits, int) and bits == 0:
        return x
    known = _amounts(bits)
    if known is not None and known.min() >= _EXACT_SHIFT:
        kept = ops.convert(ops.bitwise_and(x, i32(-(np.int64(1) << known))), ov.Type.f32)
        return as_i32(ops.multiply(kept, f32(2.0**-known.astype(np.float64))).output(0))
    upper = ops.multiply(ops.convert(ops.bitwise_and(x, i32(-65536)), ov.Type.f32), f32(2.0**-16))
    lower = ops.convert(low_bits(x, 16), ov.Type.f32)
    factor = _power(bits, lambda amount: f32(2.0 ** -amount.astype(np.float64)))
    halves = ops.multiply(upper, ops.multiply(factor, f32(65536.0))), ops.multiply(lower, factor)
    return ops.add(*(as_i32(ops.floor(half).output(0)) for half in halves)).output(0)


def low_bits(x: ov.Output, bits: int) -> ov.Output:
    """The low bits of INT32, zero extended."""
    return ops.bitwise_and(x, i32((1 << bits) - 1)).output(0)


def wrapped(x: ov.Output, bits: int) -> ov.Output:
    """The low bits of INT32, sign extended."""
    return shifted_right(shifted_left(x, 32 - bits), 32 - bits)


def clipped_i32(x: ov.Output, low: int, high: int) -> ov.Output:
    return ops.minimum(ops.maximum(x, i32(low)), i32(high)).output(0)


class Wide(NamedTuple):
    """A 64-bit integer: low and middle are limbs of 16 bits (which may carry more until `carried`), high is INT32."""

    low: ov.Output
    middle: ov.Output
    high: ov.Output


def product(a: ov.Output, b: ov.Output) -> Wide:
    """Signed 64-bit product of INT32; the middle limb not yet carried."""
    a_low, b_low = low_bits(a, 16), low_bits(b, 16)
    a_high, b_high = shifted_right(a, 16), shifted_right(b, 16)
    least = ops.multiply(a_low, b_low).output(0)
    cross = ops.multiply(a_low, b_high).output(0), ops.multiply(a_high, b_low).output(0)
    middle = low_bits(shifted_right(least, 16), 16)
    high = ops.multiply(a_high, b_high).output(0)
    for part in cross:
        middle = ops.add(middle, low_bits(part, 16)).output(0)
        high = ops.add(high, shifted_right(part, 16)).output(0)
    return Wide(low_bits(least, 16), middle, high)


Shift: TypeAlias = NDArray[Any] | ov.Output
"""Amounts that broadcast: known, or a node of INT32."""


def by_shift(shift: Shift, rule: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> ov.Output:
    """`rule` of every shift, as INT32: worked out now, or looked up for amounts 0 to 63."""
    if isinstance(shift, ov.Output):
        return ops.gather(i32(rule(np.arange(64))), clipped_i32(shift, 0, 63), np.array(0, np.int64)).output(0)
    return i32(rule(np.asarray(shift, np.int64)))


def _half(amount: NDArray[np.int64]) -> NDArray[np.int64]:
    """2^(amount - 1), 0 for 0."""
    return np.where(amount > 0, np.int64(1) << np.maximum(amount - 1, 0), 0)


def scaled(wide: Wide, shift: Shift) -> ov.Output:
    """(wide + 2^(shift-1)) >> shift as INT32, for results that fit; `shift` is 1 to 63."""
    low = ops.add(wide.low, by_shift(shift, lambda amount: _half(amount) & 0xFFFF)).output(0)
    carried = ops.add(wide.middle, by_shift(shift, lambda amount: (_half(amount) >> 16) & 0xFFFF))
    middle = ops.add(carried, shifted_right(low, 16)).output(0)
    high = ops.add(wide.high, by_shift(shift, lambda amount: _half(amount) >> 32))
    high = ops.add(high, shifted_right(middle, 16)).output(0)
    above = ops.bitwise_and(
        shifted_right(high, by_shift(shift, lambda amount: np.clip(amount - 32, 0, 31))),
        by_shift(shift, lambda amount: np.where(amount >= 32, -1, 0)),
    ).output(0)
    if not isinstance(shift, ov.Output) and np.min(shift) >= 32:
        return above
    word = ops.bitwise_or(low_bits(low, 16), shifted_left(middle, 16)).output(0)
    kept = ops.bitwise_and(
        shifted_right(word, by_shift(shift, lambda amount: np.clip(amount, 1, 31))),
        by_shift(shift, lambda amount: (np.int64(1) << (32 - np.clip(amount, 1, 31))) - 1),
    )
    joined = ops.bitwise_or(kept, shifted_left(high, by_shift(shift, lambda amount: 32 - np.clip(amount, 1, 31))))
    below = ops.bitwise_and(joined, by_shift(shift, lambda amount: np.where(amount < 32, -1, 0)))
    return ops.bitwise_or(above, below).output(0)
