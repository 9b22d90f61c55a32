"""Rings over a real socket between two processes: cases R1 to R6 of the field, each with its name in the test's."""

from __future__ import annotations

import os
import struct
import threading
import time

import pytest
from daemons import FRAMES_AT, GUEST, USER, Daemon, Memory, Vm, moved, readable
from frames import request

from virtaccel.device.vhost_user import message as m
from virtaccel.device.vhost_user.message import Request
from virtaccel.guest_tools.transport.base import TransportError
from virtaccel.virtqueue.layout import place

INFO = 0x0001
HEADER = struct.Struct("<HHIQ")


def info(request_id: int = 1) -> bytes:
    return request(INFO, request_id=request_id)


def assert_good(response: bytes, request_id: int = 1) -> None:
    """An OK answer to GET_DEVICE_INFO with this request ID."""
    assert len(response) == 92
    assert HEADER.unpack_from(response) == (0, 0, 76, request_id)


def assert_quiet(daemon: Daemon) -> None:
    """The daemon sleeps: it takes no processor time worth a clock tick while nothing happens."""
    before = daemon.cpu_seconds()
    time.sleep(0.3)
    assert daemon.cpu_seconds() - before <= 0.02


# -- R1


def test_r1_kicked_before_enable_completes_once_after_it(daemon: Daemon) -> None:
    with Vm(daemon.path) as vm:
        vm.negotiate()
        vm.share()
        vm.set_up()
        head = vm.publish(info())
        vm.ring_bell()
        time.sleep(0.05)
        assert vm.queue.collect() is None, "disabled rings are not processed"
        vm.enable()
        used = vm.collect()
        assert used == (head, 92)
        assert_good(vm.response()[:92])
        time.sleep(0.05)
        assert vm.queue.collect() is None
        assert os.eventfd_read(vm.call) == 1


def test_r1_eventfd_that_is_already_non_zero(daemon: Daemon) -> None:
    with Vm(daemon.path) as vm:
        vm.negotiate()
        vm.share()
        vm.publish(info())
        vm.ring_bell()
        vm.set_up()
        vm.enable()
        assert vm.collect() == (0, 92)
        time.sleep(0.05)
        assert vm.queue.collect() is None


def test_r1_kick_replaced_while_a_kick_is_pending(daemon: Daemon) -> None:
    with Vm(daemon.path).start() as vm:
        for number in range(50):
            vm.publish(info(number + 1))
            vm.ring_bell()
            os.close(vm.kick)
            vm.kick = os.eventfd(0, os.EFD_NONBLOCK)
            vm.front.tell(Request.SET_VRING_KICK, m.U64.pack(0), [vm.kick])
            assert vm.collect() is not None
            assert_good(vm.response()[:92], number + 1)


# -- R2


def test_r2_new_table_at_new_user_addresses_keeps_the_ring_working(daemon: Daemon) -> None:
    with Vm(daemon.path).start() as vm:
        assert_good(vm.call_device(info(1)), 1)
        more = Memory(0x10000, guest=GUEST + 0x100000, user=USER + 0x5000000)
        table = [moved(vm.memory, USER + 0x40000000), more.region]
        vm.front.tell(Request.SET_MEM_TABLE, m.encode_table(table), [vm.memory.fd, more.fd])
        assert_good(vm.call_device(info(2)), 2)
        more.view[:16] = info(3)
        vm.queue.publish([(more.region.guest_address, 16)], [(more.region.guest_address + 0x1000, 92)])
        vm.ring_bell()
        assert vm.collect() is not None
        assert_good(bytes(more.view[0x1000 : 0x1000 + 92]), 3)
        more.close()


def test_r2_table_without_the_ring_stops_it_and_the_next_table_runs_it_again(daemon: Daemon) -> None:
    with Vm(daemon.path).start() as vm:
        assert_good(vm.call_device(info(1)), 1)
        other = Memory(0x10000, guest=GUEST + 0x1000000, user=USER + 0x1000000)
        vm.share(other)
        vm.publish(info(2))
        vm.ring_bell()
        time.sleep(0.05)
        assert vm.queue.collect() is None
        assert daemon.alive()
        vm.share()
        assert vm.collect() is not None
        assert_good(vm.response()[:92], 2)
        other.close()


