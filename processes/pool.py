"""A pool of processes that do one kind of work: each can be talked to, and one that dies, hangs or ends is told apart
and can be replaced.

Knows processes, pipes and clocks, nothing of what is worked on. A member is started anew, not forked: native code that
crashed or locked up in one must not be inherited by the next.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple

from virtaccel.processes.confine import die_with_parent

START_SECONDS: Final = 120.0  # to load a runtime and open a device on a machine that is busy with as many members
GOODBYE_SECONDS: Final = 5.0  # an idle member only has to notice that its pipe is closed
_LINES: Final = 8  # of a log: a fatal error's heading and the innermost frames


class Kind(Enum):
    SAID = "said"
    ENDED = "ended"
    DIED = "died"
    HUNG = "hung"


class News(NamedTuple):
    """What became of a member: `what` is its message, or how it died."""

    member: Member
    kind: Kind
    what: Any


class Member:
    """One process that runs `work(connection, *args)`. `patience` is how long it may be silent, in seconds from
    `touch`; while what `pulse` returns changes, it isn't. Its output goes to `log`, if there is one."""

    def __init__(
        self, work: Callable[..., None], args: Sequence[Any] = (), log: Path | None = None,
        pulse: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._log, self._pulse = log, pulse
        begin = (work, theirs, str(log) if log else "", os.getpid(), tuple(args))
        self._process = context.Process(target=_begin, args=begin, daemon=True)
        self._process.start()
        theirs.close()
        self._beat = pulse() if pulse is not None else None
        self.touch(START_SECONDS)

    def touch(self, patience: float) -> None:
        """Count its silence from now on."""
        self.patience, self._since = patience, time.monotonic()

    def send(self, message: object) -> None:
        """One that has died meanwhile is told of by the pool."""
        with suppress(OSError):
            self._connection.send(message)

    def left(self) -> float:
        """Seconds that it may still be silent."""
        if self._pulse is not None and (beat := self._pulse()) != self._beat:
            self._beat, self._since = beat, time.monotonic()
        return self.patience - (time.monotonic() - self._since)

    def news(self) -> list[News]:
        """All there is to tell of it now."""
        told = []
        try:
            while self._connection.poll():
                told.append(News(self, Kind.SAID, self._connection.recv()))
        except (EOFError, OSError):
            self._process.join(GOODBYE_SECONDS)
            kind = Kind.ENDED if self._process.exitcode == 0 else Kind.DIED
            return [*told, News(self, kind, self._death())]
        if not told and self.left() <= 0:
            return [News(self, Kind.HUNG, f"no answer in {self.patience:.0f} s")]
        return told

    def _death(self) -> str:
        """How the process ended, and the last it said."""
        code = self._process.exitcode
        name = f"status {code}"
        if code is not None and code < 0:
            with suppress(ValueError):
                name = signal.Signals(-code).name
        lines: list[str] = []
        if self._log is not None:
            with suppress(OSError):
                lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        fatal = next((place for place, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
        told = lines[-_LINES:] if fatal is None else lines[fatal : fatal + _LINES]
        return "; ".join([f"the process ended with {name}", *told])

    def end(self, grace: float = 0.0) -> None:
        """Close its pipe, which an idle member takes for good-bye, and kill it if it is still there after `grace`."""
        self._connection.close()
        self._process.join(grace)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Pool:
    """The members; leaving it ends them all."""

    def __init__(self) -> None:
        self.members: list[Member] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for member in self.members:
            member.end()

    def add(self, member: Member) -> Member:
        self.members.append(member)
        return member

    def drop(self, member: Member, grace: float = 0.0) -> None:
        self.members.remove(member)
        member.end(grace)

    def look(self, most: float = 3600.0) -> list[News]:
        """Wait until there is news, at most so many seconds. Who ended, died or hung is a member no more."""
        wait([member._connection for member in self.members], max(0.0, min([most, *(m.left() for m in self.members)])))
        told = [news for member in self.members for news in member.news()]
        for news in told:
            if news.kind is not Kind.SAID:
                self.drop(news.member)
        return told


def _begin(work: Callable[..., None], connection: Connection, log: str, parent: int, args: tuple[Any, ...]) -> None:
    """Inside a member."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us in order
    die_with_parent(parent)  # and if it is killed, it cannot
    if log:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        faulthandler.enable()
    work(connection, *args)
