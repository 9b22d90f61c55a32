"""Target `frame`: request bytes against the engine, each answer compared with the strict checker's.

An engine over the reference backend holds two contexts with one of everything. An input says how much room there is
for the answer and how the frame is cut into segments, then come the frame's bytes. The answer has to be one that
`strict` allows, not a byte behind it may be touched, and nothing that was refused may have changed anything.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from random import Random
from struct import Struct
from typing import Final

from virtaccel.device.config import DeviceConfig, ResourcePolicy, WireConfig
from virtaccel.device.engine import Engine
from virtaccel.device.objects import Namespaces
from virtaccel.device.reference import FORMAT, INFO, Operation, Program, Reference, Script
from virtaccel.harness.fuzz import strict
from virtaccel.harness.fuzz.target import WORDS, Finding, mutate_bytes
from virtaccel.virtqueue.segments import Chain

HEADER: Final = 4
CANARY: Final = b"\xc5" * 4096
MAX_REQUEST: Final = 640
MAX_RESPONSE: Final = 320
BUFFER_BYTES: Final = 96
CAPABILITIES: Final = 1 << 0 | 1 << 2 | 1 << 5  # all but device-local memory
ARTIFACT: Final = Program(Operation.XOR, 0x5A, 1, 1, 0).pack()
_ROOMS: Final = (92, 24, 16, 320, 15, 23, 40, 1, 91, 17, 112, 336)
_HEAD: Final = Struct("<HHIQ")
_MUTATING_REFUSALS: Final = frozenset({strict.INVALID_ARGUMENT, strict.INCOMPATIBLE, strict.UNSUPPORTED, strict.BUSY})
_BACKEND_MAY_REFUSE: Final = {
    strict.LOAD_PROGRAM: _MUTATING_REFUSALS,
    strict.SUBMIT: _MUTATING_REFUSALS,
    strict.ALLOCATE_BUFFER: frozenset({strict.UNSUPPORTED, strict.OUT_OF_MEMORY, strict.RESOURCE_LIMIT}),
    strict.WRITE_BUFFER: frozenset({strict.BUSY}),
    strict.READ_BUFFER: frozenset({strict.BUSY}),
}


def quiet() -> logging.Logger:
    """A logger that nobody hears: what a fuzzed device has to say fills disks."""
    log = logging.Logger("virtaccel.fuzz", logging.CRITICAL + 1)
    log.addHandler(logging.NullHandler())
    return log


class FrameTarget:
    """See the module."""

    name = "frame"
    unit = "inputs"
    stride = 1

    def __init__(self) -> None:
        self.features: set[Hashable] = set()
        self._log = quiet()
        self._backend: Reference | None = None
        self._config = DeviceConfig(WireConfig(max_request_bytes=MAX_REQUEST, max_response_bytes=MAX_RESPONSE))
        self._info = INFO.__class__(
            INFO.uuid, INFO.accelerator_class, 0, 0, CAPABILITIES,
            INFO.limits.__class__(4, 6, 6, 4, 4, 3, 8192, 256),
        )  # fmt: skip
        self._renew()
        self._fields = self._all_fields()

    def _renew(self) -> None:
        """The same device again, with the same IDs."""
        if self._backend is not None:
            self._backend.close()
        self._backend = Reference(self._info, Script(immediate=False))
        self._engine = Engine(
            self._backend, self._config, ResourcePolicy(), Namespaces(b"the same every time"), self._log
        )
        contexts, buffers, programs, queues, events = [], {}, {}, {}, {}
        busy: set[int] = set()
        for number in range(2):
            context = self._made(strict.CREATE_CONTEXT, bytes(8))
            contexts.append(context)
            mine = []
            for usage in (31, 4 | 2, 8 | 1):
                body = Struct("<QQQB7xII").pack(context, BUFFER_BYTES, 16, 3, usage, 0)
                made = self._made(strict.ALLOCATE_BUFFER, body)
                buffers[made] = strict.AliveBuffer(context, BUFFER_BYTES, usage)
                mine.append(made)
            head = Struct("<QII12IQQ").pack(context, FORMAT, 0, *[0] * 12, len(ARTIFACT), 64)
            program = self._made(strict.LOAD_PROGRAM, head + ARTIFACT)
            queue = self._made(strict.CREATE_QUEUE, Struct("<QII").pack(context, 0, 0))
            programs[program], queues[queue] = context, context
            busy.add(context)
            if number:
                body = Struct("<QQIIQ").pack(queue, program, 2, 0, 0)
                body += Struct("<QQQIB3x").pack(mine[1], 0, 8, 0, 1) + Struct("<QQQIB3x").pack(mine[2], 0, 8, 1, 2)
                for index in range(2):
                    events[self._made(strict.SUBMIT, body)] = context
                    if not index:
                        self._backend.complete()
                busy |= {queue, program, mine[1], mine[2]}
        done, pending = events
        self._made(strict.POLL_EVENT, done.to_bytes(8, "little"))
        self.world = strict.World(
            MAX_REQUEST, MAX_RESPONSE, CAPABILITIES, 3, 8192, 256, frozenset(contexts), buffers, programs, queues,
            events, frozenset(busy), frozenset({pending}),
        )  # fmt: skip
        self._before = self._account()

    def _made(self, opcode: int, body: bytes) -> int:
        room = bytearray(128)
        chain = Chain.over(0, [memoryview(_HEAD.pack(opcode, 0, len(body), 1) + body)], [memoryview(room)])
        used = self._engine.process(chain)
        if not used or room[:2] != b"\0\0":
            raise Finding(f"command {opcode:#06x} of a sound client was refused")
        return int.from_bytes(room[16:24], "little")

    def _account(self) -> tuple[object, ...]:
        state = self._engine.state
        backend = self._backend
        return state.counts, state.retained, self._engine.health, backend.live if backend else 0

    def _all_fields(self) -> list[bytes]:
        """Eight-byte values worth putting into a field: every live ID, near misses, notable numbers."""
        world = self.world
        live = [*world.contexts, *world.buffers, *world.programs, *world.queues, *world.events]
        near = [one ^ 1 << bit for one in live[:4] for bit in (0, 20, 40, 43, 63)]
        numbers = [0, 1, 8, 16, 64, 96, 97, 8192, 8193, (1 << 64) - 1, (1 << 64) - 8, 1 << 63, *WORDS]
        return [value.to_bytes(8, "little") for value in (*live, *live, *near, *numbers)]

    # -- inputs

    def generate(self, random: Random) -> bytes:
        """A frame of some command, mostly with fields that mean something, then perhaps damaged."""
        opcode = random.choice((*tuple(strict.OK_PAYLOAD), strict.READ_BUFFER, strict.SUBMIT, strict.ALLOCATE_BUFFER))
        body = self._body(opcode, random)
        frame = _HEAD.pack(opcode, 0, len(body), random.randrange(1, 1 << 64)) + body
        head = bytes((random.randrange(256), 0, random.randrange(256), random.randrange(256)))
        data = head + frame
        return mutate_bytes(data, random, 1, 800) if random.random() < 0.5 else data

    def _body(self, opcode: int, random: Random) -> bytes:
        pick = random.choice
        fields = self._fields
        small = Struct("<Q").pack(pick((1, 8, 16, 32, 64, 95, 96)))
        if opcode == strict.CREATE_CONTEXT:
            return bytes(8)
        if opcode == strict.CREATE_QUEUE:
            return pick(fields) + bytes(8)
        if opcode == strict.ALLOCATE_BUFFER:
            tail = (
                bytes((pick((1, 2, 3, 3, 3, 0, 4)),)) + bytes(7) + bytes((random.randrange(1, 40), 0, 0, 0)) + bytes(4)
            )
            return pick(fields) + pick((small, pick(fields))) + Struct("<Q").pack(1 << random.randrange(14)) + tail
        if opcode == strict.READ_BUFFER:
            return pick(fields) + pick((bytes(8), pick(fields))) + small
        if opcode == strict.WRITE_BUFFER:
            return pick(fields) + pick((bytes(8), small)) + small + bytes(int.from_bytes(small, "little"))
        if opcode == strict.LOAD_PROGRAM:
            artifact = ARTIFACT if random.random() < 0.7 else random.randbytes(random.randrange(1, 300))
            words = bytes(random.randrange(256) for _ in range(4)) + bytes(44)
            sizes = Struct("<QQ").pack(len(artifact), pick((1, 64, (1 << 64) - 1)))
            return pick(fields) + Struct("<II").pack(pick((FORMAT, FORMAT, 1)), 0) + words + sizes + artifact
        if opcode == strict.SUBMIT:
            count = random.randrange(1, 5)
            bindings = b"".join(
                pick(fields) + bytes(8) + Struct("<Q").pack(8) + bytes((slot, 0, 0, 0, random.randrange(1, 4), 0, 0, 0))
                for slot in range(count)
            )
            return pick(fields) + pick(fields) + Struct("<IIQ").pack(count, 0, 0) + bindings
        return b"" if opcode == strict.GET_DEVICE_INFO else pick(fields)

    def mutate(self, data: bytes, random: Random) -> bytes:
        """Damage, or another value in one of the eight-byte fields, the length put right again half of the time."""
        if random.random() < 0.5 or len(data) < HEADER + 24:
            return mutate_bytes(data, random, 1, 800)
        out = bytearray(data)
        at = HEADER + 16 + 8 * random.randrange((len(data) - HEADER - 16) // 8)
        out[at : at + 8] = random.choice(self._fields)
        if random.random() < 0.5:
            out[HEADER + 4 : HEADER + 8] = (len(out) - HEADER - 16).to_bytes(4, "little")
        return bytes(out)

    # -- running one

    def execute(self, data: bytes) -> int:
        head, frame = data[:HEADER].ljust(HEADER, b"\0"), data[HEADER:]
        room = _ROOMS[head[0] % len(_ROOMS)] if head[0] < 0xC0 else 320
        out = bytearray(CANARY[:room])
        chain = Chain.over(0, _cut(frame, head[2]), _cut(out, head[3]))
        used = self._engine.process(chain)
        allowed = strict.outcomes(frame, room, self.world)
        opcode = int.from_bytes(frame[:2], "little")
        try:
            self._judge(opcode, frame, out, used, allowed)
        finally:
            # A cancelled event is still there; nothing counts it.
            if self._account() != self._before or (opcode == strict.CANCEL_EVENT and not any(out[:2])):
                self._renew()
        return 1

    def _judge(self, opcode: int, frame: bytes, out: bytearray, used: int | None, allowed: strict.Outcomes) -> None:
        if used is None:
            raise Finding(f"command {opcode:#06x} was neither answered nor given back")
        if out[used:] != CANARY[: len(out) - used]:
            raise Finding(f"command {opcode:#06x}: bytes behind the used length were touched")
        asked = int.from_bytes(frame[32:40], "little") if opcode == strict.READ_BUFFER else 0
        try:
            answer = strict.response(opcode, int.from_bytes(frame[8:16], "little"), bytes(out[:used]), asked)
        except strict.BadResponse as error:
            raise Finding(f"command {opcode:#06x}: {error}") from error
        self.features.add((opcode if opcode in strict.OK_PAYLOAD else 0, answer.status, allowed))
        may = allowed | _BACKEND_MAY_REFUSE.get(opcode, frozenset()) if strict.OK in allowed else allowed
        if answer.status not in may:
            raise Finding(f"command {opcode:#06x}: status {answer.status}, the standard allows {sorted(allowed)}")
        if answer.status != strict.OK and self._account() != self._before:
            raise Finding(f"command {opcode:#06x} was refused with status {answer.status} and changed something")

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()


def _cut(data: bytes | bytearray, how: int) -> list[memoryview]:
    """One segment mostly; else two or three, cut at places that `how` names."""
    whole = memoryview(data)
    if how < 0x60 or len(data) < 3:
        return [whole] if len(data) else []
    first = 1 + how % (len(data) - 1)
    if how < 0xC0:
        return [whole[:first], whole[first:]]
    second = first + (len(data) - first) // 2
    return [part for part in (whole[:first], whole[first:second], whole[second:]) if len(part)]
