"""One child process with its log in a file, ended by its own process ID and by nothing else."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

TERMINATE_S = 6.0


class Child:
    """A running program. `log` receives its standard output and error; `name` is for messages."""

    def __init__(self, name: str, command: Sequence[str], log: Path, *, interactive: bool = False) -> None:
        self.name = name
        self.log = log
        self.command = list(command)
        with open(log, "ab") as sink:
            self._process = subprocess.Popen(
                self.command,
                stdin=None if interactive else subprocess.DEVNULL,
                stdout=None if interactive else sink,
                stderr=sink,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, None while it runs."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int | None:
        """Exit status, or None if it still runs after `timeout` seconds."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """SIGKILL, and reap."""
        self._process.kill()
        self._process.wait()

    def stop(self, timeout: float = TERMINATE_S) -> int | None:
        """SIGTERM, SIGKILL if that is not obeyed in time. Returns the exit status; may be called twice."""
        if self._process.poll() is None:
            self._process.terminate()
            if self.wait(timeout) is None:
                self.kill()
        return self._process.returncode

    def tail(self, lines: int = 15) -> str:
        """The end of its log."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""
