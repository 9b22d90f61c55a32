"""A fuzzing run: several processes, one count, and every finding as a file.

A process that dies is a finding, and so is one that stays with an input for too long; either is replaced by another
with a seed of its own. Findings of the same kind are reported once.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from virtaccel.guest_tools.errors import Unavailable
from virtaccel.harness.fuzz.engine import Found, Limits
from virtaccel.harness.fuzz.reproducer import Reproducer
from virtaccel.harness.fuzz.targets import TARGETS
from virtaccel.harness.fuzz.worker import Order, Slate, work

HANG_SECONDS: Final = 30.0
START_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.1
_SEED_STRIDE: Final = 1_000_003


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


class _Process:
    """One worker, and since when it has been with its present input."""

    def __init__(self, order: Order) -> None:
        context = multiprocessing.get_context("spawn")
        self.slate = Slate(context.RawArray("B", len(Slate().raw)))
        self.talk, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=work, args=(order, self.slate.raw, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.done = False
        self._inputs, self._since = 0, time.monotonic()

    def messages(self) -> list[tuple[str, Any]]:
        received = []
        try:
            while self.talk.poll():
                received.append(self.talk.recv())
        except (EOFError, OSError):
            pass
        return received

    def hangs(self, limit: float) -> bool:
        inputs, _, _ = self.slate.read()
        if inputs != self._inputs:
            self._inputs, self._since = inputs, time.monotonic()
        return time.monotonic() - self._since > (limit if inputs else max(limit, START_SECONDS))

    def end(self) -> None:
        """Only ever our own child, by its own handle."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.talk.close()


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
        self._started = 0
        self._scratch = ""
        self._base = [0, 0]
        self._corpus = _read_corpus(plan.corpus)

    def run(self) -> Outcome:
        """Until a limit is reached or Ctrl-C. Raises Unavailable if no process can begin."""
        if not self.plan.coverage:
            return self._run()
        with tempfile.TemporaryDirectory(prefix="virtaccel-fuzz-") as self._scratch:
            return self._run()

    def _run(self) -> Outcome:
        plan, start = self.plan, time.monotonic()
        end = None if plan.limits.seconds is None else start + plan.limits.seconds
        processes = [self._start(end) for _ in range(plan.jobs)]
        try:
            while any(not one.done for one in processes):
                time.sleep(_LOOK_SECONDS)
                for index, one in enumerate(processes):
                    if not one.done and self._look(one) and self._goes_on(end):
                        processes[index] = self._start(end)
                self._count(processes, start)
                self._progress(self.outcome)
                if len(self.outcome.findings) >= plan.limits.findings:
                    break
        except KeyboardInterrupt:
            pass
        finally:
            self._count(processes, start)
            for one in processes:
                one.end()
        return self.outcome

    def _goes_on(self, end: float | None) -> bool:
        return len(self.outcome.findings) < self.plan.limits.findings and (end is None or time.monotonic() < end)

    def _start(self, end: float | None) -> _Process:
        plan = self.plan
        left = None if end is None else max(0.5, end - time.monotonic())
        steps = None if plan.limits.steps is None else -(-max(1, plan.limits.steps - self._base[1]) // plan.jobs)
        limits = Limits(left, steps, plan.limits.findings)
        keep = str(plan.corpus) if plan.corpus is not None else ""
        seed = plan.seed + _SEED_STRIDE * self._started
        self._started += 1
        return _Process(Order(plan.target, plan.via, seed, limits, self._corpus, keep, self._folder()))

    def _folder(self) -> str:
        """A folder of its own for each process that libFuzzer runs in."""
        return tempfile.mkdtemp(dir=self._scratch) if self._scratch else ""

    def _look(self, one: _Process) -> bool:
        """Take in what a process says; whether it has to be replaced."""
        for kind, content in one.messages():
            if kind == "found":
                self._save(content)
            elif kind == "failed":
                one.done = True
                raise Unavailable(f"target {self.plan.target}: {content}")
            else:
                one.done = True
        if one.done:
            return False
        if not one.process.is_alive():
            return self._died(one)
        if not one.hangs(self._hang):
            return False
        self._lost(one, f"an input was not done after {self._hang:.0f} s")
        return True

    def _died(self, one: _Process) -> bool:
        for kind, content in one.messages():
            if kind == "found":
                self._save(content)
        one.done = True
        code = one.process.exitcode
        if code == 0:
            return False
        how = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
        self._lost(one, f"the process died of {how}")
        return True

    def _lost(self, one: _Process, what: str) -> None:
        inputs, steps, data = one.slate.read()
        self._base[0] += inputs
        self._base[1] += steps
        one.done = True
        one.end()
        one.slate.count(0, 0)
        self._save(Found(what, data, f"{what} {len(self._known)}", ""))

    def _count(self, processes: Sequence[_Process], start: float) -> None:
        counts = [one.slate.read() for one in processes]
        self.outcome.inputs = self._base[0] + sum(count[0] for count in counts)
        self.outcome.steps = self._base[1] + sum(count[1] for count in counts)
        self.outcome.seconds = time.monotonic() - start

    def _save(self, found: Found) -> None:
        if found.signature in self._known:
            return
        self._known.add(found.signature)
        path = Reproducer(self.plan.target, self.plan.via, found.data, found.what).save(self.plan.output, found.trace)
        self.outcome.findings.append(Saved(found.what, str(path)))


def _read_corpus(folder: Path | None) -> tuple[bytes, ...]:
    if folder is None:
        return ()
    folder.mkdir(parents=True, exist_ok=True)
    return tuple(path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file())
