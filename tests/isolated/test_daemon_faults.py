"""The daemon as it runs by default, OpenVINO in workers and sandboxes, while parts of it are killed and starved.

Each test says what is left afterwards, as docs/isolation.md and docs/threat-model.md do. Compilers that crash, hang and
eat memory are injected (backend_openvino/sandbox.py); every process that is killed here is a real one.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from daemons import GUEST, Daemon, Vm, wait_until
from frames import request
from slow_graphs import rotated, rotations

from virtaccel.backend_openvino.sandbox import FAULTS_SWITCH
from virtaccel.device.wire import EventState, Status
from virtaccel.guest_tools.arrays import accelerator
from virtaccel.guest_tools.arrays.accelerator import Accelerator
from virtaccel.guest_tools.artifact import TOSA_FORMAT, target_words
from virtaccel.guest_tools.client import DeviceError
from virtaccel.guest_tools.errors import ModelError, Refused
from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.write import GraphWriter

LIMIT_SECONDS = 4.0
SLOWER = 50
"""Beside a compiler gone wrong: measured are 2 to 10 times; one command that waited for it would be thousands."""


class Pair:
    """A daemon with two sockets."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.paths = [str(folder / name) for name in "ab"]
        self.daemon = Daemon(folder, "--sockets", *self.paths, *options, backend="openvino")

        self.opened: list[Accelerator] = []

    def open(self, which: int) -> Accelerator:
        self.opened.append(accelerator.open(f"vhost-user:{self.paths[which]}", patience=60.0))
        return self.opened[-1]


@pytest.fixture
def pair(two_sockets: Pair) -> Iterator[Pair]:
    """The module's daemon; what a test leaves connected is closed after it."""
    yield two_sockets
    for device in two_sockets.opened:
        device.session.transport.close()
    two_sockets.opened.clear()
    assert two_sockets.daemon.alive()


@pytest.fixture(scope="module")
def two_sockets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    os.environ[FAULTS_SWITCH] = "1"
    made = Pair(
        tmp_path_factory.mktemp("pair"), "--compile-seconds", str(LIMIT_SECONDS), "--compile-memory", "1G"
    )
    del os.environ[FAULTS_SWITCH]
    with made.daemon as daemon:
        yield made
        assert daemon.stop() == 0


def named(name: str, salt: float) -> bytes:
    """x + salt, with the input called `name`; programs with another salt share no compiled model."""
    writer = GraphWriter()
    x = writer.input(name, (8,), DType.FP32)
    writer.output(writer.operator(Op.ADD, [x, writer.constant(np.full(8, salt, np.float32))], ((8,), DType.FP32)))
    return writer.to_bytes()


def assert_right(device: Accelerator, salt: float) -> None:
    x = np.arange(8, dtype=np.float32)
    (y,) = device.load(named("x", salt))(x)
    np.testing.assert_array_equal(y, x + np.float32(salt))


