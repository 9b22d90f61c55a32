"""Frames of protocol 1.0, written from the standard's text alone (wire-abi.md 3 to 6; virtqueue.md 6).

Knows the numbers, how a request is put together, and when a response holds together. It shares no code with the device,
which would only agree with the device's mistakes. Knows nothing of what is alive: that is `model` and `verdicts`.
Standard library only: this also runs inside a guest.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from virtaccel.harness.oracle.programs import Sample

OK, UNSUPPORTED, INCOMPATIBLE, INVALID_ARGUMENT, OUT_OF_BOUNDS, BUSY, OUT_OF_MEMORY, RESOURCE_LIMIT = range(8)
DEADLINE_EXPIRED, DEVICE_LOST, PERMISSION_DENIED, STALE_OBJECT = range(8, 12)
INTERNAL_ERROR: Final = 65535
NOTHING: Final = -1
"""No status: the head came back with not one byte written."""
STATUS_NAMES: Final = {
    NOTHING: "an empty head", OK: "OK", UNSUPPORTED: "UNSUPPORTED", INCOMPATIBLE: "INCOMPATIBLE",
    INVALID_ARGUMENT: "INVALID_ARGUMENT", OUT_OF_BOUNDS: "OUT_OF_BOUNDS", BUSY: "BUSY", OUT_OF_MEMORY: "OUT_OF_MEMORY",
    RESOURCE_LIMIT: "RESOURCE_LIMIT", DEADLINE_EXPIRED: "DEADLINE_EXPIRED", DEVICE_LOST: "DEVICE_LOST",
    PERMISSION_DENIED: "PERMISSION_DENIED", STALE_OBJECT: "STALE_OBJECT", INTERNAL_ERROR: "INTERNAL_ERROR",
}  # fmt: skip

INFO: Final = 0x0001
CREATE_CONTEXT, DESTROY_CONTEXT = 0x0100, 0x0101
ALLOCATE, FREE, WRITE, READ = 0x0200, 0x0201, 0x0202, 0x0203
LOAD, UNLOAD = 0x0300, 0x0301
CREATE_QUEUE, DESTROY_QUEUE = 0x0400, 0x0401
SUBMIT, POLL, CANCEL, DESTROY_EVENT = 0x0500, 0x0501, 0x0502, 0x0503

SOURCE, DESTINATION, INPUT, OUTPUT, STATE = 1, 2, 4, 8, 16
PLAIN_USE: Final = SOURCE | DESTINATION | INPUT | OUTPUT
HOST, DEVICE, SHARED = 1, 2, 3
CANCELLATION: Final = 1 << 2
DOMAIN_CAPABILITY: Final = {SHARED: 1 << 5, HOST: 1 << 0, DEVICE: 1 << 1}
PENDING, COMPLETE, FAILED, CANCELLED = range(4)

ID_BYTES: Final = 8
OK_PAYLOAD: Final = {
    INFO: 76, CREATE_CONTEXT: 8, DESTROY_CONTEXT: 0, ALLOCATE: 8, FREE: 0, WRITE: 0, LOAD: 8, UNLOAD: 0,
    CREATE_QUEUE: 8, DESTROY_QUEUE: 0, SUBMIT: 8, POLL: 8, CANCEL: 0, DESTROY_EVENT: 0,
}  # fmt: skip
"""Bytes of a successful response's payload; READ's is what was asked for."""

CANARY: Final = 0xC5  # neither zero nor an ID's, a status' or a size's likely byte
HEADER: Final = Struct("<HHIQ")
_INFO: Final = Struct("<16sHHIIQIIIIIIQQ")
_ALLOCATION: Final = Struct("<QQQB7sII")
_TRANSFER: Final = Struct("<QQQ")
_LOAD: Final = Struct("<QII12IQQ")
_SUBMISSION: Final = Struct("<QQIIQ")
_BINDING: Final = Struct("<QQQIB3s")


class Info(NamedTuple):
    """GET_DEVICE_INFO (wire-abi.md 5.1)."""

    uuid: bytes
    accelerator_class: int
    reserved: int
    vendor: int
    device: int
    capabilities: int
    contexts: int
    buffers: int
    programs: int
    queues: int
    events: int
    bindings: int
    buffer_bytes: int
    artifact_bytes: int

    @classmethod
    def read(cls, payload: bytes) -> Info:
        return cls(*_INFO.unpack(payload))

    def pack(self) -> bytes:
        return _INFO.pack(*self)

    @property
    def domain(self) -> int:
        """A memory domain that the device has."""
        return next((domain for domain, bit in DOMAIN_CAPABILITY.items() if self.capabilities & bit), HOST)

    def faults(self) -> list[str]:
        """What 5.1 does not allow."""
        domains = sum(DOMAIN_CAPABILITY.values())
        rules = {
            "the reserved field is not zero": self.reserved == 0,
            f"a limit is zero: {self[6:]}": all(self[6:]),
            f"max_bindings_per_submission {self.bindings}": self.bindings <= 4096,
            f"capabilities {self.capabilities:#x} name no memory domain": self.capabilities & domains != 0,
            f"capabilities {self.capabilities:#x} hold reserved bits": self.capabilities & 0b011000 == 0,
        }
        return [what for what, kept in rules.items() if not kept]


# Requests


def u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def field(data: bytes, at: int, size: int = 8) -> int:
    return int.from_bytes(data[at : at + size], "little")


def frame(opcode: int, body: bytes = b"", request_id: int = 1, flags: int = 0, length: int | None = None) -> bytes:
    """A request; `length` lies about payload_bytes."""
    return HEADER.pack(opcode, flags, len(body) if length is None else length, request_id) + body


def allocation(
    context: int, size: int, usage: int = PLAIN_USE, domain: int = SHARED, alignment: int = 64,
    reserved: bytes = bytes(7), tail: int = 0,
) -> bytes:  # fmt: skip
    return _ALLOCATION.pack(context, size, alignment, domain, reserved, usage, tail)


def transfer(buffer: int, offset: int, size: int) -> bytes:
    return _TRANSFER.pack(buffer, offset, size)


def load(context: int, sample: Sample, flags: int = 0, size: int | None = None, resident: int | None = None) -> bytes:
    """LOAD_PROGRAM's body; `size` lies about payload_bytes."""
    said = len(sample.artifact) if size is None else size
    bound = sample.resident if resident is None else resident
    return _LOAD.pack(context, sample.format, flags, *sample.target, said, bound) + sample.artifact


