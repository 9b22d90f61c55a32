"""The FlatBuffers encoding, read with suspicion: tables and vtables, vectors, strings. Standard library only.

Every offset is checked before it is used, every length before anything is made of it. An honest file holds each thing
once, so all that is read may not add up to more than twice the file: tables that share or overlap parts cannot make a
small file expensive. What the tables are is for `flatbuffer` to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct, unpack_from
from typing import Final, NamedTuple, NoReturn

from virtaccel.tosa_graph.graph import TosaError

U8: Final = Struct("<B")
I32: Final = Struct("<i")
U32: Final = Struct("<I")
U64: Final = Struct("<Q")
_U16_PAIR: Final = Struct("<HH")
_u32 = U32.unpack_from
_i32 = I32.unpack_from
_SHORT: Final = 17
_U32S: Final = tuple(Struct(f"<{length}I") for length in range(_SHORT))
_I32S: Final = tuple(Struct(f"<{length}i") for length in range(_SHORT))
"""Lists of fewer than `_SHORT` numbers, by length: nearly all."""
_MAX_SLOTS: Final = 64  # no table of the schema has as many fields; what a later one adds is not looked at


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


class Vtable:
    """Where a table's fields lie: for each of `_MAX_SLOTS` slots an offset from the table's position, 0 if absent."""

    __slots__ = ("fitting", "slots", "table_bytes", "used")

    def __init__(self, table_bytes: int, slots: tuple[int, ...]) -> None:
        self.table_bytes = table_bytes
        self.slots = slots + (0,) * (_MAX_SLOTS - len(slots))
        self.fitting: tuple[int, ...] = ()
        """Widths of fields that were found to fit."""
        self.used = max([index for index, offset in enumerate(slots, 1) if offset], default=0)
        """Slots up to the last one that is present."""


class Table(NamedTuple):
    """A table found good: its position and layout."""

    position: int
    vtable: Vtable


class Reader:
    """The bytes, what has been read of them so far, and the primitive accesses."""

    def __init__(self, data: bytes, limits: ReadLimits) -> None:
        self.data = data
        self.size = len(data)
        self.limits = limits
        self.max_name_bytes = limits.max_name_bytes
        self.budget = 2 * self.size
        self.counts: dict[str, int] = {}
        self._vtables: dict[int, Vtable] = {}
        self._strings: dict[int, str] = {}
        self._names: dict[bytes, str] = {}

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

    def layout(self, position: int) -> Vtable:
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

    def fit(self, vtable: Vtable, widths: tuple[int, ...]) -> None:
        """See that fields of these widths, slot by slot, end inside the tables that are laid out like this."""
        for offset, width in zip(vtable.slots, widths, strict=False):
            if offset and offset + width > vtable.table_bytes:
                self.fail("a field ends outside its table")
        vtable.fitting = widths

    def table(self, position: int) -> Table:
        return Table(position, self.layout(position))

    def _vtable(self, position: int) -> Vtable:
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
        return Vtable(table_bytes, slots)

    def field(self, table: Table, slot: int, width: int) -> int:
        """Position of a field of `width` bytes, 0 if absent (no field can lie at 0, where the root offset is)."""
        offset = table.vtable.slots[slot]
        if not offset:
            return 0
        if offset + width > table.vtable.table_bytes:
            self.fail("a field ends outside its table")
        return table.position + offset

    def scalar(self, table: Table, slot: int, form: Struct, default: int) -> int:
        position = self.field(table, slot, form.size)
        return form.unpack_from(self.data, position)[0] if position else default

    def boolean(self, table: Table, slot: int, default: bool = False) -> bool:
        return bool(self.scalar(table, slot, U8, default))

    def follow(self, position: int) -> int:
        """Where the unsigned offset at `position` leads."""
        offset: int = _u32(self.data, position)[0]
        lead = position + offset
        if offset < 4 or lead > self.size - 4:
            self.fail("an offset leads outside")
        return lead

    def reference(self, table: Table, slot: int) -> int:
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

    def tables(self, table: Table, slot: int, limit: int, what: str) -> list[int]:
        """Positions of a vector of tables, each listed once; the tables are still to be looked at."""
        target = self.reference(table, slot)
        leads = self.offsets(target, limit, what) if target else []
        if len(set(leads)) != len(leads):
            self.fail(f"{what} share a table")
        return leads

    def string_at(self, position: int) -> str:
        text = self._strings.get(position)
        if text is not None:
            return text
        data = self.data
        length: int = _u32(data, position)[0]
        start = position + 4
        end = start + length
        if end > self.size:
            self.fail("a vector's end lies outside")
        if length > self.max_name_bytes:
            raise TosaError(f"a name longer than {self.max_name_bytes} bytes")
        if end == self.size or data[end]:
            self.fail("a string does not end")
        self.budget -= 4 + length
        if self.budget < 0:
            self.fail("its parts overlap")
        # One object for one name: what looks names up then compares and hashes them but once.
        raw = data[start:end]
        text = self._names.get(raw)
        if text is None:
            try:
                text = self._names[raw] = raw.decode()
            except UnicodeDecodeError:
                self.fail("a string is not UTF-8")
        self._strings[position] = text
        return text

    def string(self, table: Table, slot: int) -> str:
        position = self.reference(table, slot)
        return self.string_at(position) if position else ""

    def strings_at(self, target: int, limit: int) -> tuple[str, ...]:
        """The vector of strings at `target`."""
        string_at = self.string_at
        return tuple([string_at(lead) for lead in self.offsets(target, limit, "operands")])

    def strings(self, table: Table, slot: int, limit: int) -> tuple[str, ...]:
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

    def int32s(self, table: Table, slot: int, limit: int) -> tuple[int, ...]:
        target = self.reference(table, slot)
        return self.int32s_at(target, limit) if target else ()

    def blob(self, table: Table, slot: int) -> bytes | None:
        """A vector of bytes; None if the field is absent."""
        target = self.reference(table, slot)
        if not target:
            return None
        position, length = self.vector(target, 1)
        return self.data[position : position + length]
