"""The guest's half of protocol 1.0, without I/O: builds request frames, checks and decodes responses.

Knows the wire (wire-abi.md, sections 2 to 6) and what a driver must verify (specification.md 3.1, 4.8 to 4.10); knows
no ring, no clock and no array. Everything that a device writes is untrusted. Standard library only: this runs inside a
guest on a bare python3. Frames are tuples of parts, so a payload is never copied here.

    ClientError
     +-- RequestTooLarge          the frame does not fit the device's limits; nothing was sent
     +-- DeviceError              the device answered with a failure status; `status` is the raw number
     |    +-- IndeterminateSubmit it may run or not: `event` owns it and must be polled, then destroyed
     +-- ProtocolViolation        the device's bytes break the protocol; reset it before asking anything else
          +-- RecoveryNeeded      unknown event state: `event` must be kept, it may still own its buffers
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import Any, Final, Generic, NamedTuple, NewType, TypeAlias, TypeVar

from virtaccel.device import wire
from virtaccel.device.wire import Capability, Domain, EventState, Opcode, Status, Usage
from virtaccel.guest_tools.transport.base import Config, Part, Shared

T = TypeVar("T")

_HEADER_BYTES: Final = wire.RESPONSE_HEADER.size
_ID_BYTES: Final = wire.OBJECT.size
_WITH_ID_BYTES: Final = _HEADER_BYTES + _ID_BYTES
_WITH_STATE_BYTES: Final = _HEADER_BYTES + wire.EVENT_STATE.size
_SUBMIT_PAYLOAD: Final = wire.SUBMIT_REQUEST.size
_TRANSFER_PAYLOAD: Final = wire.TRANSFER_BUFFER_REQUEST.size
_LOAD_PAYLOAD: Final = wire.LOAD_PROGRAM_REQUEST.size
# What NamedTuple's own constructor ends in, without its handling of keywords: less than half its time.
_new_tuple: Final = tuple.__new__
# Bound once: an attribute of a Struct costs as much as packing with it.
_UNPACK_RESPONSE: Final = wire.RESPONSE_HEADER.unpack_from
_PACK_WITH_ID: Final = wire.OBJECT_FRAME.pack
_PACK_SUBMIT: Final = wire.SUBMIT_FRAME.pack
_PACK_TRANSFER: Final = wire.TRANSFER_BUFFER_FRAME.pack
# What no program exceeds: the device's own budget decides (section 5.4).
UNBOUNDED_RESIDENT_BYTES: Final = (1 << 64) - 1
# Transfers are cut here even where the device takes larger frames: some of them can be under way while the next is
# copied, and the transport's memory stays small.
LARGEST_CHUNK: Final = 1 << 20
_RESERVED_CAPABILITIES: Final = 0b11000  # section 5.1: bits 3 and 4
_DOMAINS: Final = Capability.HOST_VISIBLE_MEMORY | Capability.DEVICE_LOCAL_MEMORY | Capability.SHARED_MEMORY

# IDs as the device gave them: opaque, nonzero, valid until destroyed or reset. Types of their own, so that a checker
# sees one taken for another; plain numbers at run time, since they are packed and hashed on the hot path.
Context = NewType("Context", int)
Buffer = NewType("Buffer", int)
Program = NewType("Program", int)
Queue = NewType("Queue", int)  # an execution queue's, not a virtqueue's
Event = NewType("Event", int)  # owns one submission


class ClientError(Exception):
    """Root of what this module raises."""


class RequestTooLarge(ClientError):
    """The frame or its response would exceed the configured limits; nothing was sent."""


class DeviceError(ClientError):
    """A failure status. `status` is the raw number: a value without a name is a failure all the same (section 6)."""

    def __init__(self, opcode: int, status: int) -> None:
        super().__init__(f"{Opcode(opcode).name}: {status_name(status)}")
        self.opcode = opcode
        self.status = status


class IndeterminateSubmit(DeviceError):
    """A failed SUBMIT that came with an event: the submission may be running (specification.md 4.8)."""

    def __init__(self, status: int, event: Event) -> None:
        super().__init__(Opcode.SUBMIT, status)
        self.event = event


class ProtocolViolation(ClientError):
    """The response is not one that the standard allows; nothing can be concluded from it."""


class RecoveryNeeded(ProtocolViolation):
    """POLL_EVENT answered with a state that 1.0 does not define: keep `event`, reset the device (section 4.5)."""

    def __init__(self, message: str, event: Event) -> None:
        super().__init__(message)
        self.event = event


class Binding(NamedTuple):
    """One program slot bound to `bytes` bytes of `buffer` from `offset` on; `access` as in wire.Access."""

    buffer: Buffer
    offset: int
    bytes: int
    slot: int
    access: int


class PackedBindings(NamedTuple):
    """Bindings in wire form, to be packed once and submitted many times."""

    binding_count: int
    data: bytes


class EventStatus(NamedTuple):
    """What POLL_EVENT found. `error` is OK unless the state is FAILED, and then a raw status."""

    state: EventState
    error: int


class DeviceInfo(NamedTuple):
    """GET_DEVICE_INFO (section 5.1). Limits are counts, except the two in bytes; capabilities are the raw bits."""

    uuid: bytes
    accelerator_class: int
    vendor_id: int
    device_id: int
    capabilities: int
    max_contexts: int
    max_buffers_per_context: int
    max_programs_per_context: int
    max_queues_per_context: int
    max_events_per_context: int
    max_bindings_per_submission: int
    max_buffer_bytes: int
    max_artifact_bytes: int

    @property
    def domain(self) -> Domain:
        """The domain to ask for when any will do: shared before host before device."""
        if self.capabilities & Capability.SHARED_MEMORY:
            return Domain.SHARED
        return Domain.HOST if self.capabilities & Capability.HOST_VISIBLE_MEMORY else Domain.DEVICE


class Request(NamedTuple, Generic[T]):
    """One command ready to be published: `frame` parts in order, `capacity` bytes of room for the response. A shared
    `source` continues the frame, a shared `sink` the response; both are told to the transport."""

    request_id: int
    opcode: int
    frame: tuple[Part, ...]
    capacity: int
    decode: Callable[[Request[T], memoryview], T]
    subject: int = 0
    sink: memoryview | Shared | None = None
    source: Shared | None = None


def status_name(status: int) -> str:
    """The standard's name, or the number of a status that has none."""
    try:
        return Status(status).name
    except ValueError:
        return f"unknown status {status}"


