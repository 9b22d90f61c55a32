"""Slow work and its end, on OpenVINO over a real socket: cases L1 to L3 of the field."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from daemons import Daemon
from slow_graphs import rotated, rotations

from virtaccel.device.vhost_user import message as m
from virtaccel.device.vhost_user.message import Request
from virtaccel.device.wire import EventState, Status, Usage
from virtaccel.guest_tools.arrays import accelerator
from virtaccel.guest_tools.arrays.accelerator import Accelerator
from virtaccel.guest_tools.arrays.program import Invocation
from virtaccel.guest_tools.client import Buffer, Client, DeviceError, Event
from virtaccel.guest_tools.client import Request as Command
from virtaccel.guest_tools.transport.base import TransportError
from virtaccel.guest_tools.transport.vhost_user import VhostUserTransport

SIZE, STEPS = 512, 160
BUDGET = 256 << 20


@pytest.fixture(scope="module")
def openvino_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(
        tmp_path_factory.mktemp("openvino"), "--max-backing-bytes", str(BUDGET), backend="openvino"
    ) as daemon:
        yield daemon
        assert daemon.stop() == 0


@pytest.fixture(scope="module")
def slow_model() -> bytes:
    """Most of a second of work for one submission on two cores."""
    return rotations(SIZE, STEPS)


class Slow(NamedTuple):
    """A loaded slow program with its input, and one event per submission under way."""

    device: Accelerator
    runs: list[Invocation]
    events: list[Event]
    x: np.ndarray


def begin(daemon: Daemon, model: bytes, count: int) -> Slow:
    device = accelerator.open(f"vhost-user:{daemon.path}", patience=60.0)
    program = device.load(model)
    x = np.random.default_rng(1).standard_normal((1, SIZE, SIZE)).astype(np.float32)
    runs = [program.new_invocation() for _ in range(count)]
    for run in runs:
        run.write([x])
    events = []
    for run in runs:
        pending = run.submit()
        assert pending._event is not None
        events.append(pending._event)
    assert status(device, device.session.client.poll_event(events[-1])) == 0
    return Slow(device, runs, events, x)


def transport(device: Accelerator) -> VhostUserTransport:
    found = device.session.transport
    assert isinstance(found, VhostUserTransport)
    return found


def status(device: Accelerator, command: Command[object]) -> int:
    """The status that a command ends with."""
    try:
        device.session.call(command)
    except DeviceError as error:
        return error.status
    return 0


def pending(slow: Slow) -> int:
    session = slow.device.session
    states = [session.call(session.client.poll_event(event)).state for event in slow.events]
    return states.count(EventState.PENDING)


def assert_right_answers(daemon: Daemon) -> None:
    """A new front end gets a small program's exact answer."""
    with accelerator.open(f"vhost-user:{daemon.path}", patience=60.0) as device:
        x = np.random.default_rng(2).standard_normal((1, 16, 16)).astype(np.float32)
        (y,) = device.load(rotations(16, 3))(x)
        np.testing.assert_array_equal(y, rotated(x, 3))


def leave(slow: Slow) -> None:
    """Go away without tidying up, as a guest that is killed does."""
    slow.device.session.close()


def test_l1_what_a_running_submission_uses_cannot_be_taken_away(openvino_daemon: Daemon, slow_model: bytes) -> None:
    slow = begin(openvino_daemon, slow_model, 1)
    device, client = slow.device, slow.device.session.client
    run = slow.runs[0]
    for command in (
        *(client.free_buffer(buffer.id) for buffer in run.buffers),
        client.destroy_context(device.context), client.destroy_queue(device.queue),
        client.unload_program(run.program.id), client.destroy_event(slow.events[0]),
        client.write_buffer(run.buffers[0].id, 0, bytes(8)),
    ):  # fmt: skip
        assert status(device, command) == Status.BUSY
    assert pending(slow) == 1, "all of that while it ran"
    device.session.wait(slow.events[0], 60.0)
    (y,) = run.read()
    np.testing.assert_array_equal(y, rotated(slow.x, STEPS))
    leave(slow)


