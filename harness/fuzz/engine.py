"""Runs inputs on a target, tells findings apart, and shrinks them.

Knows the seam of a target only; no process, no file, no terminal. Inputs are what the target makes of a seeded random,
so that a run can be repeated; `--engine atheris` lets libFuzzer choose them instead (`run`).
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

from virtaccel.harness.fuzz.target import Finding, TargetBase

MOST_FINDINGS: Final = 20  # a device that is wrong in more ways than that is not worth the rest of the run
SHRINK_RUNS: Final = 4000  # one pass over the records of the longest input, and over as many bytes
SHRINK_SECONDS: Final = 10.0  # for targets whose inputs are slow
ZEROED_BYTES: Final = 512  # what a reader of a reproducer looks at
_CLOCK_EVERY: Final = 16  # inputs; the clock costs as much as a short one
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


class Watcher:
    """Who hears of a run; here, nobody. `before` each input, so that one that kills the process is known; `after` it
    with the counts; of a new finding; of an input that shows a new behaviour."""

    def before(self, data: bytes) -> None: ...
    def after(self, inputs: int, steps: int) -> None: ...
    def found(self, found: Found) -> None: ...
    def new(self, data: bytes) -> None: ...


def gist(error: BaseException) -> str:
    """The text of an error without what is only this one's: numbers, names, bytes."""
    return _PARTICULARS.sub("#", str(error))[:160]


def signature(error: BaseException) -> str:
    """What an error has in common with others of its kind: its type, its text without numbers, and where it arose."""
    if isinstance(error, Finding):
        return f"Finding: {gist(error)}"
    frames = traceback.extract_tb(error.__traceback__)[-2:]
    places = ",".join(f"{frame.filename.rpartition('/')[2]}:{frame.name}" for frame in frames)
    return f"{type(error).__name__}: {gist(error)} at {places}"


def attempt(target: TargetBase, data: bytes) -> tuple[int, Exception | None]:
    """Run one input: work done, and what it found."""
    try:
        return target.execute(data), None
    except Exception as error:
        return 0, error


def shrink(target: TargetBase, data: bytes, wanted: str) -> bytes:
    """A shorter or plainer input that shows the same finding: records are left out by halves, then bytes made zero."""
    until, left = time.monotonic() + SHRINK_SECONDS, SHRINK_RUNS

    def shows(candidate: bytes) -> bool:
        nonlocal left
        left -= 1
        error = attempt(target, candidate)[1] if left >= 0 and time.monotonic() < until else None
        return error is not None and signature(error) == wanted

    size = max(1, len(data) // target.stride // 2)
    while size:
        at, cut = 0, size * target.stride
        while at < len(data):
            candidate = data[:at] + data[at + cut :]
            if shows(candidate):
                data = candidate
            else:
                at += cut
        size //= 2
    for at in range(min(len(data), ZEROED_BYTES)):
        candidate = data[:at] + b"\0" + data[at + 1 :]
        if data[at] and shows(candidate):
            data = candidate
    return data


@dataclass(slots=True)
class Fuzzer:
    """One target, and what was done with it and found in it."""

    target: TargetBase
    watcher: Watcher = field(default_factory=Watcher)
    inputs: int = 0
    steps: int = 0
    seconds: float = 0.0
    findings: list[Found] = field(default_factory=list)
    _known: set[str] = field(default_factory=set)

    def one(self, data: bytes) -> None:
        """Run one input."""
        behaviours = len(self.target.features)
        self.watcher.before(data)
        done, error = attempt(self.target, data)
        if error is not None:
            self._report(data, error)
        self.inputs, self.steps = self.inputs + 1, self.steps + done
        self.watcher.after(self.inputs, self.steps)
        if len(self.target.features) > behaviours:
            self.watcher.new(data)

    def run(self, seed: int, limits: Limits, corpus: Iterable[bytes] = ()) -> None:
        """The given inputs, then seeded ones until a limit is reached."""
        random, start = Random(seed), time.monotonic()
        for data in corpus:
            self.one(data)
        while len(self.findings) < limits.findings and (limits.steps is None or self.steps < limits.steps):
            if limits.seconds and self.inputs % _CLOCK_EVERY == 0 and time.monotonic() - start >= limits.seconds:
                break
            self.one(self.target.generate(random))
        self.seconds = time.monotonic() - start

    def _report(self, data: bytes, error: Exception) -> None:
        kind = signature(error)
        if kind in self._known:
            return
        self._known.add(kind)
        smaller = shrink(self.target, data, kind)
        again = attempt(self.target, smaller)[1]
        if again is not None and signature(again) == kind:
            data, error = smaller, again
        what = str(error) if isinstance(error, Finding) else f"{type(error).__name__}: {error}"
        found = Found(what, data, kind, "".join(traceback.format_exception(error)))
        self.findings.append(found)
        self.watcher.found(found)