def pack_bindings(bindings: Sequence[Binding]) -> PackedBindings:
    """Wire form of `bindings` (section 5.6), 32 bytes each."""
    pack = wire.BINDING.pack
    return PackedBindings(len(bindings), b"".join(pack(*binding, b"\0\0\0") for binding in bindings))


Decode: TypeAlias = Callable[["Request[T]", memoryview], T]

# Decoders: the header is already checked, status is OK, and len(response) equals 16 + payload_bytes.


def _wrong_size(request: Request[Any], response: memoryview, wanted: int) -> ProtocolViolation:
    got = len(response) - _HEADER_BYTES
    return ProtocolViolation(f"{Opcode(request.opcode).name}: response carries {got} bytes, not {wanted}")


def _decode_nothing(request: Request[None], response: memoryview) -> None:
    if len(response) != _HEADER_BYTES:
        raise _wrong_size(request, response, 0)


_UNPACK_ID: Final = wire.OBJECT.unpack_from


def _decode_id(request: Request[Any], response: memoryview) -> Any:
    if len(response) != _WITH_ID_BYTES:
        raise _wrong_size(request, response, _ID_BYTES)
    handle = _UNPACK_ID(response, _HEADER_BYTES)[0]
    if not handle:
        raise ProtocolViolation(f"{Opcode(request.opcode).name}: the device returned object ID 0")
    return handle


def _decode_data(request: Request[None], response: memoryview) -> None:
    sink = request.sink
    assert sink is not None, "READ_BUFFER requests are made with a sink"
    if isinstance(sink, Shared):
        # The bytes lie in the sink already; only their number is left to check.
        returned = _UNPACK_RESPONSE(response)[2]
        if returned != len(sink):
            raise ProtocolViolation(f"READ_BUFFER: {returned} bytes returned, {len(sink)} asked")
        return
    if len(response) - _HEADER_BYTES != len(sink):
        raise ProtocolViolation(f"READ_BUFFER: {len(response) - _HEADER_BYTES} bytes returned, {len(sink)} asked")
    sink[:] = response[_HEADER_BYTES:]


_ONLY_STATES: Final = {
    (int(state), 0, 0): EventStatus(state, 0)
    for state in (EventState.PENDING, EventState.COMPLETE, EventState.CANCELLED)
}
_UNPACK_STATE: Final = wire.EVENT_STATE.unpack_from


