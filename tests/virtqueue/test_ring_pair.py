"""Both sides on one ring: order, wrap, back-pressure, validation of what the device returns, wake-ups."""

import mmap
import os
import select
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rings import BASE, BYTES, DATA, shared_buffer, start_peer

from virtaccel.virtqueue.driver import DriverQueue, Used
from virtaccel.virtqueue.errors import Backpressure, DeviceMisbehaved
from virtaccel.virtqueue.layout import place, ring_bytes
from virtaccel.virtqueue.memory import GuestMemory, Region
from virtaccel.virtqueue.segments import Chain, gather, scatter
from virtaccel.virtqueue.split import DeviceQueue


class Pair:
    """A driver and a device over one piece of memory."""

    def __init__(self, size: int = 8, first_index: int = 0) -> None:
        self.buffer = mmap.mmap(-1, BYTES)
        self.driver = DriverQueue.in_memory(memoryview(self.buffer), BASE, size, first_index=first_index)
        assert self.driver.addresses is not None
        memory = GuestMemory([Region(BASE, self.buffer)])
        self.device = DeviceQueue(memory, size, *self.driver.addresses, 256, last_available=first_index)
        self.used_offset = self.driver.addresses.used - BASE

    def forge(self, index: int, head: int, written: int) -> None:
        """Write a used element and the index behind it, as a device that lies would."""
        struct.pack_into("<II", self.buffer, self.used_offset + 4 + 8 * ((index - 1) % self.driver.size), head, written)
        struct.pack_into("<H", self.buffer, self.used_offset + 2, index)


ONE = ([(DATA, 24)], [(DATA + 4096, 24)])


def test_layout_is_the_standards() -> None:
    # virtio 1.3, 2.7: 16*N, 6+2*N and 6+8*N bytes, aligned to 16, 2 and 4.
    for power in range(16):
        size = 1 << power
        at = place(size)
        assert at.available >= 16 * size
        assert at.used >= at.available + 6 + 2 * size
        assert (at.descriptors % 16, at.available % 2, at.used % 4) == (0, 0, 0)
        assert ring_bytes(size) == at.used + 6 + 8 * size


@pytest.mark.parametrize("size", [8, 256])
def test_r4_seventy_thousand_commands_complete_and_ids_match(size: int) -> None:
    pair = Pair(size)
    driver, device, depth = pair.driver, pair.device, size // 2
    data = memoryview(pair.buffer)[DATA - BASE :]
    sent = 0
    while sent < 70_000:
        batch = {}
        for slot in range(min(depth, 70_000 - sent)):
            sent += 1
            struct.pack_into("<Q", data, 64 * slot, sent)
            batch[driver.publish([(DATA + 64 * slot, 8)], [(DATA + 64 * slot + 32, 8)])] = (slot, sent)
        while chain := device.pop():
            scatter(chain.writable, 0, gather(chain.readable, 0, 8))
            assert device.push(chain, 8)
        while used := driver.collect():
            slot, number = batch.pop(used.head)
            assert used.written == 8
            assert struct.unpack_from("<Q", data, 64 * slot + 32) == (number,)
        assert not batch
    assert driver.free_descriptors == size
    assert device.last_available == 70_000 % 65536


def test_vq_016_a_full_ring_is_backpressure_and_the_same_chain_goes_later() -> None:
    pair = Pair(8)
    for _ in range(4):
        pair.driver.publish(*ONE)
    ring = pair.buffer[: ring_bytes(8)]
    with pytest.raises(Backpressure):
        pair.driver.publish(*ONE)
    assert pair.buffer[: ring_bytes(8)] == ring, "nothing of it is visible"
    assert pair.driver.outstanding == 4
    chain = pair.device.pop()
    assert chain is not None
    pair.device.push(chain, 24)
    with pytest.raises(Backpressure):  # used, but not collected: the descriptors are not ours yet
        pair.driver.publish(*ONE)
    assert pair.driver.collect() == Used(chain.head, 24)
    with pytest.raises(Backpressure):
        pair.driver.publish([(DATA, 8), (DATA, 8)], [(DATA, 8)])
    assert pair.driver.publish(*ONE) == chain.head


