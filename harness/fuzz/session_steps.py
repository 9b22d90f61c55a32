"""The moves of target `session`: commands, damaged frames, faults and endings, each held to the model.

One `Steps` is one run. What a byte of an input stands for is in the tables at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from struct import Struct
from typing import Final, TypeAlias

from virtaccel.device.reference import Break, Doubt, Fault, Inflate, Refuse
from virtaccel.device.wire import Status
from virtaccel.harness.fuzz import session_model as models
from virtaccel.harness.fuzz import strict
from virtaccel.harness.fuzz.session_bench import (
    PAGE,
    ROOM,
    Kind,
    LocalBench,
    RemoteBench,
    Reply,
    reference_kind,
)
from virtaccel.harness.fuzz.session_model import CANCELLED, COMPLETE, FAILED, NONE, PENDING, UNKNOWN, Bounds, Model
from virtaccel.harness.fuzz.strict import (
    BUSY,
    DEVICE_LOST,
    INVALID_ARGUMENT,
    NOTHING,
    OK,
    OUT_OF_MEMORY,
    RESOURCE_LIMIT,
    UNSUPPORTED,
    Response,
)
from virtaccel.harness.fuzz.target import Finding

_HEAD: Final = Struct("<HHIQ")
_ID: Final = Struct("<Q")
_ALLOCATE: Final = Struct("<QQQB7xII")
_TRANSFER: Final = Struct("<QQQ")
_LOAD: Final = Struct("<QII12IQQ")
_SUBMIT: Final = Struct("<QQIIQ")
_BINDING: Final = Struct("<QQQIB3x")

SIZES: Final = (16, 16, 32, 1, 64, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1)
USAGES: Final = (15, 15, 31, 4 | 2, 8 | 1)
RESIDENT: Final = (1, 64, 100, 250, 500)
REFUSALS: Final = (Status.BUSY, Status.OUT_OF_MEMORY, Status.INTERNAL_ERROR, Status.RESOURCE_LIMIT, Status.DEVICE_LOST)
METHODS: Final = (
    "create_context", "destroy_context", "allocate_buffer", "free_buffer", "write_buffer", "read_buffer",
    "load_program", "unload_program", "create_queue", "destroy_queue", "submit", "poll_event", "cancel_event",
    "destroy_event",
)  # fmt: skip
RELEASES: Final = frozenset({"destroy_context", "free_buffer", "unload_program", "destroy_queue", "destroy_event"})
LOST: Final = frozenset({DEVICE_LOST})
CREATION: Final = frozenset({RESOURCE_LIMIT, OUT_OF_MEMORY})


def load_body(context: int, kind: Kind) -> bytes:
    size = len(kind.artifact)
    return _LOAD.pack(context, kind.format, 0, *kind.target, size, kind.resident) + kind.artifact


class Steps:
    """One run: the model and the moves."""

    def __init__(self, features: set[Hashable], bench: LocalBench | RemoteBench, bounds: Bounds, kind: Kind) -> None:
        self.bench = bench
        self.local = bench if isinstance(bench, LocalBench) else None
        self.model = Model(bounds)
        self.features = features
        self.kind = kind
        self.lost = False
        self.request_id = 0

    # -- one command

    def frame(self, opcode: int, body: bytes) -> bytes:
        self.request_id += 1
        return _HEAD.pack(opcode, 0, len(body), self.request_id) + body

    def exchange(self, opcode: int, body: bytes, capacity: int = 96, asked: int = 0) -> Response:
        reply = self.bench.send(self.frame(opcode, body), capacity)
        return self.read(opcode, reply, asked)

    def read(self, opcode: int, reply: Reply, asked: int = 0) -> Response:
        if reply.used is None:
            raise Finding(f"command {opcode:#06x} was not answered")
        try:
            return strict.response(opcode, self.request_id, reply.data, asked)
        except strict.BadResponse as error:
            raise Finding(f"command {opcode:#06x}: {error}") from error

    def command(
        self,
        opcode: int,
        body: bytes,
        faults: frozenset[int],
        late: frozenset[int] = NONE,
        asked: int = 0,
        quiet: bool = True,
    ) -> Response:
        """Send one and hold the answer to the model: `faults` must be met before the backend is asked (unless not
        `quiet`), `late` may be met by it. A fault that the backend was armed with takes precedence over `late`."""
        local = self.local
        calls = local.backend.calls if local else 0
        answer = self.exchange(opcode, body, asked=asked)
        status = answer.status
        self.features.add((opcode, status))
        if self.lost:
            self.must(opcode, status, LOST)
            return answer
        if faults:
            self.must(opcode, status, faults)
            if local and quiet and local.backend.calls != calls:
                raise Finding(f"command {opcode:#06x}: the backend was asked before the refusal {status}")
            return answer
        if local is None:
            self.must(opcode, status, late | {OK})
            return answer
        taken = local.taken()
        self.must(opcode, status, _outcome(taken, late))
        self.lost = status == DEVICE_LOST and bool(taken)
        return answer

    def must(self, opcode: int, status: int, allowed: frozenset[int]) -> None:
        if status not in allowed:
            raise Finding(f"command {opcode:#06x}: status {status}, the model allows {sorted(allowed)}")

    # -- choosing operands

    def pick(self, table: dict[int, models.Context] | dict[int, models.Buffer] | dict[int, models.Program]
             | dict[int, models.Queue] | dict[int, models.Event], choice: int) -> int:  # fmt: skip
        """A live ID mostly, else one that died, or one of another kind."""
        if table and choice < 0xE8:
            return list(table)[choice % len(table)]
        model = self.model
        if choice & 1:
            for other in (model.queues, model.buffers, model.events, model.contexts, model.programs):
                if other and other is not table:
                    return next(iter(other))
        return model.dead[choice % len(model.dead)]

    def kin(self, table: dict[int, models.Buffer] | dict[int, models.Program], queue: models.Queue | None,
            choice: int, usage: int = 0) -> int:  # fmt: skip
        """Mostly one of the queue's own context, and of a usage that fits, if there is one."""
        if queue is not None and choice < 0xD0:
            near = [
                key for key, one in table.items()
                if one.context == queue.context and (not isinstance(one, models.Buffer) or one.usage & usage)
            ]  # fmt: skip
            if near:
                return near[choice % len(near)]
        return self.pick(table, choice)

    def born(self, answer: Response) -> int:
        made = int.from_bytes(answer.payload, "little")
        wrong = self.model.born(made)
        if wrong:
            raise Finding(wrong)
        return made

    # -- moves: each takes its record's operands

    def populate(self) -> None:
        """A context with what a submission needs, so that short inputs already get somewhere."""
        zero = bytes(5)
        self.create_context(zero)
        self.allocate(zero)
        self.allocate(zero)
        self.create_queue(zero)
        self.load(zero)
        self.settle()

    def create_context(self, given: bytes) -> None:
        faults = self.model.refuse_context()
        answer = self.command(strict.CREATE_CONTEXT, bytes(8), faults, NONE if self.local else CREATION)
        if answer.status == OK:
            self.model.contexts[self.born(answer)] = models.Context()

    def destroy_context(self, given: bytes) -> None:
        if given[1] & 7 == 0:  # seldom: everything of it has to go first
            self.release(strict.DESTROY_CONTEXT, self.model.contexts, given[0], self.model.remove_context)

    def release(self, opcode: int, table: dict[int, models.Context] | dict[int, models.Buffer]
                | dict[int, models.Program] | dict[int, models.Queue], choice: int,
                remove: Callable[[int], None]) -> None:  # fmt: skip
        target = self.pick(table, choice)
        faults = self.model.refuse_release(table, target)
        if self.command(opcode, _ID.pack(target), faults).status == OK:
            remove(target)

    def allocate(self, given: bytes) -> None:
        model, local = self.model, self.local
        context, size, usage = self.pick(model.contexts, given[0]), SIZES[given[1] % len(SIZES)], USAGES[given[2] % 5]
        faults = model.refuse_buffer(context, size)
        charge = -(-size // PAGE) * PAGE
        inflated = local.armed.get("allocate_buffer") if local else None
        if isinstance(inflated, Inflate):
            charge += inflated.bytes
        body = _ALLOCATE.pack(context, size, 1 << given[3] % 8, 3, usage, 0)
        if local and not faults and not self.lost and model.backing + charge > model.bounds.backing:
            self.allocate_too_much(body)
            return
        answer = self.command(strict.ALLOCATE_BUFFER, body, faults, NONE if local else CREATION)
        if answer.status == OK:
            model.add_buffer(self.born(answer), context, size, usage, charge)

    def allocate_too_much(self, body: bytes) -> None:
        """The backend's allocation is beyond the budget: it has to be given back, or else ownership is lost."""
        local = self.local
        answer = self.exchange(strict.ALLOCATE_BUFFER, body)
        taken = local.taken() if local else {}
        first = taken.get("allocate_buffer")
        if first is not None and not isinstance(first, Inflate):
            allowed = _outcome({"allocate_buffer": first}, NONE)
        else:
            allowed = LOST if "free_buffer" in taken else frozenset({RESOURCE_LIMIT})
        self.must(strict.ALLOCATE_BUFFER, answer.status, allowed)
        self.lost = answer.status == DEVICE_LOST

    def free(self, given: bytes) -> None:
        self.release(strict.FREE_BUFFER, self.model.buffers, given[0], self.model.remove_buffer)

    def write(self, given: bytes) -> None:
        target, offset, size = self.pick(self.model.buffers, given[0]), _offset(given[1]), 1 + given[2] % 24
        faults = self.model.refuse_transfer(target, offset, size, 2)
        buffer = self.model.buffers.get(target)
        late = frozenset({BUSY}) if buffer and self.in_use(buffer, True) else NONE
        data = bytes(given[3] + index & 0xFF for index in range(size))
        answer = self.command(strict.WRITE_BUFFER, _TRANSFER.pack(target, offset, size) + data, faults, late)
        if buffer is None:
            return
        if answer.status == OK and buffer.data is not None:
            buffer.data[offset : offset + size] = data
        elif answer.status not in (OK, BUSY) and not faults:
            buffer.data = None  # a failed write may have written a part (specification.md 7)

    def read_buffer(self, given: bytes) -> None:
        target, offset, size = self.pick(self.model.buffers, given[0]), _offset(given[1]), 1 + given[2] % 64
        faults = self.model.refuse_transfer(target, offset, size, 1)
        buffer = self.model.buffers.get(target)
        late = frozenset({BUSY}) if buffer and self.in_use(buffer, False) else NONE
        answer = self.command(strict.READ_BUFFER, _TRANSFER.pack(target, offset, size), faults, late, size)
        known = buffer.data if buffer is not None and answer.status == OK else None
        if known is not None and answer.payload != known[offset : offset + size]:
            raise Finding("a buffer does not hold what was written and computed")

    def in_use(self, buffer: models.Buffer, writing: bool) -> bool:
        if self.local is None:
            return buffer.used
        return bool(buffer.writers or (writing and buffer.readers))

    def load(self, given: bytes) -> None:
        self.load_with(given, deferred=False)

    def load_later(self, given: bytes) -> None:
        self.load_with(given, deferred=True)

    def load_with(self, given: bytes, deferred: bool) -> None:
        model, local = self.model, self.local
        context = self.pick(model.contexts, given[0])
        kind = self.kind if local is None else reference_kind(given[2], RESIDENT[given[1] % len(RESIDENT)])
        good = not (local and given[3] > 0xE0)
        if not good:
            kind = kind._replace(artifact=b"no program")
        faults = model.refuse_program(context, kind.resident)
        if local is not None:
            local.script.deferred_loads = deferred
            if deferred and not faults and not self.lost and "load_program" not in local.armed:
                self.park(context, kind, good)
                return
        late = NONE if good else frozenset({INVALID_ARGUMENT})
        late = late if local else CREATION | {strict.INCOMPATIBLE, UNSUPPORTED, INVALID_ARGUMENT}
        answer = self.command(strict.LOAD_PROGRAM, load_body(context, kind), faults, late)
        if answer.status == OK:
            model.add_program(self.born(answer), context, kind.resident, kind.operand)

    def park(self, context: int, kind: Kind, good: bool) -> None:
        """A load that ends later: its head is withheld, its quota and charge are taken."""
        local = self.local
        if local is None:
            return
        out = memoryview(bytearray(b"\xc5" * ROOM))
        reply = local.send(self.frame(strict.LOAD_PROGRAM, load_body(context, kind)), ROOM, out)
        if reply.used is not None:
            raise Finding(f"a load that is under way was answered with {reply.data.hex()}")
        self.model.add_load(models.Load(self.request_id, context, kind.resident, kind.operand, good, out))

    def loads_end(self, given: bytes) -> None:
        local, model = self.local, self.model
        if local is None or self.lost:
            return
        ended = model.loads[: 1 + given[0] % 3]
        local.reference.finish_load(len(ended))
        finished = local.device.engine.finished()
        if len(finished) != len(ended):
            raise Finding(f"{len(ended)} loads have ended and {len(finished)} were answered")
        for load, (chain, used) in zip(ended, finished, strict=True):
            if chain.writable[0] is not load.out or bytes(load.out[used:]) != b"\xc5" * (ROOM - used):
                raise Finding("another load was answered, or more than was said")
            self.answered(load, bytes(load.out[:used]))

    def answered(self, load: models.Load, used: bytes) -> None:
        try:
            answer = strict.response(strict.LOAD_PROGRAM, load.request_id, used)
        except strict.BadResponse as error:
            raise Finding(f"the answer to a load: {error}") from error
        self.must(strict.LOAD_PROGRAM, answer.status, frozenset({OK if load.good else INVALID_ARGUMENT}))
        self.model.end_load(load)
        if answer.status == OK:
            self.model.add_program(self.born(answer), load.context, load.resident, load.operand)

    def unload(self, given: bytes) -> None:
        self.release(strict.UNLOAD_PROGRAM, self.model.programs, given[0], self.model.remove_program)

    def create_queue(self, given: bytes) -> None:
        context = self.pick(self.model.contexts, given[0])
        faults = self.model.refuse_queue(context)
        late = NONE if self.local else CREATION
        answer = self.command(strict.CREATE_QUEUE, _ID.pack(context) + bytes(8), faults, late)
        if answer.status == OK:
            self.model.add_queue(self.born(answer), context)

    def destroy_queue(self, given: bytes) -> None:
        self.release(strict.DESTROY_QUEUE, self.model.queues, given[0], self.model.remove_queue)

    def submit(self, given: bytes) -> None:
        model = self.model
        queue = self.pick(model.queues, given[0])
        on = model.queues.get(queue)
        program = self.kin(model.programs, on, given[1])
        source, target = self.kin(model.buffers, on, given[2], 4), self.kin(model.buffers, on, given[3], 8)
        start = 0 if given[4] < 0xC0 else given[4] & 3
        size = self.kind.size if self.local is None else 1 + given[4] % 16
        faults = model.refuse_submit(queue, program, source, target, start, size)
        late = NONE
        if not faults:
            reads, writes = model.buffers[source], model.buffers[target]
            if reads is writes or reads.writers or writes.writers or writes.readers or self.local is None:
                late = frozenset(
                    {BUSY} if self.local else {BUSY, INVALID_ARGUMENT, strict.INCOMPATIBLE, RESOURCE_LIMIT}
                )
        body = _SUBMIT.pack(queue, program, 2, 0, 0)
        body += _BINDING.pack(source, 0, size, 0, 1) + _BINDING.pack(target, start, size, 1, 2)
        doubt = self.local.armed.get("submit") if self.local and not faults else None
        answer = self.command(strict.SUBMIT, body, faults, late)
        if answer.payload and not faults:
            doubtful = isinstance(doubt, Doubt)
            if doubtful is not (answer.status != OK):
                raise Finding(f"SUBMIT came back with status {answer.status} and an event")
            self.admitted(self.born(answer), queue, program, source, target, start, size, doubtful)
        elif isinstance(doubt, Doubt) and not late and not self.lost:
            raise Finding("an indeterminate submission came back without its event")

    def admitted(self, made: int, queue: int, program: int, source: int, target: int, start: int, size: int,
                 doubtful: bool) -> None:  # fmt: skip
        model = self.model
        event = models.Event(
            model.queues[queue], model.programs[program], model.buffers[source], model.buffers[target], start, size,
            PENDING if self.local else UNKNOWN, doubtful=doubtful,
        )  # fmt: skip
        model.add_event(made, event)
        if self.local is None:
            event.target.data = None

    def complete(self, given: bytes) -> None:
        """The oldest submissions end, well or not."""
        if self.local is None or self.lost:
            return
        error = 0 if given[1] < 0xC0 else (8, 65535, 9)[given[1] % 3]
        count = 1 + given[0] % 3
        self.local.complete(count, error)
        pending = [event for event in self.model.events.values() if event.state == PENDING]
        for event in pending[:count]:
            self.model.end(event, FAILED if error else COMPLETE, error)

    def poll(self, given: bytes) -> None:
        target = self.pick(self.model.events, given[0])
        event = self.model.events.get(target)
        answer = self.command(strict.POLL_EVENT, _ID.pack(target), NONE if event else models.STALE)
        if event is not None and answer.status == OK:
            state, error = answer.payload[0], int.from_bytes(answer.payload[2:4], "little")
            self.seen(event, state, error)

    def seen(self, event: models.Event, state: int, error: int) -> None:
        if event.state == UNKNOWN:
            if state != PENDING:
                self.model.end(event, state, error)
        elif (state, error) != (event.state, event.error):
            raise Finding(f"an event is in state {state}, error {error}, should be {event.state}, {event.error}")

    def cancel(self, given: bytes) -> None:
        target = self.pick(self.model.events, given[0])
        event = self.model.events.get(target)
        faults, late = (NONE if event else models.STALE), NONE
        if event is not None:
            if event.state == UNKNOWN:
                late = frozenset({BUSY, UNSUPPORTED})
            elif event.state != PENDING or event.doubtful:
                late = frozenset({BUSY} if self.local else {BUSY, UNSUPPORTED})
        answer = self.command(strict.CANCEL_EVENT, _ID.pack(target), faults, late, quiet=False)
        if event is not None and answer.status == OK:
            if event.state not in (PENDING, UNKNOWN):
                raise Finding("a terminal event was cancelled")
            self.model.end(event, CANCELLED)

    def destroy_event(self, given: bytes) -> None:
        target = self.pick(self.model.events, given[0])
        event = self.model.events.get(target)
        faults, late = (NONE if event else models.STALE), NONE
        if event is not None and event.state in (PENDING, UNKNOWN):
            late = frozenset({BUSY})
        answer = self.command(strict.DESTROY_EVENT, _ID.pack(target), faults, late, quiet=False)
        if event is not None and answer.status == OK:
            if event.state == PENDING:
                raise Finding("a pending event was destroyed")
            if event.state == UNKNOWN:
                self.model.end(event, FAILED)
            self.model.remove_event(target)

    def info(self, given: bytes) -> None:
        self.command(strict.GET_DEVICE_INFO, b"", NONE)

    def damaged(self, given: bytes) -> None:
        """A sound request with one fault in its frame or too little room: refused, and nothing changes."""
        model = self.model
        bodies = (
            (strict.CREATE_CONTEXT, bytes(8)),
            (strict.ALLOCATE_BUFFER, _ALLOCATE.pack(self.pick(model.contexts, 0), 16, 16, 3, 15, 0)),
            (strict.CREATE_QUEUE, _ID.pack(self.pick(model.contexts, 0)) + bytes(8)),
            (strict.FREE_BUFFER, _ID.pack(self.pick(model.buffers, 0))),
            (strict.LOAD_PROGRAM, load_body(self.pick(model.contexts, 0), self.kind)),
            (strict.DESTROY_EVENT, _ID.pack(self.pick(model.events, 0))),
        )
        opcode, body = bodies[given[0] % len(bodies)]
        frame, capacity, allowed = self.frame(opcode, body), 96, {INVALID_ARGUMENT}
        match given[1] % 5:
            case 0:
                frame, allowed = frame[:2] + bytes((1 << given[2] % 8, 0)) + frame[4:], {UNSUPPORTED}
            case 1:
                frame += b"\0"
            case 2:
                frame = frame[:4] + (len(body) + 1 + given[2]).to_bytes(4, "little") + frame[8:]
            case 3:
                capacity, allowed = 15 + strict.OK_PAYLOAD[opcode], {NOTHING}
            case 4:
                frame, allowed = (0xF000 | given[2]).to_bytes(2, "little") + frame[2:], {UNSUPPORTED}
        calls = self.local.backend.calls if self.local else 0
        answer = self.read(opcode, self.bench.send(frame, capacity))
        if self.lost:
            allowed = LOST if capacity >= 16 else {NOTHING}  # type: ignore[assignment]
        self.must(opcode, answer.status, frozenset(allowed))
        if self.local and self.local.backend.calls != calls:
            raise Finding(f"command {opcode:#06x}: the backend was asked although the frame is damaged")

    # -- moves of this process alone

    def arm(self, given: bytes) -> None:
        local = self.local
        if local is None:
            return
        method = METHODS[given[0] % len(METHODS)]
        fault: Fault = Refuse(REFUSALS[given[2] % 4 if given[3] < 0xE0 else 4])
        kind = given[1]
        if method in RELEASES and kind < 0x20:
            fault = Doubt(Status.BUSY)
        elif method == "submit" and kind < 0x80:
            fault = Doubt(REFUSALS[given[2] % len(REFUSALS)] if given[3] > 0xE0 else Status.INTERNAL_ERROR)
        elif method == "allocate_buffer" and kind < 0xA0:
            fault = Inflate(PAGE * (1 + given[2] % 12))
        elif kind > 0xF8:
            fault = Break(RuntimeError("a bug of the backend"))
        local.arm(method, fault)

    def unwritable(self, given: bytes) -> None:
        """The memory for the answer cannot be written: nothing is said, so if something has changed the device must ask
        for a reset, and the head must not come back as if nothing had."""
        local, model = self.local, self.model
        if local is None or self.lost or given[0] > 0x20:
            return
        faults = model.refuse_context()
        reply = local.send(self.frame(strict.CREATE_CONTEXT, bytes(8)), 64, memoryview(bytes(64)))
        taken = local.taken()
        if reply.used is not None:
            if reply.used or not (faults or taken):
                raise Finding("a context was made and nobody was told, yet its head came back")
            self.lost = not local.running
            return
        self.lost = True
        if local.running:
            raise Finding("a head was withheld by a device that goes on")
        if not taken:
            model.hidden += 1

    def reset(self, given: bytes) -> None:
        """Seldom, or nothing ever grows; soon, where the device is lost."""
        if given[0] > 0x08 and not self.lost:
            return
        local, model = self.local, self.model
        if local is None:
            self.bench.reset()
            model.forget()
            return
        sound = not (self.lost or local.armed or any(event.doubtful for event in model.events.values()))
        counts, loads, charged = model.counts(), len(model.loads), (model.backing, model.resident)
        backend = local.backend
        report = local.reset()
        if self.lost is False or sound:
            total = tuple(a + b for a, b in zip(report.released, report.quarantined, strict=True))
            if sound and (
                report.discard or tuple(report.released) != counts or tuple(report.released_bytes) != charged
            ):
                raise Finding(f"a reset of {counts} objects, {charged} bytes: {report}")
            if total != counts or report.abandoned_loads != loads:
                raise Finding(f"objects were lost in a reset: {counts} and {loads} loads, {report}")
        if backend.closed is not report.discard:
            raise Finding("a backend to be discarded lives on, or one that need not be is gone")
        if not report.discard and backend.live:
            raise Finding(f"{len(backend.live)} objects are left in the backend after a reset")
        if backend.breach:
            raise Finding(f"the contract was broken while resetting: {backend.breach}")
        local.disarm()
        self.lost = False
        model.forget()

    # -- after every move

    def settle(self) -> None:
        """In this process: engine, backend and model agree."""
        local = self.local
        if local is None:
            return
        backend = local.backend
        if backend.breach is not None:
            raise Finding(f"the contract was broken: {backend.breach}")
        if local.running is self.lost:
            raise Finding(f"the device is {local.device.engine.health.value}, the model thinks {self.lost=}")
        if self.lost:
            return
        model, engine = self.model, local.device.engine
        state = engine.state
        counts = model.counts()
        if (
            len(state.contexts) != counts[0] or len(state.buffers) != counts[1] or len(state.programs) != counts[2]
            or len(state.queues) != counts[3] or len(state.events) != counts[4]
        ):  # fmt: skip
            raise Finding(f"the device counts {state.counts}, the model {counts}")
        if state.backing_bytes != model.backing or state.resident_bytes != model.resident:
            raise Finding(f"the device charges {state.retained}, the model {(model.backing, model.resident)}")
        if len(backend.live) != sum(counts) + len(model.loads) or engine.parked != len(model.loads):
            raise Finding(f"the backend holds {len(backend.live)} objects, the model {sum(counts) + len(model.loads)}")


def _offset(choice: int) -> int:
    """Near the beginning, or around the end of a page, or anywhere."""
    return choice % 9 if choice < 0xC0 else PAGE - 8 + choice % 9 if choice < 0xE0 else choice


def _outcome(taken: dict[str, Fault], late: frozenset[int]) -> frozenset[int]:
    """The status that a command ends with when its calls met these faults, or `late` from the backend itself."""
    for method, fault in taken.items():
        if isinstance(fault, Break) or (isinstance(fault, Doubt) and method in RELEASES):
            return LOST
        if isinstance(fault, Refuse) or (isinstance(fault, Doubt) and not late):
            return frozenset({int(fault.status)})
    return late or frozenset({OK})


_Move: TypeAlias = Callable[[Steps, bytes], None]
_WEIGHTS: Final[tuple[tuple[_Move, int, bool], ...]] = (
    (Steps.create_context, 6, True), (Steps.destroy_context, 12, True), (Steps.allocate, 20, True),
    (Steps.free, 9, True), (Steps.write, 18, True), (Steps.read_buffer, 22, True), (Steps.load, 10, True),
    (Steps.load_later, 8, False), (Steps.loads_end, 8, False), (Steps.unload, 5, True),
    (Steps.create_queue, 10, True), (Steps.destroy_queue, 3, True), (Steps.submit, 34, True),
    (Steps.complete, 14, False), (Steps.poll, 16, True), (Steps.cancel, 10, True),
    (Steps.destroy_event, 18, True), (Steps.info, 2, True), (Steps.damaged, 10, True), (Steps.arm, 4, False),
    (Steps.unwritable, 2, False), (Steps.reset, 8, True),
)  # fmt: skip


def _table(here: bool) -> tuple[_Move, ...]:
    """A move for every byte."""
    moves = [move for move, weight, everywhere in _WEIGHTS if here or everywhere for _ in range(weight)]
    return tuple(moves[index % len(moves)] for index in range(256))


LOCAL_MOVES: Final = _table(here=True)
REMOTE_MOVES: Final = _table(here=False)