def children(process: int) -> dict[int, str]:
    """Processes below this one, with the number of their parent and their state."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                parents[int(entry)] = _parent(int(entry))
    found: dict[int, str] = {}
    wanted = {process}
    while wanted:
        wanted = {child for child, parent in parents.items() if parent in wanted} - found.keys()
        found |= {child: str(parents[child]) for child in wanted}
    return found


def direct(process: int) -> list[int]:
    return sorted(child for child, parent in children(process).items() if int(parent) == process)


def workers(daemon: Daemon) -> list[int]:
    (fork_server,) = direct(daemon.process.pid)
    return direct(fork_server)


def wait_until_gone(processes: object, seconds: float = 10.0) -> None:
    assert hasattr(processes, "__iter__")
    wait_until(lambda: not any(os.path.exists(f"/proc/{each}") for each in processes), "all are gone", timeout=seconds)


def test_the_daemon_itself_runs_no_native_code_of_the_backend(pair: Pair) -> None:
    with pair.open(0) as device:
        assert_right(device, 1.0)
        maps = Path(f"/proc/{pair.daemon.process.pid}/maps").read_text()
        assert "openvino" not in maps
        assert "numpy" not in maps
        assert pair.daemon.status("VmRSS") < 60 << 10
        serving = workers(pair.daemon)
        assert len(serving) == 2
        for worker in serving:
            assert "libopenvino" in Path(f"/proc/{worker}/maps").read_text()
            assert "Seccomp:\t2" in Path(f"/proc/{worker}/status").read_text()


# ---- compilers gone wrong


@pytest.mark.alone
@pytest.mark.parametrize(
    ("fault", "admitted"),
    [
        ("fault:crash", {Status.INTERNAL_ERROR}),
        ("fault:memory", {Status.OUT_OF_MEMORY, Status.RESOURCE_LIMIT}),  # whichever limit a busy machine meets first
        ("fault:hang", {Status.RESOURCE_LIMIT}),
    ],
)
def test_others_are_answered_while_a_compiler_goes_wrong(pair: Pair, fault: str, admitted: set[Status]) -> None:
    """The other guest's commands take no more than SLOWER times what they took before, at the 99th percentile, and the
    next program is taken. The machine may be busy with something else, so the best of a few tries counts."""
    bystander, attacker = pair.open(0), pair.open(1)
    x = np.arange(8, dtype=np.float32)
    program = bystander.load(named("x", 9.0))
    program(x)
    tries, bound = [], SLOWER * max(_p99(bystander, program, threading.Thread()) for _ in range(3))
    for attempt in range(4):
        statuses: list[int] = []
        thread = threading.Thread(target=_offer, args=(attacker, named(fault, float(attempt)), statuses))
        thread.start()
        tries.append(_p99(bystander, program, thread))
        thread.join()
        assert len(statuses) == 1
        assert statuses[0] in admitted
        assert_right(attacker, 100.0 + attempt)
        if tries[-1] < bound:
            break
    print(f"{fault}: p99 of the other guest's commands {[f'{1e3 * value:.1f} ms' for value in tries]}")
    assert min(tries) < bound, (tries, bound)
    bystander.close()
    attacker.close()


def _offer(device: Accelerator, model: bytes, statuses: list[int]) -> None:
    """Load a program; the status that it is refused with."""
    try:
        device.load(model, "hostile")
    except (Refused, DeviceError) as error:
        statuses.append(error.status)


def _p99(device: Accelerator, program: accelerator.Program, thread: threading.Thread) -> float:
    """Round trips of the commands that one call is made of, while `thread` runs and at least 200."""
    took = []
    session, x = device.session, np.arange(8, dtype=np.float32)
    while thread.is_alive() or len(took) < 200:
        began = time.perf_counter()
        session.call(session.client.get_device_info())
        took.append(time.perf_counter() - began)
        began = time.perf_counter()
        (y,) = program(x)
        took.append((time.perf_counter() - began) / 5)  # write, submit, poll, read, destroy
        np.testing.assert_array_equal(y, x + 9)
        if len(took) > 20_000:
            time.sleep(0.01)
    return float(np.percentile(took, 99))


def test_a_program_submitted_again_while_it_runs_holds_up_nobody(pair: Pair) -> None:
    """The runtime makes no second request of a model while one runs; nobody waits for that, not even in the worker."""
    device, bystander = pair.open(0), pair.open(1)
    program = device.load(rotations(512, 300))
    values = [np.random.default_rng(seed).standard_normal((1, 512, 512)).astype(np.float32) for seed in (1, 2)]
    runs = [program.new_invocation() for _ in values]
    for run, value in zip(runs, values, strict=True):
        run.write([value])
    pending = [run.submit() for run in runs]
    assert_right(bystander, 8.0)
    session, event = device.session, pending[0]._event
    assert event is not None
    if session.call(session.client.poll_event(event)).state != EventState.PENDING:
        pytest.fail("the first run ended before the second was admitted: it was waited for, or takes too little time")
    for waiting, run, value in zip(pending, runs, values, strict=True):
        waiting.wait(60.0)
        (y,) = run.read()
        np.testing.assert_array_equal(y, rotated(value, 300))
    device.close()
    bystander.close()


# ---- processes killed under load


def test_a_killed_worker_is_its_guests_loss_alone(pair: Pair) -> None:
    victim, bystander = pair.open(0), pair.open(1)
    program, other = victim.load(rotations(512, 100)), bystander.load(named("x", 3.0))
    x = np.random.default_rng(1).standard_normal((1, 512, 512)).astype(np.float32)
    run = program.new_invocation()
    run.write([x])
    pending = run.submit()
    busiest = max(workers(pair.daemon), key=_cpu)
    os.kill(busiest, signal.SIGKILL)
    with pytest.raises(DeviceError) as caught:
        pending.wait(60.0)
    assert caught.value.status == Status.DEVICE_LOST
    (y,) = other(np.zeros(8, np.float32))
    np.testing.assert_array_equal(y, np.full(8, 3, np.float32))
    again = _after_reset(pair, 0, victim)
    (y,) = again.load(rotations(64, 5))(x[:, :64, :64])
    np.testing.assert_array_equal(y, rotated(x[:, :64, :64], 5))
    assert pair.daemon.alive()
    again.close()
    bystander.close()


def _cpu(process: int) -> int:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _after_reset(pair: Pair, which: int, lost: Accelerator) -> Accelerator:
    """The guest goes, as one that reboots does, and comes back."""
    lost.session.transport.close()
    return pair.open(which)


def test_a_killed_fork_server_loses_every_worker_and_each_guest_gets_another(pair: Pair) -> None:
    devices = [pair.open(0), pair.open(1)]
    for device in devices:
        assert_right(device, 40.0)
    (fork_server,) = direct(pair.daemon.process.pid)
    below = children(fork_server)
    os.kill(fork_server, signal.SIGKILL)
    wait_until_gone(below)
    for which, device in enumerate(devices):
        with pytest.raises((DeviceError, ModelError)):
            assert_right(device, 41.0)
        again = _after_reset(pair, which, device)
        assert_right(again, 42.0)
        again.close()
    assert pair.daemon.alive()


def test_a_worker_killed_while_it_loads_answers_for_the_load(pair: Pair) -> None:
    device = pair.open(0)
    statuses: list[int] = []
    thread = threading.Thread(target=_offer, args=(device, named("fault:hang", 500.0), statuses))
    thread.start()
    wait_until(lambda: _sandboxes(pair.daemon), "a sandbox works")
    (sandbox,) = _sandboxes(pair.daemon)
    worker = _parent(_parent(sandbox))
    os.kill(worker, signal.SIGKILL)
    thread.join(30)
    assert statuses == [Status.DEVICE_LOST]
    wait_until_gone([worker, sandbox])
    again = _after_reset(pair, 0, device)
    assert_right(again, 501.0)
    again.close()


def test_a_worker_whose_fork_server_is_killed_is_replaced(pair: Pair) -> None:
    """A confined worker can start no other: at its next load it is lost, and the one after the reset has its own."""
    device = pair.open(0)
    assert_right(device, 510.0)
    for worker in workers(pair.daemon):
        for fork_server in direct(worker):
            os.kill(fork_server, signal.SIGKILL)
    statuses: list[int] = []
    for salt in (511.0, 512.0):
        _offer(device, named("x", salt), statuses)
    assert statuses[-1] == Status.DEVICE_LOST
    assert set(statuses) <= {Status.INTERNAL_ERROR, Status.DEVICE_LOST}
    again = _after_reset(pair, 0, device)
    assert_right(again, 513.0)
    again.close()


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_front_end_that_goes_while_a_program_loads_takes_its_memory_along(pair: Pair) -> None:
    device = pair.open(0)
    session, artifact = device.session, named("fault:hang", 43.0)
    session.start(session.client.load_program(device.context, TOSA_FORMAT, target_words(read(artifact)), artifact))
    session.call(session.client.get_device_info())
    maps = Path(f"/proc/{pair.daemon.process.pid}/maps")
    assert "/memfd:virtaccel (deleted)" in maps.read_text()
    session.transport.close()
    wait_until(lambda: "/memfd:virtaccel (deleted)" not in maps.read_text(), "its memory is unmapped")


def test_killed_sandboxes_under_load_cost_their_loads(pair: Pair) -> None:
    device = pair.open(0)
    stop = time.monotonic() + 3.0
    lost = 0
    salt = 200.0
    while time.monotonic() < stop or (not lost and salt < 210.0):
        salt += 1
        statuses: list[int] = []
        thread = threading.Thread(target=_offer, args=(device, named("fault:hang", salt), statuses))
        thread.start()
        wait_until(lambda: _sandboxes(pair.daemon), "a sandbox works")
        for process in _sandboxes(pair.daemon):
            os.kill(process, signal.SIGKILL)
        thread.join()
        assert statuses in ([Status.INTERNAL_ERROR], [Status.RESOURCE_LIMIT])  # the limit of a busy machine came first
        lost += statuses == [Status.INTERNAL_ERROR]
    assert lost
    assert_right(device, 300.0)
    device.close()


def _sandboxes(daemon: Daemon) -> list[int]:
    """Children of the fork servers of workers."""
    return [sandbox for worker in workers(daemon) for fork_server in direct(worker) for sandbox in direct(fork_server)]


def test_a_killed_daemon_leaves_no_process(tmp_path: Path) -> None:
    with Daemon(tmp_path, backend="openvino") as daemon:
        device = accelerator.open(f"vhost-user:{daemon.path}", patience=60.0)
        run = device.load(rotations(512, 100)).new_invocation()
        run.write([np.ones((1, 512, 512), np.float32)])
        run.submit()
        below = children(daemon.process.pid)
        assert len(below) >= 3, "fork server, worker, its fork server"
        daemon.kill()
        wait_until_gone(below)
        device.session.transport.close()
        daemon.start()
        with accelerator.open(f"vhost-user:{daemon.path}", patience=60.0) as other:
            assert_right(other, 50.0)
        assert daemon.stop() == 0


def test_a_stopped_daemon_leaves_no_process(tmp_path: Path) -> None:
    with Daemon(tmp_path, backend="openvino") as daemon:
        with accelerator.open(f"vhost-user:{daemon.path}", patience=60.0) as device:
            assert_right(device, 51.0)
        below = children(daemon.process.pid)
        assert daemon.stop() == 0
        wait_until_gone(below)


# ---- resources run out


def test_no_descriptors_left_lets_front_ends_wait(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        process, used = daemon.process.pid, daemon.idle_fds()
        before = resource.prlimit(process, resource.RLIMIT_NOFILE)
        resource.prlimit(process, resource.RLIMIT_NOFILE, (used, before[1]))
        vm = Vm(daemon.path)
        wait_until(lambda: "Too many open files" in daemon.log(), "it is noticed")
        began, since = daemon.cpu_seconds(), time.monotonic()
        time.sleep(1.0)
        assert daemon.cpu_seconds() - began < 0.3 * (time.monotonic() - since), "no busy loop"
        assert daemon.log().count("Too many open files") == 1
        resource.prlimit(process, resource.RLIMIT_NOFILE, before)
        vm.start()
        assert len(vm.call_device(request(1))) == 92, "the front end that waited is served"
        vm.close()
        assert daemon.stop() == 0


def test_no_descriptors_left_refuses_loads_and_nothing_else(tmp_path: Path) -> None:
    with Daemon(tmp_path, backend="openvino") as daemon:
        device = accelerator.open(f"vhost-user:{daemon.path}", patience=60.0)
        program = device.load(named("x", 60.0))
        process = daemon.process.pid
        before = resource.prlimit(process, resource.RLIMIT_NOFILE)
        resource.prlimit(process, resource.RLIMIT_NOFILE, (daemon.fds(), before[1]))
        statuses: list[int] = []
        _offer(device, named("x", 61.0), statuses)
        assert statuses == [Status.OUT_OF_MEMORY]
        (y,) = program(np.zeros(8, np.float32))
        np.testing.assert_array_equal(y, np.full(8, 60, np.float32))
        resource.prlimit(process, resource.RLIMIT_NOFILE, before)
        assert_right(device, 62.0)
        device.close()
        assert daemon.stop() == 0


def test_no_memory_left_refuses_buffers_and_nothing_else(tmp_path: Path) -> None:
    with Daemon(tmp_path, backend="openvino") as daemon:
        device = accelerator.open(f"vhost-user:{daemon.path}", patience=60.0)
        program = device.load(named("x", 70.0))
        process = daemon.process.pid
        before = resource.prlimit(process, resource.RLIMIT_AS)
        resource.prlimit(process, resource.RLIMIT_AS, ((daemon.status("VmSize") << 10) + (8 << 20), before[1]))
        with pytest.raises(DeviceError) as caught:
            device.buffer(64 << 20)
        assert caught.value.status == Status.OUT_OF_MEMORY
        (y,) = program(np.zeros(8, np.float32))
        np.testing.assert_array_equal(y, np.full(8, 70, np.float32))
        resource.prlimit(process, resource.RLIMIT_AS, before)
        device.buffer(64 << 20).free()
        device.close()
        assert daemon.stop() == 0


def test_a_front_end_that_shrinks_its_memory_ends_its_daemon_and_its_daemon_alone(tmp_path: Path) -> None:
    """What docs/threat-model.md says of memory that is not sealed."""
    with Daemon(tmp_path, backend="openvino") as daemon:
        below = children(daemon.process.pid)
        with Vm(daemon.path).start() as vm:
            assert len(vm.call_device(request(1))) == 92
            os.ftruncate(vm.memory.fd, 0)
            vm.ring_bell()
            assert daemon.process.wait(20) == -signal.SIGBUS
        wait_until_gone(below)


def test_sealed_memory_cannot_be_taken_away(tmp_path: Path) -> None:
    from daemons import Memory

    with Daemon(tmp_path, "--require-sealed") as daemon:
        with Vm(daemon.path, memory=Memory(sealed=True)).start() as vm:
            with pytest.raises(PermissionError):
                os.ftruncate(vm.memory.fd, 0)
            assert len(vm.call_device(request(1))) == 92
            assert vm.memory.region.guest_address == GUEST
        assert daemon.stop() == 0


# ---- every form


@pytest.mark.parametrize("isolation", ["none", "compile", "worker"])
def test_every_form_of_isolation_gives_the_same_answers(tmp_path: Path, isolation: str) -> None:
    with Daemon(tmp_path, "--isolation", isolation, backend="openvino") as daemon:
        with accelerator.open(f"vhost-user:{daemon.path}", patience=60.0) as device:
            x = np.random.default_rng(9).standard_normal((1, 64, 64)).astype(np.float32)
            program = device.load(rotations(64, 7))
            for _ in range(3):
                (y,) = program(x)
                np.testing.assert_array_equal(y, rotated(x, 7))
            session = device.session
            run = device.load(rotations(512, 160)).new_invocation()
            run.write([np.ones((1, 512, 512), np.float32)])
            event = run.submit()._event
            assert event is not None
            session.call(session.client.cancel_event(event))
            assert session.call(session.client.poll_event(event)).state == EventState.CANCELLED
        assert len(children(daemon.process.pid)) == {"none": 0, "compile": 1, "worker": 3}[isolation]
        assert daemon.stop(timeout=8.0) == 0