@pytest.mark.parametrize(
    ("readable", "writable"),
    [
        ([], [(DATA, 8)]), ([(DATA, 8)], []), ([(DATA, 0)], [(DATA, 8)]), ([(DATA, 8)], [(DATA, -1)]),
        ([(-1, 8)], [(DATA, 8)]), ([(2**64 - 7, 8)], [(DATA, 8)]), ([(DATA, 8)], [(2**64, 1)]),
        ([(DATA, 1)] * 8, [(DATA, 1)]),
        ([(DATA, 2**32)], [(DATA, 1)]), ([(DATA, 2**31)], [(DATA, 2**31), (DATA, 1)]),
    ],
)  # fmt: skip
def test_chain_that_can_never_go_is_a_value_error_and_takes_nothing(
    readable: list[tuple[int, int]], writable: list[tuple[int, int]]
) -> None:
    pair = Pair(8)
    with pytest.raises(ValueError, match=r"range|bytes"):
        pair.driver.publish(readable, writable)
    assert pair.driver.free_descriptors == 8
    assert pair.device.pop() is None


@pytest.mark.parametrize(
    "case", ["never issued", "outside", "twice", "too long", "index jump", "index back", "middle of a chain"]
)
def test_r7_driver_rejects_what_it_never_gave(case: str) -> None:
    pair = Pair(8)
    first, second = pair.driver.publish(*ONE), pair.driver.publish(*ONE)
    if case == "twice":
        pair.forge(1, first, 0)
        assert pair.driver.collect() == Used(first, 0)
        pair.forge(2, first, 0)
    else:
        index, head, written = {
            "never issued": (1, 7, 0),
            "outside": (1, 8 + first, 0),
            "too long": (1, second, 25),
            "index jump": (3, first, 0),
            "index back": (65535, first, 0),
            "middle of a chain": (1, first + 1, 0),
        }[case]
        pair.forge(index, head, written)
    out = pair.driver.outstanding
    for _ in range(2):
        with pytest.raises(DeviceMisbehaved):
            pair.driver.collect()
    with pytest.raises(DeviceMisbehaved):
        pair.driver.publish(*ONE)
    assert pair.driver.outstanding == out
    assert set(pair.driver.reset()) == ({second} if case == "twice" else {first, second})
    assert pair.driver.publish(*ONE) in range(8)


def test_a_pair_of_ranges_is_published_like_any_chain_and_gives_its_descriptors_back() -> None:
    pair = Pair(size=8)
    heads = [pair.driver.publish_pair(DATA + 64 * number, 24, DATA + 4096, 40 + number) for number in range(4)]
    with pytest.raises(Backpressure):
        pair.driver.publish_pair(DATA, 24, DATA + 4096, 24)
    for number, head in enumerate(heads):
        chain = pair.device.pop()
        assert chain is not None
        assert chain.broken is None
        assert (chain.head, chain.readable_bytes, chain.writable_bytes) == (head, 24, 40 + number)
        assert pair.device.push(chain, chain.writable_bytes)
    assert [pair.driver.collect() for _ in heads] == [Used(head, 40 + number) for number, head in enumerate(heads)]
    assert pair.driver.free_descriptors == 8
    for bad in ((DATA, 0, DATA, 24), (DATA, 24, DATA, 0)):
        with pytest.raises(ValueError, match="bytes in a ring"):
            pair.driver.publish_pair(*bad)
    assert pair.driver.free_descriptors == 8


def test_vq_017_every_order_of_sleeping_and_publishing_leaves_a_sign() -> None:
    pair = Pair()
    # Device going to sleep while the driver publishes: either the driver is told to kick or the device looks again.
    pair.device.disable_kicks()
    pair.driver.publish(*ONE)
    assert not pair.driver.should_kick()
    assert pair.device.enable_kicks()
    chain = pair.device.pop()
    assert chain is not None
    assert not pair.device.enable_kicks()
    pair.driver.publish(*ONE)
    assert pair.driver.should_kick()
    # The same with the driver asleep.
    pair.driver.disable_interrupts()
    pair.device.push(chain, 0)
    assert not pair.device.should_notify()
    assert pair.driver.enable_interrupts()
    assert pair.driver.collect() == Used(chain.head, 0)
    assert not pair.driver.enable_interrupts()
    chain = pair.device.pop()
    assert chain is not None
    pair.device.push(chain, 0)
    assert pair.device.should_notify()


