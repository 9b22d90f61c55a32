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
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from virtaccel.backend_openvino.buffers import Buffer
from virtaccel.device.backend import BackendError, Polled
from virtaccel.device.wire import EventState, Status
from virtaccel.tosa_graph.graph import DType

log = logging.getLogger(__name__)

MAX_STOPPING = 32
"""Cancelled or expired submissions whose native work may still run; beyond it nothing new is admitted."""

_SPIN_NS = 40_000
"""A wait looks this long before it sleeps: a sleep and wake-up cost about as much as a small program."""

_UNSTARTED_SECONDS = 0.002
"""How long a wait sleeps at most while nothing of its own has started."""

PENDING = Polled(EventState.PENDING, Status.OK)
COMPLETE = Polled(EventState.COMPLETE, Status.OK)
CANCELLED = Polled(EventState.CANCELLED, Status.OK)
EXPIRED = Polled(EventState.FAILED, Status.DEADLINE_EXPIRED)
BROKEN = Polled(EventState.FAILED, Status.INTERNAL_ERROR)
ENDLESS = Polled(EventState.FAILED, Status.RESOURCE_LIMIT)


Shapes: TypeAlias = tuple[tuple[int, ...], ...]
"""Concrete shapes of a program's inputs, in order."""


class Slot(NamedTuple):
    """A program argument: TOSA type and packed bytes; the model's input and output it is (a VARIABLE that is written is
    both); type and shape of these ports."""

    dtype: DType
    bytes: int
    input: int | None
    output: int | None
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
    """A compiled model with its slots (inputs, outputs, variables) and its conditions. Shared by all programs of the
    same artifact. `steps` is the output that tells how many loop iterations were left, None if there are no loops."""

    def __init__(
        self, model: ov.CompiledModel, slots: Sequence[Slot], guards: Sequence[Guard] = (), steps: int | None = None
    ) -> None:
        self.model = model
        self.slots = tuple(slots)
        self.steps = steps
        self.guards = tuple(guards)
        self.brief = True
        """Whether the latest run waited for ended within a short look; if not, looking takes processors from it."""
        self.requests: weakref.WeakSet[Request] = weakref.WeakSet()

    def at_work(self) -> bool:
        """Whether a run of this model is under way, whoever's: the runtime makes no further request until it ends."""
        return any(request.started and not request.stopped() for request in self.requests)


class Range(NamedTuple):
    """What one slot is bound to."""

    buffer: Buffer
    offset: int


class Request:
    """An infer request and the tensors bound to it, which it keeps alive: the runtime holds bare pointers.

    What is written to a VARIABLE goes to memory of the request's own, and to the buffer when the run is known to be
    complete: the old value may be read until the end, and a run that fails leaves the stream where it was.
    """

    __slots__ = (
        "__weakref__", "_checked", "_outputs", "_steps", "_tensors", "_written", "executable", "infer", "ranges",
        "started",
    )  # fmt: skip

    def __init__(self, executable: Executable) -> None:
        """Blocks while another request of the model runs (`Executable.at_work`)."""
        self.executable = executable
        self.infer = executable.model.create_infer_request()
        self.started = False
        executable.requests.add(self)
        self.ranges: tuple[Range, ...] = ()
        self._tensors: list[ov.Tensor] = []
        self._outputs: list[tuple[int, int]] = []
        self._written: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []
        self._steps = np.ones(1, np.int32)
        self._checked = False

    def bind(self, ranges: tuple[Range, ...]) -> None:
        """Lay the tensors over the buffers. If that fails the request is of no more use."""
        infer = self.infer
        tensors: list[ov.Tensor] = []
        outputs: list[tuple[int, int]] = []
        written: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []
        for slot, (buffer, offset) in zip(self.executable.slots, ranges, strict=True):
            memory = buffer.array[offset : offset + slot.bytes]
            if slot.input is not None:
                tensors.append(ov.Tensor(memory, slot.ov_shape, slot.element))
                infer.set_input_tensor(slot.input, tensors[-1])
            if slot.output is not None:
                if slot.input is not None:
                    target, memory = memory, np.empty(slot.bytes, np.uint8)
                    written.append((target, memory))
                tensors.append(ov.Tensor(memory, slot.ov_shape, slot.element))
                infer.set_output_tensor(slot.output, tensors[-1])
                outputs.append((slot.output, memory.ctypes.data))
        if self.executable.steps is not None:
            tensors.append(ov.Tensor(self._steps, [1], ov.Type.i32))
            infer.set_output_tensor(self.executable.steps, tensors[-1])
            outputs.append((self.executable.steps, self._steps.ctypes.data))
        self.ranges, self._tensors, self._outputs, self._written = ranges, tensors, outputs, written
        self._checked = False

    def wrote_in_place(self) -> bool:
        """Whether the outputs lie in the caller's memory still; looked at once for each binding."""
        if not self._checked:
            self._checked = all(
                self.infer.get_output_tensor(port).data.ctypes.data == address for port, address in self._outputs
            )
        return self._checked

    def ran_out(self) -> bool:
        """Whether a loop was ended before its condition said so."""
        return self.executable.steps is not None and self._steps[0] <= 0

    def keep_variables(self) -> None:
        """The run is complete: what it wrote to variables is what they hold."""
        for target, memory in self._written:
            target[:] = memory

    def stopped(self) -> bool:
        """Whether no native work is left, however it ended."""
        try:
            return bool(self.infer.wait_for(0))
        except RuntimeError:
            return True


