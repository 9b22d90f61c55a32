"""The driver's side of a split virtqueue: publish chains, collect used ones (virtio 1.3, 2.7.13 and 2.7.14).

Knows ring parts and who owns which descriptor; knows nothing of frames, of devices or of how memory was had. Standard
library only, for it also runs inside a guest, over an mmap of locked pages. Which descriptors are free and what each
published chain holds is kept in private memory, so that a device that writes nonsense into the ring is noticed and
cannot make this side lose or confuse its buffers. As in split.py, an index is always one native 16-bit access.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from virtaccel.virtqueue.barrier import WEAKLY_ORDERED, fence
from virtaccel.virtqueue.errors import Backpressure, DeviceMisbehaved
from virtaccel.virtqueue.layout import (
    AVAIL_FLAGS,
    AVAIL_INDEX,
    AVAIL_NO_INTERRUPT,
    AVAIL_RING,
    DESC_NEXT,
    DESC_WRITE,
    DESCRIPTOR,
    DESCRIPTOR_BYTES,
    INDEX_MASK,
    MAX_CHAIN_BYTES,
    USED_ELEMENT,
    USED_ELEMENT_BYTES,
    USED_FLAGS,
    USED_HEADER_BYTES,
    USED_INDEX,
    USED_NO_NOTIFY,
    Placement,
    available_bytes,
    descriptor_bytes,
    is_queue_size,
    place,
    ring_bytes,
    used_bytes,
)

Range = tuple[int, int]
# Bound once: an attribute of a Struct costs as much as packing with it.
_encode: Final = DESCRIPTOR.pack_into
_decode_used: Final = USED_ELEMENT.unpack_from
_new_tuple: Final = tuple.__new__  # NamedTuple's constructor without its handling of keywords


class Used(NamedTuple):
    """A chain given back: its head as `publish` returned it, and how many bytes the device wrote, from the start."""

    head: int
    written: int


class _Issued(NamedTuple):
    """A published chain: its descriptors, the last first, as they go back to the free ones."""

    descriptors: tuple[int, ...]
    writable_bytes: int


class DriverQueue:
    """One ring over memory the driver owns, used from one thread.

    `descriptors`, `available` and `used` are the parts' bytes: writable views, at least as long as layout says and
    aligned as it says in this process too. They need not lie together: in a guest each must only be contiguous in
    physical memory. The parts are cleared. `first_index` places both indices, for rings that begin elsewhere than at 0.
    """

    __slots__ = (
        "_available", "_broken", "_first_index", "_free", "_issued", "_last_used", "_mask", "_next_available",
        "_table", "_used", "_used_words", "addresses", "outstanding", "size",
    )  # fmt: skip

    def __init__(
        self, size: int, descriptors: memoryview, available: memoryview, used: memoryview, *, first_index: int = 0
    ) -> None:
        if not is_queue_size(size):
            raise ValueError(f"a ring of {size} descriptors: the size is a power of two up to 32768")
        self.size: Final = size
        self.addresses: Placement | None = None
        self.outstanding = 0
        self._mask: Final = size - 1
        self._table: Final = descriptors.cast("B")[: descriptor_bytes(size)]
        self._available: Final = available.cast("B")[: available_bytes(size)].cast("H")
        self._used: Final = used.cast("B")[: used_bytes(size)]
        self._used_words: Final = self._used.cast("H")
        if (len(self._table), self._available.nbytes, len(self._used)) != (
            descriptor_bytes(size),
            available_bytes(size),
            used_bytes(size),
        ):
            raise ValueError(f"the parts are too short for a ring of {size}")
        self._issued: Final[list[_Issued | None]] = [None] * size
        self._first_index: Final = first_index & INDEX_MASK
        self.reset()

    @classmethod
    def in_memory(cls, memory: memoryview, base: int, size: int, *, first_index: int = 0) -> "DriverQueue":
        """A ring at the start of contiguous `memory`, whose first byte the device knows as address `base`.

        It takes `layout.ring_bytes(size)` bytes; `addresses` then holds the parts' addresses for the device.
        """
        if len(memory) < ring_bytes(size):
            raise ValueError(f"a ring of {size} takes {ring_bytes(size)} bytes, not {len(memory)}")
        at = place(size)
        queue = cls(size, memory[at.descriptors :], memory[at.available :], memory[at.used :], first_index=first_index)
        queue.addresses = Placement(base + at.descriptors, base + at.available, base + at.used)
        return queue

    @property
    def free_descriptors(self) -> int:
        """Descriptors that no published chain holds."""
        return len(self._free)

    def reset(self) -> list[int]:
        """Take everything back once the device has confirmed its reset: heads outstanding until now, in no order.

        The ring is cleared to its initial state; the device will return none of these chains any more.
        """
        heads = [head for head, issued in enumerate(self._issued) if issued is not None]
        self._issued[:] = [None] * self.size
        self._free: list[int] = list(range(self.size - 1, -1, -1))
        self._broken: str | None = None
        self.outstanding = 0
        self._table[:] = bytes(len(self._table))
        for index in range(len(self._available)):
            self._available[index] = 0
        self._used[:] = bytes(len(self._used))
        self._next_available = self._last_used = self._first_index
        self._available[AVAIL_INDEX] = self._used_words[USED_INDEX] = self._first_index
        return heads

    # -- publish and collect --------------------------------------------------------------------------------------

    def publish(self, readable: Sequence[Range], writable: Sequence[Range]) -> int:
        """Make one chain available: `readable` then `writable` ranges, each (device address, bytes). Its head.

        Raises Backpressure if the ring has too few free descriptors now, ValueError if it can never be published (no
        range of a kind, an empty range, more ranges than descriptors, too many bytes), DeviceMisbehaved after one
        such. Nothing is published by a call that raises.
        """
        count = len(readable) + len(writable)
        total = self._check(readable, writable, count)
        free = self._free
        if self._broken is not None:
            raise DeviceMisbehaved(self._broken)
        if count > len(free):
            raise Backpressure(f"{count} descriptors wanted, {len(free)} free")
        taken = tuple(free[: -count - 1 : -1])
        del free[-count:]
        table = self._table
        last, first_writable = count - 1, len(readable)
        for position, (address, length) in enumerate((*readable, *writable)):
            flags = DESC_WRITE if position >= first_writable else 0
            following = 0
            if position < last:
                flags |= DESC_NEXT
                following = taken[position + 1]
            _encode(table, taken[position] * DESCRIPTOR_BYTES, address, length, flags, following)
        return self._make_available(taken[0], _Issued(taken[::-1], total))

    def publish_pair(self, request: int, size: int, response: int, capacity: int) -> int:
        """`publish` for the commonest chain, one range of each kind: `size` bytes at `request`, to be read, then
        `capacity` bytes at `response`, to be written."""
        if self._broken is not None:
            raise DeviceMisbehaved(self._broken)
        if size < 1 or capacity < 1 or self.size < 2:
            raise ValueError(f"{size} readable and {capacity} writable bytes in a ring of {self.size}")
        free = self._free
        if len(free) < 2:
            raise Backpressure(f"2 descriptors wanted, {len(free)} free")
        head, last = free[-1], free[-2]
        _encode(self._table, head * DESCRIPTOR_BYTES, request, size, DESC_NEXT, last)
        _encode(self._table, last * DESCRIPTOR_BYTES, response, capacity, DESC_WRITE, 0)
        del free[-2:]
        return self._make_available(head, _new_tuple(_Issued, ((last, head), capacity)))

    def _make_available(self, head: int, issued: _Issued) -> int:
        self._issued[head] = issued
        self.outstanding += 1
        index = self._next_available
        available = self._available
        available[AVAIL_RING + (index & self._mask)] = head
        if WEAKLY_ORDERED:
            fence()  # release: request, descriptors and entry before the index that publishes them (2.7.13.3)
        self._next_available = available[AVAIL_INDEX] = (index + 1) & INDEX_MASK
        return head

    def _check(self, readable: Sequence[Range], writable: Sequence[Range], count: int) -> int:
        if not readable or not writable or count > self.size:
            raise ValueError(f"{len(readable)} readable and {len(writable)} writable ranges in a ring of {self.size}")
        total = everything = 0
        for address, length in readable:
            if length < 1 or not 0 <= address <= (1 << 64) - length:
                raise ValueError(f"{length} bytes at {address:#x} are no range")
            everything += length
        for address, length in writable:
            if length < 1 or not 0 <= address <= (1 << 64) - length:
                raise ValueError(f"{length} bytes at {address:#x} are no range")
            total += length
        if everything + total > MAX_CHAIN_BYTES:
            raise ValueError("more than 2**32 bytes in one chain")
        return total

    def collect(self) -> Used | None:
        """The next chain the device gave back, its descriptors free again; None when there is none.

        Raises DeviceMisbehaved for more completions than chains outstanding, a head that was not published, or more
        bytes than the chain's writable ranges hold; then nothing is freed, and only `reset` helps.
        """
        if self._broken is not None:
            raise DeviceMisbehaved(self._broken)
        last = self._last_used
        pending = (self._used_words[USED_INDEX] - last) & INDEX_MASK
        if not pending:
            return None
        if pending > self.outstanding:
            raise self._misbehaved(f"{pending} chains came back, {self.outstanding} were out")
        if WEAKLY_ORDERED:
            fence()  # acquire: the element and the response are read after the index that covers them (2.7.14)
        offset = USED_HEADER_BYTES + USED_ELEMENT_BYTES * (last & self._mask)
        head, written = _decode_used(self._used, offset)
        issued = self._issued[head] if head < self.size else None
        if issued is None:
            raise self._misbehaved(f"chain {head} came back, which was not out")
        if written > issued.writable_bytes:
            raise self._misbehaved(f"{written} bytes were written into {issued.writable_bytes}")
        self._issued[head] = None
        self._free.extend(issued.descriptors)
        self.outstanding -= 1
        self._last_used = (last + 1) & INDEX_MASK
        return _new_tuple(Used, (head, written))

    def _misbehaved(self, reason: str) -> DeviceMisbehaved:
        self._broken = reason
        return DeviceMisbehaved(reason)

    # -- notifications (2.7.7, 2.7.10) ----------------------------------------------------------------------------

    def should_kick(self) -> bool:
        """Whether the device wants a kick for what was published; ask after publishing."""
        fence()  # store-load: our available index is visible before we read the device's flag
        return not self._used_words[USED_FLAGS] & USED_NO_NOTIFY

    def disable_interrupts(self) -> None:
        """Ask the device not to interrupt while we are looking anyway. A hint: interrupts may still come."""
        self._available[AVAIL_FLAGS] = AVAIL_NO_INTERRUPT

    def enable_interrupts(self) -> bool:
        """Ask for interrupts again, then look once more: True if work came back meanwhile, whose call may not come."""
        self._available[AVAIL_FLAGS] = 0
        fence()  # store-load: our flag is visible before we read the device's index
        return bool(self._used_words[USED_INDEX] != self._last_used)
