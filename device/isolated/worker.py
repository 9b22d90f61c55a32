"""The worker: a backend behind a socket, for a daemon that runs no native code itself.

Carries out one request after another and, in between, notes on the completion page which submissions have ended, so
that asking for them costs the daemon nothing. While something runs the worker looks at it often at first and ever less
often later, at most a millisecond apart, and at requests at once. Knows the contract, not the backend. The daemon is
trusted: what it sends has been checked by the engine.
"""

from __future__ import annotations

import array
import contextlib
import json
import logging
import mmap
import os
import select
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, cast

from virtaccel.device import installed
from virtaccel.device.backend import (
    Artifact,
    Backend,
    BackendError,
    BackendUnavailable,
    Binding,
    BufferRequest,
    Handle,
    Indeterminate,
    Loaded,
    OpenBackend,
    Rejected,
    Released,
    ReleaseOutcome,
    ReleaseRejected,
    SharesMemory,
)
from virtaccel.device.isolated import messages
from virtaccel.device.isolated.completion_page import CompletionPage, Ending
from virtaccel.device.isolated.messages import ANSWER, Answer, Greeting, Kind, Op, Outcome
from virtaccel.device.pacing import WORKER, Pace
from virtaccel.device.wire import EventState, Status
from virtaccel.processes import confine
from virtaccel.processes.fork_server import Run

log = logging.getLogger(__name__)

_A_FEW: Final = 16
"""Requests served between two looks at the backend's own descriptor, while they come without a pause."""
_DONE: Final = ANSWER.pack(Kind.REPLY, Outcome.DONE, 0, 0, 0, 0, 0)
_NEWS: Final = ANSWER.pack(Kind.NEWS, 0, 0, 0, 0, 0, 0)
_STOPS_LATER: Final = frozenset((int(Status.DEADLINE_EXPIRED),))


def prepare(words: Sequence[str]) -> Run:
    """For a fork server of workers: import the backend called `words[0]` and what it says it needs. A module whose
    backend starts no thread by being imported may offer `preload`, which imports the rest."""
    name = words[0]
    try:
        opener = installed.find(name)
        preload: Callable[[], None] | None = getattr(sys.modules[opener.__module__], "preload", None)
        if preload is not None:
            preload()
    except (BackendUnavailable, ImportError) as error:
        reason = str(error)
        return lambda work, descriptors: _decline(descriptors, reason)
    return lambda work, descriptors: _work(opener, work, descriptors)


def _decline(descriptors: list[int], reason: str) -> int:
    socket.socket(fileno=descriptors[0]).send(messages.unavailable(reason))
    return 1


def _work(opener: OpenBackend, work: bytes, descriptors: list[int]) -> int:
    """Life of a worker: open the backend, be confined, serve."""
    settings: dict[str, Any] = json.loads(work)
    sys.setswitchinterval(0.0005)  # a load beside it must not hold up the answers
    connection = socket.socket(fileno=descriptors[0])
    try:
        options = installed.with_defaults(opener, settings["options"], settings["defaults"])
        backend = opener(settings["device"], options)
    except (BackendUnavailable, BackendError) as error:
        return _decline(descriptors, str(error))
    if not callable(getattr(backend, "place", None)):
        return _decline(descriptors, "this backend's buffers cannot be shared with another process")
    confine.limit(memory=settings["memory"])
    device = getattr(backend, "device", None)
    if settings["confined"] and not (isinstance(device, str) and device != "CPU"):  # other devices are opened by path
        confine.filter_calls(files=True)
    confine.quick_sleeps()
    with contextlib.suppress(ConnectionError, EOFError):
        Server(connection, CompletionPage(descriptors[1]), backend).run()
    return 0  # native work that still runs ends with the process


class _Running(NamedTuple):
    """A submission that has not ended. Before `due` it is not worth looking at."""

    slot: int
    turn: int
    event: Handle
    since: float
    pace: Pace
    due: float


