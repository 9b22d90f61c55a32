"""Submissions: pooled infer requests over guest buffers, events that latch, deadlines, cancellation.

Nothing here blocks except `Executor.wait`. A request is polled with wait_for(0); no callback is registered, since one
in flight aborts the interpreter's exit. After a cancel or an expired deadline the native work is asked to stop, and
request, program and buffers stay held until it has (specification.md 4.9 and 8). Where nobody may wait for that, at
close, they are parked; deleting a running request would block.
"""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import openvino as ov

from virtaccel.backend_openvino.buffers import Buffer, Hold
from virtaccel.device.backend import BackendError, Polled
from virtaccel.device.wire import EventState, Status
from virtaccel.tosa_graph.graph import DType

log = logging.getLogger(__name__)

MAX_STOPPING = 32
"""Cancelled or expired submissions whose native work may still run; beyond it nothing new is admitted."""

_SPIN_NS = 40_000
"""A wait looks this long before it sleeps: a sleep and wake-up cost about as much as a small program."""

PENDING = Polled(EventState.PENDING, Status.OK)
COMPLETE = Polled(EventState.COMPLETE, Status.OK)
CANCELLED = Polled(EventState.CANCELLED, Status.OK)
EXPIRED = Polled(EventState.FAILED, Status.DEADLINE_EXPIRED)
BROKEN = Polled(EventState.FAILED, Status.INTERNAL_ERROR)


class Slot(NamedTuple):
    """A program argument: TOSA type and packed bytes; whether it is an output; type and shape of the model's port."""

    dtype: DType
    bytes: int
    is_output: bool
    element: ov.Type
    ov_shape: ov.Shape


class Guard(NamedTuple):
    """What an input has to be for the model to hold: as integers of type `word`, masked with `magnitude` (all but the
    sign bit), none of its elements is above `largest`."""

    slot: int
    bytes: int
    word: np.dtype[Any]
    magnitude: Any
    largest: int


class Executable:
    """A compiled model with its slots (inputs, then outputs) and its conditions. Shared by all programs of the same
    artifact."""

    def __init__(self, model: ov.CompiledModel, slots: Sequence[Slot], guards: Sequence[Guard] = ()) -> None:
        self.model = model
        self.slots = tuple(slots)
        self.inputs = sum(not slot.is_output for slot in slots)
        self.guards = tuple(guards)


class Range(NamedTuple):
    """What one slot is bound to."""

    buffer: Buffer
    offset: int


class Request:
    """An infer request with the tensors bound to it last, which it keeps alive: the runtime holds bare pointers."""

    def __init__(self, executable: Executable, pool: list[Request]) -> None:
        self.executable = executable
        self.infer = executable.model.create_infer_request()
        self.bound: tuple[Range, ...] = ()
        self.pool: list[Request] | None = pool
        self._tensors: list[ov.Tensor] = []
        self._checked = False

    def bind(self, ranges: tuple[Range, ...]) -> None:
        """Lay the tensors over the buffers, unless they lie there already."""
        if ranges == self.bound:
            return
        self.unbind()
        executable, infer = self.executable, self.infer
        for index, (slot, (buffer, offset)) in enumerate(zip(executable.slots, ranges, strict=True)):
            tensor = ov.Tensor(buffer.array[offset : offset + slot.bytes], slot.ov_shape, slot.element)
            if slot.is_output:
                infer.set_output_tensor(index - executable.inputs, tensor)
            else:
                infer.set_input_tensor(index, tensor)
            self._tensors.append(tensor)
            buffer.requests.add(self)
        self.bound = ranges

    def wrote_in_place(self) -> bool:
        """Whether the outputs lie in the caller's memory still; looked at once for each binding."""
        if not self._checked:
            first = self.executable.inputs
            self._checked = all(
                self.infer.get_output_tensor(index).data.ctypes.data == buffer.address + offset
                for index, (buffer, offset) in enumerate(self.bound[first:])
            )
        return self._checked

    def unbind(self) -> None:
        """Forget the buffers. The runtime's pointers dangle until the next `bind`, and nothing starts before that."""
        for buffer, _ in self.bound:
            buffer.requests.discard(self)
        self.bound = ()
        self._tensors = []
        self._checked = False

    def forget(self) -> None:
        """One of the buffers is freed. Idle, the request leaves its pool and dies; at work, it is let go at its end."""
        if self.pool is not None and self in self.pool:
            self.pool.remove(self)
            self.unbind()

    def stopped(self) -> bool:
        """Whether no native work is left, however it ended."""
        try:
            return bool(self.infer.wait_for(0))
        except RuntimeError:
            return True


class Event:
    """One accepted submission. `request` is None while what it needs is still being made, and after the end."""

    __slots__ = ("admitted", "deadline", "hold", "prepare", "ranges", "request", "shapes", "sizes", "state")

    def __init__(
        self,
        hold: Hold,
        ranges: tuple[Range, ...],
        sizes: tuple[int, ...],
        shapes: tuple[tuple[int, ...], ...],
        admitted: int,
        timeout_ns: int,
    ) -> None:
        self.hold = hold
        self.ranges = ranges
        self.sizes = sizes
        self.shapes = shapes
        self.admitted = admitted
        self.deadline = admitted + timeout_ns if timeout_ns else 0
        self.request: Request | None = None
        self.prepare: Callable[[Event], bool] | None = None
        self.state = PENDING


class Stopping(NamedTuple):
    """Native work asked to stop, and what it holds."""

    request: Request
    hold: Hold


