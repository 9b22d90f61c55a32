"""Integers, bit for bit: TOSA 1.0, sections 2.4 to 2.6.

Everything is computed as INT32, whose addition, multiplication and bitwise operators are exact in the CPU
plugin's kernels, and brought back to INT8 or INT16 by wrapping or clipping first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np
import openvino as ov

from virtaccel.backend_openvino.lowering import nodes as ops
from virtaccel.backend_openvino.lowering.exact import (
    as_i32,
    blend_i32,
    clipped_i32,
    equal_i32,
    i32,
    low_bits,
    magnitude,
    mask,
    nonzero,
    product,
    scaled,
    shifted_left,
    shifted_right,
    wrapped,
)
from virtaccel.backend_openvino.lowering.numbers import ELEMENT_TYPES
from virtaccel.backend_openvino.lowering.operands import known_integer, operand, types
from virtaccel.backend_openvino.lowering.registry import Record, Site, Value, register
from virtaccel.tosa_graph.graph import DType, Op

BITS = {DType.INT8: 8, DType.INT16: 16, DType.INT32: 32}

Rule: TypeAlias = Callable[..., ov.Output]


def back(x: ov.Output, dtype: DType) -> ov.Output:
    """INT32 values that `dtype` can hold, as that type."""
    return x if dtype is DType.INT32 else ops.convert(x, ELEMENT_TYPES[dtype]).output(0)


# ---- arithmetic


def arithmetic(site: Site) -> tuple[Value, ...]:
    """ADD and SUB of INT32, MUL of INT8, INT16 and INT32."""
    left, right = operand(site, 0), operand(site, 1)
    (a, b), layout = site.builder.align(left, right)
    if site.operator.op is Op.MUL:
        result = _product(site, as_i32(a), as_i32(b), left.dtype)
    else:
        result = (ops.add if site.operator.op is Op.ADD else ops.subtract)(a, b).output(0)
    return (site.builder.value(result, DType.INT32, site.out_shapes[0], layout),)


def _product(site: Site, a: ov.Output, b: ov.Output, dtype: DType) -> ov.Output:
    plain = ops.multiply(a, b).output(0)
    if operand(site, 2).constant is None:
        if dtype is not DType.INT32:
            return plain  # the shift has to be 0
        shift = as_i32(ops.reshape(operand(site, 2).output, np.zeros(0, np.int64), special_zero=False).output(0))
        return blend_i32(equal_i32(shift, i32(0)), plain, scaled(product(a, b), shift))
    known = known_integer(site, 2, "shift")
    if known == 0:
        return plain
    if dtype is not DType.INT32 or not 0 < known <= 63:
        raise site.refuse(f"shift {known} of a product of {dtype.name}")
    return scaled(product(a, b), np.array(known))


def absolute(site: Site) -> tuple[Value, ...]:
    value = operand(site, 0)
    return (site.builder.value(magnitude(value.output), value.dtype, value.shape, value.layout),)


def zero_point(site: Site, index: int) -> ov.Output:
    """A zero point as INT32. One that is not INT8 has to be 0, which is taken for granted if it is not known."""
    value = operand(site, index)
    if value.constant is None and value.dtype is DType.INT8:
        return as_i32(ops.reshape(value.output, np.zeros(0, np.int64), special_zero=False).output(0))
    zero = known_integer(site, index, "zero point") if value.constant is not None else 0
    if zero and value.dtype is not DType.INT8:
        raise site.refuse(f"zero point of {value.dtype.name} is not 0")
    return i32(zero)


def negate(site: Site) -> tuple[Value, ...]:
    """Zero points out, negated, zero point in, clipped."""
    value = operand(site, 0)
    turned = ops.subtract(ops.add(zero_point(site, 1), zero_point(site, 2)), as_i32(value.output)).output(0)
    if value.dtype is not DType.INT32:
        half = 1 << (BITS[value.dtype] - 1)
        turned = clipped_i32(turned, -half, half - 1)
    return (site.builder.value(back(turned, value.dtype), value.dtype, value.shape, value.layout),)


def _quotient(a: ov.Output, b: ov.Output) -> ov.Output:
    """Truncated quotient of INT32.

    FP32 gives a quotient that is off by 2^-22 of its size; dividing what is left gives the rest, to the nearest
    integer; if the remainder then has the wrong sign, the quotient is one too far from zero. No integer division is
    ever emitted, so nothing traps; for a zero divisor and INT_MIN / -1 TOSA promises nothing.
    """
    divisor = ops.convert(b, ov.Type.f32)

    def nearest(dividend: ov.Output) -> ov.Output:
        ratio = ops.round(ops.divide(ops.convert(dividend, ov.Type.f32), divisor), "half_to_even")
        return as_i32(ops.clamp(ratio, -2147483520.0, 2147483520.0).output(0))

    first = nearest(a)
    left = ops.subtract(a, ops.multiply(first, b)).output(0)
    second = nearest(left)
    quotient = ops.add(first, second)
    left = ops.subtract(left, ops.multiply(second, b)).output(0)
    opposed = ops.bitwise_and(shifted_right(ops.bitwise_xor(left, a).output(0), 31), mask(nonzero(left)))
    sign = ops.bitwise_or(shifted_right(ops.bitwise_xor(a, b).output(0), 31), i32(1))
    return ops.subtract(quotient, ops.bitwise_and(opposed, sign)).output(0)


# ---- shifts


def _right_shift(a: ov.Output, b: ov.Output, rounds: bool) -> ov.Output:
    result = shifted_right(a, b)
    if rounds:
        last = shifted_right(a, ops.maximum(ops.subtract(b, i32(1)), i32(0)).output(0))
        result = ops.add(result, ops.bitwise_and(last, ops.minimum(b, i32(1)))).output(0)
    return result


def _logical_right_shift(a: ov.Output, b: ov.Output, bits: int) -> ov.Output:
    if bits < 32:
        return wrapped(shifted_right(low_bits(a, bits), b), bits)
    sign_copies = shifted_left(shifted_left(i32(-1), ops.subtract(i32(31), b).output(0)), 1)
    return ops.bitwise_and(shifted_right(a, b), ops.bitwise_not(sign_copies)).output(0)


def _shift(site: Site) -> tuple[Value, ...]:
    """Both operands as INT32; the amount is kept inside the type's width, outside of which TOSA promises nothing."""
    left, right = operand(site, 0), operand(site, 1)
    (a, b), layout = site.builder.align(left, right)
    bits = BITS[left.dtype]
    a, b = as_i32(a), clipped_i32(as_i32(b), 0, bits - 1)
    if site.operator.op is Op.LOGICAL_LEFT_SHIFT:
        result = wrapped(shifted_left(a, b), bits) if bits < 32 else shifted_left(a, b)
    elif site.operator.op is Op.LOGICAL_RIGHT_SHIFT:
        result = _logical_right_shift(a, b, bits)
    else:
        result = _right_shift(a, b, bool(site.attributes.get("round")))
    return (site.builder.value(back(result, left.dtype), left.dtype, site.out_shapes[0], layout),)


