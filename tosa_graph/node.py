"""One operator with its operands looked up: what shape inference and the ERROR_IF rules see of a graph.

Dimensions are elements, -1 is one not known yet: a rule that would need it passes, and holds when the dimension becomes
concrete. A broken rule raises TosaError with the rule's text; the caller adds which operator it was. Standard library
only.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import Final, NamedTuple, TypeAlias, cast

from virtaccel.tosa_graph.graph import AttributeValue, DType, Op, TosaError
from virtaccel.tosa_graph.target import Level

Dims: TypeAlias = tuple[int, ...]

UNKNOWN: Final = -1

_FORMS: Final = {
    DType.BOOL: struct.Struct("<B"),
    DType.INT4: struct.Struct("<b"),
    DType.INT8: struct.Struct("<b"),
    DType.INT16: struct.Struct("<h"),
    DType.INT32: struct.Struct("<i"),
    DType.FP32: struct.Struct("<f"),
    DType.FP16: struct.Struct("<e"),
}
_BITS_ONLY: Final = {DType.BF16: 2, DType.FP8E4M3: 1, DType.FP8E5M2: 1, DType.INT48: 6}
FLOATING: Final = frozenset({DType.FP32, DType.FP16, DType.BF16, DType.FP8E4M3, DType.FP8E5M2})


class Node(NamedTuple):
    """`shapes`, `dtypes` and `data` go by operand, shape operands being of type SHAPE and of shape (rank,); `values`
    holds the dimensions of shape operands that are constant. `declared` are the result shapes the file states."""

    op: Op
    attributes: Mapping[str, AttributeValue]
    shapes: tuple[Dims, ...]
    dtypes: tuple[DType, ...]
    values: tuple[Dims | None, ...]
    data: tuple[bytes | None, ...]
    declared: tuple[Dims, ...]
    result_dtypes: tuple[DType, ...]
    level: Level

    def number(self, attribute: str) -> int:
        return cast(int, self.attributes[attribute])

    def numbers(self, attribute: str, length: int) -> Dims:
        """A list attribute, which must have `length` elements."""
        values = cast(Dims, self.attributes[attribute])
        if len(values) != length:
            raise TosaError(f"{attribute} has {len(values)} elements, not {length}")
        return values

    def fixed(self, operand: int, shape: Dims, name: str) -> None:
        """An operand whose shape the standard fixes."""
        actual = self.shapes[operand]
        if actual == shape:
            return
        fits = len(actual) == len(shape) and all(
            one == other or UNKNOWN in (one, other) for one, other in zip(actual, shape, strict=True)
        )
        if not fits:
            raise TosaError(f"{name} has shape {list(actual)}, not {list(shape)}")

    def scalar(self, operand: int) -> int | float | None:
        """A one-element constant operand; None if it is not constant."""
        data = self.data[operand]
        return None if data is None else decode(data, self.dtypes[operand])

    def zero_point(self, operand: int, name: str) -> None:
        """A zero point: one element, zero unless the type is INT8."""
        self.fixed(operand, (1,), name)
        if self.dtypes[operand] is not DType.INT8:
            value = self.scalar(operand)
            if value is not None and value != 0:
                raise TosaError(f"{name} must be zero unless the type is INT8")


def require(condition: bool, rule: str) -> None:
    if not condition:
        raise TosaError(rule)


def same(rule: str, *dimensions: int) -> int:
    """The dimension all of these are; unknown if none is known."""
    if len(dimensions) == 2 and dimensions[0] == dimensions[1]:
        return dimensions[0]
    known = {dimension for dimension in dimensions if dimension != UNKNOWN}
    if len(known) > 1:
        raise TosaError(rule)
    return known.pop() if known else UNKNOWN


def broadcast(*shapes: Dims) -> Dims:
    """The shape these broadcast to (section 1.9.3): ranks equal, each dimension equal or 1."""
    if shapes[0] == shapes[-1] and len(shapes) <= 2:
        return shapes[0]
    if len({len(shape) for shape in shapes}) > 1:
        raise TosaError(f"ranks differ: {_list(shapes)}")
    result = []
    for dimensions in zip(*shapes, strict=True):
        wide = set(dimensions) - {1}
        known = wide - {UNKNOWN}
        if len(known) > 1:
            raise TosaError(f"shapes do not broadcast: {_list(shapes)}")
        result.append(known.pop() if known else UNKNOWN if wide else 1)
    return tuple(result)


def _list(shapes: Sequence[Dims]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


def size(shape: Dims) -> int:
    """Elements, UNKNOWN if a dimension is."""
    return UNKNOWN if UNKNOWN in shape else prod(shape)


def decode(data: bytes, dtype: DType) -> int | float:
    """The first element of packed data."""
    if dtype == DType.INT4:
        nibble = data[0] & 0x0F
        return nibble - 16 if nibble & 8 else nibble
    form = _FORMS.get(dtype)
    if form is not None:
        value: int | float = form.unpack_from(data)[0]
        return value
    raw = data[: _BITS_ONLY[dtype]]
    if dtype == DType.BF16:
        return cast(float, struct.unpack("<f", b"\0\0" + raw)[0])
    if dtype == DType.INT48:
        return int.from_bytes(raw, "little", signed=True)
    # FP8: only whether it is zero matters to any rule.
    return float(raw[0] & 0x7F)


def width(dtype: DType) -> int:
    """Bytes of one element stored alone."""
    form = _FORMS.get(dtype)
    return form.size if form is not None else _BITS_ONLY[dtype]
