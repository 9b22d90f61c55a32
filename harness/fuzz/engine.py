"""The seeded engine: makes inputs, runs them, keeps what shows something new, shrinks what goes wrong.

Knows the `Target` seam only; no process, no file, no terminal. The same seed and target give the same inputs in the
same order, so a run can be repeated; `Limits` say when it ends.
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

from virtaccel.harness.fuzz.target import Finding, Target

MUTATE_SHARE: Final = 0.5
MOST_KEPT: Final = 4096
MOST_FINDINGS: Final = 20
SHRINK_RUNS: Final = 4000
SHRINK_SECONDS: Final = 10.0
_CLOCK_EVERY: Final = 16
_PARTICULARS: Final = re.compile(r"0x[0-9a-f]+|\d+|b'[^']*'|'[^']*'")


class Found(NamedTuple):
    """One finding: what was wrong, an input that shows it (shrunk), and what tells it from others."""

    what: str
    data: bytes
    signature: str
    trace: str


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop: after this many `seconds`, this many units of work (`steps`), or this many findings."""

    seconds: float | None = None
    steps: int | None = None
    findings: int = MOST_FINDINGS


@dataclass(slots=True)
class Tally:
    """What a run did."""

    inputs: int = 0
    steps: int = 0
    corpus: int = 0
    features: int = 0
    seconds: float = 0.0
    findings: list[Found] = field(default_factory=list)


class Watcher(NamedTuple):
    """Who hears of a run: `before` each input (so that one that kills the process is known), `after` it with the
    counts, and of every new finding and every input kept."""

    before: Callable[[bytes], None]
    after: Callable[[int, int], None]
    found: Callable[[Found], None]
    kept: Callable[[bytes], None]


def _nothing(*_: object) -> None:
    return None


NOBODY: Final = Watcher(_nothing, _nothing, _nothing, _nothing)


def gist(error: BaseException) -> str:
    """The text of an error without what is only this one's: numbers, names, bytes."""
    return _PARTICULARS.sub("#", str(error))[:160]


def signature(error: BaseException) -> str:
    """What an error has in common with others of its kind: its type, its text without numbers, and where it arose."""
    text = gist(error)
    if isinstance(error, Finding):
        return f"Finding: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    places = ",".join(f"{frame.filename.rpartition('/')[2]}:{frame.name}" for frame in frames[-2:])
    return f"{type(error).__name__}: {text} at {places}"


def attempt(target: Target, data: bytes) -> tuple[int, Exception | None]:
    """Run one input: work done, and what it found."""
    try:
        return target.execute(data), None
    except Exception as error:
        return 0, error


def shrink(target: Target, data: bytes, wanted: str, runs: int = SHRINK_RUNS, seconds: float = SHRINK_SECONDS) -> bytes:
    """A shorter or plainer input that shows the same finding: records are left out by halves, then bytes made zero."""
    until = time.monotonic() + seconds
    left = runs

    def shows(candidate: bytes) -> bool:
        nonlocal left
        if left <= 0 or time.monotonic() > until:
            return False
        left -= 1
        _, error = attempt(target, candidate)
        return error is not None and signature(error) == wanted

    stride = target.stride
    size = max(stride, len(data) // 2 // stride * stride)
    while size >= stride and left > 0:
        at = 0
        while at < len(data):
            candidate = data[:at] + data[at + size :]
            if shows(candidate):
                data = candidate
            else:
                at += size
        size = size // 2 // stride * stride if size > stride else 0
    for at in range(min(len(data), 512)):
        if data[at]:
            candidate = data[:at] + b"\0" + data[at + 1 :]
            if shows(candidate):
                data = candidate
    return data


def describe(target: Target, data: bytes, error: Exception, shrinking: bool = True) -> Found:
    """A finding made of an error, with the smallest input found that still shows it."""
    kind = signature(error)
    if shrinking:
        smaller = shrink(target, data, kind)
        _, again = attempt(target, smaller)
        if again is not None and signature(again) == kind:
            data, error = smaller, again
    what = str(error) if isinstance(error, Finding) else f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    return Found(what, data, kind, trace)


class Fuzzer:
    """One target, one seed, one corpus."""

    def __init__(self, target: Target, seed: int, corpus: Iterable[bytes] = (), watcher: Watcher = NOBODY) -> None:
        self.target = target
        self.random = Random(seed)
        self.kept: list[bytes] = list(corpus)
        self.tally = Tally()
        self._watcher = watcher
        self._known: set[str] = set()

    def run(self, limits: Limits) -> Tally:
        """Until a limit is reached. The given corpus is run first."""
        start = time.monotonic()
        end = None if limits.seconds is None else start + limits.seconds
        tally = self.tally
        for data in list(self.kept):
            self._one(data, keep=False)
        countdown = _CLOCK_EVERY
        while len(tally.findings) < limits.findings and (limits.steps is None or tally.steps < limits.steps):
            countdown -= 1
            if not countdown:
                countdown = _CLOCK_EVERY
                if end is not None and time.monotonic() >= end:
                    break
            self._one(self._next(), keep=True)
        tally.corpus, tally.features = len(self.kept), len(self.target.features)
        tally.seconds = time.monotonic() - start
        return tally

    def _next(self) -> bytes:
        if self.kept and self.random.random() < MUTATE_SHARE:
            # The newest are tried most: what was learnt last is understood least.
            index = int(len(self.kept) * self.random.random() ** 0.5)
            return self.target.mutate(self.kept[index], self.random)
        return self.target.generate(self.random)

    def _one(self, data: bytes, keep: bool) -> None:
        tally, features = self.tally, self.target.features
        known = len(features)
        self._watcher.before(data)
        try:
            tally.steps += self.target.execute(data)
        except Exception as error:
            self._report(data, error)
        tally.inputs += 1
        self._watcher.after(tally.inputs, tally.steps)
        if keep and len(features) > known and len(self.kept) < MOST_KEPT:
            self.kept.append(data)
            self._watcher.kept(data)

    def _report(self, data: bytes, error: Exception) -> None:
        kind = signature(error)
        if kind in self._known:
            return
        self._known.add(kind)
        found = describe(self.target, data, error)
        self._known.add(found.signature)
        self.tally.findings.append(found)
        self._watcher.found(found)
