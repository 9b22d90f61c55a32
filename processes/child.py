"""One child process with its log in a file, ended by its own process ID and by nothing else."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

TERMINATE_SECONDS: Final = 6.0
"""A program that saves nothing ends within one; the rest is for a machine under load."""


class Child:
    """A running program, ended when the `with` block ends. `log` receives its standard output and error; `name` is for
    messages; descriptors of `hand_over` stay open in it."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, *, interactive: bool = False, hand_over: Sequence[int] = ()
    ) -> None:
        self.name = name
        self.log = log
        self.command = list(command)
        with open(log, "ab") as sink:
            self.process = subprocess.Popen(
                self.command,
                stdin=None if interactive else subprocess.DEVNULL,
                stdout=None if interactive else sink,
                stderr=sink,
                pass_fds=hand_over,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def status(self) -> int | None:
        """Exit status, None while it runs."""
        return self.process.poll()

    def wait(self, timeout: float | None = None) -> int | None:
        """Exit status, or None if it still runs after `timeout` seconds."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """SIGKILL, and reap."""
        self.process.kill()
        self.process.wait()

    def stop(self, timeout: float = TERMINATE_SECONDS) -> int | None:
        """SIGTERM, SIGKILL if that is not obeyed in time. Returns the exit status; may be called twice."""
        if self.process.poll() is None:
            self.process.terminate()
            if self.wait(timeout) is None:
                self.kill()
        return self.process.returncode

    def text(self) -> str:
        """Its log so far."""
        try:
            return self.log.read_text(errors="replace")
        except OSError:
            return ""

    def tail(self, lines: int = 15) -> str:
        """The end of its log."""
        return "\n".join(self.text().splitlines()[-lines:])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
