"""One descriptor chain: the guarded walk from a head to its segments, and copies across segments.

Knows descriptors and guest memory; knows neither the rings that carry heads nor what the bytes mean. A chain is valid
as section 3 of the protocol's virtqueue.md and section 2.7.5 of virtio 1.3 say; an invalid one is still a chain, since
its head must go back to the driver: `broken` says what is wrong with it and no segment is given.

Another processor may rewrite the table at any time. Each descriptor is therefore decoded once, by one call that loads
each of its four fields once, and only these values are judged and used. The walk is bounded by the configured number of
descriptors; one that comes twice is refused at once, since a loop that is rewritten meanwhile would be read twice.
"""

from collections.abc import Sequence
from typing import Final

from virtaccel.virtqueue.layout import (
    DESC_INDIRECT,
    DESC_NEXT,
    DESC_WRITE,
    DESCRIPTOR,
    DESCRIPTOR_BYTES,
    MAX_CHAIN_BYTES,
)
from virtaccel.virtqueue.memory import Fault, GuestMemory

_decode = DESCRIPTOR.unpack_from  # bound once: an attribute of a Struct costs as much as unpacking with it
KNOWN_FLAGS: Final = DESC_NEXT | DESC_WRITE  # the two lowest bits, so any other flag makes a greater number
Segments = Sequence[memoryview]


class Chain:
    """A popped chain. `head` is the driver's token for it, kept as it came, even when it is no descriptor's index.

    `readable` and `writable` are the driver's bytes in order, as views of guest memory of at least one byte each;
    `readable_bytes` and `writable_bytes` their totals. `broken` is None, or the reason why the topology is invalid, and
    then there are no segments. `epoch` is the queue's, see `DeviceQueue.reset`.
    """

    __slots__ = ("broken", "epoch", "head", "readable", "readable_bytes", "writable", "writable_bytes")

    def __init__(
        self,
        head: int,
        readable: tuple[memoryview, ...] = (),
        writable: tuple[memoryview, ...] = (),
        readable_bytes: int = 0,
        writable_bytes: int = 0,
        broken: str | None = None,
        epoch: int = 0,
    ) -> None:
        self.head = head
        self.readable = readable
        self.writable = writable
        self.readable_bytes = readable_bytes
        self.writable_bytes = writable_bytes
        self.broken = broken
        self.epoch = epoch

    @classmethod
    def over(cls, head: int, readable: Segments, writable: Segments) -> "Chain":
        """A chain over segments that are already at hand, no ring involved; totals are computed."""
        return cls(head, tuple(readable), tuple(writable), sum(map(len, readable)), sum(map(len, writable)))

    def __repr__(self) -> str:
        return f"Chain({self.head}: {self.broken or f'{self.readable_bytes} readable, {self.writable_bytes} writable'})"


