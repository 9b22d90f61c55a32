"""Runs a soak: starts daemon and guests, kills some of them and of the device's processes at random, lets all rest now
and then to count what the device holds, and collects what was found.

Knows processes and time, nothing of what guests ask a device. The first guest and the oldest worker are never killed
(where there are several), so that there is something whose holdings can be followed for the whole length.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from virtaccel.device.launcher import Daemon, DaemonFailed
from virtaccel.guest_tools.errors import Unavailable
from virtaccel.guest_tools.transport.vhost_user import MEMORY_NAME
from virtaccel.harness.soak import census
from virtaccel.harness.soak.census import MEBIBYTE, Count, Holding, Verdict
from virtaccel.harness.soak.counters import COUNTS, Counters, Own, Shared
from virtaccel.harness.soak.guest import EXIT_STUCK, EXIT_WRONG
from virtaccel.processes.child import Child

# Generations below the daemon in its default form (docs/isolation.md).
FORK_SERVER, WORKERS, COMPILERS = 0, 1, 3
# Mean time from one kill to the next: long enough that most guests get something done in between, short enough that a
# soak of a minute sees a dozen of each.
GUEST_KILL_SECONDS, WORKER_KILL_SECONDS, COMPILER_KILL_SECONDS = 3.0, 4.0, 4.0
_TICK: Final = 0.02
_LOOK_SECONDS: Final = 0.5
# A daemon imports its backend in a fork server before it serves, which a busy machine stretches.
_START_SECONDS: Final = 90.0
# What an interpreter may take to come up, beyond a guest's patience.
_BIRTH_SECONDS: Final = 30.0
_END_SECONDS: Final = 15.0
# A rest is counted when two looks a tenth of a second apart see the same; what moves longer than 5 s is counted.
_SETTLE_SECONDS, _SETTLED_SECONDS = 5.0, 0.1
_LINES: Final = 40  # of a log: a stack with all its threads
_OPTIONS: Final = ("--backend", "openvino", "--log-level", "warning")
# One thread for each guest's numpy: many guests share the processors with the device that is soaked.
_GUEST: Final = ("env", "OPENBLAS_NUM_THREADS=1", sys.executable, "-m", "virtaccel.harness.soak.guest")

# What a line may rise, by process. A daemon holds a handful of descriptors for each worker, and one worker more or less
# may be ready beforehand.
BOUNDS: Final = {
    "daemon": Holding(8 * MEBIBYTE, 6, 1),
    "oldest worker": Holding(32 * MEBIBYTE, 4, 8),
    "first guest": Holding(16 * MEBIBYTE, 2, 0),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do. `sockets` are somebody's daemon, else one is started; `patience` in seconds is how long a guest may
    take to get anything done; after so many `findings` it ends."""

    seconds: float = 60.0
    guests: int = 4
    seed: int = 0
    sockets: tuple[str, ...] = ()
    patience: float = 30.0
    kill_guests: bool = True
    kill_workers: bool = True
    findings: int = 20

    @property
    def rest_seconds(self) -> float:
        return min(15.0, max(1.0, self.seconds / 16))


class Finding(NamedTuple):
    """`kind`: wrong, stuck, ended, leak or daemon."""

    kind: str
    text: str


