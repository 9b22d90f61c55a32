"""Operands, ranks and supported types of every TOSA 1.0 operator, as the standard's chapter on operators lists them.

One row an operator, in a small notation. An operand is `name:type:rank`: a type is a variable bound by the table of
types, a fixed element type, `shape_t`, or `any`; a rank is exact or a minimum (`1+`, up to the level's MAX_RANK); `!`
marks a compile time constant, `*` an operand that may be repeated or absent. A row of types is `types = needs`: the
variables' types in order, then the profiles or extensions that have the row (`|` any of them, `&` both). Standard
library only.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.target import NO_EXTENSION, NO_PROFILE, Extension, Profile


class Operand(NamedTuple):
    """An operand or result; `max_rank` None is the level's MAX_RANK."""

    name: str
    type: str
    min_rank: int
    max_rank: int | None
    constant: bool
    repeated: bool


class Need(NamedTuple):
    """Everything that has to be offered for a row of types."""

    profiles: Profile
    extensions: Extension


class Signature(NamedTuple):
    """What an operator takes and gives. `rows` is keyed by the types of `variables`; its needs are alternatives."""

    operands: tuple[Operand, ...]
    results: tuple[Operand, ...]
    variables: tuple[str, ...]
    rows: dict[tuple[DType, ...], tuple[Need, ...]]
    repeats_operand: bool
    repeats_result: bool
    """Whether the last may be repeated or absent; no other is."""


FIXED_TYPES: Final = {"bool_t": DType.BOOL, "i8_t": DType.INT8}

_TYPES: Final = {
    "bool": DType.BOOL,
    "i4": DType.INT4,
    "i8": DType.INT8,
    "i16": DType.INT16,
    "i32": DType.INT32,
    "i48": DType.INT48,
    "fp32": DType.FP32,
    "fp16": DType.FP16,
    "bf16": DType.BF16,
    "e4m3": DType.FP8E4M3,
    "e5m2": DType.FP8E5M2,
}
_PROFILES: Final = {"INT": Profile.INTEGER, "FP": Profile.FLOATING_POINT}


def _operand(text: str) -> Operand:
    name, kind, rank = text.split(":")
    constant, repeated = "!" in rank, "*" in rank
    rank = rank.rstrip("!*")
    minimum = int(rank.rstrip("+"))
    return Operand(name, kind, minimum, None if rank.endswith("+") else minimum, constant, repeated)


def _need(text: str) -> Need:
    profiles, extensions = NO_PROFILE, NO_EXTENSION
    for word in text.split("&"):
        if word in _PROFILES:
            profiles |= _PROFILES[word]
        else:
            extensions |= Extension[word]
    return Need(profiles, extensions)


def _signature(operands: str, results: str, variables: str, rows: str) -> Signature:
    table: dict[tuple[DType, ...], tuple[Need, ...]] = {}
    for row in filter(None, (part.strip() for part in rows.split(";"))):
        types, needs = row.split("=")
        key = tuple(_TYPES[word] for word in types.split())
        table[key] = tuple(_need(need.strip()) for need in needs.split("|"))
    takes, gives = tuple(map(_operand, operands.split())), tuple(map(_operand, results.split()))
    repeats = [bool(pattern) and pattern[-1].repeated for pattern in (takes, gives)]
    return Signature(takes, gives, tuple(variables.split()), table, *repeats)


_FLOAT = "fp16 = FP; bf16 = BF16; fp32 = FP"
_INTEGER = "i8 = INT; i16 = INT; i32 = INT"
_EITHER = "i8 = INT|FP; i16 = INT|FP; i32 = INT|FP"
_BOOLEAN = "bool = INT|FP"
_FP8 = "e4m3 = FP8E4M3; e5m2 = FP8E5M2"
_ADDITIVE = f"i32 = INT|FP; {_FLOAT}"
_MINMAX = f"i32 = INT; {_FLOAT}"
_LAYOUT = f"{_BOOLEAN}; {_INTEGER}; {_FP8}; {_FLOAT}"
_STORED = f"{_BOOLEAN}; i4 = INT4; {_EITHER}; i48 = INT16; {_FP8}; {_FLOAT}"
_VARIABLE = "i8 = INT&VARIABLE; fp16 = FP&VARIABLE; fp32 = FP&VARIABLE"
_CONVOLUTION = """
    i8 i8 i32 i32 = INT; i8 i4 i32 i32 = INT4; i16 i8 i48 i48 = INT16;
    e4m3 e4m3 fp16 fp16 = FP8E4M3; e5m2 e5m2 fp16 fp16 = FP8E5M2;
    fp16 fp16 fp16 fp16 = FP; fp16 fp16 fp16 fp32 = FP; bf16 bf16 bf16 fp32 = BF16; fp32 fp32 fp32 fp32 = FP"""
