"""The device's side against a driver written by hand: ring errors, addresses, suppression, rebinding."""

import mmap

import pytest
from rings import BASE, BYTES, DATA, RawRing, shared_buffer, start_peer

from virtaccel.virtqueue.errors import RingError
from virtaccel.virtqueue.memory import GuestMemory, Region
from virtaccel.virtqueue.split import DeviceQueue


@pytest.mark.parametrize("size", [-1, 0, 3, 6, 100, 257, 32767, 32769, 65535, 65536, 1 << 20])
def test_r6_sizes_the_standard_forbids_are_refused(size: int) -> None:
    with pytest.raises(RingError, match="power of two"):
        DeviceQueue(GuestMemory([Region(0, bytearray(1 << 16))]), size, 0, 0, 0, 256)


@pytest.mark.parametrize("size", [1 << power for power in range(16)])
def test_r6_every_power_of_two_is_served(size: int) -> None:
    ring = RawRing(size, mmap.mmap(-1, BYTES))
    queue = ring.device()
    if size == 1:
        ring.descriptor(0, DATA, 16)
        ring.offer(0)
        chain = queue.pop()
        assert chain is not None
        assert chain.broken
        return
    ring.descriptor(size - 1, BASE + BYTES - 64, 16, 1, 0)
    ring.descriptor(0, BASE + BYTES - 32, 16, 2)
    ring.offer(size - 1)
    chain = queue.pop()
    assert chain is not None
    assert chain.broken is None
    assert queue.push(chain, 16)
    assert ring.used() == [(size - 1, 16)]


PLACES = {"descriptors": BASE, "available": BASE + 0x1000, "used": BASE + 0x2000}


@pytest.mark.parametrize(
    ("part", "address"),
    [
        ("descriptors", BASE + 8), ("descriptors", BASE + 1), ("available", BASE + 0x1001), ("used", BASE + 0x2002),
        ("descriptors", 0), ("descriptors", BASE + BYTES - 64), ("available", BASE - 2), ("used", BASE + BYTES - 4),
        ("used", 2**64 - 4), ("available", 2**64 - 2), ("descriptors", 2**64 - 16), ("used", 2**64),
        ("descriptors", -16),
    ],
)  # fmt: skip
def test_r6_misaligned_or_outside_addresses_are_refused(part: str, address: int) -> None:
    memory = GuestMemory([Region(BASE, mmap.mmap(-1, BYTES))])
    DeviceQueue(memory, 8, **PLACES, max_chain_descriptors=8)
    with pytest.raises(RingError):
        DeviceQueue(memory, 8, **{**PLACES, part: address}, max_chain_descriptors=8)


def test_r6_part_across_regions_or_misaligned_by_its_mapping_is_refused() -> None:
    two = GuestMemory([Region(BASE, bytearray(0x1004)), Region(BASE + 0x1004, bytearray(0x10000))])
    with pytest.raises(RingError, match="two regions"):
        DeviceQueue(two, 8, **PLACES, max_chain_descriptors=8)
    odd = GuestMemory([Region(BASE, memoryview(bytearray(0x4001))[1:])])
    with pytest.raises(RingError, match="mapped at an address"):
        DeviceQueue(odd, 8, **PLACES, max_chain_descriptors=8)


@pytest.mark.parametrize("limit", [0, 1, 257])
def test_descriptor_limit_is_our_own_configuration(limit: int) -> None:
    with pytest.raises(ValueError, match="max_chain_descriptors"):
        RawRing().device(limit)


@pytest.mark.parametrize(("start", "jump"), [(0, 9), (0, 65535), (65530, 9), (7, 32768)])
def test_available_index_that_jumps_stops_the_ring(start: int, jump: int) -> None:
    ring = RawRing()
    ring.good(0)
    queue = ring.device(last_available=start)
    ring.set_available_index((start + jump) % 65536)
    for _ in range(2):
        with pytest.raises(RingError, match="ahead"):
            queue.pop()
    ring.set_available_index((start + 1) % 65536)
    with pytest.raises(RingError):
        queue.pop()
    assert queue.stopped
    assert not queue.enable_kicks()
    queue.disable_kicks()
    assert ring.used() == []
    assert ring.used_flags() == 0


def test_a_full_ring_is_no_jump_but_chains_held_count() -> None:
    ring = RawRing()
    for first in (0, 2, 4, 6):
        ring.good(first)
    ring.offer(0, 2, 4, 6, 0, 2, 4, 6)
    queue = ring.device()
    held = [queue.pop() for _ in range(8)]
    assert queue.outstanding == 8
    assert queue.pop() is None
    ring.offer(0)
    with pytest.raises(RingError, match="8 chains held"):
        queue.pop()
    assert held[0] is not None
    with pytest.raises(RingError):
        queue.push(held[0], 0)
    assert ring.used() == []


