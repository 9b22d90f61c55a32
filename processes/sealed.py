"""Memory files that two processes share and neither can shrink under the other, and pieces of them in memory.

A page of a file that has shrunk is a SIGBUS to whoever touches it, which no process can handle. Knows nothing of what
lies in the files.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from typing import Final

_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def sealed_file(name: str) -> int:
    """A memory file that can grow and never shrink."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


def is_sealed(descriptor: int) -> bool:
    """Whether the file cannot shrink."""
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


class Mapping:
    """A piece of a file in memory, as the writable bytes `view`. Unlike mmap.mmap it keeps no descriptor, of which a
    guest with thousands of buffers would take thousands. Raises OSError."""

    __slots__ = ("_address", "_length", "view")

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        if length < 1 or offset < 0 or offset + length > os.fstat(descriptor).st_size:
            raise OSError(f"{length} bytes at {offset} do not lie in the file")
        start = offset & -mmap.PAGESIZE
        self._length = offset - start + length
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, self._length, writable, mmap.MAP_SHARED, descriptor, start)
        if address is None or address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), "mmap")
        self._address = int(address)
        raw = (ctypes.c_uint8 * self._length).from_address(self._address)
        self.view = memoryview(raw).cast("B")[offset - start :]

    def close(self) -> None:
        """Unmap. Whoever took views of `view` must be done with them."""
        if self._address:
            self.view.release()
            _libc.munmap(self._address, self._length)
            self._address = 0
