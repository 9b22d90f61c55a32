"""Submissions: pooled infer requests over guest buffers, events that latch, deadlines, cancellation.

Nothing here blocks except `Executor.wait`. A request is polled with wait_for(0); no callback is registered, since one
in flight aborts the interpreter's exit. Handing work to a thread of the runtime's and hearing of its end costs tens of
microseconds: programs known to be over sooner are run while they are submitted (`_AT_ONCE_NS`), and so are longer ones
of a caller that said it would only wait for its next submission (`Executor.patient`).

After a cancel or an expired deadline the native work is asked to stop, and request, program and buffers stay held until
it has (specification.md 4.9 and 8). Where nobody may wait for that, at close, they are parked; deleting a running
request would block.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from virtaccel.backend_openvino.requests import UNKNOWN_COST, Call, Request
from virtaccel.device.backend import BackendError, Polled
from virtaccel.device.pacing import IN_A_BACKEND
from virtaccel.device.wire import EventState, Status

log = logging.getLogger(__name__)

MAX_STOPPING = 32
"""Cancelled or expired submissions whose native work may still run; beyond it nothing new is admitted."""

_SPIN_NS = int(IN_A_BACKEND.eager * 1e9)

_AT_ONCE_NS = 50_000
"""Programs that take no longer are run within their SUBMIT: about what a command takes that moves a MiB."""

_BY_HAND_NS = 20_000_000
"""The same for a caller that would only wait: until the run ends it cannot look at anything else."""

PENDING = Polled(EventState.PENDING, Status.OK)
COMPLETE = Polled(EventState.COMPLETE, Status.OK)
CANCELLED = Polled(EventState.CANCELLED, Status.OK)
EXPIRED = Polled(EventState.FAILED, Status.DEADLINE_EXPIRED)
BROKEN = Polled(EventState.FAILED, Status.INTERNAL_ERROR)
ENDLESS = Polled(EventState.FAILED, Status.RESOURCE_LIMIT)


class Preparing(Protocol):
    """What gives a submission its request."""

    def prepare(self, call: Call, beside: int) -> Request | None:
        """A request bound to the call's ranges; None while its model is being made, or while there can be none because
        another run of it goes on. `beside` are the other submissions under way. Raises BackendError."""


class Event:
    """One accepted submission. `request` is None while what it needs is still being made, and after the end."""

    __slots__ = ("admitted", "call", "deadline", "program", "request", "state")

    def __init__(self, call: Call, program: Preparing, timeout_ns: int) -> None:
        self.call = call
        self.program = program
        self.admitted = time.monotonic_ns() if timeout_ns else 0
        self.deadline = self.admitted + timeout_ns if timeout_ns else 0
        self.request: Request | None = None
        self.state = PENDING


def _begin(event: Event, request: Request) -> None:
    """Hand it to the runtime's threads. Raises RuntimeError."""
    request.infer.start_async()
    request.started = True
    event.request = request


class Stopping(NamedTuple):
    """Native work asked to stop, and what it runs over."""

    request: Request
    call: Call


