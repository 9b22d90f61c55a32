"""Who owns what: contexts and their children, references of submissions, quotas and budgets (specification.md 4, 7).

Knows the object model and its arithmetic. Decides nothing about order of checks, never answers a guest, and calls no
backend: a handler asks here whether there is room, calls the backend, then enters or removes what came of it. Charges
begin when an object is entered and end when it is removed (4.12).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

from virtaccel.device.backend import Backend, Binding, DeviceInfo, Handle
from virtaccel.device.config import ResourcePolicy
from virtaccel.device.errors import CommandError
from virtaccel.device.objects import Kind, Table
from virtaccel.device.wire import Status

Record = TypeVar("Record")


@dataclass(slots=True, eq=False)
class Context:
    """Parent of everything else. Counts are of live children; `loads` are programs still being loaded."""

    handle: Handle
    buffers: int = 0
    programs: int = 0
    queues: int = 0
    events: int = 0
    loads: int = 0

    @property
    def has_children(self) -> bool:
        return bool(self.buffers or self.programs or self.queues or self.events or self.loads)


@dataclass(slots=True, eq=False)
class Buffer:
    """`bytes` as asked for, `allocation_bytes` as charged; `references` counts bindings of undestroyed events."""

    context: Context
    handle: Handle
    bytes: int
    usage: int
    allocation_bytes: int
    references: int = 0


@dataclass(slots=True, eq=False)
class Program:
    """`resident_bytes` is the charge that the guest authorised."""

    context: Context
    handle: Handle
    resident_bytes: int
    references: int = 0


@dataclass(slots=True, eq=False)
class Queue:
    """An execution queue, not a virtqueue."""

    context: Context
    handle: Handle
    references: int = 0


@dataclass(slots=True, eq=False)
class Event:
    """Owner of one submission's queue, program and buffers until destroyed. `terminal` is the POLL_EVENT payload of the
    terminal state once one was seen: from then on nothing can change it."""

    queue: Queue
    program: Program
    buffers: tuple[Buffer, ...]
    handle: Handle
    terminal: bytes | None = None


@dataclass(slots=True, eq=False)
class Load:
    """A program being loaded: no ID yet, but its quota and charge are taken."""

    context: Context
    ticket: Handle
    resident_bytes: int


class Submission(NamedTuple):
    """What the bytes of a SUBMIT mean while everything they name lives: usages and ranges are known to fit."""

    queue: Queue
    program: Program
    buffers: tuple[Buffer, ...]
    bindings: tuple[Binding, ...]


MOST_SUBMISSIONS: Final = 64
"""Submissions remembered; a driver that uses more of them in turn pays for resolving them."""
_REMEMBERED_BINDINGS: Final = 64


class Counts(NamedTuple):
    """Objects by kind."""

    contexts: int = 0
    buffers: int = 0
    programs: int = 0
    queues: int = 0
    events: int = 0

    def plus(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))


class Retained(NamedTuple):
    """Bytes charged against the two aggregate budgets."""

    buffer_backing: int = 0
    program_resident: int = 0

    def plus(self, other: Retained) -> Retained:
        return Retained(self.buffer_backing + other.buffer_backing, self.program_resident + other.program_resident)


@dataclass(slots=True)
class Quarantine:
    """What may or may not still exist at the backend and has no ID any more."""

    counts: Counts = field(default_factory=Counts)
    retained: Retained = field(default_factory=Retained)


class State:
    """Everything one guest owns in one reset epoch. `info` is what was advertised; its limits are the quotas."""

    __slots__ = (
        "backend",
        "backing_bytes",
        "buffers",
        "contexts",
        "events",
        "info",
        "limits",
        "loads",
        "policy",
        "programs",
        "quarantine",
        "queues",
        "resident_bytes",
        "submissions",
    )

    def __init__(self, backend: Backend, info: DeviceInfo, policy: ResourcePolicy, namespace: int) -> None:
        self.backend = backend
        self.info = info
        self.limits = info.limits
        self.policy = policy
        self.contexts: Table[Context] = Table(Kind.CONTEXT, namespace)
        self.buffers: Table[Buffer] = Table(Kind.BUFFER, namespace)
        self.programs: Table[Program] = Table(Kind.PROGRAM, namespace)
        self.queues: Table[Queue] = Table(Kind.QUEUE, namespace)
        self.events: Table[Event] = Table(Kind.EVENT, namespace)
        self.loads: set[Load] = set()
        self.submissions: dict[bytes, Submission] = {}
        self.backing_bytes = 0
        self.resident_bytes = 0
        self.quarantine = Quarantine()

    # Resolving: an ID of another epoch, kind or generation finds nothing.

    def context(self, object_id: int) -> Context:
        return _live(self.contexts.get(object_id))

    def buffer(self, object_id: int) -> Buffer:
        return _live(self.buffers.get(object_id))

    def program(self, object_id: int) -> Program:
        return _live(self.programs.get(object_id))

    def queue(self, object_id: int) -> Queue:
        return _live(self.queues.get(object_id))

    def event(self, object_id: int) -> Event:
        return _live(self.events.get(object_id))

    # Room: raise RESOURCE_LIMIT before anything is asked of the backend.

    def room_for_context(self) -> None:
        _limit(len(self.contexts) < self.limits.max_contexts and self.contexts.room > 0, "contexts")

    def room_for_buffer(self, context: Context, size: int) -> None:
        _limit(size <= self.limits.max_buffer_bytes, "buffer bytes")
        _limit(context.buffers < self.limits.max_buffers_per_context and self.buffers.room > 0, "buffers")
        # The actual allocation is known only afterwards, but is never smaller than what was asked for.
        _limit(self.backing_bytes + size <= self.policy.max_buffer_backing_bytes, "buffer backing bytes")

    def room_for_program(self, context: Context, artifact_bytes: int, resident_bytes: int) -> None:
        _limit(artifact_bytes <= self.limits.max_artifact_bytes, "artifact bytes")
        programs = context.programs + context.loads
        _limit(programs < self.limits.max_programs_per_context and self.programs.room > len(self.loads), "programs")
        promised = self.resident_bytes + resident_bytes
        _limit(promised <= self.policy.max_program_resident_bytes, "program resident bytes")

    def room_for_queue(self, context: Context) -> None:
        _limit(context.queues < self.limits.max_queues_per_context and self.queues.room > 0, "queues")

    def room_for_event(self, context: Context) -> None:
        _limit(context.events < self.limits.max_events_per_context and self.events.room > 0, "events")

    def remember(self, payload: bytes, ready: Submission) -> None:
        """Keep what a SUBMIT was resolved to until any buffer, program or queue dies."""
        if len(ready.bindings) <= _REMEMBERED_BINDINGS:
            if len(self.submissions) >= MOST_SUBMISSIONS:
                self.submissions.clear()
            self.submissions[payload] = ready

    # Entering

    def enter_context(self, context: Context) -> int:
        return self.contexts.insert(context)

    def enter_buffer(self, buffer: Buffer) -> int:
        self.backing_bytes += buffer.allocation_bytes
        buffer.context.buffers += 1
        return self.buffers.insert(buffer)

    def enter_program(self, program: Program) -> int:
        self.resident_bytes += program.resident_bytes
        program.context.programs += 1
        return self.programs.insert(program)

    def enter_queue(self, queue: Queue) -> int:
        queue.context.queues += 1
        return self.queues.insert(queue)

    def enter_event(self, event: Event) -> int:
        event.queue.references += 1
        event.program.references += 1
        for buffer in event.buffers:
            buffer.references += 1
        event.queue.context.events += 1
        return self.events.insert(event)

    def enter_load(self, load: Load) -> None:
        self.resident_bytes += load.resident_bytes
        load.context.loads += 1
        self.loads.add(load)

    # Removing: the object is gone and so are its charge and its references.

    def remove_context(self, object_id: int) -> None:
        self.contexts.remove(object_id)

    def remove_buffer(self, object_id: int) -> None:
        self.submissions.clear()
        buffer = self.buffers.remove(object_id)
        buffer.context.buffers -= 1
        self.backing_bytes -= buffer.allocation_bytes

    def remove_program(self, object_id: int) -> None:
        self.submissions.clear()
        program = self.programs.remove(object_id)
        program.context.programs -= 1
        self.resident_bytes -= program.resident_bytes

    def remove_queue(self, object_id: int) -> None:
        self.submissions.clear()
        queue = self.queues.remove(object_id)
        queue.context.queues -= 1

    def remove_event(self, object_id: int) -> None:
        event = self.events.remove(object_id)
        event.queue.references -= 1
        event.program.references -= 1
        for buffer in event.buffers:
            buffer.references -= 1
        event.queue.context.events -= 1

    def remove_load(self, load: Load) -> None:
        self.loads.remove(load)
        load.context.loads -= 1
        self.resident_bytes -= load.resident_bytes

    # Quarantine: the ID dies, everything it holds stays held, since nobody knows whether the object is gone.

    def quarantine_context(self, object_id: int) -> None:
        self.contexts.remove(object_id)
        self._quarantine(Counts(contexts=1))

    def quarantine_buffer(self, object_id: int) -> None:
        self.submissions.clear()
        buffer = self.buffers.remove(object_id)
        self._quarantine(Counts(buffers=1), Retained(buffer_backing=buffer.allocation_bytes))

    def quarantine_allocation(self, allocation_bytes: int) -> None:
        """An allocation that never got an ID and could not be given back: charged, and lost."""
        self.backing_bytes += allocation_bytes
        self._quarantine(Counts(buffers=1), Retained(buffer_backing=allocation_bytes))

    def quarantine_program(self, object_id: int) -> None:
        self.submissions.clear()
        program = self.programs.remove(object_id)
        self._quarantine(Counts(programs=1), Retained(program_resident=program.resident_bytes))

    def quarantine_queue(self, object_id: int) -> None:
        self.submissions.clear()
        self.queues.remove(object_id)
        self._quarantine(Counts(queues=1))

    def quarantine_event(self, object_id: int) -> None:
        self.events.remove(object_id)
        self._quarantine(Counts(events=1))

    def quarantine_everything(self) -> None:
        """Nothing may be asked of the backend any more: whatever is left counts as lost, and every ID dies."""
        lost = Counts(*(len(table) for table in self._tables))
        live = sum(buffer.allocation_bytes for buffer in self.buffers.live.values())
        resident = sum(program.resident_bytes for program in self.programs.live.values())
        resident += sum(load.resident_bytes for load in self.loads)
        self._quarantine(lost, Retained(live, resident))
        self.submissions.clear()
        for table in self._tables:
            table.live.clear()
        self.loads.clear()

    @property
    def counts(self) -> Counts:
        """Live objects."""
        return Counts(*(len(table) for table in self._tables))

    @property
    def retained(self) -> Retained:
        """Bytes charged, live and quarantined."""
        return Retained(self.backing_bytes, self.resident_bytes)

    @property
    def _tables(self) -> tuple[Table[Context], Table[Buffer], Table[Program], Table[Queue], Table[Event]]:
        return (self.contexts, self.buffers, self.programs, self.queues, self.events)

    def _quarantine(self, counts: Counts, retained: Retained | None = None) -> None:
        self.quarantine.counts = self.quarantine.counts.plus(counts)
        if retained is not None:
            self.quarantine.retained = self.quarantine.retained.plus(retained)


def _live(record: Record | None) -> Record:
    if record is None:
        raise CommandError(Status.STALE_OBJECT)
    return record


def _limit(fits: bool, what: str) -> None:
    if not fits:
        raise CommandError(Status.RESOURCE_LIMIT, f"limit of {what} reached")
