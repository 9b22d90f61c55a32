"""Target `device`: a hostile device against the guest's driver queue, command ring and client.

The input is what the device writes: used elements that were never issued, indices that jump, lengths beyond the
buffers, response bytes of every sort, configuration. The guest may be refused, told of a violation or given a value,
and only a value that the oracle allows too. It must never be confused about its own buffers: whatever is lost
by a broken ring is back after a reset, and no memory serves two commands at once.
"""

from __future__ import annotations

from collections.abc import Callable
from mmap import mmap
from random import Random
from struct import Struct
from typing import Any, Final, TypeAlias

from virtaccel.guest_tools.client import (
    Buffer,
    Client,
    Context,
    DeviceError,
    Event,
    IndeterminateSubmit,
    Program,
    ProtocolViolation,
    Queue,
    Request,
)
from virtaccel.guest_tools.transport.base import Backpressure, Config, ConfigSpaceError, TransportError, decode_config
from virtaccel.guest_tools.transport.ring import CommandRing, block_bytes
from virtaccel.harness.fuzz.target import Finding, TargetBase
from virtaccel.harness.oracle import frames as f
from virtaccel.harness.oracle.frames import Answer, BadAnswer, Info

RECORD: Final = 8
LONGEST: Final = 40  # records; longer inputs show no more, and shrink slowly
SIZE: Final = 8  # fewer than the commands of one input, so that the ring is full now and then
BASE: Final = 0x10_0000  # not 0, or an offset taken for an address would do
MAX_REQUEST: Final = 8192  # more than a small slot has, so that pages are taken too
MAX_RESPONSE: Final = 8192
CONFIG: Final = Config(1, 0, 1, SIZE, MAX_REQUEST, MAX_RESPONSE)
_CONFIG: Final = Struct("<HHHHII")
_DESCRIPTOR: Final = Struct("<QIHH")

_Make: TypeAlias = Callable[[Client, int], Request[Any]]
# One of each shape of response, and two that need memory beyond the small slots.
REQUESTS: Final[tuple[_Make, ...]] = (
    lambda client, n: client.get_device_info(),
    lambda client, n: client.create_context(),
    lambda client, n: client.free_buffer(Buffer(n + 1)),
    lambda client, n: client.poll_event(Event(n + 1)),
    lambda client, n: client.submit(Queue(1), Program(1), []),
    lambda client, n: client.read_buffer(Buffer(1), 0, memoryview(bytearray(8 + n % 64))),
    lambda client, n: client.read_buffer(Buffer(1), 0, memoryview(bytearray(300 + n * 7))),
    lambda client, n: client.write_buffer(Buffer(1), 0, bytes(1 + n * 5)),
    lambda client, n: client.load_program(Context(1), 1, [0] * 12, bytes(900 + n)),
    lambda client, n: client.allocate_buffer(Context(1), 64, 15, domain=3),
)


class DeviceTarget(TargetBase):
    """See the module."""

    name = "device"
    stride = RECORD

    def __init__(self) -> None:
        super().__init__()
        self.block = memoryview(mmap(-1, block_bytes(SIZE, 16 * 4096)))
        self.client = Client(CONFIG)
        self._renew()
        self.free = self.free_memory()

    def _renew(self) -> None:
        self.ring = CommandRing(self.block, lambda offset, length: ((BASE + offset, length),), SIZE, SIZE)

    def free_memory(self) -> tuple[int, list[tuple[int, int]], int]:
        """Slots, pages and descriptors that nothing holds."""
        ring = self.ring
        return len(ring._free), sorted(ring._pages._free), ring.queue.free_descriptors

    def generate(self, random: Random) -> bytes:
        return random.randbytes(RECORD * random.randrange(2, LONGEST))

    def execute(self, data: bytes) -> int:
        self.client.reset()
        try:
            self._play(data)
        except BaseException:
            self._renew()
            raise
        return 1

    def _play(self, data: bytes) -> None:
        game = _Game(self)
        for at in range(0, len(data) - RECORD + 1, RECORD):
            _MOVES[data[at] % len(_MOVES)](game, data[at + 1 : at + RECORD])
        self.ring.reset()
        if self.free_memory() != self.free:
            raise Finding(f"memory is missing after a reset: {self.free_memory()}, was {self.free}")

    def close(self) -> None:
        self.block.release()


