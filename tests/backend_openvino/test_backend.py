"""The OpenVINO backend through its contract: memory, guards, deadlines, cancellation, loads; on the real runtime."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import graphs
import numpy as np
import oracle
import pytest
from engine_room import UNBOUNDED, EngineRoom, artifact

from virtaccel.backend_openvino import compile as runtime
from virtaccel.backend_openvino import open_backend
from virtaccel.backend_openvino.backend import OpenVinoBackend
from virtaccel.backend_openvino.execution import quiesce
from virtaccel.device.backend import (
    RELEASED,
    BackendError,
    BackendUnavailable,
    Binding,
    BufferRequest,
    Loaded,
    Loading,
    Polled,
    Released,
    ReleaseRejected,
)
from virtaccel.device.wire import Access, EventState, Status
from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.write import GraphWriter

SIDE = 512
SLOW_BYTES = SIDE * SIDE * 4


@pytest.fixture
def backend() -> Iterator[OpenVinoBackend]:
    opened = open_backend("CPU")
    assert isinstance(opened, OpenVinoBackend)
    yield opened
    opened.close()
    assert quiesce(30)


@pytest.fixture
def room(backend: OpenVinoBackend) -> EngineRoom:
    return EngineRoom(backend)


def adder(value: float = 1.0, size: int = 8) -> bytes:
    constant = graphs.Const(np.full(size, value, np.float32))
    return graphs.single(Op.ADD, [((size,), DType.FP32), constant], ((size,), DType.FP32))


def slow(products: int = 400) -> bytes:
    """A chain of products that takes about a second or more."""
    writer = GraphWriter()
    x = writer.input("x", (1, SIDE, SIDE), DType.FP32)
    zero = writer.constant(np.zeros(1, np.float32))
    y = x
    for _ in range(products):
        y = writer.operator(Op.MATMUL, [y, x, zero, zero], ((1, SIDE, SIDE), DType.FP32))
    writer.output(y)
    return writer.to_bytes()


class Slow:
    """The slow program with its two buffers."""

    def __init__(self, room: EngineRoom, products: int = 400, program: object = None) -> None:
        self.room = room
        self.program = room.load(slow(products)) if program is None else program
        self.source, self.sink = room.buffer(SLOW_BYTES), room.buffer(SLOW_BYTES)
        self.bindings = [
            Binding(self.source, 0, SLOW_BYTES, 0, Access.READ),
            Binding(self.sink, 0, SLOW_BYTES, 1, Access.WRITE),
        ]

    def start(self, timeout_ns: int = 0) -> object:
        return self.room.submit(self.program, self.bindings, [], timeout_ns)


def mappings() -> int:
    """Mappings of buffer memory in this process."""
    gc.collect()
    return sum("memfd:virtaccel-buffers" in line for line in Path("/proc/self/maps").read_text().splitlines())


def until(condition: object, seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def test_buffers_are_bounded_by_what_a_process_may_map(
    backend: OpenVinoBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    from virtaccel.backend_openvino import buffers

    context = backend.create_context()
    monkeypatch.setattr(buffers, "MAX_BUFFERS", backend._arena._live[0] + 2)
    made = [backend.allocate_buffer(context, BufferRequest(64, 64, 3, 31)).handle for _ in range(2)]
    with pytest.raises(BackendError) as caught:
        backend.allocate_buffer(context, BufferRequest(64, 64, 3, 31))
    assert caught.value.status is Status.RESOURCE_LIMIT
    assert backend.free_buffer(made.pop()) is RELEASED
    backend.allocate_buffer(context, BufferRequest(64, 64, 3, 31))


# ---- devices


def test_unknown_device_names_those_there_are() -> None:
    with pytest.raises(BackendUnavailable, match=r"no device 'FPGA' here; there is .*CPU"):
        open_backend("FPGA")


def test_missing_runtime_is_told_apart() -> None:
    """A process without openvino: the real import system, with that one package hidden."""
    script = (
        "import sys; sys.modules['openvino'] = None\n"
        "from virtaccel.backend_openvino import open_backend\n"
        "from virtaccel.device.backend import BackendUnavailable\n"
        "try: open_backend()\n"
        "except BackendUnavailable as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "runtime is missing" in done.stdout
    assert "install" in done.stdout


def test_a_core_that_fails_and_an_enumeration_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for a broken runtime, which cannot be had on demand."""

    class Broken:
        @property
        def available_devices(self) -> list[str]:
            raise RuntimeError("plugins.xml is gone")

    monkeypatch.setattr(runtime, "_make_core", Broken)
    with pytest.raises(BackendUnavailable, match=r"cannot enumerate devices: plugins\.xml is gone"):
        open_backend()

    def fails() -> object:
        raise RuntimeError("no core today")

    monkeypatch.setattr(runtime, "_make_core", fails)
    with pytest.raises(BackendUnavailable, match="core does not start: no core today"):
        open_backend()


