"""Cases over a pool of processes, each with a device of its own; one that dies or hangs is replaced.

A member's life is invisible from inside: the verdict `crashed` is given here. Knows nothing of what a verdict means.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from virtaccel.harness.conformance import case as cases
from virtaccel.harness.conformance.judge import Judge, Outcome, System, Verdict
from virtaccel.harness.conformance.suite import Entry
from virtaccel.harness.conformance.tools import REFERENCE_SECONDS, Generator, ToolFailed, Tools
from virtaccel.processes.pool import GOODBYE_SECONDS, Kind, Member, Pool


@dataclass(frozen=True, slots=True)
class Work:
    """What every member needs to know: the way to the device and how long a case may take, in seconds."""

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


class _Given(NamedTuple):
    entry: Entry
    began: float


class WorkerFailed(Exception):
    """A process could not start; the text says why."""


def run(entries: Sequence[Entry], work: Work) -> Iterator[Result]:
    """Results in the order in which they come. Closing the iterator ends the processes. Raises WorkerFailed."""
    waiting = list(reversed(entries))
    given: dict[Member, _Given] = {}
    with tempfile.TemporaryDirectory(prefix="virtaccel-") as folder, Pool() as pool:
        logs = (Path(folder) / f"{number}.log" for number in count())
        for _ in range(min(work.jobs, len(waiting))):
            pool.add(Member(_main, (work,), next(logs)))
        while pool.members:
            for member, kind, what in pool.look():
                if kind is Kind.SAID and what is None:
                    # The device has answered; judging has a limit of its own inside.
                    member.touch(max(work.seconds, 2 * REFERENCE_SECONDS))
                    continue
                if isinstance(what, str) and member not in given:
                    raise WorkerFailed(what if kind is Kind.SAID else f"a worker did not start: {what}")
                if (task := given.pop(member, None)) is not None:
                    verdict = what if kind is Kind.SAID else Verdict(Outcome.CRASHED, what)
                    yield Result(task.entry, verdict, time.monotonic() - task.began)
                if waiting and kind is not Kind.SAID:
                    pool.add(Member(_main, (work,), next(logs)))
                elif waiting:
                    given[member] = _Given(waiting.pop(), time.monotonic())
                    member.touch(work.seconds)
                    member.send(given[member].entry)
                elif kind is Kind.SAID:
                    pool.drop(member, GOODBYE_SECONDS)


def _main(connection: Connection, work: Work) -> None:
    """Inside a member: greet, then answer each entry with a verdict until the connection is closed."""
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
        bed = TestBed(work, DeviceSystem(opened, work.seconds / 2), lambda: connection.send(None))
        connection.send(Verdict(Outcome.PASSED))
        with suppress(EOFError):
            while True:
                connection.send(bed.verdict(connection.recv()))


class TestBed:
    """Everything that turns an entry into a verdict, in one process."""

    __test__ = False

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
