"""Pieces of a driver's memory as the device sees them: a popped chain, and copies across its segments.

Knows bytes and their order; imports nothing of ours, so that the engine, which works on chains, reaches neither rings
nor memory nor a barrier. Who walks descriptors into a chain is `chain.walk`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Segments = Sequence[memoryview]


class Fault(Exception):
    """An address range that no region holds wholly, or a range of a chain that its segments do not hold."""


@dataclass(eq=False, slots=True)
class Chain:
    """A popped chain. `head` is the driver's token for it, kept as it came, even when it is no descriptor's index.

    `readable` and `writable` are the driver's bytes in order, as views of guest memory of at least one byte each;
    `readable_bytes` and `writable_bytes` their totals. `broken` is None, or the reason why the topology is invalid, and
    then there are no segments. `epoch` is the queue's, see `DeviceQueue.reset`.
    """

    head: int
    readable: tuple[memoryview, ...] = ()
    writable: tuple[memoryview, ...] = ()
    readable_bytes: int = 0
    writable_bytes: int = 0
    broken: str | None = None
    epoch: int = 0

    @classmethod
    def over(cls, head: int, readable: Segments, writable: Segments) -> "Chain":
        """A chain over segments that are already at hand, no ring involved; totals are computed."""
        return cls(head, tuple(readable), tuple(writable), sum(map(len, readable)), sum(map(len, writable)))

    def __repr__(self) -> str:
        return f"Chain({self.head}: {self.broken or f'{self.readable_bytes} readable, {self.writable_bytes} writable'})"


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
    # Nearly every frame lies in its first segment; then no list of views is made.
    if segments and offset >= 0 and length >= 0 and offset + length <= len(segments[0]):
        return bytes(segments[0][offset : offset + length])
    return b"".join(window(segments, offset, length))


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