class Executor:
    """All submissions of one backend. Used by one thread."""

    def __init__(self) -> None:
        self.running: dict[Event, None] = {}
        self._unstarted: dict[Event, None] = {}
        self.patient = False
        """The caller will wait for what it submits next, and do nothing before."""
        self.stopping: list[Stopping] = []

    def admit(self, event: Event) -> None:
        """Guard the event's buffers and start it, now or when its program has a request for it. Raises BackendError or
        RuntimeError, with nothing kept, if it cannot start."""
        patient, self.patient = self.patient, False
        event.call.take()
        try:
            request = event.program.prepare(event.call, len(self.running))
            cost = request.executable.cost if request is not None else UNKNOWN_COST
            longest = _BY_HAND_NS if patient and not (self.running or event.deadline) else _AT_ONCE_NS
            if request is not None and cost > longest:
                _begin(event, request)
        except BaseException:
            event.call.release()
            raise
        if request is not None and cost <= longest:
            self._run(event, request)
            return
        self.running[event] = None
        if request is None:
            self._unstarted[event] = None

    def _start(self, event: Event) -> None:
        request = event.program.prepare(event.call, max(len(self.running) - 1, 1))  # it was counted when it came
        if request is not None:
            _begin(event, request)

    def _run(self, event: Event, request: Request) -> None:
        """Run it here and now, to its end."""
        event.request = request
        begin = time.monotonic_ns()
        try:
            request.run()
        except RuntimeError as error:
            log.error("execution failed: %s", error)
            self._end(event, BROKEN)
            return
        request.executable.took(time.monotonic_ns() - begin)
        self._end(event, self._verdict(event, request))

    def poll(self, event: Event) -> Polled:
        """State of the event; terminal ones stay."""
        if event.state is not PENDING:
            return event.state
        request = event.request
        if request is None:
            return self._poll_unstarted(event)
        try:
            ended = request.infer.wait_for(0)
        except RuntimeError as error:
            log.error("execution failed: %s", error)
            return self._end(event, BROKEN)
        if ended:
            request.executable.took(int(request.infer.latency * 1e6))
            state = self._end(event, self._verdict(event, request))
            if self._unstarted:
                self.start_prepared()
            return state
        if event.deadline and time.monotonic_ns() >= event.deadline:
            return self._abort(event, request, EXPIRED)
        return PENDING

    def _poll_unstarted(self, event: Event) -> Polled:
        if event.deadline and time.monotonic_ns() >= event.deadline:
            return self._end(event, EXPIRED)
        try:
            self._start(event)
        except BackendError as error:
            log.info("submission failed before it ran: %s", error)
            return self._end(event, Polled(EventState.FAILED, error.status))
        except RuntimeError as error:
            log.error("submission failed before it ran: %s", error)
            return self._end(event, BROKEN)
        if event.request is not None:
            self._unstarted.pop(event, None)
        return PENDING

    @staticmethod
    def _verdict(event: Event, request: Request) -> Polled:
        if not request.wrote_in_place():
            log.error("the runtime did not write into the caller's memory")
            return BROKEN
        # It may have ended long before this look: the runtime's own measure says when.
        if event.deadline and event.admitted + int(request.infer.latency * 1e6) >= event.deadline:
            return EXPIRED
        if request.ran_out():
            log.warning("a loop was ended after too many iterations")
            return ENDLESS
        request.keep_variables()
        return COMPLETE

    def _end(self, event: Event, state: Polled) -> Polled:
        """The native work is over: latch the state, give guards and request back."""
        event.state = state
        self.running.pop(event, None)
        self._unstarted.pop(event, None)
        request, event.request = event.request, None
        if request is not None:
            event.call.finished(request)
        else:
            event.call.release()
        return state

    def _abort(self, event: Event, request: Request, state: Polled) -> Polled:
        """Latch the state now; guards and request go back when the native work has stopped."""
        request.infer.cancel()
        event.state = state
        event.request = None
        self.running.pop(event, None)
        self.stopping.append(Stopping(request, event.call))
        return state

    def cancel(self, event: Event) -> bool:
        """Cancel a pending event at once; False if it had ended."""
        if self.poll(event) is not PENDING:
            return False
        if event.request is None:
            self._end(event, CANCELLED)
        else:
            self._abort(event, event.request, CANCELLED)
        return True

    def reap(self) -> None:
        """Let go of aborted work that has stopped by now."""
        if self.stopping:
            self.stopping = [entry for entry in self.stopping if not _reaped(entry)]

    def start_prepared(self) -> None:
        """Start what has become ready to run."""
        for event in list(self._unstarted):
            if event.request is None and event.state is PENDING:
                self._poll_unstarted(event)

    def refresh(self) -> None:
        """Look at everything in flight, for guards that may be released."""
        self.reap()
        for event in list(self.running):
            self.poll(event)

    def wait(self, timeout: float, ready: int, loading: bool) -> None:
        """Block until a submission may have ended or started, at most `timeout` seconds. `ready` is the descriptor that
        tells of finished preparations, and of loads if there are any (`loading`)."""
        if not (self.running or loading):
            return
        now = time.monotonic_ns()
        end = now + int(timeout * 1e9)
        spin = min(end, now + _SPIN_NS)
        request = next(iter(self.running)).request if len(self.running) == 1 and not loading else None
        if request is not None and request.executable.brief:
            while time.monotonic_ns() < spin:
                if request.stopped():
                    return
        self._await_news(now, end, ready, loading)
        if request is not None:
            request.executable.brief = time.monotonic_ns() - now < _SPIN_NS

    def _await_news(self, now: int, end: int, ready: int, loading: bool) -> None:
        while not self._news():
            now = time.monotonic_ns()
            if now >= end or not (self.running or loading):
                return
            if self._sleep(min([end, *self._deadlines()]) - now, ready, loading):
                return

    def preparing(self) -> bool:
        """Whether a submission waits for its program to be made ready."""
        return bool(self._unstarted)

    def _deadlines(self) -> list[int]:
        return [event.deadline for event in self.running if event.deadline]

    def _news(self) -> bool:
        """Whether anything has ended since the last look. What has is latched, so it is news only once, even if nobody
        polls it."""
        before = len(self.running)
        for event in list(self.running):
            self.poll(event)
        return len(self.running) != before

    def _sleep(self, nanoseconds: int, ready: int, loading: bool) -> bool:
        """Sleep on what is in flight, up to a time; whether there is news. Only one thing can be slept on, so with more
        than one of them it is a short while on the oldest."""
        oldest = next((event for event in self.running if event.request is not None), None)
        if oldest is None or oldest.request is None:
            # A model may be in use by another executor, whose work tells nothing here when it ends.
            return bool(select.select([ready], [], [], min(max(nanoseconds, 0) / 1e9, IN_A_BACKEND.longest))[0])
        alone = len(self.running) == 1 and not loading
        try:
            ended = oldest.request.infer.wait_for(max(nanoseconds // 1_000_000, 1) if alone else 1)
        except RuntimeError:
            ended = True
        if ended:
            self.poll(oldest)
            return True
        return (loading or bool(self._unstarted)) and bool(select.select([ready], [], [], 0)[0])

    def close(self) -> None:
        """Cancel everything; what has not stopped at once is parked."""
        for event in list(self.running):
            self.cancel(event)
        self.reap()
        if self.stopping:
            log.warning("%d cancelled submissions are still running; their memory is kept", len(self.stopping))
            _park(self.stopping)
            self.stopping = []


def _reaped(entry: Stopping) -> bool:
    if not entry.request.stopped():
        return False
    entry.call.finished(entry.request)
    return True


# ---- work that outlives its backend

_parked: list[Stopping] = []
_parking = threading.Lock()


def _park(entries: Sequence[Stopping]) -> None:
    """Keep running work and its memory until it has stopped: a short-lived thread looks after it."""
    with _parking:
        idle = not _parked
        _parked.extend(entries)
    if idle:
        threading.Thread(target=quiesce, name="virtaccel-parked", daemon=True).start()


def _sweep() -> int:
    with _parking:
        _parked[:] = [entry for entry in _parked if not _reaped(entry)]
        return len(_parked)


def quiesce(timeout: float | None = None) -> bool:
    """Wait until no work is left that outlived its backend, at most `timeout` seconds; whether none is."""
    end = None if timeout is None else time.monotonic() + timeout
    while _sweep():
        if end is not None and time.monotonic() >= end:
            return False
        time.sleep(0.005)
    return True
