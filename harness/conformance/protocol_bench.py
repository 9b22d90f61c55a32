"""What a protocol case works with: one device behind a raw ring, frames by hand, answers held to the standard's form.

Numbers are those of wire-abi.md, spelled out again: a suite that took them from the device's own package would agree
with its mistakes. Standard library only: this also runs inside a guest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Final, NamedTuple

from virtaccel.guest_tools.transport.base import Config
from virtaccel.guest_tools.transport.raw import Piece, RawRing
from virtaccel.harness.conformance.protocol_programs import SAMPLES, Sample

OK, UNSUPPORTED, INCOMPATIBLE, INVALID_ARGUMENT, OUT_OF_BOUNDS, BUSY, OUT_OF_MEMORY, RESOURCE_LIMIT = range(8)
DEADLINE_EXPIRED, DEVICE_LOST, PERMISSION_DENIED, STALE_OBJECT = range(8, 12)
NOTHING: Final = -1
STATUS_NAMES: Final = {
    NOTHING: "an empty head", OK: "OK", UNSUPPORTED: "UNSUPPORTED", INCOMPATIBLE: "INCOMPATIBLE",
    INVALID_ARGUMENT: "INVALID_ARGUMENT", OUT_OF_BOUNDS: "OUT_OF_BOUNDS", BUSY: "BUSY", OUT_OF_MEMORY: "OUT_OF_MEMORY",
    RESOURCE_LIMIT: "RESOURCE_LIMIT", DEADLINE_EXPIRED: "DEADLINE_EXPIRED", DEVICE_LOST: "DEVICE_LOST",
    PERMISSION_DENIED: "PERMISSION_DENIED", STALE_OBJECT: "STALE_OBJECT", 65535: "INTERNAL_ERROR",
}  # fmt: skip

INFO: Final = 0x0001
CREATE_CONTEXT, DESTROY_CONTEXT = 0x0100, 0x0101
ALLOCATE, FREE, WRITE, READ = 0x0200, 0x0201, 0x0202, 0x0203
LOAD, UNLOAD = 0x0300, 0x0301
CREATE_QUEUE, DESTROY_QUEUE = 0x0400, 0x0401
SUBMIT, POLL, CANCEL, DESTROY_EVENT = 0x0500, 0x0501, 0x0502, 0x0503

SOURCE, DESTINATION, INPUT, OUTPUT, STATE = 1, 2, 4, 8, 16
PLAIN_USE: Final = SOURCE | DESTINATION | INPUT | OUTPUT
PENDING, COMPLETE, FAILED, CANCELLED = range(4)
CANCELLATION: Final = 1 << 2
CANARY: Final = 0xC5
ROOM: Final = 128
_HEADER: Final = Struct("<HHIQ")
_INFO: Final = Struct("<16sHHIIQIIIIIIQQ")
_DOMAINS: Final = ((3, 1 << 5), (1, 1 << 0), (2, 1 << 1))


class Failed(Exception):
    """The device does not do what the case asks for."""


class NotShown(Exception):
    """The case cannot be shown on this device, or not by a driver at all."""


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


class Answer(NamedTuple):
    """What came back: used length, status (NOTHING for an empty head), payload."""

    used: int
    status: int
    payload: bytes

    @property
    def id(self) -> int:
        return int.from_bytes(self.payload, "little")


class World(NamedTuple):
    """One of everything in a context; `program` is 0 where the device takes none of the programs at hand."""

    context: int
    source: int
    target: int
    queue: int
    program: int


def u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def frame(opcode: int, body: bytes = b"", request_id: int = 1, flags: int = 0, length: int | None = None) -> bytes:
    """A request; `length` lies about payload_bytes."""
    return _HEADER.pack(opcode, flags, len(body) if length is None else length, request_id) + body


def allocation(
    context: int, size: int, usage: int = PLAIN_USE, domain: int = 3, alignment: int = 64,
    reserved: bytes = bytes(7), tail: int = 0,
) -> bytes:  # fmt: skip
    head = Struct("<QQQB").pack(context, size, alignment, domain)
    return head + reserved + usage.to_bytes(4, "little") + tail.to_bytes(4, "little")


def transfer(buffer: int, offset: int, size: int) -> bytes:
    return Struct("<QQQ").pack(buffer, offset, size)


def load(context: int, sample: Sample, flags: int = 0, size: int | None = None, resident: int | None = None) -> bytes:
    """LOAD_PROGRAM's body; `size` lies about payload_bytes."""
    fixed = Struct("<QII12IQQ").pack(
        context, sample.format, flags, *sample.target, len(sample.artifact) if size is None else size,
        sample.resident if resident is None else resident,
    )  # fmt: skip
    return fixed + sample.artifact


