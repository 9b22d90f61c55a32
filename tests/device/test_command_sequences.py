"""Random command sequences against a plain model of the object rules (specification.md 4 and 7; wire-abi.md 5).

The model is dictionaries and sums, written from the standard. After every command the status must be the model's, the
engine's counts and charges must be the model's sums, and the backend must hold exactly what is accounted for; used
lengths and untouched bytes are checked by the bench for every response.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from frames import (
    BUSY,
    CANCELLED,
    COMPLETE,
    DESTINATION,
    FAILED,
    INPUT,
    OK,
    OUT_OF_BOUNDS,
    OUTPUT,
    PENDING,
    PERMISSION_DENIED,
    READ,
    RESOURCE_LIMIT,
    SOURCE,
    STALE_OBJECT,
    WRITE,
    XOR,
    Bench,
    allocate,
    binding,
    chain,
    load,
    read_response,
    request,
    submit,
    transfer,
    u64,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from virtaccel.device.config import ResourcePolicy
from virtaccel.device.engine import Health
from virtaccel.device.reference import INFO, Script
from virtaccel.device.state import Counts, Retained
from virtaccel.device.wire import Status

PAGE = 4096
LIMITS = replace(
    INFO.limits,
    max_contexts=3,
    max_buffers_per_context=6,
    max_programs_per_context=3,
    max_queues_per_context=2,
    max_events_per_context=3,
    max_buffer_bytes=2 * PAGE,
)
BUDGET = ResourcePolicy(max_buffer_backing_bytes=14 * PAGE, max_program_resident_bytes=500)
SIZES = (1, 16, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1)
USAGES = (INPUT | OUTPUT | SOURCE | DESTINATION, INPUT | DESTINATION, OUTPUT | SOURCE)


@dataclass
class ModelBuffer:
    context: int
    data: bytearray
    usage: int


@dataclass
class ModelEvent:
    queue: int
    program: int
    source: tuple[int, int]
    target: tuple[int, int]
    size: int
    state: int = PENDING
    error: int = OK


@dataclass
class Model:
    contexts: set[int] = field(default_factory=set)
    buffers: dict[int, ModelBuffer] = field(default_factory=dict)
    programs: dict[int, tuple[int, int]] = field(default_factory=dict)  # context, resident bytes
    queues: dict[int, int] = field(default_factory=dict)
    events: dict[int, ModelEvent] = field(default_factory=dict)
    loads: list[tuple[int, int, int, Any]] = field(default_factory=list)  # request ID, context, resident, chain
    dead: list[int] = field(default_factory=lambda: [0x0BAD_0BAD_0BAD_0BAD])

    @property
    def backing(self) -> int:
        return sum(-(-len(buffer.data) // PAGE) * PAGE for buffer in self.buffers.values())

    @property
    def resident(self) -> int:
        return sum(size for _, size in self.programs.values()) + sum(size for _, _, size, _ in self.loads)

    def uses(self, object_id: int) -> bool:
        """Whether an event holds the object."""
        return any(
            object_id in (event.queue, event.program, event.source[0], event.target[0])
            for event in self.events.values()
        )

    def children(self, context: int) -> bool:
        owners = [buffer.context for buffer in self.buffers.values()]
        owners += [owner for owner, _ in self.programs.values()]
        owners += [*self.queues.values(), *(owner for _, owner, _, _ in self.loads)]
        return context in owners

    def pending_on(self, buffer: int) -> tuple[bool, bool]:
        """Whether pending submissions read, and write, the buffer."""
        pending = [event for event in self.events.values() if event.state == PENDING]
        return any(e.source[0] == buffer for e in pending), any(e.target[0] == buffer for e in pending)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.script = Script(immediate=False)
        self.bench = Bench(self.script, policy=BUDGET, info=replace(INFO, limits=LIMITS))
        self.model = Model()

    def teardown(self) -> None:
        self.bench.backend.close()

    def pick(self, data: st.DataObject, live: Any) -> int:
        """A live ID mostly; now and then a dead one or one of another kind, as always when none is live."""
        model = self.model
        live = list(live)
        if live and data.draw(st.integers(0, 9)) < 9:
            return data.draw(st.sampled_from(live))
        kinds = (model.contexts, model.buffers, model.programs, model.queues, model.events)
        return data.draw(st.sampled_from([*model.dead[-3:], *(next(iter(kind)) for kind in kinds if kind)]))

    @initialize()
    def populate(self) -> None:
        """Two contexts with everything a submission needs, so that short sequences already get somewhere."""
        model, bench = self.model, self.bench
        for _ in range(2):
            context = bench.context()
            model.contexts.add(context)
            for usage in (*USAGES, USAGES[0]):
                model.buffers[bench.buffer(context, 32, usage)] = ModelBuffer(context, bytearray(32), usage)
            model.programs[bench.program(context)] = (context, 64)
            model.queues[bench.queue(context)] = context

    def expect(self, name: str, payload: bytes, status: int, capacity: int = 64) -> bytes:
        response = self.bench.call(name, payload, capacity)
        assert response.status == status, (name, response.status, status)
        return response.payload

    def born(self, name: str, payload: bytes, status: int) -> int | None:
        made = self.expect(name, payload, status)
        return int.from_bytes(made, "little") if status == OK else None

    # Contexts

    @rule()
    def create_context(self) -> None:
        model = self.model
        made = self.born("CREATE_CONTEXT", bytes(8), OK if len(model.contexts) < 3 else RESOURCE_LIMIT)
        if made is not None:
            model.contexts.add(made)

    @precondition(lambda self: self.model.contexts)
    @rule(data=st.data())
    def destroy_context(self, data: st.DataObject) -> None:
        model = self.model
        target = self.pick(data, model.contexts)
        status = STALE_OBJECT if target not in model.contexts else BUSY if model.children(target) else OK
        self.expect("DESTROY_CONTEXT", u64(target), status)
        if status == OK:
            model.contexts.remove(target)
            model.dead.append(target)

    # Buffers

    @rule(data=st.data(), size=st.sampled_from(SIZES), usage=st.sampled_from(USAGES))
    def allocate(self, data: st.DataObject, size: int, usage: int) -> None:
        model = self.model
        context = self.pick(data, model.contexts)
        siblings = sum(buffer.context == context for buffer in model.buffers.values())
        pages = -(-size // PAGE) * PAGE
        status = OK
        if context not in model.contexts:
            status = STALE_OBJECT
        elif size > 2 * PAGE or siblings >= 6 or model.backing + pages > 14 * PAGE:
            status = RESOURCE_LIMIT
        made = self.born("ALLOCATE_BUFFER", allocate(context, size, usage=usage), status)
        if made is not None:
            model.buffers[made] = ModelBuffer(context, bytearray(size), usage)

    @precondition(lambda self: self.model.buffers)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        model = self.model
        target = self.pick(data, model.buffers)
        status = STALE_OBJECT if target not in model.buffers else BUSY if model.uses(target) else OK
        self.expect("FREE_BUFFER", u64(target), status)
        if status == OK:
            del model.buffers[target]
            model.dead.append(target)

    @rule(data=st.data(), offset=st.sampled_from([0, 1, 8, PAGE]), payload=st.binary(min_size=1, max_size=16))
    def write(self, data: st.DataObject, offset: int, payload: bytes) -> None:
        target = self.pick(data, self.model.buffers)
        status = self.transfer_status(target, offset, len(payload), DESTINATION)
        if status == OK and any(self.model.pending_on(target)):
            status = BUSY
        self.expect("WRITE_BUFFER", transfer(target, offset, len(payload)) + payload, status)
        if status == OK:
            self.model.buffers[target].data[offset : offset + len(payload)] = payload

    @rule(data=st.data(), offset=st.sampled_from([0, 1, 8, PAGE]), size=st.integers(1, 32))
    def read(self, data: st.DataObject, offset: int, size: int) -> None:
        target = self.pick(data, self.model.buffers)
        status = self.transfer_status(target, offset, size, SOURCE)
        if status == OK and self.model.pending_on(target)[1]:
            status = BUSY
        payload = self.expect("READ_BUFFER", transfer(target, offset, size), status)
        if status == OK:
            assert payload == self.model.buffers[target].data[offset : offset + size]

    def transfer_status(self, target: int, offset: int, size: int, usage: int) -> int:
        buffer = self.model.buffers.get(target)
        if buffer is None:
            return STALE_OBJECT
        if not buffer.usage & usage:
            return PERMISSION_DENIED
        return OUT_OF_BOUNDS if offset + size > len(buffer.data) else OK

    # Programs and queues

    def program_status(self, context: int, resident: int) -> int:
        model = self.model
        if context not in model.contexts:
            return STALE_OBJECT
        siblings = sum(owner == context for owner, _ in model.programs.values())
        siblings += sum(owner == context for _, owner, _, _ in model.loads)
        return RESOURCE_LIMIT if siblings >= 3 or model.resident + resident > 500 else OK

    @rule(data=st.data(), resident=st.sampled_from([1, 100, 250]))
    def load_now(self, data: st.DataObject, resident: int) -> None:
        context = self.pick(data, self.model.contexts)
        self.script.deferred_loads = False
        payload = load(context, XOR.pack(), resident_bytes=resident)
        made = self.born("LOAD_PROGRAM", payload, self.program_status(context, resident))
        if made is not None:
            self.model.programs[made] = (context, resident)

    @rule(data=st.data(), resident=st.sampled_from([1, 100, 250]))
    def load_later(self, data: st.DataObject, resident: int) -> None:
        context = self.pick(data, self.model.contexts)
        status = self.program_status(context, resident)
        self.script.deferred_loads = True
        self.bench.request_id += 1
        number = self.bench.request_id
        made = chain(request(0x0300, load(context, XOR.pack(), resident_bytes=resident), number), 64)
        used = self.bench.engine.process(made)
        if status == OK:
            assert used is None
            self.model.loads.append((number, context, resident, made))
        else:
            assert used is not None
            assert read_response(made, used, number).status == status

    @rule(count=st.integers(1, 3))
    def loads_end(self, count: int) -> None:
        self.bench.backend.finish_load(count)
        ended, self.model.loads = self.model.loads[:count], self.model.loads[count:]
        finished = self.bench.engine.finished()
        assert [back for back, _ in finished] == [made for *_, made in ended]
        for (back, used), (number, context, resident, _) in zip(finished, ended, strict=True):
            response = read_response(back, used, number)
            assert response.status == OK
            self.model.programs[int.from_bytes(response.payload, "little")] = (context, resident)

    @precondition(lambda self: self.model.programs)
    @rule(data=st.data())
    def unload(self, data: st.DataObject) -> None:
        model = self.model
        target = self.pick(data, model.programs)
        status = STALE_OBJECT if target not in model.programs else BUSY if model.uses(target) else OK
        self.expect("UNLOAD_PROGRAM", u64(target), status)
        if status == OK:
            del model.programs[target]
            model.dead.append(target)

    @rule(data=st.data())
    def create_queue(self, data: st.DataObject) -> None:
        model = self.model
        context = self.pick(data, model.contexts)
        siblings = sum(owner == context for owner in model.queues.values())
        status = STALE_OBJECT if context not in model.contexts else RESOURCE_LIMIT if siblings >= 2 else OK
        made = self.born("CREATE_QUEUE", u64(context) + u64(0), status)
        if made is not None:
            model.queues[made] = context

    @precondition(lambda self: self.model.queues)
    @rule(data=st.data())
    def destroy_queue(self, data: st.DataObject) -> None:
        model = self.model
        target = self.pick(data, model.queues)
        status = STALE_OBJECT if target not in model.queues else BUSY if model.uses(target) else OK
        self.expect("DESTROY_QUEUE", u64(target), status)
        if status == OK:
            del model.queues[target]
            model.dead.append(target)

    # Submissions

    @rule(data=st.data(), offset=st.sampled_from([0, 4]), size=st.sampled_from([1, 8, 17]))
    def submit(self, data: st.DataObject, offset: int, size: int) -> None:
        model = self.model
        queue = self.pick(data, model.queues)
        context = model.queues.get(queue)
        program = self.pick(data, [key for key, (owner, _) in model.programs.items() if owner == context])
        buffers = [key for key, buffer in model.buffers.items() if buffer.context == context]
        source, target = self.pick(data, buffers), self.pick(data, buffers)
        status = self.submit_status(queue, program, source, target, offset, size)
        self.submit_these(queue, program, source, target, offset, size, status)

    @precondition(lambda self: self.model.queues)
    @rule(data=st.data(), size=st.integers(1, 16))
    def submit_what_fits(self, data: st.DataObject, size: int) -> None:
        """Buffers of the right usage, so that mostly only quotas and pending submissions can be in the way."""
        model = self.model
        queue = data.draw(st.sampled_from(list(model.queues)))
        context = model.queues[queue]
        program = next((key for key, (owner, _) in model.programs.items() if owner == context), model.dead[0])
        mine = {key: buffer for key, buffer in model.buffers.items() if buffer.context == context}
        sources = [key for key, buffer in mine.items() if buffer.usage & INPUT and not any(model.pending_on(key))]
        source = self.pick(data, sources)
        targets = [key for key, buffer in mine.items() if buffer.usage & OUTPUT and key != source]
        target = self.pick(data, targets)
        status = self.submit_status(queue, program, source, target, 0, size)
        self.submit_these(queue, program, source, target, 0, size, status)

    def submit_these(
        self, queue: int, program: int, source: int, target: int, offset: int, size: int, status: int
    ) -> None:
        payload = submit(queue, program, binding(source, 0, READ, 0, size), binding(target, 1, WRITE, offset, size))
        made = self.born("SUBMIT", payload, status)
        if made is not None:
            self.model.events[made] = ModelEvent(queue, program, (source, 0), (target, offset), size)

    def submit_status(self, queue: int, program: int, source: int, target: int, offset: int, size: int) -> int:
        model = self.model
        context = model.queues.get(queue)
        owners = [
            model.programs.get(program, (None,))[0],
            *(model.buffers[one].context if one in model.buffers else None for one in (source, target)),
        ]
        if context is None or any(owner != context for owner in owners):
            return STALE_OBJECT
        if sum(model.queues[event.queue] == context for event in model.events.values()) >= 3:
            return RESOURCE_LIMIT
        for buffer, usage, start in ((source, INPUT, 0), (target, OUTPUT, offset)):
            if not model.buffers[buffer].usage & usage:
                return PERMISSION_DENIED
            if start + size > len(model.buffers[buffer].data):
                return OUT_OF_BOUNDS
        reading, writing = model.pending_on(target)
        busy = model.pending_on(source)[1] or reading or writing or source == target
        return BUSY if busy else OK

    @rule(fails=st.booleans())
    def oldest_ends(self, fails: bool) -> None:
        """Submissions end in the order of their admission, successfully or not."""
        pending = [event for event in self.model.events.values() if event.state == PENDING]
        self.bench.backend.complete(1, Status.DEADLINE_EXPIRED if fails else Status.OK)
        if not pending:
            return
        event = pending[0]
        event.state, event.error = (FAILED, int(Status.DEADLINE_EXPIRED)) if fails else (COMPLETE, OK)
        if not fails:
            source = self.model.buffers[event.source[0]].data[: event.size]
            start = event.target[1]
            result = bytes(byte ^ 0x5A for byte in source)
            self.model.buffers[event.target[0]].data[start : start + event.size] = result

    @precondition(lambda self: self.model.events)
    @rule(data=st.data())
    def poll(self, data: st.DataObject) -> None:
        target = self.pick(data, self.model.events)
        event = self.model.events.get(target)
        if event is None:
            self.expect("POLL_EVENT", u64(target), STALE_OBJECT)
        else:
            assert self.bench.poll(target) == (event.state, event.error)

    @precondition(lambda self: self.model.events)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        target = self.pick(data, self.model.events)
        event = self.model.events.get(target)
        status = STALE_OBJECT if event is None else OK if event.state == PENDING else BUSY
        self.expect("CANCEL_EVENT", u64(target), status)
        if event is not None and status == OK:
            event.state = CANCELLED

    @precondition(lambda self: self.model.events)
    @rule(data=st.data())
    def destroy_event(self, data: st.DataObject) -> None:
        target = self.pick(data, self.model.events)
        event = self.model.events.get(target)
        status = STALE_OBJECT if event is None else BUSY if event.state == PENDING else OK
        self.expect("DESTROY_EVENT", u64(target), status)
        if status == OK:
            del self.model.events[target]
            self.model.dead.append(target)

    @rule(really=st.integers(0, 9))
    def reset(self, really: int) -> None:
        """Seldom, or nothing ever grows."""
        if really:
            return
        model = self.model
        report = self.bench.engine.reset()
        assert report.released == self.counts()
        assert report.released_bytes == Retained(model.backing, model.resident)
        assert report.abandoned_loads == len(model.loads)
        assert not report.discard
        ids = [*model.contexts, *model.buffers, *model.programs, *model.queues, *model.events]
        self.model = Model(dead=(model.dead + ids)[-20:])

    def counts(self) -> Counts:
        model = self.model
        tables = (model.contexts, model.buffers, model.programs, model.queues, model.events)
        return Counts(*(len(table) for table in tables))

    @invariant()
    def nothing_is_lost(self) -> None:
        state = self.bench.engine.state
        assert self.bench.engine.health is Health.RUNNING
        assert state.counts == self.counts()
        assert state.retained == Retained(self.model.backing, self.model.resident)
        assert self.bench.backend.live == sum(self.counts()) + len(self.model.loads)
        assert self.bench.engine.parked == len(self.model.loads)


Machine.TestCase.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
TestCommandSequences = Machine.TestCase
