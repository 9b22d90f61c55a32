"""The guarded walk over one descriptor chain, from a head to its segments.

Knows descriptors and guest memory; knows neither the rings that carry heads nor what the bytes mean. A chain is valid
as section 3 of the protocol's virtqueue.md and section 2.7.5 of virtio 1.3 say; an invalid one is still a chain, since
its head must go back to the driver: `broken` says what is wrong with it and no segment is given.

Another processor may rewrite the table at any time. Each descriptor is therefore decoded once, by one call that loads
each of its four fields once, and only these values are judged and used. The walk is bounded by the configured number of
descriptors; one that comes twice is refused at once, since a loop that is rewritten meanwhile would be read twice.
"""

from typing import Final

from virtaccel.virtqueue.layout import (
    DESC_INDIRECT,
    DESC_NEXT,
    DESC_WRITE,
    DESCRIPTOR,
    DESCRIPTOR_BYTES,
    MAX_CHAIN_BYTES,
)
from virtaccel.virtqueue.memory import GuestMemory
from virtaccel.virtqueue.segments import Chain, Fault

_decode = DESCRIPTOR.unpack_from  # bound once: an attribute of a Struct costs as much as unpacking with it
KNOWN_FLAGS: Final = DESC_NEXT | DESC_WRITE  # the two lowest bits, so any other flag makes a greater number


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
