"""A witness between engine and backend: does the engine keep its half of the contract (device/backend.py)?

Passes every call on and remembers what is alive: handles are used only while they live, released once, children before
parents, ranges inside, a terminal event before it is destroyed, and nothing at all after ownership was lost. A breach
is remembered, not raised, since the engine would take an exception for a fault of the backend.
"""

from __future__ import annotations

from collections.abc import Sequence

from virtaccel.device.backend import (
    Accepted,
    AllocatedBuffer,
    Artifact,
    Backend,
    BackendError,
    Binding,
    BufferRequest,
    DeviceInfo,
    Handle,
    Indeterminate,
    Loaded,
    Loading,
    Polled,
    Rejected,
    Released,
    ReleaseIndeterminate,
    ReleaseOutcome,
    Segments,
    SubmitOutcome,
)
from virtaccel.device.wire import EventState, Status


class _Live:
    """A handle given out. `users` counts live children of a context and undestroyed events of anything else."""

    __slots__ = ("bytes", "context", "handle", "kind", "terminal", "users", "uses")

    def __init__(self, kind: str, handle: Handle, context: _Live | None = None, size: int = 0) -> None:
        self.kind = kind
        self.handle = handle
        self.context = context
        self.bytes = size
        self.users = 0
        self.terminal = False
        self.uses: tuple[_Live, ...] = ()


