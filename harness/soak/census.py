"""What processes hold: memory, descriptors, threads, out of /proc; and whether that stays the same.

Knows Linux's proc(5), nothing of devices or guests.

The rule. Counts are taken at rests: no front end is connected, so whatever a session needed has been given back, and
what is left over belongs to the device itself. Rests of the first quarter are warm-up. Through the others a straight
line is laid (least squares); what it rises from the first to the last of them must not exceed a fixed bound. A leak of
one descriptor, or of some pages, with every session, load or kill rises far beyond that in a minute; the bound is
there because caches fill and the allocator's heap breathes.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

# Caches fill and pools start for about so long in soaks of one to ten minutes.
WARM_UP: Final = 0.25
# Rests after the warm-up without which nothing can be said.
FEWEST: Final = 4
MEBIBYTE: Final = 1 << 20


class Holding(NamedTuple):
    """What a process holds: bytes of memory (files apart), descriptors, threads."""

    memory: int
    descriptors: int
    threads: int


class Count(NamedTuple):
    """A holding at a point in time, in seconds since the soak began."""

    at: float
    holding: Holding


class Verdict(NamedTuple):
    """`rise` along the straight line over `rests` counts, against `bound`; bytes or numbers."""

    process: str
    what: str
    first: int
    last: int
    most: int
    rests: int
    rise: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.rise <= self.bound


def holding(process: int) -> Holding | None:
    """None if it has ended, or may not be looked at."""
    folder = Path(f"/proc/{process}")
    memory = threads = 0
    try:
        for line in (folder / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            # Files apart: their pages are the kernel's to drop.
            if name in ("RssAnon", "RssShmem"):
                memory += int(value.split()[0]) << 10
            elif name == "Threads":
                threads = int(value)
        return Holding(memory, len(os.listdir(folder / "fd")), threads)
    except OSError:
        return None


def descendants(process: int) -> list[list[int]]:
    """Living processes below this one by generation, each oldest first."""
    children: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            # Behind the last bracket: a process's name may hold any character, brackets too.
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        # A zombie holds nothing but its number.
        if fields[0] not in "ZX":
            children[int(fields[1])].append((int(fields[19]), int(entry)))
    generations: list[list[int]] = []
    living = [process]
    while living := [child for _, child in sorted(each for parent in living for each in children[parent])]:
        generations.append(living)
    return generations


def maps(process: int, name: str) -> int:
    """How many pieces of the memory file called `name` it has mapped."""
    wanted = f"/memfd:{name} (deleted)"
    try:
        return sum(line.endswith(wanted) for line in Path(f"/proc/{process}/maps").read_text().splitlines())
    except OSError:
        return 0


def gone(process: int) -> bool:
    """Whether it has ended, reaped or not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def rise(points: Sequence[tuple[float, float]]) -> float:
    """What the straight line through `points` rises from the first to the last of them."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    # Least squares, so that one noisy rest decides nothing.
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    return slope * (points[-1][0] - points[0][0])


def judge(process: str, counts: Sequence[Count], length: float, bounds: Holding) -> list[Verdict]:
    """A verdict for each kind of thing; none if there are too few rests to say anything. `length` is the soak's, in
    seconds; `bounds` are bytes and numbers."""
    judged = [count for count in counts if count.at >= WARM_UP * length]
    if len(judged) < FEWEST:
        return []
    verdicts = []
    for what, bound in zip(Holding._fields, bounds, strict=True):
        values = [getattr(count.holding, what) for count in judged]
        grown = rise([(count.at, value) for count, value in zip(judged, values, strict=True)])
        verdicts.append(Verdict(process, what, values[0], values[-1], max(values), len(judged), grown, bound))
    return verdicts
