"""FP16 between operators: computed as FP32, rounded to FP16 wherever another operator reads the result.

The CPU plugin keeps FP32 from node to node and drops Converts to FP16 and back, so a chain of FP16 operators would
answer what no sequence of FP16 operators does. Rounding is therefore spelled out in FP32 arithmetic, to nearest even,
with subnormals and overflow. TOSA 1.0, section 1.9 (floating-point precision requirements).
"""

from __future__ import annotations

import math

import openvino as ov
from openvino import opset15 as ops

from virtaccel.backend_openvino.lowering.exact import f32
from virtaccel.backend_openvino.lowering.numbers import ELEMENT_TYPES
from virtaccel.backend_openvino.lowering.registry import Site
from virtaccel.tosa_graph.graph import DType

_SMALLEST_NORMAL = 2.0**-14
_OVERFLOW = 65520.0
"""The smallest magnitude that rounds to infinity."""
_GUARD_BITS = 13
"""FP32 has 24 bits of significand, FP16 has 11."""


def widened(output: ov.Output, dtype: DType) -> ov.Output:
    """A floating-point operand as FP32."""
    return output if dtype is DType.FP32 else ops.convert(output, ov.Type.f32).output(0)


def narrowed(site: Site, output: ov.Output, exact: bool = False) -> ov.Output:
    """An FP32 result as the type of the site's first output. `exact` says that it is a value of that type already."""
    dtype = site.out_dtypes[0]
    if dtype is DType.FP32:
        return output
    if not exact and site.builder.readers.get(site.operator.outputs[0], 0):
        output = rounded(output)
    return ops.convert(output, ELEMENT_TYPES[dtype]).output(0)


def rounded(x: ov.Output) -> ov.Output:
    """FP32 values rounded to the nearest FP16 value, ties to even; still FP32.

    Adding a number of the binade 13 above x's leaves only FP16's bits of x, rounded by the addition itself; subtracting
    it is exact. That number has to be a multiple of twice FP16's last place, or ties would not go to even. Logarithm
    and exponential need not be exact: next to a power of two both binades round alike.
    """
    size = ops.clamp(ops.abs(x), _SMALLEST_NORMAL, 65504.0)
    exponent = ops.floor(ops.multiply(ops.log(size), f32(1 / math.log(2))))
    scale = ops.exp(ops.add(ops.multiply(exponent, f32(math.log(2))), f32(math.log(1.5 * 2**_GUARD_BITS))))
    spread = ops.multiply(scale, f32(4097.0))
    bias = ops.subtract(spread, ops.subtract(spread, scale))  # the 12 leading bits of scale: exactly 1.5 * 2^k
    kept = ops.subtract(ops.add(x, bias), bias)
    kept = ops.select(ops.equal(kept, f32(0.0)), ops.multiply(x, f32(0.0)), kept)  # zero keeps the sign of x
    overflows = ops.less_equal(f32(_OVERFLOW), ops.abs(x))
    return ops.select(overflows, ops.multiply(x, f32(math.inf)), kept).output(0)
