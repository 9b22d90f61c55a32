"""Starts `vhost-user-accel` as a child process and knows when it serves: for tests, benchmarks, soaks and machines.

The daemon says that it is ready through a descriptor (`--ready-fd`): a line once every socket listens and every device
is open, then the end of the file. The end alone means that it failed, so nobody has to guess from sockets or logs.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from virtaccel.processes.child import Child

PROGRAM: Final = (sys.executable, "-m", "virtaccel.device.cli")
READY_SECONDS: Final = 60.0
"""A runtime may have to be read from a cold disk first, which has been seen to take twenty."""


class DaemonFailed(Exception):
    """The daemon ended, or was not ready in time; the text has the end of its log."""


class Daemon(Child):
    """A daemon that serves `sockets`, each a device of its own. `options` are its command line's; `program` runs
    another one that takes the same. Raises DaemonFailed; nothing is left running then."""

    def __init__(
        self, sockets: Sequence[Path | str], log: Path, *options: str, program: Sequence[str] = PROGRAM,
        seconds: float = READY_SECONDS,
    ) -> None:  # fmt: skip
        self.sockets = tuple(map(str, sockets))
        said, say = os.pipe()
        try:
            command = [*program, "--sockets", *self.sockets, "--ready-fd", str(say), *options]
            super().__init__("vhost-user-accel", command, log, hand_over=[say])
        except BaseException:
            os.close(said)
            raise
        finally:
            os.close(say)  # the daemon's is the only one left, so that its end is seen here
        with open(said, "rb") as ready:
            readable = select.select([ready], [], [], seconds)[0]
            if readable and ready.readline():
                return
        # One that closed the descriptor is about to end by itself and to say why; any other has had its time.
        how = "did not start" if readable else f"was not ready within {seconds:.0f} s"
        self.stop()
        raise DaemonFailed(f"{self.name} {how}:\n{self.tail()}")
