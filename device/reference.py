"""A small in-memory backend: the readable definition of the contract in backend.py, and what tests reach outcomes with.

It computes for real, on bytes, in the memory that it allocated: programs in a tiny format of its own combine their
inputs bytewise into their outputs. A `Script` decides when submissions and loads end and which calls go wrong, so that
each outcome of the contract can be had on demand. Knows no wire bytes and no object IDs. Not an accelerator: for real
programs there is another backend.
"""

from __future__ import annotations

import os
import select
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from mmap import PAGESIZE, mmap
from struct import Struct
from typing import Final, NamedTuple, TypeAlias, TypeVar

from virtaccel.device.backend import (
    NO_OPTIONS,
    RELEASED,
    Accepted,
    AllocatedBuffer,
    Artifact,
    BackendError,
    Binding,
    BufferRequest,
    DeviceInfo,
    Handle,
    Indeterminate,
    Limits,
    Loaded,
    Loading,
    Polled,
    Rejected,
    ReleaseIndeterminate,
    ReleaseOutcome,
    ReleaseRejected,
    Segments,
    SubmitOutcome,
    option_values,
)
from virtaccel.device.wire import AcceleratorClass, Access, Capability, EventState, Status

FORMAT: Final = 0x46455256
"""Artifact format of the reference programs: "VREF" as a little-endian word. Target words are ignored."""

ARTIFACT: Final = Struct("<4sBBBBB3x")
"""Magic "VREF", operation, operand, counts of inputs, outputs and states; 12 bytes."""

CAPABILITIES: Final = (
    Capability.HOST_VISIBLE_MEMORY
    | Capability.DEVICE_LOCAL_MEMORY
    | Capability.EVENT_CANCELLATION
    | Capability.SHARED_MEMORY
)

INFO: Final = DeviceInfo(
    uuid=b"virtaccel-refer.",
    accelerator_class=AcceleratorClass.OTHER,
    vendor_id=0,
    device_id=0,
    capabilities=CAPABILITIES,
    limits=Limits(
        max_contexts=64,
        max_buffers_per_context=1024,
        max_programs_per_context=256,
        max_queues_per_context=16,
        max_events_per_context=4096,
        max_bindings_per_submission=256,
        max_buffer_bytes=256 << 20,
        max_artifact_bytes=16 << 20,
    ),
)


class Operation(IntEnum):
    """What a program does to each byte: of all its inputs and states together, then with the operand."""

    IDENTITY = 0
    XOR = 1
    ADD = 2


class Program(NamedTuple):
    """Slots: inputs 0..N-1, outputs N.., then states, which are read and then written. All bindings of one submission
    have the same number of bytes; each output and state receives the result."""

    operation: int
    operand: int
    inputs: int
    outputs: int
    states: int

    def pack(self) -> bytes:
        """The artifact."""
        return ARTIFACT.pack(b"VREF", *self)

    def access(self, slot: int) -> int:
        """How `slot` has to be bound."""
        if slot < self.inputs:
            return Access.READ
        return Access.WRITE if slot < self.inputs + self.outputs else Access.READ_WRITE

    def run(self, operands: Sequence[bytes]) -> bytes:
        """The result for `operands`, the bytes of inputs and states in slot order."""
        if self.operation == Operation.XOR:
            return bytes(_fold(column, self.operand, xor=True) for column in zip(*operands, strict=True))
        if self.operation == Operation.ADD:
            return bytes(_fold(column, self.operand, xor=False) for column in zip(*operands, strict=True))
        return operands[0]


def _fold(column: Sequence[int], operand: int, *, xor: bool) -> int:
    for value in column:
        operand = operand ^ value if xor else operand + value & 0xFF
    return operand


def read_program(payload: bytes) -> Program:
    """The program in a reference artifact. Raises INVALID_ARGUMENT, or INCOMPATIBLE for an unknown operation."""
    if len(payload) != ARTIFACT.size or payload[:4] != b"VREF" or any(payload[9:]):
        raise BackendError(Status.INVALID_ARGUMENT, "no reference program")
    program = Program(*ARTIFACT.unpack(payload)[1:])
    if program.operation not in set(Operation):
        raise BackendError(Status.INCOMPATIBLE, f"operation {program.operation}")
    if not program.inputs + program.states or not program.outputs + program.states:
        raise BackendError(Status.INVALID_ARGUMENT, "a program reads and writes something")
    return program


