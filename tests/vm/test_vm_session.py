"""One guest in QEMU against a real daemon: traffic, driver reset, pause, system reset. Each test is one step.

The oracles are the models' known answers (LiteRT's for the shared one) and, for the slow program, a permutation that
needs no arithmetic. What the guest reports is judged here, on the host.
"""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from guests import assert_dead, assert_traffic, status_of, value_of

from virtaccel.vm.machine import GuestFailure, Machine
from virtaccel.vm.session import VmSession

pytestmark = [pytest.mark.vm, pytest.mark.timeout(400)]
PENDING = 4
MIB = 1 << 20
TRANSFERS = 3


def test_1000_commands_and_20_submissions(guest: Machine) -> None:
    assert_traffic(guest)


def test_a_shared_network_gives_the_answers_of_its_makers(guest: Machine, shared: Any) -> None:
    guest.ask("load", model="/job/face.tosa", check="/job/face.npz")
    done = guest.ask("submissions", count=3)
    assert (done["count"], done["right"]) == (3, 3)


def test_the_guest_program_tells_a_wrong_answer_from_a_right_one(vm: VmSession) -> None:
    assert vm.machine is not None
    vm.machine.ask("close")
    run = ["run", "/job/digits.tosa", "--check"]
    status, text, _ = vm.machine.run_program([*run, "/job/digits0.npz"], [], 60)
    assert (status, text.count("good")) == (0, 2), text
    status, text, _ = vm.machine.run_program([*run, "/job/wrong.npz"], [], 60)
    assert (status, text.count("MISMATCH")) == (1, 1), text


def test_outputs_come_back_to_the_host(vm: VmSession) -> None:
    assert vm.machine is not None
    vm.machine.ask("close")
    run = ["run", "/job/digits.tosa", "--check", "/job/digits1.npz", "--output", "/tmp/result.npz"]
    status, text, files = vm.machine.run_program(run, ["/tmp/result.npz"], 60)
    assert status == 0, text
    assert files["/tmp/result.npz"][:2] == b"PK"


@pytest.mark.parametrize(
    ("options", "held"),
    [
        ({"interrupts": True}, "interrupts; huge pages"),
        ({"interrupts": False}, "polling; huge pages"),
        ({"huge_pages": False}, "interrupts; ordinary pages, locked and pinned"),
    ],
)
def test_each_way_of_waiting_and_of_holding_memory(guest: Machine, options: dict[str, bool], held: str) -> None:
    opened = guest.ask("open", **options)
    assert opened["how"].startswith(held)
    # Loading takes longer than the driver looks without waiting.
    assert_traffic(guest, commands=200, submissions=5)
    interrupts = guest.ask("commands", count=1)["interrupts"]
    assert (interrupts > 0) is options.get("interrupts", True)


def test_ordinary_pages_carry_large_frames_in_many_descriptors(guest: Machine, shared: Any) -> None:
    opened = guest.ask("open", huge_pages=False)
    limits = dict(zip(("max_chain", "max_request", "max_response"), opened["config"][3:], strict=True))
    assert limits["max_request"] < limits["max_chain"] * 4096
    guest.ask("load", model="/job/face.tosa", check="/job/face.npz")
    assert guest.ask("submissions", count=2)["right"] == 2
    with pytest.raises(GuestFailure, match=r"ModelError: .* takes models of up to \d+"):
        guest.ask("load", model="/job/slow.tosa")


# virtio 1.3, section 4.1.4.3: offset and width of each field of the common configuration that a driver may touch.
COMMON_WIDTHS = {0x00: 4, 0x04: 4, 0x08: 4, 0x0C: 4, 0x10: 2, 0x12: 2, 0x14: 1, 0x15: 1, 0x16: 2, 0x18: 2, 0x1A: 2}
COMMON_WIDTHS |= {0x1C: 2, 0x1E: 2, 0x20: 4, 0x24: 4, 0x28: 4, 0x2C: 4, 0x30: 4, 0x34: 4}
DEVICE_WIDTHS = {0: 2, 2: 2, 4: 2, 6: 2, 8: 4, 12: 4}
ACCESS = re.compile(
    r"memory_region_ops_(read|write) .* addr 0x(\w+) value \w+ size (\d) name 'virtio-pci-(\w+)-virtio-signal'"
)


def test_every_register_is_accessed_by_its_own_width(vm: VmSession, guest: Machine) -> None:
    """As QEMU sees it: each access is one of the width that the standard gives the field."""
    guest.ask("close")
    log = vm.folder / "qemu.log"
    before = log.stat().st_size
    for enable in (True, False):
        for direction in ("read", "write"):
            guest.qmp.execute("trace-event-set-state", name=f"memory_region_ops_{direction}", enable=enable)
        if enable:
            guest.ask("open")
            guest.ask("commands", count=3)
    seen: dict[str, set[tuple[int, int]]] = {}
    for _, address, size, window in ACCESS.findall(log.read_text(errors="replace")[before:]):
        seen.setdefault(window, set()).add((int(address, 16) & 0xFFF, int(size)))
    assert seen["common"] <= set(COMMON_WIDTHS.items())
    assert {0x14, 0x18, 0x20, 0x28, 0x30, 0x1C} <= {offset for offset, _ in seen["common"]}
    assert seen["device"] == set(DEVICE_WIDTHS.items())
    assert seen.get("notify", set()) <= {(0, 2)}, "section 4.1.5.2: a queue's number as 16 bits"