def _decode_event_state(request: Request[EventStatus], response: memoryview) -> EventStatus:
    if len(response) != _WITH_STATE_BYTES:
        raise _wrong_size(request, response, wire.EVENT_STATE.size)
    raw = _UNPACK_STATE(response, _HEADER_BYTES)
    known = _ONLY_STATES.get(raw)
    if known is not None:
        return known
    state, error, reserved = raw
    # An unknown state may still own its buffers, so the event is kept (wire-abi.md 4.5).
    if state > EventState.CANCELLED:
        raise RecoveryNeeded(f"POLL_EVENT: unknown event state {state}", Event(request.subject))
    if reserved or state != EventState.FAILED or error == Status.OK:
        message = f"POLL_EVENT: state {state} with error {error}, reserved {reserved}"
        raise RecoveryNeeded(message, Event(request.subject))
    return EventStatus(EventState.FAILED, error)


def _decode_device_info(request: Request[DeviceInfo], response: memoryview) -> DeviceInfo:
    if len(response) != _HEADER_BYTES + wire.DEVICE_INFO.size:
        raise _wrong_size(request, response, wire.DEVICE_INFO.size)
    uuid, kind, reserved, *rest = wire.DEVICE_INFO.unpack_from(response, _HEADER_BYTES)
    info = DeviceInfo(uuid, kind, *rest)
    if reserved:
        raise ProtocolViolation("GET_DEVICE_INFO: reserved field is not zero")
    # A limit of 0 would make every later command fail in a way that looks like the caller's fault.
    for name, value in zip(info._fields[5:], info[5:], strict=True):
        if not value:
            raise ProtocolViolation(f"GET_DEVICE_INFO: {name} is 0")
    if info.max_bindings_per_submission > wire.HARD_MAX_BINDINGS:
        raise ProtocolViolation(f"GET_DEVICE_INFO: max_bindings_per_submission is {info.max_bindings_per_submission}")
    if not info.capabilities & _DOMAINS or info.capabilities & _RESERVED_CAPABILITIES:
        raise ProtocolViolation(f"GET_DEVICE_INFO: capabilities {info.capabilities:#x} are not a 1.0 device's")
    return info


_DECODE_CONTEXT: Final[Decode[Context]] = _decode_id
_DECODE_BUFFER: Final[Decode[Buffer]] = _decode_id
_DECODE_PROGRAM: Final[Decode[Program]] = _decode_id
_DECODE_QUEUE: Final[Decode[Queue]] = _decode_id
_DECODE_EVENT: Final[Decode[Event]] = _decode_id
# Plain ints: packing and comparing an IntEnum member costs several times as much.
_SUBMIT_CODE: Final = int(Opcode.SUBMIT)
_POLL_CODE: Final = int(Opcode.POLL_EVENT)
_DESTROY_EVENT_CODE: Final = int(Opcode.DESTROY_EVENT)


