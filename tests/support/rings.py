"""A split ring written by hand, for tests that need a driver which lies, and a peer on another processor.

Offsets and formats are spelled out again here, from virtio 1.3, 2.7, and not taken from the package under test.
"""

import mmap
import os
import struct
import subprocess
import sys
from pathlib import Path

from virtaccel.virtqueue.memory import GuestMemory, Region
from virtaccel.virtqueue.split import DeviceQueue

NEXT, WRITE, INDIRECT = 1, 2, 4
BASE = 0x4000_0000
BYTES = 1 << 20
DATA = BASE + (BYTES >> 1)  # nothing of the ring lies from here on, for sizes up to 8192


class RawRing:
    """A driver's hand: every descriptor, head and index is written as told, right or wrong."""

    def __init__(self, size: int = 8, buffer: mmap.mmap | None = None) -> None:
        self.size = size
        self.buffer = buffer if buffer is not None else mmap.mmap(-1, BYTES)
        self.available_offset = 16 * size
        self.used_offset = (16 * size + 6 + 2 * size + 4095) // 4096 * 4096
        self.memory = GuestMemory([Region(BASE, self.buffer)])
        self.index = 0
        self.seen = 0

    def device(self, limit: int = 256, last_available: int = 0) -> DeviceQueue:
        places = (BASE, BASE + self.available_offset, BASE + self.used_offset)
        return DeviceQueue(self.memory, self.size, *places, limit, last_available=last_available)

    def descriptor(self, index: int, address: int, length: int, flags: int = 0, following: int = 0) -> None:
        struct.pack_into("<QIHH", self.buffer, 16 * index, address, length, flags, following)

    def good(self, first: int, request: int = 24, response: int = 24) -> int:
        """A sound chain in descriptors `first` and `first + 1`; its head."""
        self.descriptor(first, DATA, request, NEXT, first + 1)
        self.descriptor(first + 1, DATA + 4096, response, WRITE)
        return first

    def offer(self, *heads: int) -> None:
        for head in heads:
            struct.pack_into("<H", self.buffer, self.available_offset + 4 + 2 * (self.index % self.size), head)
            self.index = (self.index + 1) % 65536
        self.set_available_index(self.index)

    def set_available_index(self, index: int) -> None:
        struct.pack_into("<H", self.buffer, self.available_offset + 2, index)

    def set_available_flags(self, flags: int) -> None:
        struct.pack_into("<H", self.buffer, self.available_offset, flags)

    def used_flags(self) -> int:
        return int(struct.unpack_from("<H", self.buffer, self.used_offset)[0])

    def used_index(self) -> int:
        return int(struct.unpack_from("<H", self.buffer, self.used_offset + 2)[0])

    def used(self) -> list[tuple[int, int]]:
        """Elements (id, length) that came back since the last call."""
        elements = []
        while self.seen != self.used_index():
            offset = self.used_offset + 4 + 8 * (self.seen % self.size)
            elements.append(struct.unpack_from("<II", self.buffer, offset))
            self.seen = (self.seen + 1) % 65536
        return elements


def shared_buffer() -> tuple[int, mmap.mmap]:
    """A memory file of BYTES and our mapping of it; the caller closes the file."""
    file = os.memfd_create("ring", os.MFD_CLOEXEC)
    os.ftruncate(file, BYTES)
    return file, mmap.mmap(file, BYTES)


def start_peer(role: str, *arguments: int, files: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """The other side of a ring in a process of its own, see ring_peer.py; it ends when its standard input closes."""
    script = Path(__file__).with_name("ring_peer.py")
    command = [sys.executable, str(script), role, *map(str, arguments)]
    return subprocess.Popen(command, pass_fds=files, stdin=subprocess.PIPE)