def test_r2_slots_added_and_removed_one_by_one(daemon: Daemon) -> None:
    slots = [Memory(0x1000, guest=GUEST + (i + 1) * 0x100000, user=USER + (i + 1) * 0x100000) for i in range(40)]
    with Vm(daemon.path) as vm:
        vm.negotiate()
        for memory in (vm.memory, *slots):
            vm.front.tell(Request.ADD_MEM_REG, m.encode_single_region(memory.region), [memory.fd])
        vm.set_up()
        vm.enable()
        for number, memory in enumerate(slots):
            memory.view[:16] = info(number + 1)
            vm.queue.publish([(memory.region.guest_address, 16)], [(memory.region.guest_address + 64, 92)])
            vm.ring_bell()
            assert vm.collect() is not None
            assert_good(bytes(memory.view[64:156]), number + 1)
        held = daemon.fds()
        for memory in slots:
            vm.front.tell(Request.REM_MEM_REG, m.encode_single_region(memory.region), [])
        assert daemon.fds() == held - len(slots)
        vm.queue.publish([(slots[0].region.guest_address, 16)], [(GUEST + FRAMES_AT, 92)])
        vm.ring_bell()
        assert vm.collect() == (0, 0), "the chain is broken, its head comes back empty"
        assert_good(vm.call_device(info(9)), 9)
    for memory in slots:
        memory.close()


def test_memory_regions_are_refused_one_by_one(daemon: Daemon) -> None:
    with Vm(daemon.path).start() as vm:
        at = vm.memory.region
        bad = [
            at,  # twice
            at._replace(guest_address=at.guest_address + at.size, user_address=at.user_address + 0x1000),  # overlaps
            at._replace(guest_address=0, user_address=0, size=0),
            at._replace(guest_address=0, user_address=0, size=at.size + 1),  # longer than its file
            at._replace(guest_address=0, user_address=0, offset=1),
            at._replace(guest_address=0, user_address=0, offset=(1 << 64) - 4096),
            at._replace(guest_address=0, user_address=0, size=1 << 63),
            at._replace(guest_address=(1 << 64) - 4096, user_address=0),
            at._replace(guest_address=0, user_address=(1 << 64) - 4096),
        ]
        before = daemon.fds()
        for region in bad:
            with pytest.raises(TransportError, match="refuses"):
                vm.front.tell(Request.ADD_MEM_REG, m.encode_single_region(region), [vm.memory.fd])
            with pytest.raises(TransportError, match="refuses"):
                vm.front.tell(Request.SET_MEM_TABLE, m.encode_table([at, region]), [vm.memory.fd, vm.memory.fd])
        with pytest.raises(TransportError, match="refuses"):
            vm.front.tell(Request.REM_MEM_REG, m.encode_single_region(at._replace(size=4096)))
        assert daemon.fds() == before
        assert_good(vm.call_device(info()))


def test_memory_that_cannot_be_written_or_is_no_file_is_refused(daemon: Daemon) -> None:
    other = Memory(guest=0, user=0)
    with (
        Vm(daemon.path).start() as vm,
        open(f"/proc/self/fd/{other.fd}", "rb") as read_only,
        open("/dev/zero", "r+b", buffering=0) as zero,
    ):
        region = other.region
        for fd in (read_only.fileno(), zero.fileno(), vm.kick, vm.front.fileno()):
            with pytest.raises(TransportError, match="refuses"):
                vm.front.tell(Request.ADD_MEM_REG, m.encode_single_region(region), [fd])
        assert_good(vm.call_device(info()))


