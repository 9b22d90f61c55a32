"""Reset: one bounded child-first pass, an honest report, and a verdict that sticks (specification.md 4.11)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from frames import DEVICE_LOST, OK, STALE_OBJECT, Bench, World, u64, world

from virtaccel.device.backend import Backend, BackendUnavailable
from virtaccel.device.engine import Health
from virtaccel.device.reference import INFO, Break, Doubt, Inflate, Reference, Refuse, Script
from virtaccel.device.reset import ResetReport
from virtaccel.device.ring_service import Device
from virtaccel.device.state import Counts, Retained
from virtaccel.device.wire import Capability, Status

PAGE = 4096
ONE_OF_EACH = Counts(contexts=1, buffers=2, programs=1, queues=1, events=1)


def populated(script: Script | None = None, **options: Any) -> tuple[Bench, World, int]:
    bench = Bench(script or Script(immediate=False), **options)
    here = world(bench)
    return bench, here, bench.made("SUBMIT", here.submission())


def test_everything_is_given_back_children_first() -> None:
    bench, _, _ = populated()
    bench.script.calls.clear()
    report = bench.engine.reset()
    assert report == ResetReport(ONE_OF_EACH, Counts(), Retained(2 * PAGE, 64), Retained(), 0, None)
    releases = [call for call in bench.script.calls if call.startswith(("destroy", "free", "unload"))]
    order = ["destroy_event", "destroy_queue", "unload_program", "free_buffer", "free_buffer", "destroy_context"]
    assert releases == order
    assert bench.backend.live == 0
    assert bench.engine.health is Health.RUNNING
    world(bench)


def test_an_empty_reset_calls_nothing() -> None:
    bench = Bench()
    assert bench.engine.reset() == ResetReport(Counts(), Counts(), Retained(), Retained(), 0, None)
    assert not bench.script.calls


def test_the_pass_is_bounded() -> None:
    bench = Bench(Script(immediate=False))
    here = world(bench)
    for _ in range(2):
        bench.script.immediate = True
        bench.made("SUBMIT", here.submission())
    bench.script.immediate = False
    bench.made("SUBMIT", here.submission())
    bench.script.calls.clear()
    bench.engine.reset()
    objects = 1 + 2 + 1 + 1 + 3
    assert len(bench.script.calls) <= objects + 3 * 3


def test_pending_event_that_cannot_be_cancelled_quarantines_what_it_holds() -> None:
    bench, here, _ = populated(info=replace(INFO, capabilities=int(Capability.SHARED_MEMORY)))
    spare = bench.buffer(here.context)
    other = world(bench)
    assert spare
    assert other
    report = bench.engine.reset()
    assert report.discard
    assert report.quarantined == ONE_OF_EACH
    assert report.released == Counts(contexts=1, buffers=3, programs=1, queues=1)
    assert report.released_bytes == Retained(3 * PAGE, 64)
    assert report.quarantined_bytes == Retained(2 * PAGE, 64)


def test_completion_that_wins_against_the_reset_s_cancel() -> None:
    class Racing(Reference):
        def cancel_event(self, event: object) -> None:
            self.complete()
            super().cancel_event(event)

    script = Script(immediate=False)
    bench, _, _ = populated(script, backend=Racing(script=script))
    assert bench.engine.reset().released == ONE_OF_EACH
    assert bench.engine.health is Health.RUNNING


@pytest.mark.parametrize(
    ("method", "fault", "released"),
    [
        ("destroy_event", Refuse(Status.BUSY), Counts()),
        ("destroy_queue", Refuse(Status.BUSY), Counts(buffers=2, programs=1, events=1)),
        ("unload_program", Refuse(Status.BUSY), Counts(buffers=2, queues=1, events=1)),
        ("free_buffer", Refuse(Status.BUSY), Counts(buffers=1, programs=1, queues=1, events=1)),
        ("destroy_context", Refuse(Status.BUSY), Counts(buffers=2, programs=1, queues=1, events=1)),
        ("destroy_queue", Doubt(Status.BUSY), Counts(events=1)),
        ("unload_program", Doubt(Status.BUSY), Counts(queues=1, events=1)),
        ("free_buffer", Doubt(Status.BUSY), Counts(programs=1, queues=1, events=1)),
        ("destroy_context", Doubt(Status.BUSY), Counts(buffers=2, programs=1, queues=1, events=1)),
        ("free_buffer", Refuse(Status.DEVICE_LOST), Counts(programs=1, queues=1, events=1)),
        ("poll_event", Refuse(Status.DEVICE_LOST), Counts()),
        ("cancel_event", Refuse(Status.DEVICE_LOST), Counts()),
        ("unload_program", Break(RuntimeError("bug")), Counts(queues=1, events=1)),
    ],
)
def test_trouble_while_resetting_is_counted_and_sticks(method: str, fault: Any, released: Counts) -> None:
    bench, here, _ = populated()
    bench.script.next(method, fault)
    report = bench.engine.reset()
    assert report.discard
    assert report.reason
    assert report.released == released
    assert report.quarantined == Counts(*(a - b for a, b in zip(ONE_OF_EACH, released, strict=True)))
    assert report.released_bytes == Retained(released.buffers * PAGE, released.programs * 64)
    assert report.released_bytes.plus(report.quarantined_bytes) == Retained(2 * PAGE, 64)
    assert bench.engine.health is Health.DISCARD_REQUIRED
    calls = len(bench.script.calls)
    for _ in range(3):
        again = bench.engine.reset()
        assert (again.released, again.quarantined) == (Counts(), report.quarantined)
        assert again.quarantined_bytes == report.quarantined_bytes
        assert again.discard
        assert bench.status("FREE_BUFFER", u64(here.source)) == DEVICE_LOST
    assert len(bench.script.calls) == calls


# The device around it


def opened(scripts: list[Script]) -> tuple[Device, list[Reference]]:
    backends: list[Reference] = []

    def open_backend() -> Backend:
        backends.append(Reference(script=scripts[len(backends)]))
        return backends[-1]

    return Device(open_backend), backends


def through(device: Device, name: str, payload: bytes = b"", request_id: int = 1) -> int:
    bench = Bench.__new__(Bench)
    bench.engine, bench.request_id = device.engine, request_id
    return bench.status(name, payload)


def test_device_keeps_its_backend_over_a_clean_reset() -> None:
    device, backends = opened([Script()])
    engine = device.engine
    device.reset()
    assert len(backends) == 1
    assert device.engine is engine
    device.close()


def test_device_opens_a_new_backend_after_a_discard() -> None:
    device, backends = opened([Script(), Script()])
    device.backend.create_context()
    bench = Bench.__new__(Bench)
    bench.engine, bench.request_id = device.engine, 0
    old = bench.context()
    backends[0].script.lost = True
    assert through(device, "DESTROY_CONTEXT", u64(old)) == DEVICE_LOST
    report = device.reset()
    assert report.discard
    assert len(backends) == 2
    assert backends[0].fileno() == -1, "the discarded backend is closed"
    assert device.health is Health.RUNNING
    assert through(device, "GET_DEVICE_INFO") == OK
    assert through(device, "DESTROY_CONTEXT", u64(old)) == STALE_OBJECT
    device.close()


def test_device_without_a_backend_answers_lost_until_one_opens_again() -> None:
    first, later = Script(), Script()
    attempts: list[int] = []

    def open_backend() -> Backend:
        attempts.append(len(attempts))
        if attempts[-1] == 1:
            raise BackendUnavailable("the accelerator is gone")
        return Reference(script=later if attempts[-1] else first)

    device = Device(open_backend)
    first.lost = True
    assert through(device, "CREATE_CONTEXT", bytes(8)) == DEVICE_LOST
    device.reset()
    assert device.health is Health.DISCARD_REQUIRED
    assert through(device, "GET_DEVICE_INFO") == DEVICE_LOST
    device.reset()
    assert device.health is Health.RUNNING
    assert through(device, "GET_DEVICE_INFO") == OK
    device.close()


def test_a_fault_left_over_does_not_leak_into_the_next_epoch() -> None:
    bench, _, _ = populated()
    bench.script.next("allocate_buffer", Inflate(1))
    bench.engine.reset()
    context = bench.context()
    bench.buffer(context)
    assert bench.engine.state.retained == Retained(PAGE + 1, 0)
    assert bench.engine.reset().released_bytes == Retained(PAGE + 1, 0)
