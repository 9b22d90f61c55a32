"""Bounded reader of TOSA files (`tosa.fbs`) from untrusted bytes. Standard library only.

Knows the FlatBuffers encoding: tables and vtables, vectors, strings, unions. Every offset is checked before it is used,
every length before anything is made of it. An honest file holds each thing once, so all that is read may not add up to
more than twice the file: tables that share or overlap parts cannot make a small file expensive. Whether the graph means
anything is for `validate` to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from struct import Struct, unpack_from
from typing import Final, NamedTuple, NoReturn, TypeAlias

from virtaccel.tosa_graph.graph import (
    AttributeValue,
    Block,
    DType,
    Graph,
    Op,
    Operator,
    Region,
    Shape,
    Tensor,
    TosaError,
    Version,
    packed_bytes,
)
from virtaccel.tosa_graph.schema import (
    ATTRIBUTES,
    DEFAULTS,
    FILE_IDENTIFIER,
    BlockSlot,
    CompatibilitySlot,
    GraphSlot,
    Kind,
    OperatorSlot,
    RegionSlot,
    ShapeSlot,
    TensorSlot,
    VersionSlot,
)

Bytes: TypeAlias = bytes | bytearray | memoryview

_U16_PAIR: Final = Struct("<HH")
_U32: Final = Struct("<I")
_I32: Final = Struct("<i")
_U64: Final = Struct("<Q")
_U8: Final = Struct("<B")

_OPS: Final = {int(op): op for op in Op}
_DTYPES: Final = {int(dtype): dtype for dtype in DType}
_VARIABLE_ACCESS: Final = frozenset({Op.VARIABLE_READ, Op.VARIABLE_WRITE})
_SCALED: Final = (
    TensorSlot.SCALE_TYPE,
    TensorSlot.SCALE_DATA,
    TensorSlot.BLOCK_SHAPE,
    TensorSlot.SCALE_OFFSET,
    TensorSlot.SCALE_SIZE,
)
_MAX_SLOTS: Final = 64  # no table of the schema has as many fields; what a later one adds is not looked at
_ALIGNMENT: Final = 8  # constants may be padded with zeros to a multiple of this (force_align in the schema)


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How large a file may be in every direction: counts, except where the name says bytes."""

    max_file_bytes: int = 1 << 31
    max_regions: int = 256
    max_blocks: int = 256
    max_operators: int = 10_000
    max_tensors: int = 30_000
    max_shapes: int = 10_000
    max_operands: int = 200_000
    max_operator_operands: int = 512
    max_block_operands: int = 4096
    max_rank: int = 32
    max_name_bytes: int = 4096


DEFAULT_LIMITS: Final = ReadLimits()


class _Vtable(NamedTuple):
    table_bytes: int
    slots: tuple[int, ...]


class _Table(NamedTuple):
    """A table found good: its position and layout. A slot's entry is an offset from the position, 0 if absent."""

    position: int
    vtable: _Vtable


