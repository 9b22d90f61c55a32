"""Object IDs and the tables that resolve them (specification.md, sections 4.1 and 7).

An ID is an opaque nonzero 64-bit number made of four fields, highest first: the namespace of the reset epoch, the kind
of object, the slot and the slot's generation. Nothing ever takes one apart to trust it: an ID resolves only if it
equals, in all 64 bits, the ID of a live object of the kind asked for. So an ID of another epoch, another kind or an
earlier use of the slot cannot resolve, and there is no decoding to get wrong. This module knows no backend and no
command.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from hashlib import blake2b
from typing import Final, Generic, TypeVar

from virtaccel.device.errors import NeedsReset

NAMESPACE_BITS: Final = 21
KIND_BITS: Final = 3
SLOT_BITS: Final = 20
GENERATION_BITS: Final = 20


class Kind(IntEnum):
    """Kinds of object. Zero is left out, so no ID is zero."""

    CONTEXT = 1
    BUFFER = 2
    PROGRAM = 3
    QUEUE = 4
    EVENT = 5


Record = TypeVar("Record")


class TableFull(Exception):
    """No slot is left: too many live objects, or every slot has used up its generations."""


class Table(Generic[Record]):
    """Live objects of one kind in one epoch.

    A slot's generation grows with every use; a slot whose last generation was used retires, so an ID never comes back
    within its epoch. 2^40 objects of a kind can be made before the table is spent, and then only a reset helps.
    """

    __slots__ = ("_free", "_generation_bits", "_generations", "_prefix", "_slots", "get", "live")

    def __init__(
        self, kind: int, namespace: int, *, slot_bits: int = SLOT_BITS, generation_bits: int = GENERATION_BITS
    ) -> None:
        self._prefix = (namespace << KIND_BITS | kind) << (slot_bits + generation_bits)
        self._generation_bits = generation_bits
        self._slots = 1 << slot_bits
        self._generations: list[int] = []  # of each slot ever used: the generation of its latest use
        self._free: list[int] = []
        self.live: dict[int, Record] = {}
        self.get: Callable[[int], Record | None] = self.live.get  # bound once: every command begins here

    def __len__(self) -> int:
        return len(self.live)

    @property
    def room(self) -> int:
        """How many more objects `insert` would take now."""
        return len(self._free) + self._slots - len(self._generations)

    def insert(self, record: Record) -> int:
        """Give `record` an ID that no object had before. Raises TableFull."""
        if self._free:
            slot = self._free.pop()
            generation = self._generations[slot] + 1
            self._generations[slot] = generation
        elif len(self._generations) < self._slots:
            slot, generation = len(self._generations), 0
            self._generations.append(0)
        else:
            raise TableFull
        object_id = self._prefix | slot << self._generation_bits | generation
        self.live[object_id] = record
        return object_id

    def remove(self, object_id: int) -> Record:
        """Let a live ID die; its slot may be used again under another generation. Raises KeyError."""
        record = self.live.pop(object_id)
        last = (1 << self._generation_bits) - 1
        if object_id & last != last:
            self._free.append(object_id >> self._generation_bits & self._slots - 1)
        return record


class Namespaces:
    """A source of namespaces: nonzero, never repeated, and not to be guessed from earlier ones.

    Counts through a permutation of all 21-bit numbers that `secret` selects (a four-round Feistel network), so nothing
    has to be remembered. Raises NeedsReset when all are used, after two million resets: the guest that did so is left
    without a device rather than with IDs that live twice.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._next = 0

    def __call__(self) -> int:
        while True:
            if self._next >> NAMESPACE_BITS:
                raise NeedsReset("every namespace was used", discard=True)
            value = self._permute(self._next)
            self._next += 1
            if value:
                return value

    def _permute(self, value: int) -> int:
        # Feistel over an even number of bits; walk the cycle until the result is back among the 21-bit numbers.
        half = (NAMESPACE_BITS + 1) // 2
        mask = (1 << half) - 1
        while True:
            left, right = value >> half, value & mask
            for number in range(4):
                message = bytes((number,)) + right.to_bytes(2, "little")
                digest = blake2b(message, key=self._secret, digest_size=2).digest()
                left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
            value = left << half | right
            if not value >> NAMESPACE_BITS:
                return value
