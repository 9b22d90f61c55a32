"""Trouble on our side of the socket: lost devices, replaced backends, loads whose memory goes away.

The loop, the sockets and the rings are the daemon's own, run in a thread of this process so that a scripted reference
backend can be told when to go wrong; no accelerator fails on demand.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from daemons import GUEST, USER, Memory, Vm, readable, wait_until
from frames import BUSY, CODES, DEVICE_LOST, OK, STALE_OBJECT, load, request

from virtaccel.device.backend import BackendUnavailable
from virtaccel.device.loop.event_loop import EventLoop
from virtaccel.device.reference import Break, Operation, Program, Reference, Script
from virtaccel.device.ring_service import Device
from virtaccel.device.vhost_user import message as m
from virtaccel.device.vhost_user import sockets
from virtaccel.device.vhost_user.guest import Settings
from virtaccel.device.vhost_user.message import Request
from virtaccel.device.vhost_user.server import Port
from virtaccel.virtqueue.driver import Used

ARTIFACT = Program(Operation.XOR, 1, 1, 1, 0).pack()


class Bench:
    """A port on a loop in a thread, and every backend that was opened for it, the present one last."""

    def __init__(self, path: Path, script: Script, loop: EventLoop) -> None:
        self.path = str(path)
        self.script = script
        self.loop = loop
        self.backends: list[Reference] = []
        self.unavailable = False

    def open(self) -> Reference:
        if self.unavailable:
            raise BackendUnavailable("none to be had")
        self.backends.append(Reference(script=self.script))
        return self.backends[-1]


@contextmanager
def bench(folder: Path, script: Script | None = None) -> Iterator[Bench]:
    loop = EventLoop()
    made = Bench(folder / "a", script or Script(), loop)
    port = Port(
        loop, sockets.listen(made.path), Device(made.open), Settings(), logging.getLogger("port"), lambda: None
    )
    wake, waker = os.pipe()
    loop.selector.register(wake, 1, (loop.stop, lambda error: None))
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield made
    finally:
        os.write(waker, b"x")
        thread.join(20)
        assert not thread.is_alive()
        port.close()
        loop.close()
        os.close(wake)
        os.close(waker)


def status(response: bytes) -> int:
    return int.from_bytes(response[:2], "little")


def create(vm: Vm) -> bytes:
    response = vm.call_device(request(CODES["CREATE_CONTEXT"], bytes(8)))
    assert status(response) == OK
    return response[16:]


def destroy(vm: Vm, context: bytes) -> int:
    return status(vm.call_device(request(CODES["DESTROY_CONTEXT"], context)))


def test_a_lost_device_is_told_in_every_way_there_is_and_a_reset_brings_another(tmp_path: Path) -> None:
    with bench(tmp_path) as made, Vm(made.path).start() as vm:
        context = create(vm)
        vm.front.tell(Request.SET_STATUS, m.U64.pack(0xF))
        made.script.next("create_context", Break(RuntimeError("broken by the test")))
        assert status(vm.call_device(request(CODES["CREATE_CONTEXT"], bytes(8)))) == DEVICE_LOST
        assert readable(vm.error, 10.0)
        assert os.eventfd_read(vm.error) == 1
        for _ in range(3):
            assert status(vm.call_device(request(CODES["GET_DEVICE_INFO"]))) == DEVICE_LOST
        assert not readable(vm.error), "told once"
        assert m.decode_u64(vm.front.ask(Request.GET_STATUS)) == 0x4F
        vm.front.tell(Request.RESET_DEVICE)
        assert len(made.backends) == 2
        vm.begin_anew()
        assert m.decode_u64(vm.front.ask(Request.GET_STATUS)) == 0xF
        assert destroy(vm, context) == STALE_OBJECT
        create(vm)


def test_a_reset_that_finds_no_backend_keeps_the_session_and_the_next_one_tries_again(tmp_path: Path) -> None:
    with bench(tmp_path) as made, Vm(made.path).start() as vm:
        made.script.next("create_context", Break(RuntimeError("broken by the test")))
        assert status(vm.call_device(request(CODES["CREATE_CONTEXT"], bytes(8)))) == DEVICE_LOST
        for unavailable in (True, True, False):
            made.unavailable = unavailable
            vm.front.tell(Request.RESET_DEVICE)
            vm.begin_anew()
            if unavailable:
                assert status(vm.call_device(request(CODES["GET_DEVICE_INFO"]))) == DEVICE_LOST
        create(vm)
        assert len(made.backends) == 2


def parked_load(vm: Vm, made: Bench, memory: Memory | None = None) -> tuple[bytes, int]:
    """A LOAD_PROGRAM under way, with its frame and response in `memory`; context and head."""
    context = create(vm)
    frame = request(CODES["LOAD_PROGRAM"], load(int.from_bytes(context, "little"), ARTIFACT), 77)
    if memory is None:
        head = vm.publish(frame, 1)
    else:
        memory.view[: len(frame)] = frame
        memory.view[512:] = bytes([0xC5]) * (len(memory.view) - 512)
        at = memory.region.guest_address
        head = vm.queue.publish([(at, len(frame))], [(at + 512, 64)])
    vm.ring_bell()
    wait_until(lambda: made.backends[-1].loading, "the load is under way")
    return context, head


def test_loads_complete_out_of_order_and_by_themselves(tmp_path: Path) -> None:
    with bench(tmp_path, Script(deferred_loads=True)) as made, Vm(made.path).start() as vm:
        context, head = parked_load(vm, made)
        for _ in range(5):
            assert destroy(vm, context) == BUSY
        made.backends[-1].finish_load()
        assert vm.collect() == Used(head, 24)
        assert status(vm.response(1)) == OK
        assert vm.response(1)[8:16] == (77).to_bytes(8, "little")


def test_loads_of_a_backend_opened_by_a_reset_complete_too(tmp_path: Path) -> None:
    """The replaced backend's descriptor is the one that is watched from then on."""
    with bench(tmp_path, Script(deferred_loads=True)) as made, Vm(made.path).start() as vm:
        made.script.next("create_context", Break(RuntimeError("broken by the test")))
        assert status(vm.call_device(request(CODES["CREATE_CONTEXT"], bytes(8)))) == DEVICE_LOST
        vm.front.tell(Request.RESET_DEVICE)
        vm.begin_anew()
        _, head = parked_load(vm, made)
        made.backends[-1].finish_load()
        assert vm.collect() == Used(head, 24)


