"""The page where a worker notes which submissions have ended, so that asking for one costs no round trip.

Shared by daemon and worker, of which neither trusts the other: what the page says is judged by whoever reads it.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from virtaccel.device.isolated.messages import ProtocolError
from virtaccel.device.wire import EventState, Status
from virtaccel.processes.sealed import Mapping
from virtaccel.virtqueue.barrier import fence

SLOTS: Final = 1 << 16
"""Submissions that can be known at one time; far above what any guest is granted."""


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


class CompletionPage:
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
        """How the submission ended, None if it has not. Raises ProtocolError."""
        word = self._words[slot]
        if word >> 32 != turn:
            return None
        fence()  # what the submission wrote is read after the word that says so
        state, error = word >> 16 & 0xFF, word & 0xFFFF
        if state not in _TERMINAL or error not in _ERRORS or word & 0xFC00_0000:
            raise ProtocolError(f"submission ended as {word:#x}")
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
