"""The 15 commands of protocol 1.0, one handler each, and the table that names them (wire-abi.md, section 5).

Knows what each command means for objects and backend (specification.md, sections 4, 7 and 8), and nothing of frames:
the engine has already judged the request's bytes and the room for its response. A handler first resolves IDs and
compares contexts, then looks at quotas, usage and ranges, and only then calls the backend, so that whatever it refuses
has changed nothing. It returns the payload of an OK response, or one of the outcomes below. Raises CommandError,
BackendError or NeedsReset.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

from virtaccel.device import decode, wire
from virtaccel.device.backend import (
    Accepted,
    AllocatedBuffer,
    Artifact,
    BackendError,
    Binding,
    BufferRequest,
    Loaded,
    Polled,
    Rejected,
    Released,
    ReleaseOutcome,
    ReleaseRejected,
)
from virtaccel.device.config import pack_device_info
from virtaccel.device.errors import CommandError, NeedsReset
from virtaccel.device.state import Buffer, Context, Event, Load, Program, Queue, State, Submission
from virtaccel.device.wire import Access, Capability, Domain, EventState, Opcode, Status, Usage
from virtaccel.virtqueue.segments import Chain, window

HEADER_BYTES: Final = wire.RESPONSE_HEADER.size
_DATA_AT: Final = wire.REQUEST_HEADER.size + wire.TRANSFER_BUFFER_REQUEST.size
_ARTIFACT_AT: Final = wire.REQUEST_HEADER.size + wire.LOAD_PROGRAM_REQUEST.size

DOMAIN_CAPABILITY: Final = {
    int(Domain.HOST): int(Capability.HOST_VISIBLE_MEMORY),
    int(Domain.DEVICE): int(Capability.DEVICE_LOCAL_MEMORY),
    int(Domain.SHARED): int(Capability.SHARED_MEMORY),
}
CANCELLATION: Final = int(Capability.EVENT_CANCELLATION)
TRANSFER_SOURCE: Final = int(Usage.TRANSFER_SOURCE)
TRANSFER_DESTINATION: Final = int(Usage.TRANSFER_DESTINATION)
BOUND_BY_PROGRAMS: Final = int(Usage.PROGRAM_INPUT | Usage.PROGRAM_OUTPUT | Usage.MUTABLE_STATE)
# Any one of these usages admits a binding of that access (specification.md 4.7).
ADMITTING_USAGE: Final = {
    int(Access.READ): int(Usage.PROGRAM_INPUT | Usage.MUTABLE_STATE),
    int(Access.WRITE): int(Usage.PROGRAM_OUTPUT | Usage.MUTABLE_STATE),
    int(Access.READ_WRITE): int(Usage.MUTABLE_STATE),
}

_pack_id: Final = wire.OBJECT.pack
_pack_state: Final = wire.EVENT_STATE.pack
PENDING: Final = int(EventState.PENDING)
FAILED: Final = int(EventState.FAILED)
PENDING_PAYLOAD: Final = _pack_state(PENDING, 0, 0)
STATE_PAYLOADS: Final = {
    int(state): _pack_state(state, 0, 0) for state in (EventState.COMPLETE, EventState.CANCELLED)
}
CANCELLED_PAYLOAD: Final = STATE_PAYLOADS[int(EventState.CANCELLED)]


class InPlace(NamedTuple):
    """The `bytes` of an OK payload already lie behind the response header, in the chain itself."""

    bytes: int


class Parked(NamedTuple):
    """The command ends later: `load` says how."""

    load: Load


class Uncertain(NamedTuple):
    """A failure that still hands over an event: an indeterminate SUBMIT (specification.md 4.8)."""

    status: Status
    payload: bytes


Answer: TypeAlias = bytes | InPlace | Uncertain
Reply: TypeAlias = Answer | Parked


# Device and contexts


def get_device_info(state: State, request: None, chain: Chain) -> bytes:
    return pack_device_info(state.info)


def create_context(state: State, request: None, chain: Chain) -> bytes:
    state.room_for_context()
    return _pack_id(state.enter_context(Context(state.backend.create_context())))


def destroy_context(state: State, request: int, chain: Chain) -> bytes:
    context = state.context(request)
    if context.has_children:
        raise CommandError(Status.BUSY, "context has children")
    outcome = state.backend.destroy_context(context.handle)
    return _released(outcome, request, state.remove_context, state.quarantine_context)


# Buffers


def allocate_buffer(state: State, request: decode.Allocate, chain: Chain) -> bytes:
    context = state.context(request.context)
    if not state.info.capabilities & DOMAIN_CAPABILITY[request.domain]:
        raise CommandError(Status.UNSUPPORTED, f"no memory domain {request.domain}")
    state.room_for_buffer(context, request.bytes)
    wanted = BufferRequest(request.bytes, request.alignment, request.domain, request.usage)
    allocated = state.backend.allocate_buffer(context.handle, wanted)
    refusal = _judge_allocation(state, request, allocated)
    if refusal is not None:
        raise _give_back(state, allocated, refusal)
    buffer = Buffer(context, allocated.handle, request.bytes, request.usage, allocated.allocation_bytes)
    return _pack_id(state.enter_buffer(buffer))


def _judge_allocation(state: State, request: decode.Allocate, allocated: AllocatedBuffer) -> CommandError | None:
    """Whether what was allocated may be shown to the guest (specification.md 4.4 and 4.12)."""
    if allocated.allocation_bytes < request.bytes or allocated.alignment < request.alignment:
        return CommandError(Status.INTERNAL_ERROR, f"asked for {request}, got {allocated}")
    if request.usage & BOUND_BY_PROGRAMS and not allocated.direct:
        return CommandError(Status.INTERNAL_ERROR, "submissions would copy the buffer")
    if state.backing_bytes + allocated.allocation_bytes > state.policy.max_buffer_backing_bytes:
        return CommandError(Status.RESOURCE_LIMIT, "actual allocation exceeds the budget")
    return None


def _give_back(state: State, allocated: AllocatedBuffer, refusal: CommandError) -> CommandError:
    """Release an allocation that got no ID. Unless that is proven to have worked, it is no ordinary refusal (4.12)."""
    try:
        outcome: ReleaseOutcome = state.backend.free_buffer(allocated.handle)
    except Exception as error:
        state.quarantine_allocation(allocated.allocation_bytes)
        raise NeedsReset(f"an allocation without ID could not be released: {error!r}", discard=True) from error
    if isinstance(outcome, Released):
        return refusal
    state.quarantine_allocation(allocated.allocation_bytes)
    raise NeedsReset(f"an allocation without ID could not be released: {outcome}", discard=True)


def free_buffer(state: State, request: int, chain: Chain) -> bytes:
    buffer = state.buffer(request)
    if buffer.references:
        raise CommandError(Status.BUSY, "buffer belongs to an event")
    outcome = state.backend.free_buffer(buffer.handle)
    return _released(outcome, request, state.remove_buffer, state.quarantine_buffer)


def _transferable(state: State, request: decode.Transfer, usage: int) -> Buffer:
    buffer = state.buffer(request.buffer)
    if not buffer.usage & usage:
        raise CommandError(Status.PERMISSION_DENIED, "buffer is not declared for this transfer")
    if request.offset + request.bytes > buffer.bytes:
        raise CommandError(Status.OUT_OF_BOUNDS, "range outside the buffer")
    return buffer


def write_buffer(state: State, request: decode.Transfer, chain: Chain) -> bytes:
    """One copy, from guest memory into the buffer."""
    buffer = _transferable(state, request, TRANSFER_DESTINATION)
    source = window(chain.readable, _DATA_AT, request.bytes)
    state.backend.write_buffer(buffer.handle, request.offset, source)
    return b""


def read_buffer(state: State, request: decode.Transfer, chain: Chain) -> InPlace:
    """One copy, from the buffer to its place behind the response header."""
    buffer = _transferable(state, request, TRANSFER_SOURCE)
    sink = window(chain.writable, HEADER_BYTES, request.bytes)
    state.backend.read_buffer(buffer.handle, request.offset, sink)
    return InPlace(request.bytes)


# Programs


def load_program(state: State, request: decode.LoadProgram, chain: Chain) -> bytes | Parked:
    context = state.context(request.context)
    state.room_for_program(context, request.payload_bytes, request.resident_bytes)
    payload = window(chain.readable, _ARTIFACT_AT, request.payload_bytes)
    artifact = Artifact(request.format, request.target, payload, request.payload_bytes, request.resident_bytes)
    outcome = state.backend.load_program(context.handle, artifact)
    if isinstance(outcome, Loaded):
        return _pack_id(state.enter_program(Program(context, outcome.program, request.resident_bytes)))
    load = Load(context, outcome.ticket, request.resident_bytes)
    state.enter_load(load)
    return Parked(load)


def finish_load(state: State, load: Load) -> bytes | None:
    """The OK payload of a parked LOAD_PROGRAM, None while it is still loading. Raises what a load may raise; the load
    is then over unless the device is lost."""
    try:
        loaded = state.backend.poll_load(load.ticket)
    except BackendError as error:
        if error.status is not Status.DEVICE_LOST:
            state.remove_load(load)
        raise
    if loaded is None:
        return None
    state.remove_load(load)
    return _pack_id(state.enter_program(Program(load.context, loaded.program, load.resident_bytes)))


def unload_program(state: State, request: int, chain: Chain) -> bytes:
    program = state.program(request)
    if program.references:
        raise CommandError(Status.BUSY, "program belongs to an event")
    outcome = state.backend.unload_program(program.handle)
    return _released(outcome, request, state.remove_program, state.quarantine_program)


# Execution queues


def create_queue(state: State, request: int, chain: Chain) -> bytes:
    context = state.context(request)
    state.room_for_queue(context)
    return _pack_id(state.enter_queue(Queue(context, state.backend.create_queue(context.handle))))


def destroy_queue(state: State, request: int, chain: Chain) -> bytes:
    queue = state.queue(request)
    if queue.references:
        raise CommandError(Status.BUSY, "queue belongs to an event")
    outcome = state.backend.destroy_queue(queue.handle)
    return _released(outcome, request, state.remove_queue, state.quarantine_queue)


# Submissions and events


def submit(state: State, request: decode.Submit, chain: Chain) -> bytes | Uncertain:
    """Admit one execution. The event owns queue, program and buffers until it is destroyed (specification.md 4.9)."""
    ready = state.submissions.get(request.payload)
    if ready is None:
        ready = _resolve(state, request)
    else:
        state.room_for_event(ready.queue.context)
    queue, program, buffers, bindings = ready
    outcome = state.backend.submit(queue.handle, program.handle, bindings, request.timeout_ns)
    if isinstance(outcome, Rejected):
        raise BackendError(outcome.status, "submission rejected")
    event = _pack_id(state.enter_event(Event(queue, program, buffers, outcome.event)))
    return event if isinstance(outcome, Accepted) else Uncertain(outcome.status, event)


def _resolve(state: State, request: decode.Submit) -> Submission:
    """What a SUBMIT names, checked; remembered for as long as all of it lives."""
    queue, program = state.queues.get(request.queue), state.programs.get(request.program)
    if queue is None or program is None or program.context is not queue.context:
        raise CommandError(Status.STALE_OBJECT, "queue or program")
    context = queue.context
    find = state.buffers.get
    buffers = []
    for binding in request.bindings:
        buffer = find(binding[0])
        if buffer is None or buffer.context is not context:
            raise CommandError(Status.STALE_OBJECT, f"buffer of slot {binding[3]}")
        buffers.append(buffer)
    state.room_for_event(context)
    bindings = []
    for buffer, (_, offset, size, slot, access, _) in zip(buffers, request.bindings, strict=True):
        if not buffer.usage & ADMITTING_USAGE[access]:
            raise CommandError(Status.PERMISSION_DENIED, f"slot {slot}: usage {buffer.usage:#x}, access {access}")
        if offset + size > buffer.bytes:
            raise CommandError(Status.OUT_OF_BOUNDS, f"slot {slot}: range outside the buffer")
        bindings.append(Binding(buffer.handle, offset, size, slot, access))
    ready = Submission(queue, program, tuple(buffers), tuple(bindings))
    state.remember(request.payload, ready)
    return ready


def observe(state: State, event: Event) -> bytes:
    """The POLL_EVENT payload now. A terminal state is kept: the backend is not asked again (specification.md 4.9)."""
    if event.terminal is not None:
        return event.terminal
    payload = pack_polled(state.backend.poll_event(event.handle))
    if payload is not PENDING_PAYLOAD:
        event.terminal = payload
    return payload


def pack_polled(polled: Polled) -> bytes:
    """State and error as section 4.5 pairs them: an error if and only if the event failed."""
    state, error = polled
    if state == PENDING:
        return PENDING_PAYLOAD
    if state == FAILED:
        return _pack_state(FAILED, int(error) or int(Status.INTERNAL_ERROR), 0)
    return STATE_PAYLOADS[state]


def poll_event(state: State, request: int, chain: Chain) -> bytes:
    event = state.events.get(request)
    if event is None:
        raise CommandError(Status.STALE_OBJECT)
    return event.terminal or observe(state, event)


def cancel_event(state: State, request: int, chain: Chain) -> bytes:
    """Exactly one of cancellation and completion wins; BUSY says that completion, or an earlier cancel, did."""
    if not state.info.capabilities & CANCELLATION:
        raise CommandError(Status.UNSUPPORTED, "no event cancellation")
    event = state.event(request)
    if event.terminal is not None:
        raise CommandError(Status.BUSY, "event is terminal")
    state.backend.cancel_event(event.handle)
    event.terminal = CANCELLED_PAYLOAD
    return b""


def destroy_event(state: State, request: int, chain: Chain) -> bytes:
    event = state.event(request)
    if observe(state, event) is PENDING_PAYLOAD:
        raise CommandError(Status.BUSY, "event is pending")
    outcome = state.backend.destroy_event(event.handle)
    return _released(outcome, request, state.remove_event, state.quarantine_event)


def _released(
    outcome: ReleaseOutcome, object_id: int, remove: Callable[[int], None], quarantine: Callable[[int], None]
) -> bytes:
    """The three release outcomes (specification.md, section 7): gone, still there under its ID, or nobody knows."""
    if isinstance(outcome, Released):
        remove(object_id)
        return b""
    if isinstance(outcome, ReleaseRejected):
        raise BackendError(outcome.status, "release rejected")
    quarantine(object_id)
    raise NeedsReset(f"release is indeterminate: {outcome}", discard=True)


class Command(NamedTuple):
    """One row. `fixed` is the fixed length of the request payload in bytes, the whole of it unless `tail`. `capacity`
    is the room in bytes that the success response needs; 0 says that `room` tells. `mutates`: an OK response reports a
    change, so that failing to write it loses truth."""

    fixed: int
    tail: bool
    decode: Callable[[bytes, Chain, Any], Any]
    capacity: int
    handle: Callable[[State, Any, Chain], Reply]
    mutates: bool


def room(request: decode.Transfer, max_response_bytes: int) -> int:
    """Response bytes of a READ_BUFFER, the one command whose success shape the request decides."""
    needed = HEADER_BYTES + request.bytes
    if needed > max_response_bytes:
        raise CommandError(Status.RESOURCE_LIMIT, "response frame too large")
    return needed


COMMANDS: Final[dict[int, Command]] = {
    int(opcode): Command(fixed, tail, decoder, capacity, handler, mutates)
    for opcode, fixed, tail, decoder, capacity, handler, mutates in (
        (Opcode.GET_DEVICE_INFO, 0, False, decode.decode_nothing, 92, get_device_info, False),
        (Opcode.CREATE_CONTEXT, 8, False, decode.decode_create_context, 24, create_context, True),
        (Opcode.DESTROY_CONTEXT, 8, False, decode.decode_id, 16, destroy_context, True),
        (Opcode.ALLOCATE_BUFFER, 40, False, decode.decode_allocate, 24, allocate_buffer, True),
        (Opcode.FREE_BUFFER, 8, False, decode.decode_id, 16, free_buffer, True),
        (Opcode.WRITE_BUFFER, 24, True, decode.decode_write, 16, write_buffer, True),
        (Opcode.READ_BUFFER, 24, False, decode.decode_read, 0, read_buffer, False),
        (Opcode.LOAD_PROGRAM, 80, True, decode.decode_load, 24, load_program, True),
        (Opcode.UNLOAD_PROGRAM, 8, False, decode.decode_id, 16, unload_program, True),
        (Opcode.CREATE_QUEUE, 16, False, decode.decode_create_queue, 24, create_queue, True),
        (Opcode.DESTROY_QUEUE, 8, False, decode.decode_id, 16, destroy_queue, True),
        (Opcode.SUBMIT, 32, True, decode.decode_submit, 24, submit, True),
        (Opcode.POLL_EVENT, 8, False, decode.decode_id, 24, poll_event, False),
        (Opcode.CANCEL_EVENT, 8, False, decode.decode_id, 16, cancel_event, True),
        (Opcode.DESTROY_EVENT, 8, False, decode.decode_id, 16, destroy_event, True),
    )
}
