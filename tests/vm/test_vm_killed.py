"""QEMU killed in the middle of its guest's work: the daemon goes on, and the next VM on the same socket gets a device
that nothing of the dead one is left in. (A killed driver inside a guest that lives on: test_vm_session.py.)"""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest
from guests import assert_traffic, status_of, value_of

from virtaccel.vm.machine import Machine
from virtaccel.vm.qemu import Sysroot
from virtaccel.vm.session import Options, VmSession

pytestmark = [pytest.mark.vm, pytest.mark.timeout(400)]
PENDING = 3
MIB = 1 << 20
BACKING = 64 * MIB


def room(guest: Machine) -> int:
    """How many buffers of 4 MiB the device gives before it refuses; all of them are given back with the reset."""
    context = value_of(guest, "create_context")
    count = 0
    while (status := status_of(guest, "allocate_buffer", context, 4 * MIB, 3, domain=1)) == "OK":
        count += 1
    assert status == "RESOURCE_LIMIT"
    guest.ask("reset")
    return count


def test_the_next_vm_on_the_socket_of_a_killed_one_is_served(sysroot: Sysroot, job_files: dict[str, bytes]) -> None:
    with ExitStack() as stack:
        options = Options(files=job_files, daemon=("--max-backing-bytes", str(BACKING)))
        session = stack.enter_context(VmSession(options))
        victim = session.start()
        victim.ask("open", lost_after=20.0)
        most = room(victim)
        victim.ask("load", model="/job/slow.tosa", check="/job/slow.npz")
        victim.ask("begin", count=PENDING)
        assert len(victim.ask("admitted")["events"]) == PENDING
        victim.send("traffic", seconds=60.0)
        time.sleep(0.3)
        victim.qemu.kill()
        folder = session.folder / "next"
        folder.mkdir()
        heir = Machine(sysroot, session.pairing, folder, session.accelerator, job_files)
        stack.callback(heir.close)
        heir.wait_ready()
        heir.ask("open", lost_after=20.0)
        assert room(heir) == most > 0
        assert_traffic(heir, commands=200, submissions=5)
        assert session.daemon.status is None
        log = session.logs()["daemon.log"].decode(errors="replace")
        assert "Traceback" not in log
        assert "unexpected failure" not in log