ProgramReader: TypeAlias = Callable[[bytes], Program]


# Faults: what a scripted call does instead of, or besides, its work.


class Refuse(NamedTuple):
    """Nothing happens and `status` is reported: raised, or as a rejected submission or release."""

    status: Status


class Doubt(NamedTuple):
    """A submission or a release ends as indeterminate. The submission's event stays pending and cannot be cancelled."""

    status: Status


class Inflate(NamedTuple):
    """An allocation reports this many bytes more than it would."""

    bytes: int


class Break(NamedTuple):
    """The call raises something that the contract does not allow."""

    error: Exception


Fault: TypeAlias = Refuse | Doubt | Inflate | Break


@dataclass
class Script:
    """What tests control. `immediate`: submissions end within `submit`; otherwise when `Reference.complete` says so.
    `deferred_loads`: loads end when `Reference.finish_load` says so. `faults` are used up one per call, by the name of
    the method. `lost`: every call raises DEVICE_LOST. `calls` records the names of methods called, newest last."""

    immediate: bool = True
    deferred_loads: bool = False
    finite_timeouts_expire: bool = False
    lost: bool = False
    faults: dict[str, deque[Fault]] = field(default_factory=lambda: defaultdict(deque))
    calls: deque[str] = field(default_factory=lambda: deque(maxlen=10_000))

    def next(self, method: str, *faults: Fault) -> None:
        """The coming calls of `method` meet `faults`, one each."""
        self.faults[method].extend(faults)


# Handles


@dataclass(eq=False)
class _Context:
    children: int = 0


@dataclass(eq=False)
class _Buffer:
    context: _Context
    memory: mmap
    readers: int = 0
    writers: int = 0


@dataclass(eq=False)
class _Program:
    context: _Context
    program: Program


@dataclass(eq=False)
class _Queue:
    context: _Context


@dataclass(eq=False)
class _Load:
    context: _Context
    result: Program | BackendError
    finished: bool = False


@dataclass(eq=False)
class _Event:
    queue: _Queue
    program: Program
    bindings: tuple[Binding, ...]
    state: EventState = EventState.PENDING
    error: Status = Status.OK
    doubtful: bool = False


T = TypeVar("T")


