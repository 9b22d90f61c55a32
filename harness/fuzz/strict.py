"""A strict checker of frames, written from the standard's text alone (wire-abi.md 3 to 6; virtqueue.md 5 and 6).

It shares no code with the device: numbers are spelled out, fields are cut out one by one. For a request and what is
alive it gives every outcome that the standard allows: the standard orders checks in steps but not within a step, so a
frame with two faults of one step may be answered with either status. `NOTHING` stands for a head given back empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeAlias

OK, UNSUPPORTED, INCOMPATIBLE, INVALID_ARGUMENT, OUT_OF_BOUNDS, BUSY, OUT_OF_MEMORY, RESOURCE_LIMIT = range(8)
DEADLINE_EXPIRED, DEVICE_LOST, PERMISSION_DENIED, STALE_OBJECT = range(8, 12)
INTERNAL_ERROR: Final = 65535
NOTHING: Final = -1

GET_DEVICE_INFO: Final = 0x0001
CREATE_CONTEXT, DESTROY_CONTEXT = 0x0100, 0x0101
ALLOCATE_BUFFER, FREE_BUFFER, WRITE_BUFFER, READ_BUFFER = 0x0200, 0x0201, 0x0202, 0x0203
LOAD_PROGRAM, UNLOAD_PROGRAM = 0x0300, 0x0301
CREATE_QUEUE, DESTROY_QUEUE = 0x0400, 0x0401
SUBMIT, POLL_EVENT, CANCEL_EVENT, DESTROY_EVENT = 0x0500, 0x0501, 0x0502, 0x0503

ID_BYTES: Final = 8
OK_PAYLOAD: Final = {
    GET_DEVICE_INFO: 76, CREATE_CONTEXT: 8, DESTROY_CONTEXT: 0, ALLOCATE_BUFFER: 8, FREE_BUFFER: 0, WRITE_BUFFER: 0,
    LOAD_PROGRAM: 8, UNLOAD_PROGRAM: 0, CREATE_QUEUE: 8, DESTROY_QUEUE: 0, SUBMIT: 8, POLL_EVENT: 8, CANCEL_EVENT: 0,
    DESTROY_EVENT: 0,
}  # fmt: skip
"""Bytes of a successful response's payload; READ_BUFFER's is what was asked for."""
_FIXED: Final = {
    GET_DEVICE_INFO: 0, CREATE_CONTEXT: 8, DESTROY_CONTEXT: 8, ALLOCATE_BUFFER: 40, FREE_BUFFER: 8, WRITE_BUFFER: 24,
    READ_BUFFER: 24, LOAD_PROGRAM: 80, UNLOAD_PROGRAM: 8, CREATE_QUEUE: 16, DESTROY_QUEUE: 8, SUBMIT: 32,
    POLL_EVENT: 8, CANCEL_EVENT: 8, DESTROY_EVENT: 8,
}  # fmt: skip
_WITH_TAIL: Final = frozenset({WRITE_BUFFER, LOAD_PROGRAM, SUBMIT})
_U64: Final = 1 << 64
_NEEDS: Final = {1: 4 | 16, 2: 8 | 16, 3: 16}
_DOMAIN_BIT: Final = {1: 1 << 0, 2: 1 << 1, 3: 1 << 5}

Outcomes: TypeAlias = frozenset[int]


class AliveBuffer(NamedTuple):
    """What counts about a live buffer."""

    context: int
    bytes: int
    usage: int


class World(NamedTuple):
    """What a device was told and what is alive in it: IDs by kind, with their context. `busy` are IDs that a release
    must refuse, `pending` events that are not terminal."""

    max_request: int
    max_response: int
    capabilities: int
    max_bindings: int
    max_buffer_bytes: int
    max_artifact_bytes: int
    contexts: frozenset[int] = frozenset()
    buffers: Mapping[int, AliveBuffer] = {}
    programs: Mapping[int, int] = {}
    queues: Mapping[int, int] = {}
    events: Mapping[int, int] = {}
    busy: frozenset[int] = frozenset()
    pending: frozenset[int] = frozenset()


def _u(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "little")


def outcomes(frame: bytes, writable: int, world: World) -> Outcomes:
    """Everything the standard allows as an answer to `frame` with `writable` bytes of room.

    OK in it says that the request is sound as far as the standard can tell; a backend may still refuse a program or a
    submission.
    """
    if len(frame) < 16 or writable < 16:
        return frozenset({NOTHING})
    if len(frame) > world.max_request:
        return frozenset({RESOURCE_LIMIT})
    opcode, flags, payload_bytes = _u(frame, 0, 2), _u(frame, 2, 2), _u(frame, 4, 4)
    # A request ID of zero breaks 3.1; no step is named for it.
    early = {INVALID_ARGUMENT} if _u(frame, 8, 8) == 0 else set[int]()
    if payload_bytes != len(frame) - 16:
        return frozenset({INVALID_ARGUMENT})
    if opcode not in _FIXED or flags:
        return frozenset({UNSUPPORTED} | early)
    faults = early | _shape(opcode, frame, writable, world)
    if faults:
        return frozenset(faults)
    return frozenset(_meaning(opcode, frame, world) or {OK})


# Step 5: lengths, counts, reserved bytes, scalars, room


def _shape(opcode: int, frame: bytes, writable: int, world: World) -> set[int]:
    payload = frame[16:]
    fixed = _FIXED[opcode]
    faults: set[int] = set()
    if len(payload) < fixed or (len(payload) > fixed and opcode not in _WITH_TAIL):
        return {INVALID_ARGUMENT} | ({NOTHING} if writable < 16 + OK_PAYLOAD.get(opcode, 0) else set())
    looks = _SHAPES.get(opcode)
    if looks is not None:
        faults |= looks(payload, world)
    elif opcode != GET_DEVICE_INFO and _u(payload, 0, 8) == 0:
        faults.add(INVALID_ARGUMENT)
    room = OK_PAYLOAD.get(opcode)
    if room is None:
        room = _u(payload, 16, 8)
        if 16 + room > world.max_response:
            faults.add(RESOURCE_LIMIT)
    if writable < 16 + room:
        faults.add(NOTHING)
    return faults


def _shape_context(payload: bytes, world: World) -> set[int]:
    faults = {UNSUPPORTED} if _u(payload, 0, 4) else set[int]()
    return faults | ({INVALID_ARGUMENT} if _u(payload, 4, 4) else set())


def _shape_queue(payload: bytes, world: World) -> set[int]:
    faults = {UNSUPPORTED} if _u(payload, 8, 4) else set[int]()
    return faults | ({INVALID_ARGUMENT} if _u(payload, 12, 4) or not _u(payload, 0, 8) else set())


def _shape_allocate(payload: bytes, world: World) -> set[int]:
    context, size, alignment = (_u(payload, at, 8) for at in (0, 8, 16))
    usage = _u(payload, 32, 4)
    faults: set[int] = set()
    if usage >> 5:
        faults.add(UNSUPPORTED)
    wrong = (
        context == 0 or size == 0 or usage == 0 or alignment == 0 or alignment.bit_count() != 1
        or payload[24] not in (1, 2, 3) or any(payload[25:32]) or any(payload[36:40])
    )  # fmt: skip
    return faults | ({INVALID_ARGUMENT} if wrong else set())


def _shape_transfer(payload: bytes) -> set[int]:
    buffer, offset, size = (_u(payload, at, 8) for at in (0, 8, 16))
    return {INVALID_ARGUMENT} if not buffer or not size or offset + size >= _U64 else set()


def _shape_read(payload: bytes, world: World) -> set[int]:
    return _shape_transfer(payload)


def _shape_write(payload: bytes, world: World) -> set[int]:
    return _shape_transfer(payload) | ({INVALID_ARGUMENT} if _u(payload, 16, 8) != len(payload) - 24 else set())


def _shape_load(payload: bytes, world: World) -> set[int]:
    faults = {UNSUPPORTED} if _u(payload, 12, 4) else set[int]()
    size, resident = _u(payload, 64, 8), _u(payload, 72, 8)
    wrong = not _u(payload, 0, 8) or not _u(payload, 8, 4) or not size or not resident or size != len(payload) - 80
    return faults | ({INVALID_ARGUMENT} if wrong else set())


def _shape_submit(payload: bytes, world: World) -> set[int]:
    queue, program, count, flags = _u(payload, 0, 8), _u(payload, 8, 8), _u(payload, 16, 4), _u(payload, 20, 4)
    faults = {UNSUPPORTED} if flags else set[int]()
    if not queue or not program or not count:
        faults.add(INVALID_ARGUMENT)
    if count > world.max_bindings:
        faults.add(RESOURCE_LIMIT)
    if len(payload) != 32 + 32 * count:
        faults.add(INVALID_ARGUMENT)
        return faults
    slots = set()
    for at in range(32, len(payload), 32):
        buffer, offset, size = (_u(payload, at + part, 8) for part in (0, 8, 16))
        slots.add(_u(payload, at + 24, 4))
        if (
            not buffer or not size or offset + size >= _U64 or payload[at + 28] not in (1, 2, 3)
            or any(payload[at + 29 : at + 32])
        ):  # fmt: skip
            faults.add(INVALID_ARGUMENT)
    if len(slots) != count:
        faults.add(INVALID_ARGUMENT)
    return faults


_SHAPES: Final[Mapping[int, Callable[[bytes, World], set[int]]]] = {
    CREATE_CONTEXT: _shape_context,
    CREATE_QUEUE: _shape_queue,
    ALLOCATE_BUFFER: _shape_allocate,
    READ_BUFFER: _shape_read,
    WRITE_BUFFER: _shape_write,
    LOAD_PROGRAM: _shape_load,
    SUBMIT: _shape_submit,
}


# Step 6: what is alive, quotas, ranges, usage


def _meaning(opcode: int, frame: bytes, world: World) -> set[int]:
    payload = frame[16:]
    looks = _MEANINGS.get(opcode)
    return looks(payload, world) if looks is not None else set()


def _in_context(payload: bytes, world: World) -> set[int]:
    return set() if _u(payload, 0, 8) in world.contexts else {STALE_OBJECT}


def _released(kind: str) -> Callable[[bytes, World], set[int]]:
    def look(payload: bytes, world: World) -> set[int]:
        target = _u(payload, 0, 8)
        if target not in getattr(world, kind):
            return {STALE_OBJECT}
        return {BUSY} if target in world.busy or target in world.pending else set()

    return look


def _polled(payload: bytes, world: World) -> set[int]:
    return set() if _u(payload, 0, 8) in world.events else {STALE_OBJECT}


def _cancelled(payload: bytes, world: World) -> set[int]:
    event = _u(payload, 0, 8)
    faults = set() if world.capabilities & 1 << 2 else {UNSUPPORTED}
    if event not in world.events:
        return faults | {STALE_OBJECT}
    return faults or (set() if event in world.pending else {BUSY})


def _allocated(payload: bytes, world: World) -> set[int]:
    faults = _in_context(payload, world)
    if not world.capabilities & _DOMAIN_BIT[payload[24]]:
        faults.add(UNSUPPORTED)
    if _u(payload, 8, 8) > world.max_buffer_bytes:
        faults.add(RESOURCE_LIMIT)
    return faults


def _transferred(usage: int) -> Callable[[bytes, World], set[int]]:
    def look(payload: bytes, world: World) -> set[int]:
        buffer = world.buffers.get(_u(payload, 0, 8))
        if buffer is None:
            return {STALE_OBJECT}
        faults = set() if buffer.usage & usage else {PERMISSION_DENIED}
        return faults | ({OUT_OF_BOUNDS} if _u(payload, 8, 8) + _u(payload, 16, 8) > buffer.bytes else set())

    return look


def _loaded(payload: bytes, world: World) -> set[int]:
    faults = _in_context(payload, world)
    return faults | ({RESOURCE_LIMIT} if _u(payload, 64, 8) > world.max_artifact_bytes else set())


def _submitted(payload: bytes, world: World) -> set[int]:
    queue, program = _u(payload, 0, 8), _u(payload, 8, 8)
    owner = world.queues.get(queue)
    faults: set[int] = set()
    if owner is None or world.programs.get(program) != owner:
        faults.add(STALE_OBJECT)
    for at in range(32, len(payload), 32):
        buffer = world.buffers.get(_u(payload, at, 8))
        if buffer is None or buffer.context != owner:
            faults.add(STALE_OBJECT)
            continue
        if _u(payload, at + 8, 8) + _u(payload, at + 16, 8) > buffer.bytes:
            faults.add(OUT_OF_BOUNDS)
        if not buffer.usage & _NEEDS[payload[at + 28]]:
            faults.add(PERMISSION_DENIED)
    return faults


_MEANINGS: Final[Mapping[int, Callable[[bytes, World], set[int]]]] = {
    DESTROY_CONTEXT: _released("contexts"),
    FREE_BUFFER: _released("buffers"),
    UNLOAD_PROGRAM: _released("programs"),
    DESTROY_QUEUE: _released("queues"),
    DESTROY_EVENT: _released("events"),
    POLL_EVENT: _polled,
    CANCEL_EVENT: _cancelled,
    CREATE_QUEUE: _in_context,
    ALLOCATE_BUFFER: _allocated,
    WRITE_BUFFER: _transferred(2),
    READ_BUFFER: _transferred(1),
    LOAD_PROGRAM: _loaded,
    SUBMIT: _submitted,
}


# Responses


class Response(NamedTuple):
    """A response that holds together: its status (NOTHING if the head came back empty) and payload."""

    status: int
    payload: bytes


class BadResponse(Exception):
    """What came back is no response of this protocol; the text says why."""


def response(opcode: int, request_id: int, used: bytes, asked: int = 0) -> Response:
    """Check the used bytes of a response on their own (wire-abi.md 3.2, 4.5, 5.6). `asked` is a READ_BUFFER's size.
    Raises BadResponse."""
    if not used:
        return Response(NOTHING, b"")
    if len(used) < 16:
        raise BadResponse(f"{len(used)} bytes used")
    status, flags, size, echoed = _u(used, 0, 2), _u(used, 2, 2), _u(used, 4, 4), _u(used, 8, 8)
    if flags or size != len(used) - 16 or echoed != request_id:
        raise BadResponse(f"flags {flags}, {size} bytes of payload in {len(used)}, request {echoed} for {request_id}")
    payload = used[16:]
    wanted = OK_PAYLOAD.get(opcode, asked) if status == OK else 0
    if len(payload) != wanted and not (status and opcode == SUBMIT and len(payload) == ID_BYTES):
        raise BadResponse(f"{len(payload)} bytes of payload with status {status}, should be {wanted}")
    if opcode == POLL_EVENT and status == OK:
        state, error, reserved = _u(payload, 0, 2), _u(payload, 2, 2), _u(payload, 4, 4)
        if state > 3 or reserved or (error != 0) is not (state == 2):
            raise BadResponse(f"event state {state} with error {error}, reserved {reserved}")
    elif len(payload) == ID_BYTES and _u(payload, 0, 8) == 0 and opcode != READ_BUFFER:
        raise BadResponse("an object ID of zero")
    return Response(status, payload)
