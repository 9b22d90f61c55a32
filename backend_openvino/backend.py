"""The backend that runs TOSA programs on OpenVINO: virtaccel.device.backend's contract over buffers and submissions.

It translates between the contract's outcomes and what the other files do; sequence and policy are here, mechanism is
there. One instance serves one device and is used by one thread; the OpenVINO core and compiled programs are shared by
all instances of the process.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from collections.abc import Sequence
from typing import Final, TypeVar

from virtaccel.backend_openvino import compile as runtime
from virtaccel.backend_openvino import programs
from virtaccel.backend_openvino.buffers import Arena, Buffer, read, write
from virtaccel.backend_openvino.execution import MAX_STOPPING, PENDING, Event, Executor, quiesce
from virtaccel.backend_openvino.loader import Job, Loader
from virtaccel.backend_openvino.programs import Host, Program, Source, Verdict
from virtaccel.backend_openvino.store import Store
from virtaccel.device.backend import (
    RELEASED,
    Accepted,
    AllocatedBuffer,
    Artifact,
    BackendError,
    Binding,
    BufferRequest,
    DeviceInfo,
    Handle,
    Limits,
    Loaded,
    Loading,
    Polled,
    Rejected,
    ReleaseOutcome,
    ReleaseRejected,
    Segments,
    SubmitOutcome,
)
from virtaccel.device.wire import (
    HARD_MAX_REQUEST_BYTES,
    LOAD_PROGRAM_REQUEST,
    REQUEST_HEADER,
    AcceleratorClass,
    Capability,
    Domain,
    Status,
)
from virtaccel.tosa_graph.target import ARTIFACT_FORMAT

log = logging.getLogger(__name__)

UNBOUNDED: Final = (1 << 64) - 1
"""The only resident_bytes that holds: OpenVINO publishes no bound on what a compiled model keeps."""

LIMITS: Final = Limits(
    max_contexts=64,
    max_buffers_per_context=4096,
    max_programs_per_context=256,
    max_queues_per_context=64,
    max_events_per_context=1024,
    max_bindings_per_submission=1024,
    max_buffer_bytes=4 << 30,
    max_artifact_bytes=HARD_MAX_REQUEST_BYTES - REQUEST_HEADER.size - LOAD_PROGRAM_REQUEST.size,
)
MAX_QUARANTINED_BYTES: Final = 1 << 30
"""Memory of buffers freed while cancelled work still ran over them; beyond it, freeing such a buffer is BUSY."""

_DIGESTED_AT_ONCE: Final = 64 << 10
"""Bytes of an artifact that is looked for among what is loaded within its LOAD_PROGRAM; larger ones would hold up other
commands."""
_EXIT_SECONDS: Final = 3.0

T = TypeVar("T")


class _Context:
    """Parent of the other objects, of which the engine keeps account."""


class _Queue:
    """An execution queue: submissions need no order of their own, so it holds nothing."""


class _Load:
    """A load under way."""

    __slots__ = ("context", "job")

    def __init__(self, context: Handle, job: Job[Source]) -> None:
        self.context = context
        self.job = job


def _as(handle: Handle, kind: type[T]) -> T:
    """The engine hands back what it was given; anything else is a fault of ours, not the guest's."""
    if not isinstance(handle, kind):
        raise TypeError(f"{type(handle).__name__} is not a {kind.__name__}")
    return handle


