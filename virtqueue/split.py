"""The device's side of a split virtqueue: pop available chains, push used ones (virtio 1.3, 2.7).

Knows ring parts, indices and suppression flags; knows nothing of frames, file descriptors or event loops. Everything
the driver wrote is hostile: a bad chain is returned as such, a bad ring stops with RingError, and no call does more
work than one chain of the configured length.

One access per index. An index or flag shared with another processor must be read by one load and written by one store.
A memoryview cast to "H" does that: CPython copies a constant two bytes between the item and a C variable, which
compilers turn into a single move, and the parts are checked to be aligned. `struct.pack_into` would not do for an
index: it clears its target before it writes, so the driver could see index 0 for a moment. It serves for used elements,
which nobody reads before the index covers them.
"""

import ctypes
from itertools import count
from typing import Final

from virtaccel.virtqueue.barrier import WEAKLY_ORDERED, fence
from virtaccel.virtqueue.chain import walk
from virtaccel.virtqueue.errors import RingError
from virtaccel.virtqueue.layout import (
    AVAIL_ALIGNMENT,
    AVAIL_FLAGS,
    AVAIL_INDEX,
    AVAIL_NO_INTERRUPT,
    AVAIL_RING,
    DESCRIPTOR_ALIGNMENT,
    INDEX_MASK,
    USED_ALIGNMENT,
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
    used_bytes,
)
from virtaccel.virtqueue.memory import GuestMemory
from virtaccel.virtqueue.segments import Chain, Fault

HARD_MAX_CHAIN_DESCRIPTORS: Final = 256
_encode_used: Final = USED_ELEMENT.pack_into  # bound once: an attribute of a Struct costs as much as packing with it
_EPOCHS: Final = count(1)  # one sequence for all queues, so that no chain fits a queue it was not popped from


