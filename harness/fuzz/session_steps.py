"""The moves of target `session`: commands, damaged frames, faults and endings, each held to the oracle.

One `Steps` is one run. What a byte of an input stands for is in the tables at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from virtaccel.device.reference import Break, Doubt, Fault, Inflate, Refuse
from virtaccel.device.wire import Status
from virtaccel.harness.fuzz.session_test_bed import CANARIES, PAGE, ROOM, LocalBed, RemoteBed, reference_sample
from virtaccel.harness.fuzz.target import Finding
from virtaccel.harness.oracle import frames as f
from virtaccel.harness.oracle import model as objects
from virtaccel.harness.oracle.frames import (
    BUSY,
    COMPLETE,
    DEVICE_LOST,
    FAILED,
    INCOMPATIBLE,
    INVALID_ARGUMENT,
    NOTHING,
    OK,
    OUT_OF_MEMORY,
    PENDING,
    RESOURCE_LIMIT,
    UNSUPPORTED,
    Answer,
)
from virtaccel.harness.oracle.model import UNKNOWN, Model, Object, Table
from virtaccel.harness.oracle.programs import Sample
from virtaccel.harness.oracle.verdicts import Outcomes, outcomes

CAPACITY: Final = 96  # what every answer here fits into
# The common size twice, then what lies around a page and around the largest buffer.
SIZES: Final = (16, 16, 32, 1, 64, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1)
# Every use, with mutable state, and what may only be read or only written by a program.
USAGES: Final = (15, 15, 31, 4 | 2, 8 | 1)
RESIDENT: Final = (1, 64, 100, 250, 500)
REFUSALS: Final = (Status.BUSY, Status.OUT_OF_MEMORY, Status.INTERNAL_ERROR, Status.RESOURCE_LIMIT, Status.DEVICE_LOST)
METHODS: Final = (
    "create_context", "destroy_context", "allocate_buffer", "free_buffer", "write_buffer", "read_buffer",
    "load_program", "unload_program", "create_queue", "destroy_queue", "submit", "poll_event", "cancel_event",
    "destroy_event",
)  # fmt: skip
RELEASES: Final = frozenset({"destroy_context", "free_buffer", "unload_program", "destroy_queue", "destroy_event"})
NONE: Final[Outcomes] = frozenset()
IS_BUSY: Final = frozenset({BUSY})
LOST: Final = frozenset({DEVICE_LOST})
CREATION: Final = frozenset({RESOURCE_LIMIT, OUT_OF_MEMORY})
# Only the backend knows how far an event is, so the engine asks it before it refuses.
_ASKED_FIRST: Final = frozenset({f.CANCEL, f.DESTROY_EVENT})


class Done(NamedTuple):
    """A command: its answer, what the oracle allowed, the object it made."""

    answer: Answer
    allowed: Outcomes
    made: Object | None


@dataclass(slots=True, eq=False)
class Parked(objects.Load):
    """A load under way: the room for its answer, what it will compute, and whether it will be a program."""

    out: memoryview
    operand: int
    good: bool


class Steps:
    """One run: the model and the moves."""

    def __init__(self, features: set[Hashable], bed: LocalBed | RemoteBed, sample: Sample) -> None:
        self.bed = bed
        self.local = bed if isinstance(bed, LocalBed) else None
        self.model = Model(bed.limits, PENDING if self.local else UNKNOWN)
        self.features = features
        self.sample = sample
        self.lost = False
        self.request_id = 0

    # -- one command

    def frame(self, opcode: int, body: bytes) -> bytes:
        self.request_id += 1
        return f.frame(opcode, body, self.request_id)

    def exchange(self, request: bytes, capacity: int = CAPACITY) -> Answer:
        answer = self.bed.send(request, capacity)
        if answer is None:
            raise Finding(f"command {f.field(request, 0, 2):#06x} was not answered")
        return answer

    def is_sound(self, opcode: int, body: bytes) -> bool:
        """Whether nothing but the backend may refuse the command now."""
        return not self.lost and OK in outcomes(f.frame(opcode, body), CAPACITY, self.model)

    def command(self, opcode: int, body: bytes, late: Outcomes = NONE) -> Done:
        """Send one and hold the answer to the oracle. What it refuses must be refused before the backend is asked;
        `late` is what the backend says otherwise, or may say where it is not ours. A fault that it was armed with takes
        precedence."""
        local, request = self.local, self.frame(opcode, body)
        allowed = outcomes(request, CAPACITY, self.model)
        calls = local.backend.calls if local else 0
        answer = self.exchange(request)
        self.features.add((opcode, answer.status))
        if self.lost:
            self.must(opcode, answer, LOST)
            return Done(answer, allowed, None)
        if OK not in allowed and not (opcode in _ASKED_FIRST and BUSY in allowed):
            self.must(opcode, answer, allowed)
            if answer.payload or (local and local.backend.calls != calls):
                raise Finding(f"command {opcode:#06x}: more was done than to refuse it with {answer.status}")
            return Done(answer, allowed, None)
        if local is None:
            self.must(opcode, answer, allowed | late)
        else:
            taken = local.taken()
            self.must(opcode, answer, _outcome(taken, late) or allowed)
            self.lost = answer.status == DEVICE_LOST and bool(taken)
        return Done(answer, allowed, self.model.apply(request, answer))

    def must(self, opcode: int, answer: Answer, allowed: Outcomes) -> None:
        if answer.status not in allowed:
            raise Finding(f"command {opcode:#06x}: status {answer.status}, the oracle allows {sorted(allowed)}")

    # -- choosing operands

    def pick(self, table: Table, choice: int) -> int:
        """A live ID mostly, else one that died, or one of another kind."""
        if table and choice < 0xE8:
            return list(table)[choice % len(table)]
        model = self.model
        if choice & 1:
            for other in (model.queues, model.buffers, model.events, model.contexts, model.programs):
                if other and other is not table:
                    return next(iter(other))
        return model.dead[choice % len(model.dead)]

    def kin(self, table: Table, queue: int, choice: int, usage: int = 0) -> int:
        """Mostly one of the queue's own context, and of a usage that fits, if there is one."""
        on = self.model.queues.get(queue)
        if on is not None and choice < 0xD0:
            near = [
                key for key, one in table.items()
                if one.context == on.context and (not isinstance(one, objects.Buffer) or one.usage & usage)
            ]  # fmt: skip
            if near:
                return near[choice % len(near)]
        return self.pick(table, choice)

    # -- moves: each takes its record's operands

    def populate(self) -> None:
        """A context with what a submission needs, so that short inputs already get somewhere."""
        zero = bytes(5)
        for move in (Steps.create_context, Steps.allocate, Steps.allocate, Steps.create_queue, Steps.load):
            move(self, zero)
        self.settle()

    def create_context(self, given: bytes) -> None:
        self.command(f.CREATE_CONTEXT, bytes(8), NONE if self.local else CREATION)

    def destroy_context(self, given: bytes) -> None:
        if given[1] & 7 == 0:  # seldom: everything of it has to go first
            self.release(f.DESTROY_CONTEXT, self.model.contexts, given)

    def release(self, opcode: int, table: Table, given: bytes) -> None:
        self.command(opcode, f.u64(self.pick(table, given[0])))

    def allocate(self, given: bytes) -> None:
        model, local = self.model, self.local
        context, size, usage = self.pick(model.contexts, given[0]), SIZES[given[1] % len(SIZES)], USAGES[given[2] % 5]
        charge = -(-size // PAGE) * PAGE
        inflated = local.armed.get("allocate_buffer") if local else None
        if isinstance(inflated, Inflate):
            charge += inflated.bytes
        body = f.allocation(context, size, usage, model.limits.info.domain, 1 << given[3] % 8)
        if local and model.backing + charge > model.limits.backing and self.is_sound(f.ALLOCATE, body):
            self.allocate_too_much(local, body)
            return
        made = self.command(f.ALLOCATE, body, NONE if local else CREATION).made
        if isinstance(made, objects.Buffer):
            made.charge = charge

    def allocate_too_much(self, local: LocalBed, body: bytes) -> None:
        """The backend's allocation is beyond the budget: it has to be given back, or else ownership is lost."""
        answer = self.exchange(self.frame(f.ALLOCATE, body))
        taken = local.taken()
        first = taken.get("allocate_buffer")
        if first is not None and not isinstance(first, Inflate):
            allowed = _outcome({"allocate_buffer": first}, NONE)
        else:
            allowed = LOST if "free_buffer" in taken else frozenset({RESOURCE_LIMIT})
        self.must(f.ALLOCATE, answer, allowed)
        self.lost = answer.status == DEVICE_LOST

    def free(self, given: bytes) -> None:
        self.release(f.FREE, self.model.buffers, given)

    def write(self, given: bytes) -> None:
        target, offset, size = self.pick(self.model.buffers, given[0]), _offset(given[1]), 1 + given[2] % 24
        data = bytes(given[3] + index & 0xFF for index in range(size))
        done = self.command(f.WRITE, f.transfer(target, offset, size) + data, self.if_in_use(target, True))
        if OK in done.allowed and done.answer.status not in (OK, BUSY):
            # A failed write may have written a part (specification.md 7).
            self.model.buffers[target].data = None

    def read(self, given: bytes) -> None:
        target, offset, size = self.pick(self.model.buffers, given[0]), _offset(given[1]), 1 + given[2] % 64
        self.command(f.READ, f.transfer(target, offset, size), self.if_in_use(target, False))

    def if_in_use(self, target: int, writing: bool) -> Outcomes:
        """Elsewhere nobody knows when work on a buffer ends."""
        buffer = self.model.buffers.get(target)
        used = self.model.is_in_use(target, writing) if self.local else buffer is not None and buffer.used
        return IS_BUSY if used else NONE

    def load(self, given: bytes) -> None:
        self.load_with(given, deferred=False)

    def load_later(self, given: bytes) -> None:
        self.load_with(given, deferred=True)

    def load_with(self, given: bytes, deferred: bool) -> None:
        local = self.local
        context = self.pick(self.model.contexts, given[0])
        sample = self.sample if local is None else reference_sample(given[2], RESIDENT[given[1] % len(RESIDENT)])
        good = not (local and given[3] > 0xE0)
        if not good:
            sample = sample._replace(artifact=b"no program")
        body = f.load(context, sample)
        if local is not None:
            local.script.deferred_loads = deferred
            if deferred and "load_program" not in local.armed and self.is_sound(f.LOAD, body):
                self.park(local, Parked(self.frame(f.LOAD, body), context, sample.resident,
                                        memoryview(bytearray(CANARIES)), sample.operand, good))  # fmt: skip
                return
        late = NONE if good else frozenset({INVALID_ARGUMENT})
        late = late if local else CREATION | {INCOMPATIBLE, UNSUPPORTED, INVALID_ARGUMENT}
        made = self.command(f.LOAD, body, late).made
        if isinstance(made, objects.Program):
            made.operand = sample.operand

    def park(self, local: LocalBed, load: Parked) -> None:
        """A load that ends later: its head is withheld, its quota and charge are taken."""
        answer = local.send(load.request, ROOM, load.out)
        if answer is not None:
            raise Finding(f"a load that is under way was answered with {answer}")
        self.model.loads.append(load)

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
            if not isinstance(load, Parked) or chain.writable[0] is not load.out:
                raise Finding("another load was answered")
            answer = f.answer_to(load.request, bytes(load.out), used)
            self.must(f.LOAD, answer, frozenset({OK if load.good else INVALID_ARGUMENT}))
            model.loads.remove(load)
            made = model.apply(load.request, answer)
            if isinstance(made, objects.Program):
                made.operand = load.operand

    def unload(self, given: bytes) -> None:
        self.release(f.UNLOAD, self.model.programs, given)

    def create_queue(self, given: bytes) -> None:
        body = f.queue_of(self.pick(self.model.contexts, given[0]))
        self.command(f.CREATE_QUEUE, body, NONE if self.local else CREATION)

    def destroy_queue(self, given: bytes) -> None:
        self.release(f.DESTROY_QUEUE, self.model.queues, given)

    def submit(self, given: bytes) -> None:
        model, local = self.model, self.local
        queue = self.pick(model.queues, given[0])
        program = self.kin(model.programs, queue, given[1])
        source, target = self.kin(model.buffers, queue, given[2], 4), self.kin(model.buffers, queue, given[3], 8)
        start = 0 if given[4] < 0xC0 else given[4] & 3
        size = self.sample.bytes if local is None else 1 + given[4] % 16
        busy = source == target or model.is_in_use(source, False) or model.is_in_use(target, True)
        late = IS_BUSY if busy else NONE
        if local is None:
            late = frozenset({BUSY, INVALID_ARGUMENT, INCOMPATIBLE, RESOURCE_LIMIT})
        bindings = f.binding(source, 0, 1, size), f.binding(target, 1, 2, size, start)
        doubtful = local is not None and isinstance(local.armed.get("submit"), Doubt)
        done = self.command(f.SUBMIT, f.submission(queue, program, *bindings), late)
        if isinstance(done.made, objects.Event):
            if doubtful is not (done.answer.status != OK):
                raise Finding(f"SUBMIT came back with status {done.answer.status} and an event")
            done.made.doubtful = doubtful
        elif doubtful and OK in done.allowed and not late and not self.lost:
            raise Finding("an indeterminate submission came back without its event")

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
        self.release(f.POLL, self.model.events, given)

    def cancel(self, given: bytes) -> None:
        target = self.pick(self.model.events, given[0])
        event = self.model.events.get(target)
        self.command(f.CANCEL, f.u64(target), IS_BUSY if event is not None and event.doubtful else NONE)

    def destroy_event(self, given: bytes) -> None:
        self.release(f.DESTROY_EVENT, self.model.events, given)

    def info(self, given: bytes) -> None:
        self.command(f.INFO, b"")

    def damaged(self, given: bytes) -> None:
        """A sound request with one fault in its frame or too little room: refused, and nothing changes."""
        model = self.model
        context = self.pick(model.contexts, 0)
        bodies = (
            (f.CREATE_CONTEXT, bytes(8)), (f.ALLOCATE, f.allocation(context, 16, 15, model.limits.info.domain, 16)),
            (f.CREATE_QUEUE, f.queue_of(context)), (f.FREE, f.u64(self.pick(model.buffers, 0))),
            (f.LOAD, f.load(context, self.sample)), (f.DESTROY_EVENT, f.u64(self.pick(model.events, 0))),
        )  # fmt: skip
        opcode, body = bodies[given[0] % len(bodies)]
        frame, capacity = self.frame(opcode, body), CAPACITY
        match given[1] % 5:
            case 0:
                frame = frame[:2] + bytes((1 << given[2] % 8, 0)) + frame[4:]
            case 1:
                frame += b"\0"
            case 2:
                frame = frame[:4] + (len(body) + 1 + given[2]).to_bytes(4, "little") + frame[8:]
            case 3:
                capacity = 15 + f.OK_PAYLOAD[opcode]
            case 4:
                frame = (0xF000 | given[2]).to_bytes(2, "little") + frame[2:]
        allowed = outcomes(frame, capacity, model) - {OK}
        if self.lost:
            allowed = LOST if capacity >= 16 else frozenset({NOTHING})
        calls = self.local.backend.calls if self.local else 0
        self.must(opcode, self.exchange(frame, capacity), allowed)
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
        request = self.frame(f.CREATE_CONTEXT, bytes(8))
        refused = OK not in outcomes(request, 64, model)
        answer = local.send(request, 64, memoryview(CANARIES[:64]))
        taken = local.taken()
        if answer is not None:
            if answer.used or not (refused or taken):
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
            self.bed.reset()
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
        state, counts = engine.state, model.counts()
        seen = (
            len(state.contexts), len(state.buffers), len(state.programs), len(state.queues), len(state.events),
        )  # fmt: skip
        if seen != counts:
            raise Finding(f"the device counts {seen}, the model {counts}")
        if (state.backing_bytes, state.resident_bytes) != (model.backing, model.resident):
            raise Finding(f"the device charges {state.retained}, the model {(model.backing, model.resident)}")
        if len(backend.live) != sum(counts) + len(model.loads) or engine.parked != len(model.loads):
            raise Finding(f"the backend holds {len(backend.live)} objects, the model {sum(counts) + len(model.loads)}")


def _offset(choice: int) -> int:
    """Near the beginning, or around the end of a page, or anywhere."""
    return choice % 9 if choice < 0xC0 else PAGE - 8 + choice % 9 if choice < 0xE0 else choice


def _outcome(taken: dict[str, Fault], late: Outcomes) -> Outcomes:
    """The status that a command ends with when its calls met these faults, else `late` from the backend itself."""
    for method, fault in taken.items():
        if isinstance(fault, Break) or (isinstance(fault, Doubt) and method in RELEASES):
            return LOST
        if isinstance(fault, Refuse) or (isinstance(fault, Doubt) and not late):
            return frozenset({int(fault.status)})
    return late


_Move: TypeAlias = Callable[[Steps, bytes], None]
# How often each move is made, and whether it can be against somebody else's device. Submissions, and what makes them
# possible, come often, or hardly an event would be pending when the other moves meet it.
_WEIGHTS: Final[tuple[tuple[_Move, int, bool], ...]] = (
    (Steps.create_context, 6, True), (Steps.destroy_context, 12, True), (Steps.allocate, 20, True),
    (Steps.free, 9, True), (Steps.write, 18, True), (Steps.read, 22, True), (Steps.load, 10, True),
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