def test_a_load_waits_for_its_paused_ring(tmp_path: Path) -> None:
    with bench(tmp_path, Script(deferred_loads=True)) as made, Vm(made.path).start() as vm:
        context, head = parked_load(vm, made)
        before = vm.response(1)
        base = vm.stop()
        assert base == 2
        made.backends[-1].finish_load()
        assert m.decode_u64(vm.front.ask(Request.GET_QUEUE_NUM)) == 1
        assert vm.queue.collect() is None
        assert vm.response(1) == before, "a stopped ring's memory is left alone"
        vm.set_up(base)
        vm.enable()
        assert vm.collect() == Used(head, 24)
        assert destroy(vm, context) == BUSY, "the program lives"


def test_a_load_dies_with_a_restart_from_zero(tmp_path: Path) -> None:
    with bench(tmp_path, Script(deferred_loads=True)) as made, Vm(made.path).start() as vm:
        context, _ = parked_load(vm, made)
        vm.stop()
        vm.queue.reset()
        before = vm.response(1)
        vm.set_up()
        vm.enable()
        made.backends[-1].finish_load()
        assert destroy(vm, context) == STALE_OBJECT
        assert vm.queue.collect() is None
        assert vm.response(1) == before
        assert made.backends[-1].live == 0


def test_a_load_whose_memory_goes_away_is_abandoned(tmp_path: Path) -> None:
    memory = Memory(4096, guest=GUEST + 0x1000000, user=USER + 0x1000000)
    with bench(tmp_path, Script(deferred_loads=True)) as made, Vm(made.path) as vm:
        vm.start(vm.memory, memory)
        context, head = parked_load(vm, made, memory)
        before = bytes(memory.view)
        vm.share(vm.memory)
        assert vm.collect() == Used(head, 0)
        made.backends[-1].finish_load()
        assert destroy(vm, context) == OK, "no program was made"
        assert bytes(memory.view) == before
    memory.close()


def test_a_load_keeps_its_memory_when_the_table_only_moves_it(tmp_path: Path) -> None:
    memory = Memory(4096, guest=GUEST + 0x1000000, user=USER + 0x1000000)
    with bench(tmp_path, Script(deferred_loads=True)) as made, Vm(made.path) as vm:
        vm.start(vm.memory, memory)
        _, head = parked_load(vm, made, memory)
        table = [vm.memory.region, memory.region._replace(user_address=USER + 0x2000000)]
        vm.front.tell(Request.SET_MEM_TABLE, m.encode_table(table), [vm.memory.fd, memory.fd])
        made.backends[-1].finish_load()
        assert vm.collect() == Used(head, 24)
        assert bytes(memory.view[520:528]) == (77).to_bytes(8, "little")
    memory.close()


def test_disconnect_gives_everything_back_to_the_backend(tmp_path: Path) -> None:
    with bench(tmp_path, Script(deferred_loads=True)) as made:
        with Vm(made.path).start() as vm:
            parked_load(vm, made)
            create(vm)
        wait_until(lambda: made.backends[-1].live == 0, "everything is given back")
        with Vm(made.path).start() as vm:
            create(vm)
        assert len(made.backends) == 1


def test_a_backend_that_is_lost_is_replaced_for_the_next_front_end(tmp_path: Path) -> None:
    with bench(tmp_path) as made:
        made.script.lost = True
        with Vm(made.path).start() as vm:
            assert status(vm.call_device(request(CODES["CREATE_CONTEXT"], bytes(8)))) == DEVICE_LOST
        made.script.lost = False
        with Vm(made.path).start() as vm:
            create(vm)
        assert len(made.backends) == 2
