"""Target `frame`: request bytes against the engine, each answer compared with the oracle's.

An engine over the reference backend holds two contexts with one of everything. An input says how much room there is
for the answer and how the frame is cut into segments, then come the frame's bytes. The answer has to be one that the
oracle allows, not a byte behind it may be touched, and nothing that was refused may have changed anything.
"""

from __future__ import annotations

from random import Random
from typing import Final

from virtaccel.device.config import DeviceConfig, ResourcePolicy, WireConfig
from virtaccel.device.engine import Engine
from virtaccel.device.reference import INFO, Reference, Script
from virtaccel.harness.fuzz.session_test_bed import answer_to, reference_sample, same_namespaces
from virtaccel.harness.fuzz.target import WORDS, Finding, TargetBase, damaged, quiet
from virtaccel.harness.oracle import frames as f
from virtaccel.harness.oracle.frames import BUSY, INCOMPATIBLE, INVALID_ARGUMENT, OK, RESOURCE_LIMIT, UNSUPPORTED, u64
from virtaccel.harness.oracle.model import Limits, Model
from virtaccel.harness.oracle.verdicts import outcomes
from virtaccel.virtqueue.segments import Chain

HEADER: Final = 4
CANARIES: Final = bytes([f.CANARY]) * 4096
# Small, so that a frame of a few hundred bytes is already beyond them.
MAX_REQUEST: Final = 640
MAX_RESPONSE: Final = 320
BUFFER_BYTES: Final = 96
CAPABILITIES: Final = 1 << 0 | 1 << 2 | 1 << 5  # all but device-local memory
SAMPLE: Final = reference_sample(0x5A, 64)
COUNTS: Final = (4, 6, 6, 4, 4, 3, 8192, 256)
LIMITS: Final = Limits(MAX_REQUEST, MAX_RESPONSE, f.Info(INFO.uuid, 0, 0, 0, 0, CAPABILITIES, *COUNTS))
_ROOMS: Final = (92, 24, 16, 320, 15, 23, 40, 1, 91, 17, 112, 336)
_REFUSALS: Final = frozenset({INVALID_ARGUMENT, INCOMPATIBLE, UNSUPPORTED, BUSY})
_BACKEND_MAY_REFUSE: Final = {
    f.LOAD: _REFUSALS, f.SUBMIT: _REFUSALS, f.WRITE: frozenset({BUSY}), f.READ: frozenset({BUSY}),
    f.ALLOCATE: frozenset({UNSUPPORTED, f.OUT_OF_MEMORY, RESOURCE_LIMIT}),
}  # fmt: skip


