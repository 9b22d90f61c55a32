"""Requests: from the copied bytes of a frame to checked values (wire-abi.md 5; virtqueue.md, section 5, step 5).

Everything a frame can be judged on alone is judged here: flags, reserved bytes, scalars, lengths, counts, zero where
nonzero is required, arithmetic. Object IDs are only seen to be nonzero; whether they resolve is state. `frame` holds
the fixed part, copied once, and nothing here reads guest memory except the tail of a long binding array.

Order within one request: flags, then reserved bytes and scalars, then lengths and counts, then IDs. All raise
CommandError.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple

from virtaccel.device import wire
from virtaccel.device.backend import Limits
from virtaccel.device.config import U64_MAX
from virtaccel.device.errors import CommandError
from virtaccel.device.wire import Status
from virtaccel.virtqueue.segments import Chain, gather

HEADER_BYTES: Final = wire.REQUEST_HEADER.size
PREFIX_BYTES: Final = 256
"""How much of a frame is copied at once: every fixed part, and a SUBMIT of up to six bindings."""

DOMAINS: Final = frozenset(int(domain) for domain in wire.Domain)
ACCESSES: Final = frozenset(int(access) for access in wire.Access)
KNOWN_USAGE: Final = sum(int(usage) for usage in wire.Usage)

_BINDINGS_AT: Final = HEADER_BYTES + wire.SUBMIT_REQUEST.size
_BINDING_BYTES: Final = wire.BINDING.size
_REMEMBERED: Final = 256
_REMEMBERED_BINDINGS: Final = 64
_NO_RESERVED_7: Final = bytes(7)
_NO_RESERVED_3: Final = bytes(3)

# Bound once: an attribute of a Struct costs as much as unpacking it.
_unpack_id: Final = wire.OBJECT.unpack_from
_unpack_context: Final = wire.CREATE_CONTEXT_REQUEST.unpack_from
_unpack_allocate: Final = wire.ALLOCATE_BUFFER_REQUEST.unpack_from
_unpack_transfer: Final = wire.TRANSFER_BUFFER_REQUEST.unpack_from
_unpack_load: Final = wire.LOAD_PROGRAM_REQUEST.unpack_from
_unpack_queue: Final = wire.CREATE_QUEUE_REQUEST.unpack_from
_unpack_submit: Final = wire.SUBMIT_REQUEST.unpack_from
_unpack_counts: Final = Struct("<II").unpack_from  # of a SUBMIT: binding_count and flags
_iter_bindings: Final = wire.BINDING.iter_unpack


class Allocate(NamedTuple):
    """ALLOCATE_BUFFER: sizes in bytes, alignment a power of two, domain and usage assigned values."""

    context: int
    bytes: int
    alignment: int
    domain: int
    usage: int


class Transfer(NamedTuple):
    """WRITE_BUFFER or READ_BUFFER: `offset + bytes` is a 64-bit number."""

    buffer: int
    offset: int
    bytes: int


class LoadProgram(NamedTuple):
    """LOAD_PROGRAM without its artifact, which is the `payload_bytes` behind the fixed part."""

    context: int
    format: int
    target: tuple[int, ...]
    payload_bytes: int
    resident_bytes: int


class Submit(NamedTuple):
    """SUBMIT: bindings as (buffer, offset, bytes, slot, access, reserved), slots unique. `payload` is what it was
    decoded from."""

    queue: int
    program: int
    timeout_ns: int
    bindings: tuple[tuple[int, int, int, int, int, bytes], ...]
    payload: bytes


def invalid(message: str) -> CommandError:
    return CommandError(Status.INVALID_ARGUMENT, message)


def unsupported(message: str) -> CommandError:
    return CommandError(Status.UNSUPPORTED, message)


def decode_nothing(frame: bytes, chain: Chain, limits: Limits) -> None:
    """GET_DEVICE_INFO."""


def decode_id(frame: bytes, chain: Chain, limits: Limits) -> int:
    """Every command that names exactly one object."""
    object_id: int = _unpack_id(frame, HEADER_BYTES)[0]
    if not object_id:
        raise invalid("object ID is zero")
    return object_id


def decode_create_context(frame: bytes, chain: Chain, limits: Limits) -> None:
    flags, reserved = _unpack_context(frame, HEADER_BYTES)
    if flags:
        raise unsupported(f"context flags {flags:#x}")
    if reserved:
        raise invalid("reserved bytes are not zero")


def decode_create_queue(frame: bytes, chain: Chain, limits: Limits) -> int:
    context, flags, reserved = _unpack_queue(frame, HEADER_BYTES)
    if flags:
        raise unsupported(f"queue flags {flags:#x}")
    if reserved:
        raise invalid("reserved bytes are not zero")
    if not context:
        raise invalid("object ID is zero")
    return int(context)


def decode_allocate(frame: bytes, chain: Chain, limits: Limits) -> Allocate:
    context, size, alignment, domain, reserved0, usage, reserved1 = _unpack_allocate(frame, HEADER_BYTES)
    if usage & ~KNOWN_USAGE:
        raise unsupported(f"usage {usage:#x}")
    if reserved0 != _NO_RESERVED_7 or reserved1:
        raise invalid("reserved bytes are not zero")
    if not size or not usage:
        raise invalid("bytes or usage is zero")
    if not alignment or alignment & (alignment - 1):
        raise invalid(f"alignment {alignment} is no power of two")
    if domain not in DOMAINS:
        raise invalid(f"memory domain {domain}")
    if not context:
        raise invalid("object ID is zero")
    return Allocate(context, size, alignment, domain, usage)


def _decode_transfer(frame: bytes) -> Transfer:
    buffer, offset, size = _unpack_transfer(frame, HEADER_BYTES)
    if not size:
        raise invalid("bytes is zero")
    if offset + size > U64_MAX:
        raise invalid("offset + bytes overflows")
    if not buffer:
        raise invalid("object ID is zero")
    return Transfer(buffer, offset, size)


def decode_write(frame: bytes, chain: Chain, limits: Limits) -> Transfer:
    """The data behind the fixed part is exactly `bytes` long; it stays in guest memory."""
    transfer = _decode_transfer(frame)
    if transfer.bytes != chain.readable_bytes - (HEADER_BYTES + wire.TRANSFER_BUFFER_REQUEST.size):
        raise invalid("bytes is not the length of the data")
    return transfer


def decode_read(frame: bytes, chain: Chain, limits: Limits) -> Transfer:
    return _decode_transfer(frame)


def decode_load(frame: bytes, chain: Chain, limits: Limits) -> LoadProgram:
    context, format_id, flags, *target, payload_bytes, resident_bytes = _unpack_load(frame, HEADER_BYTES)
    if flags:
        raise unsupported(f"program flags {flags:#x}")
    if not format_id:
        raise invalid("artifact format is zero")
    if not payload_bytes or not resident_bytes:
        raise invalid("payload_bytes or resident_bytes is zero")
    if payload_bytes != chain.readable_bytes - (HEADER_BYTES + wire.LOAD_PROGRAM_REQUEST.size):
        raise invalid("payload_bytes is not the length of the artifact")
    if not context:
        raise invalid("object ID is zero")
    return LoadProgram(context, format_id, tuple(target), payload_bytes, resident_bytes)


def decode_submit(frame: bytes, chain: Chain, limits: Limits) -> Submit:
    count, flags = _unpack_counts(frame, HEADER_BYTES + 16)
    if flags:
        raise unsupported(f"submission flags {flags:#x}")
    if not count:
        raise invalid("no bindings")
    if count > limits.max_bindings_per_submission:  # before anything is multiplied or allocated
        raise CommandError(Status.RESOURCE_LIMIT, f"{count} bindings")
    end = _BINDINGS_AT + count * _BINDING_BYTES
    if chain.readable_bytes != end:
        raise invalid("payload is not as long as its bindings")
    if end > len(frame):
        frame += gather(chain.readable, len(frame), end - len(frame))
    payload = frame[HEADER_BYTES:]
    return _known_submission(payload) if count <= _REMEMBERED_BINDINGS else _submission(payload)


def _submission(payload: bytes) -> Submit:
    """Judges a SUBMIT payload whose length fits its count."""
    queue, program, count, _, timeout_ns = _unpack_submit(payload)
    if not queue or not program:
        raise invalid("object ID is zero")
    bindings = tuple(_iter_bindings(payload[wire.SUBMIT_REQUEST.size :]))
    slots = set()
    for buffer, offset, size, slot, access, reserved in bindings:
        if reserved != _NO_RESERVED_3:
            raise invalid("reserved bytes are not zero")
        if access not in ACCESSES:
            raise invalid(f"access {access}")
        if not size:
            raise invalid("bytes is zero")
        if offset + size > U64_MAX:
            raise invalid("offset + bytes overflows")
        if not buffer:
            raise invalid("object ID is zero")
        slots.add(slot)
    if len(slots) != count:
        raise invalid("a slot is bound twice")
    return Submit(queue, program, timeout_ns, bindings, payload)


# Drivers submit the same bytes again and again. What they mean depends on nothing else, and failures are not kept.
_known_submission: Final = lru_cache(_REMEMBERED)(_submission)
