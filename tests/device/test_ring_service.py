"""The straight line from ring to engine and back: bounded turns, one notification, rings that lie, busy guests."""

from __future__ import annotations

from typing import Any

import pytest
from command_ring import CommandRing
from frames import CODES, OK, XOR, load, request
from rings import RawRing

from virtaccel.device.engine import Health
from virtaccel.device.reference import Reference, Script
from virtaccel.device.ring_service import Device, RingService
from virtaccel.virtqueue.errors import RingError

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