class DeviceQueue:
    """One ring, served from one thread.

    `size` is the number of descriptors, `descriptors`, `available` and `used` the guest-physical addresses of the
    parts (`GuestMemory.guest_address` makes them from a front end's user addresses). `max_chain_descriptors` is clipped
    to `size`. `last_available` is where fetching begins: 0 for a fresh ring, a vhost-user front end's base otherwise.
    The used index goes on from what the ring holds. Raises RingError for a size or an address the standard forbids and
    for a part that does not lie in one region.

    `outstanding` counts the chains popped and not yet pushed, `used_index` all that were pushed, modulo 2^16. `stopped`
    is None, or why the ring was stopped; only `reset` runs it again.
    """

    __slots__ = (
        "_available", "_epoch", "_limit", "_mask", "_memory", "_places", "_table", "_used", "_used_words",
        "last_available", "outstanding", "size", "stopped", "used_index",
    )  # fmt: skip

    def __init__(
        self, memory: GuestMemory, size: int, descriptors: int, available: int, used: int,
        max_chain_descriptors: int, *, last_available: int = 0,
    ) -> None:
        if not is_queue_size(size):
            raise RingError(f"a ring of {size} descriptors: the size is a power of two up to 32768")
        if not 2 <= max_chain_descriptors <= HARD_MAX_CHAIN_DESCRIPTORS:
            raise ValueError(f"max_chain_descriptors is {max_chain_descriptors}, not 2..{HARD_MAX_CHAIN_DESCRIPTORS}")
        if not 0 <= last_available <= INDEX_MASK:
            raise RingError(f"available index {last_available} is no 16-bit number")
        self.size: Final = size
        self.last_available = last_available
        self.stopped: str | None = None
        self._mask: Final = size - 1
        self._limit: Final = min(max_chain_descriptors, size)
        self._places: Final = Placement(descriptors, available, used)
        self._epoch = next(_EPOCHS)
        self.outstanding = 0
        self._map(memory)
        self.used_index: int = self._used_words[USED_INDEX]

    # -- memory ---------------------------------------------------------------------------------------------------

    def _map(self, memory: GuestMemory) -> None:
        table, available, used = self._places
        self._memory = memory
        self._table = _part(memory, "descriptor table", table, descriptor_bytes(self.size), DESCRIPTOR_ALIGNMENT, 2)
        self._available = _part(memory, "available ring", available, available_bytes(self.size), AVAIL_ALIGNMENT, 2)
        self._available = self._available.cast("H")
        self._used = _part(memory, "used ring", used, used_bytes(self.size), USED_ALIGNMENT, 4)
        self._used_words = self._used.cast("H")

    def rebind(self, memory: GuestMemory) -> None:
        """Find the ring again in a new memory table, at the same guest-physical addresses; every index is kept.

        Chains popped before may still be pushed: their views keep the old mappings alive. If a part is gone from the
        new table the ring is stopped, holds no view of the old one, and RingError is raised.
        """
        try:
            self._map(memory)
        except RingError as error:
            self.stop(str(error))
            raise

    def stop(self, reason: str) -> None:
        """Let go of the ring's memory: from now on `pop` and `push` raise RingError with `reason`."""
        self.stopped = reason
        self._memory = GuestMemory()
        self._table = self._used = memoryview(b"")
        self._available = self._used_words = memoryview(bytearray(4)).cast("H")

    def reset(self, memory: GuestMemory, last_available: int = 0) -> None:
        """Begin a new epoch on the same addresses: chains of the old one can never be pushed any more.

        The used index is read from the ring again, as after a driver's reset the ring is new. Raises RingError as
        `rebind` does.
        """
        self._epoch = next(_EPOCHS)
        self.outstanding = 0
        self.last_available = last_available & INDEX_MASK
        self.rebind(memory)
        self.stopped = None
        self.used_index = self._used_words[USED_INDEX]

    def resume(self, before: "DeviceQueue") -> None:
        """Take over from `before`, which served this very ring until a pause: chains it popped may be pushed here.

        Only for a ring that goes on; after a driver's reset old chains must stay old.
        """
        self._epoch = before._epoch
        self.outstanding = before.outstanding

    # -- the hot path ---------------------------------------------------------------------------------------------

    def pop(self) -> Chain | None:
        """The next available chain in the driver's order, valid or `broken`; None when there is none.

        Raises RingError, and stops the ring, if the driver claims more chains than the ring has room for, those counted
        that were popped and not pushed: each holds a descriptor at least, which an honest driver cannot reuse.
        """
        if self.stopped is not None:
            raise RingError(self.stopped)
        last = self.last_available
        available = self._available
        pending = (available[AVAIL_INDEX] - last) & INDEX_MASK
        if not pending:
            return None
        if pending + self.outstanding > self.size:
            raise self._overrun(pending)
        if WEAKLY_ORDERED:
            fence()  # acquire: the entry and its descriptors are read after the index that covers them (2.7.13.3)
        head = available[AVAIL_RING + (last & self._mask)]
        self.last_available = (last + 1) & INDEX_MASK
        self.outstanding += 1
        return walk(self._memory, self._table, self.size, self._limit, head, self._epoch)

    def push(self, chain: Chain, written: int) -> bool:
        """Give a chain back with `written` bytes written into its writable segments; in any order.

        False, with nothing written, if the chain was pushed already, or popped before the last `reset` or from another
        queue. Raises ValueError for a count the chain cannot hold, RingError if the ring is stopped.
        """
        if chain.epoch != self._epoch:
            return False
        if self.stopped is not None:
            raise RingError(self.stopped)
        if not 0 <= written <= chain.writable_bytes:
            raise ValueError(f"{written} bytes written into {chain!r}")
        index = self.used_index
        offset = USED_HEADER_BYTES + USED_ELEMENT_BYTES * (index & self._mask)
        _encode_used(self._used, offset, chain.head, written)
        if WEAKLY_ORDERED:
            fence()  # release: the response and the element before the index that publishes them (2.7.8.2)
        self.used_index = self._used_words[USED_INDEX] = (index + 1) & INDEX_MASK
        self.outstanding -= 1
        chain.epoch = 0  # of no queue: the driver owns it again
        return True

    def _overrun(self, pending: int) -> RingError:
        held = f" with {self.outstanding} chains held" if self.outstanding else ""
        reason = f"the available index is {pending} ahead in a ring of {self.size}{held}"
        self.stop(reason)
        return RingError(reason)

    # -- notifications (2.7.7, 2.7.10) ----------------------------------------------------------------------------

    def should_notify(self) -> bool:
        """Whether the driver wants an interrupt for what was pushed; ask once after a batch."""
        fence()  # store-load: our used index is visible before we read the driver's flag
        return not self._available[AVAIL_FLAGS] & AVAIL_NO_INTERRUPT

    def waiting(self) -> bool:
        """Whether `pop` would find something, for whoever looks again and again without kicks."""
        return self.stopped is None and self._available[AVAIL_INDEX] != self.last_available

    def disable_kicks(self) -> None:
        """Ask the driver not to kick while we are looking anyway. A hint: kicks may still come."""
        self._used_words[USED_FLAGS] = USED_NO_NOTIFY

    def enable_kicks(self) -> bool:
        """Ask for kicks again, then look once more: True if work arrived meanwhile, whose kick may never come."""
        self._used_words[USED_FLAGS] = 0
        fence()  # store-load: our flag is visible before we read the driver's index
        return self.stopped is None and bool(self._available[AVAIL_INDEX] != self.last_available)


def _part(memory: GuestMemory, name: str, address: int, length: int, alignment: int, native: int) -> memoryview:
    if address % alignment:
        raise RingError(f"{name} at {address:#x} is not aligned to {alignment} bytes")
    try:
        views = memory.translate(address, length)
    except Fault as fault:
        raise RingError(f"{name}: {fault}") from fault
    if len(views) != 1:
        raise RingError(f"{name} at {address:#x} lies across two regions")
    # The guest's alignment is ours only if the region is mapped with the same one; mmap's always is.
    if ctypes.addressof(ctypes.c_char.from_buffer(views[0])) % native:
        raise RingError(f"{name} at {address:#x} is mapped at an address not aligned to {native} bytes")
    return views[0]