class Client:
    """Builds requests and receives responses for one device, between two resets.

    Methods named after commands return a Request to publish; `receive` takes it back with the bytes of its response.
    Request IDs count up from `first_request_id`, so they are unique among however many are outstanding.
    """

    __slots__ = ("_first_id", "_largest_request", "_last_id", "config", "largest_read", "largest_write", "recovery")

    def __init__(self, config: Config, first_request_id: int = 1) -> None:
        self.config = config
        self._first_id = first_request_id
        self._largest_request = config.max_request_bytes
        self.largest_write = min(LARGEST_CHUNK, config.max_request_bytes - wire.TRANSFER_BUFFER_FRAME.size)
        self.largest_read = min(LARGEST_CHUNK, config.max_response_bytes - _HEADER_BYTES)
        self.reset()

    def reset(self) -> None:
        """The device was reset: request IDs start anew, and a violation before it is forgotten."""
        self._last_id = self._first_id - 1
        self.recovery: ProtocolViolation | None = None

    @property
    def largest_artifact(self) -> int:
        """Bytes of artifact that one LOAD_PROGRAM frame can carry."""
        return self.config.max_request_bytes - wire.LOAD_PROGRAM_FRAME.size

    # Requests

    def get_device_info(self) -> Request[DeviceInfo]:
        capacity = _HEADER_BYTES + wire.DEVICE_INFO.size
        return self._command(Opcode.GET_DEVICE_INFO, wire.REQUEST_HEADER, (), _decode_device_info, capacity)

    def create_context(self) -> Request[Context]:
        return self._command(Opcode.CREATE_CONTEXT, wire.CREATE_CONTEXT_FRAME, (0, 0), _DECODE_CONTEXT)

    def destroy_context(self, context: Context) -> Request[None]:
        return self._by_id(Opcode.DESTROY_CONTEXT, context)

    def allocate_buffer(
        self, context: Context, size: int, usage: int | Usage, *, domain: int | Domain, alignment: int = 64
    ) -> Request[Buffer]:
        """A zeroed buffer of `size` bytes; `alignment` is a power of two, in bytes."""
        fields = (context, size, alignment, domain, b"", int(usage), 0)
        return self._command(Opcode.ALLOCATE_BUFFER, wire.ALLOCATE_BUFFER_FRAME, fields, _DECODE_BUFFER)

    def free_buffer(self, buffer: Buffer) -> Request[None]:
        return self._by_id(Opcode.FREE_BUFFER, buffer)

    def write_buffer(self, buffer: Buffer, offset: int, data: Part | Shared) -> Request[None]:
        """One WRITE_BUFFER frame; `write_chunks` splits what does not fit one."""
        size = len(data)
        self._check_size(Opcode.WRITE_BUFFER, _TRANSFER_PAYLOAD + size, _HEADER_BYTES)
        request_id = self._new_id()
        prefix = _PACK_TRANSFER(Opcode.WRITE_BUFFER, 0, _TRANSFER_PAYLOAD + size, request_id, buffer, offset, size)
        if isinstance(data, Shared):
            return Request(request_id, Opcode.WRITE_BUFFER, (prefix,), _HEADER_BYTES, _decode_nothing, source=data)
        return Request(request_id, Opcode.WRITE_BUFFER, (prefix, data), _HEADER_BYTES, _decode_nothing)

    def read_buffer(self, buffer: Buffer, offset: int, sink: memoryview | Shared) -> Request[None]:
        """Read len(sink) bytes into `sink` (writable, format 'B') when the response is received."""
        size = len(sink)
        self._check_size(Opcode.READ_BUFFER, _TRANSFER_PAYLOAD, _HEADER_BYTES + size)
        request_id = self._new_id()
        frame = _PACK_TRANSFER(Opcode.READ_BUFFER, 0, _TRANSFER_PAYLOAD, request_id, buffer, offset, size)
        capacity = _HEADER_BYTES if isinstance(sink, Shared) else _HEADER_BYTES + size
        return Request(request_id, Opcode.READ_BUFFER, (frame,), capacity, _decode_data, sink=sink)

    def write_chunks(self, buffer: Buffer, offset: int, data: memoryview | Shared) -> Iterator[Request[None]]:
        """WRITE_BUFFER requests that together write `data` from `offset` on, each within the request limit."""
        for start in range(0, len(data), self.largest_write):
            yield self.write_buffer(buffer, offset + start, data[start : start + self.largest_write])

    def read_chunks(self, buffer: Buffer, offset: int, sink: memoryview | Shared) -> Iterator[Request[None]]:
        """READ_BUFFER requests that together fill `sink` from `offset` on, each within the response limit."""
        for start in range(0, len(sink), self.largest_read):
            yield self.read_buffer(buffer, offset + start, sink[start : start + self.largest_read])

    def load_program(
        self, context: Context, format_id: int, target: Sequence[int], artifact: Part,
        resident_bytes: int = UNBOUNDED_RESIDENT_BYTES,
    ) -> Request[Program]:
        """`target` is 12 words. The response may come much later than those of commands published after it."""
        size = len(artifact)
        self._check_size(Opcode.LOAD_PROGRAM, _LOAD_PAYLOAD + size, _WITH_ID_BYTES)
        request_id = self._new_id()
        prefix = wire.LOAD_PROGRAM_FRAME.pack(
            Opcode.LOAD_PROGRAM, 0, _LOAD_PAYLOAD + size, request_id,
            context, format_id, 0, *target, size, resident_bytes,
        )  # fmt: skip
        return Request(request_id, Opcode.LOAD_PROGRAM, (prefix, artifact), _WITH_ID_BYTES, _DECODE_PROGRAM)

    def unload_program(self, program: Program) -> Request[None]:
        return self._by_id(Opcode.UNLOAD_PROGRAM, program)

    def create_queue(self, context: Context) -> Request[Queue]:
        return self._command(Opcode.CREATE_QUEUE, wire.CREATE_QUEUE_FRAME, (context, 0, 0), _DECODE_QUEUE)

    def destroy_queue(self, queue: Queue) -> Request[None]:
        return self._by_id(Opcode.DESTROY_QUEUE, queue)

    def submit(
        self, queue: Queue, program: Program, bindings: PackedBindings | Sequence[Binding], timeout_ns: int = 0
    ) -> Request[Event]:
        """`timeout_ns` counts from admission, 0 is no limit. Order of bindings has no meaning."""
        count, data = bindings if isinstance(bindings, PackedBindings) else pack_bindings(bindings)
        size = _SUBMIT_PAYLOAD + len(data)
        if size + _HEADER_BYTES > self._largest_request:
            self._check_size(_SUBMIT_CODE, size, _WITH_ID_BYTES)
        request_id = self._new_id()
        prefix = _PACK_SUBMIT(_SUBMIT_CODE, 0, size, request_id, queue, program, count, 0, timeout_ns)
        fields = (request_id, _SUBMIT_CODE, (prefix, data), _WITH_ID_BYTES, _DECODE_EVENT, 0, None, None)
        return _new_tuple(Request, fields)

    def poll_event(self, event: Event) -> Request[EventStatus]:
        request_id = self._new_id()
        frame = _PACK_WITH_ID(_POLL_CODE, 0, _ID_BYTES, request_id, event)
        fields = (request_id, _POLL_CODE, (frame,), _WITH_STATE_BYTES, _decode_event_state, event, None, None)
        return _new_tuple(Request, fields)

    def cancel_event(self, event: Event) -> Request[None]:
        return self._by_id(Opcode.CANCEL_EVENT, event)

    def destroy_event(self, event: Event) -> Request[None]:
        return self._by_id(_DESTROY_EVENT_CODE, event)

    # Responses

    def receive(self, request: Request[T], response: memoryview, beyond: int = 0) -> T:
        """Check `response` (exactly the used bytes, but for `beyond` bytes in a shared sink) against `request` and
        decode it.

        Raises DeviceError for a failure status; ProtocolViolation, after which every further request is refused until
        `reset`, where the bytes are not what section 3.2 and the command's row in section 5 allow.
        """
        used = len(response) + beyond
        if used < _HEADER_BYTES:
            raise self._violated(request, f"{used} bytes used, a response has at least {_HEADER_BYTES}")
        status, flags, payload_bytes, request_id = _UNPACK_RESPONSE(response)
        # The ID before all else: bytes that answer another command say nothing about this one (section 3.2).
        if request_id != request.request_id:
            raise self._violated(request, f"response has request ID {request_id}, expected {request.request_id}")
        if flags or payload_bytes + _HEADER_BYTES != used:
            raise self._violated(request, f"flags {flags}, payload_bytes {payload_bytes} with {used} bytes used")
        if status:
            if beyond:
                raise self._violated(request, f"{status_name(status)} with {beyond} bytes of payload")
            raise self._failure(request, status, response)
        try:
            return request.decode(request, response)
        except ProtocolViolation as violation:
            # From here on nothing is sent: an answer might be to a command that was never meant.
            self.recovery = violation
            raise

    def _failure(self, request: Request[T], status: int, response: memoryview) -> ClientError:
        used = len(response)
        if used == _HEADER_BYTES:
            return DeviceError(request.opcode, status)
        # The one failure with a payload: a SUBMIT nobody knows the outcome of (section 3.2).
        if request.opcode == Opcode.SUBMIT and used == _WITH_ID_BYTES:
            event = wire.OBJECT.unpack_from(response, _HEADER_BYTES)[0]
            if event:
                return IndeterminateSubmit(status, Event(event))
        return self._violated(request, f"{status_name(status)} with {used - _HEADER_BYTES} bytes of payload")

    def _violated(self, request: Request[T], message: str) -> ProtocolViolation:
        self.recovery = ProtocolViolation(f"{Opcode(request.opcode).name}: {message}")
        return self.recovery

    def _new_id(self) -> int:
        if self.recovery is not None:
            raise ProtocolViolation(f"the device must be reset first: {self.recovery}")
        # 64 bits do not run out: at a million commands a second they last 500,000 years.
        self._last_id += 1
        return self._last_id

    def _by_id(self, opcode: int, object_id: int) -> Request[None]:
        request_id = self._new_id()
        frame = _PACK_WITH_ID(opcode, 0, _ID_BYTES, request_id, object_id)
        return _new_tuple(Request, (request_id, opcode, (frame,), _HEADER_BYTES, _decode_nothing, 0, None, None))

    def _command(
        self, opcode: Opcode, record: Struct, fields: tuple[int | bytes, ...], decode: Decode[T],
        capacity: int = _WITH_ID_BYTES,
    ) -> Request[T]:
        """A command of a fixed size that is not on the hot path."""
        request_id = self._new_id()
        frame = record.pack(opcode, 0, record.size - _HEADER_BYTES, request_id, *fields)
        return Request(request_id, opcode, (frame,), capacity, decode)

    def _check_size(self, opcode: int, payload_bytes: int, capacity: int) -> None:
        for what, size, limit in (
            ("request", _HEADER_BYTES + payload_bytes, self._largest_request),
            ("response", capacity, self.config.max_response_bytes),
        ):
            if size > limit:
                raise RequestTooLarge(f"{Opcode(opcode).name}: {what} of {size} bytes, the device's limit is {limit}")
