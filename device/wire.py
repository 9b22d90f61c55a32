"""Numbers of protocol 1.0: commands, statuses, sizes (wire-abi.md, sections 1 to 6). No I/O, no state.

Values read from a guest stay `int` until they are validated; the enumerations below name them, they never parse them.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from struct import Struct

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0
COMMAND_QUEUE = 0

HARD_MAX_CHAIN_DESCRIPTORS = 256
MIN_MAX_REQUEST_BYTES = 97
MIN_MAX_RESPONSE_BYTES = 92
HARD_MAX_REQUEST_BYTES = 16 << 20
HARD_MAX_RESPONSE_BYTES = 16 << 20
HARD_MAX_BINDINGS = 4096


class Opcode(IntEnum):
    """Commands (section 5)."""

    GET_DEVICE_INFO = 0x0001
    CREATE_CONTEXT = 0x0100
    DESTROY_CONTEXT = 0x0101
    ALLOCATE_BUFFER = 0x0200
    FREE_BUFFER = 0x0201
    WRITE_BUFFER = 0x0202
    READ_BUFFER = 0x0203
    LOAD_PROGRAM = 0x0300
    UNLOAD_PROGRAM = 0x0301
    CREATE_QUEUE = 0x0400
    DESTROY_QUEUE = 0x0401
    SUBMIT = 0x0500
    POLL_EVENT = 0x0501
    CANCEL_EVENT = 0x0502
    DESTROY_EVENT = 0x0503


class Status(IntEnum):
    """Response statuses (section 6)."""

    OK = 0
    UNSUPPORTED = 1
    INCOMPATIBLE = 2
    INVALID_ARGUMENT = 3
    OUT_OF_BOUNDS = 4
    BUSY = 5
    OUT_OF_MEMORY = 6
    RESOURCE_LIMIT = 7
    DEADLINE_EXPIRED = 8
    DEVICE_LOST = 9
    PERMISSION_DENIED = 10
    STALE_OBJECT = 11
    INTERNAL_ERROR = 65535


class Domain(IntEnum):
    """Memory domains (section 4.2)."""

    HOST = 1
    DEVICE = 2
    SHARED = 3


class Usage(IntFlag):
    """Buffer usage (section 4.3)."""

    TRANSFER_SOURCE = 1
    TRANSFER_DESTINATION = 2
    PROGRAM_INPUT = 4
    PROGRAM_OUTPUT = 8
    MUTABLE_STATE = 16


class Access(IntEnum):
    """Binding access (section 4.4)."""

    READ = 1
    WRITE = 2
    READ_WRITE = 3


class EventState(IntEnum):
    """Event states (section 4.5)."""

    PENDING = 0
    COMPLETE = 1
    FAILED = 2
    CANCELLED = 3


class Capability(IntFlag):
    """Semantic capabilities (section 5.1). Bits 3 and 4 are reserved and never advertised."""

    HOST_VISIBLE_MEMORY = 1 << 0
    DEVICE_LOCAL_MEMORY = 1 << 1
    EVENT_CANCELLATION = 1 << 2
    SHARED_MEMORY = 1 << 5


class AcceleratorClass(IntEnum):
    """Accelerator classes (section 5.1)."""

    OTHER = 0
    NPU = 1
    GPU = 2
    DSP = 3


CONFIG = Struct("<HHHHII")
REQUEST_HEADER = Struct("<HHIQ")
RESPONSE_HEADER = Struct("<HHIQ")
DEVICE_INFO = Struct("<16sHHIIQIIIIIIQQ")
CREATE_CONTEXT_REQUEST = Struct("<II")
OBJECT = Struct("<Q")
ALLOCATE_BUFFER_REQUEST = Struct("<QQQB7sII")
TRANSFER_BUFFER_REQUEST = Struct("<QQQ")
LOAD_PROGRAM_REQUEST = Struct("<QII12IQQ")
CREATE_QUEUE_REQUEST = Struct("<QII")
SUBMIT_REQUEST = Struct("<QQIIQ")
BINDING = Struct("<QQQIB3s")
EVENT_STATE = Struct("<HHI")


def _framed(payload: Struct) -> Struct:
    return Struct(REQUEST_HEADER.format + payload.format.removeprefix("<"))


# A request's header and fixed payload as one record: its sender packs both with one call.
OBJECT_FRAME = _framed(OBJECT)
CREATE_CONTEXT_FRAME = _framed(CREATE_CONTEXT_REQUEST)
ALLOCATE_BUFFER_FRAME = _framed(ALLOCATE_BUFFER_REQUEST)
TRANSFER_BUFFER_FRAME = _framed(TRANSFER_BUFFER_REQUEST)
LOAD_PROGRAM_FRAME = _framed(LOAD_PROGRAM_REQUEST)
CREATE_QUEUE_FRAME = _framed(CREATE_QUEUE_REQUEST)
SUBMIT_FRAME = _framed(SUBMIT_REQUEST)