def test_driver_reset_and_again(guest: Machine) -> None:
    before = assert_traffic(guest)
    guest.ask("reset")
    assert_dead(guest, before)
    assert_traffic(guest)


def test_stop_and_cont_with_work_pending_loses_nothing(guest: Machine) -> None:
    loaded = guest.ask("load", model="/job/slow.tosa", check="/job/slow.npz")
    guest.ask("begin", count=PENDING)
    guest.qmp.execute("stop")
    assert guest.qmp.execute("query-status")["status"] == "paused"
    time.sleep(1.0)
    guest.qmp.execute("cont")
    admitted = guest.ask("admitted")
    assert admitted["refused"] == []
    assert len(set(admitted["events"])) == PENDING
    done = guest.ask("finish")
    assert (done["finished"], done["right"]) == (PENDING, PENDING)
    # The same objects serve on: nothing was reset behind the guest's back.
    done = guest.ask("submissions", count=1)
    assert done["right"] == 1
    assert status_of(guest, "free_buffer", loaded["buffers"][0]) == "OK"


def test_stop_and_cont_in_the_middle_of_commands(guest: Machine) -> None:
    guest.send("commands", count=5000)
    for _ in range(5):
        time.sleep(0.1)
        guest.qmp.execute("stop")
        time.sleep(0.1)
        guest.qmp.execute("cont")
    answer = guest.answer()
    assert (answer["count"], answer["answers"]) == (5000, 1)


def allocate_until_refused(guest: Machine) -> tuple[int, str]:
    """How many buffers of 16 MiB the device gives, and how it refuses the next one."""
    context = value_of(guest, "create_context")
    for count in range(64):
        status = status_of(guest, "allocate_buffer", context, 16 * MIB, TRANSFERS, domain=1)
        if status != "OK":
            return count, status
    raise AssertionError("the budget has no end")


def test_system_reset_with_submissions_pending(vm: VmSession, guest: Machine) -> None:
    budget = allocate_until_refused(guest)
    assert budget[0] > 0
    assert budget[1] == "RESOURCE_LIMIT"
    guest.ask("reset")
    info = value_of(guest, "get_device_info")
    for _ in range(info["max_contexts"] - 1):
        value_of(guest, "create_context")
    loaded = guest.ask("load", model="/job/slow.tosa", check="/job/slow.npz")
    assert status_of(guest, "create_context") == "RESOURCE_LIMIT"
    guest.ask("begin", count=PENDING)
    events = guest.ask("admitted")["events"]
    assert len(events) == PENDING
    assert "PENDING" in guest.ask("states")["states"], "the program is too quick for this test"

    guest.system_reset()
    greeting = guest.wait_ready()
    assert greeting["hello"] == "virtaccel"
    assert vm.daemon.status is None, "the daemon outlives its guest's reboot"

    guest.ask("open")
    assert_dead(guest, loaded, events)
    for _ in range(info["max_contexts"]):
        value_of(guest, "create_context")
    assert status_of(guest, "create_context") == "RESOURCE_LIMIT"
    guest.ask("reset")
    assert allocate_until_refused(guest) == budget
    guest.ask("reset")
    assert_traffic(guest)


def test_a_killed_driver_leaves_no_device_that_writes_into_freed_memory(vm: VmSession, guest: Machine) -> None:
    run = ["run", "/job/slow.tosa", "--check", "/job/slow.npz", "--repeat", "1000"]
    ended = guest.ask("killed", argv=run, seconds=8.0)
    assert ended == pytest.approx({"running": True, "master": False, "seconds": ended["seconds"]})
    guest.ask("open")
    assert_traffic(guest, commands=100, submissions=3)


def test_new_buffers_are_zero_after_another_guest_life(guest: Machine) -> None:
    guest.ask("load", model="/job/slow.tosa", check="/job/slow.npz")
    guest.ask("reset")
    context = value_of(guest, "create_context")
    for _ in range(4):
        buffer = value_of(guest, "allocate_buffer", context, 4 * MIB, TRANSFERS, domain=1)
        read = guest.ask("digest", buffer=buffer, size=4 * MIB)
        assert read["nonzero"] == 0


def test_an_operation_that_fails_is_an_answer(guest: Machine) -> None:
    with pytest.raises(GuestFailure, match="no operation"):
        guest.ask("nonsense")
    with pytest.raises(GuestFailure) as caught:
        guest.ask("call", name="free_buffer", arguments=[12345])
    assert caught.value.status == "STALE_OBJECT"
