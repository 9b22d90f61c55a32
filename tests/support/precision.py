"""TOSA 1.0's error bounds (chapters of the operators, "Precision Requirements"), on whole arrays.

Each bound takes the operand and the result in float64 and gives the largest error allowed at every element;
`violations` then judges as `tosa_reference_check_fp_bnd` of the standard's pseudocode library does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Bound: TypeAlias = Callable[[np.dtype[Any], Array, Array], Array]


class Format(NamedTuple):
    smallest_normal: float
    largest: float
    fraction_bits: int


FORMATS = {
    np.dtype(np.float32): Format(2.0**-126, float(np.finfo(np.float32).max), 23),
    np.dtype(np.float16): Format(2.0**-14, 65504.0, 10),
}


def violations(got: Array, expected: Array, bound: Array | float) -> Array:
    """Boolean array: where `got` (FP32 or FP16) is further from `expected` (float64) than `bound`."""
    form = FORMATS[got.dtype]
    allowed = np.broadcast_to(np.asarray(bound, np.float64), expected.shape)
    with np.errstate(all="ignore"):
        sign = np.where(expected < 0, -1.0, 1.0)
        value, centre = got.astype(np.float64) * sign, expected * sign
        high, low = centre + allowed, centre - allowed
        high = np.where(high > form.largest, np.inf, high)
        low = np.where(low > form.largest, np.inf, np.where(low < -form.largest, -np.inf, low))
        inside = (value >= low) & (value <= high)
    inside = np.where(value == 0, low < form.smallest_normal, inside)
    inside = np.where(np.isfinite(allowed), inside, True)
    return ~np.where(np.isnan(expected), np.isnan(value), inside)


def ulp(dtype: np.dtype[Any], expected: Array) -> Array:
    """One unit in the last place at each value; 0 at 0, infinity and NaN."""
    form = FORMATS[dtype]
    size = np.abs(expected)
    regular = np.isfinite(size) & (size > 0)
    _, exponent = np.frexp(np.where(regular, size, 1.0))
    power = np.ldexp(1.0, exponent - 1)
    return np.where(regular, np.maximum(power, form.smallest_normal) * 2.0**-form.fraction_bits, 0.0)


def ulps(count: float) -> Bound:
    return lambda dtype, x, expected: ulp(dtype, expected) * count


def absolute(
    dtype: np.dtype[Any], magnitude: Array, scale: Array | float, lower: float = 0, divisor: float = 1
) -> Array:
    """calcAbsErrorBound of the pseudocode library."""
    form = FORMATS[dtype]
    size = np.maximum(np.abs(magnitude), form.smallest_normal)
    with np.errstate(all="ignore"):
        if lower > 0:
            size = np.maximum(lower / np.asarray(scale, np.float64), size)
        return 2.0 ** (-form.fraction_bits / divisor) * size * scale


def _base(dtype: np.dtype[Any]) -> int:
    return 3 if dtype == np.float32 else 1


def _sine(dtype: np.dtype[Any], x: Array, expected: Array) -> Array:
    return np.maximum(absolute(dtype, x, 2, 0, 2), np.pi * FORMATS[dtype].smallest_normal)


UNARY: dict[str, Bound] = {
    "ABS": ulps(0),
    "CEIL": ulps(0.5),
    "COS": lambda dtype, x, expected: absolute(dtype, 1 + np.abs(x), 1, 0, 2),
    "ERF": ulps(5),
    "EXP": lambda dtype, x, expected: absolute(dtype, expected, _base(dtype) + 2 * np.abs(x)),
    "FLOOR": ulps(0.5),
    "LOG": lambda dtype, x, expected: absolute(dtype, expected, 5, 0.5),
    "NEGATE": ulps(0),
    "RECIPROCAL": ulps(1),
    "RSQRT": ulps(2),
    "SIGMOID": lambda dtype, x, expected: absolute(dtype, expected, 2 * (1 + np.abs(x))),
    "SIN": _sine,
    "TANH": lambda dtype, x, expected: absolute(dtype, expected, 4 * (_base(dtype) + 2 * np.abs(x)), 0.5),
}


def power_bound(dtype: np.dtype[Any], x: Array, y: Array, expected: Array) -> Array:
    """POW, for x > 0."""
    exponent = y * np.log(x)
    form = FORMATS[dtype]
    size = np.maximum(np.maximum(np.abs(exponent), form.smallest_normal), 0.1 * np.abs(y))
    product = 2.0**-form.fraction_bits * size * 5.5
    return expected * np.expm1(product) + absolute(dtype, expected, _base(dtype) + 2 * np.abs(exponent + product))


def product_bound(dtype: np.dtype[Any], expected: Array, count: int) -> Array:
    """REDUCE_PRODUCT over `count` elements."""
    form = FORMATS[dtype]
    growth = (1 + 2.0 ** (-form.fraction_bits - 1)) ** count - 1
    return np.maximum(np.abs(expected), form.smallest_normal) * growth


def sum_bound(dtype: np.dtype[Any], operand: Array, axis: int) -> Array:
    """REDUCE_SUM as a dot product with ones: twice the length times one rounding of the sum of magnitudes."""
    magnitudes = np.abs(operand.astype(np.float64)).sum(axis=axis, keepdims=True)
    return 2 * operand.shape[axis] * magnitudes * 2.0 ** -(FORMATS[dtype].fraction_bits + 1)