# ---- bits

_BITWISE: dict[Op, tuple[Rule, str]] = {
    Op.BITWISE_AND: (ops.bitwise_and, "BitwiseAnd"),
    Op.BITWISE_OR: (ops.bitwise_or, "BitwiseOr"),
    Op.BITWISE_XOR: (ops.bitwise_xor, "BitwiseXor"),
    Op.BITWISE_NOT: (ops.bitwise_not, "BitwiseNot"),
}


def _bitwise(site: Site, node: Callable[..., ov.Node]) -> tuple[Value, ...]:
    nodes, layout = site.builder.align(*(operand(site, index) for index in range(len(site.inputs))))
    return (site.builder.value(node(*nodes), site.out_dtypes[0], site.out_shapes[0], layout),)


def _leading_zeros(x: ov.Output) -> ov.Output:
    """Halving: where the upper bits are all 0, count them and shift the lower ones up."""
    total = i32(0)
    for width in (16, 8, 4, 2, 1):
        upper = ops.bitwise_and(x, i32(-1 << (32 - width))).output(0)
        step = ops.bitwise_and(mask(equal_i32(upper, i32(0))), i32(width)).output(0)
        total = ops.add(total, step).output(0)
        x = shifted_left(x, step)
    return ops.add(total, as_i32(equal_i32(x, i32(0)))).output(0)


def _on_i32(site: Site, rule: Rule) -> tuple[Value, ...]:
    nodes, layout = site.builder.align(*(operand(site, index) for index in range(len(site.inputs))))
    return (site.builder.value(rule(*nodes), DType.INT32, site.out_shapes[0], layout),)


# ---- tables


def _table(site: Site) -> tuple[Value, ...]:
    value, table = operand(site, 0), operand(site, 1)
    entries = 256 if value.dtype is DType.INT8 else 513
    if table.shape != (entries,):
        raise site.refuse(f"table has shape {table.shape} instead of ({entries},)")
    x, zero = as_i32(value.output), ops.constant(np.array(0, np.int64))
    if value.dtype is DType.INT8:
        result = ops.gather(table.output, ops.add(x, i32(128)), zero).output(0)
    else:
        # Nine bits of the operand choose two neighbours, seven say how far between them.
        wide = as_i32(table.output)
        place = ops.add(shifted_right(x, 7), i32(256))
        base = ops.gather(wide, place, zero).output(0)
        slope = ops.subtract(ops.gather(wide, ops.add(place, i32(1)), zero), base)
        result = ops.add(shifted_left(base, 7), ops.multiply(slope, low_bits(x, 7))).output(0)
    return (site.builder.value(result, site.out_dtypes[0], value.shape, value.layout),)


# ---- rows

_ALL = types(DType.INT8, DType.INT16, DType.INT32)
_I32 = types(DType.INT32)

register(
    Record(Op.INTDIV, _I32, partial(_on_i32, rule=_quotient), "two FP32 divisions, remainders in INT32", True),
    Record(Op.ARITHMETIC_RIGHT_SHIFT, _ALL, _shift, "halves by powers of two in FP32, the last bit out added", True),
    Record(Op.LOGICAL_LEFT_SHIFT, _ALL, _shift, "product with a power of two", True),
    Record(Op.LOGICAL_RIGHT_SHIFT, _ALL, _shift, "halves by powers of two in FP32, copies of the sign cleared", True),
    *(Record(op, _ALL, partial(_bitwise, node=node), how, True) for op, (node, how) in _BITWISE.items()),
    Record(Op.CLZ, _I32, partial(_on_i32, rule=_leading_zeros), "halving by masks and shifts", True),
    Record(
        Op.TABLE, frozenset({(DType.INT8, DType.INT8, DType.INT8), (DType.INT16, DType.INT16, DType.INT32)}), _table,
        "Gather; INT16 interpolated in INT32", True,
    ),
)  # fmt: skip
