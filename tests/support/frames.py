"""Command frames written by hand from wire-abi.md, sections 3 to 5, and a bench that puts an engine behind them.

Nothing here uses the package's own structures, so a field in the wrong place there is not repeated here. Every call
checks what holds for all commands: the used length against the response header, the request ID, and that not one byte
behind the used length was touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from virtaccel.device.config import DeviceConfig, ResourcePolicy
from virtaccel.device.engine import Engine
from virtaccel.device.objects import Namespaces
from virtaccel.device.reference import FORMAT, INFO, Operation, Program, Reference, Script
from virtaccel.virtqueue.segments import Chain

CODES = {
    "GET_DEVICE_INFO": 0x0001, "CREATE_CONTEXT": 0x0100, "DESTROY_CONTEXT": 0x0101, "ALLOCATE_BUFFER": 0x0200,
    "FREE_BUFFER": 0x0201, "WRITE_BUFFER": 0x0202, "READ_BUFFER": 0x0203, "LOAD_PROGRAM": 0x0300,
    "UNLOAD_PROGRAM": 0x0301, "CREATE_QUEUE": 0x0400, "DESTROY_QUEUE": 0x0401, "SUBMIT": 0x0500, "POLL_EVENT": 0x0501,
    "CANCEL_EVENT": 0x0502, "DESTROY_EVENT": 0x0503,
}  # fmt: skip
NAMES = {code: name for name, code in CODES.items()}
OK, UNSUPPORTED, INCOMPATIBLE, INVALID_ARGUMENT, OUT_OF_BOUNDS, BUSY, OUT_OF_MEMORY, RESOURCE_LIMIT = range(8)
DEADLINE_EXPIRED, DEVICE_LOST, PERMISSION_DENIED, STALE_OBJECT = range(8, 12)
INTERNAL_ERROR = 65535
PENDING, COMPLETE, FAILED, CANCELLED = range(4)
READ, WRITE, READ_WRITE = 1, 2, 3
SOURCE, DESTINATION, INPUT, OUTPUT, STATE = 1, 2, 4, 8, 16
ANY_USAGE = 31
HOST, DEVICE, SHARED = 1, 2, 3
U64_MAX = (1 << 64) - 1
CANARY = 0xC5


def u16(value: int) -> bytes:
    return value.to_bytes(2, "little")


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def request(opcode: int, payload: bytes = b"", request_id: int = 1, flags: int = 0, length: int | None = None) -> bytes:
    """A frame; `length` lies about payload_bytes."""
    return u16(opcode) + u16(flags) + u32(len(payload) if length is None else length) + u64(request_id) + payload


def allocate(
    context: int, size: int = 64, alignment: int = 64, domain: int = SHARED, usage: int = ANY_USAGE,
    reserved: bytes = bytes(7), tail: int = 0,
) -> bytes:
    return u64(context) + u64(size) + u64(alignment) + bytes([domain]) + reserved + u32(usage) + u32(tail)


def transfer(buffer: int, offset: int = 0, size: int = 8) -> bytes:
    return u64(buffer) + u64(offset) + u64(size)


def load(
    context: int, artifact: bytes, *, format_id: int = FORMAT, flags: int = 0, target: Sequence[int] = (0,) * 12,
    payload_bytes: int | None = None, resident_bytes: int = 64,
) -> bytes:
    size = len(artifact) if payload_bytes is None else payload_bytes
    words = b"".join(map(u32, target))
    return u64(context) + u32(format_id) + u32(flags) + words + u64(size) + u64(resident_bytes) + artifact


def binding(
    buffer: int, slot: int = 0, access: int = READ, offset: int = 0, size: int = 8, reserved: bytes = bytes(3)
) -> bytes:
    return u64(buffer) + u64(offset) + u64(size) + u32(slot) + bytes([access]) + reserved


def submit(
    queue: int, program: int, *bindings: bytes, count: int | None = None, flags: int = 0, timeout_ns: int = 0
) -> bytes:
    number = len(bindings) if count is None else count
    return u64(queue) + u64(program) + u32(number) + u32(flags) + u64(timeout_ns) + b"".join(bindings)


def split(data: bytes | bytearray, sizes: Sequence[int]) -> list[memoryview]:
    """Views of `data` in pieces of `sizes`; what is left over is the last piece."""
    whole, views, at = memoryview(data), [], 0
    for size in sizes:
        views.append(whole[at : at + size])
        at += size
    if at < len(whole):
        views.append(whole[at:])
    return [view for view in views if len(view)]


def chain(frame: bytes, capacity: int, cuts: Sequence[int] = (), out_cuts: Sequence[int] = ()) -> Chain:
    """A chain over fresh memory: the frame, and `capacity` bytes of canary to write into."""
    return Chain.over(0, split(bytearray(frame), cuts), split(bytearray([CANARY]) * capacity, out_cuts))


class Response(NamedTuple):
    """What came back: the used length, and the response behind it (status -1 where nothing was written)."""

    used: int
    status: int
    payload: bytes
    raw: bytes


def read_response(finished: Chain, used: int, request_id: int) -> Response:
    """The response in a chain, after the checks that every response must pass (wire-abi.md 3.2, virtqueue.md 6)."""
    raw = b"".join(finished.writable)
    assert raw[used:] == bytes([CANARY]) * (len(raw) - used), "bytes behind the used length were touched"
    if used == 0:
        return Response(0, -1, b"", b"")
    status, flags = int.from_bytes(raw[:2], "little"), int.from_bytes(raw[2:4], "little")
    assert flags == 0
    assert int.from_bytes(raw[4:8], "little") == used - 16
    assert int.from_bytes(raw[8:16], "little") == request_id
    return Response(used, status, raw[16:used], raw[:used])


class Bench:
    """An engine over a reference backend, driven frame by frame."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        config: DeviceConfig | None = None,
        policy: ResourcePolicy | None = None,
        info: Any = INFO,
        readers: Any = None,
        backend: Any = None,
    ) -> None:
        self.script = script if script is not None else Script()
        self.backend = backend if backend is not None else Reference(info, self.script, readers)
        self.engine = Engine(
            self.backend, config or DeviceConfig(), policy or ResourcePolicy(), Namespaces(b"a secret of tests")
        )
        self.request_id = 0

    def send(self, frame: bytes, capacity: int = 4096, cuts: Sequence[int] = (), out: Sequence[int] = ()) -> Response:
        """One frame through the engine; it must not be parked or withheld."""
        made = chain(frame, capacity, cuts, out)
        used = self.engine.process(made)
        assert used is not None, "parked or withheld"
        return read_response(made, used, int.from_bytes(frame[8:16], "little"))

    def call(self, name: str, payload: bytes = b"", capacity: int = 4096) -> Response:
        self.request_id += 1
        return self.send(request(CODES[name], payload, self.request_id), capacity)

    def ok(self, name: str, payload: bytes = b"", capacity: int = 4096) -> bytes:
        response = self.call(name, payload, capacity)
        assert response.status == OK, f"{name}: status {response.status}"
        return response.payload

    def made(self, name: str, payload: bytes = b"") -> int:
        """The ID of a new object."""
        return int.from_bytes(self.ok(name, payload), "little")

    def status(self, name: str, payload: bytes = b"", capacity: int = 4096) -> int:
        return self.call(name, payload, capacity).status

    def context(self) -> int:
        return self.made("CREATE_CONTEXT", bytes(8))

    def buffer(self, context: int, size: int = 64, usage: int = ANY_USAGE) -> int:
        return self.made("ALLOCATE_BUFFER", allocate(context, size, usage=usage))

    def queue(self, context: int) -> int:
        return self.made("CREATE_QUEUE", u64(context) + u64(0))

    def program(self, context: int, program: Program | None = None) -> int:
        return self.made("LOAD_PROGRAM", load(context, (program or XOR).pack()))

    def write(self, buffer: int, data: bytes, offset: int = 0) -> None:
        self.ok("WRITE_BUFFER", transfer(buffer, offset, len(data)) + data)

    def read(self, buffer: int, size: int, offset: int = 0) -> bytes:
        return self.ok("READ_BUFFER", transfer(buffer, offset, size), 16 + size)

    def poll(self, event: int) -> tuple[int, int]:
        """State and error."""
        payload = self.ok("POLL_EVENT", u64(event), 24)
        assert payload[4:] == bytes(4)
        return int.from_bytes(payload[:2], "little"), int.from_bytes(payload[2:4], "little")


XOR = Program(Operation.XOR, 0x5A, inputs=1, outputs=1, states=0)
"""One input at slot 0, one output at slot 1."""


class World(NamedTuple):
    """One of everything in one context, ready to be submitted."""

    context: int
    source: int
    target: int
    program: int
    queue: int

    def submission(self, **changes: Any) -> bytes:
        return submit(
            self.queue, self.program, binding(self.source, 0, READ), binding(self.target, 1, WRITE), **changes
        )


def world(bench: Bench) -> World:
    context = bench.context()
    return World(context, bench.buffer(context), bench.buffer(context), bench.program(context), bench.queue(context))
