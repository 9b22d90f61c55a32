"""The seam between what is fuzzed and what drives it: bytes in, a count of work out, a Finding if something is wrong.

A target turns any bytes into a deterministic run: the same bytes always do the same, so that a file reproduces a
finding and shorter bytes may be tried in its place. What a run did is told in `features`, small values that stand for
behaviours (a command with its status, a reason for refusing); an input that shows a new one is worth keeping. This
takes the place of instrumenting code, and costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from random import Random
from typing import Protocol


class Finding(Exception):
    """A property that has to hold does not. The text says which, and what was seen instead."""


class Target(Protocol):
    """Something to be fuzzed. `unit` is what `execute` counts, `stride` the bytes of one record of an input: removing
    whole records leaves the rest meaning what it did."""

    name: str
    unit: str
    stride: int
    features: set[Hashable]

    def generate(self, random: Random) -> bytes:
        """A fresh input."""

    def mutate(self, data: bytes, random: Random) -> bytes:
        """An input near `data`."""

    def execute(self, data: bytes) -> int:
        """Run one input from a clean state; how much work it was. Raises Finding, or anything at all: an exception that
        nobody expects is a finding too."""

    def close(self) -> None: ...


def check(holds: bool, what: str) -> None:
    """Raise Finding unless `holds`. For places where building the text costs nothing."""
    if not holds:
        raise Finding(what)


WORDS = (0, 1, 2, 4, 7, 8, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def mutate_bytes(data: bytes, random: Random, stride: int = 1, longest: int = 1 << 16) -> bytes:
    """One to four edits: bytes changed, words of notable values put in, records cut, doubled or moved."""
    out = bytearray(data)
    for _ in range(random.randrange(1, 5)):
        if not out:
            return random.randbytes(stride * random.randrange(1, 9))
        at = random.randrange(len(out))
        record = at - at % stride
        match random.randrange(7):
            case 0:
                out[at] ^= 1 << random.randrange(8)
            case 1:
                out[at] = random.randrange(256)
            case 2:
                word = random.choice(WORDS) + random.randrange(-2, 3) & 0xFFFFFFFF
                width = random.choice((1, 2, 4))
                out[at : at + width] = word.to_bytes(4, "little")[: min(width, len(out) - at)]
            case 3:
                del out[record : record + stride * random.randrange(1, 5)]
            case 4 if len(out) < longest:
                end = record + stride * random.randrange(1, 5)
                out[record:record] = out[record:end]
            case 5 if len(out) < longest:
                out[record:record] = random.randbytes(stride)
            case _:
                other = random.randrange(len(out))
                other -= other % stride
                out[record : record + stride], out[other : other + stride] = (
                    out[other : other + stride],
                    out[record : record + stride],
                )
    return bytes(out)