class _Reader:
    """The bytes, what has been read of them so far, and the primitive accesses."""

    def __init__(self, data: Bytes, limits: ReadLimits) -> None:
        self.data = memoryview(data).cast("B")
        self.size = len(self.data)
        self.limits = limits
        self.budget = 2 * self.size
        self.counts: dict[str, int] = {}
        self._vtables: dict[int, _Vtable] = {}
        self._strings: dict[int, str] = {}

    def fail(self, text: str) -> NoReturn:
        raise TosaError(f"not a TOSA file: {text}")

    def charge(self, count: int) -> None:
        self.budget -= count
        if self.budget < 0:
            self.fail("its parts overlap")

    def count(self, what: str, more: int, limit: int) -> None:
        """Bound the number of things of one sort in the whole file."""
        total = self.counts.get(what, 0) + more
        if total > limit:
            raise TosaError(f"more than {limit} {what}")
        self.counts[what] = total

    def table(self, position: int) -> _Table:
        """Check a table: its vtable inside the file, every entry inside the table, the table inside the file."""
        if position < 0 or position + 4 > self.size:
            self.fail("a table lies outside")
        vtable_position = position - _I32.unpack_from(self.data, position)[0]
        vtable = self._vtables.get(vtable_position)
        if vtable is None:
            vtable = self._vtables[vtable_position] = self._vtable(vtable_position)
        if position + vtable.table_bytes > self.size:
            self.fail("a table's end lies outside")
        self.charge(vtable.table_bytes)
        return _Table(position, vtable)

    def _vtable(self, position: int) -> _Vtable:
        if position < 0 or position + 4 > self.size:
            self.fail("a vtable lies outside")
        vtable_bytes, table_bytes = _U16_PAIR.unpack_from(self.data, position)
        if vtable_bytes < 4 or vtable_bytes % 2 or position + vtable_bytes > self.size or table_bytes < 4:
            self.fail("a vtable is malformed")
        self.charge(vtable_bytes)
        count = min((vtable_bytes - 4) // 2, _MAX_SLOTS)
        slots: tuple[int, ...] = unpack_from(f"<{count}H", self.data, position + 4)
        if slots and (max(slots) >= table_bytes or any(0 < slot < 4 for slot in slots)):
            self.fail("a field lies outside its table")
        return _Vtable(table_bytes, slots)

    def field(self, table: _Table, slot: int, width: int) -> int:
        """Position of a field of `width` bytes, 0 if absent (no field can lie at 0, where the root offset is)."""
        slots = table.vtable.slots
        if slot >= len(slots) or not slots[slot]:
            return 0
        offset = slots[slot]
        if offset + width > table.vtable.table_bytes:
            self.fail("a field ends outside its table")
        return table.position + offset

    def scalar(self, table: _Table, slot: int, form: Struct, default: int) -> int:
        position = self.field(table, slot, form.size)
        return form.unpack_from(self.data, position)[0] if position else default

    def boolean(self, table: _Table, slot: int, default: bool = False) -> bool:
        return bool(self.scalar(table, slot, _U8, default))

    def follow(self, position: int) -> int:
        """Where the unsigned offset at `position` leads."""
        offset: int = _U32.unpack_from(self.data, position)[0]
        if offset < 4 or position + offset > self.size - 4:
            self.fail("an offset leads outside")
        return position + offset

    def reference(self, table: _Table, slot: int) -> int:
        """Where an offset field leads, 0 if absent."""
        position = self.field(table, slot, 4)
        return self.follow(position) if position else 0

    def vector(self, position: int, width: int) -> tuple[int, int]:
        """First element's position, and length, of a vector of elements of `width` bytes."""
        length: int = _U32.unpack_from(self.data, position)[0]
        if length * width > self.size - position - 4:
            self.fail("a vector's end lies outside")
        self.charge(4 + length * width)
        return position + 4, length

    def offsets(self, table: _Table, slot: int, limit: int, what: str) -> list[int]:
        """Where the elements of a vector of offsets lead; none if the field is absent."""
        target = self.reference(table, slot)
        if not target:
            return []
        position, length = self.vector(target, 4)
        if length > limit:
            raise TosaError(f"more than {limit} {what}")
        leads = [
            position + 4 * index + offset
            for index, offset in enumerate(unpack_from(f"<{length}I", self.data, position))
        ]
        if leads and (max(leads) > self.size - 4 or min(leads) < position + 4):
            self.fail("an offset leads outside")
        return leads

    def tables(self, table: _Table, slot: int, limit: int, what: str) -> list[_Table]:
        """A vector of tables, each listed once."""
        leads = self.offsets(table, slot, limit, what)
        if len(set(leads)) != len(leads):
            self.fail(f"{what} share a table")
        self.count(what, len(leads), limit)
        return [self.table(lead) for lead in leads]

    def string_at(self, position: int) -> str:
        text = self._strings.get(position)
        if text is None:
            start, length = self.vector(position, 1)
            if length > self.limits.max_name_bytes:
                raise TosaError(f"a name longer than {self.limits.max_name_bytes} bytes")
            if start + length >= self.size or self.data[start + length]:
                self.fail("a string does not end")
            try:
                text = str(self.data[start : start + length], "utf-8")
            except UnicodeDecodeError:
                self.fail("a string is not UTF-8")
            self._strings[position] = text
        return text

    def string(self, table: _Table, slot: int) -> str:
        position = self.reference(table, slot)
        return self.string_at(position) if position else ""

    def strings(self, table: _Table, slot: int, limit: int) -> tuple[str, ...]:
        leads = self.offsets(table, slot, limit, "operands")
        self.count("operands", len(leads), self.limits.max_operands)
        return tuple(map(self.string_at, leads))

    def int32s(self, table: _Table, slot: int, limit: int) -> tuple[int, ...]:
        target = self.reference(table, slot)
        if not target:
            return ()
        position, length = self.vector(target, 4)
        if length > limit:
            raise TosaError(f"a list of more than {limit} numbers")
        return unpack_from(f"<{length}i", self.data, position)

    def blob(self, table: _Table, slot: int) -> memoryview | None:
        """A vector of bytes, not copied yet; None if the field is absent."""
        target = self.reference(table, slot)
        if not target:
            return None
        position, length = self.vector(target, 1)
        return self.data[position : position + length]


def read(data: Bytes, limits: ReadLimits = DEFAULT_LIMITS) -> Graph:
    """The graph in a file. `data` must not change meanwhile; tensor data is copied out of it once.

    Raises TosaError for anything that is not a well-formed file of TOSA 1.0, or of the 1.1 draft as far as it only uses
    what 1.0 has: later operators, element types and block scaling are refused, and so is data outside the file.
    """
    if len(data) > limits.max_file_bytes:
        raise TosaError(f"a file of more than {limits.max_file_bytes} bytes")
    reader = _Reader(data, limits)
    if reader.size < 12 or bytes(reader.data[4:8]) != FILE_IDENTIFIER:
        reader.fail("the file identifier is missing")
    root = reader.table(reader.follow(0))
    version = _version(reader, root)
    compatibility = reader.reference(root, GraphSlot.COMPATIBILITY)
    if compatibility and reader.scalar(reader.table(compatibility), CompatibilitySlot.FEATURES, _U64, 0):
        raise TosaError("the file needs features of a later draft")
    regions = tuple(
        _region(reader, table) for table in reader.tables(root, GraphSlot.REGIONS, limits.max_regions, "regions")
    )
    if not regions:
        raise TosaError("the file holds no region")
    if len({region.name for region in regions}) != len(regions):
        raise TosaError("two regions have the same name")
    return Graph(version, regions)


def _version(reader: _Reader, root: _Table) -> Version:
    position = reader.reference(root, GraphSlot.VERSION)
    if not position:
        reader.fail("the version is missing")
    table = reader.table(position)
    major, minor, patch = (
        reader.scalar(table, slot, _I32, -1) for slot in (VersionSlot.MAJOR, VersionSlot.MINOR, VersionSlot.PATCH)
    )
    draft = reader.boolean(table, VersionSlot.DRAFT, True)
    # Files of final 1.0 carry the draft flag too: a writer that says nothing gets the schema's default, true.
    if (major, minor) != (1, 0) and (major, minor, patch, draft) != (1, 1, 0, True):
        raise TosaError(f"version {major}.{minor}.{patch}{' draft' if draft else ''} is neither 1.0 nor the 1.1 draft")
    return Version(major, minor, patch, draft)


def _region(reader: _Reader, table: _Table) -> Region:
    name = reader.string(table, RegionSlot.NAME)
    blocks = reader.tables(table, RegionSlot.BLOCKS, reader.limits.max_blocks, "blocks")
    if not blocks:
        raise TosaError(f"region {short(name)} has no block")
    return Region(name, tuple(_block(reader, block) for block in blocks))


def _block(reader: _Reader, table: _Table) -> Block:
    limits = reader.limits
    name = reader.string(table, BlockSlot.NAME)
    tensors: dict[str, Tensor] = {}
    for entry in reader.tables(table, BlockSlot.TENSORS, limits.max_tensors, "tensors"):
        tensor = _tensor(reader, entry)
        if tensor.name in tensors:
            raise TosaError(f"two tensors are called {short(tensor.name)}")
        tensors[tensor.name] = tensor
    shapes: dict[str, Shape] = {}
    for entry in reader.tables(table, BlockSlot.SHAPES, limits.max_shapes, "shapes"):
        shape = _shape(reader, entry)
        if shape.name in shapes or shape.name in tensors:
            raise TosaError(f"two values are called {short(shape.name)}")
        shapes[shape.name] = shape
    operators = tuple(
        _operator(reader, entry)
        for entry in reader.tables(table, BlockSlot.OPERATORS, limits.max_operators, "operators")
    )
    inputs = reader.strings(table, BlockSlot.INPUTS, limits.max_block_operands)
    outputs = reader.strings(table, BlockSlot.OUTPUTS, limits.max_block_operands)
    for operand in (*inputs, *outputs):
        if operand not in tensors:
            raise TosaError(f"block {short(name)} lists {short(operand)}, which is no tensor of it")
    return Block(name, operators, tensors, shapes, inputs, outputs)


def _tensor(reader: _Reader, table: _Table) -> Tensor:
    name = reader.string(table, TensorSlot.NAME)
    if not name:
        raise TosaError("a tensor has no name")
    if reader.scalar(table, TensorSlot.OFFSET, _U64, 0) or reader.scalar(table, TensorSlot.SIZE, _U64, 0):
        raise TosaError(f"tensor {short(name)}: its data lie outside the FlatBuffer")
    if any(slot < len(table.vtable.slots) and table.vtable.slots[slot] for slot in _SCALED):
        _refuse_scaled(reader, table, name)
    number = reader.scalar(table, TensorSlot.TYPE, _U32, 0)
    dtype = _DTYPES.get(number)
    if not dtype:
        raise TosaError(f"tensor {short(name)}: element type {number} is unknown to TOSA 1.0")
    shape = reader.int32s(table, TensorSlot.SHAPE, reader.limits.max_rank)
    blob = reader.blob(table, TensorSlot.DATA)
    return Tensor(
        name,
        shape,
        dtype,
        _constant(name, blob, dtype, shape) if blob else None,
        reader.boolean(table, TensorSlot.VARIABLE),
        reader.boolean(table, TensorSlot.UNRANKED),
        reader.string(table, TensorSlot.VARIABLE_NAME),
    )


def _refuse_scaled(reader: _Reader, table: _Table, name: str) -> None:
    """Block scaling came after 1.0; its fields may be present with nothing in them."""
    numbers = (
        reader.scalar(table, TensorSlot.SCALE_TYPE, _U32, 0),
        reader.scalar(table, TensorSlot.BLOCK_SHAPE, _U32, 0),
        reader.scalar(table, TensorSlot.SCALE_OFFSET, _U64, 0),
        reader.scalar(table, TensorSlot.SCALE_SIZE, _U64, 0),
    )
    if any(numbers) or reader.blob(table, TensorSlot.SCALE_DATA):
        raise TosaError(f"tensor {short(name)}: block scaling is unknown to TOSA 1.0")


def _constant(name: str, blob: memoryview, dtype: DType, shape: Sequence[int]) -> bytes:
    """A tensor's data without the padding; exactly what its shape needs."""
    if min(shape, default=0) < 0:
        raise TosaError(f"tensor {short(name)}: data for a shape that is not known")
    need = packed_bytes(dtype, prod(shape))
    padded = -(-need // _ALIGNMENT) * _ALIGNMENT
    if len(blob) != need and (len(blob) != padded or any(blob[need:])):
        raise TosaError(f"tensor {short(name)}: {len(blob)} bytes of data, its shape needs {need}")
    return bytes(blob[:need])


def _shape(reader: _Reader, table: _Table) -> Shape:
    name = reader.string(table, ShapeSlot.NAME)
    if not name:
        raise TosaError("a shape has no name")
    rank = reader.scalar(table, ShapeSlot.RANK, _U32, 0)
    blob = reader.blob(table, ShapeSlot.DATA)
    if rank > 2 * reader.limits.max_rank:
        raise TosaError(f"shape {short(name)}: rank {rank}")
    if rank == 0:
        if blob and (len(blob) > _ALIGNMENT or any(blob)):
            raise TosaError(f"shape {short(name)}: data for rank 0")
        return Shape(name, 0, ())
    if not blob:
        return Shape(name, rank, None)
    if len(blob) != 8 * rank:
        raise TosaError(f"shape {short(name)}: {len(blob)} bytes of data for rank {rank}")
    return Shape(name, rank, unpack_from(f"<{rank}q", blob))


def _operator(reader: _Reader, table: _Table) -> Operator:
    number = reader.scalar(table, OperatorSlot.OP, _U32, 0)
    op = _OPS.get(number)
    if op is None:
        raise TosaError(f"operator number {number} is unknown to TOSA 1.0")
    union_type = reader.scalar(table, OperatorSlot.ATTRIBUTE_TYPE, _U8, 0)
    if union_type != op:
        # Serialisers write variable accesses as IDENTITY, told apart by their attribute alone.
        access = _OPS.get(union_type)
        if op != Op.IDENTITY or access not in _VARIABLE_ACCESS:
            raise TosaError(f"{op.name} carries the attributes of operator number {union_type}")
        op = access
    position = reader.reference(table, OperatorSlot.ATTRIBUTE)
    if not position:
        raise TosaError(f"{op.name} carries no attributes")
    attribute_table = reader.table(position)
    attributes = {
        field.name: _ATTRIBUTE_READERS[field.kind](reader, attribute_table, slot)
        for slot, field in enumerate(ATTRIBUTES[op])
    }
    limit = reader.limits.max_operator_operands
    inputs = reader.strings(table, OperatorSlot.INPUTS, limit)
    return Operator(op, attributes, inputs, reader.strings(table, OperatorSlot.OUTPUTS, limit))


def _bytes(reader: _Reader, table: _Table, slot: int) -> AttributeValue:
    blob = reader.blob(table, slot)
    return DEFAULTS[Kind.BYTES] if blob is None else bytes(blob)


_ATTRIBUTE_READERS: Final[dict[Kind, Callable[[_Reader, _Table, int], AttributeValue]]] = {
    Kind.I32: lambda reader, table, slot: reader.scalar(table, slot, _I32, 0),
    Kind.U32: lambda reader, table, slot: reader.scalar(table, slot, _U32, 0),
    Kind.BOOL: lambda reader, table, slot: reader.boolean(table, slot),
    Kind.I32S: lambda reader, table, slot: reader.int32s(table, slot, 2 * reader.limits.max_rank),
    Kind.BYTES: _bytes,
    Kind.STRING: lambda reader, table, slot: reader.string(table, slot),
}


def short(name: str) -> str:
    """A name as messages show it: quoted, control characters escaped, bounded."""
    return repr(name if len(name) <= 64 else name[:61] + "...")