class ContractChecker:
    """A Backend around a Backend."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.breach: str | None = None
        self.calls = 0
        self.live: dict[int, _Live] = {}
        self.lost = False
        self.closed = False

    # -- remembering

    def _blame(self, what: str) -> None:
        if self.breach is None:
            self.breach = what

    def _use(self, handle: Handle, kind: str) -> _Live:
        self.calls += 1
        if self.lost or self.closed:
            self._blame(f"a {kind} was used after the backend was {'closed' if self.closed else 'lost'}")
        found = self.live.get(id(handle))
        if found is None or found.kind != kind:
            self._blame(f"a {kind} was used that is not alive")
            return _Live(kind, handle)
        return found

    def _born(self, kind: str, handle: Handle, context: _Live | None = None, size: int = 0) -> _Live:
        made = _Live(kind, handle, context, size)
        self.live[id(handle)] = made
        if context is not None:
            context.users += 1
        return made

    def _gone(self, one: _Live) -> None:
        self.live.pop(id(one.handle), None)
        if one.context is not None:
            one.context.users -= 1
        for used in one.uses:
            used.users -= 1

    def _release(self, one: _Live, outcome: ReleaseOutcome) -> ReleaseOutcome:
        if isinstance(outcome, Released):
            self._gone(one)
        elif isinstance(outcome, ReleaseIndeterminate) or outcome.status is Status.DEVICE_LOST:
            self.lost = True
        return outcome

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, BackendError) or error.status is Status.DEVICE_LOST:
            self.lost = True

    # -- the contract, method by method

    @property
    def info(self) -> DeviceInfo:
        return self.backend.info

    def fileno(self) -> int | None:
        return self.backend.fileno()

    def acknowledge(self) -> None:
        self.backend.acknowledge()

    def wait(self, timeout: float) -> None:
        self.backend.wait(timeout)

    def close(self) -> None:
        if self.closed:
            self._blame("the backend was closed twice")
        self.closed = True
        self.backend.close()

    def create_context(self) -> Handle:
        self.calls += 1
        try:
            handle = self.backend.create_context()
        except Exception as error:
            self._failed(error)
            raise
        self._born("context", handle)
        return handle

    def destroy_context(self, context: Handle) -> ReleaseOutcome:
        one = self._use(context, "context")
        if one.users:
            self._blame(f"a context was destroyed with {one.users} children")
        return self._released(one, "destroy_context")

    def allocate_buffer(self, context: Handle, request: BufferRequest) -> AllocatedBuffer:
        owner = self._use(context, "context")
        if (
            request.bytes < 1
            or request.alignment.bit_count() != 1
            or not request.usage
            or request.domain not in (1, 2, 3)
        ):
            self._blame(f"an unchecked allocation reached the backend: {request}")
        try:
            made = self.backend.allocate_buffer(context, request)
        except Exception as error:
            self._failed(error)
            raise
        self._born("buffer", made.handle, owner, request.bytes)
        return made

    def free_buffer(self, buffer: Handle) -> ReleaseOutcome:
        return self._released(self._use_free(buffer, "buffer"), "free_buffer")

    def _use_free(self, handle: Handle, kind: str) -> _Live:
        one = self._use(handle, kind)
        if one.users:
            self._blame(f"a {kind} was released that {one.users} events hold")
        return one

    def _released(self, one: _Live, method: str) -> ReleaseOutcome:
        try:
            outcome: ReleaseOutcome = getattr(self.backend, method)(one.handle)
        except Exception as error:
            self._failed(error)
            raise
        return self._release(one, outcome)

    def write_buffer(self, buffer: Handle, offset: int, source: Segments) -> None:
        self._transfer(buffer, offset, source, "write_buffer")

    def read_buffer(self, buffer: Handle, offset: int, sink: Segments) -> None:
        self._transfer(buffer, offset, sink, "read_buffer")

    def _transfer(self, buffer: Handle, offset: int, pieces: Segments, method: str) -> None:
        one = self._use(buffer, "buffer")
        if offset < 0 or offset + sum(map(len, pieces)) > one.bytes:
            self._blame(f"{method} outside the buffer")
        try:
            getattr(self.backend, method)(buffer, offset, pieces)
        except Exception as error:
            self._failed(error)
            raise

    def load_program(self, context: Handle, artifact: Artifact) -> Loaded | Loading:
        owner = self._use(context, "context")
        if sum(map(len, artifact.payload)) != artifact.payload_bytes or not artifact.resident_bytes:
            self._blame("an artifact's length is not that of its payload")
        try:
            outcome = self.backend.load_program(context, artifact)
        except Exception as error:
            self._failed(error)
            raise
        if isinstance(outcome, Loaded):
            self._born("program", outcome.program, owner)
        else:
            self._born("load", outcome.ticket, owner)
        return outcome

    def poll_load(self, ticket: Handle) -> Loaded | None:
        one = self._use(ticket, "load")
        try:
            loaded = self.backend.poll_load(ticket)
        except Exception as error:
            self._failed(error)
            self._gone(one)
            raise
        if loaded is not None:
            self._gone(one)
            self._born("program", loaded.program, one.context)
        return loaded

    def abandon_load(self, ticket: Handle) -> None:
        one = self._use(ticket, "load")
        self.backend.abandon_load(ticket)
        self._gone(one)

    def unload_program(self, program: Handle) -> ReleaseOutcome:
        return self._released(self._use_free(program, "program"), "unload_program")

    def create_queue(self, context: Handle) -> Handle:
        owner = self._use(context, "context")
        try:
            handle = self.backend.create_queue(context)
        except Exception as error:
            self._failed(error)
            raise
        self._born("queue", handle, owner)
        return handle

    def destroy_queue(self, queue: Handle) -> ReleaseOutcome:
        return self._released(self._use_free(queue, "queue"), "destroy_queue")

    def submit(self, queue: Handle, program: Handle, bindings: Sequence[Binding], timeout_ns: int) -> SubmitOutcome:
        on, what = self._use(queue, "queue"), self._use(program, "program")
        uses = [on, what]
        for binding in bindings:
            buffer = self._use(binding.buffer, "buffer")
            if binding.bytes < 1 or binding.offset < 0 or binding.offset + binding.bytes > buffer.bytes:
                self._blame("a binding outside its buffer reached the backend")
            uses.append(buffer)
        if any(one.context is not on.context for one in uses):
            self._blame("objects of two contexts were submitted together")
        if len({binding.slot for binding in bindings}) != len(bindings) or not bindings:
            self._blame("a slot was submitted twice")
        try:
            outcome = self.backend.submit(queue, program, bindings, timeout_ns)
        except Exception as error:
            self._failed(error)
            raise
        if isinstance(outcome, (Accepted, Indeterminate)):
            event = self._born("event", outcome.event, on.context)
            event.uses = tuple(uses)
            for one in uses:
                one.users += 1
        if isinstance(outcome, (Rejected, Indeterminate)) and outcome.status is Status.DEVICE_LOST:
            self.lost = True
        return outcome

    def poll_event(self, event: Handle) -> Polled:
        one = self._use(event, "event")
        try:
            polled = self.backend.poll_event(event)
        except Exception as error:
            self._failed(error)
            raise
        one.terminal = polled.state is not EventState.PENDING
        return polled

    def cancel_event(self, event: Handle) -> None:
        one = self._use(event, "event")
        if one.terminal:
            self._blame("an event known to be terminal was cancelled")
        try:
            self.backend.cancel_event(event)
        except Exception as error:
            self._failed(error)
            raise
        one.terminal = True

    def destroy_event(self, event: Handle) -> ReleaseOutcome:
        one = self._use(event, "event")
        if not one.terminal:
            self._blame("an event was destroyed that was not known to be terminal")
        return self._released(one, "destroy_event")