def test_last_available_is_the_base_and_the_used_index_is_the_rings() -> None:
    ring = RawRing()
    ring.index = 65535
    ring.good(2)
    queue = ring.device(last_available=65535)
    ring.offer(2)
    chain = queue.pop()
    assert chain is not None
    assert queue.last_available == 0
    queue.push(chain, 1)
    assert ring.used() == [(2, 1)]
    again = ring.device(last_available=queue.last_available)  # a pause: the base that was handed out comes back
    ring.offer(2)
    chain = again.pop()
    assert chain is not None
    again.push(chain, 3)
    assert ring.used() == [(2, 3)]
    again.last_available = 65535
    assert again.enable_kicks()


@pytest.mark.parametrize("base", [-1, 65536])
def test_base_beyond_sixteen_bits_is_refused(base: int) -> None:
    with pytest.raises(RingError):
        RawRing().device(last_available=base)


def test_vq_013_used_length_is_what_was_written_and_never_more_than_fits() -> None:
    ring = RawRing()
    ring.good(0, response=24)
    ring.offer(0)
    queue = ring.device()
    chain = queue.pop()
    assert chain is not None
    for wrong in (25, -1):
        with pytest.raises(ValueError, match="written"):
            queue.push(chain, wrong)
    assert ring.used() == []
    assert queue.push(chain, 24)
    assert ring.used() == [(0, 24)]
    assert not queue.push(chain, 24)
    assert ring.used() == []


def test_r5_vq_017_no_interrupt_and_no_notify_are_honoured_and_looked_at_again() -> None:
    ring = RawRing()
    ring.good(0)
    queue = ring.device()
    assert queue.should_notify()
    ring.set_available_flags(1)
    assert not queue.should_notify()
    ring.set_available_flags(0xFFFE)
    assert queue.should_notify()
    queue.disable_kicks()
    assert ring.used_flags() == 1
    ring.offer(0)  # published while nobody is told
    assert queue.enable_kicks()
    assert ring.used_flags() == 0
    chain = queue.pop()
    assert chain is not None
    queue.push(chain, 0)
    assert not queue.enable_kicks()


def test_r2_new_memory_table_keeps_the_ring_and_the_chains_in_flight() -> None:
    file, first = shared_buffer()
    ring = RawRing(8, first)
    queue = ring.device()
    ring.good(0)
    ring.good(2)
    ring.offer(0)
    held = queue.pop()
    assert held is not None
    # The same file mapped anew, at other user addresses, and one region more.
    import os

    second = mmap.mmap(file, BYTES)
    os.close(file)
    queue.rebind(GuestMemory([Region(BASE, second, 0x7000_0000), Region(1 << 40, bytearray(64), 0x9000_0000)]))
    held.writable[0][:2] = b"ok"
    assert queue.push(held, 2)
    assert ring.used() == [(0, 2)]
    assert first[4096 + DATA - BASE : 4098 + DATA - BASE] == b"ok"
    ring.descriptor(2, 1 << 40, 64, 1, 3)
    ring.offer(2)
    chain = queue.pop()
    assert chain is not None
    assert chain.readable_bytes == 64


def test_r2_table_without_the_ring_stops_it_and_lets_go_of_memory() -> None:
    ring = RawRing()
    queue = ring.device()
    with pytest.raises(RingError, match="descriptor table"):
        queue.rebind(GuestMemory([Region(1 << 40, bytearray(64))]))
    with pytest.raises(RingError):
        queue.pop()
    ring.memory = GuestMemory()
    ring.buffer.close()  # raises BufferError if a view were left


def test_vq_018_reset_ends_an_epoch_and_late_pushes_write_nothing() -> None:
    ring = RawRing()
    ring.good(0)
    ring.offer(0)
    queue = ring.device()
    late = queue.pop()
    assert late is not None
    ring.buffer[:] = bytes(BYTES)
    ring.index = ring.seen = 0
    queue.reset(ring.memory)
    before = ring.buffer[:]
    assert not queue.push(late, 24)
    assert not ring.device().push(late, 24)
    assert ring.buffer[:] == before
    ring.good(4)
    ring.offer(4)
    fresh = queue.pop()
    assert fresh is not None
    assert queue.push(fresh, 5)
    assert ring.used() == [(4, 5)]


def test_r7_descriptors_rewritten_by_another_processor_are_read_once() -> None:
    import os

    file, buffer = shared_buffer()
    ring = RawRing(8, buffer)
    queue = ring.device()
    peer = start_peer("hammer", file, 20, files=(file,))
    try:
        sound = broken = 0
        lengths = set()
        for _ in range(1_000_000):
            ring.offer(0)
            chain = queue.pop()
            assert chain is not None
            if chain.broken is None:
                sound += 1
                lengths.add(chain.readable_bytes)
                # Whatever was there, one reading of it: totals are those of the segments, lengths are ones written.
                assert chain.readable_bytes == sum(map(len, chain.readable))
                assert chain.writable_bytes == sum(map(len, chain.writable))
                assert chain.readable_bytes // len(chain.readable) in range(24, 41)
            else:
                broken += 1
            assert queue.push(chain, 0)
            if sound > 100_000 and broken > 100 and {24, 40} <= lengths:
                break
        assert sound > 100_000
        assert broken > 100
        assert {24, 40} <= lengths
    finally:
        assert peer.stdin is not None
        peer.stdin.close()
        assert peer.wait(10) == 0
        os.close(file)
