"""The straight line from ring to engine and back: bounded turns, one notification, rings that lie, busy guests."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from command_ring import BASE, CommandRing
from frames import CODES, OK, XOR, load, request, u32, u64
from rings import RawRing

from virtaccel.device.engine import Health
from virtaccel.device.reference import Reference, Script
from virtaccel.device.ring_service import Device, RingService
from virtaccel.virtqueue.errors import RingError
from virtaccel.virtqueue.split import DeviceQueue

INFO_FRAME = request(CODES["GET_DEVICE_INFO"], request_id=5)


def test_an_idle_service_does_nothing_and_enables_kicks() -> None:
    ring = CommandRing(Reference)
    assert not ring.service.service()
    assert ring.notified == 0
    assert ring.driver.should_kick()


def test_a_full_turn_leaves_kicks_off() -> None:
    ring = CommandRing(Reference, size=16)
    for _ in range(5):
        ring.publish(INFO_FRAME, writable=(92,))
    assert ring.service.service(5)
    assert not ring.driver.should_kick(), "the caller comes back anyway"
    assert not ring.service.service(5)
    assert ring.driver.should_kick()


def test_work_that_arrives_while_kicks_are_being_enabled_is_announced() -> None:
    """The driver publishes between the last look and the flag; `service` must say that there is more."""
    ring = CommandRing(Reference)
    enable = ring.queue.enable_kicks

    class Late:
        def __getattr__(self, name: str) -> Any:
            return getattr(ring.queue, name)

        def enable_kicks(self) -> bool:
            ring.publish(INFO_FRAME, writable=(92,))
            return enable()

    ring.service.queue = Late()  # type: ignore[assignment]
    assert ring.service.service()


def test_ring_error_after_good_work_is_notified_and_stops_the_ring_only() -> None:
    raw = RawRing(8)
    device = Device(Reference)
    notified = []
    service = RingService(device.engine, raw.device(), lambda: notified.append(1))
    raw.good(0, 16, 92)
    offset = len(raw.buffer) // 2
    raw.buffer[offset : offset + 16] = INFO_FRAME
    raw.offer(0)
    service.service()
    assert raw.used() == [(0, 92)]
    raw.set_available_index(raw.index + 9)
    with pytest.raises(RingError):
        service.service()
    with pytest.raises(RingError):
        service.service()
    assert notified == [1]
    assert device.health is Health.RUNNING


def test_completion_of_a_load_notifies_once() -> None:
    script = Script(deferred_loads=True)
    ring = CommandRing(lambda: Reference(script=script))
    context = int.from_bytes(ring.exchange(request(CODES["CREATE_CONTEXT"], bytes(8), 1)).payload, "little")
    for number in (2, 3):
        ring.publish(request(CODES["LOAD_PROGRAM"], load(context, XOR.pack()), number))
    notified = ring.notified
    ring.service.service()
    assert ring.notified == notified, "nothing came back yet"
    backend = ring.device.backend
    assert isinstance(backend, Reference)
    backend.finish_load()
    assert ring.service.completions() == 2
    assert ring.notified == notified + 1
    assert ring.service.completions() == 0
    responses = [ring.collect(), ring.collect()]
    assert [response.status for response in responses if response] == [OK, OK]


def test_every_response_agrees_with_one_reading_of_a_frame_that_changes() -> None:
    """Another thread rewrites payload_bytes and binding_count of a SUBMIT while it is being served. Whatever the engine
    read, it answers with one of the verdicts of a single reading, and nothing else happens."""
    ring = CommandRing(lambda: Reference(script=Script(immediate=True)))
    frame = request(CODES["SUBMIT"], u64(7) + u64(8) + u32(1) + u32(0) + u64(0) + bytes(32), 5)
    place = ring.spare
    ring.memory[place : place + len(frame)] = frame
    stop = threading.Event()

    def scribble() -> None:
        values = (u32(64), u32(0), u32(0xFFFF_FFFF), u32(63))
        while not stop.is_set():
            for value in values:
                ring.memory[place + 4 : place + 8] = value
                ring.memory[place + 32 : place + 36] = value

    thread = threading.Thread(target=scribble)
    thread.start()
    seen = set()
    try:
        for _ in range(5000):
            ring.driver.publish([(BASE + place, len(frame))], [(BASE + place + 256, 64)])
            ring.service.service()
            used = ring.driver.collect()
            assert used is not None
            assert used.written == 16
            seen.add(int.from_bytes(ring.memory[place + 256 : place + 258], "little"))
    finally:
        stop.set()
        thread.join()
    assert seen <= {3, 7}
    assert ring.device.health is Health.RUNNING


def test_load_parked_over_a_pause_ends_on_the_queue_that_resumes() -> None:
    """A front end stops the ring and starts it again where it stood, which makes a new queue over the same ring."""
    script = Script(deferred_loads=True)
    ring = CommandRing(lambda: Reference(script=script))
    context = int.from_bytes(ring.exchange(request(CODES["CREATE_CONTEXT"], bytes(8), 1)).payload, "little")
    ring.publish(request(CODES["LOAD_PROGRAM"], load(context, XOR.pack()), 2))
    ring.service.service()
    before = ring.queue
    places = ring.driver.addresses
    assert places is not None
    after = DeviceQueue(ring.guest, ring.driver.size, *places, ring.limit, last_available=before.last_available)
    after.resume(before)
    assert after.outstanding == 1
    ring.service = RingService(ring.device.engine, after, lambda: None)
    backend = ring.device.backend
    assert isinstance(backend, Reference)
    backend.finish_load()
    assert ring.service.completions() == 1
    response = ring.collect()
    assert response is not None
    assert (response.status, response.raw[8], after.outstanding) == (OK, 2, 0)
