"""Programs compiled in processes of their own: the same answers, and what goes wrong there is the end of one load.

Crashes, hangs and hunger are injected (sandbox.FAULTS_SWITCH): no graph is known that makes the compiler do it. That a
crash of the compiler itself is contained is shown with a model that does crash it, in test_fork_server.py.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import graphs
import numpy as np
import pytest
from engine_room import EngineRoom, artifact
from slow_graphs import rotated, rotations

from virtaccel.backend_openvino import open_backend
from virtaccel.backend_openvino import sandbox as sandboxes
from virtaccel.backend_openvino.backend import OpenVinoBackend
from virtaccel.backend_openvino.compile import Tuning
from virtaccel.backend_openvino.execution import quiesce
from virtaccel.backend_openvino.sandbox import Bounds, Sandbox
from virtaccel.device.backend import BackendError, BackendUnavailable, Loading
from virtaccel.device.wire import Status
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.target import ALL_PROFILES, Extension, Target, to_words
from virtaccel.tosa_graph.write import GraphWriter

SECONDS = 30.0
"""What a program may take in a sandbox that is not in a hurry."""
MODELS = ["face_detection_short_range", "hand_landmark_lite"]


def make_sandbox(seconds: float, memory: int) -> Iterator[Sandbox]:
    os.environ[sandboxes.FAULTS_SWITCH] = "1"  # fork servers take the environment along when they begin
    made = Sandbox(Bounds(seconds, memory))
    yield made
    os.environ.pop(sandboxes.FAULTS_SWITCH, None)
    made.close()


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    yield from make_sandbox(SECONDS, 3 << 30)


@pytest.fixture(scope="module")
def impatient() -> Iterator[Sandbox]:
    yield from make_sandbox(1.0, 1 << 30)


def opened(sandbox: Sandbox) -> Iterator[EngineRoom]:
    backend = OpenVinoBackend("CPU", Tuning(), sandbox)
    yield EngineRoom(backend)
    backend.close()
    assert quiesce(30)


@pytest.fixture
def room(sandbox: Sandbox) -> Iterator[EngineRoom]:
    yield from opened(sandbox)


@pytest.fixture
def hurried(impatient: Sandbox) -> Iterator[EngineRoom]:
    yield from opened(impatient)


def named(name: str, salt: float = 1.0) -> bytes:
    """x + salt, with the input called `name`."""
    writer = GraphWriter()
    x = writer.input(name, (8,), DType.FP32)
    y = writer.operator(Op.ADD, [x, writer.constant(np.full(8, salt, np.float32))], ((8,), DType.FP32))
    writer.output(y)
    return writer.to_bytes()


def assert_works(room: EngineRoom, salt: float) -> None:
    """The next program is compiled and gives the right answer."""
    tosa = named("x", salt)
    x = np.arange(8, dtype=np.float32)
    (y,) = room.call(room.load(tosa), tosa, [x])
    np.testing.assert_array_equal(y, x + np.float32(salt))


def expect_refused(room: EngineRoom, tosa: bytes) -> BackendError:
    with pytest.raises(BackendError) as caught:
        room.load(tosa)
    return caught.value


@pytest.mark.parametrize("model", MODELS)
def test_real_models_give_what_they_give_without(room: EngineRoom, shared: Path, model: str) -> None:
    """Bit for bit what a model compiled in this process gives, and near the vectors."""
    tosa = (shared / "models" / f"{model}.tosa").read_bytes()
    vectors = np.load(shared / "models" / f"{model}.io.npz")
    names = sorted(name for name in vectors.files if name.startswith("in"))
    plain = EngineRoom(OpenVinoBackend("CPU", Tuning()))
    inputs = [vectors[name] for name in names]
    here = plain.call(plain.load(tosa), tosa, inputs)
    there = room.call(room.load(tosa), tosa, inputs)
    for one, other in zip(here, there, strict=True):
        np.testing.assert_array_equal(one, other)
    plain.backend.close()


def test_dynamic_shapes_and_large_inputs_are_compiled_there_too(room: EngineRoom) -> None:
    """A variant per shape, and a second for inputs beyond the bound of the first."""
    tosa = graphs.single(Op.ADD, [((-1, 4), DType.FP32), ((-1, 4), DType.FP32)], ((-1, 4), DType.FP32))
    program = room.load(tosa)
    for rows in (1, 3):
        x = np.arange(4 * rows, dtype=np.float32).reshape(rows, 4)
        (y,) = room.call(program, tosa, [x, x], [(rows, 4)])
        np.testing.assert_array_equal(y, x + x)
    big = np.full((1, 4), 3e38, np.float32)
    (y,) = room.call(program, tosa, [big, big], [(1, 4)])
    assert np.isposinf(y).all()


def test_what_the_device_does_not_run_is_refused_with_its_reason(room: EngineRoom) -> None:
    tosa = graphs.single(Op.CUSTOM, [((4,), DType.FP32)], ((4,), DType.FP32), {
        "operator_name": "x", "domain_name": "y", "implementation_attrs": b"",
    })  # fmt: skip
    error = expect_refused(room, tosa)
    assert error.status is Status.INCOMPATIBLE
    assert "CUSTOM" in str(error)
    assert_works(room, 2.5)


def test_a_compiler_that_crashes_is_the_end_of_that_load(room: EngineRoom) -> None:
    error = expect_refused(room, named("fault:crash"))
    assert (error.status, str(error)) == (Status.INTERNAL_ERROR, "the compiling process ended with SIGABRT")
    assert_works(room, 3.0)


def test_a_compiler_that_hangs_is_stopped(hurried: EngineRoom) -> None:
    error = expect_refused(hurried, named("fault:hang"))
    assert error.status is Status.RESOURCE_LIMIT
    assert "more than 1.0 s" in str(error)


def test_a_compiler_that_eats_memory_is_stopped(room: EngineRoom) -> None:
    before = _available()
    error = expect_refused(room, named("fault:memory"))
    assert error.status is Status.OUT_OF_MEMORY
    assert before - _available() < 3 << 30
    assert_works(room, 4.0)


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) << 10
    return 0


def test_a_graph_of_its_own_that_needs_more_than_the_limit_is_refused(sandbox: Sandbox) -> None:
    """No injection: 200 constants of 4 MB in 64 MB of memory, which is less than the process starts with."""
    with contextlib.closing(Sandbox(Bounds(30.0, 64 << 20))) as tight:
        for room in opened(tight):
            error = expect_refused(room, rotations(512, 40))
            assert error.status in (Status.OUT_OF_MEMORY, Status.INTERNAL_ERROR)


def test_an_abandoned_load_frees_the_compiler_at_once(room: EngineRoom) -> None:
    """Its process is ended; the next program does not wait for a limit."""
    outcome = room.backend.load_program(room.context, artifact(named("fault:hang", 7.0)))
    assert isinstance(outcome, Loading)
    time.sleep(0.3)
    began = time.monotonic()
    room.backend.abandon_load(outcome.ticket)
    assert_works(room, 5.0)
    assert time.monotonic() - began < SECONDS, "less than the abandoned one might have taken"


def test_a_killed_sandbox_and_a_killed_fork_server_cost_one_load_each(sandbox: Sandbox, room: EngineRoom) -> None:
    for victim in ("sandbox", "fork server"):
        outcome = room.backend.load_program(room.context, artifact(named("fault:hang", float(len(victim)))))
        assert isinstance(outcome, Loading)
        fork_server = sandbox._fork_server.pid
        process = child_of(fork_server)
        os.kill(process if victim == "sandbox" else fork_server, signal.SIGKILL)
        while not select.select([room.backend.fileno()], [], [], 30.0)[0]:
            pass
        with pytest.raises(BackendError) as caught:
            room.backend.poll_load(outcome.ticket)
        assert caught.value.status is Status.INTERNAL_ERROR
        room.backend.acknowledge()
        assert_works(room, 6.0 + len(victim))


def child_of(fork_server: int, seconds: float = 60.0) -> int:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = subprocess.run(["ps", "--ppid", str(fork_server), "-o", "pid="], capture_output=True, text=True).stdout
        if found.split():
            return int(found.split()[0])
        time.sleep(0.02)
    raise AssertionError("no sandbox was started")


def test_nothing_is_left_of_many_loads(sandbox: Sandbox, room: EngineRoom) -> None:
    assert_works(room, 20.0)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        assert_works(room, 21.0 + number)
        expect_refused(room, named("fault:crash", float(number)))
    assert len(os.listdir("/proc/self/fd")) <= before
    left = subprocess.run(
        ["ps", "--ppid", str(sandbox._fork_server.pid), "-o", "pid="], capture_output=True, text=True
    ).stdout
    assert not left.split()


def test_no_descriptors_left_is_an_error_status(sandbox: Sandbox, room: EngineRoom) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    outcome: object
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    held = []
    try:
        while True:
            try:
                held.append(os.dup(0))
            except OSError:
                break
        outcome = expect_refused(room, named("x", 50.0)).status
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)
    assert outcome is Status.OUT_OF_MEMORY
    assert_works(room, 51.0)


def test_the_sandbox_is_confined(sandbox: Sandbox, room: EngineRoom) -> None:
    """Looked at from outside while one hangs: filter, no descriptors but its own, limits."""
    outcome = room.backend.load_program(room.context, artifact(named("fault:hang", 60.0)))
    assert isinstance(outcome, Loading)
    process = child_of(sandbox._fork_server.pid)
    until = time.monotonic() + 30
    while _status(process, "Seccomp") != "2" and time.monotonic() < until:
        time.sleep(0.02)
    assert _status(process, "Seccomp") == "2"
    assert _status(process, "NoNewPrivs") == "1"
    folder = f"/proc/{process}/fd"
    held = {os.readlink(f"{folder}/{number}") for number in os.listdir(folder) if int(number) > 2}
    assert held == {"/memfd:virtaccel-artifact (deleted)", "/memfd:virtaccel-compiled (deleted)"}
    limits = Path(f"/proc/{process}/limits").read_text()
    for name in ("Max cpu time", "Max file size", "Max data size", "Max core file size"):
        line = next(line for line in limits.splitlines() if line.startswith(name))
        assert "unlimited" not in line, line
    room.backend.abandon_load(outcome.ticket)


def _status(process: int, name: str) -> str:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return line.split()[1]
    return ""


@pytest.mark.parametrize(
    ("name", "value"), [("seconds", "soon"), ("seconds", "-1"), ("seconds", "inf"), ("memory", "0"), ("memory", "x")]
)
def test_limits_that_make_no_sense_are_refused(name: str, value: str) -> None:
    with pytest.raises(BackendUnavailable):
        open_backend("CPU", {f"compile-{name}": value})


def test_slow_programs_are_right_too(room: EngineRoom) -> None:
    x = np.random.default_rng(3).standard_normal((1, 64, 64)).astype(np.float32)
    tosa = rotations(64, 3)
    (y,) = room.call(room.load(tosa), tosa, [x])
    np.testing.assert_array_equal(y, rotated(x, 3))


def test_importing_the_runtime_here_starts_no_thread_and_reports_to_nobody() -> None:
    script = (
        "import os, sys\n"
        "from virtaccel.backend_openvino import preload\n"
        "preload()\n"
        "assert not [name for name in sys.modules if 'telemetry' in name]\n"
        "print(len(os.listdir('/proc/self/task')))\n"
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "1\n"


def test_a_fork_server_is_a_fork_where_no_thread_runs() -> None:
    """As in a worker: no second interpreter, and it ends with its parent."""
    script = (
        "import os\n"
        "from virtaccel.backend_openvino import preload\n"
        "preload()\n"
        "from virtaccel.backend_openvino.sandbox import Bounds, Sandbox\n"
        "made = Sandbox(Bounds())\n"
        "assert isinstance(made._fork_server._process, int)\n"
        "print(made._fork_server.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    until = time.monotonic() + 10
    while os.path.exists(f"/proc/{int(done.stdout)}"):
        assert time.monotonic() < until
        time.sleep(0.01)



class NeverAsked:
    """Stands for a sandbox that must not be started."""

    def compile(self, *arguments: object) -> object:
        raise AssertionError("a compiler was started")


def tile_bomb() -> bytes:
    """4 KiB constant, tiled to 2^31 elements, reduced to one."""
    writer = GraphWriter()
    x = writer.input("x", (1,), DType.FP32)
    small = writer.constant(np.ones((1, 1024), np.float32))
    big = writer.operator(
        Op.TILE, [small, writer.const_shape((1 << 11, 1 << 10))], ((1 << 11, 1 << 20), DType.FP32)
    )
    least = writer.operator(Op.REDUCE_MAX, [big], ((1, 1 << 20), DType.FP32), {"axis": 0, "nan_mode": 1})
    last = writer.operator(Op.REDUCE_MAX, [least], ((1, 1), DType.FP32), {"axis": 1, "nan_mode": 1})
    flat = writer.operator(Op.RESHAPE, [last, writer.const_shape((1,))], ((1,), DType.FP32))
    writer.output(writer.operator(Op.ADD, [x, flat], ((1,), DType.FP32)))
    return writer.to_bytes()


def long_chain(count: int) -> bytes:
    writer = GraphWriter()
    y = writer.input("x", (1,), DType.FP32)
    for _ in range(count):
        y = writer.operator(Op.ADD, [y, y], ((1,), DType.FP32))
    writer.output(y)
    return writer.to_bytes()


def many_tensors() -> bytes:
    """Each below the limit of one tensor, together beyond that of all: 9 times 256 MiB."""
    writer = GraphWriter()
    y = x = writer.input("x", (1, 1 << 26), DType.FP32)
    for _ in range(9):
        y = writer.operator(Op.ADD, [y, x], ((1, 1 << 26), DType.FP32))
    writer.output(y)
    return writer.to_bytes()


@pytest.mark.parametrize(
    ("bomb", "status"),
    [
        (tile_bomb, Status.INCOMPATIBLE),
        (lambda: long_chain(20_000), Status.INVALID_ARGUMENT),
        (many_tensors, Status.INCOMPATIBLE),
    ],
    ids=["tile", "chain", "sum"],
)
def test_h2_bombs_are_refused_before_anything_is_compiled(bomb: Callable[[], bytes], status: Status) -> None:
    words = to_words(Target(ALL_PROFILES, Extension(0)))
    tosa = bomb()
    room = EngineRoom(OpenVinoBackend("CPU", Tuning(), NeverAsked()))  # type: ignore[arg-type]
    outcome = room.backend.load_program(room.context, artifact(tosa, words))
    assert isinstance(outcome, Loading)
    while not select.select([room.backend.fileno()], [], [], 30.0)[0]:
        pass
    with pytest.raises(BackendError) as caught:
        room.backend.poll_load(outcome.ticket)
    assert caught.value.status is status, caught.value
    room.backend.close()