_INDEXED = """
    i32 i8 = INT; i32 i16 = INT; i32 i32 = INT; i32 e4m3 = FP8E4M3; i32 e5m2 = FP8E5M2;
    i32 fp16 = FP; i32 bf16 = BF16; i32 fp32 = FP"""
_COMPARED = "i32 bool = INT; fp16 bool = FP; bf16 bool = BF16; fp32 bool = FP"
_CASTS = """
    bool i8 = INT; bool i16 = INT; bool i32 = INT;
    i8 bool = INT; i8 i16 = INT; i8 i32 = INT; i8 fp16 = FP; i8 bf16 = BF16; i8 fp32 = FP;
    i16 bool = INT; i16 i8 = INT; i16 i32 = INT; i16 fp16 = FP; i16 bf16 = BF16; i16 fp32 = FP;
    i32 bool = INT; i32 i8 = INT; i32 i16 = INT; i32 fp16 = FP; i32 bf16 = BF16; i32 fp32 = FP;
    bf16 i8 = BF16; bf16 i16 = BF16; bf16 i32 = BF16; bf16 fp32 = BF16;
    bf16 e4m3 = BF16&FP8E4M3; bf16 e5m2 = BF16&FP8E5M2;
    e4m3 fp16 = FP8E4M3; e4m3 bf16 = FP8E4M3&BF16; e4m3 fp32 = FP8E4M3;
    e5m2 fp16 = FP8E5M2; e5m2 bf16 = FP8E5M2&BF16; e5m2 fp32 = FP8E5M2;
    fp16 i8 = FP; fp16 i16 = FP; fp16 i32 = FP; fp16 e4m3 = FP8E4M3; fp16 e5m2 = FP8E5M2; fp16 fp32 = FP;
    fp32 i8 = FP; fp32 i16 = FP; fp32 i32 = FP; fp32 e4m3 = FP8E4M3; fp32 e5m2 = FP8E5M2; fp32 bf16 = BF16;
    fp32 fp16 = FP"""


def _convolution(rank: int) -> Signature:
    operands = f"input:in_t:{rank} weight:weight_t:{rank} bias:out_t:1 input_zp:in_t:1! weight_zp:weight_t:1!"
    return _signature(operands, f"output:out_t:{rank}", "in_t weight_t out_t acc_t", _CONVOLUTION)


def _unary(rows: str) -> Signature:
    return _signature("input1:in_out_t:0+", "output:in_out_t:0+", "in_out_t", rows)


def _binary(rows: str) -> Signature:
    return _signature("input1:in_out_t:0+ input2:in_out_t:0+", "output:in_out_t:0+", "in_out_t", rows)


def _comparison() -> Signature:
    return _signature("input1:in_t:0+ input2:in_t:0+", "output:out_t:0+", "in_t out_t", _COMPARED)


def _reduction(rows: str) -> Signature:
    return _signature("input:in_out_t:1+", "output:in_out_t:1+", "in_out_t", rows)


def _layout(extra: str = "", rank: str = "1+", rows: str = _LAYOUT) -> Signature:
    result = rank.rstrip("*")
    return _signature(f"input1:in_out_t:{rank} {extra}", f"output:in_out_t:{result}", "in_out_t", rows)


_REDUCED = f"{_INTEGER}; {_FLOAT}"