class Reference:
    """The backend. `readers` maps further artifact formats to functions that make a Program of their payload."""

    def __init__(
        self,
        info: DeviceInfo = INFO,
        script: Script | None = None,
        readers: Mapping[int, ProgramReader] | None = None,
    ) -> None:
        self._info = info
        self.script = script if script is not None else Script()
        self.readers: dict[int, ProgramReader] = {FORMAT: read_program, **(readers or {})}
        self.pending: list[_Event] = []  # oldest first
        self.loading: list[_Load] = []
        self.live = 0  # handles given out and not given back
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def info(self) -> DeviceInfo:
        return self._info

    # Script controls

    def complete(self, count: int | None = None, error: Status = Status.OK) -> None:
        """Let the oldest `count` pending submissions (all if None) run, or fail with `error`."""
        for event in self.pending[:count]:
            self._finish(event, error)

    def finish_load(self, count: int | None = None) -> None:
        """Let the oldest `count` loads (all if None) end."""
        for load in self.loading[:count]:
            load.finished = True
        self._wake_up()

    # Waiting

    def fileno(self) -> int | None:
        return self._wake

    def acknowledge(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return

    def wait(self, timeout: float) -> None:
        select.select([self._wake], [], [], timeout)
        self.acknowledge()

    def close(self) -> None:
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    # Contexts, buffers

    def create_context(self) -> Handle:
        self._enter("create_context")
        return self._born(_Context())

    def destroy_context(self, context: Handle) -> ReleaseOutcome:
        return self._release("destroy_context", _as(context, _Context), busy=_as(context, _Context).children > 0)

    def allocate_buffer(self, context: Handle, request: BufferRequest) -> AllocatedBuffer:
        fault = self._enter("allocate_buffer")
        if request.alignment > PAGESIZE:
            raise BackendError(Status.UNSUPPORTED, f"alignment {request.alignment}")
        try:
            memory = mmap(-1, request.bytes)
        except (OSError, OverflowError) as error:
            raise BackendError(Status.OUT_OF_MEMORY, str(error)) from error
        pages = -(-request.bytes // PAGESIZE) * PAGESIZE
        extra = fault.bytes if isinstance(fault, Inflate) else 0
        buffer = self._born(_Buffer(_as(context, _Context), memory))
        return AllocatedBuffer(buffer, pages + extra, PAGESIZE, direct=True)

    def free_buffer(self, buffer: Handle) -> ReleaseOutcome:
        target = _as(buffer, _Buffer)
        outcome = self._release("free_buffer", target, busy=bool(target.readers or target.writers))
        if outcome is RELEASED:
            target.memory.close()
        return outcome

    def write_buffer(self, buffer: Handle, offset: int, source: Segments) -> None:
        self._enter("write_buffer")
        target = _as(buffer, _Buffer)
        if target.readers or target.writers:
            raise BackendError(Status.BUSY, "a submission uses the buffer")
        for piece in source:
            target.memory[offset : offset + len(piece)] = piece
            offset += len(piece)

    def read_buffer(self, buffer: Handle, offset: int, sink: Segments) -> None:
        self._enter("read_buffer")
        target = _as(buffer, _Buffer)
        if target.writers:
            raise BackendError(Status.BUSY, "a submission writes the buffer")
        with memoryview(target.memory) as memory:
            for piece in sink:
                piece[:] = memory[offset : offset + len(piece)]
                offset += len(piece)

    # Programs and queues

    def load_program(self, context: Handle, artifact: Artifact) -> Loaded | Loading:
        self._enter("load_program")
        reader = self.readers.get(artifact.format)
        if reader is None:
            raise BackendError(Status.UNSUPPORTED, f"artifact format {artifact.format:#x}")
        payload = b"".join(artifact.payload)
        owner = _as(context, _Context)
        if not self.script.deferred_loads:
            return Loaded(self._born(_Program(owner, reader(payload))))
        load = _Load(owner, _attempt(reader, payload))
        self.loading.append(self._born(load))
        return Loading(load)

    def poll_load(self, ticket: Handle) -> Loaded | None:
        self._enter("poll_load")
        load = _as(ticket, _Load)
        if not load.finished:
            return None
        self._forget_load(load)
        if isinstance(load.result, BackendError):
            raise load.result
        return Loaded(self._born(_Program(load.context, load.result)))

    def abandon_load(self, ticket: Handle) -> None:
        self._enter("abandon_load")
        self._forget_load(_as(ticket, _Load))

    def unload_program(self, program: Handle) -> ReleaseOutcome:
        return self._release("unload_program", _as(program, _Program))

    def create_queue(self, context: Handle) -> Handle:
        self._enter("create_queue")
        return self._born(_Queue(_as(context, _Context)))

    def destroy_queue(self, queue: Handle) -> ReleaseOutcome:
        return self._release("destroy_queue", _as(queue, _Queue))

    # Submissions

    def submit(self, queue: Handle, program: Handle, bindings: Sequence[Binding], timeout_ns: int) -> SubmitOutcome:
        try:
            fault = self._enter("submit")
        except BackendError as error:
            return Rejected(error.status)
        if timeout_ns and self.script.finite_timeouts_expire:
            return Rejected(Status.DEADLINE_EXPIRED)
        plan = _as(program, _Program).program
        refusal = _judge_bindings(plan, bindings)
        if refusal is not Status.OK:
            return Rejected(refusal)
        event = self._born(_Event(_as(queue, _Queue), plan, tuple(bindings)))
        for buffer, access in _uses(event):
            buffer.readers += access == Access.READ
            buffer.writers += access != Access.READ
        self.pending.append(event)
        if isinstance(fault, Doubt):
            event.doubtful = True
            return Indeterminate(event, fault.status)
        if self.script.immediate:
            self._finish(event)
        return Accepted(event)

    def poll_event(self, event: Handle) -> Polled:
        self._enter("poll_event")
        target = _as(event, _Event)
        return Polled(target.state, target.error)

    def cancel_event(self, event: Handle) -> None:
        self._enter("cancel_event")
        target = _as(event, _Event)
        if target.state is not EventState.PENDING or target.doubtful:
            raise BackendError(Status.BUSY, "completion won, or nobody knows")
        self._end(target, EventState.CANCELLED, Status.OK)

    def destroy_event(self, event: Handle) -> ReleaseOutcome:
        return self._release("destroy_event", _as(event, _Event))

    # The inside

    def _enter(self, method: str) -> Fault | None:
        """Every call begins here: record it, meet its fault."""
        self.script.calls.append(method)
        if self.script.lost:
            raise BackendError(Status.DEVICE_LOST, "scripted loss")
        faults = self.script.faults.get(method)
        fault = faults.popleft() if faults else None
        if isinstance(fault, Refuse):
            raise BackendError(fault.status, "scripted refusal")
        if isinstance(fault, Break):
            raise fault.error
        return fault

    def _release(self, method: str, handle: object, *, busy: bool = False) -> ReleaseOutcome:
        try:
            fault = self._enter(method)
        except BackendError as error:
            return ReleaseRejected(error.status)
        if isinstance(fault, Doubt):
            return ReleaseIndeterminate(fault.status)
        if busy:
            return ReleaseRejected(Status.BUSY)
        self._gone(handle)
        return RELEASED

    def _born(self, handle: T) -> T:
        self.live += 1
        context = getattr(handle, "context", None)
        if context is not None:
            context.children += 1
        return handle

    def _gone(self, handle: object) -> None:
        self.live -= 1
        context = getattr(handle, "context", None)
        if context is not None:
            context.children -= 1

    def _forget_load(self, load: _Load) -> None:
        self.loading.remove(load)
        self._gone(load)

    def _finish(self, event: _Event, error: Status = Status.OK) -> None:
        if error is Status.OK:
            self._run(event)
        self._end(event, EventState.FAILED if error else EventState.COMPLETE, error)

    def _run(self, event: _Event) -> None:
        """The program's work, on the buffers themselves: all operands are read before anything is written."""
        by_slot = sorted(event.bindings, key=lambda binding: binding.slot)
        reads = [binding for binding in by_slot if binding.access != Access.WRITE]
        result = event.program.run([_memory(b)[b.offset : b.offset + b.bytes] for b in reads])
        for binding in by_slot:
            if binding.access != Access.READ:
                _memory(binding)[binding.offset : binding.offset + binding.bytes] = result

    def _end(self, event: _Event, state: EventState, error: Status) -> None:
        event.state, event.error, event.doubtful = state, error, False
        self.pending.remove(event)
        for buffer, access in _uses(event):
            buffer.readers -= access == Access.READ
            buffer.writers -= access != Access.READ
        self._wake_up()

    def _wake_up(self) -> None:
        os.eventfd_write(self._wake, 1)


def _as(handle: Handle, kind: type[T]) -> T:
    """A handle of another kind means a broken engine, not a broken guest."""
    if not isinstance(handle, kind):
        raise TypeError(f"{handle!r} is no {kind.__name__}")
    return handle


def _memory(binding: Binding) -> mmap:
    return _as(binding.buffer, _Buffer).memory


def _uses(event: _Event) -> list[tuple[_Buffer, int]]:
    return [(_as(binding.buffer, _Buffer), binding.access) for binding in event.bindings]


def _attempt(reader: ProgramReader, payload: bytes) -> Program | BackendError:
    try:
        return reader(payload)
    except BackendError as error:
        return error


def _judge_bindings(program: Program, bindings: Sequence[Binding]) -> Status:
    """Whether `bindings` fit `program` and its buffers are free: many readers or one writer."""
    slots = program.inputs + program.outputs + program.states
    if {binding.slot for binding in bindings} != set(range(slots)):
        return Status.INVALID_ARGUMENT
    if any(binding.access != program.access(binding.slot) for binding in bindings):
        return Status.INVALID_ARGUMENT
    if len({binding.bytes for binding in bindings}) != 1:
        return Status.INCOMPATIBLE
    writes = [binding.buffer for binding in bindings if binding.access != Access.READ]
    for binding in bindings:
        buffer = _as(binding.buffer, _Buffer)
        shared = sum(other.buffer is buffer for other in bindings) > 1
        if buffer.writers or (buffer in writes and (buffer.readers or shared)):
            return Status.BUSY
    return Status.OK


def open_backend(device: str | None = None, options: Mapping[str, str] = NO_OPTIONS) -> Reference:
    """The entry point: a backend that ends every submission within SUBMIT. It has one device and no use for a name."""
    option_values("reference", (), options)
    return Reference()
