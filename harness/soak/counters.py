"""Numbers that a soak's processes share: a file of 64-bit words, so that what a killed guest had counted is not lost.

Each word has one writer at a time. Knows names and places, not what anybody makes of them.
"""

from __future__ import annotations

import mmap
import os
from enum import IntEnum, auto
from pathlib import Path
from typing import Final


class Shared(IntEnum):
    """Words that the runner writes. The two counts of kills go up before and after each kill, so that nobody who
    reads them in between takes a kill for one that is over."""

    REST = 0
    STOP, WORKER_KILLS, COMPILER_KILLS = auto(), auto(), auto()


class Own(IntEnum):
    """Words of each guest. PROGRESS changes with everything that it gets done, RESTING is the rest that it keeps;
    the others are counts, in the order in which a table shows them."""

    PROGRESS = 0
    RESTING, KILLS_SEEN = auto(), auto()
    CONNECTIONS, STEPS, ANSWERS, BYTES, LOADS, REFUSALS = auto(), auto(), auto(), auto(), auto(), auto()
    CANCELLED, EXPIRED, RESETS, DROPS, GARBAGE, LOSSES = auto(), auto(), auto(), auto(), auto(), auto()


# The rest of a guest's words are between it and the runner.
COUNTS: Final = tuple(Own)[Own.CONNECTIONS :]
_WORD: Final = 8  # one aligned store each, so that nobody reads half a number


class Counters:
    """The words of `guests` guests in the file at `path`, which is made if `new`."""

    def __init__(self, path: Path, guests: int, *, new: bool = False) -> None:
        size = _WORD * (len(Shared) + guests * len(Own))
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if new else 0), 0o600)
        try:
            if new:
                os.ftruncate(descriptor, size)
            self._words = memoryview(mmap.mmap(descriptor, size)).cast("Q")
        finally:
            os.close(descriptor)

    def get(self, word: Shared) -> int:
        return self._words[word]

    def put(self, word: Shared, value: int) -> None:
        self._words[word] = value

    def of(self, guest: int) -> memoryview:
        """The words of one guest, indexed by Own."""
        start = len(Shared) + guest * len(Own)
        return self._words[start : start + len(Own)]
