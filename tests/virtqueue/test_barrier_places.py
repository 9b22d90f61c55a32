"""Where the barriers stand. No test can make a processor reorder on demand, so the other side acts inside the barrier.

Each test puts a stand-in for the barrier that looks at memory, as the other processor could at that very moment, and
changes what the other side may change: what stands before the barrier must be visible, what comes after it must see
the change. The accesses of weakly ordered machines are shown here too, by saying that this is one.
"""

import struct
from collections.abc import Callable

import pytest
from rings import BASE, BYTES, DATA, RawRing

from virtaccel.virtqueue import driver as driver_module
from virtaccel.virtqueue import split
from virtaccel.virtqueue.driver import DriverQueue, Used


class Stand:
    """Runs `act` at every barrier and counts them."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        self.act()


def test_device_publishes_used_before_it_reads_the_drivers_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = RawRing()
    ring.good(0)
    ring.offer(0)
    queue = ring.device()
    chain = queue.pop()
    assert chain is not None

    def other_side() -> None:
        assert ring.used_index() == 1
        ring.set_available_flags(1)

    monkeypatch.setattr(split, "fence", stand := Stand(other_side))
    queue.push(chain, 24)
    assert not queue.should_notify()
    assert stand.count >= 1


def test_device_shows_its_flag_before_it_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = RawRing()
    ring.good(0)
    queue = ring.device()
    queue.disable_kicks()

    def other_side() -> None:
        assert ring.used_flags() == 0
        ring.offer(0)

    monkeypatch.setattr(split, "fence", stand := Stand(other_side))
    assert queue.enable_kicks()
    assert stand.count == 1


def test_device_reads_entries_after_the_index_and_publishes_elements_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = RawRing()
    ring.good(0)
    ring.good(4)
    ring.offer(0)
    queue = ring.device()
    monkeypatch.setattr(split, "WEAKLY_ORDERED", True)

    def driver_writes_late() -> None:
        struct.pack_into("<H", ring.buffer, ring.available_offset + 4, 4)

    monkeypatch.setattr(split, "fence", stand := Stand(driver_writes_late))
    chain = queue.pop()
    assert chain is not None
    assert (chain.head, stand.count) == (4, 1)

    def driver_looks() -> None:
        assert struct.unpack_from("<HII", ring.buffer, ring.used_offset + 2) == (0, 4, 9)

    monkeypatch.setattr(split, "fence", stand := Stand(driver_looks))
    queue.push(chain, 9)
    assert stand.count == 1
    assert ring.used() == [(4, 9)]


def test_driver_shows_index_and_flag_before_it_reads_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = bytearray(BYTES)
    queue = DriverQueue.in_memory(memoryview(buffer), BASE, 8)
    assert queue.addresses is not None
    available, used = queue.addresses.available - BASE, queue.addresses.used - BASE
    head = queue.publish([(DATA, 8)], [(DATA + 8, 8)])

    def device_stops_kicks() -> None:
        assert struct.unpack_from("<H", buffer, available + 2) == (1,)
        buffer[used] = 1

    monkeypatch.setattr(driver_module, "fence", Stand(device_stops_kicks))
    assert not queue.should_kick()
    queue.disable_interrupts()

    def device_completes() -> None:
        assert buffer[available] == 0
        struct.pack_into("<HII", buffer, used + 2, 1, head, 8)

    monkeypatch.setattr(driver_module, "fence", Stand(device_completes))
    assert queue.enable_interrupts()
    assert queue.collect() == Used(head, 8)


def test_driver_orders_entries_and_elements_on_weakly_ordered_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = bytearray(BYTES)
    queue = DriverQueue.in_memory(memoryview(buffer), BASE, 8)
    assert queue.addresses is not None
    available, used = queue.addresses.available - BASE, queue.addresses.used - BASE
    monkeypatch.setattr(driver_module, "WEAKLY_ORDERED", True)
    seen: list[tuple[int, ...]] = []

    def device_looks() -> None:
        index, entry = struct.unpack_from("<HH", buffer, available + 2)
        seen.append((index, *struct.unpack_from("<QI", buffer, 16 * entry)))

    monkeypatch.setattr(driver_module, "fence", Stand(device_looks))
    head = queue.publish([(DATA, 77)], [(DATA + 8, 8)])
    assert seen == [(0, DATA, 77)]
    struct.pack_into("<H", buffer, used + 2, 1)

    def device_writes_late() -> None:
        struct.pack_into("<II", buffer, used + 4, head, 5)

    monkeypatch.setattr(driver_module, "fence", stand := Stand(device_writes_late))
    buffer[used + 4 : used + 12] = b"\xff" * 8
    assert queue.collect() == Used(head, 5)
    assert stand.count == 1