def test_r5_vq_017_ten_thousand_rounds_against_a_device_that_sleeps() -> None:
    rounds, size = 10_000, 8
    file, buffer = shared_buffer()
    driver = DriverQueue.in_memory(memoryview(buffer), BASE, size)
    assert driver.addresses is not None
    kick, call = os.eventfd(0), os.eventfd(0)
    peer = start_peer(
        "serve",
        file,
        size,
        driver.addresses.available,
        driver.addresses.used,
        kick,
        call,
        rounds,
        files=(file, kick, call),
    )
    published = collected = 0
    slots: dict[int, int] = {}
    try:
        while collected < rounds:
            driver.disable_interrupts()
            for _ in range(1 + published % 3):
                if published < rounds and driver.free_descriptors >= 2:
                    slot = DATA - BASE + 64 * (published % size)
                    struct.pack_into("<Q", buffer, slot, published)
                    slots[driver.publish([(BASE + slot, 8)], [(BASE + slot + 32, 8)])] = slot
                    published += 1
                    if driver.should_kick():
                        os.eventfd_write(kick, 1)
            while True:
                while used := driver.collect():
                    slot = slots.pop(used.head)
                    assert buffer[slot : slot + 8] == buffer[slot + 32 : slot + 40]
                    collected += 1
                if not slots or not driver.enable_interrupts():
                    break
            if slots:
                assert select.select([call], [], [], 10)[0], "a wake-up was lost"
                os.eventfd_read(call)
        assert peer.wait(20) == 0
    finally:
        assert peer.stdin is not None
        peer.stdin.close()
        peer.wait(20)
        for descriptor in (file, kick, call):
            os.close(descriptor)


@settings(deadline=None)
@given(
    size=st.sampled_from([2, 4, 8, 16]),
    first_index=st.one_of(st.integers(65500, 65535), st.integers(0, 65535)),
    steps=st.lists(
        st.tuples(st.sampled_from("pppodduc"), st.integers(0, 5), st.integers(1, 4), st.integers(1, 3)), max_size=120
    ),
)
def test_rings_wrap_and_lose_nothing_under_any_schedule(
    size: int, first_index: int, steps: list[tuple[str, int, int, int]]
) -> None:
    pair = Pair(size, first_index)
    published: list[tuple[int, int]] = []  # (head, readable count) as the driver made them available
    held: list[tuple[Chain, int]] = []
    returned: list[Used] = []
    free = size
    for action, number, readable, writable in steps:
        if action in "po":
            count = readable + writable
            arguments = ([(DATA + k, 1) for k in range(readable)], [(DATA + 64 + k, 2) for k in range(writable)])
            if count > size:
                with pytest.raises(ValueError, match="ranges"):
                    pair.driver.publish(*arguments)
            elif count > free:
                with pytest.raises(Backpressure):
                    pair.driver.publish(*arguments)
            else:
                published.append((pair.driver.publish(*arguments), readable))
                free -= count
        elif action == "d":
            chain = pair.device.pop()
            assert (chain is None) == (not published)
            if chain is not None:
                head, count = published.pop(0)
                assert (chain.broken, chain.head, chain.readable_bytes) == (None, head, count)
                held.append((chain, len(chain.readable) + len(chain.writable)))
        elif action == "u" and held:
            chain, count = held.pop(number % len(held))
            written = min(number, chain.writable_bytes)
            assert pair.device.push(chain, written)
            returned.append(Used(chain.head, written))
        elif action == "c":
            used = pair.driver.collect()
            assert used == (returned.pop(0) if returned else None)
            free = pair.driver.free_descriptors
    assert pair.driver.outstanding == len(published) + len(held) + len(returned)
    assert pair.driver.free_descriptors == free


def test_guest_modules_need_only_the_standard_library() -> None:
    # The files that run inside a guest, under an interpreter that sees no site-packages at all.
    import subprocess
    import sys
    from pathlib import Path

    import virtaccel.virtqueue

    package = Path(virtaccel.virtqueue.__path__[0])
    script = (
        "import sys, types; p = types.ModuleType('virtaccel'); p.__path__ = []; sys.modules['virtaccel'] = p;"
        "q = types.ModuleType('virtaccel.virtqueue'); sys.modules['virtaccel.virtqueue'] = q;"
        f"q.__path__ = [{str(package)!r}];"
        "import virtaccel.virtqueue.driver as d; b = bytearray(4096);"
        "r = d.DriverQueue.in_memory(memoryview(b), 0, 8); r.publish([(64, 8)], [(128, 8)]);"
        "r.should_kick(); assert r.collect() is None;"
        "assert not any('site-packages' in str(getattr(m, '__file__', '')) for m in sys.modules.values())"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", script], check=True, timeout=60)