class Call:
    """A program's slots bound to certain ranges: checked once, then submitted as often as the guest likes.

    `idle` are requests bound to these ranges, by model. When one of the buffers is freed or the program is unloaded the
    call is dead: idle requests die with it, one at work dies when it ends.
    """

    __slots__ = ("dead", "executable", "idle", "ranges", "readers", "shapes", "sizes", "writers")

    def __init__(
        self, ranges: tuple[Range, ...], sizes: tuple[int, ...], shapes: Shapes, reads: set[Buffer], writes: set[Buffer]
    ) -> None:
        self.ranges = ranges
        self.sizes = sizes
        self.shapes = shapes
        self.readers = tuple(reads - writes)
        self.writers = tuple(writes)
        self.executable: Executable | None = None
        self.idle: dict[Executable, Request] = {}
        self.dead = False
        for buffer in reads | writes:
            buffer.calls.add(self)

    def refused(self) -> bool:
        """Whether running work over one of the buffers stands against running this."""
        for buffer in self.writers:
            if buffer.writer or buffer.readers:
                return True
        return any(buffer.writer for buffer in self.readers)

    def take(self) -> None:
        """Guard the buffers."""
        for buffer in self.readers:
            buffer.readers += 1
        for buffer in self.writers:
            buffer.writer = True

    def release(self) -> None:
        for buffer in self.readers:
            buffer.readers -= 1
        for buffer in self.writers:
            buffer.writer = False

    def finished(self, request: Request) -> None:
        """The native work over these buffers is over."""
        self.release()
        if not self.dead:
            self.idle[request.executable] = request

    def let_go(self) -> None:
        self.dead = True
        self.idle.clear()
        for buffer, _ in self.ranges:
            buffer.calls.discard(self)


class Preparing(Protocol):
    """What gives a submission its request."""

    def prepare(self, call: Call) -> Request | None:
        """A request bound to the call's ranges; None while its model is being made, or while there can be none because
        another run of it goes on. Raises BackendError."""


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


class Stopping(NamedTuple):
    """Native work asked to stop, and what it runs over."""

    request: Request
    call: Call


class Executor:
    """All submissions of one backend. Used by one thread."""

    def __init__(self) -> None:
        self.running: dict[Event, None] = {}
        self._unstarted: dict[Event, None] = {}
        self.stopping: list[Stopping] = []

    def admit(self, event: Event) -> None:
        """Guard the event's buffers and start it, now or when its program has a request for it. Raises BackendError or
        RuntimeError, with nothing kept, if it cannot start."""
        event.call.take()
        try:
            self._start(event)
        except BaseException:
            event.call.release()
            raise
        self.running[event] = None
        if event.request is None:
            self._unstarted[event] = None

    @staticmethod
    def _start(event: Event) -> None:
        request = event.program.prepare(event.call)
        if request is not None:
            request.infer.start_async()
            request.started = True
            event.request = request

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
        """Sleep on what is in flight, up to a time; whether `ready` has something to tell. Only one thing can be slept
        on, so with more than one of them it is a short while on the oldest."""
        started = [event.request for event in self.running if event.request is not None]
        if not started:
            # A model may be in use by another executor, whose work tells nothing here when it ends.
            return bool(select.select([ready], [], [], min(max(nanoseconds, 0) / 1e9, _UNSTARTED_SECONDS))[0])
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
