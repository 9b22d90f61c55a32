"""The vhost-user message codec: bytes to messages and back, for both ends. No socket, no state.

Vhost-user Protocol, "Message Specification" and "Front-end message types". A message is a header of 12 bytes (request,
flags, payload size, native byte order) and a payload; file descriptors travel beside it. `RULES` says for each request
how long its payload may be, how many descriptors come with it, and how it answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum, IntFlag
from struct import Struct
from typing import NamedTuple

from virtaccel.device.front_end import MemoryRegion as MemoryRegion  # a word of this codec too

# Native byte order, as the standard has it: both ends are on one machine.
HEADER = Struct("=III")
U64 = Struct("=Q")
VRING_STATE = Struct("=II")
VRING_ADDRESS = Struct("=IIQQQQ")
TABLE_HEAD = Struct("=II")
REGION = Struct("=QQQQ")
SINGLE_REGION = Struct("=QQQQQ")
CONFIG_HEAD = Struct("=III")

VERSION = 1
VERSION_MASK = 0x3
FLAG_REPLY = 1 << 2
FLAG_NEED_REPLY = 1 << 3

# The kernel passes at most 253 descriptors with a message (SCM_MAX_FD); a guest has a handful of regions, and one more
# for each memory module that is plugged in.
MAX_MEMORY_SLOTS = 64
# More than any virtio device has; ours has 16 bytes.
MAX_CONFIG_BYTES = 256
# Nothing a front end may say is longer: a larger size is not a message of this protocol.
MAX_PAYLOAD_BYTES = 4096

VRING_INDEX_MASK = 0xFF
# Bit 8 of the word: "the invalid FD flag".
VRING_NO_FD = 1 << 8


# Front-end requests, numbered from 1. Names as in the standard, without the prefix.
Request = IntEnum(
    "Request",
    "GET_FEATURES SET_FEATURES SET_OWNER RESET_OWNER SET_MEM_TABLE SET_LOG_BASE SET_LOG_FD SET_VRING_NUM "
    "SET_VRING_ADDR SET_VRING_BASE GET_VRING_BASE SET_VRING_KICK SET_VRING_CALL SET_VRING_ERR "
    "GET_PROTOCOL_FEATURES SET_PROTOCOL_FEATURES GET_QUEUE_NUM SET_VRING_ENABLE SEND_RARP NET_SET_MTU "
    "SET_BACKEND_REQ_FD IOTLB_MSG SET_VRING_ENDIAN GET_CONFIG SET_CONFIG CREATE_CRYPTO_SESSION "
    "CLOSE_CRYPTO_SESSION POSTCOPY_ADVISE POSTCOPY_LISTEN POSTCOPY_END GET_INFLIGHT_FD SET_INFLIGHT_FD "
    "GPU_SET_SOCKET RESET_DEVICE VRING_KICK GET_MAX_MEM_SLOTS ADD_MEM_REG REM_MEM_REG SET_STATUS GET_STATUS "
    "GET_SHARED_OBJECT SET_DEVICE_STATE_FD CHECK_DEVICE_STATE",
)


class ProtocolFeature(IntFlag):
    """Protocol feature bits that this device offers, by their place in the mask."""

    MQ = 1 << 0
    REPLY_ACK = 1 << 3
    BACKEND_REQ = 1 << 5
    CONFIG = 1 << 9
    RESET_DEVICE = 1 << 13
    CONFIGURE_MEM_SLOTS = 1 << 15
    STATUS = 1 << 16


VIRTIO_F_VERSION_1 = 1 << 32
VHOST_USER_F_PROTOCOL_FEATURES = 1 << 30


class MessageError(Exception):
    """These bytes are no message of this protocol: the stream cannot be trusted any further."""


class PayloadError(Exception):
    """A message whose payload or descriptors do not fit its request; the stream itself is still in step."""


class Header(NamedTuple):
    """`request` is any number; `size` is the payload's, in bytes, not above MAX_PAYLOAD_BYTES."""

    request: int
    flags: int
    size: int


class Message(NamedTuple):
    """One message without its descriptors, which the channel owns."""

    request: int
    flags: int
    payload: bytes

    @property
    def need_reply(self) -> bool:
        return bool(self.flags & FLAG_NEED_REPLY)

    @property
    def name(self) -> str:
        return NAMES.get(self.request, f"request {self.request}")


