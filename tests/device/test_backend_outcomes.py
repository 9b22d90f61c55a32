"""Every outcome the backend contract allows, and some it does not, seen from the guest (specification.md 4.8 to 9)."""

from __future__ import annotations

from typing import Any

import pytest
from frames import (
    BUSY,
    COMPLETE,
    DEADLINE_EXPIRED,
    DEVICE_LOST,
    FAILED,
    INCOMPATIBLE,
    INTERNAL_ERROR,
    INVALID_ARGUMENT,
    OK,
    PENDING,
    RESOURCE_LIMIT,
    XOR,
    Bench,
    World,
    allocate,
    chain,
    load,
    read_response,
    request,
    transfer,
    u64,
    world,
)

from virtaccel.device.backend import AllocatedBuffer
from virtaccel.device.config import ResourcePolicy
from virtaccel.device.engine import Health
from virtaccel.device.reference import Break, Doubt, Inflate, Reference, Refuse, Script
from virtaccel.device.state import Counts, Retained
from virtaccel.device.wire import Status

PAGE = 4096


def accounts(bench: Bench) -> tuple[Any, ...]:
    state = bench.engine.state
    return state.counts, state.retained, bench.backend.live


def calls_of(bench: Bench, here: World) -> dict[str, tuple[str, bytes]]:
    """Backend method -> the command that leads to it and its payload, with one event already submitted and done."""
    event = bench.made("SUBMIT", here.submission())
    bench.backend.complete()
    context = bench.context()
    spare = bench.buffer(here.context)
    program = bench.program(here.context)
    queue = bench.queue(here.context)
    return {
        "create_context": ("CREATE_CONTEXT", bytes(8)),
        "destroy_context": ("DESTROY_CONTEXT", u64(context)),
        "allocate_buffer": ("ALLOCATE_BUFFER", allocate(here.context)),
        "free_buffer": ("FREE_BUFFER", u64(spare)),
        "write_buffer": ("WRITE_BUFFER", transfer(spare) + bytes(8)),
        "read_buffer": ("READ_BUFFER", transfer(spare)),
        "load_program": ("LOAD_PROGRAM", load(here.context, XOR.pack())),
        "unload_program": ("UNLOAD_PROGRAM", u64(program)),
        "create_queue": ("CREATE_QUEUE", u64(here.context) + u64(0)),
        "destroy_queue": ("DESTROY_QUEUE", u64(queue)),
        "submit": ("SUBMIT", here.submission()),
        "poll_event": ("POLL_EVENT", u64(event)),
        "destroy_event": ("DESTROY_EVENT", u64(event)),
    }


METHODS = (
    "create_context", "destroy_context", "allocate_buffer", "free_buffer", "write_buffer", "read_buffer",
    "load_program", "unload_program", "create_queue", "destroy_queue", "submit", "poll_event", "destroy_event",
)  # fmt: skip
RELEASES = ("destroy_context", "free_buffer", "unload_program", "destroy_queue", "destroy_event")
REFUSALS = (Status.BUSY, Status.OUT_OF_MEMORY, Status.INCOMPATIBLE, Status.INTERNAL_ERROR, Status.UNSUPPORTED)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("status", REFUSALS)
def test_a_refusal_reaches_the_guest_and_keeps_nothing(method: str, status: Status) -> None:
    bench = Bench(Script(immediate=False))
    name, payload = calls_of(bench, world(bench))[method]
    before = accounts(bench)
    bench.script.next(method, Refuse(status))
    assert bench.call(name, payload)[:2] == (16, int(status))
    assert accounts(bench) == before
    assert bench.engine.health is Health.RUNNING
    assert bench.status(name, payload) == OK, "and the same request works the next time: a rejected release lives on"


@pytest.mark.parametrize("method", METHODS)
def test_device_loss_in_any_call_ends_service(method: str) -> None:
    bench = Bench(Script(immediate=False))
    name, payload = calls_of(bench, world(bench))[method]
    bench.script.lost = True
    assert bench.call(name, payload)[:2] == (16, DEVICE_LOST)
    assert bench.engine.health is Health.DISCARD_REQUIRED
    calls = len(bench.script.calls)
    for again in ("GET_DEVICE_INFO", name):
        assert bench.call(again, payload if again == name else b"")[:2] == (16, DEVICE_LOST)
    report = bench.engine.reset()
    assert report.discard
    assert len(bench.script.calls) == calls, "a lost backend is not called again"
    assert not any(report.released)
    assert report.quarantined.contexts == 2
    assert report.quarantined_bytes.buffer_backing == 3 * PAGE


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_outside_the_contract_ends_service_not_the_process(method: str) -> None:
    bench = Bench(Script(immediate=False))
    name, payload = calls_of(bench, world(bench))[method]
    bench.script.next(method, Break(RuntimeError("a bug in a backend")))
    assert bench.call(name, payload)[:2] == (16, DEVICE_LOST)
    assert bench.engine.health is Health.DISCARD_REQUIRED


