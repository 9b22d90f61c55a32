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
_u32 = _U32.unpack_from
_i32 = _I32.unpack_from
_u64 = _U64.unpack_from
_SHORT: Final = 17
_U32S: Final = tuple(Struct(f"<{length}I") for length in range(_SHORT))
_I32S: Final = tuple(Struct(f"<{length}i") for length in range(_SHORT))
"""Lists of fewer than `_SHORT` numbers, by length: nearly all."""

_OPS: Final = {int(op): op for op in Op}
_DTYPES: Final = {int(dtype): dtype for dtype in DType}
_VARIABLE_ACCESS: Final = frozenset({Op.VARIABLE_READ, Op.VARIABLE_WRITE})
_OPERATOR_WIDTHS: Final = (4, 1, 4, 4, 4)
_TENSOR_WIDTHS: Final = (4, 4, 4, 4, 1, 1, 4, 8, 8, 4, 4, 4, 8, 8)
"""Bytes of the fields read of the two tables there are most of, by slot (OperatorSlot, TensorSlot)."""
_SCALED: Final = slice(TensorSlot.SCALE_TYPE, TensorSlot.SCALE_SIZE + 1)
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


class _Vtable:
    """Where a table's fields lie: for each of `_MAX_SLOTS` slots an offset from the table's position, 0 if absent."""

    __slots__ = ("fitting", "scaled", "slots", "table_bytes")

    def __init__(self, table_bytes: int, slots: tuple[int, ...]) -> None:
        self.table_bytes = table_bytes
        self.slots = slots + (0,) * (_MAX_SLOTS - len(slots))
        self.fitting: tuple[int, ...] = ()
        """Widths of fields that were found to fit."""
        self.scaled = any(self.slots[_SCALED])
        """Whether it has fields of block scaling, if it is a tensor's."""


class _Table(NamedTuple):
    """A table found good: its position and layout."""

    position: int
    vtable: _Vtable


class _Reader:
    """The bytes, what has been read of them so far, and the primitive accesses."""

    def __init__(self, data: bytes, limits: ReadLimits) -> None:
        self.data = data
        self.size = len(data)
        self.limits = limits
        self.max_name_bytes = limits.max_name_bytes
        self.budget = 2 * self.size
        self.counts: dict[str, int] = {}
        self._vtables: dict[int, _Vtable] = {}
        self._strings: dict[int, str] = {}
        self._names: dict[str, str] = {}

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

    def layout(self, position: int) -> _Vtable:
        """Check a table: its vtable inside the file, every entry inside the table, the table inside the file."""
        if position < 0 or position + 4 > self.size:
            self.fail("a table lies outside")
        vtable_position = position - _i32(self.data, position)[0]
        vtable = self._vtables.get(vtable_position)
        if vtable is None:
            vtable = self._vtables[vtable_position] = self._vtable(vtable_position)
        if position + vtable.table_bytes > self.size:
            self.fail("a table's end lies outside")
        self.budget -= vtable.table_bytes
        if self.budget < 0:
            self.fail("its parts overlap")
        return vtable

    def fit(self, vtable: _Vtable, widths: tuple[int, ...]) -> None:
        """See that fields of these widths, slot by slot, end inside the tables that are laid out like this."""
        for offset, width in zip(vtable.slots, widths, strict=False):
            if offset and offset + width > vtable.table_bytes:
                self.fail("a field ends outside its table")
        vtable.fitting = widths

    def table(self, position: int) -> _Table:
        return _Table(position, self.layout(position))

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
        offset = table.vtable.slots[slot]
        if not offset:
            return 0
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
        offset: int = _u32(self.data, position)[0]
        lead = position + offset
        if offset < 4 or lead > self.size - 4:
            self.fail("an offset leads outside")
        return lead

    def reference(self, table: _Table, slot: int) -> int:
        """Where an offset field leads, 0 if absent."""
        position = self.field(table, slot, 4)
        return self.follow(position) if position else 0

    def vector(self, position: int, width: int) -> tuple[int, int]:
        """First element's position, and length, of a vector of elements of `width` bytes."""
        length: int = _u32(self.data, position)[0]
        if length * width > self.size - position - 4:
            self.fail("a vector's end lies outside")
        self.budget -= 4 + length * width
        if self.budget < 0:
            self.fail("its parts overlap")
        return position + 4, length

    def offsets(self, target: int, limit: int, what: str) -> list[int]:
        """Where the elements of the vector of offsets at `target` lead."""
        position, length = self.vector(target, 4)
        if length > limit:
            raise TosaError(f"more than {limit} {what}")
        self.count(what, length, self.limits.max_operands if what == "operands" else limit)
        if length < _SHORT:
            offsets = _U32S[length].unpack_from(self.data, position)
        else:
            offsets = unpack_from(f"<{length}I", self.data, position)
        first, last = position + 4, self.size - 4
        leads = []
        for offset in offsets:
            lead = position + offset
            if not first <= lead <= last:
                self.fail("an offset leads outside")
            leads.append(lead)
            position += 4
        return leads

    def tables(self, table: _Table, slot: int, limit: int, what: str) -> list[int]:
        """Positions of a vector of tables, each listed once; the tables are still to be looked at."""
        target = self.reference(table, slot)
        leads = self.offsets(target, limit, what) if target else []
        if len(set(leads)) != len(leads):
            self.fail(f"{what} share a table")
        return leads

    def string_at(self, position: int) -> str:
        text = self._strings.get(position)
        if text is None:
            start, length = self.vector(position, 1)
            if length > self.max_name_bytes:
                raise TosaError(f"a name longer than {self.max_name_bytes} bytes")
            end = start + length
            data = self.data
            if end >= self.size or data[end]:
                self.fail("a string does not end")
            try:
                text = data[start:end].decode()
            except UnicodeDecodeError:
                self.fail("a string is not UTF-8")
            # One object for one name: what looks names up then compares and hashes them but once.
            text = self._strings[position] = self._names.setdefault(text, text)
        return text

    def string(self, table: _Table, slot: int) -> str:
        position = self.reference(table, slot)
        return self.string_at(position) if position else ""

    def strings_at(self, target: int, limit: int) -> tuple[str, ...]:
        """The vector of strings at `target`."""
        known = self._strings
        names = []
        for lead in self.offsets(target, limit, "operands"):
            text = known.get(lead)
            names.append(self.string_at(lead) if text is None else text)
        return tuple(names)

    def strings(self, table: _Table, slot: int, limit: int) -> tuple[str, ...]:
        target = self.reference(table, slot)
        return self.strings_at(target, limit) if target else ()

    def int32s_at(self, target: int, limit: int) -> tuple[int, ...]:
        """The vector of numbers at `target`."""
        position, length = self.vector(target, 4)
        if length > limit:
            raise TosaError(f"a list of more than {limit} numbers")
        if length < _SHORT:
            return _I32S[length].unpack_from(self.data, position)
        return unpack_from(f"<{length}i", self.data, position)

    def int32s(self, table: _Table, slot: int, limit: int) -> tuple[int, ...]:
        target = self.reference(table, slot)
        return self.int32s_at(target, limit) if target else ()

    def blob(self, table: _Table, slot: int) -> bytes | None:
        """A vector of bytes; None if the field is absent."""
        target = self.reference(table, slot)
        if not target:
            return None
        position, length = self.vector(target, 1)
        return self.data[position : position + length]