def binding(buffer: int, slot: int, access: int, size: int, offset: int = 0, reserved: bytes = bytes(3)) -> bytes:
    return Struct("<QQQIB").pack(buffer, offset, size, slot, access) + reserved


def submission(
    queue: int, program: int, *bindings: bytes, count: int | None = None, flags: int = 0, timeout: int = 0
) -> bytes:
    number = len(bindings) if count is None else count
    return Struct("<QQIIQ").pack(queue, program, number, flags, timeout) + b"".join(bindings)


class Bench:
    """One device. `renew` before each case: the device is reset and the ring is new."""

    def __init__(
        self, ring: RawRing, config: Config, patience: float = 20.0, samples: Sequence[Sample] = SAMPLES
    ) -> None:
        self.ring = ring
        self.config = config
        self.patience = patience
        self.request_id = 0
        self.info = Info(bytes(16), *[0] * 13)
        self.sample: Sample | None = None
        self._samples = samples

    def begin(self) -> None:
        """Learn what the device is and which program it takes. Raises Failed."""
        self.renew()
        answer = self.call(INFO)
        if (answer.used, answer.status) != (92, OK):
            raise Failed(f"GET_DEVICE_INFO: {say(answer.status)}, {answer.used} bytes used")
        self.info = Info(*_INFO.unpack(answer.payload))
        context = self.made(CREATE_CONTEXT, bytes(8))
        for sample in self._samples:
            if self.call(LOAD, load(context, sample)).status == OK:
                self.sample = sample
                break
        self.renew()

    def renew(self) -> None:
        self.ring.restart()
        self.request_id = 0

    @property
    def domain(self) -> int:
        return next((domain for domain, bit in _DOMAINS if self.info.capabilities & bit), 1)

    # -- commands

    def publish(
        self, request: bytes, room: Sequence[int] = (ROOM,), cuts: Sequence[int] = (), first: int = 0
    ) -> tuple[int, list[Piece]]:
        """Make a request available, cut into pieces of `cuts` bytes and the rest, with `room` pieces to answer in, its
        descriptors from `first` on. Its head, and the room."""
        pieces, at = [], 0
        for size in (*cuts, len(request)):
            if part := request[at : at + size]:
                pieces.append(self.ring.piece(part))
            at += size
        space = [self.ring.piece(bytes([CANARY]) * size) for size in room]
        head = self.ring.chain(first, pieces, space)
        self.ring.offer(head)
        return head, space

    def collect(self, head: int, room: Sequence[Piece], request_id: int) -> Answer:
        """The next command that comes back, which must be `head`."""
        used = self.ring.collect(self.patience)
        if used is None:
            raise Failed(f"no answer within {self.patience:.0f} s")
        if used.head != head:
            raise Failed(f"head {used.head} came back for head {head}")
        return self.read(used.written, room, request_id)

    def read(self, used: int, room: Sequence[Piece], request_id: int) -> Answer:
        """An answer in `room`, held to wire-abi.md 3.2 and virtqueue.md 6."""
        raw = b"".join(bytes(piece.view) for piece in room)
        if used > len(raw) or raw[used:] != bytes([CANARY]) * (len(raw) - used):
            raise Failed("bytes behind the used length were touched")
        if not used:
            return Answer(0, NOTHING, b"")
        if used < 16:
            raise Failed(f"{used} bytes used, a response has at least 16")
        status, flags, size, echoed = _HEADER.unpack_from(raw)
        if flags or size != used - 16 or echoed != request_id:
            raise Failed(f"response header: flags {flags}, {size} bytes of payload, request {echoed}; {used} used")
        return Answer(used, status, raw[16:used])

    def send(self, request: bytes, room: Sequence[int] = (ROOM,), cuts: Sequence[int] = ()) -> Answer:
        """One request and its answer."""
        head, space = self.publish(request, room, cuts)
        request_id = int.from_bytes(request[8:16], "little")
        answer = self.collect(head, space, request_id)
        self.ring.scratch_again()
        return answer

    def call(self, opcode: int, body: bytes = b"", room: Sequence[int] = (ROOM,), cuts: Sequence[int] = ()) -> Answer:
        self.request_id += 1
        return self.send(frame(opcode, body, self.request_id), room, cuts)

    def ok(self, opcode: int, body: bytes = b"", room: Sequence[int] = (ROOM,), cuts: Sequence[int] = ()) -> Answer:
        answer = self.call(opcode, body, room, cuts)
        if answer.status != OK:
            raise Failed(f"command {opcode:#06x}: {say(answer.status)}, should be OK")
        return answer

    def made(self, opcode: int, body: bytes) -> int:
        """The ID of a new object."""
        answer = self.ok(opcode, body)
        if len(answer.payload) != 8 or not answer.id:
            raise Failed(f"command {opcode:#06x} returned {answer.payload.hex()}, not an object ID")
        return answer.id

    def refuses(self, what: str, opcode: int, body: bytes, *statuses: int) -> None:
        """The command must be refused with one of `statuses`, in a bare header."""
        answer = self.call(opcode, body)
        if answer.status not in statuses or answer.used not in (0, 16):
            wanted = " or ".join(map(say, statuses))
            raise Failed(f"{what}: {say(answer.status)}, {answer.used} bytes used; should be {wanted}")

    # -- objects

    def context(self) -> int:
        return self.made(CREATE_CONTEXT, bytes(8))

    def buffer(self, context: int, size: int = 64, usage: int = PLAIN_USE) -> int:
        return self.made(ALLOCATE, allocation(context, size, usage, self.domain))

    def queue(self, context: int) -> int:
        return self.made(CREATE_QUEUE, u64(context) + bytes(8))

    def world(self) -> World:
        context = self.context()
        program = self.made(LOAD, load(context, self.sample)) if self.sample is not None else 0
        return World(context, self.buffer(context), self.buffer(context), self.queue(context), program)

    def program_of(self) -> Sample:
        """The program this device takes. Raises NotShown if there is none."""
        if self.sample is None:
            raise NotShown("the device takes none of the programs at hand; bring one with --artifact")
        return self.sample

    def submitted(self, world: World) -> bytes:
        """A submission of the world's program over its buffers."""
        size = self.program_of().bytes
        return submission(
            world.queue, world.program, binding(world.source, 0, 1, size), binding(world.target, 1, 2, size)
        )

    def terminal(self, event: int) -> tuple[int, int]:
        """Poll until the event is terminal: state and error."""
        until = time.monotonic() + self.patience
        while time.monotonic() < until:
            payload = self.ok(POLL, u64(event)).payload
            state, error = payload[0] | payload[1] << 8, payload[2] | payload[3] << 8
            if len(payload) != 8 or any(payload[4:]) or state > 3 or (error != 0) is not (state == FAILED):
                raise Failed(f"POLL_EVENT: {payload.hex()}")
            if state != PENDING:
                return state, error
            time.sleep(0.001)
        raise Failed(f"a small program is still running after {self.patience:.0f} s")


class Case(NamedTuple):
    """One case: its stable name, what it asserts, and how it is shown."""

    name: str
    asserts: str
    show: Callable[[Bench], None]


def say(status: int) -> str:
    return STATUS_NAMES.get(status, f"status {status}")
