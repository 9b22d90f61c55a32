"""The seam between what is fuzzed and what drives it: bytes in, a count of work out, a Finding if something is wrong.

A target turns any bytes into a deterministic run: the same bytes always do the same, so that a file reproduces a
finding and shorter bytes may be tried in its place. What a run did is told in `features`, small values that stand for
behaviours (a command with its status, a reason for refusing): they show how far a fuzzer gets.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from random import Random


class Finding(Exception):
    """A property that has to hold does not. The text says which, and what was seen instead."""


class TargetBase:
    """Something to be fuzzed. `stride` is the bytes of one record of an input: removing whole records leaves the rest
    meaning what it did."""

    name = ""
    stride = 1

    def __init__(self) -> None:
        self.features: set[Hashable] = set()

    def generate(self, random: Random) -> bytes:
        """A fresh input."""
        raise NotImplementedError

    def execute(self, data: bytes) -> int:
        """Run one input from a clean state; how much work it was. Raises Finding, or anything at all: an exception that
        nobody expects is a finding too."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what it holds."""


def quiet() -> logging.Logger:
    """A logger that nobody hears: what a fuzzed device has to say fills disks."""
    log = logging.Logger("virtaccel.fuzz", logging.CRITICAL + 1)
    log.addHandler(logging.NullHandler())
    return log


# Numbers at which lengths, indices and sums go over an edge.
WORDS = (0, 1, 2, 4, 7, 8, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def damaged(data: bytes, random: Random) -> bytes:
    """What a sound input is with a few slips in it: a bit, a byte, a notable word, bytes cut out or put in."""
    out = bytearray(data)
    for _ in range(random.randrange(1, 5)):
        at, count = random.randrange(len(out) + 1), random.randrange(1, 5)
        word = (random.choice(WORDS) + random.randrange(-2, 3) & 0xFFFFFFFF).to_bytes(4, "little")
        bit = bytes(one ^ 1 << random.randrange(8) for one in out[at : at + 1])
        edits = ((bit, 1), (random.randbytes(1), 1), (word[:count], count), (b"", count), (random.randbytes(count), 0))
        new, replaced = random.choice(edits)
        out[at : at + replaced] = new
    return bytes(out)
