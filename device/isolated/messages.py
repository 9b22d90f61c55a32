"""What crosses the socket between daemon and worker: one datagram a message, little-endian, fixed shapes.

Each request is answered before the next is made, except that `LoadEnded` and `NEWS` may come in between. Handles are
numbers that the daemon's side gives out. Knows the shapes, not what they do. Descriptors that travel along: the
artifact with LOAD, the buffers' file with the greeting.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from enum import IntEnum
from struct import Struct
from typing import Any, Final, NamedTuple

from virtaccel.device.backend import DeviceInfo, Limits

MAX_MESSAGE: Final = 1 << 18
TEXT_BYTES: Final = 2000


class Op(IntEnum):
    """Requests; the name of the contract's method, or what is asked."""

    CREATE_CONTEXT = 1
    DESTROY_CONTEXT = 2
    CREATE_QUEUE = 3
    DESTROY_QUEUE = 4
    ALLOCATE_BUFFER = 5
    FREE_BUFFER = 6
    IN_USE = 7
    LOAD_PROGRAM = 8
    ABANDON_LOAD = 9
    UNLOAD_PROGRAM = 10
    SUBMIT = 11
    CANCEL_EVENT = 12
    DESTROY_EVENT = 13


class Kind(IntEnum):
    """Messages of the worker."""

    GREETING = 1
    UNAVAILABLE = 2
    REPLY = 3
    LOAD_ENDED = 4
    NEWS = 5


class Outcome(IntEnum):
    """DONE; REFUSED with a status and nothing kept; DOUBTFUL with a status; UNDER_WAY: a load that goes on; BROKEN: the
    backend did what its contract does not allow."""

    DONE = 0
    REFUSED = 1
    DOUBTFUL = 2
    UNDER_WAY = 3
    BROKEN = 4


OBJECT: Final = Struct("<BII")
"""Op, handle, and the context or a flag where there is one."""
ALLOCATE: Final = Struct("<BIIQQBI")
"""Op, handle, context, bytes, alignment, domain, usage."""
LOAD: Final = Struct("<BIII12IQQ")
"""Op, handle, context, format, target, payload bytes, resident bytes; the artifact in a memory file beside it."""
SUBMIT: Final = Struct("<BIIIIQI")
"""Op, queue, program, slot, turn, deadline in nanoseconds of CLOCK_MONOTONIC (0: none), count of bindings."""
BINDING: Final = Struct("<IQQIB")
"""Buffer, offset, bytes, slot, access."""
EVENT: Final = Struct("<BII")
"""Op, slot, turn."""
ANSWER: Final = Struct("<BBHQQQB")
"""Kind, outcome, status, three numbers and a flag; then text for the log."""


class Answer(NamedTuple):
    """A message of the worker, greeting apart. For a load `a` is its handle; for an allocation `a` is the offset in the
    buffers' file, `b` the allocation in bytes, `c` the alignment and `flag` whether it is bound directly."""

    kind: int
    outcome: int
    status: int = 0
    a: int = 0
    b: int = 0
    c: int = 0
    flag: bool = False
    text: str = ""

    def pack(self) -> bytes:
        fixed = ANSWER.pack(self.kind, self.outcome, self.status, self.a, self.b, self.c, self.flag)
        return fixed + self.text.encode(errors="replace")[:TEXT_BYTES] if self.text else fixed


class ProtocolError(Exception):
    """The worker says something that it never says."""


def read_answer(data: bytes) -> Answer:
    """Raises ProtocolError."""
    if len(data) < ANSWER.size:
        raise ProtocolError(f"a message of {len(data)} bytes")
    kind, outcome, status, a, b, c, flag = ANSWER.unpack_from(data)
    if kind not in (Kind.REPLY, Kind.LOAD_ENDED, Kind.NEWS) or outcome > Outcome.BROKEN:
        raise ProtocolError(f"a message of kind {kind}, outcome {outcome}")
    text = data[ANSWER.size :].decode(errors="replace") if len(data) > ANSWER.size else ""
    return Answer(kind, outcome, status, a, b, c, bool(flag), text)


class Greeting(NamedTuple):
    """A worker that is ready: what its backend reports, and what that calls its device."""

    info: DeviceInfo
    device: str | None

    def pack(self) -> bytes:
        said = {**asdict(self.info), "uuid": self.info.uuid.hex(), "device": self.device}
        return bytes([Kind.GREETING]) + json.dumps(said).encode()


def unavailable(text: str) -> bytes:
    """A worker that has no backend to offer."""
    return bytes([Kind.UNAVAILABLE]) + text.encode(errors="replace")[:TEXT_BYTES]


def read_greeting(data: bytes) -> Greeting | str:
    """The greeting, or why there is none. Raises ProtocolError."""
    if data[:1] == bytes([Kind.UNAVAILABLE]):
        return data[1:].decode(errors="replace")
    if data[:1] != bytes([Kind.GREETING]):
        raise ProtocolError("no greeting")
    try:
        said: dict[str, Any] = json.loads(data[1:])
        device = said.pop("device")
        limits = Limits(**{name: int(value) for name, value in said.pop("limits").items()})
        uuid = bytes.fromhex(said.pop("uuid"))
        info = DeviceInfo(uuid=uuid, limits=limits, **{name: int(value) for name, value in said.items()})
        return Greeting(info, device if isinstance(device, str) else None)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ProtocolError(f"a greeting that cannot be read: {error}") from error


def pack_bindings(bindings: Sequence[tuple[int, int, int, int, int]]) -> bytes:
    """Bindings, each as in BINDING."""
    pack = BINDING.pack
    return b"".join([pack(*binding) for binding in bindings])