class Server:
    """One backend for one daemon."""

    def __init__(self, connection: socket.socket, page: CompletionPage, backend: Backend) -> None:
        self._connection = connection
        self._page = page
        self._backend = backend
        self._shared = cast(SharesMemory, backend)
        self._objects: dict[int, Handle] = {}
        self._loads: dict[int, Handle] = {}
        self._running: dict[int, _Running] = {}
        self._paces: defaultdict[int, Pace] = defaultdict(Pace)
        """Of each program that has run."""
        self._looked_last = 0.0
        self._releases_program = self._releaser(backend.unload_program)
        self._kept: dict[int, Handle] = {}
        self._descriptors: list[int] = []
        self._ready = backend.fileno()
        self._handlers: dict[int, Callable[[bytes], bytes | None]] = {
            Op.CREATE_CONTEXT: self._create_context,
            Op.DESTROY_CONTEXT: self._releaser(backend.destroy_context),
            Op.CREATE_QUEUE: self._create_queue,
            Op.DESTROY_QUEUE: self._releaser(backend.destroy_queue),
            Op.ALLOCATE_BUFFER: self._allocate_buffer,
            Op.FREE_BUFFER: self._releaser(backend.free_buffer),
            Op.IN_USE: self._in_use,
            Op.LOAD_PROGRAM: self._load_program,
            Op.ABANDON_LOAD: self._abandon_load,
            Op.UNLOAD_PROGRAM: self._unload_program,
            Op.SUBMIT: self._submit,
            Op.CANCEL_EVENT: self._cancel_event,
            Op.DESTROY_EVENT: self._destroy_event,
        }

    def run(self) -> None:
        """Until the daemon has gone, which raises ConnectionError or EOFError."""
        greeting = Greeting(self._backend.info, getattr(self._backend, "device", None)).pack()
        rights = array.array("i", [self._shared.memory()])
        self._connection.sendmsg([greeting], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        self._connection.setblocking(False)
        watched = [self._connection.fileno()] + ([] if self._ready is None else [self._ready])
        served = 0
        while True:
            if self._looked():
                served += 1
                if served % _A_FEW:
                    continue
            readable = select.select(watched, [], [], self._rest())[0]
            if self._ready is not None and self._ready in readable:
                self._backend.acknowledge()
                self._end_loads()
            if watched[0] in readable:
                self._serve_one()
            if self._running:
                self._look()

    def _looked(self) -> bool:
        """Look at what runs for as long as a small program takes, before sleeping; whether a request came meanwhile."""
        if not self._running:
            return False
        oldest = next(iter(self._running.values()))
        if oldest.due - oldest.since > WORKER.eager:
            return False
        until = oldest.since + WORKER.eager
        while time.monotonic() < until:
            self._look()
            if self._serve_one():
                return True
            if not self._running:
                return False
        return False

    def _rest(self) -> float | None:
        """How long to sleep: until the oldest submission may have ended, if runs of its program have told when; and the
        longer it runs the longer, up to a millisecond."""
        if not self._running:
            return None
        now, oldest = time.monotonic(), next(iter(self._running.values()))
        rest = WORKER.rest(now - oldest.since)
        return max(rest, oldest.due - now) if len(self._running) == 1 else rest

    def _serve_one(self) -> bool:
        """Answer one request, if there is one."""
        try:
            data, ancillary, _, _ = self._connection.recvmsg(messages.MAX_MESSAGE, 64, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        if not data:
            raise EOFError
        for _, _, content in ancillary:
            self._descriptors = list(array.array("i", content))
        try:
            reply = self._handlers[data[0]](data)
        except BackendError as error:
            reply = Answer(Kind.REPLY, Outcome.REFUSED, error.status, text=str(error)).pack()
        except Exception as error:  # outside the contract: the daemon has to know that nothing is known
            log.exception("the backend failed")
            reply = Answer(Kind.REPLY, Outcome.BROKEN, text=repr(error)).pack()
        self._send(_DONE if reply is None else reply)
        return True

    def _send(self, message: bytes) -> None:
        try:
            self._connection.send(message)
        except BlockingIOError:  # the daemon reads nothing: it is not to be overrun
            select.select([], [self._connection], [])
            self._connection.send(message)

    # ---- objects

    def _releaser(self, release: Callable[[Handle], ReleaseOutcome]) -> Callable[[bytes], bytes | None]:
        def handle(data: bytes) -> bytes | None:
            _, number, _ = messages.OBJECT.unpack(data)
            outcome = release(self._objects[number])
            if not isinstance(outcome, ReleaseRejected):
                del self._objects[number]
            return _told(outcome)

        return handle

    def _create_context(self, data: bytes) -> None:
        _, number, _ = messages.OBJECT.unpack(data)
        self._objects[number] = self._backend.create_context()

    def _create_queue(self, data: bytes) -> None:
        _, number, context = messages.OBJECT.unpack(data)
        self._objects[number] = self._backend.create_queue(self._objects[context])

    def _allocate_buffer(self, data: bytes) -> bytes:
        _, number, context, *wanted = messages.ALLOCATE.unpack(data)
        made = self._backend.allocate_buffer(self._objects[context], BufferRequest(*wanted))
        self._objects[number] = made.handle
        place = self._shared.place(made.handle)
        return Answer(
            Kind.REPLY, Outcome.DONE, 0, place, made.allocation_bytes, made.alignment, made.direct
        ).pack()  # fmt: skip

    def _in_use(self, data: bytes) -> None:
        """An empty transfer is refused exactly when a whole one would be."""
        _, number, writes = messages.OBJECT.unpack(data)
        if writes:
            self._backend.write_buffer(self._objects[number], 0, ())
        else:
            self._backend.read_buffer(self._objects[number], 0, ())

    # ---- programs

    def _load_program(self, data: bytes) -> bytes | None:
        _, number, context, form, *rest = messages.LOAD.unpack(data)
        target, (payload_bytes, resident_bytes) = tuple(rest[:12]), rest[12:]
        descriptors, self._descriptors = self._descriptors, []
        with contextlib.ExitStack() as opened:
            for descriptor in descriptors:
                opened.callback(os.close, descriptor)
            mapped = mmap.mmap(descriptors[0], payload_bytes, prot=mmap.PROT_READ) if payload_bytes else b""
            payload = memoryview(mapped)
            try:
                artifact = Artifact(form, target, [payload], payload_bytes, resident_bytes)
                outcome = self._backend.load_program(self._objects[context], artifact)
            finally:
                payload.release()
                if isinstance(mapped, mmap.mmap):
                    mapped.close()
        if isinstance(outcome, Loaded):
            self._objects[number] = outcome.program
            return None
        self._loads[number] = outcome.ticket
        return Answer(Kind.REPLY, Outcome.UNDER_WAY).pack()

    def _end_loads(self) -> None:
        for number, ticket in list(self._loads.items()):
            try:
                loaded = self._backend.poll_load(ticket)
            except BackendError as error:
                ended = Answer(Kind.LOAD_ENDED, Outcome.REFUSED, error.status, number, text=str(error))
            except Exception as error:
                log.exception("the backend failed")
                ended = Answer(Kind.LOAD_ENDED, Outcome.BROKEN, 0, number, text=repr(error))
            else:
                if loaded is None:
                    continue
                self._objects[number] = loaded.program
                ended = Answer(Kind.LOAD_ENDED, Outcome.DONE, 0, number)
            del self._loads[number]
            self._send(ended.pack())

    def _unload_program(self, data: bytes) -> bytes | None:
        _, number, _ = messages.OBJECT.unpack(data)
        self._paces.pop(number, None)
        return self._releases_program(data)

    def _abandon_load(self, data: bytes) -> None:
        """It may have ended while the request was on its way: then the program goes."""
        _, number, _ = messages.OBJECT.unpack(data)
        if number in self._loads:
            self._backend.abandon_load(self._loads.pop(number))
        elif number in self._objects:
            self._backend.unload_program(self._objects.pop(number))

    # ---- submissions

    def _submit(self, data: bytes) -> bytes | None:
        _, queue, program, slot, turn, deadline, count = messages.SUBMIT.unpack_from(data)
        objects = self._objects
        bindings = [
            Binding(objects[number], *rest)
            for number, *rest in messages.BINDING.iter_unpack(memoryview(data)[messages.SUBMIT.size :])
        ]
        if len(bindings) != count:
            raise ValueError(f"{len(bindings)} bindings instead of {count}")
        timeout = max(deadline - time.monotonic_ns(), 1) if deadline else 0
        outcome = self._backend.submit(objects[queue], objects[program], bindings, timeout)
        if isinstance(outcome, Rejected):
            return Answer(Kind.REPLY, Outcome.REFUSED, outcome.status).pack()
        now = time.monotonic()
        pace = self._paces[program]
        due = now + pace.seconds
        if deadline:
            due = min(due, deadline / 1e9)
        running = self._running[slot] = _Running(slot, turn, outcome.event, now, pace, due)
        self._look_at(running)  # a small program is over by now, and the daemon may be asked at once
        if isinstance(outcome, Indeterminate):
            return Answer(Kind.REPLY, Outcome.DOUBTFUL, outcome.status).pack()
        return None

    def _look(self) -> None:
        """Note what has ended. Its event is given back at once: the daemon knows all there is to know."""
        for running in list(self._running.values()):
            self._look_at(running)
        self._looked_last = time.monotonic()

    def _look_at(self, running: _Running) -> None:
        polled = self._backend.poll_event(running.event)
        if polled.state != EventState.PENDING:
            self._note(running, int(polled.state), int(polled.error))

    def _note(self, running: _Running, state: int, error: int) -> None:
        slot, turn, event, since, pace, due = running
        del self._running[slot]
        pace.learn(due - since, self._looked_last - since)
        released = isinstance(self._backend.destroy_event(event), Released)
        if not released:
            self._kept[slot] = event
        settled = state != EventState.CANCELLED and error not in _STOPS_LATER
        if self._page.note(slot, turn, Ending(state, error, released, settled)):
            self._send(_NEWS)

    def _cancel_event(self, data: bytes) -> bytes | None:
        _, slot, turn = messages.EVENT.unpack(data)
        running = self._running.get(slot)
        if running is None or running.turn != turn:
            return Answer(Kind.REPLY, Outcome.REFUSED, Status.BUSY).pack()  # completion won
        self._backend.cancel_event(running.event)
        self._look_at(running)
        return None

    def _destroy_event(self, data: bytes) -> bytes | None:
        """Only for an event that the backend did not give up at once."""
        _, slot, _ = messages.EVENT.unpack(data)
        outcome = self._backend.destroy_event(self._kept[slot])
        if not isinstance(outcome, ReleaseRejected):
            del self._kept[slot]
        return _told(outcome)


def _told(outcome: ReleaseOutcome) -> bytes | None:
    """The reply to a release; None is done."""
    if isinstance(outcome, Released):
        return None
    kind = Outcome.REFUSED if isinstance(outcome, ReleaseRejected) else Outcome.DOUBTFUL
    return Answer(Kind.REPLY, kind, outcome.status).pack()

