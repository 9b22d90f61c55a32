"""What a protocol case works with: a device behind a raw ring, and the oracle that holds answers to the standard.

Knows how commands are published by hand and what a case needs around it; the protocol's rules are the oracle's.
Standard library only: this also runs inside a guest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from virtaccel.guest_tools.transport.base import Config
from virtaccel.guest_tools.transport.raw import Piece, RawRing
from virtaccel.harness.conformance.outcome import Failed, NotShown
from virtaccel.harness.oracle import frames as f
from virtaccel.harness.oracle.frames import Answer, BadAnswer, Info, say
from virtaccel.harness.oracle.model import Limits, Model
from virtaccel.harness.oracle.programs import SAMPLES, Sample
from virtaccel.harness.oracle.verdicts import outcomes

ROOM: Final = 128  # more than any answer of a fixed size needs, so that a device may write too much and be seen
POLL_SECONDS: Final = 0.001  # short against any program worth polling for, long against a busy loop


class World(NamedTuple):
    """One of everything in a context; `program` is 0 where the device takes none of the programs at hand."""

    context: int
    source: int
    target: int
    queue: int
    program: int


class TestBed:
    """One device. `renew` before each case: the device is reset and the ring is new."""

    __test__ = False

    def __init__(
        self, ring: RawRing, config: Config, patience: float = 20.0, samples: Sequence[Sample] = SAMPLES
    ) -> None:
        self.ring = ring
        self.config = config
        self.patience = patience
        self.request_id = 0
        self.info = Info(bytes(16), *[0] * 13)
        self.sample: Sample | None = None
        self.model = Model(Limits(config.max_request_bytes, config.max_response_bytes, self.info))
        self._samples = samples

    def begin(self) -> None:
        """Learn what the device is and which program it takes. Raises Failed."""
        self.renew()
        answer = self.call(f.INFO)
        if (answer.used, answer.status) != (92, f.OK):
            raise Failed(f"GET_DEVICE_INFO: {say(answer.status)}, {answer.used} bytes used")
        self.info = Info.read(answer.payload)
        self.model.limits = self.model.limits._replace(info=self.info)
        context = self.context()
        for sample in self._samples:
            if self.call(f.LOAD, f.load(context, sample)).status == f.OK:
                self.sample = sample
                break
        self.renew()

    def renew(self) -> None:
        self.ring.restart()
        self.model.forget()
        self.request_id = 0

    @property
    def domain(self) -> int:
        return self.info.domain

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
        space = [self.canary(size) for size in room]
        head = self.ring.chain(first, pieces, space)
        self.ring.offer(head)
        return head, space

    def canary(self, size: int = ROOM) -> Piece:
        return self.ring.piece(bytes([f.CANARY]) * size)

    def read(self, used: int, room: Sequence[Piece], request_id: int) -> Answer:
        """An answer in `room`. Raises Failed where it is none."""
        try:
            return f.answer(request_id, b"".join(bytes(piece.view) for piece in room), used)
        except BadAnswer as error:
            raise Failed(str(error)) from error

    def send(self, request: bytes, room: Sequence[int] = (ROOM,), cuts: Sequence[int] = ()) -> Answer:
        """One request and its answer, which must be for its head; what it says is the caller's to judge."""
        head, space = self.publish(request, room, cuts)
        used = self.ring.collect(self.patience)
        if used is None:
            raise Failed(f"no answer within {self.patience:.0f} s")
        if used.head != head:
            raise Failed(f"head {used.head} came back for head {head}")
        answer = self.read(used.written, space, f.field(request, 8))
        self.ring.scratch_again()
        return answer

    def call(self, opcode: int, body: bytes = b"", room: Sequence[int] = (ROOM,), cuts: Sequence[int] = ()) -> Answer:
        """One command. Whatever a case is about, the oracle has to allow the answer, and takes in what was done."""
        self.request_id += 1
        request = f.frame(opcode, body, self.request_id)
        allowed = outcomes(request, sum(room), self.model)
        answer = self.send(request, room, cuts)
        if f.OK not in allowed and answer.status not in allowed:
            wanted = " or ".join(map(say, sorted(allowed)))
            raise Failed(f"command {opcode:#06x}: {say(answer.status)}, should be {wanted}")
        try:
            self.model.apply(request, answer)
        except BadAnswer as error:
            raise Failed(f"command {opcode:#06x}: {error}") from error
        return answer

    def ok(self, opcode: int, body: bytes = b"", room: Sequence[int] = (ROOM,), cuts: Sequence[int] = ()) -> Answer:
        answer = self.call(opcode, body, room, cuts)
        if answer.status != f.OK:
            raise Failed(f"command {opcode:#06x}: {say(answer.status)}, should be OK")
        return answer

    def made(self, opcode: int, body: bytes) -> int:
        """The ID of a new object."""
        answer = self.ok(opcode, body)
        if len(answer.payload) != f.ID_BYTES or not answer.id:
            raise Failed(f"command {opcode:#06x} returned {answer.payload.hex()}, not an object ID")
        return answer.id

    def refuses_each(self, opcode: int, status: int, rows: Mapping[str, bytes]) -> None:
        """Each body must be refused with `status`."""
        for what, body in rows.items():
            self.refuses(what, opcode, body, status)

    def refuses(self, what: str, opcode: int, body: bytes, *statuses: int) -> None:
        """The command must be refused with one of `statuses`, in a bare header."""
        try:
            answer = self.call(opcode, body)
        except Failed as error:
            raise Failed(f"{what}: {error}") from error
        if answer.status not in statuses or answer.used not in (0, 16):
            wanted = " or ".join(map(say, statuses))
            raise Failed(f"{what}: {say(answer.status)}, {answer.used} bytes used; should be {wanted}")

    # -- objects

    def context(self) -> int:
        return self.made(f.CREATE_CONTEXT, bytes(8))

    def allocation(self, context: int, size: int = 64, usage: int = f.PLAIN_USE, **odd: Any) -> bytes:
        """ALLOCATE's body, in a domain that the device has; `odd` are fields as `frames.allocation` takes them."""
        return f.allocation(context, size, usage, **{"domain": self.domain, **odd})

    def buffer(self, context: int, size: int = 64, usage: int = f.PLAIN_USE) -> int:
        return self.made(f.ALLOCATE, self.allocation(context, size, usage))

    def world(self) -> World:
        context = self.context()
        program = self.made(f.LOAD, f.load(context, self.sample)) if self.sample is not None else 0
        source, target = self.buffer(context), self.buffer(context)
        return World(context, source, target, self.made(f.CREATE_QUEUE, f.queue_of(context)), program)

    def program_of(self) -> Sample:
        """The program this device takes. Raises NotShown if there is none."""
        if self.sample is None:
            raise NotShown("the device takes none of the programs at hand; bring one with --artifact")
        return self.sample

    def submitted(self, world: World) -> bytes:
        """A submission of the world's program over its buffers."""
        size = self.program_of().bytes
        reads, writes = f.binding(world.source, 0, 1, size), f.binding(world.target, 1, 2, size)
        return f.submission(world.queue, world.program, reads, writes)

    def terminal(self, event: int) -> tuple[int, int]:
        """Poll until the event is terminal: state and error."""
        until = time.monotonic() + self.patience
        while time.monotonic() < until:
            try:
                state, error = f.event_state(self.ok(f.POLL, f.u64(event)).payload)
            except BadAnswer as wrong:
                raise Failed(str(wrong)) from wrong
            if state != f.PENDING:
                return state, error
            time.sleep(POLL_SECONDS)
        raise Failed(f"a small program is still running after {self.patience:.0f} s")