class VringState(NamedTuple):
    """Vring index and a number: size, base or on/off, depending on the request."""

    vring: int
    num: int


class VringAddress(NamedTuple):
    """Where a ring's parts are, in user addresses of the front end (no IOMMU is offered)."""

    vring: int
    flags: int
    descriptors: int
    used: int
    available: int
    log: int


class VringFd(NamedTuple):
    """Vring index and whether a descriptor comes along (kick, call, err)."""

    vring: int
    has_fd: bool


class ConfigAccess(NamedTuple):
    """A range of the config space and the bytes sent for it."""

    offset: int
    size: int
    flags: int
    data: bytes


class Rule(NamedTuple):
    """What fits a request: payload bytes and descriptors, both as inclusive bounds, and whether it has a reply body."""

    least: int
    most: int
    least_fds: int = 0
    most_fds: int = 0
    replies: bool = False


_EMPTY = Rule(0, 0)
_GET = Rule(0, 0, replies=True)
_U64 = Rule(8, 8)
_STATE = Rule(8, 8)
_VRING_FD = Rule(8, 8, 0, 1)

# The requests this device serves. Any other number is refused.
RULES: Mapping[int, Rule] = {
    Request.GET_FEATURES: _GET,
    Request.SET_FEATURES: _U64,
    Request.SET_OWNER: _EMPTY,
    Request.RESET_OWNER: _EMPTY,
    Request.SET_MEM_TABLE: Rule(8, 8 + MAX_MEMORY_SLOTS * REGION.size, 0, MAX_MEMORY_SLOTS),
    Request.SET_VRING_NUM: _STATE,
    Request.SET_VRING_ADDR: Rule(VRING_ADDRESS.size, VRING_ADDRESS.size),
    Request.SET_VRING_BASE: _STATE,
    Request.GET_VRING_BASE: Rule(8, 8, replies=True),
    Request.SET_VRING_KICK: _VRING_FD,
    Request.SET_VRING_CALL: _VRING_FD,
    Request.SET_VRING_ERR: _VRING_FD,
    Request.GET_PROTOCOL_FEATURES: _GET,
    Request.SET_PROTOCOL_FEATURES: _U64,
    Request.GET_QUEUE_NUM: _GET,
    Request.SET_VRING_ENABLE: _STATE,
    Request.SET_BACKEND_REQ_FD: Rule(0, 0, 1, 1),
    Request.GET_CONFIG: Rule(CONFIG_HEAD.size, CONFIG_HEAD.size + MAX_CONFIG_BYTES, replies=True),
    Request.SET_CONFIG: Rule(CONFIG_HEAD.size, CONFIG_HEAD.size + MAX_CONFIG_BYTES),
    Request.RESET_DEVICE: _EMPTY,
    Request.GET_MAX_MEM_SLOTS: _GET,
    Request.ADD_MEM_REG: Rule(SINGLE_REGION.size, SINGLE_REGION.size, 1, 1),
    # "the back-end MAY accept messages with one file descriptor [...] MUST close it"
    Request.REM_MEM_REG: Rule(SINGLE_REGION.size, SINGLE_REGION.size, 0, 1),
    Request.SET_STATUS: _U64,
    Request.GET_STATUS: _GET,
}

# Requests that are not served and whose sender would wait for an answer that has no way to say no.
WAITS_FOR_REPLY = frozenset({
    Request.IOTLB_MSG, Request.CREATE_CRYPTO_SESSION, Request.POSTCOPY_ADVISE, Request.POSTCOPY_END,
    Request.GET_INFLIGHT_FD, Request.GET_SHARED_OBJECT, Request.SET_DEVICE_STATE_FD, Request.CHECK_DEVICE_STATE,
})  # fmt: skip

NAMES: Mapping[int, str] = {int(request): request.name for request in Request}


def decode_header(data: bytes) -> Header:
    """Header from its 12 bytes. Raises MessageError for another version, a reply, or a size beyond the protocol."""
    request, flags, size = HEADER.unpack(data)
    if flags & VERSION_MASK != VERSION:
        raise MessageError(f"message version {flags & VERSION_MASK}, not {VERSION}")
    # Before a byte of it is read: the size is whatever the other end says.
    if size > MAX_PAYLOAD_BYTES:
        raise MessageError(f"{NAMES.get(request, request)} announces a payload of {size} bytes")
    return Header(request, flags, size)


