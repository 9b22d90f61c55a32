"""Workers on demand: a fork server for each kind of backend, and the next worker made ready when one has been lost.

Opens IsolatedBackends. Knows how processes are started and nothing of the contract's calls.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from virtaccel.device.backend import ANY_OPTION, NO_OPTIONS, Backend, BackendUnavailable, Option
from virtaccel.device.isolated.backend import IsolatedBackend
from virtaccel.device.isolated.completion_page import CompletionPage
from virtaccel.device.isolated.messages import ProtocolError
from virtaccel.processes.fork_server import Child, ForkServer, ForkServerLost

log = logging.getLogger(__name__)

READY_SECONDS: Final = 60.0
"""How long a worker may take to open its backend; a runtime may have to be read from disk first."""
_SOCKET_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What a worker may have. `memory` is private writable memory in bytes (0: no limit); `confined`: system calls that
    no inference needs are refused to it. `defaults` are options for its backend where it has such and nobody says
    otherwise."""

    memory: int = 0
    confined: bool = True
    defaults: Mapping[str, str] = field(default_factory=lambda: {"compile": "sandbox"})


class _Started:
    """A worker that has been asked for and may not be ready yet."""

    def __init__(
        self, fork_server: ForkServer, device: str | None, options: Mapping[str, str], limits: WorkerLimits
    ) -> None:
        self.asked = device, dict(options)
        self.page = CompletionPage()
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = {
            "device": device,
            "memory": limits.memory,
            "confined": limits.confined,
            "options": dict(options),
            "defaults": dict(limits.defaults),
        }
        try:
            for end in (self.connection, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            handed = [theirs.fileno(), self.page.descriptor]
            self.child: Child = fork_server.start(json.dumps(settings).encode(), handed)
        except BaseException:
            self.connection.close()
            self.page.close()
            raise
        finally:
            theirs.close()

    def ready(self, lost: Callable[[], None]) -> IsolatedBackend:
        """Wait for it. Raises BackendUnavailable; the worker is gone then."""
        try:
            return IsolatedBackend(self.connection, self.child, self.page, READY_SECONDS, lost)
        except (ProtocolError, OSError) as error:
            raise BackendUnavailable(str(error) or "the worker does not start") from error

    def discard(self) -> None:
        self.child.close()
        self.connection.close()
        self.page.close()


class WorkerLauncher:
    """Opens the backend called `backend` in workers. One fork server serves all of them."""

    def __init__(self, backend: str, limits: WorkerLimits | None = None) -> None:
        self._backend = backend
        self._limits = limits if limits is not None else WorkerLimits()
        self._fork_server: ForkServer | None = None
        self._spare: _Started | None = None
        self._closed = False

    @property
    def fork_server(self) -> ForkServer | None:
        return self._fork_server

    def __call__(self, device: str | None = None, options: Mapping[str, str] = NO_OPTIONS) -> Backend:
        """A fresh worker, or the one that was made ready. Raises BackendUnavailable."""
        lost = functools.partial(self.make_ready, device, options)
        spare, self._spare = self._spare, None
        if spare is not None and spare.asked == (device, dict(options)):
            with contextlib.suppress(BackendUnavailable):
                return spare.ready(lost)
        elif spare is not None:
            spare.discard()
        try:
            return self._start(device, options).ready(lost)
        except (ForkServerLost, OSError) as error:
            raise BackendUnavailable(f"no worker can be started: {error}") from error

    def make_ready(self, device: str | None = None, options: Mapping[str, str] = NO_OPTIONS) -> None:
        """Start a worker for a coming call, as one was lost. Never waits and never fails."""
        if self._spare is None and not self._closed:
            with contextlib.suppress(ForkServerLost, OSError):
                self._spare = self._start(device, options)

    def _start(self, device: str | None, options: Mapping[str, str]) -> _Started:
        if self._fork_server is not None:
            try:
                return _Started(self._fork_server, device, options, self._limits)
            except ForkServerLost as error:
                log.warning("starting another fork server: %s", error)
                self._fork_server.close()
        self._fork_server = ForkServer.spawn("virtaccel.device.isolated.worker", self._backend)
        return _Started(self._fork_server, device, options, self._limits)

    def close(self) -> None:
        """End the fork server and every worker."""
        self._closed = True
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.discard()
        fork_server, self._fork_server = self._fork_server, None
        if fork_server is not None:
            fork_server.close()


@functools.cache
def _shared(backend: str) -> WorkerLauncher:
    opener = WorkerLauncher(backend)
    atexit.register(opener.close)
    return opener


OPTIONS: Final = (
    Option("backend", "the backend that runs in a worker", "openvino"),
    Option(ANY_OPTION, "what that backend knows"),
)


def open_backend(device: str | None = None, options: Mapping[str, str] = NO_OPTIONS) -> Backend:
    """The entry point `isolated`: another backend in a worker. Raises BackendUnavailable."""
    passed = dict(options)
    return _shared(passed.pop("backend", OPTIONS[0].default))(device, passed)
