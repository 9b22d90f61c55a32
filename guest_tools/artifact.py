"""What LOAD_PROGRAM says about a TOSA artifact: its format and the twelve target words.

Knows the words of TOSA artifacts (protocol 1.0's TOSA format, ABI 1) and which extension an operator or element type
belongs to (TOSA 1.0, section 1.5, profiles and extensions). Standard library only: this also runs inside a guest.
"""

from __future__ import annotations

from collections.abc import Iterator

from virtaccel.tosa_graph.graph import DType, Graph, Op
from virtaccel.tosa_graph.schema import RoundingMode

TOSA_FORMAT = 0x544F5341
TARGET_ABI = 1
PROFILE_INTEGER, PROFILE_FLOATING_POINT = 1, 2
LEVEL_8K = 1

# Bit numbers of the extensions.
_INT16, _INT4, _BF16, _FP8E4M3, _FP8E5M2, _FFT = range(6)
_VARIABLE, _CONTROLFLOW, _DOUBLEROUND, _INEXACTROUND = 6, 7, 9, 10  # 8 is DYNAMIC

_OF_TYPE = {
    DType.INT16: _INT16,
    DType.INT48: _INT16,
    DType.INT4: _INT4,
    DType.BF16: _BF16,
    DType.FP8E4M3: _FP8E4M3,
    DType.FP8E5M2: _FP8E5M2,
}
_OF_OPERATOR = {
    Op.FFT2D: _FFT,
    Op.RFFT2D: _FFT,
    Op.VARIABLE: _VARIABLE,
    Op.VARIABLE_READ: _VARIABLE,
    Op.VARIABLE_WRITE: _VARIABLE,
    Op.COND_IF: _CONTROLFLOW,
    Op.WHILE_LOOP: _CONTROLFLOW,
}
_OF_ROUNDING = {RoundingMode.DOUBLE_ROUND: _DOUBLEROUND, RoundingMode.INEXACT_ROUND: _INEXACTROUND}


def target_words(graph: Graph) -> tuple[int, ...]:
    """The target to declare for `graph`: its version, both profiles, level 8K, and the extensions that it uses."""
    extensions = 0
    for bit in _extensions(graph):
        extensions |= 1 << bit
    version = graph.version
    words = (TOSA_FORMAT, TARGET_ABI, version.major, version.minor, version.patch)
    return (*words, PROFILE_INTEGER | PROFILE_FLOATING_POINT, LEVEL_8K, extensions, 0, 0, 0, 0)


def _extensions(graph: Graph) -> Iterator[int]:
    for region in graph.regions:
        for block in region.blocks:
            for tensor in block.tensors.values():
                if tensor.dtype in _OF_TYPE:
                    yield _OF_TYPE[tensor.dtype]
                if tensor.variable:
                    yield _VARIABLE
            for operator in block.operators:
                if operator.op in _OF_OPERATOR:
                    yield _OF_OPERATOR[operator.op]
                rounding = operator.attributes.get("rounding_mode") if operator.op == Op.RESCALE else None
                if rounding in _OF_ROUNDING:
                    yield _OF_ROUNDING[RoundingMode(rounding)]
