"""`vhost-user-accel` with a known fault in this process: `soaked_daemon.py FAULT OPTIONS...`, for tests of the soak.

Each fault is one that a real device could have; what is planted is in the table at the end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import count
from typing import Any

from virtaccel.device import cli
from virtaccel.device.isolated.backend import IsolatedBackend
from virtaccel.device.vhost_user.server import Connection
from virtaccel.virtqueue.split import DeviceQueue


def wrong_answer() -> None:
    """Each twentieth READ has one wrong bit."""
    numbers, honest = count(1), IsolatedBackend.read_buffer

    def read_buffer(self: IsolatedBackend, buffer: Any, offset: int, sink: Sequence[memoryview]) -> None:
        honest(self, buffer, offset, sink)
        if not next(numbers) % 20:
            sink[0][0] ^= 0x40

    IsolatedBackend.read_buffer = read_buffer  # type: ignore[method-assign]


def lost_completion() -> None:
    """Each three hundredth chain is never given back."""
    numbers, honest = count(1), DeviceQueue.push

    def push(self: DeviceQueue, chain: Any, written: int) -> bool:
        return honest(self, chain, written) if next(numbers) % 300 else True

    DeviceQueue.push = push  # type: ignore[method-assign]


def kept_descriptor() -> None:
    """Each connection leaves descriptors behind."""
    honest = Connection.end

    def end(self: Connection, *words: Any) -> None:
        for _ in range(10):
            os.dup(2)
        honest(self, *words)

    Connection.end = end  # type: ignore[method-assign]


FAULTS = {"none": lambda: None, "wrong": wrong_answer, "lost": lost_completion, "kept": kept_descriptor}

if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    sys.exit(cli.main(sys.argv[2:]))