def read(data: Bytes, limits: ReadLimits = DEFAULT_LIMITS) -> Graph:
    """The graph in a file. Tensor data is copied out of it once; data that may change is copied as a whole before.

    Raises TosaError for anything that is not a well-formed file of TOSA 1.0, or of the 1.1 draft as far as it only uses
    what 1.0 has: later operators, element types and block scaling are refused, and so is data outside the file.
    """
    if len(data) > limits.max_file_bytes:
        raise TosaError(f"a file of more than {limits.max_file_bytes} bytes")
    reader = _Reader(bytes(data), limits)
    if reader.size < 12 or reader.data[4:8] != FILE_IDENTIFIER:
        reader.fail("the file identifier is missing")
    root = reader.table(reader.follow(0))
    version = _version(reader, root)
    compatibility = reader.reference(root, GraphSlot.COMPATIBILITY)
    if compatibility and reader.scalar(reader.table(compatibility), CompatibilitySlot.FEATURES, _U64, 0):
        raise TosaError("the file needs features of a later draft")
    regions = tuple(
        _region(reader, reader.table(position))
        for position in reader.tables(root, GraphSlot.REGIONS, limits.max_regions, "regions")
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
    return Region(name, tuple(_block(reader, reader.table(block)) for block in blocks))


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
        shape = _shape(reader, reader.table(entry))
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


def _tensor(reader: _Reader, position: int) -> Tensor:
    vtable = reader.layout(position)
    if vtable.fitting is not _TENSOR_WIDTHS:
        reader.fit(vtable, _TENSOR_WIDTHS)
    named, shaped, typed, filled, variable, unranked, variable_named, offset, size = vtable.slots[:9]
    data = reader.data
    name = reader.string_at(reader.follow(position + named)) if named else ""
    if not name:
        raise TosaError("a tensor has no name")
    if (offset and _u64(data, position + offset)[0]) or (size and _u64(data, position + size)[0]):
        raise TosaError(f"tensor {short(name)}: its data lie outside the FlatBuffer")
    if vtable.scaled:
        _refuse_scaled(reader, position, vtable, name)
    number = _u32(data, position + typed)[0] if typed else 0
    dtype = _DTYPES.get(number)
    if not dtype:
        raise TosaError(f"tensor {short(name)}: element type {number} is unknown to TOSA 1.0")
    shape = reader.int32s_at(reader.follow(position + shaped), reader.limits.max_rank) if shaped else ()
    constant = None
    if filled:
        start, length = reader.vector(reader.follow(position + filled), 1)
        if length:
            constant = _constant(name, data, start, length, dtype, shape)
    return Tensor(
        name,
        shape,
        dtype,
        constant,
        bool(variable and data[position + variable]),
        bool(unranked and data[position + unranked]),
        reader.string_at(reader.follow(position + variable_named)) if variable_named else "",
    )


def _refuse_scaled(reader: _Reader, position: int, vtable: _Vtable, name: str) -> None:
    """Block scaling came after 1.0; its fields may be present with nothing in them."""
    data = reader.data
    scale_type, scale_data, block_shape, offset, size = vtable.slots[_SCALED]
    if (
        (scale_type and _u32(data, position + scale_type)[0])
        or (block_shape and _u32(data, position + block_shape)[0])
        or (offset and _u64(data, position + offset)[0])
        or (size and _u64(data, position + size)[0])
        or (scale_data and reader.vector(reader.follow(position + scale_data), 1)[1])
    ):
        raise TosaError(f"tensor {short(name)}: block scaling is unknown to TOSA 1.0")


def _constant(name: str, data: bytes, start: int, length: int, dtype: DType, shape: Sequence[int]) -> bytes:
    """A tensor's data without the padding; exactly what its shape needs."""
    if min(shape, default=0) < 0:
        raise TosaError(f"tensor {short(name)}: data for a shape that is not known")
    need = packed_bytes(dtype, prod(shape))
    if length != need:
        padded = -(-need // _ALIGNMENT) * _ALIGNMENT
        if length != padded or any(data[start + need : start + length]):
            raise TosaError(f"tensor {short(name)}: {length} bytes of data, its shape needs {need}")
    return data[start : start + need]


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


def _operator(reader: _Reader, position: int) -> Operator:
    vtable = reader.layout(position)
    if vtable.fitting is not _OPERATOR_WIDTHS:
        reader.fit(vtable, _OPERATOR_WIDTHS)
    numbered, union_typed, attributed, reads, writes = vtable.slots[:5]
    data = reader.data
    number = _u32(data, position + numbered)[0] if numbered else 0
    op = _OPS.get(number)
    if op is None:
        raise TosaError(f"operator number {number} is unknown to TOSA 1.0")
    union_type = data[position + union_typed] if union_typed else 0
    if union_type != op:
        # Serialisers write variable accesses as IDENTITY, told apart by their attribute alone.
        access = _OPS.get(union_type)
        if op != Op.IDENTITY or access not in _VARIABLE_ACCESS:
            raise TosaError(f"{op.name} carries the attributes of operator number {union_type}")
        op = access
    if not attributed:
        raise TosaError(f"{op.name} carries no attributes")
    attribute_table = reader.table(reader.follow(position + attributed))
    attributes = {
        name: read_attribute(reader, attribute_table, slot) for name, read_attribute, slot in _ATTRIBUTE_FIELDS[op]
    }
    limit = reader.limits.max_operator_operands
    return Operator(
        op,
        attributes,
        reader.strings_at(reader.follow(position + reads), limit) if reads else (),
        reader.strings_at(reader.follow(position + writes), limit) if writes else (),
    )


def _bytes(reader: _Reader, table: _Table, slot: int) -> AttributeValue:
    blob = reader.blob(table, slot)
    return DEFAULTS[Kind.BYTES] if blob is None else blob


_ATTRIBUTE_READERS: Final[dict[Kind, Callable[[_Reader, _Table, int], AttributeValue]]] = {
    Kind.I32: lambda reader, table, slot: reader.scalar(table, slot, _I32, 0),
    Kind.U32: lambda reader, table, slot: reader.scalar(table, slot, _U32, 0),
    Kind.BOOL: lambda reader, table, slot: reader.boolean(table, slot),
    Kind.I32S: lambda reader, table, slot: reader.int32s(table, slot, 2 * reader.limits.max_rank),
    Kind.BYTES: _bytes,
    Kind.STRING: lambda reader, table, slot: reader.string(table, slot),
}


_ATTRIBUTE_FIELDS: Final = {
    op: tuple((field.name, _ATTRIBUTE_READERS[field.kind], slot) for slot, field in enumerate(fields))
    for op, fields in ATTRIBUTES.items()
}


def short(name: str) -> str:
    """A name as messages show it: quoted, control characters escaped, bounded."""
    return repr(name if len(name) <= 64 else name[:61] + "...")
