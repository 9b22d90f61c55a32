"""Worker processes that run cases, each with a device of its own; one that dies or hangs is replaced.

A worker's life is invisible from inside: the verdict `crashed` is given here. What a worker or native code in it prints
goes to a file, whose end becomes the reason when it dies. Knows nothing of what a verdict means.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, NamedTuple

from virtaccel.harness.conformance import case as cases
from virtaccel.harness.conformance.judge import Judge, Outcome, System, Verdict
from virtaccel.harness.conformance.suite import Entry
from virtaccel.harness.conformance.tools import REFERENCE_SECONDS, Generator, ToolFailed, Tools

_START_SECONDS: Final = 120.0
_LINES: Final = 8


@dataclass(frozen=True, slots=True)
class Work:
    """What every worker needs to know: the way to the device and how long a case may take, in seconds."""

    folder: Path
    tools: Tools
    via: str = "in-process"
    device: str | None = None
    seconds: float = 120.0
    jobs: int = 1
    options: Mapping[str, str] = field(default_factory=dict)


class Result(NamedTuple):
    """A verdict and how long it took, in seconds."""

    entry: Entry
    verdict: Verdict
    seconds: float


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    log: Path
    entry: Entry | None = None
    judging: bool = False
    since: float = field(default_factory=time.monotonic)
    began: float = 0.0
    ready: bool = False


def run(entries: Sequence[Entry], work: Work) -> Iterator[Result]:
    """Results in the order in which they come. Closing the iterator ends the workers."""
    waiting = list(reversed(entries))
    with tempfile.TemporaryDirectory(prefix="virtaccel-") as folder:
        logs = iter(Path(folder) / f"{number}.log" for number in range(len(entries) + work.jobs))
        workers = [_start(work, next(logs)) for _ in range(min(work.jobs, len(waiting)))]
        try:
            while workers:
                for worker in _stirring(workers, work.seconds):
                    result = _look(worker, work.seconds)
                    if result is not None:
                        yield result
                    if worker.entry is not None:
                        continue
                    if worker.ready and waiting:
                        _give(worker, waiting.pop())
                        continue
                    workers.remove(worker)
                    _end(worker)
                    if waiting:
                        workers.append(_start(work, next(logs)))
        finally:
            for worker in workers:
                _end(worker)


def _start(work: Work, log: Path) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(theirs, work, str(log)), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours, log)


def _give(worker: _Worker, entry: Entry) -> None:
    worker.entry, worker.judging, worker.since = entry, False, time.monotonic()
    worker.began = worker.since
    with suppress(OSError):  # it has died meanwhile: seen when it is looked at
        worker.connection.send(entry)


def _stirring(workers: Sequence[_Worker], seconds: float) -> list[_Worker]:
    """Workers that have something to say, have died or have run out of time."""
    now = time.monotonic()
    left = [_limit(worker, seconds) - (now - worker.since) for worker in workers]
    heard = wait([worker.connection for worker in workers], max(0.0, min(left)))
    now = time.monotonic()
    return [w for w in workers if w.connection in heard or now - w.since >= _limit(w, seconds)]


def _limit(worker: _Worker, seconds: float) -> float:
    """How long a worker may be silent; judging has a limit of its own inside."""
    if worker.judging:
        return max(seconds, 2 * REFERENCE_SECONDS)
    return seconds if worker.entry is not None else _START_SECONDS


class WorkerFailed(Exception):
    """A worker could not start; the text says why."""


def _look(worker: _Worker, seconds: float) -> Result | None:
    """A result, or None where a worker only greets or tells that its device has answered. Raises WorkerFailed if it
    never got so far."""
    now = time.monotonic()
    reason = f"no answer in {seconds:.0f} s"
    try:
        if worker.connection.poll():
            return _heard(worker, worker.connection.recv(), now)
    except (EOFError, OSError):
        worker.process.join(5)
        reason = _death(worker)
    worker.process.kill()
    if worker.entry is None:
        raise WorkerFailed(f"a worker did not start: {reason}")
    entry, worker.entry, worker.ready = worker.entry, None, False
    worker.process.join(5)
    return Result(entry, Verdict(Outcome.CRASHED, reason), now - worker.began)


def _heard(worker: _Worker, message: Verdict | str | None, now: float) -> Result | None:
    if message is None:
        worker.judging, worker.since = True, now
        return None
    if isinstance(message, str):
        raise WorkerFailed(message)
    entry, worker.entry, worker.ready = worker.entry, None, True
    return None if entry is None else Result(entry, message, now - worker.began)


def _death(worker: _Worker) -> str:
    """How a process ended, and the last it said."""
    code = worker.process.exitcode
    name = f"status {code}"
    if code is not None and code < 0:
        with suppress(ValueError):
            name = signal.Signals(-code).name
    try:
        lines = [line.strip() for line in worker.log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    fatal = next((place for place, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    told = lines[-_LINES:] if fatal is None else lines[fatal : fatal + _LINES]  # the innermost frames come first
    return "; ".join([f"the process ended with {name}", *told])


def _end(worker: _Worker) -> None:
    worker.connection.close()  # an idle worker takes this for good-bye
    worker.process.join(0.0 if worker.entry is not None else 5.0)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()


# ---- inside a worker


def _main(connection: Connection, work: Work, log: str) -> None:
    """Greet, then answer each entry with a verdict until the connection is closed."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from virtaccel.guest_tools.arrays import accelerator
    from virtaccel.guest_tools.errors import AcceleratorError
    from virtaccel.guest_tools.transport.base import TransportError
    from virtaccel.harness.conformance.system import DeviceSystem

    try:
        opened = accelerator.open(work.via, work.device, work.seconds, work.options)
    except (AcceleratorError, TransportError) as error:
        connection.send(str(error))
        return
    with opened:
        bench = Bench(work, DeviceSystem(opened, work.seconds / 2), lambda: connection.send(None))
        connection.send(Verdict(Outcome.PASSED))
        with suppress(EOFError):
            while True:
                connection.send(bench.verdict(connection.recv()))


class Bench:
    """Everything that turns an entry into a verdict, in one process."""

    def __init__(self, work: Work, system: System, answered: Callable[[], None] | None = None) -> None:
        self._folder = work.folder
        self._generator = Generator(work.tools)
        self._judge = Judge(work.tools, answered)
        self._system = system

    def verdict(self, entry: Entry) -> Verdict:
        """A case that cannot be run or judged is not passed over in silence: it counts as wrong, with the reason."""
        try:
            case = cases.load(self._folder / entry.path, entry, self._generator)
            return self._judge.verdict(case, self._system)
        except (cases.BadTest, ToolFailed) as error:
            return Verdict(Outcome.WRONG, f"not judged: {error}")