@pytest.mark.parametrize("offset", [1, 4095, 4096, 12345])
def test_regions_may_begin_anywhere_in_their_file(daemon: Daemon, offset: int) -> None:
    """The ring itself needs its alignment in this process too; data does not."""
    odd = Memory(0x3000, guest=0x5000, user=0x5000, offset=offset)
    with Vm(daemon.path) as vm:
        vm.start(vm.memory, odd)
        odd.view[0x10:0x20] = info(7)
        vm.queue.publish([(0x5010, 16)], [(0x6000, 92)])
        vm.ring_bell()
        assert vm.collect() is not None
        assert_good(bytes(odd.view[0x1000 : 0x1000 + 92]), 7)
    odd.close()


# -- R3: bad chains are the protocol suite's, which test_fuzz_elsewhere.py runs over a socket


def test_available_index_that_jumps_stops_the_ring_and_signals_the_error(daemon: Daemon) -> None:
    with Vm(daemon.path).start() as vm:
        assert_good(vm.call_device(info(1)), 1)
        available = place(vm.size).available
        vm.memory.view[available + 2 : available + 4] = (1 + vm.size + 1).to_bytes(2, "little")
        vm.ring_bell()
        assert readable(vm.error, 5.0)
        vm.ring_bell()
        vm.ring_bell()
        assert_quiet(daemon)
        assert vm.stop() == 1
        vm.begin_anew()
        assert_good(vm.call_device(info(2)), 2)


# -- R4


