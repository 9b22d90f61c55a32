"""A fuzzing run: several processes, one count, and every finding as a file.

A process that dies is a finding, and so is one that stays with an input for too long; either is replaced by another
with a seed of its own. What each is running lies in memory that its parent can read, so that input is known all the
same. Findings of the same kind are reported once.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from random import Random
from struct import Struct
from typing import Any, Final, NamedTuple

from virtaccel.guest_tools.errors import Unavailable
from virtaccel.harness.fuzz.engine import Found, Fuzzer, Limits, Watcher
from virtaccel.harness.fuzz.reproducer import Reproducer
from virtaccel.harness.fuzz.targets import TARGETS, make
from virtaccel.processes.pool import START_SECONDS, Kind, Member, News, Pool

HANG_SECONDS: Final = 30.0  # far from the slowest input, on a busy machine too
_LOOK_SECONDS: Final = 0.1  # for a line of progress that moves
_SEED_STRIDE: Final = 1_000_003  # so that neighbouring seeds do not share the inputs of their later processes
INPUT_BYTES: Final = 1 << 20  # more than the longest input
MEMORY_BYTES: Final = 8 << 30  # libraries map much that they never touch; an input that eats memory ends here
FRESH_INPUTS: Final = 64  # for libFuzzer to begin with
_COUNTS: Final = Struct("=QQI")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to fuzz, for how long, and where files go. `coverage`: let atheris choose the inputs."""

    target: str
    via: str = ""
    seed: int = 0
    jobs: int = 1
    limits: Limits = field(default_factory=Limits)
    corpus: Path | None = None
    output: Path = Path()
    coverage: bool = False


class Saved(NamedTuple):
    """A finding and its file."""

    what: str
    path: str


@dataclass(slots=True)
class Outcome:
    """What a run did."""

    inputs: int = 0
    steps: int = 0
    seconds: float = 0.0
    findings: list[Saved] = field(default_factory=list)


class Slate:
    """Shared between a process and its parent: inputs and steps so far, and the input at hand."""

    def __init__(self, raw: Any = None) -> None:
        self.raw = raw if raw is not None else RawArray("B", _COUNTS.size + INPUT_BYTES)
        self._view = memoryview(self.raw).cast("B")

    def begin(self, data: bytes) -> None:
        """Called for every input: two stores."""
        size = min(len(data), INPUT_BYTES)
        self._view[_COUNTS.size : _COUNTS.size + size] = data[:size]
        self._view[16:20] = size.to_bytes(4, sys.byteorder)

    def count(self, inputs: int, steps: int) -> None:
        _COUNTS.pack_into(self._view, 0, inputs, steps, 0)

    def counts(self) -> tuple[int, int]:
        inputs, steps, _ = _COUNTS.unpack_from(self._view)
        return inputs, steps

    def input(self) -> bytes:
        """The input at hand, empty between inputs."""
        return bytes(self._view[_COUNTS.size : _COUNTS.size + _COUNTS.unpack_from(self._view)[2]])


