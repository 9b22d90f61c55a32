"""The split virtqueue in memory: structures, flags, sizes and alignments (virtio 1.3, sections 2.6 and 2.7).

Knows only where the bytes lie. It must not know who reads them: both sides of the ring, the device on the host and the
driver inside a guest, are built on this page, so it imports nothing but the standard library.
"""

import sys
from struct import Struct
from typing import Final, NamedTuple

if sys.byteorder != "little":
    # Ring indices are little-endian and are read and written with one native 16-bit access (see split.py); a
    # big-endian processor would need a swap around each of them, which nobody has tested.
    raise ImportError("virtqueues are little-endian, and so must the processor be")

MAX_QUEUE_SIZE: Final = 32768
INDEX_MASK: Final = 0xFFFF

# Descriptor, 2.7.5: address, length in bytes, flags, next.
DESCRIPTOR: Final = Struct("<QIHH")
DESCRIPTOR_BYTES: Final = DESCRIPTOR.size
DESC_NEXT: Final = 1
DESC_WRITE: Final = 2
DESC_INDIRECT: Final = 4
MAX_CHAIN_BYTES: Final = 1 << 32  # 2.7.5.2: no chain is longer than this in total

# Available ring, 2.7.6, in 16-bit words: flags, index, a head per slot, used_event (unused: EVENT_IDX is not offered).
AVAIL_FLAGS: Final = 0
AVAIL_INDEX: Final = 1
AVAIL_RING: Final = 2
AVAIL_NO_INTERRUPT: Final = 1

# Used ring, 2.7.8: 16-bit flags and index, then 8-byte elements, then avail_event (unused).
USED_FLAGS: Final = 0
USED_INDEX: Final = 1
USED_HEADER_BYTES: Final = 4
USED_ELEMENT: Final = Struct("<II")
USED_ELEMENT_BYTES: Final = USED_ELEMENT.size
USED_NO_NOTIFY: Final = 1

# 2.7: alignment of each part, in bytes.
DESCRIPTOR_ALIGNMENT: Final = 16
AVAIL_ALIGNMENT: Final = 2
USED_ALIGNMENT: Final = 4


class Placement(NamedTuple):
    """Where the three parts of one ring begin, as offsets or as addresses, all in bytes."""

    descriptors: int
    available: int
    used: int


def is_queue_size(size: int) -> bool:
    """Whether a ring may have `size` descriptors: a power of two from 1 to 32768 (2.7)."""
    return 1 <= size <= MAX_QUEUE_SIZE and size & (size - 1) == 0


def descriptor_bytes(size: int) -> int:
    """Bytes of the descriptor table of a ring of `size`."""
    return DESCRIPTOR_BYTES * size


def available_bytes(size: int) -> int:
    """Bytes of the available ring, its event word left out: without EVENT_IDX a device need not find it mapped."""
    return 4 + 2 * size


def used_bytes(size: int) -> int:
    """Bytes of the used ring, its event word left out."""
    return USED_HEADER_BYTES + USED_ELEMENT_BYTES * size


def place(size: int) -> Placement:
    """Offsets of the parts laid one after another, each aligned, event words included."""
    available = descriptor_bytes(size)
    after = available + available_bytes(size) + 2
    return Placement(0, available, (after + USED_ALIGNMENT - 1) & -USED_ALIGNMENT)


def ring_bytes(size: int) -> int:
    """Bytes a ring of `size` takes when its parts lie as `place` says."""
    return place(size).used + used_bytes(size) + 2