def check(message: Message, fds: int) -> Rule:
    """The rule of a served request. Raises PayloadError unless payload size and number of descriptors fit it."""
    rule = RULES[message.request]
    size = len(message.payload)
    if not rule.least <= size <= rule.most:
        raise PayloadError(f"{message.name} with {size} bytes of payload, not {_bounds(rule.least, rule.most)}")
    if not rule.least_fds <= fds <= rule.most_fds:
        raise PayloadError(f"{message.name} with {fds} descriptors, not {_bounds(rule.least_fds, rule.most_fds)}")
    return rule


def _bounds(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"


def encode(request: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """A message's bytes; `flags` beyond the version."""
    return HEADER.pack(request, VERSION | flags, len(payload)) + payload


def encode_reply(request: int, payload: bytes) -> bytes:
    return encode(request, payload, FLAG_REPLY)


def encode_ack(request: int, failed: bool) -> bytes:
    """The answer to need_reply: 0 for success (VHOST_USER_PROTOCOL_F_REPLY_ACK)."""
    return encode_reply(request, U64.pack(int(failed)))


def decode_u64(payload: bytes) -> int:
    (value,) = U64.unpack(payload)
    return int(value)


def decode_vring_state(payload: bytes) -> VringState:
    return VringState(*VRING_STATE.unpack(payload))


def decode_vring_address(payload: bytes) -> VringAddress:
    return VringAddress(*VRING_ADDRESS.unpack(payload))


def decode_vring_fd(payload: bytes, fds: int) -> VringFd:
    """Raises PayloadError if descriptor and invalid-FD flag do not agree, or an unknown bit is set."""
    value = decode_u64(payload)
    # Reserved bits that are set mean something that we would get wrong.
    if value & ~(VRING_INDEX_MASK | VRING_NO_FD):
        raise PayloadError(f"unknown bits in vring descriptor word {value:#x}")
    has_fd = not value & VRING_NO_FD
    if fds != int(has_fd):
        raise PayloadError(f"{fds} descriptors although the invalid FD flag is {'clear' if has_fd else 'set'}")
    return VringFd(value & VRING_INDEX_MASK, has_fd)


def decode_table(payload: bytes, fds: int) -> tuple[MemoryRegion, ...]:
    """Regions of SET_MEM_TABLE. Raises PayloadError unless there are as many regions, bytes and descriptors as said.

    The structure has room for 8 regions and old front ends send all of it: bytes past the counted regions are ignored.
    """
    count, _padding = TABLE_HEAD.unpack_from(payload)
    if count > MAX_MEMORY_SLOTS:
        raise PayloadError(f"memory table of {count} regions, at most {MAX_MEMORY_SLOTS} are served")
    if len(payload) < TABLE_HEAD.size + count * REGION.size:
        raise PayloadError(f"memory table of {count} regions in {len(payload)} bytes")
    if fds != count:
        raise PayloadError(
            f"memory table of {count} regions with {fds} descriptors: every region needs one, so guest memory must be "
            "shared (QEMU: -object memory-backend-memfd,share=on)"
        )
    return tuple(MemoryRegion(*REGION.unpack_from(payload, TABLE_HEAD.size + i * REGION.size)) for i in range(count))


def decode_single_region(payload: bytes) -> MemoryRegion:
    return MemoryRegion(*SINGLE_REGION.unpack(payload)[1:])


def decode_config(payload: bytes) -> ConfigAccess:
    """GET_CONFIG may carry the room for its answer or not; what is there is not looked at."""
    offset, size, flags = CONFIG_HEAD.unpack_from(payload)
    return ConfigAccess(offset, size, flags, payload[CONFIG_HEAD.size :])


def encode_vring_state(index: int, num: int) -> bytes:
    return VRING_STATE.pack(index, num)


def encode_table(regions: Sequence[MemoryRegion]) -> bytes:
    return TABLE_HEAD.pack(len(regions), 0) + b"".join(REGION.pack(*region) for region in regions)


def encode_single_region(region: MemoryRegion) -> bytes:
    return SINGLE_REGION.pack(0, *region)


def encode_config(offset: int, data: bytes, flags: int = 0) -> bytes:
    return CONFIG_HEAD.pack(offset, len(data), flags) + data