@pytest.mark.parametrize("how", ["close", "reset", "smaller table"])
def test_l1_the_session_ends_while_native_code_runs(openvino_daemon: Daemon, slow_model: bytes, how: str) -> None:
    slow = begin(openvino_daemon, slow_model, 2)
    front = transport(slow.device)._live()
    if how == "reset":
        slow.device.session.reset()
    elif how == "smaller table":
        other = m.MemoryRegion(1 << 40, 4096, 1 << 40, 0)
        front.tell(Request.SET_MEM_TABLE, m.encode_table([other]), [transport(slow.device)._fd])
    leave(slow)
    assert_right_answers(openvino_daemon)
    time.sleep(1.0)
    assert_right_answers(openvino_daemon)


def test_l2_terminated_with_eight_submissions_running(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Daemon(tmp_path_factory.mktemp("terminated"), backend="openvino") as daemon:
        slow = begin(daemon, rotations(SIZE, STEPS), 8)
        assert pending(slow) > 0
        assert daemon.stop(timeout=5.0) == 0
        with pytest.raises(TransportError):
            slow.device.session.call(slow.device.session.client.get_device_info())
        leave(slow)


def test_l2_closed_and_terminated_with_eight_submissions_running(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Daemon(tmp_path_factory.mktemp("closed"), backend="openvino") as daemon:
        slow = begin(daemon, rotations(SIZE, STEPS), 8)
        leave(slow)
        assert daemon.stop(timeout=5.0) == 0


AT_ONCE = 1 / 20
"""How much of the time of what goes on meanwhile an answer may take: one that waited for it would take all of it."""


def round_trips(device: Accelerator, count: int) -> float:
    """Median seconds of GET_DEVICE_INFO."""
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        device.session.call(device.session.client.get_device_info())
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


@pytest.mark.alone
def test_l2_others_are_answered_while_a_program_loads(openvino_daemon: Daemon) -> None:
    with accelerator.open(f"vhost-user:{openvino_daemon.path}", patience=60.0) as device:
        session, client = device.session, device.session.client
        command, began = load_command(device, rotations(SIZE, 900)), time.perf_counter()
        token = session.start(command)
        answered = round_trips(device, 50)
        assert session.finish(0) is None, "still loading"
        program = session.result(token)
        assert answered < AT_ONCE * (time.perf_counter() - began)
        session.call(client.unload_program(program))


@pytest.mark.alone
def test_l2_others_are_answered_while_a_submission_runs(openvino_daemon: Daemon, slow_model: bytes) -> None:
    began = time.perf_counter()
    slow = begin(openvino_daemon, slow_model, 1)
    answered = round_trips(slow.device, 50)
    assert pending(slow) == 1
    slow.device.session.wait(slow.events[0], 60.0)
    assert answered < AT_ONCE * (time.perf_counter() - began)
    leave(slow)


def load_command(device: Accelerator, model: bytes) -> Command[object]:
    from virtaccel.guest_tools.arrays.accelerator import parse
    from virtaccel.guest_tools.artifact import TOSA_FORMAT, target_words

    words = target_words(parse(model, "model"))
    return device.session.client.load_program(device.context, TOSA_FORMAT, words, model)


def every_id(slow: Slow) -> list[Command[object]]:
    client: Client = slow.device.session.client
    return [
        *(client.poll_event(event) for event in slow.events),
        *(client.destroy_event(event) for event in slow.events),
        *(client.free_buffer(buffer.id) for run in slow.runs for buffer in run.buffers),
        client.unload_program(slow.runs[0].program.id),
        client.destroy_queue(slow.device.queue),
        client.destroy_context(slow.device.context),
    ]


def reboot(front: VhostUserTransport) -> None:
    """What QEMU's generic device shows of a guest's reboot: the ring stops, and starts again from 0."""
    front._live().stop_ring()
    front._clear()
    front._start_ring()


@pytest.mark.parametrize("how", ["RESET_DEVICE", "reboot"])
def test_l3_reset_with_submissions_pending(openvino_daemon: Daemon, slow_model: bytes, how: str) -> None:
    slow = begin(openvino_daemon, slow_model, 4)
    device, client = slow.device, slow.device.session.client
    filling = device.session.call(
        client.allocate_buffer(device.context, BUDGET // 2, Usage.TRANSFER_DESTINATION, domain=device.domain)
    )
    device.session.write(filling, memoryview(b"\xa5" * 4096))
    if how == "reboot":
        reboot(transport(device))
    else:
        transport(device).reset()
    for command in every_id(slow):
        assert status(device, command) == Status.STALE_OBJECT
    # Quotas are back at zero: nearly the whole budget can be had again, and it is zeroed.
    context = device.session.call(client.create_context())
    size = BUDGET * 3 // 4
    fresh: Buffer = device.session.call(
        client.allocate_buffer(context, size, Usage.TRANSFER_SOURCE, domain=device.domain)
    )
    sink = bytearray(size)
    device.session.read(fresh, memoryview(sink))
    assert not any(sink)
    leave(slow)
    assert_right_answers(openvino_daemon)


@pytest.mark.parametrize("how", ["reset", "close"])
def test_l3_a_load_overtaken_by_a_reset_writes_nothing(openvino_daemon: Daemon, how: str) -> None:
    """The response of a program that was loading must not appear in memory that the guest uses anew."""
    device = accelerator.open(f"vhost-user:{openvino_daemon.path}", patience=60.0)
    front = transport(device)
    device.session.start(load_command(device, rotations(SIZE, 500)))
    if how == "reset":
        front.reset()
    else:
        front._live().close()
    assert front._memory is not None
    canary = b"\x5a" * len(front._memory)
    if how == "close":
        front._memory[:] = canary
        time.sleep(2.0)
        assert front._memory[:] == canary
    else:
        start = 1 << 20  # ring and small slots are in use again; the large frame and its response lay behind them
        front._memory[start:] = canary[start:]
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            device.session.call(device.session.client.get_device_info())
        assert front._memory[start:] == canary[start:]
    device.session.close()
    assert_right_answers(openvino_daemon)


def test_pause_and_resume_lose_nothing(openvino_daemon: Daemon, slow_model: bytes) -> None:
    """Stopped and started at the same base, as for QMP stop and cont: objects live, pending work and a load go on."""
    slow = begin(openvino_daemon, slow_model, 1)
    device = slow.device
    front = transport(device)
    token = device.session.start(load_command(device, rotations(SIZE, 300)))
    live = front._live()
    base = live.stop_ring()
    time.sleep(1.0)
    placement = m.VringAddress(0, 0, *(part - (1 << 32) + 0x5600_0000_0000 for part in front._ring.placement), 0)
    swapped = placement._replace(used=placement.available, available=placement.used)
    for request, payload, fds in (
        (Request.SET_VRING_NUM, m.encode_vring_state(0, 256), []),
        (Request.SET_VRING_BASE, m.encode_vring_state(0, base), []),
        (Request.SET_VRING_ADDR, m.VRING_ADDRESS.pack(*swapped), []),
        (Request.SET_VRING_KICK, m.U64.pack(0), [front._kick]),
        (Request.SET_VRING_ENABLE, m.encode_vring_state(0, 1), []),
    ):
        live.tell(request, payload, fds)
    assert device.session.result(token)
    assert device.session.wait(slow.events[0], 60.0).state == EventState.COMPLETE
    (y,) = slow.runs[0].read()
    np.testing.assert_array_equal(y, rotated(slow.x, STEPS))
    leave(slow)