@dataclass(slots=True)
class Outcome:
    """What came of it. `counts` by name, over all guests."""

    plan: Plan
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("guests", "workers", "compilers"), 0))
    rests: int = 0
    peaks: dict[str, Holding] = field(default_factory=dict)
    series: dict[str, list[Count]] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class GuestSlot:
    """One guest after another on one socket."""

    def __init__(self, number: int, path: str, words: memoryview, folder: Path) -> None:
        self.number, self.path, self.words, self._folder = number, path, words, folder
        self.lives = 0
        self.killed = False
        self.process: Child | None = None
        self._progress, self._since = -1, 0.0

    def start(self, plan: Plan, shared: Path, guests: int) -> Child:
        """The next guest."""
        self.lives += 1
        self.killed = False
        self._progress, self._since = self.words[Own.PROGRESS], time.monotonic() + _BIRTH_SECONDS
        name = f"guest {self.number}, life {self.lives}"
        seed = f"{plan.seed}/{self.number}/{self.lives}"
        words = [self.path, str(shared), str(guests), str(self.number), seed, str(plan.patience)]
        self.process = Child(name, [*_GUEST, *words], self._folder / f"{name}.log")
        return self.process

    def idle_seconds(self) -> float:
        """How long it has got nothing done."""
        progress = self.words[Own.PROGRESS]
        if progress != self._progress:
            self._progress, self._since = progress, time.monotonic()
        return time.monotonic() - self._since

    def patience_again(self) -> None:
        self._since = max(self._since, time.monotonic())

    def kill(self) -> None:
        self.killed = True
        if self.process is not None:
            self.process.kill()


def _stack(guest: Child) -> str:
    """Where a guest is, as far as it can say."""
    os.kill(guest.pid, signal.SIGUSR1)
    # The dump is written by a signal handler; there is no word when it is done.
    time.sleep(0.3)
    return guest.tail(_LINES)