class OpenVinoBackend:
    """One OpenVINO device, opened for one device instance."""

    def __init__(
        self,
        device: str,
        tuning: runtime.Tuning,
        compiler: programs.Compiler | None = None,
        store: Store | None = None,
    ) -> None:
        self.device = device
        self.host = Host(device, tuning, programs.offered(device), compiler, store)
        self._info = DeviceInfo(
            uuid=runtime.identity(device),
            accelerator_class=runtime.CLASSES.get(device.split(".")[0], AcceleratorClass.OTHER),
            vendor_id=0,
            device_id=0,
            capabilities=Capability.HOST_VISIBLE_MEMORY | Capability.SHARED_MEMORY | Capability.EVENT_CANCELLATION,
            limits=LIMITS,
        )
        self._arena = Arena()
        self._executor = Executor()
        self._loader = Loader(f"virtaccel-load-{device}")
        self._loads: set[_Load] = set()
        self._quarantined: list[Buffer] = []
        self._closed = False
        self.last_refusal: str | None = None
        """Why the latest load failed, for tools on the host."""
        _open.add(self)

    @property
    def info(self) -> DeviceInfo:
        return self._info

    # ---- waiting

    def fileno(self) -> int:
        return self._loader.descriptor

    def acknowledge(self) -> None:
        self._loader.acknowledge()
        self._executor.start_prepared()

    def wait(self, timeout: float) -> None:
        self._executor.wait(timeout, self._loader.descriptor, bool(self._loads))
        if self._loads or self._executor.preparing():
            self.acknowledge()

    def expect_patience(self) -> None:
        """As in device.backend.RunsForItsCaller."""
        self._executor.patient = True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        _open.discard(self)
        _ending.add(self._loader)
        self._loader.close()
        self._loads.clear()
        self._executor.close()
        self._arena.close()

    # ---- contexts, queues

    def create_context(self) -> Handle:
        return _Context()

    def destroy_context(self, context: Handle) -> ReleaseOutcome:
        _as(context, _Context)
        return RELEASED

    def create_queue(self, context: Handle) -> Handle:
        _as(context, _Context)
        return _Queue()

    def destroy_queue(self, queue: Handle) -> ReleaseOutcome:
        _as(queue, _Queue)
        return RELEASED

    # ---- buffers

    def allocate_buffer(self, context: Handle, request: BufferRequest) -> AllocatedBuffer:
        if request.domain == Domain.DEVICE:
            raise BackendError(Status.UNSUPPORTED, "no device-local memory")
        buffer = Buffer(self._arena, _as(context, _Context), request)
        return AllocatedBuffer(buffer, buffer.backing_bytes, max(request.alignment, 1), True)

    def memory(self) -> int:
        """As in device.backend.SharesMemory."""
        self._arena.exposed = True
        return self._arena.descriptor

    def place(self, buffer: Handle) -> int:
        return _as(buffer, Buffer).offset

    def free_buffer(self, buffer: Handle) -> ReleaseOutcome:
        """A buffer over which cancelled work still runs is quarantined: the guest is rid of it, its memory stays."""
        freed = _as(buffer, Buffer)
        if freed.busy(True):
            self._executor.refresh()
        if freed.busy(True):
            self._quarantined = [kept for kept in self._quarantined if kept.busy(True)]
            if sum(kept.bytes for kept in self._quarantined) + freed.bytes > MAX_QUARANTINED_BYTES:
                return ReleaseRejected(Status.BUSY)
            self._quarantined.append(freed)
        freed.drop()
        return RELEASED

    def write_buffer(self, buffer: Handle, offset: int, source: Segments) -> None:
        target = _as(buffer, Buffer)
        self._free_for(target, writes=True)
        write(target, offset, source)

    def read_buffer(self, buffer: Handle, offset: int, sink: Segments) -> None:
        origin = _as(buffer, Buffer)
        self._free_for(origin, writes=False)
        read(origin, offset, sink)

    def _free_for(self, buffer: Buffer, writes: bool) -> None:
        if buffer.busy(writes):
            self._executor.refresh()
            if buffer.busy(writes):
                raise BackendError(Status.BUSY, "a submission uses the buffer")

    # ---- programs

    def load_program(self, context: Handle, artifact: Artifact) -> Loaded | Loading:
        owner = _as(context, _Context)
        if artifact.format != ARTIFACT_FORMAT:
            raise self._refused(BackendError(Status.UNSUPPORTED, f"artifact format {artifact.format:#x}"))
        if artifact.resident_bytes != UNBOUNDED:
            reason = "resident_bytes has to be 2^64-1: OpenVINO publishes no bound"
            raise self._refused(BackendError(Status.RESOURCE_LIMIT, reason))
        payload, words, host = b"".join(artifact.payload), artifact.target, self.host
        key = programs.digest(payload, words, host) if len(payload) <= _DIGESTED_AT_ONCE else None
        known = programs.shared(key) if key is not None else None
        if known is not None:
            return Loaded(self._program(owner, known))
        load = _Load(owner, self._loader.submit(lambda: programs.load(payload, words, host, key)))
        self._loads.add(load)
        return Loading(load)

    def poll_load(self, ticket: Handle) -> Loaded | None:
        load = _as(ticket, _Load)
        if not load.job.done:
            return None
        self._loads.discard(load)
        try:
            return Loaded(self._program(load.context, load.job.result()))
        except BackendError as error:
            raise self._refused(error) from error
        except MemoryError as error:
            raise self._refused(BackendError(Status.OUT_OF_MEMORY, "out of memory while loading")) from error

    def abandon_load(self, ticket: Handle) -> None:
        load = _as(ticket, _Load)
        load.job.abandon()
        self._loads.discard(load)

    def _refused(self, error: BackendError) -> BackendError:
        self.last_refusal = str(error)
        log.warning("program refused (%s): %s", error.status.name, error)
        return error

    def _program(self, context: Handle, source: Source) -> Program:
        return Program(context, source, self._loader.submit)

    def unload_program(self, program: Handle) -> ReleaseOutcome:
        _as(program, Program).unload()
        return RELEASED

    def explain(self, payload: bytes, target: tuple[int, ...] | None = None) -> list[Verdict]:
        """What this device says of each operator of an artifact, for a target or the least that would do. Raises
        BackendError if it is refused as a whole."""
        return programs.explain(payload, target, self.host)

    # ---- submissions

    def submit(self, queue: Handle, program: Handle, bindings: Sequence[Binding], timeout_ns: int) -> SubmitOutcome:
        _as(queue, _Queue)
        chosen = _as(program, Program)
        executor = self._executor
        if executor.stopping:
            executor.reap()
            if len(executor.stopping) >= MAX_STOPPING:
                return Rejected(Status.BUSY)
        try:
            call = chosen.call(bindings)
            if call.refused():
                executor.refresh()
                if call.refused():
                    return Rejected(Status.BUSY)
            event = Event(call, chosen, timeout_ns)
            executor.admit(event)
        except BackendError as error:
            log.info("submission rejected (%s): %s", error.status.name, error)
            return Rejected(error.status)
        except RuntimeError as error:
            log.error("submission failed to start: %s", error)
            return Rejected(Status.INTERNAL_ERROR)
        return Accepted(event)

    def poll_event(self, event: Handle) -> Polled:
        return self._executor.poll(_as(event, Event))

    def cancel_event(self, event: Handle) -> None:
        if not self._executor.cancel(_as(event, Event)):
            raise BackendError(Status.BUSY, "the submission had ended")

    def destroy_event(self, event: Handle) -> ReleaseOutcome:
        if self._executor.poll(_as(event, Event)) is PENDING:
            return ReleaseRejected(Status.BUSY)
        return RELEASED


# ---- the end of the process

_open: weakref.WeakSet[OpenVinoBackend] = weakref.WeakSet()
_ending: weakref.WeakSet[Loader] = weakref.WeakSet()


def shutdown(timeout: float) -> bool:
    """Close every backend of the process and wait for native work to stop, at most `timeout` seconds; whether it has.

    Compiling cannot be stopped. Where this answers False, only os._exit ends the process in time."""
    end = time.monotonic() + timeout
    for backend in list(_open):
        backend.close()
    quiet = quiesce(timeout)
    for loader in list(_ending):
        quiet = loader.join(max(end - time.monotonic(), 0)) and quiet
    return quiet


@atexit.register
def _at_exit() -> None:
    if not shutdown(_EXIT_SECONDS):
        log.critical("native work does not stop; the process ends without it")
        logging.shutdown()
        os._exit(70)
