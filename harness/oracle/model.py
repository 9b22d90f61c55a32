"""The object rules (specification.md 4 and 7): what is alive, what holds what, what is charged, what a buffer holds.

Only dictionaries: counts, references and charges are summed anew whenever they are asked for, so that nothing here can
go out of step the way a device's counters can. Shares no code with the device. `verdicts` says what must be refused.
Standard library only: this also runs inside a guest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from virtaccel.harness.oracle import frames as f
from virtaccel.harness.oracle.frames import CANCELLED, COMPLETE, FAILED, PENDING, Answer, BadAnswer, Info

UNKNOWN: Final = -1
"""State of an event that may have ended since it was last polled."""
NEVER_ALIVE: Final = 0x0BAD_0BAD_0BAD_0BAD


class Limits(NamedTuple):
    """What a device advertises and was given. A budget of 0 is not known."""

    max_request: int
    max_response: int
    info: Info
    backing: int = 0
    resident: int = 0


@dataclass(slots=True, eq=False)
class Context:
    """Owns all others; `context` is the one an object belongs to, here none."""

    context: int = 0


@dataclass(slots=True, eq=False)
class Buffer:
    """`data` is None where nobody can tell what it holds; `used` says that it was ever part of a submission."""

    context: int
    bytes: int
    usage: int
    charge: int
    data: bytearray | None
    used: bool = False


@dataclass(slots=True, eq=False)
class Program:
    """`operand` is XORed into every byte; None where the program computes nobody knows what."""

    context: int
    resident: int
    operand: int | None = None


@dataclass(slots=True, eq=False)
class Queue:
    context: int


class Use(NamedTuple):
    """One binding of a submission."""

    buffer: int
    offset: int
    bytes: int
    access: int


@dataclass(slots=True, eq=False)
class Event:
    """A submission until its event is destroyed. `doubtful`: the device could not say whether it runs."""

    context: int
    queue: int
    program: int
    uses: tuple[Use, ...]
    state: int
    error: int = 0
    doubtful: bool = False

    @property
    def holds(self) -> set[int]:
        return {self.queue, self.program, *(use.buffer for use in self.uses)}

    @property
    def ended(self) -> bool:
        return self.state not in (PENDING, UNKNOWN)


@dataclass(slots=True, eq=False)
class Load:
    """A LOAD_PROGRAM not answered yet: quota and charge are taken, there is no ID."""

    request: bytes
    context: int
    resident: int


Object: TypeAlias = Context | Buffer | Program | Queue | Event
Table: TypeAlias = Mapping[int, Object]


@dataclass(slots=True)
class Model:
    """Everything of one epoch. `fresh` is the state of a new event: UNKNOWN where work ends by itself."""

    limits: Limits
    fresh: int = UNKNOWN
    contexts: dict[int, Context] = field(default_factory=dict)
    buffers: dict[int, Buffer] = field(default_factory=dict)
    programs: dict[int, Program] = field(default_factory=dict)
    queues: dict[int, Queue] = field(default_factory=dict)
    events: dict[int, Event] = field(default_factory=dict)
    loads: list[Load] = field(default_factory=list)
    hidden: int = 0  # contexts whose ID the guest never got
    dead: deque[int] = field(default_factory=lambda: deque([NEVER_ALIVE], maxlen=24))
    ever: set[int] = field(default_factory=set)  # of all epochs: an ID is never given twice

    @property
    def tables(self) -> tuple[Table, ...]:
        return self.contexts, self.buffers, self.programs, self.queues, self.events

    def counts(self) -> tuple[int, ...]:
        """Live objects by kind."""
        return len(self.contexts) + self.hidden, *(len(table) for table in self.tables[1:])

    @property
    def backing(self) -> int:
        return sum(buffer.charge for buffer in self.buffers.values())

    @property
    def resident(self) -> int:
        return sum(one.resident for one in self.programs.values()) + sum(load.resident for load in self.loads)

    def children(self, context: int, table: Table) -> int:
        return sum(one.context == context for one in table.values())

    def loading(self, context: int) -> int:
        return sum(load.context == context for load in self.loads)

    def is_held(self, target: int) -> bool:
        """Whether a release must be refused: by children, by an event, or because an event is pending itself."""
        if target in self.contexts:
            return self.loading(target) > 0 or any(self.children(target, table) for table in self.tables[1:])
        if target in self.events:
            return self.events[target].state == PENDING
        return any(target in event.holds for event in self.events.values())

    def is_in_use(self, target: int, writing: bool) -> bool:
        """Whether pending work writes the buffer, or reads what would be written."""
        wanted = 3 if writing else 2
        pending = (event for event in self.events.values() if not event.ended)
        return any(use.buffer == target and use.access & wanted for event in pending for use in event.uses)

    def forget(self) -> None:
        """A reset: everything dies."""
        for table in (self.contexts, self.buffers, self.programs, self.queues, self.events):
            self.dead.extend(table)
            table.clear()
        self.loads.clear()
        self.hidden = 0

    # What has happened

    def apply(self, request: bytes, answer: Answer) -> Object | None:
        """Take in what a command did; the object it made. Raises BadAnswer where the answer cannot be true."""
        opcode, body = f.field(request, 0, 2), request[f.HEADER.size :]
        happened = answer.status == f.OK or (opcode == f.SUBMIT and bool(answer.payload))
        if not happened or opcode == f.INFO:
            return None
        act = _EFFECTS.get(opcode)
        if act is not None:
            act(self, body, answer)
            return None
        return self._born(answer.id, _MAKERS[opcode](self, body), opcode)

    def _born(self, object_id: int, made: Object, opcode: int) -> Object:
        if not object_id:
            raise BadAnswer("the device made an object with ID 0")
        if object_id in self.ever:
            raise BadAnswer(f"ID {object_id:#x} was given to a second object")
        self.ever.add(object_id)
        tables = {f.CREATE_CONTEXT: self.contexts, f.ALLOCATE: self.buffers, f.LOAD: self.programs,
                  f.CREATE_QUEUE: self.queues, f.SUBMIT: self.events}  # fmt: skip
        table: dict[int, Object] = tables[opcode]  # type: ignore[assignment]
        table[object_id] = made
        return made

    def _submitted(self, body: bytes) -> Event:
        uses = tuple(
            Use(f.field(body, at), f.field(body, at + 8), f.field(body, at + 16), body[at + 28])
            for at in range(32, len(body), 32)
        )
        for use in uses:
            buffer = self.buffers[use.buffer]
            buffer.used = True
            if use.access & 2 and self.fresh == UNKNOWN:
                buffer.data = None  # from now on at any time
        queue = f.field(body, 0)
        return Event(self.queues[queue].context, queue, f.field(body, 8), uses, self.fresh)

    def _write(self, body: bytes, answer: Answer) -> None:
        data, offset = self.buffers[f.field(body, 0)].data, f.field(body, 8)
        if data is not None:
            data[offset : offset + len(body) - 24] = body[24:]

    def _read(self, body: bytes, answer: Answer) -> None:
        data, offset = self.buffers[f.field(body, 0)].data, f.field(body, 8)
        if data is not None and answer.payload != data[offset : offset + len(answer.payload)]:
            raise BadAnswer("a buffer does not hold what was written and computed")

    def _poll(self, body: bytes, answer: Answer) -> None:
        event, seen = self.events[f.field(body, 0)], f.event_state(answer.payload)
        if event.state == UNKNOWN:
            if seen[0] != PENDING:
                self.end(event, *seen)
        elif seen != (event.state, event.error):
            raise BadAnswer(f"an event is in state, error {seen}, should be {event.state}, {event.error}")

    def _cancel(self, body: bytes, answer: Answer) -> None:
        event = self.events[f.field(body, 0)]
        if event.ended:
            raise BadAnswer("a terminal event was cancelled")
        self.end(event, CANCELLED)

    def _release(self, body: bytes, answer: Answer) -> None:
        target = f.field(body, 0)
        if self.is_held(target):
            raise BadAnswer("what is held was released")
        table = next(table for table in self.tables if target in table)
        event = self.events.get(target)
        if event is not None and not event.ended:
            self.end(event, FAILED)
        del table[target]  # type: ignore[attr-defined]
        self.dead.append(target)

    def end(self, event: Event, state: int, error: int = 0) -> None:
        """An event becomes terminal."""
        event.state, event.error, event.doubtful = state, error, False
        if state != COMPLETE:
            return
        operand = self.programs[event.program].operand
        for target in (use for use in event.uses if use.access & 2):
            held = self.buffers[target.buffer]
            source = self.buffers[event.uses[0].buffer].data
            if operand is None or source is None:
                held.data = None
            elif held.data is not None:
                first = event.uses[0].offset
                result = bytes(byte ^ operand for byte in source[first : first + target.bytes])
                held.data[target.offset : target.offset + target.bytes] = result


_MAKERS: Final[dict[int, Callable[[Model, bytes], Object]]] = {
    f.CREATE_CONTEXT: lambda model, body: Context(),
    f.ALLOCATE: lambda model, body: Buffer(
        f.field(body, 0), f.field(body, 8), f.field(body, 32, 4), f.field(body, 8), bytearray(f.field(body, 8))
    ),
    f.LOAD: lambda model, body: Program(f.field(body, 0), f.field(body, 72)),
    f.CREATE_QUEUE: lambda model, body: Queue(f.field(body, 0)),
    f.SUBMIT: Model._submitted,
}
_EFFECTS: Final[dict[int, Callable[[Model, bytes, Answer], None]]] = {
    f.WRITE: Model._write, f.READ: Model._read, f.POLL: Model._poll, f.CANCEL: Model._cancel,
    **dict.fromkeys((f.DESTROY_CONTEXT, f.FREE, f.UNLOAD, f.DESTROY_QUEUE, f.DESTROY_EVENT), Model._release),
}  # fmt: skip
