"""Cases L4 to L6, and what L1 says of buffers, through the whole device: nothing left behind, one core, deadlines."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from graphs import Const, single
from slow_graphs import rotated, rotations

from virtaccel.backend_openvino import open_backend
from virtaccel.device.wire import EventState, Status
from virtaccel.guest_tools.arrays.accelerator import Accelerator
from virtaccel.guest_tools.arrays.program import Invocation
from virtaccel.guest_tools.client import DeviceError, Event
from virtaccel.guest_tools.client import Request as Command
from virtaccel.guest_tools.session import Session
from virtaccel.guest_tools.transport.in_process import InProcessTransport
from virtaccel.tosa_graph.graph import DType, Op

SIZE, STEPS = 1536, 12  # what was cancelled goes on until its present product is done, for tens of milliseconds


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_l4_2000_loads_leave_nothing_behind(accelerator: Accelerator) -> None:
    """One load in ten is compiled, which takes most of the time; the others find a program of the same bytes."""
    x = np.arange(8, dtype=np.float32)

    def adder(value: float) -> bytes:
        return single(Op.ADD, [((8,), DType.FP32), Const(np.full(8, value, np.float32))], ((8,), DType.FP32))

    def cycle(turn: int) -> None:
        value = turn if turn % 10 == 0 else -1
        program = accelerator.load(adder(value), "adder")
        np.testing.assert_array_equal(program(x)[0], x + value)
        program.close()

    kept = accelerator.load(adder(-1), "kept")
    for turn in range(600):
        cycle(turn)
    gc.collect()
    memory, threads, files = resident(), threading.active_count(), len(os.listdir("/proc/self/fd"))
    for turn in range(600, 2000):
        cycle(turn)
    gc.collect()
    kept.close()
    assert resident() - memory < 8 << 20
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files


def test_l5_100_resets_and_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ov.Core] = []

    class Counted(ov.Core):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(ov, "Core", Counted)
    session = Session(InProcessTransport(lambda: open_backend("CPU")))
    tosa = single(Op.ADD, [((8,), DType.FP32)] * 2, ((8,), DType.FP32))
    x = np.arange(8, dtype=np.float32)
    for turn in range(100):
        device = Accelerator(session)
        if turn % 10 == 0:
            np.testing.assert_array_equal(device.load(tosa, "adder")(x, x)[0], x + x)
        session.reset()  # with all of it alive
    session.close()
    assert len(made) <= 1, "none, where the process has had its core before"


# ---- L6


class Slow:
    """A program of most of a second, its buffers, and submissions of it."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.program = accelerator.load(rotations(SIZE, STEPS), "slow")
        self.run: Invocation = self.program.new_invocation()
        self.x = np.random.default_rng(6).standard_normal((1, SIZE, SIZE)).astype(np.float32)
        self.run.write([self.x])

    def submit(self, timeout_ns: int) -> Event:
        return self.accelerator.session.call(self.run.request(None, timeout_ns))

    def status(self, command: Command[object]) -> int:
        try:
            self.accelerator.session.call(command)
        except DeviceError as error:
            return error.status
        return Status.OK

    def wait_until_free(self) -> None:
        """Writes to both buffers until the device takes it."""
        client, end = self.accelerator.session.client, time.monotonic() + 30
        for buffer in self.run.buffers:
            while self.status(client.write_buffer(buffer.id, 0, bytes(8))) == Status.BUSY:
                assert time.monotonic() < end, "the work does not stop"
                time.sleep(0.001)


@pytest.fixture(scope="module")
def slow(accelerator: Accelerator) -> Iterator[Slow]:
    made = Slow(accelerator)
    yield made
    made.run.close()
    made.program.close()


def test_l6_a_deadline_of_a_nanosecond(slow: Slow) -> None:
    session, client = slow.accelerator.session, slow.accelerator.session.client
    event = slow.submit(1)
    time.sleep(0.01)  # what is cancelled before its thread has begun stops at once
    status = session.call(client.poll_event(event))
    assert (status.state, status.error) == (EventState.FAILED, Status.DEADLINE_EXPIRED)
    target = slow.run.buffers[1]
    assert slow.status(client.free_buffer(target.id)) == Status.BUSY, "the event holds it"
    assert slow.status(client.read_buffer(target.id, 0, memoryview(bytearray(8)))) == Status.BUSY, "work still runs"
    slow.wait_until_free()
    status = session.call(client.poll_event(event))
    assert (status.state, status.error) == (EventState.FAILED, Status.DEADLINE_EXPIRED), "terminal states stay"
    session.call(client.destroy_event(event))


def test_l6_no_limit_is_no_limit(slow: Slow) -> None:
    session, client = slow.accelerator.session, slow.accelerator.session.client
    slow.run.write([slow.x])
    event = slow.submit(0)
    assert session.wait(event, 60.0).state == EventState.COMPLETE
    session.call(client.destroy_event(event))
    np.testing.assert_array_equal(slow.run.read()[0], rotated(slow.x, STEPS))


def test_l1_buffers_of_running_work_are_nobody_else_s(slow: Slow) -> None:
    """Buffers allocated while work runs over others start as zeros and stay so; nothing in use can be freed."""
    session, client = slow.accelerator.session, slow.accelerator.session.client
    slow.run.write([slow.x])
    event = slow.submit(0)
    fresh = [slow.accelerator.buffer(SIZE * SIZE * 4) for _ in range(4)]
    for buffer in slow.run.buffers:
        assert slow.status(client.free_buffer(buffer.id)) == Status.BUSY
    assert slow.status(client.unload_program(slow.program.id)) == Status.BUSY
    assert session.call(client.poll_event(event)).state == EventState.PENDING, "all of that while it ran"
    gc.collect()  # takes as long as many runs, in a process that has run other tests
    assert session.wait(event, 60.0).state == EventState.COMPLETE
    session.call(client.destroy_event(event))
    held = np.empty(SIZE * SIZE, np.float32)
    for buffer in fresh:
        buffer.read(held)
        assert not held.any()
        buffer.free()
    np.testing.assert_array_equal(slow.run.read()[0], rotated(slow.x, STEPS))