def queue_of(context: int) -> bytes:
    """CREATE_QUEUE's body."""
    return u64(context) + bytes(8)


def binding(buffer: int, slot: int, access: int, size: int, offset: int = 0, reserved: bytes = bytes(3)) -> bytes:
    return _BINDING.pack(buffer, offset, size, slot, access, reserved)


def submission(
    queue: int, program: int, *bindings: bytes, count: int | None = None, flags: int = 0, timeout: int = 0
) -> bytes:
    """SUBMIT's body; `count` lies about the number of bindings."""
    number = len(bindings) if count is None else count
    return _SUBMISSION.pack(queue, program, number, flags, timeout) + b"".join(bindings)


# Responses


class Answer(NamedTuple):
    """What came back: used length, status (NOTHING for an empty head), payload."""

    used: int
    status: int
    payload: bytes

    @property
    def id(self) -> int:
        return int.from_bytes(self.payload, "little")


class BadAnswer(Exception):
    """What came back is no answer of this protocol; the text says why."""


def say(status: int) -> str:
    return STATUS_NAMES.get(status, f"status {status}")


def answer(request_id: int, room: bytes, used: int) -> Answer:
    """The answer in `room`, which was filled with CANARY (wire-abi.md 3.2; virtqueue.md 6). Raises BadAnswer."""
    if used > len(room) or room[used:] != bytes([CANARY]) * (len(room) - used):
        raise BadAnswer("bytes behind the used length were touched")
    if not used:
        return Answer(0, NOTHING, b"")
    if used < HEADER.size:
        raise BadAnswer(f"{used} bytes used, a response has at least {HEADER.size}")
    status, flags, size, echoed = HEADER.unpack_from(room)
    if flags or size != used - HEADER.size or echoed != request_id:
        raise BadAnswer(f"response header: flags {flags}, {size} bytes of payload, request {echoed}; {used} used")
    return Answer(used, status, room[HEADER.size : used])


def answer_to(request: bytes, room: bytes, used: int) -> Answer:
    """The answer to a whole request: its payload must be what the command promises too (4.5, 5.6). Raises BadAnswer."""
    opcode, _, _, request_id = HEADER.unpack_from(request.ljust(HEADER.size, b"\0"))
    found = answer(request_id, room, used)
    if not used:
        return found
    asked = field(request, HEADER.size + 16) if opcode == READ else 0
    wanted = OK_PAYLOAD.get(opcode, asked) if found.status == OK else 0
    # The one failure with a payload: a submission of which nobody knows whether it runs keeps its event (5.6).
    indeterminate = opcode == SUBMIT and found.status != OK and len(found.payload) == ID_BYTES
    if len(found.payload) != wanted and not indeterminate:
        raise BadAnswer(f"{len(found.payload)} bytes of payload with {say(found.status)}, should be {wanted}")
    if opcode == POLL and found.status == OK:
        event_state(found.payload)
    elif opcode not in (READ, INFO) and found.payload and not found.id:
        raise BadAnswer("an object ID of zero")
    return found


def event_state(payload: bytes) -> tuple[int, int]:
    """State and error of POLL_EVENT's payload. Raises BadAnswer."""
    state, error, reserved = field(payload, 0, 2), field(payload, 2, 2), field(payload, 4, 4)
    if len(payload) != 8 or reserved or state > CANCELLED or (error != 0) is not (state == FAILED):
        raise BadAnswer(f"POLL_EVENT: {payload.hex()}")
    return state, error
