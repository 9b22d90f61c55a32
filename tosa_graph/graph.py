"""Frozen views of a TOSA graph, and the numbers of the TOSA 1.0 FlatBuffers schema. Standard library only.

Shapes are in elements; -1 is a dimension not known yet. Tensor data is the schema's packed little-endian form (BOOL one
byte an element, INT4 two elements a byte with the low nibble first, INT48 six bytes, SHAPE eight bytes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias


class TosaError(Exception):
    """The bytes or the graph are not what TOSA allows; the text names operator and rule."""


class DType(IntEnum):
    """Element types of TOSA 1.0, numbered as in the schema."""

    UNKNOWN = 0
    BOOL = 1
    INT4 = 2
    INT8 = 3
    INT16 = 4
    INT32 = 5
    INT48 = 6
    FP32 = 7
    FP16 = 8
    BF16 = 9
    SHAPE = 10
    FP8E4M3 = 11
    FP8E5M2 = 12


_BITS = {
    DType.BOOL: 8,
    DType.INT4: 4,
    DType.INT8: 8,
    DType.INT16: 16,
    DType.INT32: 32,
    DType.INT48: 48,
    DType.FP32: 32,
    DType.FP16: 16,
    DType.BF16: 16,
    DType.SHAPE: 64,
    DType.FP8E4M3: 8,
    DType.FP8E5M2: 8,
}


def packed_bytes(dtype: DType, count: int) -> int:
    """Bytes that `count` elements take in packed form."""
    return (_BITS[dtype] * count + 7) // 8


Op = IntEnum(
    "Op",
    "ARGMAX AVG_POOL2D CONV2D CONV3D DEPTHWISE_CONV2D FFT2D MATMUL MAX_POOL2D RFFT2D TRANSPOSE_CONV2D CLAMP ERF "
    "SIGMOID TANH ADD ARITHMETIC_RIGHT_SHIFT BITWISE_AND BITWISE_OR BITWISE_XOR INTDIV LOGICAL_AND LOGICAL_LEFT_SHIFT "
    "LOGICAL_RIGHT_SHIFT LOGICAL_OR LOGICAL_XOR MAXIMUM MINIMUM MUL POW SUB TABLE ABS BITWISE_NOT CEIL CLZ COS EXP "
    "FLOOR LOG LOGICAL_NOT NEGATE RECIPROCAL RSQRT SIN SELECT EQUAL GREATER GREATER_EQUAL REDUCE_ALL REDUCE_ANY "
    "REDUCE_MAX REDUCE_MIN REDUCE_PRODUCT REDUCE_SUM CONCAT PAD RESHAPE REVERSE SLICE TILE TRANSPOSE GATHER SCATTER "
    "RESIZE CAST RESCALE CONST IDENTITY CUSTOM COND_IF WHILE_LOOP VARIABLE VARIABLE_WRITE VARIABLE_READ CONST_SHAPE",
)
"""Operators of TOSA 1.0, numbered as in the schema (1 is ARGMAX); later drafts' operators have no name here."""

AttributeValue: TypeAlias = int | bool | str | bytes | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Version:
    """Version stamp of a file."""

    major: int
    minor: int
    patch: int
    draft: bool


@dataclass(slots=True)
class Tensor:
    """A named tensor. `data` is set for constants and for initial values of variables."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    data: bytes | None = None
    variable: bool = False
    unranked: bool = False
    variable_name: str = ""


@dataclass(frozen=True, slots=True)
class Shape:
    """A named shape value of `rank` dimensions; `values` is None unless constant."""

    name: str
    rank: int
    values: tuple[int, ...] | None = None


@dataclass(slots=True)
class Operator:
    """One operator. `attributes` hold every field of the operator's attribute table, by the schema's field name, absent
    fields as their defaults; NaN mode, rounding mode and resize mode as the schema's integers."""

    op: Op
    attributes: Mapping[str, AttributeValue]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A basic block: operators in execution order, and the names they use."""

    name: str
    operators: tuple[Operator, ...]
    tensors: Mapping[str, Tensor]
    shapes: Mapping[str, Shape]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A region; TOSA control flow names regions by `name`."""

    name: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """A file. The first block of the first region is the program; `variables` are its VARIABLE tensors in order of
    declaration."""

    version: Version
    regions: tuple[Region, ...]

    @property
    def main(self) -> Block:
        return self.regions[0].blocks[0]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(self.main.tensors[name] for name in self.main.inputs)

    @property
    def variables(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in self.main.tensors.values() if tensor.variable)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return tuple(self.main.tensors[name] for name in self.main.outputs)