class _Game:
    """One input: what was published, and what the device makes of it."""

    def __init__(self, target: DeviceTarget) -> None:
        self.target = target
        self.ring = target.ring
        self.client = target.client
        self.outstanding: dict[int, tuple[Request[Any], bytes, tuple[int, int, int]]] = {}
        self.used_index = 0
        self.broken = False

    # -- the guest's side

    def publish(self, given: bytes) -> None:
        target = self.target
        try:
            request = REQUESTS[given[0] % len(REQUESTS)](self.client, given[1])
        except ProtocolViolation:
            if self.client.recovery is None:
                raise
            self.client.reset()
            return
        try:
            head = self.ring.publish(request.frame, request.capacity)
        except Backpressure:
            return
        except TransportError:
            if not self.broken:
                raise
            return
        where = self.where(head)
        if where[0] + where[1] > len(target.block):
            raise Finding("a response was given room outside the block")
        for other, (_, _, taken) in self.outstanding.items():
            if other == head or (where[0] < taken[0] + taken[1] and taken[0] < where[0] + where[1]):
                raise Finding("two commands share memory")
        self.outstanding[head] = (request, b"".join(request.frame), where)

    def where(self, head: int) -> tuple[int, int, int]:
        """Offset and size of the room for the answer, as the published descriptors say, and of the request's bytes."""
        block, at = self.target.block, self.ring.placement.descriptors - BASE
        readable, index = 0, head
        for _ in range(SIZE):
            address, length, flags, following = _DESCRIPTOR.unpack_from(block, at + 16 * index)
            if flags & 2:
                return address - BASE, length, readable
            readable += length
            index = following
        raise Finding("a chain without room for an answer was published")

    def collect(self, given: bytes) -> None:
        try:
            completion = self.ring.collect()
        except TransportError:
            self.broken = True
            self.target.features.add("broken ring")
            return
        if completion is None:
            return
        if self.broken:
            raise Finding("a broken ring went on")
        held = self.outstanding.pop(completion.token, None)
        if held is None:
            raise Finding("a command came back that was not out")
        request, frame, (offset, size, _) = held
        used = bytes(completion.response)
        if len(used) > size or used != bytes(self.target.block[offset : offset + len(used)]):
            raise Finding("a response was taken from elsewhere than its room")
        self.judge(request, frame, used)

    def judge(self, request: Request[Any], frame: bytes, used: bytes) -> None:
        """The client's verdict against the oracle's."""
        try:
            expected = f.answer_to(frame, used, len(used))
            bad = expected.status == f.NOTHING
            if request.opcode == f.INFO and expected.status == f.OK:
                bad = bool(Info.read(expected.payload).faults())
        except BadAnswer:
            bad, expected = True, Answer(0, f.NOTHING, b"")
        name = type(self.outcome(request, used, bad, expected)).__name__
        self.target.features.add((request.opcode, expected.status == 0, name))

    def outcome(self, request: Request[Any], used: bytes, bad: bool, expected: Answer) -> object:
        try:
            value = self.client.receive(request, memoryview(used))
        except DeviceError as error:
            indeterminate = isinstance(error, IndeterminateSubmit)
            if bad or error.status != expected.status or indeterminate is not bool(expected.payload):
                raise Finding(f"{used.hex()} was taken for a refusal with status {error.status}") from error
            return error
        except ProtocolViolation as error:
            if not bad:
                raise Finding(f"a sound response was called a violation: {error}") from error
            return error
        if bad or expected.status != f.OK:
            raise Finding(f"{used.hex()} was believed: {value!r}")
        if isinstance(request.sink, memoryview) and bytes(request.sink) != expected.payload:
            raise Finding("what was read is not what came")
        if isinstance(value, int) and value != expected.id:
            raise Finding(f"ID {value:#x} was read from {used.hex()}")
        return value

    # -- the device's side

    def used(self, head: int, written: int) -> None:
        block, at = self.target.block, self.ring.placement.used - BASE
        Struct("<II").pack_into(block, at + 4 + 8 * (self.used_index % SIZE), head, written)
        self.used_index = self.used_index + 1 & 0xFFFF
        Struct("<H").pack_into(block, at + 2, self.used_index)

    def answer(self, given: bytes) -> None:
        """An answer to an outstanding command: sound, or with one thing wrong."""
        if not self.outstanding:
            return
        head = list(self.outstanding)[given[0] % len(self.outstanding)]
        request, _, (offset, size, _) = self.outstanding[head]
        asked = len(request.sink) if request.sink is not None else 0
        payload = b"\1" * 8
        if request.opcode == f.INFO:
            capabilities = (1, 33, 5, 9, 0)[given[6] % 5]
            payload = Info(bytes(16), 0, given[5] == 7, 0, 0, capabilities, *[1] * 8).pack()
        elif request.opcode == f.POLL:
            payload = Struct("<HHI").pack(given[5] % 5, given[6] % 3 * 4, given[5] == 0xFF)
        elif request.sink is not None:
            payload = bytes((index + given[1] & 0xFF) for index in range(asked))
        elif f.OK_PAYLOAD.get(request.opcode) == 0:
            payload = b""
        status, flags, length, echoed, written = 0, 0, len(payload), request.request_id, 16 + len(payload)
        match given[2] % 16:
            case 0:
                echoed ^= 1 << given[3] % 64
            case 1:
                flags = 1 << given[3] % 16
            case 2:
                length += given[3] % 5 - 2
            case 3:
                written += given[3] % 9 - 4
            case 4:
                status = given[3]
            case 5 | 6:
                status, payload = 1 + given[3], b"" if given[4] & 1 else bytes((given[4] >> 1, *bytes(7)))
                length, written = len(payload), 16 + len(payload)
            case 7:
                written = (0, 15, 16, 8, 17)[given[3] % 5]
            case 8:
                payload = bytes(len(payload))
            case 9:
                written = size + given[3] % 3
            case _:
                pass
        data = (f.HEADER.pack(status, flags, max(0, length) & 0xFFFFFFFF, echoed) + payload)[:size]
        self.target.block[offset : offset + len(data)] = data
        self.used(head, max(0, written))

    def lie(self, given: bytes) -> None:
        """A used element that is nobody's."""
        head = (given[0] % SIZE, SIZE, 0xFFFF, 0xFFFFFFFF)[given[1] % 4]
        self.used(head, (0, 16, 92, 0xFFFFFFFF)[given[2] % 4])

    def jump(self, given: bytes) -> None:
        self.used_index = self.used_index + (given[0] if given[0] < 0x80 else given[0] << 8) & 0xFFFF
        Struct("<H").pack_into(self.target.block, self.ring.placement.used - BASE + 2, self.used_index)

    def scribble(self, given: bytes) -> None:
        """The device writes into a descriptor or a request: the guest's own books are elsewhere."""
        at = self.ring.placement.descriptors - BASE + given[0] % (16 * SIZE)
        self.target.block[at] = given[1]

    def reset(self, given: bytes) -> None:
        if given[0] & 3 and not self.broken:
            return
        self.ring.reset()
        self.client.reset()
        self.outstanding.clear()
        self.used_index, self.broken = 0, False
        if self.target.free_memory() != self.target.free:
            raise Finding("memory is missing after a reset")

    def config(self, given: bytes) -> None:
        """Configuration space: believed if and only if wire-abi.md 2 allows it."""
        values = [1, given[0] % 3, 1, 16, 4096, 4096]
        if given[1] < 0xC0:
            field = given[1] % 6
            edges = ((0, 1, 2), (0, 9, 65535), (0, 1, 2), (0, 1, 2, 8, 256, 257), (0, 96, 97, 1 << 24, 1 + (1 << 24)),
                     (0, 91, 92, 1 << 24, 1 + (1 << 24)))[field]  # fmt: skip
            values[field] = edges[given[2] % len(edges)]
        raw = _CONFIG.pack(*values)[: 16 if given[3] < 0xF0 else given[3] & 15] + bytes(given[4] & 8)
        size = (8, 16, 256)[given[5] % 3]
        if len(raw) >= 16:
            values = list(_CONFIG.unpack_from(raw))
        major, _, queues, chain, request, response = values
        good = (
            len(raw) >= 16 and major == 1 and queues == 1 and 2 <= chain <= 256 and chain <= size
            and 97 <= request <= 1 << 24 and 92 <= response <= 1 << 24
        )  # fmt: skip
        try:
            believed = decode_config(raw, size) == Config(*values)
        except ConfigSpaceError:
            believed = False
        if believed is not good:
            raise Finding(
                f"configuration {raw.hex()} with a queue of {size} was {'believed' if believed else 'refused'}"
            )


_MOVES: Final = (
    _Game.publish, _Game.publish, _Game.answer, _Game.collect, _Game.publish, _Game.answer, _Game.collect, _Game.lie,
    _Game.publish, _Game.answer, _Game.collect, _Game.jump, _Game.scribble, _Game.reset, _Game.config, _Game.publish,
    _Game.publish, _Game.answer, _Game.collect, _Game.reset, _Game.publish, _Game.answer, _Game.collect,
)  # fmt: skip
