"""What the two processes share: the file that all buffers lie in, and a page where ended submissions are noted.

Neither side trusts the other with its life. The buffers' file is sealed against shrinking, so that no access can fail;
what the page says is judged by whoever reads it. Knows nothing of messages.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from typing import Final, NamedTuple

from virtaccel.device.wire import EventState, Status
from virtaccel.virtqueue.barrier import fence

_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

SLOTS: Final = 1 << 16
"""Submissions that can be known at one time; far above what any guest is granted."""


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


class Ending(NamedTuple):
    """How a submission ended. `released`: the backend has given it up already; else that has to be asked for.
    `settled`: its buffers are certainly free; else native work may still run over them."""

    state: int
    error: int
    released: bool
    settled: bool


_TERMINAL: Final = frozenset((int(EventState.COMPLETE), int(EventState.FAILED), int(EventState.CANCELLED)))
_ERRORS: Final = frozenset(map(int, Status))
_RELEASED, _SETTLED = 1 << 24, 1 << 25


class Garbled(Exception):
    """The page says what cannot be."""


class Board:
    """One 64-bit word per submission, written once by the worker when it has ended, and a flag that asks to be told.

    A word is the submission's turn in its slot (32 bits), flags, state (8) and error (16). A slot's earlier words have
    another turn, so nothing has to be cleared. Words are stored and loaded whole.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("virtaccel-board", os.MFD_CLOEXEC) if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, 8 * (SLOTS + 1))
        self._mapping = Mapping(self.descriptor, 0, 8 * (SLOTS + 1))
        self._words = self._mapping.view.cast("Q")

    def look(self, slot: int, turn: int) -> Ending | None:
        """How the submission ended, None if it has not. Raises Garbled."""
        word = self._words[slot]
        if word >> 32 != turn:
            return None
        fence()  # what the submission wrote is read after the word that says so
        state, error = word >> 16 & 0xFF, word & 0xFFFF
        if state not in _TERMINAL or error not in _ERRORS or word & 0xFC00_0000:
            raise Garbled(f"submission ended as {word:#x}")
        return Ending(state, error, bool(word & _RELEASED), bool(word & _SETTLED))

    def note(self, slot: int, turn: int, ending: Ending) -> bool:
        """Say how a submission ended; whether somebody asked to be told."""
        flags = (_RELEASED if ending.released else 0) | (_SETTLED if ending.settled else 0)
        fence()
        self._words[slot] = turn << 32 | flags | ending.state << 16 | ending.error
        fence()
        return bool(self._words[SLOTS])

    def tell(self, wanted: bool) -> None:
        """Whether the worker is to send a message when something ends."""
        self._words[SLOTS] = int(wanted)
        fence()

    def close(self) -> None:
        self._words.release()
        self._mapping.close()
        os.close(self.descriptor)
