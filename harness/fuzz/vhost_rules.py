"""What a vhost-user back end has to answer, from the vhost-user specification's text alone.

Knows message numbers, shapes and answers ("Message Specification", "Front-end message types", REPLY_ACK); shares no
code with the device. For any message it says which kind of answer must come, and whether the session may end instead.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

HEADER: Final = Struct("=III")
VERSION: Final = 1
REPLY: Final = 1 << 2
NEED_REPLY: Final = 1 << 3

(GET_FEATURES, SET_FEATURES, SET_OWNER, RESET_OWNER, SET_MEM_TABLE) = range(1, 6)
(SET_VRING_NUM, SET_VRING_ADDR, SET_VRING_BASE, GET_VRING_BASE, SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR,
 GET_PROTOCOL_FEATURES, SET_PROTOCOL_FEATURES, GET_QUEUE_NUM, SET_VRING_ENABLE) = range(8, 19)  # fmt: skip
SET_BACKEND_REQ_FD, GET_CONFIG, SET_CONFIG = 21, 24, 25
RESET_DEVICE, GET_MAX_MEM_SLOTS, ADD_MEM_REG, REM_MEM_REG, SET_STATUS, GET_STATUS = 34, 36, 37, 38, 39, 40

VIRTIO_F_VERSION_1: Final = 1 << 32
PROTOCOL_FEATURES_BIT: Final = 1 << 30
REPLY_ACK: Final = 1 << 3

# Payload bytes, as lowest and highest, and descriptors likewise.
_SHAPES: Final[dict[int, tuple[int, int, int, int]]] = {
    GET_FEATURES: (0, 0, 0, 0), SET_FEATURES: (8, 8, 0, 0), SET_OWNER: (0, 0, 0, 0), RESET_OWNER: (0, 0, 0, 0),
    SET_MEM_TABLE: (8, 4096, 0, 64), SET_VRING_NUM: (8, 8, 0, 0), SET_VRING_ADDR: (40, 40, 0, 0),
    SET_VRING_BASE: (8, 8, 0, 0), GET_VRING_BASE: (8, 8, 0, 0), SET_VRING_KICK: (8, 8, 0, 1),
    SET_VRING_CALL: (8, 8, 0, 1), SET_VRING_ERR: (8, 8, 0, 1), GET_PROTOCOL_FEATURES: (0, 0, 0, 0),
    SET_PROTOCOL_FEATURES: (8, 8, 0, 0), GET_QUEUE_NUM: (0, 0, 0, 0), SET_VRING_ENABLE: (8, 8, 0, 0),
    SET_BACKEND_REQ_FD: (0, 0, 1, 1), GET_CONFIG: (12, 268, 0, 0), SET_CONFIG: (12, 268, 0, 0),
    RESET_DEVICE: (0, 0, 0, 0), GET_MAX_MEM_SLOTS: (0, 0, 0, 0), ADD_MEM_REG: (40, 40, 1, 1),
    REM_MEM_REG: (40, 40, 0, 1), SET_STATUS: (8, 8, 0, 0), GET_STATUS: (0, 0, 0, 0),
}  # fmt: skip
_ANSWERED: Final = frozenset({
    GET_FEATURES, GET_VRING_BASE, GET_PROTOCOL_FEATURES, GET_QUEUE_NUM, GET_CONFIG, GET_MAX_MEM_SLOTS, GET_STATUS,
})  # fmt: skip
# Requests outside what is offered whose sender waits for an answer that cannot say no.
_UNANSWERABLE: Final = frozenset({22, 26, 28, 30, 31, 41, 42, 43})
_VRING: Final = frozenset({
    SET_VRING_NUM, SET_VRING_ADDR, SET_VRING_BASE, GET_VRING_BASE, SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR,
    SET_VRING_ENABLE,
})  # fmt: skip
NEUTRAL: Final = _ANSWERED - {GET_VRING_BASE} | {SET_OWNER, SET_CONFIG}
"""Requests that change nothing about the ring, the memory or what was negotiated."""

OWN, ACK, NONE = "own", "ack", "none"


class Expectation(NamedTuple):
    """`answer`: the request's own reply, an acknowledgement, or none. `good`: True if it must be granted, False if it
    must be refused, None if either will do. `may_end`: the session may end instead of an answer."""

    answer: str
    good: bool | None
    may_end: bool


def expect(request: int, flags: int, payload: bytes, fds: int, acks: bool) -> Expectation:
    """What must follow a whole message with a valid header; `acks` says that REPLY_ACK is in force."""
    acked = ACK if acks and flags & NEED_REPLY else NONE
    shape = _SHAPES.get(request)
    if shape is None:
        return Expectation(acked, False, request in _UNANSWERABLE)
    well_shaped = shape[0] <= len(payload) <= shape[1] and shape[2] <= fds <= shape[3]
    if request in _ANSWERED:
        good = well_shaped and not (request == GET_VRING_BASE and _word(payload, 0) != 0)
        return Expectation(OWN, None if good else False, not good)
    if not well_shaped:
        return Expectation(acked, False, acked == NONE)
    refused = _must_refuse(request, payload, fds)
    granted = request in (SET_FEATURES, SET_PROTOCOL_FEATURES, SET_OWNER)
    # Descriptors that do not agree with the message are a fault of its shape.
    shapeless = request in (SET_MEM_TABLE, SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR)
    return Expectation(acked, False if refused else True if granted else None, acked == NONE and shapeless)


def _word(payload: bytes, at: int) -> int:
    return int.from_bytes(payload[at : at + 4], "little")


def _must_refuse(request: int, payload: bytes, fds: int) -> bool:
    if request == SET_CONFIG:
        return True
    if request in (SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR):
        word = int.from_bytes(payload, "little")
        return bool(word & 0xFF) or bool(word >> 9) or fds != (0 if word & 0x100 else 1)
    if request in _VRING and _word(payload, 0) != 0:
        return True
    if request == SET_VRING_NUM:
        number = _word(payload, 4)
        return number == 0 or number.bit_count() != 1 or number > 32768
    if request == SET_VRING_BASE:
        return _word(payload, 4) > 0xFFFF
    if request == SET_MEM_TABLE:
        count = _word(payload, 0)
        return count != fds or len(payload) < 8 + 32 * count
    return False


def judge_own(request: int, payload: bytes, answer: bytes, config: bytes) -> str | None:
    """What is wrong with a request's own reply, None if nothing is. `config` is the config space."""
    if request == GET_CONFIG:
        offset, size = _word(payload, 0), _word(payload, 4)
        inside = size > 0 and offset + size <= len(config)
        if not inside or not 12 <= len(payload) <= 268:
            return None if not answer else f"config space at {offset}, {size} bytes: {len(answer)} bytes of reply"
        good = answer[:8] == payload[:8] and answer[12:] == config[offset : offset + size]
        return None if good else f"config space at {offset}, {size} bytes: {answer.hex()}"
    if len(answer) != 8:
        return f"request {request} was answered with {len(answer)} bytes"
    value = int.from_bytes(answer, "little")
    if request == GET_FEATURES and not value & VIRTIO_F_VERSION_1:
        return f"features {value:#x} are not those of a modern device"
    if request == GET_VRING_BASE and (_word(answer, 0) != _word(payload, 0) or _word(answer, 4) > 0xFFFF):
        return f"vring base {answer.hex()}"
    if request == GET_STATUS and value > 0xFF:
        return f"device status {value:#x}"
    if request == GET_QUEUE_NUM and value != 1:
        return f"{value} queues"
    return None