@pytest.mark.parametrize("size", [8, 256])
def test_r4_more_commands_than_indices(daemon: Daemon, size: int) -> None:
    """70,000 commands, in batches of up to half the ring: every ID comes back with its own answer."""
    with Vm(daemon.path, size=size).start() as vm:
        pairs = min(size // 2, 128)
        slots = [vm.place(info(), slot) for slot in range(pairs)]
        responses = [FRAMES_AT + slot * 1024 + 512 for slot in range(pairs)]
        view, queue = vm.memory.view, vm.queue
        done, total = 0, 70_000
        while done < total:
            heads = {}
            for slot in range(min(pairs, total - done)):
                frame_at = FRAMES_AT + slot * 1024
                view[frame_at + 8 : frame_at + 16] = (done + slot + 1).to_bytes(8, "little")
                heads[queue.publish([slots[slot][0]], [slots[slot][1]])] = slot
            if queue.should_kick():
                vm.ring_bell()
            while heads:
                used = vm.collect()
                assert used is not None
                slot = heads.pop(used.head)
                assert used.written == 92
                at = responses[slot]
                assert HEADER.unpack_from(view, at) == (0, 0, 76, done + slot + 1)
            done += min(pairs, total - done)


# -- R5


def test_r5_without_a_call_descriptor_completions_are_still_published(daemon: Daemon) -> None:
    with Vm(daemon.path) as vm:
        vm.start(call=False)
        assert_good(vm.call_device(info(1)), 1)
        vm.front.tell(Request.SET_VRING_CALL, m.U64.pack(0), [vm.call])
        vm.front.tell(Request.SET_VRING_CALL, m.U64.pack(0x100))
        assert_good(vm.call_device(info(2)), 2)


def test_r5_no_interrupt_means_no_call(daemon: Daemon) -> None:
    with Vm(daemon.path).start() as vm:
        vm.queue.disable_interrupts()
        for number in range(20):
            assert_good(vm.call_device(info(number + 1)), number + 1)
        assert not readable(vm.call, 0.05)
        vm.queue.enable_interrupts()
        assert_good(vm.call_device(info(99)), 99)
        assert readable(vm.call, 5.0)


def test_r5_polled_ring_without_a_kick_descriptor(daemon: Daemon) -> None:
    with Vm(daemon.path) as vm:
        vm.negotiate()
        vm.share()
        vm.set_up(kick=False)
        vm.front.tell(Request.SET_VRING_KICK, m.U64.pack(0x100))
        vm.enable()
        for number in range(5):
            vm.publish(info(number + 1))
            assert vm.collect() is not None
            assert_good(vm.response()[:92], number + 1)
    assert_quiet(daemon)


def test_r5_no_wake_up_is_lost(daemon: Daemon) -> None:
    """10,000 rounds of publish against suppression both ways: kicks only when asked for, waiting only on the call."""
    with Vm(daemon.path).start() as vm:
        queue = vm.queue
        ranges = vm.place(info(1))
        for number in range(10_000):
            queue.publish([ranges[0]], [ranges[1]])
            if queue.should_kick():
                vm.ring_bell()
            while queue.collect() is None:
                if not queue.enable_interrupts():
                    assert readable(vm.call, 10.0), f"lost in round {number}"
                queue.disable_interrupts()
                if readable(vm.call):
                    os.eventfd_read(vm.call)


def test_a_front_end_that_fills_or_steals_event_counters_blocks_nobody(daemon: Daemon) -> None:
    """Blocking eventfds: a full call counter and a kick that is gone before it is read must not stop the one thread."""
    with Vm(daemon.path) as vm:
        os.close(vm.call)
        os.close(vm.kick)
        vm.call, vm.kick = os.eventfd(0), os.eventfd(0)
        os.eventfd_write(vm.call, 2**64 - 2)
        vm.start()
        assert_good(vm.call_device(info(1)), 1)
        stop = threading.Event()

        def steal() -> None:
            os.set_blocking(vm.kick, True)
            while not stop.is_set():
                if readable(vm.kick, 0.01):
                    os.read(vm.kick, 8)

        thief = threading.Thread(target=steal, daemon=True)
        thief.start()
        try:
            for _ in range(500):
                vm.ring_bell()
        finally:
            stop.set()
            for _ in range(1000):  # it may be left waiting for a kick that the device took, and wants one of its own
                vm.ring_bell()
                thief.join(0.01)
                if not thief.is_alive():
                    break
        assert not thief.is_alive()
        assert m.decode_u64(vm.front.ask(Request.GET_QUEUE_NUM)) == 1


# -- R6


@pytest.mark.parametrize("size", [0, 3, 32768, 65536])
def test_r6_ring_sizes(daemon: Daemon, size: int) -> None:
    with Vm(daemon.path).start() as vm:
        vm.stop()
        with pytest.raises(TransportError, match="refuses"):
            vm.front.tell(Request.SET_VRING_NUM, m.encode_vring_state(0, size))
        vm.begin_anew()
        assert_good(vm.call_device(info()))


def test_r6_largest_ring(folder: object, tmp_path_factory: pytest.TempPathFactory) -> None:
    with Daemon(tmp_path_factory.mktemp("largest"), "--queue-size", "32768") as daemon:
        memory = Memory(0x400000)
        with Vm(daemon.path, size=32768, memory=memory) as vm:
            vm.start()
            memory.view[0x200000:0x200010] = info(3)
            vm.queue.publish([(GUEST + 0x200000, 16)], [(GUEST + 0x201000, 92)])
            vm.ring_bell()
            assert vm.collect() is not None
            assert_good(bytes(memory.view[0x201000 : 0x201000 + 92]), 3)


@pytest.mark.parametrize("shift", [1, 8, 1 << 30, (1 << 63) - (1 << 40)])
def test_r6_ring_addresses(daemon: Daemon, shift: int) -> None:
    with Vm(daemon.path).start() as vm:
        vm.stop()
        fields = m.decode_vring_address(vm.addresses())
        vm.front.tell(Request.SET_VRING_NUM, m.encode_vring_state(0, vm.size))
        for part, step in (("descriptors", shift), ("available", shift | 1), ("used", shift | 2)):
            wrong = fields._replace(**{part: getattr(fields, part) + step})
            with pytest.raises(TransportError, match="refuses"):
                vm.front.tell(Request.SET_VRING_ADDR, m.VRING_ADDRESS.pack(*wrong))
        vm.begin_anew()
        assert_good(vm.call_device(info()))