class Executor:
    """All submissions of one backend. Used by one thread."""

    def __init__(self) -> None:
        self.running: dict[Event, None] = {}
        self.stopping: list[Stopping] = []

    def admit(self, event: Event, prepare: Callable[[Event], bool]) -> None:
        """Take the event's guards and start it as soon as `prepare` has given it a request (it answers False while that
        takes longer). Raises RuntimeError, with nothing kept, if it cannot start."""
        event.hold.take()
        event.prepare = prepare
        self.running[event] = None
        try:
            self._start(event)
        except BaseException:
            del self.running[event]
            event.hold.release()
            raise

    def _start(self, event: Event) -> None:
        prepare = event.prepare
        if prepare is None or not prepare(event):
            return
        event.prepare = None
        request = event.request
        if request is None:
            raise RuntimeError("prepared without a request")
        try:
            request.bind(event.ranges)
            request.infer.start_async()
        except BaseException:
            request.unbind()
            event.request = None
            raise

    def poll(self, event: Event) -> Polled:
        """State of the event; terminal ones stay."""
        if event.state is not PENDING:
            return event.state
        if event.prepare is not None and not self._expired(event):
            try:
                self._start(event)
            except BackendError as error:
                log.info("submission failed before it ran: %s", error)
                return self._end(event, Polled(EventState.FAILED, error.status))
            except RuntimeError as error:
                log.error("submission failed before it ran: %s", error)
                return self._end(event, BROKEN)
        request = event.request
        if request is None:
            return self._end(event, EXPIRED) if self._expired(event) else PENDING
        try:
            ended = request.infer.wait_for(0)
        except RuntimeError as error:
            log.error("execution failed: %s", error)
            return self._end(event, BROKEN)
        if ended:
            return self._end(event, self._verdict(event, request))
        if self._expired(event):
            return self._abort(event, request, EXPIRED)
        return PENDING

    @staticmethod
    def _expired(event: Event) -> bool:
        return event.deadline != 0 and time.monotonic_ns() >= event.deadline

    def _verdict(self, event: Event, request: Request) -> Polled:
        if not request.wrote_in_place():
            log.error("the runtime did not write into the caller's memory")
            return BROKEN
        # It may have ended long before this look: the runtime's own measure says when.
        if self._expired(event) and event.admitted + int(request.infer.latency * 1e6) >= event.deadline:
            return EXPIRED
        return COMPLETE

    def _end(self, event: Event, state: Polled) -> Polled:
        """The native work is over: latch the state, give guards and request back."""
        event.state = state
        event.prepare = None
        self.running.pop(event, None)
        event.hold.release()
        request, event.request = event.request, None
        if request is not None:
            _recycle(request)
        return state

    def _abort(self, event: Event, request: Request, state: Polled) -> Polled:
        """Latch the state now; guards and request go back when the native work has stopped."""
        request.infer.cancel()
        event.state = state
        event.request = None
        self.running.pop(event, None)
        self.stopping.append(Stopping(request, event.hold))
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
        for event in list(self.running):
            if event.prepare is not None:
                self.poll(event)

    def refresh(self) -> None:
        """Look at everything in flight, for guards that may be released."""
        self.reap()
        for event in list(self.running):
            self.poll(event)

    def wait(self, timeout: float, ready: int, loading: bool) -> None:
        """Block until a submission may have ended or started, at most `timeout` seconds. `ready` is the descriptor that
        tells of finished preparations, and of loads if there are any (`loading`)."""
        now = time.monotonic_ns()
        end = now + int(timeout * 1e9)
        spin = min(end, now + _SPIN_NS)
        while not self._news():
            now = time.monotonic_ns()
            if now >= end or not (self.running or loading):
                return
            if now >= spin and self._sleep(min([end, *self._deadlines()]) - now, ready, loading):
                return

    def _deadlines(self) -> list[int]:
        return [event.deadline for event in self.running if event.deadline]

    def _news(self) -> bool:
        return any(event.request is not None and event.request.stopped() for event in self.running) or any(
            deadline <= time.monotonic_ns() for deadline in self._deadlines()
        )

    def _sleep(self, nanoseconds: int, ready: int, loading: bool) -> bool:
        """Sleep on what is in flight, up to a time; whether `ready` has something to tell. Only one thing can be slept
        on, so with more than one of them it is a short while on the oldest."""
        started = [event.request for event in self.running if event.request is not None]
        if not started:
            return bool(select.select([ready], [], [], max(nanoseconds, 0) / 1e9)[0])
        alone = len(started) == len(self.running) == 1 and not loading
        with contextlib.suppress(RuntimeError):
            started[0].infer.wait_for(max(nanoseconds // 1_000_000, 1) if alone else 1)
        return not alone and bool(select.select([ready], [], [], 0)[0])

    def close(self) -> None:
        """Cancel everything; what has not stopped at once is parked."""
        for event in list(self.running):
            self.cancel(event)
        self.reap()
        if self.stopping:
            log.warning("%d cancelled submissions are still running; their memory is kept", len(self.stopping))
            _park(self.stopping)
            self.stopping = []


def _recycle(request: Request) -> None:
    """Back to its pool; a request whose program or one of whose buffers is gone is let go instead."""
    if request.pool is None or any(buffer.freed for buffer, _ in request.bound):
        request.unbind()
    else:
        request.pool.append(request)


def _reaped(entry: Stopping) -> bool:
    if not entry.request.stopped():
        return False
    entry.hold.release()
    _recycle(entry.request)
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