def walk(memory: GuestMemory, table: memoryview, size: int, limit: int, head: int, epoch: int = 0) -> Chain:
    """Follow the chain at `head` through the descriptor `table` of `size` entries, at most `limit` descriptors.

    Never raises on what the driver wrote: whatever is wrong ends in `Chain.broken`.
    """
    start, end, view = memory.last_hit
    if head < size and limit > 1:
        # The commonest chain, one readable segment and one writable, both where the last one was. Whatever else it may
        # be is found out below, from a reading of its own.
        address, length, flags, following = _decode(table, head * DESCRIPTOR_BYTES)
        offset = address - start
        inside = offset >= 0 and length and address + length <= end
        if flags == DESC_NEXT and following < size and following != head and inside:
            address, capacity, flags, _ = _decode(table, following * DESCRIPTOR_BYTES)
            into = address - start
            fits = into >= 0 and capacity and address + capacity <= end and length + capacity <= MAX_CHAIN_BYTES
            if flags == DESC_WRITE and fits:
                request, response = view[offset : offset + length], view[into : into + capacity]
                return Chain(head, (request,), (response,), length, capacity, None, epoch)
    readable: list[memoryview] = []
    writable: list[memoryview] = []
    readable_bytes = writable_bytes = 0
    index = head
    seen: set[int] = set()
    for _ in range(limit):
        if index >= size:
            return Chain(head, broken=f"descriptor {index} is outside a table of {size}", epoch=epoch)
        if index in seen:
            return Chain(head, broken=f"a loop: descriptor {index} comes twice", epoch=epoch)
        seen.add(index)
        address, length, flags, following = _decode(table, index * DESCRIPTOR_BYTES)
        if flags > KNOWN_FLAGS or not length:
            return Chain(head, broken=_why_refused(flags), epoch=epoch)
        if flags & DESC_WRITE:
            segments = writable
            writable_bytes += length
        elif writable_bytes:
            return Chain(head, broken="a readable descriptor after a writable one", epoch=epoch)
        else:
            segments = readable
            readable_bytes += length
        offset = address - start
        if offset >= 0 and address + length <= end:  # what `translate` does first, without the call
            segments.append(view[offset : offset + length])
        else:
            try:
                segments += memory.translate(address, length)
            except Fault as fault:
                return Chain(head, broken=str(fault), epoch=epoch)
            start, end, view = memory.last_hit
        if not flags & DESC_NEXT:
            break
        index = following
    else:
        return Chain(head, broken=f"more than {limit} descriptors", epoch=epoch)
    if not readable_bytes or not writable_bytes:
        missing = "writable" if readable_bytes else "readable"
        return Chain(head, broken=f"no {missing} descriptor", epoch=epoch)
    if readable_bytes + writable_bytes > MAX_CHAIN_BYTES:
        return Chain(head, broken="more than 2**32 bytes in one chain", epoch=epoch)
    return Chain(head, tuple(readable), tuple(writable), readable_bytes, writable_bytes, None, epoch)


def _why_refused(flags: int) -> str:
    if flags & DESC_INDIRECT:
        return "an indirect table, which is not offered"
    return f"unknown descriptor flags {flags:#x}" if flags & ~KNOWN_FLAGS else "a descriptor of no bytes"


def window(segments: Segments, offset: int, length: int) -> list[memoryview]:
    """The views that make up bytes `offset` to `offset + length` of the concatenated segments. No byte is copied.

    Raises Fault if the segments hold fewer, or if either number is negative.
    """
    if offset < 0 or length < 0:
        raise Fault(f"{length} bytes at offset {offset} of a chain")
    views = []
    left = length
    for segment in segments:
        if left == 0:
            break
        if offset >= len(segment):
            offset -= len(segment)
            continue
        views.append(segment[offset : offset + left])
        left -= len(views[-1])
        offset = 0
    if left:
        raise Fault(f"a chain ends {left} bytes early")
    return views


def gather(segments: Segments, offset: int, length: int) -> bytes:
    """A private copy of `length` bytes at `offset`: the fixed part of a frame, safe from later changes. Or Fault."""
    if segments and offset >= 0 and length >= 0 and offset + length <= len(segments[0]):
        return bytes(segments[0][offset : offset + length])
    return b"".join(window(segments, offset, length))


def gather_into(segments: Segments, offset: int, target: memoryview) -> None:
    """Fill `target` (writable, format B) from `offset` on: the one copy of bulk data out of guest memory.

    Raises Fault, with nothing copied, if the segments hold fewer bytes than `target`.
    """
    position = 0
    for view in window(segments, offset, len(target)):
        following = position + len(view)
        target[position:following] = view
        position = following


def scatter(segments: Segments, offset: int, source: bytes | bytearray | memoryview) -> None:
    """Write `source` (bytes, or a view of format B) at `offset` of the segments: the one copy into guest memory.

    Raises Fault, with nothing written, if the segments hold fewer bytes than `source` from there on.
    """
    length = len(source)
    if segments and offset >= 0 and offset + length <= len(segments[0]):
        segments[0][offset : offset + length] = source
        return
    views = window(segments, offset, length)
    whole = memoryview(source)
    position = 0
    for view in views:
        following = position + len(view)
        view[:] = whole[position:following]
        position = following
