"""The object rules as plain dictionaries and sums (specification.md 4 and 7), for target `session`.

Knows what a guest may see: who owns what, what holds what, what is charged. Shares no code with the device. It says
which refusals a command must meet, and takes in what a command has done; frames and faults are the target's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from virtaccel.harness.fuzz.strict import (
    BUSY,
    OUT_OF_BOUNDS,
    PERMISSION_DENIED,
    RESOURCE_LIMIT,
    STALE_OBJECT,
)

PENDING, COMPLETE, FAILED, CANCELLED = range(4)
UNKNOWN: Final = -1
NONE: Final[frozenset[int]] = frozenset()
STALE: Final = frozenset({STALE_OBJECT})
IS_BUSY: Final = frozenset({BUSY})


class Bounds(NamedTuple):
    """Limits and budgets the device was given, as the model holds it to them. A budget of 0 is not known."""

    contexts: int
    buffers: int
    programs: int
    queues: int
    events: int
    buffer_bytes: int
    backing: int
    resident: int


@dataclass(slots=True, eq=False)
class Context:
    buffers: int = 0
    programs: int = 0
    queues: int = 0
    events: int = 0
    loads: int = 0

    @property
    def children(self) -> int:
        return self.buffers + self.programs + self.queues + self.events + self.loads


@dataclass(slots=True, eq=False)
class Buffer:
    """`data` is None where nobody can tell what it holds. `used` says that it was ever part of a submission."""

    context: int
    size: int
    usage: int
    charge: int
    data: bytearray | None
    references: int = 0
    readers: int = 0
    writers: int = 0
    used: bool = False


@dataclass(slots=True, eq=False)
class Program:
    context: int
    resident: int
    operand: int
    references: int = 0


@dataclass(slots=True, eq=False)
class Queue:
    context: int
    references: int = 0


@dataclass(slots=True, eq=False)
class Event:
    queue: Queue
    program: Program
    source: Buffer
    target: Buffer
    start: int
    size: int
    state: int = PENDING
    error: int = 0
    doubtful: bool = False


class Load(NamedTuple):
    """A LOAD_PROGRAM not answered yet; `good` says whether it will be a program."""

    request_id: int
    context: int
    resident: int
    operand: int
    good: bool
    out: memoryview


@dataclass(slots=True)
class Model:
    """Everything of one epoch. `dead` are IDs that were alive once, `ever` all IDs of all epochs."""

    bounds: Bounds
    contexts: dict[int, Context] = field(default_factory=dict)
    buffers: dict[int, Buffer] = field(default_factory=dict)
    programs: dict[int, Program] = field(default_factory=dict)
    queues: dict[int, Queue] = field(default_factory=dict)
    events: dict[int, Event] = field(default_factory=dict)
    loads: list[Load] = field(default_factory=list)
    hidden: int = 0
    backing: int = 0
    resident: int = 0
    dead: deque[int] = field(default_factory=lambda: deque([0x0BAD_0BAD_0BAD_0BAD], maxlen=24))
    ever: set[int] = field(default_factory=set)

    def counts(self) -> tuple[int, int, int, int, int]:
        """Live objects by kind; `hidden` are contexts whose ID the guest never got."""
        return (
            len(self.contexts) + self.hidden, len(self.buffers), len(self.programs), len(self.queues), len(self.events),
        )  # fmt: skip

    def forget(self) -> None:
        """A reset: everything dies."""
        for table in (self.contexts, self.buffers, self.programs, self.queues, self.events):
            self.dead.extend(table)
            table.clear()
        self.loads.clear()
        self.hidden = self.backing = self.resident = 0

    # -- what must be refused

    def refuse_context(self) -> frozenset[int]:
        return frozenset({RESOURCE_LIMIT}) if len(self.contexts) + self.hidden >= self.bounds.contexts else NONE

    def refuse_buffer(self, context: int, size: int) -> frozenset[int]:
        faults = set()
        owner = self.contexts.get(context)
        if owner is None:
            faults.add(STALE_OBJECT)
        elif owner.buffers >= self.bounds.buffers:
            faults.add(RESOURCE_LIMIT)
        if size > self.bounds.buffer_bytes or (self.bounds.backing and self.backing + size > self.bounds.backing):
            faults.add(RESOURCE_LIMIT)
        return frozenset(faults)

    def refuse_program(self, context: int, resident: int) -> frozenset[int]:
        faults = set()
        owner = self.contexts.get(context)
        if owner is None:
            faults.add(STALE_OBJECT)
        elif owner.programs + owner.loads >= self.bounds.programs:
            faults.add(RESOURCE_LIMIT)
        if self.bounds.resident and self.resident + resident > self.bounds.resident:
            faults.add(RESOURCE_LIMIT)
        return frozenset(faults)

    def refuse_queue(self, context: int) -> frozenset[int]:
        owner = self.contexts.get(context)
        if owner is None:
            return STALE
        return frozenset({RESOURCE_LIMIT}) if owner.queues >= self.bounds.queues else NONE

    def refuse_transfer(self, target: int, offset: int, size: int, usage: int) -> frozenset[int]:
        buffer = self.buffers.get(target)
        if buffer is None:
            return STALE
        faults = set()
        if not buffer.usage & usage:
            faults.add(PERMISSION_DENIED)
        if offset + size > buffer.size:
            faults.add(OUT_OF_BOUNDS)
        return frozenset(faults)

    def refuse_submit(
        self, queue: int, program: int, source: int, target: int, start: int, size: int
    ) -> frozenset[int]:
        on, what = self.queues.get(queue), self.programs.get(program)
        buffers = self.buffers.get(source), self.buffers.get(target)
        if on is None or what is None or None in buffers:
            return STALE
        faults = set()
        if what.context != on.context:
            faults.add(STALE_OBJECT)
        owner = self.contexts.get(on.context)
        if owner is not None and owner.events >= self.bounds.events:
            faults.add(RESOURCE_LIMIT)
        for buffer, usage, offset in zip(buffers, (4 | 16, 8 | 16), (0, start), strict=True):
            if buffer is None or buffer.context != on.context:
                faults.add(STALE_OBJECT)
                continue
            if not buffer.usage & usage:
                faults.add(PERMISSION_DENIED)
            if offset + size > buffer.size:
                faults.add(OUT_OF_BOUNDS)
        return frozenset(faults)

    def refuse_release(self, table: dict[int, Context] | dict[int, Buffer] | dict[int, Program] | dict[int, Queue],
                       target: int) -> frozenset[int]:  # fmt: skip
        one = table.get(target)
        if one is None:
            return STALE
        held = one.children if isinstance(one, Context) else one.references
        return IS_BUSY if held else NONE

    # -- what has happened

    def born(self, object_id: int) -> str | None:
        """Take in a new ID; what is wrong with it."""
        if object_id == 0:
            return "the device made an object with ID 0"
        if object_id in self.ever:
            return f"ID {object_id:#x} was given to a second object"
        self.ever.add(object_id)
        return None

    def add_buffer(self, object_id: int, context: int, size: int, usage: int, charge: int) -> None:
        self.contexts[context].buffers += 1
        self.backing += charge
        self.buffers[object_id] = Buffer(context, size, usage, charge, bytearray(size))

    def add_program(self, object_id: int, context: int, resident: int, operand: int) -> None:
        self.contexts[context].programs += 1
        self.resident += resident
        self.programs[object_id] = Program(context, resident, operand)

    def add_queue(self, object_id: int, context: int) -> None:
        self.contexts[context].queues += 1
        self.queues[object_id] = Queue(context)

    def add_load(self, load: Load) -> None:
        self.contexts[load.context].loads += 1
        self.resident += load.resident
        self.loads.append(load)

    def end_load(self, load: Load) -> None:
        self.loads.remove(load)
        self.contexts[load.context].loads -= 1
        self.resident -= load.resident

    def add_event(self, object_id: int, event: Event) -> None:
        self.contexts[event.queue.context].events += 1
        for one in (event.queue, event.program, event.source, event.target):
            one.references += 1
        event.source.readers += 1
        event.target.writers += 1
        event.source.used = event.target.used = True
        self.events[object_id] = event

    def end(self, event: Event, state: int, error: int = 0) -> None:
        """An event becomes terminal."""
        event.state, event.error, event.doubtful = state, error, False
        event.source.readers -= 1
        event.target.writers -= 1
        if state == COMPLETE and event.source.data is None:
            event.target.data = None
        elif state == COMPLETE and event.source.data is not None and event.target.data is not None:
            operand = event.program.operand
            result = bytes(byte ^ operand for byte in event.source.data[: event.size])
            event.target.data[event.start : event.start + event.size] = result

    def remove_context(self, object_id: int) -> None:
        del self.contexts[object_id]
        self.dead.append(object_id)

    def remove_buffer(self, object_id: int) -> None:
        buffer = self.buffers.pop(object_id)
        self.contexts[buffer.context].buffers -= 1
        self.backing -= buffer.charge
        self.dead.append(object_id)

    def remove_program(self, object_id: int) -> None:
        program = self.programs.pop(object_id)
        self.contexts[program.context].programs -= 1
        self.resident -= program.resident
        self.dead.append(object_id)

    def remove_queue(self, object_id: int) -> None:
        queue = self.queues.pop(object_id)
        self.contexts[queue.context].queues -= 1
        self.dead.append(object_id)

    def remove_event(self, object_id: int) -> None:
        event = self.events.pop(object_id)
        self.contexts[event.queue.context].events -= 1
        for one in (event.queue, event.program, event.source, event.target):
            one.references -= 1
        self.dead.append(object_id)