def test_l5_one_core_and_one_identity(backend: OpenVinoBackend) -> None:
    core, threads, files = runtime.core(), threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        again = open_backend("CPU")
        assert again.info == backend.info
        again.close()
    assert runtime.core() is core
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files


# ---- programs


def test_loads_are_refused_for_a_reason(room: EngineRoom, backend: OpenVinoBackend) -> None:
    good = artifact(adder())

    def load(given: object) -> None:
        outcome = backend.load_program(room.context, given)  # type: ignore[arg-type]
        while isinstance(outcome, Loading) and backend.poll_load(outcome.ticket) is None:
            backend.wait(1)

    def status(given: object) -> Status:
        with pytest.raises(BackendError) as caught:
            load(given)
        assert backend.last_refusal == str(caught.value)
        return caught.value.status

    assert status(good._replace(format=7)) is Status.UNSUPPORTED
    assert status(good._replace(resident_bytes=UNBOUNDED - 1)) is Status.RESOURCE_LIMIT
    assert status(good._replace(target=(0,) * 12)) is Status.INCOMPATIBLE
    words = list(good.target)
    words[7] |= 1 << 5  # FFT, of which no row is registered here unless it is offered
    if not backend.host.offered.extensions & (1 << 5):
        assert status(good._replace(target=tuple(words))) is Status.INCOMPATIBLE
    junk = b"\0" * 4096
    assert status(good._replace(payload=[memoryview(junk)], payload_bytes=4096)) is Status.INVALID_ARGUMENT
    custom = GraphWriter()
    x = custom.input("x", (4,), DType.FP32)
    custom.output(custom.operator(Op.CUSTOM, [x], ((4,), DType.FP32)))
    data = custom.to_bytes()
    assert status(good._replace(payload=[memoryview(data)], payload_bytes=len(data))) is Status.INCOMPATIBLE
    assert "CUSTOM" in str(backend.last_refusal)
    assert room.call(room.load(adder()), adder(), [np.arange(8, dtype=np.float32)])[0][7] == 8


def test_the_same_artifact_is_compiled_once(room: EngineRoom, backend: OpenVinoBackend) -> None:
    tosa = adder(17.0)
    first = room.load(tosa)
    again = backend.load_program(room.context, artifact(tosa))
    assert isinstance(again, Loaded)
    backend.unload_program(first)
    assert room.call(again.program, tosa, [np.zeros(8, np.float32)])[0].tolist() == [17.0] * 8
    backend.unload_program(again.program)


def test_a_load_does_not_hold_up_other_work(room: EngineRoom, backend: OpenVinoBackend) -> None:
    small = room.load(adder())
    outcome = backend.load_program(room.context, artifact(slow(401)))
    assert isinstance(outcome, Loading)
    assert room.call(small, adder(), [np.zeros(8, np.float32)])[0].tolist() == [1.0] * 8
    backend.abandon_load(outcome.ticket)
    waiting = backend.load_program(room.context, artifact(adder(2.5)))
    assert isinstance(waiting, Loading)
    assert until(lambda: backend.poll_load(waiting.ticket) is not None)


