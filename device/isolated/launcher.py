"""Workers on demand: a nursery for each kind of backend, and the next worker made ready when one has been lost.

Opens IsolatedBackends. Knows how processes are started and nothing of the contract's calls.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from virtaccel.device.backend import Backend, BackendUnavailable
from virtaccel.device.isolated.backend import IsolatedBackend
from virtaccel.device.isolated.messages import Garbage
from virtaccel.device.isolated.shared import Board
from virtaccel.processes.fork_server import Child, Nursery, NurseryLost

log = logging.getLogger(__name__)

READY_SECONDS: Final = 60.0
"""How long a worker may take to open its backend; a runtime may have to be read from disk first."""
_SOCKET_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What a worker may have. `memory` is private writable memory in bytes (0: no limit); `confined`: system calls that
    no inference needs are refused to it. `environment` is set before its backend is opened."""

    memory: int = 0
    confined: bool = True
    environment: dict[str, str] = field(default_factory=lambda: {"VIRTACCEL_COMPILE": "sandbox"})


class _Started:
    """A worker that has been asked for and may not be ready yet."""

    def __init__(self, nursery: Nursery, device: str | None, limits: WorkerLimits) -> None:
        self.device = device
        self.board = Board()
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = {
            "device": device,
            "memory": limits.memory,
            "confined": limits.confined,
            "environment": limits.environment,
        }
        try:
            for end in (self.connection, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            self.child: Child = nursery.start(json.dumps(settings).encode(), [theirs.fileno(), self.board.descriptor])
        except BaseException:
            self.connection.close()
            self.board.close()
            raise
        finally:
            theirs.close()

    def ready(self, lost: Callable[[], None]) -> IsolatedBackend:
        """Wait for it. Raises BackendUnavailable; the worker is gone then."""
        try:
            return IsolatedBackend(self.connection, self.child, self.board, READY_SECONDS, lost)
        except (Garbage, OSError) as error:
            raise BackendUnavailable(str(error) or "the worker does not start") from error

    def discard(self) -> None:
        self.child.close()
        self.connection.close()
        self.board.close()


class IsolatingOpener:
    """Opens the backend called `backend` in workers. One nursery serves all of them."""

    def __init__(self, backend: str, limits: WorkerLimits | None = None) -> None:
        self._backend = backend
        self._limits = limits if limits is not None else WorkerLimits()
        self._nursery: Nursery | None = None
        self._spare: _Started | None = None
        self._closed = False

    @property
    def nursery(self) -> Nursery | None:
        return self._nursery

    def __call__(self, device: str | None = None) -> Backend:
        """A fresh worker, or the one that was made ready. Raises BackendUnavailable."""
        lost = functools.partial(self.make_ready, device)
        spare, self._spare = self._spare, None
        if spare is not None and spare.device == device:
            with contextlib.suppress(BackendUnavailable):
                return spare.ready(lost)
        elif spare is not None:
            spare.discard()
        try:
            return self._start(device).ready(lost)
        except (NurseryLost, OSError) as error:
            raise BackendUnavailable(f"no worker can be started: {error}") from error

    def make_ready(self, device: str | None = None) -> None:
        """Start a worker for a coming call, as one was lost. Never waits and never fails."""
        if self._spare is None and not self._closed:
            with contextlib.suppress(NurseryLost, OSError):
                self._spare = self._start(device)

    def _start(self, device: str | None) -> _Started:
        if self._nursery is not None:
            try:
                return _Started(self._nursery, device, self._limits)
            except NurseryLost as error:
                log.warning("starting another nursery: %s", error)
                self._nursery.close()
        self._nursery = Nursery.spawn("virtaccel.device.isolated.worker", self._backend)
        return _Started(self._nursery, device, self._limits)

    def close(self) -> None:
        """End the nursery and every worker."""
        self._closed = True
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.discard()
        nursery, self._nursery = self._nursery, None
        if nursery is not None:
            nursery.close()


@functools.cache
def _shared(backend: str) -> IsolatingOpener:
    opener = IsolatingOpener(backend)
    atexit.register(opener.close)
    return opener


def open_backend(device: str | None = None) -> Backend:
    """The entry point `isolated`: the backend named by VIRTACCEL_ISOLATED (openvino) in a worker. Raises
    BackendUnavailable."""
    return _shared(os.environ.get("VIRTACCEL_ISOLATED", "openvino"))(device)
