"""For a request and what is alive: every answer that the standard allows (wire-abi.md 3 to 6; virtqueue.md 5).

The standard orders checks in steps but not within a step, so a frame with two faults of one step may be answered with
either status. Shares no code with the device: fields are cut out one by one. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from virtaccel.harness.oracle import frames as f
from virtaccel.harness.oracle.frames import (
    BUSY,
    INVALID_ARGUMENT,
    NOTHING,
    OK,
    OUT_OF_BOUNDS,
    PERMISSION_DENIED,
    RESOURCE_LIMIT,
    STALE_OBJECT,
    UNSUPPORTED,
    field,
)
from virtaccel.harness.oracle.model import UNKNOWN, Model

Outcomes: TypeAlias = frozenset[int]
_FIXED: Final = {
    f.INFO: 0, f.CREATE_CONTEXT: 8, f.DESTROY_CONTEXT: 8, f.ALLOCATE: 40, f.FREE: 8, f.WRITE: 24, f.READ: 24,
    f.LOAD: 80, f.UNLOAD: 8, f.CREATE_QUEUE: 16, f.DESTROY_QUEUE: 8, f.SUBMIT: 32, f.POLL: 8, f.CANCEL: 8,
    f.DESTROY_EVENT: 8,
}  # fmt: skip
_WITH_TAIL: Final = frozenset({f.WRITE, f.LOAD, f.SUBMIT})
_U64: Final = 1 << 64
# Usage that a binding's access needs (specification.md 4.4): read, write, both.
_NEEDS: Final = {1: f.INPUT | f.STATE, 2: f.OUTPUT | f.STATE, 3: f.STATE}


def outcomes(frame: bytes, writable: int, model: Model) -> Outcomes:
    """Everything the standard allows as an answer to `frame` with `writable` bytes of room.

    OK in it says that the request is sound as far as the standard can tell; a backend may still refuse it.
    """
    if len(frame) < 16 or writable < 16:
        return frozenset({NOTHING})
    if len(frame) > model.limits.max_request:
        return frozenset({RESOURCE_LIMIT})
    opcode, flags, payload_bytes, request_id = f.HEADER.unpack_from(frame)
    if payload_bytes != len(frame) - 16:
        return frozenset({INVALID_ARGUMENT})
    # A request ID of zero breaks 3.1; no step is named for it.
    early = {INVALID_ARGUMENT} if request_id == 0 else set[int]()
    if opcode not in _FIXED or flags:
        return frozenset({UNSUPPORTED} | early)
    faults = early | _shape(opcode, frame[16:], writable, model)
    if faults:
        return frozenset(faults)
    meaning = _MEANINGS.get(opcode)
    return frozenset((meaning(frame[16:], model) if meaning is not None else None) or {OK})


# Step 5: lengths, counts, reserved bytes, scalars, room


def _shape(opcode: int, payload: bytes, writable: int, model: Model) -> set[int]:
    room = f.OK_PAYLOAD.get(opcode)
    fixed = _FIXED[opcode]
    if len(payload) < fixed or (len(payload) > fixed and opcode not in _WITH_TAIL):
        return {INVALID_ARGUMENT} | ({NOTHING} if writable < 16 + (room or 0) else set())
    shape = _SHAPES.get(opcode)
    if shape is not None:
        faults = shape(payload, model)
    else:
        faults = {INVALID_ARGUMENT} if opcode != f.INFO and field(payload, 0) == 0 else set()
    if room is None:
        room = field(payload, 16)
        if 16 + room > model.limits.max_response:
            faults.add(RESOURCE_LIMIT)
    return faults | ({NOTHING} if writable < 16 + room else set())


def _faults(unsupported: object, invalid: object) -> set[int]:
    return ({UNSUPPORTED} if unsupported else set()) | ({INVALID_ARGUMENT} if invalid else set())


def _shape_context(payload: bytes, model: Model) -> set[int]:
    return _faults(field(payload, 0, 4), field(payload, 4, 4))


def _shape_queue(payload: bytes, model: Model) -> set[int]:
    return _faults(field(payload, 8, 4), field(payload, 12, 4) or not field(payload, 0))


def _shape_allocate(payload: bytes, model: Model) -> set[int]:
    context, size, alignment = (field(payload, at) for at in (0, 8, 16))
    usage = field(payload, 32, 4)
    wrong = (
        context == 0 or size == 0 or usage == 0 or alignment == 0 or alignment.bit_count() != 1
        or payload[24] not in f.DOMAIN_CAPABILITY or any(payload[25:32]) or any(payload[36:40])
    )  # fmt: skip
    return _faults(usage >> 5, wrong)


def _shape_transfer(payload: bytes, model: Model) -> set[int]:
    buffer, offset, size = (field(payload, at) for at in (0, 8, 16))
    return _faults(0, not buffer or not size or offset + size >= _U64)


def _shape_write(payload: bytes, model: Model) -> set[int]:
    return _shape_transfer(payload, model) | _faults(0, field(payload, 16) != len(payload) - 24)


def _shape_load(payload: bytes, model: Model) -> set[int]:
    size, resident = field(payload, 64), field(payload, 72)
    wrong = not field(payload, 0) or not field(payload, 8, 4) or not size or not resident or size != len(payload) - 80
    return _faults(field(payload, 12, 4), wrong)


def _shape_submit(payload: bytes, model: Model) -> set[int]:
    queue, program, count = field(payload, 0), field(payload, 8), field(payload, 16, 4)
    faults = _faults(field(payload, 20, 4), not queue or not program or not count)
    if count > model.limits.info.bindings:
        faults.add(RESOURCE_LIMIT)
    if len(payload) != 32 + 32 * count:
        return faults | {INVALID_ARGUMENT}
    rows = [payload[at : at + 32] for at in range(32, len(payload), 32)]
    wrong = any(
        _shape_transfer(row, model) or row[28] not in _NEEDS or any(row[29:32]) for row in rows
    )  # fmt: skip
    return faults | _faults(0, wrong or len({field(row, 24, 4) for row in rows}) != count)


_SHAPES: Final[Mapping[int, Callable[[bytes, Model], set[int]]]] = {
    f.CREATE_CONTEXT: _shape_context, f.CREATE_QUEUE: _shape_queue, f.ALLOCATE: _shape_allocate,
    f.READ: _shape_transfer, f.WRITE: _shape_write, f.LOAD: _shape_load, f.SUBMIT: _shape_submit,
}  # fmt: skip


# Step 6: what is alive, quotas, ranges, usage


def _when(*rows: tuple[object, int]) -> set[int]:
    """The statuses of those rows that hold."""
    return {status for holds, status in rows if holds}


def _created_context(payload: bytes, model: Model) -> set[int]:
    return _when((model.counts()[0] >= model.limits.info.contexts, RESOURCE_LIMIT))


def _created_queue(payload: bytes, model: Model) -> set[int]:
    context = field(payload, 0)
    full = model.children(context, model.queues) >= model.limits.info.queues
    return _when((context not in model.contexts, STALE_OBJECT), (full, RESOURCE_LIMIT))


def _allocated(payload: bytes, model: Model) -> set[int]:
    context, size, limits = field(payload, 0), field(payload, 8), model.limits
    full = model.children(context, model.buffers) >= limits.info.buffers
    over = limits.backing and model.backing + size > limits.backing
    return _when(
        (context not in model.contexts, STALE_OBJECT),
        (not limits.info.capabilities & f.DOMAIN_CAPABILITY[payload[24]], UNSUPPORTED),
        (full or over or size > limits.info.buffer_bytes, RESOURCE_LIMIT),
    )


def _loaded(payload: bytes, model: Model) -> set[int]:
    context, limits = field(payload, 0), model.limits
    full = model.children(context, model.programs) + model.loading(context) >= limits.info.programs
    over = limits.resident and model.resident + field(payload, 72) > limits.resident
    return _when(
        (context not in model.contexts, STALE_OBJECT),
        (full or over or field(payload, 64) > limits.info.artifact_bytes, RESOURCE_LIMIT),
    )


def _transferred(usage: int) -> Callable[[bytes, Model], set[int]]:
    def judge(payload: bytes, model: Model) -> set[int]:
        buffer = model.buffers.get(field(payload, 0))
        if buffer is None:
            return {STALE_OBJECT}
        outside = field(payload, 8) + field(payload, 16) > buffer.bytes
        return _when((not buffer.usage & usage, PERMISSION_DENIED), (outside, OUT_OF_BOUNDS))

    return judge


def _submitted(payload: bytes, model: Model) -> set[int]:
    queue, program = model.queues.get(field(payload, 0)), model.programs.get(field(payload, 8))
    owner = None if queue is None else queue.context
    faults = _when((owner is None or program is None or program.context != owner, STALE_OBJECT))
    if owner is not None and model.children(owner, model.events) >= model.limits.info.events:
        faults.add(RESOURCE_LIMIT)
    for at in range(32, len(payload), 32):
        buffer = model.buffers.get(field(payload, at))
        if buffer is None or buffer.context != owner:
            faults.add(STALE_OBJECT)
            continue
        outside = field(payload, at + 8) + field(payload, at + 16) > buffer.bytes
        faults |= _when((outside, OUT_OF_BOUNDS), (not buffer.usage & _NEEDS[payload[at + 28]], PERMISSION_DENIED))
    return faults


def _released(kind: str) -> Callable[[bytes, Model], set[int]]:
    def judge(payload: bytes, model: Model) -> set[int]:
        target = field(payload, 0)
        if target not in getattr(model, kind):
            return {STALE_OBJECT}
        return _perhaps(model, target) or _when((model.is_held(target), BUSY))

    return judge


def _perhaps(model: Model, target: int) -> set[int]:
    """An event that may have ended by itself meanwhile, or not yet."""
    event = model.events.get(target)
    return {OK, BUSY} if event is not None and event.state == UNKNOWN else set()


def _polled(payload: bytes, model: Model) -> set[int]:
    return _when((field(payload, 0) not in model.events, STALE_OBJECT))


def _cancelled(payload: bytes, model: Model) -> set[int]:
    target = field(payload, 0)
    event = model.events.get(target)
    faults = _when((not model.limits.info.capabilities & f.CANCELLATION, UNSUPPORTED), (event is None, STALE_OBJECT))
    if event is None or faults:
        return faults
    return _perhaps(model, target) or _when((event.ended, BUSY))


_MEANINGS: Final[Mapping[int, Callable[[bytes, Model], set[int]]]] = {
    f.CREATE_CONTEXT: _created_context, f.DESTROY_CONTEXT: _released("contexts"),
    f.ALLOCATE: _allocated, f.FREE: _released("buffers"), f.WRITE: _transferred(f.DESTINATION),
    f.READ: _transferred(f.SOURCE), f.LOAD: _loaded, f.UNLOAD: _released("programs"),
    f.CREATE_QUEUE: _created_queue, f.DESTROY_QUEUE: _released("queues"),
    f.SUBMIT: _submitted, f.POLL: _polled, f.CANCEL: _cancelled, f.DESTROY_EVENT: _released("events"),
}  # fmt: skip
