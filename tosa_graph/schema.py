"""The TOSA FlatBuffers schema as data: table slots, attribute tables, enumerations. Standard library only.

Knows what `tosa.fbs` of TOSA 1.0 says, and the fields its 1.1 draft appended; knows nothing of bytes or of meaning.
Slots are positions in a table's vtable, in the schema's order. The union type number of an attribute equals the number
of its operator, so one mapping from operator to fields serves both.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

from virtaccel.tosa_graph.graph import AttributeValue, Op

FILE_IDENTIFIER: Final = b"TOSA"


class Kind(IntEnum):
    """How a field of an attribute table is stored."""

    I32 = 0
    U32 = 1  # every enumeration of the schema
    BOOL = 2
    I32S = 3
    BYTES = 4
    STRING = 5


class Field(NamedTuple):
    """One field of an attribute table; its slot is its position."""

    name: str
    kind: Kind


DEFAULTS: Final[dict[Kind, AttributeValue]] = {
    Kind.I32: 0,
    Kind.U32: 0,
    Kind.BOOL: False,
    Kind.I32S: (),
    Kind.BYTES: b"",
    Kind.STRING: "",
}


class ResizeMode(IntEnum):
    UNKNOWN = 0
    NEAREST = 1
    BILINEAR = 2


class NanMode(IntEnum):
    UNKNOWN = 0
    PROPAGATE = 1
    IGNORE = 2


class RoundingMode(IntEnum):
    UNKNOWN = 0
    SINGLE_ROUND = 1
    INEXACT_ROUND = 2
    DOUBLE_ROUND = 3


class GraphSlot(IntEnum):
    VERSION = 0
    REGIONS = 1
    SOFTWARE_VERSION = 2
    COMPATIBILITY = 3


class CompatibilitySlot(IntEnum):
    MIN_READER_VERSION = 0
    FEATURES = 1


class VersionSlot(IntEnum):
    """All default to -1, `draft` to true."""

    MAJOR = 0
    MINOR = 1
    PATCH = 2
    DRAFT = 3


class RegionSlot(IntEnum):
    NAME = 0
    BLOCKS = 1


class BlockSlot(IntEnum):
    NAME = 0
    OPERATORS = 1
    TENSORS = 2
    INPUTS = 3
    OUTPUTS = 4
    SHAPES = 5


class TensorSlot(IntEnum):
    NAME = 0
    SHAPE = 1
    TYPE = 2
    DATA = 3
    VARIABLE = 4
    UNRANKED = 5
    VARIABLE_NAME = 6
    OFFSET = 7
    SIZE = 8
    SCALE_TYPE = 9
    SCALE_DATA = 10
    BLOCK_SHAPE = 11
    SCALE_OFFSET = 12
    SCALE_SIZE = 13


class ShapeSlot(IntEnum):
    NAME = 0
    RANK = 1
    DATA = 2


class OperatorSlot(IntEnum):
    """A union takes two slots: its type, then its value."""

    OP = 0
    ATTRIBUTE_TYPE = 1
    ATTRIBUTE = 2
    INPUTS = 3
    OUTPUTS = 4
    LOCATION = 5


_AXIS = (Field("axis", Kind.I32),)
_NAN = (Field("nan_mode", Kind.U32),)
_CONVOLUTION = (
    Field("pad", Kind.I32S),
    Field("stride", Kind.I32S),
    Field("dilation", Kind.I32S),
    Field("local_bound", Kind.BOOL),
    Field("acc_type", Kind.U32),
)
_POOL = (Field("kernel", Kind.I32S), Field("stride", Kind.I32S), Field("pad", Kind.I32S))

ATTRIBUTES: Final[dict[Op, tuple[Field, ...]]] = dict.fromkeys(Op, ()) | {
    Op.ARGMAX: _AXIS + _NAN,
    Op.AVG_POOL2D: (*_POOL, Field("acc_type", Kind.U32)),
    Op.CONV2D: _CONVOLUTION,
    Op.CONV3D: _CONVOLUTION,
    Op.DEPTHWISE_CONV2D: _CONVOLUTION,
    Op.FFT2D: (Field("inverse", Kind.BOOL), Field("local_bound", Kind.BOOL)),
    Op.MAX_POOL2D: _POOL + _NAN,
    Op.RFFT2D: (Field("local_bound", Kind.BOOL),),
    Op.TRANSPOSE_CONV2D: (
        Field("out_pad", Kind.I32S),
        Field("stride", Kind.I32S),
        Field("local_bound", Kind.BOOL),
        Field("acc_type", Kind.U32),
    ),
    Op.CLAMP: (Field("min_val", Kind.BYTES), Field("max_val", Kind.BYTES), *_NAN),
    Op.ARITHMETIC_RIGHT_SHIFT: (Field("round", Kind.BOOL),),
    Op.MAXIMUM: _NAN,
    Op.MINIMUM: _NAN,
    Op.REDUCE_ALL: _AXIS,
    Op.REDUCE_ANY: _AXIS,
    Op.REDUCE_MAX: _AXIS + _NAN,
    Op.REDUCE_MIN: _AXIS + _NAN,
    Op.REDUCE_PRODUCT: _AXIS,
    Op.REDUCE_SUM: _AXIS,
    Op.CONCAT: _AXIS,
    Op.REVERSE: _AXIS,
    Op.TRANSPOSE: (Field("perms", Kind.I32S),),
    Op.RESIZE: (Field("mode", Kind.U32),),
    Op.RESCALE: (
        Field("scale32", Kind.BOOL),
        Field("rounding_mode", Kind.U32),
        Field("per_channel", Kind.BOOL),
        Field("input_unsigned", Kind.BOOL),
        Field("output_unsigned", Kind.BOOL),
    ),
    Op.CUSTOM: (
        Field("operator_name", Kind.STRING),
        Field("domain_name", Kind.STRING),
        Field("implementation_attrs", Kind.BYTES),
    ),
    Op.COND_IF: (Field("then_graph", Kind.STRING), Field("else_graph", Kind.STRING)),
    Op.WHILE_LOOP: (Field("cond_graph", Kind.STRING), Field("body_graph", Kind.STRING)),
}
"""Fields of every operator's attribute table, in slot order; most tables are empty."""
