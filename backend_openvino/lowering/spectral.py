"""FFT2D and RFFT2D: TOSA 1.0, section 2.2 (extension EXT-FFT).

A transform of a short axis is one matrix product with cosines and sines worked out in float64; those of multiples of a
quarter turn are exactly 0 and 1, so what is zero by symmetry stays zero. A long axis is cut into two shorter ones with
a turn of each element in between, as Cooley and Tukey do. Errors stay those of a dot product over the axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import openvino as ov

from virtaccel.backend_openvino.lowering import nodes as ops
from virtaccel.backend_openvino.lowering.exact import f32
from virtaccel.backend_openvino.lowering.operands import operand
from virtaccel.backend_openvino.lowering.registry import Array, Record, Site, Value, register
from virtaccel.tosa_graph.graph import DType, Op

_SHORT = 128
"""Longest axis transformed by one product."""


class Complex(NamedTuple):
    """Real and imaginary part, FP32 nodes of one shape; a part that is None is 0."""

    real: ov.Output
    imaginary: ov.Output | None


def _turns(steps: Array, size: int) -> tuple[Array, Array]:
    """Cosine and sine of `steps` parts of a whole turn divided by `size`."""
    steps = steps % size
    angle = steps * (2 * math.pi / size)
    quarter = 4 * steps % size == 0
    cosine, sine = np.cos(angle), np.sin(angle)
    return np.where(quarter, np.round(cosine), cosine), np.where(quarter, np.round(sine), sine)


def _reshaped(node: ov.Output, *shape: int) -> ov.Output:
    return ops.reshape(node, np.array(shape, np.int64), special_zero=False).output(0)


def _swapped(node: ov.Output) -> ov.Output:
    """The last two of three axes exchanged."""
    return ops.transpose(node, np.array([0, 2, 1], np.int64)).output(0)


def _both(x: Complex, change: Callable[[ov.Output], ov.Output]) -> Complex:
    return Complex(change(x.real), None if x.imaginary is None else change(x.imaginary))


def _transformed(x: Complex, rows: int, size: int, sign: int) -> Complex:
    """Sums of x[n] * exp(-i * sign * 2 pi n k / size) along the last axis of [rows, size]."""
    if size > _SHORT:
        return _transformed_in_two(x, rows, size, sign)
    places = np.arange(size)
    cosine, sine = _turns(np.outer(places, places), size)
    matrix, parts = np.hstack([cosine, -sign * sine]), [x.real]
    if x.imaginary is not None:
        matrix = np.vstack([matrix, np.hstack([sign * sine, cosine])])
        parts.append(x.imaginary)
    product = ops.matmul(ops.concat(parts, 1) if len(parts) > 1 else parts[0], f32(matrix), False, False)
    return Complex(*ops.split(product, 1, 2).outputs())


def _transformed_in_two(x: Complex, rows: int, size: int, sign: int) -> Complex:
    """n = first * inner + second, k = k1 + outer * k2: over `first`, a turn by second * k1, then over `second`."""
    outer = 1 << (size.bit_length() // 2)
    inner = size // outer
    x = _both(x, lambda part: _reshaped(_swapped(_reshaped(part, rows, outer, inner)), rows * inner, outer))
    x = _both(_transformed(x, rows * inner, outer, sign), lambda part: _reshaped(part, rows, inner, outer))
    cosine, sine = (f32(turn) for turn in _turns(np.outer(np.arange(inner), np.arange(outer)), size))
    x = _turned(x, cosine, sine, sign)
    x = _both(x, lambda part: _reshaped(_swapped(part), rows * outer, inner))
    x = _transformed(x, rows * outer, inner, sign)
    return _both(x, lambda part: _reshaped(_swapped(_reshaped(part, rows, outer, inner)), rows, size))


def _turned(x: Complex, cosine: ov.Output, sine: ov.Output, sign: int) -> Complex:
    """x * (cosine - i * sign * sine)."""
    assert x.imaginary is not None  # a transform gives both parts
    across = ops.multiply(x.imaginary, sine), ops.multiply(x.real, sine)
    along = ops.multiply(x.real, cosine), ops.multiply(x.imaginary, cosine)
    plus, minus = (ops.add, ops.subtract) if sign > 0 else (ops.subtract, ops.add)
    return Complex(plus(along[0], across[0]).output(0), minus(along[1], across[1]).output(0))


def _planes(x: Complex, shape: tuple[int, ...], columns: int, sign: int) -> Complex:
    """Both axes of [N, H, W]; only the first `columns` of each row are kept."""
    batch, height, width = shape
    x = _both(x, lambda part: _reshaped(part, batch * height, width))
    x = _transformed(x, batch * height, width, sign)
    if columns < width:
        bounds = [np.array([bound], np.int64) for bound in (0, columns, 1, 1)]
        x = _both(x, lambda part: ops.slice(part, *bounds).output(0))
    x = _both(x, lambda part: _reshaped(_swapped(_reshaped(part, batch, height, columns)), batch * columns, height))
    x = _transformed(x, batch * columns, height, sign)
    return _both(x, lambda part: _swapped(_reshaped(part, batch, columns, height)))


def _results(site: Site, x: Complex) -> tuple[Value, ...]:
    assert x.imaginary is not None  # a transform gives both parts
    return tuple(site.builder.value(part, DType.FP32, site.out_shapes[0]) for part in (x.real, x.imaginary))


def _fft(site: Site) -> tuple[Value, ...]:
    """FFT2D, not scaled in either direction."""
    real, imaginary = operand(site, 0), operand(site, 1)
    x = Complex(site.builder.tosa(real), site.builder.tosa(imaginary))
    sign = -1 if site.attributes.get("inverse") else 1
    return _results(site, _planes(x, real.shape, real.shape[2], sign))


def _real_fft(site: Site) -> tuple[Value, ...]:
    """RFFT2D: the first half of each row and the element after it. Where row and column are their own mirror images
    the imaginary part is 0, and TOSA allows no error there."""
    value = operand(site, 0)
    _, height, width = value.shape
    x = _planes(Complex(site.builder.tosa(value), None), value.shape, width // 2 + 1, 1)
    if max(height, width) <= _SHORT or x.imaginary is None:
        return _results(site, x)
    kept = np.ones((1, height, width // 2 + 1), np.float32)
    kept[:, :: max(height // 2, 1), :: max(width // 2, 1)] = 0
    return _results(site, x._replace(imaginary=ops.multiply(x.imaginary, f32(kept)).output(0)))


_HOW = "products with cosines and sines, long axes in two steps"
_FP32 = frozenset({(DType.FP32,)})

register(
    Record(Op.FFT2D, _FP32, _fft, _HOW, False),
    Record(Op.RFFT2D, _FP32, _real_fft, _HOW, False),
)