class Run:
    """One run. `progress` hears now and then of inputs, steps, seconds and findings so far."""

    def __init__(self, plan: Plan, progress: Callable[[Outcome], None], hang_seconds: float = HANG_SECONDS) -> None:
        if plan.target not in TARGETS and ":" not in plan.target:
            raise Unavailable(f"there is no target called {plan.target!r}; there are {', '.join(TARGETS)}")
        self.plan = plan
        self.outcome = Outcome()
        self._progress = progress
        self._hang = hang_seconds
        self._known: set[str] = set()
        self._slates: list[Slate] = []
        self._of: dict[Member, tuple[Slate, int | None]] = {}  # and how much work it was to do
        self._start = time.monotonic()
        if plan.corpus is not None:
            plan.corpus.mkdir(parents=True, exist_ok=True)

    def run(self) -> Outcome:
        """Until a limit is reached or Ctrl-C. Raises Unavailable if no process can begin."""
        limits, jobs = self.plan.limits, self.plan.jobs
        with Pool() as pool:
            for _ in range(jobs):
                self._begin(pool, None if limits.steps is None else -(-limits.steps // jobs))
            with contextlib.suppress(KeyboardInterrupt):
                while pool.members and len(self.outcome.findings) < limits.findings:
                    for news in pool.look(_LOOK_SECONDS):
                        self._take(pool, news)
                    self._count()
                    self._progress(self.outcome)
            self._count()
        return self.outcome

    def _begin(self, pool: Pool, steps: int | None) -> None:
        """Start a process, or one in the place of another."""
        seconds = self.plan.limits.seconds
        if seconds is not None:
            seconds -= time.monotonic() - self._start
            if seconds <= 0:
                return
        slate, plan = Slate(), self.plan
        order = replace(
            plan, seed=plan.seed + _SEED_STRIDE * len(self._slates), limits=Limits(seconds, steps, plan.limits.findings)
        )
        member = pool.add(Member(work, (order, slate.raw), pulse=slate.counts))
        member.touch(max(self._hang, START_SECONDS))
        self._slates.append(slate)
        self._of[member] = slate, steps

    def _take(self, pool: Pool, news: News) -> None:
        member, kind, what = news
        if isinstance(what, Found):
            self._save(what)
        elif kind is Kind.SAID and what is None:
            member.touch(self._hang)  # it has begun
        elif kind is Kind.SAID:
            raise Unavailable(f"target {self.plan.target}: {what}")
        elif kind is not Kind.ENDED:
            slate, steps = self._of[member]
            text = f"an input was not done after {self._hang:.0f} s" if kind is Kind.HUNG else what
            self._save(Found(text, slate.input(), f"{text} {len(self._known)}", ""))
            if len(self.outcome.findings) < self.plan.limits.findings:
                self._begin(pool, None if steps is None else max(1, steps - slate.counts()[1]))

    def _count(self) -> None:
        counts = [slate.counts() for slate in self._slates]
        self.outcome.inputs, self.outcome.steps = (sum(column) for column in zip(*counts, strict=True))
        self.outcome.seconds = time.monotonic() - self._start

    def _save(self, found: Found) -> None:
        if found.signature in self._known:
            return
        self._known.add(found.signature)
        path = Reproducer(self.plan.target, self.plan.via, found.data, found.what).save(self.plan.output, found.trace)
        self.outcome.findings.append(Saved(found.what, str(path)))


# Inside a process


class _Teller(Watcher):
    """Tells the parent, and keeps inputs that show something new in the corpus' folder, if there is one."""

    def __init__(self, slate: Slate, connection: Connection, corpus: Path | None) -> None:
        # Two of these are called for every input: no call goes between.
        self.before, self.after = slate.begin, slate.count  # type: ignore[method-assign]
        self.found = connection.send  # type: ignore[method-assign, assignment]
        self._corpus = corpus

    def new(self, data: bytes) -> None:
        if self._corpus is not None:
            (self._corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


def work(connection: Connection, plan: Plan, raw: Any) -> None:
    """Sends None when it begins, every Found, or a text that says why it cannot begin."""
    logging.disable(logging.CRITICAL)  # whatever a fuzzed device says of its guest
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    teller = _Teller(Slate(raw), connection, plan.corpus)
    corpus = [path.read_bytes() for path in sorted(plan.corpus.iterdir()) if path.is_file()] if plan.corpus else []
    try:
        if plan.coverage:
            _instrument()
        target = make(plan.target, plan.via)
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send(None)
    fuzzer = Fuzzer(target, teller)
    if plan.coverage:
        _follow_coverage(fuzzer, plan, corpus)
    gc.freeze()  # what is loaded by now stays: the collector need not look at it again
    fuzzer.run(plan.seed, plan.limits, corpus)
    target.close()


def _instrument() -> None:
    import atheris

    with atheris.instrument_imports(include=["virtaccel.device", "virtaccel.virtqueue", "virtaccel.tosa_graph"]):
        for name in ("device.ring_service", "device.vhost_user.server", "virtqueue.driver", "tosa_graph.validate"):
            __import__(f"virtaccel.{name}")


def _follow_coverage(fuzzer: Fuzzer, plan: Plan, corpus: list[bytes]) -> None:
    """Let libFuzzer choose the inputs, by the code that they reach. It ends this process itself."""
    import atheris

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libFuzzer talks to this descriptor directly
    options = [f"-seed={plan.seed & 0x7FFFFFFF or 1}", "-verbosity=0", f"-max_len={1 << 14}", "-print_final_stats=0"]
    if plan.limits.seconds is not None:
        options.append(f"-max_total_time={max(1, int(plan.limits.seconds))}")
    # libFuzzer adds to the first folder; the other is only there to begin with.
    scratch, random = Path(tempfile.mkdtemp(prefix="virtaccel-fuzz-")), Random(plan.seed)
    for index, data in enumerate((*corpus, *(fuzzer.target.generate(random) for _ in range(FRESH_INPUTS)))):
        (scratch / str(index)).write_bytes(data)

    def one(data: bytes) -> None:
        fuzzer.one(data)
        if plan.limits.steps is not None and fuzzer.steps >= plan.limits.steps:
            os._exit(0)  # libFuzzer knows no count of steps; this process is ours to end

    atheris.Setup([sys.argv[0], *options, *([str(plan.corpus)] if plan.corpus else []), str(scratch)], one)
    atheris.Fuzz()
