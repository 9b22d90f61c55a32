"""What LOAD_PROGRAM says about a TOSA artifact: its format and the twelve target words.

Reads the needs of a graph off its element types and operators, without judging it: that is the device's part, and this
also runs inside a guest, where a full validation would be slow. Standard library only.
"""

from __future__ import annotations

from virtaccel.tosa_graph.graph import AttributeValue, DType, Graph, Op
from virtaccel.tosa_graph.operators import SIGNATURES
from virtaccel.tosa_graph.schema import RoundingMode
from virtaccel.tosa_graph.target import ALL_PROFILES, ARTIFACT_FORMAT, NO_EXTENSION, Extension, Target, to_words

TOSA_FORMAT = ARTIFACT_FORMAT

_HELD = frozenset((Op.CONST, Op.CONST_SHAPE))

_OF_TYPE = {
    DType.INT16: Extension.INT16,
    DType.INT48: Extension.INT16,
    DType.INT4: Extension.INT4,
    DType.BF16: Extension.BF16,
    DType.FP8E4M3: Extension.FP8E4M3,
    DType.FP8E5M2: Extension.FP8E5M2,
}
_OF_OPERATOR = {
    Op.FFT2D: Extension.FFT,
    Op.RFFT2D: Extension.FFT,
    Op.COND_IF: Extension.CONTROLFLOW,
    Op.WHILE_LOOP: Extension.CONTROLFLOW,
}
_OF_ROUNDING: dict[AttributeValue, Extension] = {
    RoundingMode.DOUBLE_ROUND: Extension.DOUBLEROUND,
    RoundingMode.INEXACT_ROUND: Extension.INEXACTROUND,
}


def target_words(graph: Graph) -> tuple[int, ...]:
    """The target to declare for `graph`: its version, both profiles, level 8K, and the extensions that it uses."""
    extensions = NO_EXTENSION
    for region in graph.regions:
        for block in region.blocks:
            for tensor in block.tensors.values():
                extensions |= _OF_TYPE.get(tensor.dtype, NO_EXTENSION)
                if tensor.variable:
                    extensions |= Extension.VARIABLE
            held = {name for operator in block.operators if operator.op in _HELD for name in operator.outputs}
            for operator in block.operators:
                extensions |= _OF_OPERATOR.get(operator.op, NO_EXTENSION)
                operands = zip(SIGNATURES[operator.op].operands, operator.inputs, strict=False)
                if any(operand.constant and name not in held for operand, name in operands):
                    extensions |= Extension.DYNAMIC
                if operator.op == Op.RESCALE:
                    extensions |= _OF_ROUNDING.get(operator.attributes["rounding_mode"], NO_EXTENSION)
    version = graph.version
    return to_words(Target(ALL_PROFILES, extensions), (version.major, version.minor, version.patch))
