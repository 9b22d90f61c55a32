"""The driver's command queue: a split ring plus the memory that frames and responses pass through.

Knows rings (virtqueue/driver.py) and how to hand out pieces of one block of memory that the device can reach; knows no
command and not where the memory comes from. Every transport that has a ring of its own is built on this. Standard
library only: this also runs inside a guest.

The block is laid out as the ring, then fixed slots for small commands (taking one is a list's pop), then pages that
large requests and responses borrow, lowest address first so that the same cached pages serve again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from virtaccel.guest_tools.transport.base import Backpressure, Completion, Part, Shared, TransportError
from virtaccel.guest_tools.transport.raw import RawRing
from virtaccel.virtqueue.driver import DriverQueue
from virtaccel.virtqueue.errors import DeviceMisbehaved
from virtaccel.virtqueue.layout import Placement, ring_bytes

# The smallest page of the machines this runs on: in a guest, the device sees memory page by page.
PAGE_BYTES: Final = 4096
# A small slot takes every command but the bulk ones: a SUBMIT of 22 bindings, and a GET_DEVICE_INFO response. Four of
# them fill a page, so none crosses into one that lies elsewhere for the device.
SLOT_REQUEST_BYTES: Final = 768
SLOT_RESPONSE_BYTES: Final = 256
SLOT_BYTES: Final = SLOT_REQUEST_BYTES + SLOT_RESPONSE_BYTES
_new_tuple: Final = tuple.__new__  # NamedTuple's constructor without its handling of keywords, on the hot path

Range: TypeAlias = tuple[int, int]
# From an offset and a length in the block to the device's (address, length) ranges, in order.
Locate: TypeAlias = Callable[[int, int], Sequence[Range]]


class _Slot(NamedTuple):
    """Where one command's bytes are: a small slot, or borrowed `pages` (offset, bytes) with ranges of their own."""

    start: int
    request_address: int
    response_address: int
    response: memoryview
    pages: Range | None
    sink: int = 0
    """Bytes behind the response that lie elsewhere."""


class Pages:
    """First-fit allocation of whole pages between two offsets."""

    __slots__ = ("_free",)

    def __init__(self, start: int, end: int) -> None:
        self._free: list[Range] = [(start, end - start)] if end > start else []

    def take(self, size: int) -> Range | None:
        """(offset, bytes) of a free run of at least `size` bytes, or None."""
        size = _pages(size)
        for index, (start, length) in enumerate(self._free):
            if length >= size:
                self._free[index : index + 1] = [(start + size, length - size)] if length > size else []
                return start, size
        return None

    def give_back(self, taken: Range) -> None:
        """Return what `take` gave; neighbours are joined."""
        joined: list[Range] = []
        for start, length in sorted((*self._free, taken)):
            if joined and joined[-1][0] + joined[-1][1] == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((start, length))
        self._free = joined


