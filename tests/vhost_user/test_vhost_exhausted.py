"""Descriptors and memory run out in the daemon while a front end hands over its own, and front ends close theirs: the
session ends or the request is refused, everything is given back, and the next front end is served."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from daemons import Daemon, Memory, Vm, wait_until
from frames import request

from virtaccel.device.vhost_user import message as m
from virtaccel.device.vhost_user.message import Request
from virtaccel.guest_tools.transport.base import TransportError


@contextmanager
def lowered(daemon: Daemon, kind: int, value: int) -> Iterator[None]:
    before = resource.prlimit(daemon.process.pid, kind)
    resource.prlimit(daemon.process.pid, kind, (value, before[1]))
    try:
        yield
    finally:
        resource.prlimit(daemon.process.pid, kind, before)


def assert_served(daemon: Daemon) -> None:
    with Vm(daemon.path).start() as vm:
        assert len(vm.call_device(request(1))) == 92


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as made:
        assert_served(made)
        wait_until(lambda: "released" in made.log(), "the first has gone", made)
        before = made.idle_fds()
        yield made
        wait_until(lambda: made.fds() == before, "no descriptor is left", made)
        assert_served(made)
        assert "Traceback" not in made.log()
        assert made.stop() == 0


def test_no_descriptors_left_for_those_of_a_message_ends_its_session(daemon: Daemon) -> None:
    """The kernel then drops the descriptors and says so (MSG_CTRUNC)."""
    with Vm(daemon.path) as vm:
        vm.negotiate()
        with lowered(daemon, resource.RLIMIT_NOFILE, daemon.fds()), pytest.raises(TransportError):
            vm.share()


def test_no_memory_left_for_the_guests_is_a_refusal(daemon: Daemon) -> None:
    with Vm(daemon.path, memory=Memory(64 << 20)) as vm:
        vm.negotiate()
        most = (daemon.status("VmSize") << 10) + (8 << 20)
        with lowered(daemon, resource.RLIMIT_AS, most), pytest.raises(TransportError, match="refuses"):
            vm.share()
        vm.share()
        vm.set_up()
        vm.enable()
        assert len(vm.call_device(request(1))) == 92


def test_event_descriptors_whose_other_end_is_closed_hold_up_nothing(daemon: Daemon) -> None:
    """Pipes in place of eventfds: a kick that is at its end, calls and errors that nobody reads."""
    with Vm(daemon.path) as vm:
        ours, closed = [], []
        for name in ("kick", "call", "error"):
            os.close(getattr(vm, name))
            reading, writing = os.pipe()
            given, kept = (reading, writing) if name == "kick" else (writing, reading)
            setattr(vm, name, given)
            (ours if name == "kick" else closed).append(kept)
        vm.start()
        os.write(ours[0], bytes(8))
        for fd in closed:
            os.close(fd)
        vm.publish(request(1))
        os.write(ours[0], bytes(8))
        assert vm.collect() is not None
        began = daemon.cpu_seconds()
        os.close(ours[0])
        time.sleep(1.0)
        assert daemon.cpu_seconds() - began < 0.3, "no busy loop"
        assert m.decode_u64(vm.front.ask(Request.GET_QUEUE_NUM)) == 1