class Runner:
    """One soak, from start to end, in one thread. `each` is called now and then."""

    def __init__(self, plan: Plan, each: Callable[[Outcome], None] = lambda _: None) -> None:
        self.plan = plan
        self.outcome = Outcome(plan)
        self.slots: list[GuestSlot] = []
        self._each = each
        self._random = Random(f"{plan.seed}/runner")
        self._began = 0.0
        self._daemon: Daemon | None = None
        self._process = 0
        self._elder: int | None = None

    def run(self) -> Outcome:
        """Raises Unavailable if there is no daemon to be had."""
        with tempfile.TemporaryDirectory(prefix="virtaccel-soak-") as name, self._device(Path(name)) as paths:
            self._file, self._guests = Path(name, "counters"), len(paths)
            self._counters = Counters(self._file, self._guests, new=True)
            self.slots = [GuestSlot(n, path, self._counters.of(n), Path(name)) for n, path in enumerate(paths)]
            self._began = time.monotonic()
            try:
                for slot in self.slots:
                    self._start(slot)
                with suppress(KeyboardInterrupt):
                    self._conduct()
                self._stop_guests()
            finally:
                for slot in self.slots:
                    slot.kill()
            self._sum_up()
        return self.outcome

    def _start(self, slot: GuestSlot) -> None:
        slot.start(self.plan, self._file, self._guests)

    # ---- the device

    @contextmanager
    def _device(self, folder: Path) -> Iterator[tuple[str, ...]]:
        """Sockets that are served."""
        if self.plan.sockets:
            self._process = server_of(self.plan.sockets[0])
            yield self.plan.sockets
            return
        sockets = [folder / f"{number}.sock" for number in range(self.plan.guests)]
        try:
            daemon = self._daemon = Daemon(sockets, folder / "daemon.log", *_OPTIONS, seconds=_START_SECONDS)
        except DaemonFailed as error:
            raise Unavailable(str(error)) from error
        self._process = daemon.pid
        try:
            yield daemon.sockets
        finally:
            below = [process for generation in census.descendants(self._process) for process in generation]
            status = daemon.stop(_END_SECONDS)
            if status != 0:
                self._find("daemon", f"SIGTERM: exit status {status}\n{daemon.tail(_LINES)}")
            _wait(lambda: all(map(census.gone, below)), _END_SECONDS)
            if left := [process for process in below if not census.gone(process)]:
                self._find("daemon", f"{len(left)} processes are left when it has ended")
            for traceback in _tracebacks(daemon.log)[:3]:
                self._find("daemon", traceback)

    def _generation(self, which: int) -> list[int]:
        generations = census.descendants(self._process)
        return generations[which] if len(generations) > which else []

    # ---- the length of it

    def _conduct(self) -> None:
        end = self._began + self.plan.seconds
        next_rest = self._began + self.plan.rest_seconds
        next_look = 0.0
        kills = self._kills()
        while (now := time.monotonic()) < end and len(self.outcome.findings) < self.plan.findings:
            self._watch()
            if census.gone(self._process):
                self._find("daemon", f"it has ended\n{self._daemon.tail(_LINES) if self._daemon else ''}")
                return
            for kill in kills:
                kill.look(now)
            if now >= next_look:
                next_look = now + _LOOK_SECONDS
                self._peak()
                self.outcome.seconds = now - self._began
                self._each(self.outcome)
            if now >= next_rest:
                self._rest()
                next_rest = time.monotonic() + self.plan.rest_seconds
            time.sleep(_TICK)
        self.outcome.seconds = time.monotonic() - self._began

    def _find(self, kind: str, text: str) -> None:
        self.outcome.findings.append(Finding(kind, text))

    def _watch(self) -> None:
        """Guests that have ended, and guests that get nothing done."""
        rest = self._counters.get(Shared.REST)
        for slot in self.slots:
            guest = slot.process
            status = guest.status if guest is not None else None
            if guest is None or status is not None:
                self._ended(slot, status)
            else:
                if rest % 2 and slot.words[Own.RESTING] == rest:
                    slot.patience_again()  # it waits for the others, as it was asked to
                if slot.idle_seconds() <= self.plan.patience + 1:
                    continue
                text = f"nothing done in {self.plan.patience:g} s; it is at\n{_stack(guest)}"
                self._find("stuck", f"{guest.name}: {text}")
                slot.kill()
            self._start(slot)

    def _ended(self, slot: GuestSlot, status: int | None) -> None:
        """A guest that nobody killed should not have ended."""
        if slot.killed or slot.process is None:
            return
        kind = {EXIT_WRONG: "wrong", EXIT_STUCK: "stuck"}.get(status or 0, "ended")
        words = slot.process.tail(_LINES)
        self._find(kind, f"{slot.process.name}: " + (words if kind != "ended" else f"exit status {status}\n{words}"))

    def _stop_guests(self) -> None:
        self._counters.put(Shared.STOP, 1)
        until = time.monotonic() + self.plan.patience + _BIRTH_SECONDS
        for slot in self.slots:
            guest = slot.process
            if guest is None:
                continue
            status = guest.wait(max(0.1, until - time.monotonic()))
            if status is None:
                self._find("stuck", f"{guest.name} does not come to its end; it is at\n{_stack(guest)}")
            elif status:
                self._ended(slot, status)

    # ---- kills

    def _kills(self) -> list[_Kills]:
        random, kills = self._random, []
        if self.plan.kill_guests:
            kills.append(_Kills(self._kill_guest, GUEST_KILL_SECONDS, random))
        if self.plan.kill_workers:
            kills.append(_Kills(self._kill_worker, WORKER_KILL_SECONDS, random))
            kills.append(_Kills(self._kill_compiler, COMPILER_KILL_SECONDS, random))
        return kills

    def _kill_guest(self) -> bool:
        # Never the first, whose holdings are followed for the whole length.
        slot = self._random.choice(self.slots[1:] or self.slots)
        slot.kill()
        self.outcome.kills["guests"] += 1
        return True

    def _kill_worker(self) -> bool:
        workers = self._generation(WORKERS)
        return self._kill(workers[1:] or workers[: self._guests == 1], Shared.WORKER_KILLS, "workers")

    def _kill_compiler(self) -> bool:
        return self._kill(self._generation(COMPILERS), Shared.COMPILER_KILLS, "compilers")

    def _kill(self, processes: list[int], word: Shared, name: str) -> bool:
        if not processes:
            return False
        process = self._random.choice(processes)
        # Odd while the kill is under way: who reads it then must not take it for one that is over.
        self._counters.put(word, self._counters.get(word) + 1)
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
            self.outcome.kills[name] += 1
        _wait(lambda: census.gone(process), 1.0)
        self._counters.put(word, self._counters.get(word) + 1)
        return True

    # ---- counting

    def _peak(self) -> None:
        found = census.holding(self._process)
        if found is not None:
            before = self.outcome.peaks.get("daemon", found)
            self.outcome.peaks["daemon"] = Holding(*map(max, before, found))

    def _rest(self) -> None:
        """Let everybody go, count, and let everybody come back."""
        asked = self._counters.get(Shared.REST) + 1
        self._counters.put(Shared.REST, asked)
        for slot in self.slots:
            slot.patience_again()
        found = len(self.outcome.findings)

        def all_rest() -> bool:
            self._watch()
            return all(slot.words[Own.RESTING] == asked for slot in self.slots)

        if _wait(all_rest, self.plan.patience * 2 + _BIRTH_SECONDS) and len(self.outcome.findings) == found:
            self._count()
            self.outcome.rests += 1
        self._counters.put(Shared.REST, asked + 1)
        for slot in self.slots:
            slot.patience_again()

    def _count(self) -> None:
        """Once the daemon has noticed that everybody has gone: when two looks in a row see the same."""
        before: object = None
        until = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < until:
            time.sleep(_SETTLED_SECONDS)
            daemon, below = census.holding(self._process), census.descendants(self._process)
            now = (daemon and daemon.descriptors, below, census.maps(self._process, MEMORY_NAME))
            # No compiler below: it would be counted as what its worker holds.
            if now == before and len(below) <= COMPILERS:
                break
            before = now
        if kept := census.maps(self._process, MEMORY_NAME):
            self._find("leak", f"the daemon has the memory of {kept} guests mapped that have gone")
        at = time.monotonic() - self._began
        first = self.slots[0].process
        looked = {"daemon": census.holding(self._process), "first guest": census.holding(first.pid) if first else None}
        workers = self._generation(WORKERS)
        if workers:
            if workers[0] != self._elder:  # a reset has discarded it: begin anew
                self._elder = workers[0]
                self.outcome.series.pop("oldest worker", None)
            looked["oldest worker"] = census.holding(workers[0])
        for name, found in looked.items():
            if found is not None:
                self.outcome.series.setdefault(name, []).append(Count(at, found))

    def _sum_up(self) -> None:
        for word in COUNTS:
            self.outcome.counts[word.name.lower()] = sum(slot.words[word] for slot in self.slots)
        if self.plan.kill_guests and self._guests == 1:
            self.outcome.series.pop("first guest", None)
        for name, counts in self.outcome.series.items():
            verdicts = census.judge(name, counts, self.plan.seconds, BOUNDS[name])
            if not verdicts:
                self.outcome.notes.append(f"{name}: {len(counts)} rests, too few to say whether it leaks")
            for verdict in verdicts:
                self.outcome.verdicts.append(verdict)
                if not verdict.holds:
                    self._find("leak", f"{name}: {verdict.what} rise by {verdict.rise:.0f}, bound {verdict.bound:.0f}")


class _Kills:
    """One kind of kill, at random times of a given mean. `act` says whether there was anything to kill."""

    def __init__(self, act: Callable[[], bool], mean: float, random: Random) -> None:
        self._act, self._mean, self._random = act, mean, random
        self._at = time.monotonic() + random.expovariate(1 / mean)

    def look(self, now: float) -> None:
        if now >= self._at and self._act():
            self._at = now + self._random.expovariate(1 / self._mean)


def server_of(path: str) -> int:
    """The process that listens on a socket. Raises Unavailable."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as front:
        try:
            front.settimeout(_START_SECONDS)
            front.connect(path)
        except OSError as error:
            raise Unavailable(f"{path}: {error.strerror or error}; is a daemon running there?") from error
        process: int = struct.unpack("iII", front.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return process


def _tracebacks(log: Path) -> list[str]:
    """The ends of unexpected failures in a log."""
    lines = log.read_text(errors="replace").splitlines()
    return ["\n".join(lines[n : n + 30]) for n, line in enumerate(lines) if line.startswith("Traceback")]


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether `condition` came true in time."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(_TICK)
    return True