def test_explain_gives_a_verdict_for_each_operator(backend: OpenVinoBackend) -> None:
    writer = GraphWriter()
    x = writer.input("x", (4,), DType.FP32)
    strange = writer.operator(Op.CUSTOM, [x], ((4,), DType.FP32))
    writer.output(writer.operator(Op.ADD, [strange, x], ((4,), DType.FP32)))
    verdicts = backend.explain(writer.to_bytes(), artifact(adder()).target)
    assert [verdict.op for verdict in verdicts] == [Op.CUSTOM, Op.ADD]
    assert verdicts[0].reason is not None
    assert verdicts[1].reason is None
    assert backend.explain(adder())[-1].reason is None


def test_inputs_beyond_the_limit_get_the_careful_model(room: EngineRoom) -> None:
    """CLAMP keeps NaN, which the runtime's own clamp does not; the first submissions hold none."""
    attributes = {"min_val": np.float32(-1).tobytes(), "max_val": np.float32(2).tobytes(), "nan_mode": 1}
    tosa = graphs.single(Op.CLAMP, [((6,), DType.FP32)], ((6,), DType.FP32), attributes)
    program = room.load(tosa)
    plain = np.array([-3, -1, -0.0, 0.5, 2, 3], np.float32)
    strange = np.array([np.nan, np.inf, -np.inf, 1e38, -np.nan, 0.25], np.float32)
    for data in (plain, strange, plain):
        got, want = room.call(program, tosa, [data])[0], oracle.reference(tosa, [data])[0]
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("batch", [1, 2, 7, 1000])
def test_dynamic_batch_is_specialised(batch: int, room: EngineRoom, shared: Path) -> None:
    tosa = (shared / "models" / "sine_float.tosa").read_bytes()
    program = room.load(tosa)
    x = np.linspace(0, 6, batch, dtype=np.float32).reshape(batch, 1)
    [got] = room.call(program, tosa, [x], [(batch, 1)])
    np.testing.assert_allclose(got, dense_layers(tosa, x), rtol=0, atol=1e-5)
    assert np.abs(got - np.sin(x)).max() < 0.2


def dense_layers(tosa: bytes, x: np.ndarray) -> np.ndarray:
    """The three layers of sine_float (x W^T + b, all but the last cut at 0) in double precision: the reference model
    takes no unknown dimension."""
    block = read(tosa).main

    def array(name: str) -> np.ndarray:
        tensor = block.tensors[name]
        return np.frombuffer(tensor.data or b"", np.float32).reshape(tensor.shape).astype(np.float64)

    layers = [operator for operator in block.operators if operator.op is Op.CONV2D]
    y = x.astype(np.float64)
    for position, layer in enumerate(layers):
        weights = array(layer.inputs[1])
        y = y @ weights.reshape(weights.shape[0], -1).T + array(layer.inputs[2])
        y = np.maximum(y, 0) if position + 1 < len(layers) else y
    return y


def test_dynamic_sizes_that_do_not_divide_are_refused(room: EngineRoom, shared: Path) -> None:
    program = room.load((shared / "models" / "sine_float.tosa").read_bytes())
    x, y = room.buffer(64), room.buffer(64)
    bindings = [Binding(x, 0, 6, 0, Access.READ), Binding(y, 0, 8, 1, Access.WRITE)]
    assert room.refused(program, bindings) is Status.INCOMPATIBLE
    mismatched = [Binding(x, 0, 8, 0, Access.READ), Binding(y, 0, 12, 1, Access.WRITE)]
    event = room.submit(program, mismatched, [])
    assert room.finish(event) == Polled(EventState.FAILED, Status.INCOMPATIBLE)


# ---- buffers


def test_buffers_are_zeroed_aligned_and_apart(room: EngineRoom, backend: OpenVinoBackend) -> None:
    before = mappings()
    for alignment in (1, 64, 4096, 1 << 21):
        allocated = backend.allocate_buffer(room.context, BufferRequest(5000, alignment, 3, 31))
        assert allocated.allocation_bytes >= 5000
        assert allocated.alignment >= alignment
        assert allocated.direct
        assert allocated.handle.address % max(alignment, 4096) == 0  # type: ignore[attr-defined]
        assert room.bytes_of(allocated.handle, 5000) == bytes(5000)
        backend.write_buffer(allocated.handle, 0, [memoryview(b"\xff" * 5000)])
        assert backend.free_buffer(allocated.handle) is RELEASED
    assert mappings() == before