SIGNATURES: Final[dict[Op, Signature]] = {
    Op.ARGMAX: _signature(
        "input:in_t:1+",
        "output:out_t:0+",
        "in_t out_t",
        "i8 i32 = INT; i16 i32 = INT16; e4m3 i32 = FP8E4M3; e5m2 i32 = FP8E5M2; fp16 i32 = FP; bf16 i32 = BF16;"
        "fp32 i32 = FP",
    ),
    Op.AVG_POOL2D: _signature(
        "input:in_out_t:4 input_zp:in_out_t:1! output_zp:in_out_t:1!",
        "output:in_out_t:4",
        "in_out_t acc_t",
        "i8 i32 = INT; i16 i32 = INT16; e4m3 fp16 = FP8E4M3; e5m2 fp16 = FP8E5M2; fp16 fp16 = FP; fp16 fp32 = FP;"
        "bf16 fp32 = BF16; fp32 fp32 = FP",
    ),
    Op.CONV2D: _convolution(4),
    Op.CONV3D: _convolution(5),
    Op.DEPTHWISE_CONV2D: _convolution(4),
    Op.FFT2D: _signature(
        "input_real:in_out_t:3 input_imag:in_out_t:3",
        "output_real:in_out_t:3 output_imag:in_out_t:3",
        "in_out_t",
        "fp32 = FFT",
    ),
    Op.MATMUL: _signature(
        "A:in_t:3 B:in_t:3 A_zp:in_t:1! B_zp:in_t:1!",
        "output:out_t:3",
        "in_t out_t",
        "i8 i32 = INT; i16 i48 = INT16; e4m3 fp16 = FP8E4M3; e5m2 fp16 = FP8E5M2; fp16 fp16 = FP; fp16 fp32 = FP;"
        "bf16 fp32 = BF16; fp32 fp32 = FP",
    ),
    Op.MAX_POOL2D: _signature(
        "input:in_out_t:4", "output:in_out_t:4", "in_out_t", f"i8 = INT; i16 = INT16; {_FP8}; {_FLOAT}"
    ),
    Op.RFFT2D: _signature(
        "input_real:in_out_t:3", "output_real:in_out_t:3 output_imag:in_out_t:3", "in_out_t", "fp32 = FFT"
    ),
    Op.TRANSPOSE_CONV2D: _convolution(4),
    Op.CLAMP: _unary(f"i8 = INT; i16 = INT16; {_FLOAT}"),
    Op.ERF: _unary(_FLOAT),
    Op.SIGMOID: _unary(_FLOAT),
    Op.TANH: _unary(_FLOAT),
    Op.ADD: _binary(_ADDITIVE),
    Op.ARITHMETIC_RIGHT_SHIFT: _binary(_INTEGER),
    Op.BITWISE_AND: _binary(_INTEGER),
    Op.BITWISE_OR: _binary(_INTEGER),
    Op.BITWISE_XOR: _binary(_INTEGER),
    Op.INTDIV: _binary("i32 = INT|FP"),
    Op.LOGICAL_AND: _binary(_BOOLEAN),
    Op.LOGICAL_LEFT_SHIFT: _binary(_EITHER),
    Op.LOGICAL_RIGHT_SHIFT: _binary(_EITHER),
    Op.LOGICAL_OR: _binary(_BOOLEAN),
    Op.LOGICAL_XOR: _binary(_BOOLEAN),
    Op.MAXIMUM: _binary(_MINMAX),
    Op.MINIMUM: _binary(_MINMAX),
    Op.MUL: _signature(
        "input1:in_t:0+ input2:in_t:0+ shift:i8_t:1!",
        "output:out_t:0+",
        "in_t out_t",
        "i8 i32 = INT; i16 i32 = INT; i32 i32 = INT|FP; fp16 fp16 = FP; bf16 bf16 = BF16; fp32 fp32 = FP",
    ),
    Op.POW: _binary(_FLOAT),
    Op.SUB: _binary(_ADDITIVE),
    Op.TABLE: _signature(
        "input1:in_t:0+ table:table_t:1!",
        "output:out_t:0+",
        "in_t table_t out_t",
        "i8 i8 i8 = INT; i16 i16 i32 = INT16",
    ),
    Op.ABS: _unary(_MINMAX),
    Op.BITWISE_NOT: _unary(_INTEGER),
    Op.CEIL: _unary(_FLOAT),
    Op.CLZ: _unary("i32 = INT"),
    Op.COS: _unary(_FLOAT),
    Op.EXP: _unary(_FLOAT),
    Op.FLOOR: _unary(_FLOAT),
    Op.LOG: _unary(_FLOAT),
    Op.LOGICAL_NOT: _unary(_BOOLEAN),
    Op.NEGATE: _signature(
        "input1:in_out_t:0+ input1_zp:in_out_t:1! output_zp:in_out_t:1!", "output:in_out_t:0+", "in_out_t", _REDUCED
    ),
    Op.RECIPROCAL: _unary(_FLOAT),
    Op.RSQRT: _unary(_FLOAT),
    Op.SIN: _unary(_FLOAT),
    Op.SELECT: _signature(
        "input1:bool_t:0+ input2:in_out_t:0+ input3:in_out_t:0+",
        "output:in_out_t:0+",
        "in_out_t",
        f"{_BOOLEAN}; {_INTEGER}; {_FLOAT}",
    ),
    Op.EQUAL: _comparison(),
    Op.GREATER: _comparison(),
    Op.GREATER_EQUAL: _comparison(),
    Op.REDUCE_ALL: _reduction(_BOOLEAN),
    Op.REDUCE_ANY: _reduction(_BOOLEAN),
    Op.REDUCE_MAX: _reduction(_REDUCED),
    Op.REDUCE_MIN: _reduction(_REDUCED),
    Op.REDUCE_PRODUCT: _reduction(_FLOAT),
    Op.REDUCE_SUM: _reduction(_MINMAX),
    Op.CONCAT: _layout(rank="1+*", rows=f"{_BOOLEAN}; i8 = INT; i16 = INT16; i32 = INT; {_FP8}; {_FLOAT}"),
    Op.PAD: _layout("padding:shape_t:1! pad_const:in_out_t:1!"),
    Op.RESHAPE: _layout("shape:shape_t:1!", rank="0+"),
    Op.REVERSE: _layout(),
    Op.SLICE: _layout("start:shape_t:1! size:shape_t:1!"),
    Op.TILE: _layout("multiples:shape_t:1!"),
    Op.TRANSPOSE: _layout(),
    Op.GATHER: _signature(
        "values:in_out_t:3 indices:index_t:2", "output:in_out_t:3", "index_t in_out_t", _INDEXED
    ),
    Op.SCATTER: _signature(
        "values_in:in_out_t:3 indices:index_t:2 input:in_out_t:3", "values_out:in_out_t:3", "index_t in_out_t", _INDEXED
    ),
    Op.RESIZE: _signature(
        "input:in_t:4 scale:shape_t:1! offset:shape_t:1! border:shape_t:1!",
        "output:out_t:4",
        "in_t out_t",
        "i8 i32 = INT; i8 i8 = INT; i16 i48 = INT16; i16 i16 = INT16; fp16 fp16 = FP; bf16 bf16 = BF16; fp32 fp32 = FP",
    ),
    Op.CAST: _signature("input:in_t:0+", "output:out_t:0+", "in_t out_t", _CASTS),
    Op.RESCALE: _signature(
        "input:in_t:0+ multiplier:any:1! shift:i8_t:1! input_zp:in_t:1! output_zp:out_t:1!",
        "output:out_t:0+",
        "in_t out_t",
        "i8 i8 = INT; i8 i16 = INT; i8 i32 = INT; i16 i8 = INT; i16 i16 = INT; i16 i32 = INT; i32 i8 = INT;"
        "i32 i16 = INT; i32 i32 = INT; i48 i8 = INT16; i48 i16 = INT16; i48 i32 = INT16",
    ),
    Op.CONST: _signature("", "output:out_t:0+", "out_t", _STORED),
    Op.IDENTITY: _unary(_STORED),
    Op.CUSTOM: _signature("input_list:any:0+*", "output_list:any:0+*", "", "= INT|FP"),
    Op.COND_IF: _signature("condition:bool_t:0+ input_list:any:0+*", "output_list:any:0+*", "", "= CONTROLFLOW"),
    Op.WHILE_LOOP: _signature("input_list:any:0+*", "output_list:any:0+*", "", "= CONTROLFLOW"),
    Op.VARIABLE: _signature("", "variable:in_t:0+*", "in_t", _VARIABLE),
    Op.VARIABLE_WRITE: _signature("input1:in_t:0+", "variable:in_t:0+", "in_t", _VARIABLE),
    Op.VARIABLE_READ: _signature("variable:out_t:0+", "output1:out_t:0+", "out_t", _VARIABLE),
    Op.CONST_SHAPE: _signature("", "output:shape_t:0+", "", "= INT|FP"),
}
"""ARGMAX's result may have one rank less than MAX_RANK; its shape follows from the operand's, so no row says it."""
