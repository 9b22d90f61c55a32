"""Buffers: zeroed, page-aligned memory of one memfd, bound to inference by pointer, and the guards on its use.

All buffers of a backend lie in one sparse memfd, each in a range of its own that is never used again, so another
process could map them by descriptor, offset and length. Around each mapping lies an inaccessible page. A mapping
lives as long as anything points at it: arrays and tensors over it keep it alive, the last one gone unmaps it and
punches its pages out. It knows nothing of programs, and of the protocol only buffer requests.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from virtaccel.device.backend import BackendError, BufferRequest, Segments
from virtaccel.device.wire import Status

if TYPE_CHECKING:
    from virtaccel.backend_openvino.requests import Call

PAGE = mmap.PAGESIZE
MAX_ALIGNMENT = 1 << 30
MAX_BUFFERS = 1 << 14
"""Mappings of one arena. Each takes three of the 65530 that the kernel grants a process unless told otherwise, and a
process that has none left cannot even allocate memory."""
_PROT_NONE, _MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0, 1, 2, 0x10, 0x20, 0x4000
_MADV_REMOVE = 9
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

Bytes = NDArray[np.uint8]


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _map(address: int | None, length: int, protection: int, flags: int, descriptor: int, offset: int) -> int:
    found = _libc.mmap(address, length, protection, flags, descriptor, offset)
    if found is None or found == _MAP_FAILED:
        raise BackendError(Status.OUT_OF_MEMORY, f"cannot map {length} bytes: {os.strerror(ctypes.get_errno())}")
    return int(found)


def _unmap(reserved: int, reserved_bytes: int, address: int, mapped_bytes: int, live: list[int]) -> None:
    live[0] -= 1
    _libc.madvise(address, mapped_bytes, _MADV_REMOVE)
    _libc.munmap(reserved, reserved_bytes)


class Arena:
    """One memfd, and the ranges of it handed out so far."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("virtaccel-buffers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # another process may have it mapped
        self._end = self._size = 0
        self._live = [0]
        self.exposed = False
        """Whether another process writes there as well, unseen."""

    def allocate(self, length: int, alignment: int) -> tuple[Bytes, int]:
        """Zeroed bytes, whole pages, at an address of the given alignment (a power of two), and their offset in the
        memfd. Raises OUT_OF_MEMORY, RESOURCE_LIMIT."""
        if self._live[0] >= MAX_BUFFERS:
            raise BackendError(Status.RESOURCE_LIMIT, f"{MAX_BUFFERS} buffers are mapped")
        mapped_bytes = _round_up(length, PAGE)
        step = max(alignment, PAGE)
        reserved_bytes = mapped_bytes + step + PAGE
        self._grow(self._end + mapped_bytes)
        nothing = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
        reserved = _map(None, reserved_bytes, _PROT_NONE, nothing, -1, 0)
        try:
            address = _round_up(reserved + PAGE, step)
            writable = mmap.PROT_READ | mmap.PROT_WRITE
            _map(address, mapped_bytes, writable, _MAP_SHARED | _MAP_FIXED, self.descriptor, self._end)
        except BackendError:
            _libc.munmap(reserved, reserved_bytes)
            raise
        raw = (ctypes.c_uint8 * mapped_bytes).from_address(address)
        # The process's end unmaps by itself; doing it then would race with native work that still runs.
        weakref.finalize(raw, _unmap, reserved, reserved_bytes, address, mapped_bytes, self._live).atexit = False
        self._live[0] += 1
        offset, self._end = self._end, self._end + mapped_bytes
        return np.ctypeslib.as_array(raw), offset

    def _grow(self, size: int) -> None:
        """Make the file at least `size` bytes long. It never shrinks, not even after a mapping of it failed."""
        if size <= self._size:
            return
        try:
            os.ftruncate(self.descriptor, size)
        except OSError as error:
            raise BackendError(Status.OUT_OF_MEMORY, f"cannot grow the buffer memory: {error.strerror}") from None
        self._size = size

    def close(self) -> None:
        """Give up the descriptor; mappings that something still uses live on."""
        os.close(self.descriptor)


class Buffer:
    """A guest's buffer and its guard: many readers or one writer.

    `calls` are the bindings of programs to it, whose idle requests have tensors over it. `changes` counts what may have
    changed its bytes, as far as it is done here: see `Arena.exposed`.
    """

    __slots__ = (
        "arena",
        "array",
        "backing_bytes",
        "bytes",
        "calls",
        "changes",
        "context",
        "freed",
        "offset",
        "readers",
        "view",
        "writer",
    )

    def __init__(self, arena: Arena, context: object, request: BufferRequest) -> None:
        if request.alignment > MAX_ALIGNMENT:
            raise BackendError(Status.RESOURCE_LIMIT, f"alignment {request.alignment} is above {MAX_ALIGNMENT}")
        self.arena = arena
        self.array, self.offset = arena.allocate(request.bytes, request.alignment)
        self.view = memoryview(self.array.data)
        self.bytes = request.bytes
        self.backing_bytes = len(self.array)
        self.context = context
        self.readers = 0
        self.writer = False
        self.freed = False
        self.changes = 0
        self.calls: set[Call] = set()

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)

    def busy(self, writes: bool) -> bool:
        """Whether running work stands against a use that writes, or one that only reads."""
        return self.writer or (writes and self.readers > 0)

    def drop(self) -> None:
        """Let go of the memory: gone as soon as no tensor lies over it."""
        self.freed = True
        for call in list(self.calls):
            call.let_go()
        self.view.release()
        self.array = np.empty(0, np.uint8)


def write(buffer: Buffer, offset: int, source: Segments) -> None:
    """One copy into the buffer."""
    buffer.changes += 1
    view = buffer.view
    for piece in source:
        end = offset + len(piece)
        view[offset:end] = piece
        offset = end


def read(buffer: Buffer, offset: int, sink: Segments) -> None:
    """One copy out of the buffer."""
    view = buffer.view
    for piece in sink:
        end = offset + len(piece)
        piece[:] = view[offset:end]
        offset = end