def test_what_cannot_be_allocated_is_said(room: EngineRoom, backend: OpenVinoBackend) -> None:
    with pytest.raises(BackendError) as caught:
        backend.allocate_buffer(room.context, BufferRequest(1 << 60, 64, 3, 31))
    assert caught.value.status is Status.OUT_OF_MEMORY
    with pytest.raises(BackendError) as caught:
        backend.allocate_buffer(room.context, BufferRequest(64, 1 << 62, 3, 31))
    assert caught.value.status is Status.RESOURCE_LIMIT


def test_guard_pages_stand_around_a_buffer() -> None:
    """Reading just past the end ends the process that does it."""
    script = (
        "import ctypes\n"
        "from virtaccel.backend_openvino.buffers import Arena\n"
        "array, _ = Arena().allocate(4096, 64)\n"
        "ctypes.string_at(array.ctypes.data + 4096, 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=False)
    assert done.returncode == -11


def test_pooled_requests_are_reused_and_rebound(room: EngineRoom, backend: OpenVinoBackend) -> None:
    program = room.load(adder(3.0))
    source = room.buffer(32, np.arange(8, dtype=np.float32).tobytes())
    sinks = [room.buffer(64) for _ in range(2)]
    for turn in range(20):
        sink = sinks[turn % 2]
        backend.write_buffer(sink, 0, [memoryview(bytes(64))])
        bindings = [Binding(source, 0, 32, 0, Access.READ), Binding(sink, 16, 32, 1, Access.WRITE)]
        assert room.finish(room.submit(program, bindings, [])).state is EventState.COMPLETE
        wanted = bytes(16) + (np.arange(8, dtype=np.float32) + 3).tobytes() + bytes(16)
        assert room.bytes_of(sink, 64) == wanted
    assert len(program._calls) == 2  # type: ignore[attr-defined]


def test_no_pooled_request_holds_freed_memory(room: EngineRoom, backend: OpenVinoBackend) -> None:
    program = room.load(adder(4.0))
    before = mappings()
    for _ in range(5):
        assert room.call(program, adder(4.0), [np.zeros(8, np.float32)])[0].tolist() == [4.0] * 8
    assert mappings() == before
    backend.unload_program(program)


def test_bindings_that_do_not_fit(room: EngineRoom) -> None:
    program = room.load(adder())
    x, y = room.buffer(64), room.buffer(64)
    reads, writes = Binding(x, 0, 32, 0, Access.READ), Binding(y, 0, 32, 1, Access.WRITE)
    assert room.refused(program, [reads]) is Status.INCOMPATIBLE
    assert room.refused(program, [reads, writes._replace(slot=2)]) is Status.INCOMPATIBLE
    assert room.refused(program, [reads._replace(bytes=28), writes]) is Status.INCOMPATIBLE
    assert room.refused(program, [reads._replace(offset=2), writes]) is Status.INCOMPATIBLE
    assert room.refused(program, [reads._replace(access=Access.WRITE), writes]) is Status.INVALID_ARGUMENT
    assert room.refused(program, [reads, writes._replace(buffer=x, offset=16)]) is Status.INVALID_ARGUMENT
    apart = [reads, writes._replace(buffer=x, offset=32)]
    assert room.finish(room.submit(program, apart, [])).state is EventState.COMPLETE
    assert room.bytes_of(x, 64) == bytes(32) + np.ones(8, np.float32).tobytes()


# ---- submissions in flight


def _free(backend: OpenVinoBackend, job: Slow) -> bool:
    try:
        backend.write_buffer(job.sink, 0, [memoryview(b"1")])
    except BackendError:
        return False
    return True


def test_l6_an_expired_deadline_keeps_its_buffers_until_the_work_stops(
    room: EngineRoom, backend: OpenVinoBackend
) -> None:
    job = Slow(room)
    event = job.start(timeout_ns=1)
    assert backend.poll_event(event) == Polled(EventState.FAILED, Status.DEADLINE_EXPIRED)
    with pytest.raises(BackendError) as caught:
        backend.cancel_event(event)
    assert caught.value.status is Status.BUSY
    assert until(lambda: _free(backend, job))
    assert backend.poll_event(event) == Polled(EventState.FAILED, Status.DEADLINE_EXPIRED)
    assert backend.destroy_event(event) is RELEASED


def test_a_deadline_is_kept_by_late_pollers_too(room: EngineRoom, backend: OpenVinoBackend) -> None:
    job = Slow(room, products=40)
    event = job.start(timeout_ns=1)
    assert until(lambda: event.request is None or event.request.stopped())  # type: ignore[attr-defined]
    assert backend.poll_event(event) == Polled(EventState.FAILED, Status.DEADLINE_EXPIRED)
    generous = job.start(timeout_ns=3600 * 10**9)
    assert backend.destroy_event(generous) == ReleaseRejected(Status.BUSY)
    assert room.finish(generous) == Polled(EventState.COMPLETE, Status.OK)


def test_l1_buffers_freed_under_cancelled_work_are_quarantined(room: EngineRoom, backend: OpenVinoBackend) -> None:
    before = mappings()
    job = Slow(room)
    event = job.start()
    backend.cancel_event(event)
    backend.destroy_event(event)
    assert isinstance(backend.free_buffer(job.source), Released)
    assert isinstance(backend.free_buffer(job.sink), Released)
    del job.bindings, job.source, job.sink, event
    fresh = [room.buffer(SLOW_BYTES) for _ in range(2)]
    assert until(lambda: backend._executor.reap() or not backend._executor.stopping)
    assert all(not any(room.bytes_of(buffer, SLOW_BYTES)) for buffer in fresh)
    for buffer in fresh:
        backend.free_buffer(buffer)
    del fresh, buffer
    assert until(lambda: mappings() == before)


def test_close_with_work_running_waits_for_nothing(backend: OpenVinoBackend) -> None:
    before = mappings()
    room = EngineRoom(backend)
    first = Slow(room, 400)
    jobs = [first, *(Slow(room, program=first.program) for _ in range(3))]
    for job in jobs:
        job.start()
    backend.close()
    del first, jobs, job, room
    assert quiesce(60)
    assert until(lambda: mappings() == before)


def test_wait_returns_at_once_when_nothing_is_pending_and_when_something_ends(
    room: EngineRoom, backend: OpenVinoBackend
) -> None:
    longest, started = 30.0, time.monotonic()
    backend.wait(longest)
    job = Slow(room, products=5)
    event = job.start()
    while backend.poll_event(event).state is EventState.PENDING:
        backend.wait(longest)
    assert time.monotonic() - started < longest, "no wait took the whole of its time"


def test_l2_exit_with_submissions_running() -> None:
    script = (
        "import sys, time; sys.path[:0] = sys.argv[1:]\n"
        "from test_backend import Slow, EngineRoom, open_backend\n"
        "room = EngineRoom(open_backend('CPU'))\n"
        "short = Slow(room, 100)\n"
        "began = time.monotonic()\n"
        "room.finish(short.start())\n"
        "print(time.monotonic() - began)\n"
        "first = Slow(room, 1500)\n"
        "jobs = [first, *(Slow(room, program=first.program) for _ in range(7))]\n"
        "events = [job.start() for job in jobs]\n"
        "print('running', flush=True)\n"
    )
    folder = Path(__file__).parent
    command = [sys.executable, "-c", script, str(folder), str(folder.parent / "support")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        all_of_it = float(process.stdout.readline()) * 8 * 1500 / 100
        assert process.stdout.readline() == "running\n"
        started = time.monotonic()
        assert process.wait(timeout=60) == 0
        assert time.monotonic() - started < all_of_it / 3, "it waited for what was running"