def _pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def block_bytes(queue_size: int, bulk_bytes: int) -> int:
    """Bytes of a block with room for `bulk_bytes` of large frames and responses at a time."""
    return _pages(ring_bytes(queue_size)) + _pages(queue_size // 2 * SLOT_BYTES) + _pages(bulk_bytes)


class CommandRing:
    """One command queue over `block` (writable, `block_bytes(...)` long), which the device sees as `locate` says.

    The ring and each small slot must be contiguous for the device: they are never more than `locate` of their page
    yields. `max_chain_descriptors` is the device's limit. `published` counts commands, for whoever has to be told.
    """

    __slots__ = (
        "_block", "_free", "_issued", "_limit", "_locate", "_pages", "_slots", "placement", "published", "queue",
    )  # fmt: skip

    def __init__(self, block: memoryview, locate: Locate, queue_size: int, max_chain_descriptors: int) -> None:
        self._block = block
        self._locate = locate
        self._limit = min(max_chain_descriptors, queue_size)
        # Slots begin on a page of their own, so that a slot is contiguous for the device.
        ring_end = _pages(ring_bytes(queue_size))
        ((base, _),) = locate(0, ring_bytes(queue_size))
        self.queue = DriverQueue.in_memory(block, base, queue_size)
        placement = self.queue.addresses
        assert placement is not None, "in_memory places the parts"
        self.placement: Placement = placement
        bulk = ring_end + _pages(queue_size // 2 * SLOT_BYTES)
        # A chain takes two descriptors at least, so more slots than half the queue could never be used.
        self._slots = [self._slot(ring_end + index * SLOT_BYTES) for index in range(queue_size // 2)]
        self._pages = Pages(bulk, len(block))
        self._free = list(reversed(self._slots))
        self._issued: list[_Slot | None] = [None] * queue_size
        self.published = 0

    def _slot(self, start: int) -> _Slot:
        ((address, _),) = self._locate(start, SLOT_BYTES)
        view = self._block[start + SLOT_REQUEST_BYTES : start + SLOT_BYTES]
        return _Slot(start, address, address + SLOT_REQUEST_BYTES, view, None)

    def _whole(self, slot: _Slot) -> _Slot:
        """The slot as it was before a shared sink continued its response."""
        return self._slots[(slot.start - self._slots[0].start) // SLOT_BYTES] if slot.sink else slot

    def publish(self, request: Sequence[Part], capacity: int) -> int:
        """Copy the frame into the block and make the chain available; returns its head. Raises Backpressure, and
        TransportError for a frame that can never fit. Whether to kick is the caller's business."""
        alone = len(request) == 1
        size = len(request[0]) if alone else sum(map(len, request))
        if size > SLOT_REQUEST_BYTES or capacity > SLOT_RESPONSE_BYTES:
            return self._publish_large(request, size, capacity)
        frame = request[0] if alone else b"".join(request)
        if not self._free:
            raise Backpressure("no free slot")
        slot = self._free.pop()
        start, request_address, response_address, _, _, _ = slot
        self._block[start : start + size] = frame
        try:
            head = self.queue.publish_pair(request_address, size, response_address, capacity)
        except BaseException as error:
            self._free.append(slot)
            if isinstance(error, DeviceMisbehaved):
                raise _broken(error) from error
            raise
        self._issued[head] = slot
        self.published += 1
        return head

    def _publish_large(self, request: Sequence[Part], size: int, capacity: int) -> int:
        room = _pages(size) + _pages(capacity)
        taken = self._pages.take(room)
        if taken is None:
            # With nothing outstanding no room will ever come free: this is an error, not back-pressure.
            if not self.queue.outstanding:
                raise TransportError(f"a command of {size} + {capacity} bytes is larger than the transport's memory")
            raise Backpressure("no room for the frame")
        start = position = taken[0]
        for part in request:
            self._block[position : position + len(part)] = part
            position += len(part)
        # The response has pages of its own: what the device writes never lies beside what it still reads.
        answer = start + _pages(size)
        readable, writable = self._locate(start, size), self._locate(answer, capacity)
        try:
            head = self._publish_chain(readable, writable)
        except BaseException:
            self._pages.give_back(taken)
            raise
        self._issued[head] = _Slot(start, 0, 0, self._block[answer : answer + capacity], taken)
        self.published += 1
        return head

    def _publish_chain(self, readable: Sequence[Range], writable: Sequence[Range]) -> int:
        """A chain of any number of ranges. Raises Backpressure, TransportError."""
        if len(readable) + len(writable) > self._limit:
            size, capacity = (sum(length for _, length in ranges) for ranges in (readable, writable))
            raise TransportError(
                f"a command of {size} + {capacity} bytes needs {len(readable) + len(writable)} descriptors, "
                f"the device takes {self._limit}"
            )
        try:
            return self.queue.publish(readable, writable)
        except DeviceMisbehaved as error:
            raise _broken(error) from error

    def lay_bare(
        self, notify: Callable[[], None], rest: Callable[[float], None], reset: Callable[[], None]
    ) -> RawRing:
        """The ring for whoever writes descriptors by hand (transport/raw.py); this object is not used meanwhile."""
        return RawRing(self._block, self._locate, self.queue.size, notify, rest, reset)

    def share(self, size: int) -> Shared:
        """As in SharesMemory."""
        taken = self._pages.take(size) if size > 0 else None
        if taken is None:
            raise Backpressure(f"no {size} bytes to share")
        return Shared(taken[0], self._block[taken[0] : taken[0] + size])

    def unshare(self, shared: Shared) -> None:
        self._pages.give_back((shared.offset, _pages(len(shared))))

    def publish_shared(
        self, request: Sequence[Part], capacity: int, source: Shared | None, sink: Shared | None
    ) -> int:
        """As in SharesMemory; the frame without `source` and the response without `sink` are small."""
        frame = b"".join(request)
        if len(frame) > SLOT_REQUEST_BYTES or capacity > SLOT_RESPONSE_BYTES:
            raise TransportError(f"a frame of {len(frame)} + {capacity} bytes beside shared memory")
        if not self._free:
            raise Backpressure("no free slot")
        slot = self._free.pop()
        # Only the frame's own bytes are copied; the shared ones stand behind them as descriptors.
        self._block[slot.start : slot.start + len(frame)] = frame
        readable, writable = [(slot.request_address, len(frame))], [(slot.response_address, capacity)]
        readable += self._locate(source.offset, len(source)) if source else ()  # an empty range is none
        writable += self._locate(sink.offset, len(sink)) if sink else ()
        try:
            head = self._publish_chain(readable, writable)
        except BaseException:
            self._free.append(slot)
            raise
        if sink:
            start, request_address, response_address, response, _, _ = slot
            # Remembered as it was published: the device's count runs over response and sink together.
            slot = _Slot(start, request_address, response_address, response[:capacity], None, len(sink))
        self._issued[head] = slot
        self.published += 1
        return head

    def collect(self) -> Completion | None:
        """The next chain that came back, or None. Never waits. The response is valid until the next `publish`."""
        try:
            used = self.queue.collect()
        except DeviceMisbehaved as error:
            raise _broken(error) from error
        if used is None:
            return None
        head, written = used
        slot = self._issued[head]
        assert slot is not None, "the driver queue returns only heads it published"
        self._issued[head] = None
        _, _, _, response, pages, sink = slot
        if sink:
            self._free.append(self._whole(slot))
            return Completion(head, response[:written], max(written - len(response), 0))
        if pages is None:
            self._free.append(slot)
        else:
            self._pages.give_back(pages)
        return _new_tuple(Completion, (head, response[:written], 0))

    def reset(self) -> None:
        """The device has been reset: everything outstanding is ours again."""
        for head in self.queue.reset():
            slot = self._issued[head]
            self._issued[head] = None
            if slot is None:
                continue
            if slot.pages is None:
                self._free.append(self._whole(slot))
            else:
                self._pages.give_back(slot.pages)


def _broken(error: DeviceMisbehaved) -> TransportError:
    return TransportError(f"the device broke the ring: {error}")
