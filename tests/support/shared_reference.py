"""The reference backend with its buffers in one file, so that it can be run in a worker, and with ways to fail there.

Its programs' operand says what the worker does instead of running them; the worker has no other ear for a test. What
goes wrong is real: the process does abort, hang or end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from mmap import PAGESIZE, mmap

from virtaccel.device.backend import (
    NO_OPTIONS,
    AllocatedBuffer,
    Artifact,
    Backend,
    BackendError,
    BackendUnavailable,
    Binding,
    BufferRequest,
    Handle,
    Loaded,
    Loading,
    ReleaseIndeterminate,
    ReleaseOutcome,
    SubmitOutcome,
)
from virtaccel.device.reference import Doubt, Reference, Refuse, Script, _Buffer, _Event, _Program
from virtaccel.device.wire import Status
from virtaccel.processes.sealed import sealed_file

ABORT, HANG, LEAVE, BREAK, LOSE, DOUBT, PEND, LINGER = range(0xF0, 0xF8)
"""Operands. PEND: stays pending until cancelled; LINGER: so too, and after the cancel its buffers stay in use."""
SLOW_LOAD = 0xE0
"""Operand of a program whose load goes on until it is abandoned."""
LATE_LOAD = 0xE1
"""Operand of a program whose load ends a moment later."""


class SharedReference(Reference):
    """See above. `limbo` are buffers of cancelled work that goes on."""

    def __init__(self) -> None:
        super().__init__(script=Script())
        self._file = sealed_file("virtaccel-reference")
        self._grown = 0
        self._places: dict[int, int] = {}
        self._limbo: set[int] = set()
        self._queues_released = 0

    def memory(self) -> int:
        return self._file

    def place(self, buffer: Handle) -> int:
        return self._places[id(buffer)]

    def allocate_buffer(self, context: Handle, request: BufferRequest) -> AllocatedBuffer:
        made = super().allocate_buffer(context, request)
        assert isinstance(made.handle, _Buffer)
        made.handle.memory.close()
        os.ftruncate(self._file, self._grown + made.allocation_bytes)
        made.handle.memory = mmap(self._file, made.allocation_bytes, offset=self._grown)
        self._places[id(made.handle)] = self._grown
        self._grown += -(-made.allocation_bytes // PAGESIZE) * PAGESIZE
        return made

    def write_buffer(self, buffer: Handle, offset: int, source: Sequence[memoryview]) -> None:
        self._not_in_limbo(buffer)
        super().write_buffer(buffer, offset, source)

    def read_buffer(self, buffer: Handle, offset: int, sink: Sequence[memoryview]) -> None:
        self._not_in_limbo(buffer)
        super().read_buffer(buffer, offset, sink)

    def _not_in_limbo(self, buffer: Handle) -> None:
        if id(buffer) in self._limbo:
            raise BackendError(Status.BUSY, "cancelled work goes on")

    def load_program(self, context: Handle, artifact: Artifact) -> Loaded | Loading:
        operand = b"".join(artifact.payload)[5]
        self.script.deferred_loads = operand in (SLOW_LOAD, LATE_LOAD)
        outcome = super().load_program(context, artifact)
        if operand == LATE_LOAD:
            self.finish_load()
        return outcome

    def submit(self, queue: Handle, program: Handle, bindings: Sequence[Binding], timeout_ns: int) -> SubmitOutcome:
        assert isinstance(program, _Program)
        operand = program.program.operand
        if operand == ABORT:
            os.abort()
        if operand == LEAVE:
            os._exit(3)
        if operand == HANG:
            time.sleep(1000)
        if operand == BREAK:
            raise RuntimeError("broken by the test")
        if operand == LOSE:
            self.script.next("submit", Refuse(Status.DEVICE_LOST))
        if operand == DOUBT:
            self.script.next("submit", Doubt(Status.INTERNAL_ERROR))
        self.script.immediate = operand not in (PEND, LINGER)
        return super().submit(queue, program, bindings, timeout_ns)

    def cancel_event(self, event: Handle) -> None:
        super().cancel_event(event)
        assert isinstance(event, _Event)
        if event.program.operand == LINGER:
            self._limbo |= {id(binding.buffer) for binding in event.bindings}

    def destroy_queue(self, queue: Handle) -> ReleaseOutcome:
        """The second queue's release cannot be told."""
        self._queues_released += 1
        if self._queues_released == 2:
            return ReleaseIndeterminate(Status.INTERNAL_ERROR)
        return super().destroy_queue(queue)

    def free_buffer(self, buffer: Handle) -> ReleaseOutcome:
        self._limbo.discard(id(buffer))
        return super().free_buffer(buffer)


def open_backend(device: str | None = None, options: Mapping[str, str] = NO_OPTIONS) -> Backend:
    """For a worker: `shared_reference:open_backend`. The device names say how opening goes wrong."""
    if device == "none":
        raise BackendUnavailable("there is no such device")
    if device == "crash":
        os.abort()
    return SharedReference()


def open_private(device: str | None = None, options: Mapping[str, str] = NO_OPTIONS) -> Backend:
    """A backend whose buffers nobody else can reach."""
    return Reference()
