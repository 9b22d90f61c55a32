"""FP16, BF16 and FP8 between operators: computed as FP32, rounded wherever another operator reads the result.

The CPU plugin keeps FP32 from node to node and drops Converts to FP16 and back, so a chain of FP16 operators would
answer what no sequence of FP16 operators does; to FP8 it rounds twice. Rounding to these is therefore spelled out in
FP32 arithmetic, to nearest even, with subnormals and overflow. Converts to BF16 stay and round right, except in the
bodies of If and Loop nodes, where they truncate; and but for
subnormals, which they make 0, as TOSA allows. TOSA 1.0, section 1.9 (floating-point precision requirements).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import openvino as ov

from virtaccel.backend_openvino.lowering import nodes as ops
from virtaccel.backend_openvino.lowering.exact import f32, magnitude
from virtaccel.backend_openvino.lowering.numbers import ELEMENT_TYPES
from virtaccel.backend_openvino.lowering.operands import FP8
from virtaccel.backend_openvino.lowering.registry import Site
from virtaccel.tosa_graph.graph import DType


class Format(NamedTuple):
    """A floating-point type: its smallest normal and largest number, the smallest magnitude that rounds to neither but
    becomes `above`, and by how many bits FP32's significand is longer."""

    smallest_normal: float
    largest: float
    overflow: float
    above: float
    guard_bits: int


_FORMATS = {
    DType.FP16: Format(2.0**-14, 65504.0, 65520.0, math.inf, 13),
    DType.BF16: Format(2.0**-126, (2 - 2.0**-7) * 2.0**127, (2 - 2.0**-8) * 2.0**127, math.inf, 16),
    DType.FP8E4M3: Format(2.0**-6, 448.0, 464.0 + 2.0**-15, math.nan, 20),
    DType.FP8E5M2: Format(2.0**-14, 57344.0, 61440.0, math.inf, 21),
}


def widened(output: ov.Output, dtype: DType) -> ov.Output:
    """A floating-point operand as FP32."""
    return output if dtype is DType.FP32 else ops.convert(output, ov.Type.f32).output(0)


def narrowed(site: Site, output: ov.Output, exact: bool = False) -> ov.Output:
    """An FP32 result as the type of the site's first output. `exact` says that it is a value of that type already."""
    dtype = site.out_dtypes[0]
    if dtype is DType.FP32:
        return output
    read = bool(site.builder.readers.get(site.operator.outputs[0], 0))
    if dtype in FP8 or (dtype is DType.FP16 and read) or (dtype is DType.BF16 and site.builder.inside):
        output = output if exact else rounded(output, dtype)
    return ops.convert(output, ELEMENT_TYPES[dtype]).output(0)


def rounded(x: ov.Output, dtype: DType) -> ov.Output:
    """FP32 values rounded to the nearest value of `dtype`, ties to even; still FP32.

    Adding a number of a binade so far above x's leaves only the type's bits of x, rounded by the addition itself;
    subtracting it is exact. That number has to be a multiple of twice the type's last place, or ties would not go to
    even. Logarithm and exponential need not be exact: next to a power of two both binades round alike.
    """
    form = _FORMATS[dtype]
    whole = x
    if dtype is DType.BF16:  # its largest numbers leave no room for larger ones
        large = ops.less_equal(f32(1.0), magnitude(whole))
        x = ops.select(large, ops.multiply(whole, f32(2.0**-64)), whole).output(0)
    size = ops.clamp(magnitude(x), form.smallest_normal, form.largest)
    exponent = ops.floor(ops.multiply(ops.log(size), f32(1 / math.log(2))))
    first = f32(math.log(1.5 * 2**form.guard_bits) + 2.0**-10)
    scale = ops.exp(ops.add(ops.multiply(exponent, f32(math.log(2))), first))
    # BF16 holds 1.5 * 2^k, which scale is but for an error; a little above it, rounding and truncating give it alike.
    # Arithmetic to that end could be fused, and so not rounded.
    bias = ops.convert(ops.convert(scale, ov.Type.bf16), ov.Type.f32)
    kept = ops.subtract(ops.add(x, bias), bias)
    kept = ops.select(ops.equal(kept, f32(0.0)), ops.multiply(x, f32(0.0)), kept)  # zero keeps the sign of x
    if dtype is DType.BF16:
        kept = ops.select(large, ops.multiply(kept, f32(2.0**64)), kept)
    overflows = ops.less_equal(f32(form.overflow), magnitude(whole))
    result = ops.select(overflows, ops.multiply(whole, f32(form.above)), kept)
    if dtype not in FP8:
        return result.output(0)
    return ops.select(ops.equal(whole, whole), result, f32(math.nan)).output(0)  # converting spoils other NaNs