@pytest.mark.parametrize("method", RELEASES)
def test_indeterminate_release_kills_the_id_and_quarantines_the_charge(method: str) -> None:
    bench = Bench(Script(immediate=False))
    name, payload = calls_of(bench, world(bench))[method]
    before = bench.engine.state.counts
    retained = bench.engine.state.retained
    bench.script.next(method, Doubt(Status.INTERNAL_ERROR))
    assert bench.call(name, payload)[:2] == (16, DEVICE_LOST)
    assert sum(bench.engine.state.counts) == sum(before) - 1
    assert bench.engine.state.retained == retained, "nobody knows whether the memory is free"
    report = bench.engine.reset()
    assert report.quarantined == before
    assert report.quarantined_bytes == retained
    assert not any(report.released)


# Submissions


def test_indeterminate_submission_hands_over_an_event_with_its_failure() -> None:
    bench = Bench(Script(immediate=False))
    here = world(bench)
    bench.script.next("submit", Doubt(Status.INTERNAL_ERROR))
    response = bench.call("SUBMIT", here.submission())
    assert (response.used, response.status) == (24, INTERNAL_ERROR)
    event = int.from_bytes(response.payload, "little")
    assert bench.engine.health is Health.RUNNING
    assert bench.poll(event) == (PENDING, OK)
    for name, object_id in (("FREE_BUFFER", here.source), ("DESTROY_QUEUE", here.queue)):
        assert bench.status(name, u64(object_id)) == BUSY
    bench.backend.complete()
    assert bench.poll(event) == (COMPLETE, OK)
    bench.ok("DESTROY_EVENT", u64(event))
    bench.ok("FREE_BUFFER", u64(here.source))


def test_indeterminate_submission_on_a_lost_device() -> None:
    bench = Bench(Script(immediate=False))
    here = world(bench)
    bench.script.next("submit", Doubt(Status.DEVICE_LOST))
    response = bench.call("SUBMIT", here.submission())
    assert (response.used, response.status) == (24, DEVICE_LOST)
    assert bench.engine.health is Health.DISCARD_REQUIRED


def test_late_failure_is_reported_by_poll_and_never_changes() -> None:
    bench = Bench(Script(immediate=False))
    event = bench.made("SUBMIT", world(bench).submission())
    bench.backend.complete(error=Status.DEADLINE_EXPIRED)
    for _ in range(3):
        assert bench.poll(event) == (FAILED, DEADLINE_EXPIRED)
    polls = list(bench.script.calls).count("poll_event")
    bench.poll(event)
    assert list(bench.script.calls).count("poll_event") == polls, "a terminal state is kept by the engine"




# Allocations


def test_budget_counts_what_was_really_allocated() -> None:
    bench = Bench(policy=ResourcePolicy(max_buffer_backing_bytes=3 * PAGE))
    context = bench.context()
    bench.buffer(context, 1)
    assert bench.engine.state.retained == Retained(PAGE, 0)
    buffer = bench.buffer(context, PAGE + 1)
    assert bench.engine.state.retained == Retained(3 * PAGE, 0)
    before = accounts(bench)
    calls = list(bench.script.calls)
    assert bench.status("ALLOCATE_BUFFER", allocate(context, 1)) == RESOURCE_LIMIT
    assert list(bench.script.calls) == calls, "known to be too much before anything is allocated"
    assert accounts(bench) == before
    bench.ok("FREE_BUFFER", u64(buffer))
    assert bench.engine.state.retained == Retained(PAGE, 0)


def test_allocation_that_reports_more_than_the_budget_is_given_back() -> None:
    bench = Bench(policy=ResourcePolicy(max_buffer_backing_bytes=2 * PAGE))
    context = bench.context()
    before = accounts(bench)
    bench.script.next("allocate_buffer", Inflate(2 * PAGE))
    assert bench.status("ALLOCATE_BUFFER", allocate(context, 1)) == RESOURCE_LIMIT
    assert accounts(bench) == before
    assert bench.script.calls[-1] == "free_buffer"
    assert bench.engine.health is Health.RUNNING
    bench.buffer(context, 1)


@pytest.mark.parametrize(
    "fault", [Refuse(Status.BUSY), Doubt(Status.BUSY), Break(RuntimeError("bug"))], ids=["rejected", "doubt", "bug"]
)
def test_over_budget_allocation_that_cannot_be_given_back_loses_the_device(fault: Any) -> None:
    bench = Bench(policy=ResourcePolicy(max_buffer_backing_bytes=2 * PAGE))
    context = bench.context()
    bench.script.next("allocate_buffer", Inflate(2 * PAGE))
    bench.script.next("free_buffer", fault)
    assert bench.call("ALLOCATE_BUFFER", allocate(context, 1))[:2] == (16, DEVICE_LOST)
    assert bench.engine.health is Health.DISCARD_REQUIRED
    report = bench.engine.reset()
    assert report.quarantined == Counts(contexts=1, buffers=1)
    assert report.quarantined_bytes == Retained(buffer_backing=3 * PAGE)