class FrameTarget(TargetBase):
    """See the module."""

    name = "frame"

    def __init__(self) -> None:
        super().__init__()
        self._log = quiet()
        self._backend: Reference | None = None
        self._config = DeviceConfig(WireConfig(max_request_bytes=MAX_REQUEST, max_response_bytes=MAX_RESPONSE))
        self._info = INFO.__class__(
            INFO.uuid, INFO.accelerator_class, 0, 0, CAPABILITIES, INFO.limits.__class__(*COUNTS)
        )
        self._renew()
        self._fields = self._all_fields()

    def _renew(self) -> None:
        """The same device again, with the same IDs: each input begins with it, whatever came before."""
        if self._backend is not None:
            self._backend.close()
        self._backend = Reference(self._info, Script(immediate=False))
        self._engine = Engine(self._backend, self._config, ResourcePolicy(), same_namespaces(), self._log)
        self.model = Model(LIMITS, f.PENDING)
        for submissions in (0, 2):
            context = self._made(f.CREATE_CONTEXT, bytes(8))
            _, reads, writes = (
                self._made(f.ALLOCATE, f.allocation(context, BUFFER_BYTES, usage, alignment=16))
                for usage in (31, f.INPUT | f.DESTINATION, f.OUTPUT | f.SOURCE)
            )
            program = self._made(f.LOAD, f.load(context, SAMPLE))
            queue = self._made(f.CREATE_QUEUE, f.queue_of(context))
            for _ in range(submissions):
                bindings = f.binding(reads, 0, 1, 8), f.binding(writes, 1, 2, 8)
                event = self._made(f.SUBMIT, f.submission(queue, program, *bindings))
                if len(self.model.events) == 1:
                    self._backend.complete()
                    self.model.end(self.model.events[event], f.COMPLETE)
                    self._made(f.POLL, u64(event))
        self._before = self._account()

    def _made(self, opcode: int, body: bytes) -> int:
        room, request = bytearray(CANARIES[:128]), f.frame(opcode, body)
        used = self._engine.process(Chain.over(0, [memoryview(request)], [memoryview(room)]))
        answer = answer_to(request, bytes(room), used or 0)
        if answer.status != OK:
            raise Finding(f"command {opcode:#06x} of a sound client was refused")
        self.model.apply(request, answer)
        return answer.id

    def _account(self) -> tuple[object, ...]:
        state = self._engine.state
        backend = self._backend
        return state.counts, state.retained, self._engine.health, backend.live if backend else 0

    def _all_fields(self) -> list[bytes]:
        """Eight-byte values worth putting into a field: every live ID, near misses, notable numbers."""
        live = [key for table in self.model.tables for key in table]
        near = [one ^ 1 << bit for one in live[:4] for bit in (0, 20, 40, 43, 63)]
        numbers = [0, 1, 8, 16, 64, 96, 97, 8192, 8193, (1 << 64) - 1, (1 << 64) - 8, 1 << 63, *WORDS]
        return [u64(value) for value in (*live, *live, *near, *numbers)]

    # -- inputs

    def generate(self, random: Random) -> bytes:
        """A frame of some command, mostly with fields that mean something, then perhaps damaged: anywhere, or in one of
        its fields, its length put right again half of the time."""
        opcode = random.choice((*f.OK_PAYLOAD, f.READ, f.SUBMIT, f.ALLOCATE))
        data = random.randbytes(HEADER) + f.frame(opcode, self._body(opcode, random), random.randrange(1, 1 << 64))
        damage = random.random()
        if damage < 0.4:
            data = damaged(data, random)
        elif damage < 0.7 and len(data) >= HEADER + 24:
            at = HEADER + 16 + 8 * random.randrange((len(data) - HEADER - 16) // 8)
            data = data[:at] + random.choice(self._fields) + data[at + 8 :]
        if damage < 0.35:
            data = data[: HEADER + 4] + (max(0, len(data) - HEADER - 16)).to_bytes(4, "little") + data[HEADER + 8 :]
        return data

    def _body(self, opcode: int, random: Random) -> bytes:
        pick, fields = random.choice, self._fields
        small = pick((1, 8, 16, 32, 64, 95, 96))
        if opcode == f.CREATE_CONTEXT:
            return bytes(8)
        if opcode == f.CREATE_QUEUE:
            return pick(fields) + bytes(8)
        if opcode == f.ALLOCATE:
            usage, domain = random.randrange(1, 40), pick((1, 2, 3, 3, 3, 0, 4))
            body = f.allocation(0, small, usage, domain, 1 << random.randrange(14))
            return pick(fields) + pick((body[8:16], pick(fields))) + body[16:]
        if opcode in (f.READ, f.WRITE):
            offset = pick((0, small, BUFFER_BYTES - small, BUFFER_BYTES + 1 - small))
            place = pick((u64(offset), pick(fields))) if opcode == f.READ else u64(offset)
            return pick(fields) + place + u64(small) + bytes(small if opcode == f.WRITE else 0)
        if opcode == f.LOAD:
            artifact = SAMPLE.artifact if random.random() < 0.7 else random.randbytes(random.randrange(1, 300))
            target, resident = (random.getrandbits(32), *[0] * 11), pick((1, 64, (1 << 64) - 1))
            form = pick((SAMPLE.format, SAMPLE.format, 1))
            sample = SAMPLE._replace(artifact=artifact, format=form, target=target, resident=resident)
            return pick(fields) + f.load(0, sample)[8:]
        if opcode == f.SUBMIT:
            rows = [
                pick(fields) + f.binding(0, slot, random.randrange(1, 4), 8)[8:]
                for slot in range(random.randrange(1, 5))
            ]
            return pick(fields) + pick(fields) + f.submission(0, 0, *rows)[16:]
        return b"" if opcode == f.INFO else pick(fields)

    # -- running one

    def execute(self, data: bytes) -> int:
        head, frame = data[:HEADER].ljust(HEADER, b"\0"), data[HEADER:]
        room = _ROOMS[head[0] % len(_ROOMS)] if head[0] < 0xC0 else 320
        out = bytearray(CANARIES[:room])
        used = self._engine.process(Chain.over(0, _cut(frame, head[2]), _cut(out, head[3])))
        opcode = f.field(frame, 0, 2)
        try:
            self._judge(opcode, frame, out, used)
        finally:
            # A cancelled event is still there; nothing counts it.
            if self._account() != self._before or (opcode == f.CANCEL and not any(out[:2])):
                self._renew()
        return 1

    def _judge(self, opcode: int, frame: bytes, out: bytearray, used: int | None) -> None:
        if used is None:
            raise Finding(f"command {opcode:#06x} was neither answered nor given back")
        status = answer_to(frame, bytes(out), used).status
        allowed = outcomes(frame, len(out), self.model)
        self.features.add((opcode if opcode in f.OK_PAYLOAD else 0, status, allowed))
        may = allowed | _BACKEND_MAY_REFUSE.get(opcode, frozenset()) if OK in allowed else allowed
        if status not in may:
            raise Finding(f"command {opcode:#06x}: status {status}, the standard allows {sorted(allowed)}")
        if status != OK and self._account() != self._before:
            raise Finding(f"command {opcode:#06x} was refused with status {status} and changed something")

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