class Lying(Reference):
    """A backend whose allocations are not what was asked for."""

    lie: dict[str, Any] = {}  # noqa: RUF012

    def allocate_buffer(self, context: object, request: Any) -> AllocatedBuffer:
        return super().allocate_buffer(context, request)._replace(**self.lie)


@pytest.mark.parametrize("lie", [{"allocation_bytes": 63}, {"alignment": 32}, {"direct": False}], ids=str)
def test_allocation_that_breaks_the_contract_is_given_back(lie: dict[str, Any]) -> None:
    backend = Lying(script=Script())
    bench = Bench(backend.script, backend=backend)
    context = bench.context()
    backend.lie = lie
    assert bench.status("ALLOCATE_BUFFER", allocate(context, 64)) == INTERNAL_ERROR
    assert accounts(bench) == (Counts(contexts=1), Retained(), 1)


# Programs that load later


def parked(bench: Bench, context: int, request_id: int = 50, resident_bytes: int = 64) -> Any:
    made = chain(request(0x0300, load(context, XOR.pack(), resident_bytes=resident_bytes), request_id), 64)
    assert bench.engine.process(made) is None
    return made


def test_load_under_way_counts_and_holds_its_context() -> None:
    bench = Bench(Script(deferred_loads=True), policy=ResourcePolicy(max_program_resident_bytes=100))
    context = bench.context()
    made = parked(bench, context)
    assert bench.engine.state.retained == Retained(0, 64)
    assert bench.status("DESTROY_CONTEXT", u64(context)) == BUSY
    assert bench.status("LOAD_PROGRAM", load(context, XOR.pack(), resident_bytes=37)) == RESOURCE_LIMIT
    assert bench.engine.finished() == []
    bench.backend.finish_load()
    ((back, used),) = bench.engine.finished()
    assert back is made
    program = int.from_bytes(read_response(made, used, 50).payload, "little")
    assert bench.engine.state.retained == Retained(0, 64)
    bench.ok("UNLOAD_PROGRAM", u64(program))
    bench.ok("DESTROY_CONTEXT", u64(context))
    assert accounts(bench) == (Counts(), Retained(), 0)


@pytest.mark.parametrize(
    ("artifact", "status"), [(b"no program at all", INVALID_ARGUMENT), (b"VREF\x09" + XOR.pack()[5:], INCOMPATIBLE)]
)
def test_load_that_fails_late(artifact: bytes, status: int) -> None:
    bench = Bench(Script(deferred_loads=True))
    context = bench.context()
    made = chain(request(0x0300, load(context, artifact), 50), 64)
    assert bench.engine.process(made) is None
    bench.backend.finish_load()
    ((back, used),) = bench.engine.finished()
    assert read_response(back, used, 50)[:2] == (16, status)
    bench.ok("DESTROY_CONTEXT", u64(context))
    assert accounts(bench) == (Counts(), Retained(), 0)


def test_loads_finish_in_any_order() -> None:
    bench = Bench(Script(deferred_loads=True))
    context = bench.context()
    chains = [parked(bench, context, number) for number in (1, 2, 3)]
    bench.backend.loading[1].finished = True
    assert [back for back, _ in bench.engine.finished()] == [chains[1]]
    bench.backend.finish_load()
    assert [back for back, _ in bench.engine.finished()] == [chains[0], chains[2]]
    assert bench.engine.parked == 0


def test_device_lost_while_loading() -> None:
    bench = Bench(Script(deferred_loads=True))
    context = bench.context()
    chains = [parked(bench, context, number) for number in (1, 2)]
    bench.script.lost = True
    done = bench.engine.finished()
    assert [read_response(back, used, number).status for (back, used), number in zip(done, (1, 2), strict=True)] == [
        DEVICE_LOST, DEVICE_LOST,
    ]  # fmt: skip
    assert [back for back, _ in done] == chains
    report = bench.engine.reset()
    assert report.abandoned_loads == 2
    assert report.quarantined_bytes == Retained(program_resident=128)


def test_abandoned_load_goes_back_empty_and_is_charged_no_more() -> None:
    bench = Bench(Script(deferred_loads=True))
    context = bench.context()
    first, second = parked(bench, context, 1), parked(bench, context, 2)
    assert bench.engine.abandon(lambda one: one is first) == [(first, 0)]
    assert bench.engine.state.retained == Retained(0, 64)
    bench.backend.finish_load()
    assert [back for back, _ in bench.engine.finished()] == [second]
