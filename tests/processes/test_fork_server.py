"""Processes on demand and what they give up: a real fork server, real children, the kernel's own refusals."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from virtaccel.processes import confine
from virtaccel.processes.fork_server import ForkServer, ForkServerLost

PATIENCE = 60.0


@pytest.fixture(scope="module")
def fork_server(support_on_path: None) -> Iterator[ForkServer]:
    made = ForkServer.spawn("fork_server_children", "a", "b")
    yield made
    made.close()


def wait_until_gone(process: int, seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while os.path.exists(f"/proc/{process}"):
        assert time.monotonic() < until, f"process {process} lives"
        time.sleep(0.01)


def end(fork_server: ForkServer, work: str) -> tuple[int, bytes]:
    """How a child with this work ended, and what it wrote."""
    report = os.memfd_create("report")
    child = fork_server.start(work.encode(), [report])
    child.born(PATIENCE)
    status = child.ended(PATIENCE)
    child.close()
    said = os.pread(report, 4096, 0)
    os.close(report)
    assert status is not None, "still running"
    return status, said


def test_children_say_how_they_end(fork_server: ForkServer) -> None:
    for work, status in (
        ("exit 0", 0),
        ("exit 7", 7),
        ("signal 11", -11),
        ("signal 9", -9),
        ("fail", 70),
        ("abort", -int(signal.SIGABRT)),
    ):
        assert end(fork_server, work)[0] == status, work


def test_many_at_once_and_none_is_left(fork_server: ForkServer) -> None:
    children = [fork_server.start(f"exit {number}".encode(), []) for number in range(40)]
    assert [child.ended(PATIENCE) for child in children] == list(range(40))
    for child in children:
        child.close()
    left = subprocess.run(["ps", "--ppid", str(fork_server.pid), "-o", "pid="], capture_output=True, text=True).stdout
    assert not left.split()


def test_a_child_has_its_own_descriptors_and_the_standard_ones_only(fork_server: ForkServer) -> None:
    status, said = end(fork_server, "descriptors")
    assert status == 0
    numbers = said.split()
    assert numbers[:3] == [b"0", b"1", b"2"]
    assert len(numbers) == 5, "the report, and the one that listing takes"


@pytest.mark.parametrize("work", ["sleep 1000", "ignore"])
def test_a_child_can_be_killed_at_any_time(fork_server: ForkServer, work: str) -> None:
    for wait in (0.0, 0.05):
        child = fork_server.start(work.encode(), [])
        process = child.born(PATIENCE)
        assert child.ended(0.01) is None
        time.sleep(wait)
        child.close()
        wait_until_gone(process)


def test_killing_wakes_whoever_waits(fork_server: ForkServer) -> None:
    child = fork_server.start(b"sleep 1000", [])
    process = child.born(PATIENCE)
    timer = threading.Timer(0.1, child.kill)
    timer.start()
    with pytest.raises(ForkServerLost):
        child.ended(PATIENCE)
    timer.join()
    child.close()
    wait_until_gone(process)


def test_children_end_with_their_fork_server(support_on_path: None) -> None:
    for how in ("close", "kill"):
        made = ForkServer.spawn("fork_server_children", "a", "b")
        child = made.start(b"ignore", [])
        process = child.born(PATIENCE)
        if how == "kill":
            os.kill(made.pid, signal.SIGKILL)
            wait_until_gone(process)
            with pytest.raises(ForkServerLost):
                child.ended(PATIENCE)
        made.close()
        wait_until_gone(process)
        child.close()
        with pytest.raises((ForkServerLost, OSError)):
            made.start(b"exit 0", [])


def test_everything_ends_with_the_process_that_asked(support_on_path: None) -> None:
    """However it ends: here by SIGKILL."""
    script = (
        "import sys, time\n"
        "from virtaccel.processes.fork_server import ForkServer\n"
        "made = ForkServer.spawn('fork_server_children', 'a', 'b')\n"
        "child = made.start(b'ignore', [])\n"
        "print(made.pid, child.born(60), flush=True)\n"
        "time.sleep(1000)\n"
    )
    asking = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    processes = [int(word) for word in asking.stdout.readline().split()]
    assert len(processes) == 2
    asking.kill()
    asking.wait()
    asking.stdout.close()
    for process in processes:
        wait_until_gone(process)


def test_a_fork_server_that_cannot_begin_is_lost() -> None:
    made = ForkServer.spawn("no_such_module")
    child = made.start(b"exit 0", [])
    with pytest.raises(ForkServerLost):
        child.born(PATIENCE)
    child.close()
    made.close()


# ---- what is given up


def test_limits_end_what_exceeds_them(fork_server: ForkServer) -> None:
    assert end(fork_server, "memory")[0] == 9, "MemoryError, and the process lives to say so"
    assert end(fork_server, "processor")[0] == -int(signal.SIGXCPU)
    status, said = end(fork_server, "file-size")
    assert status == -int(signal.SIGXFSZ)
    assert said == bytes(1000)


@pytest.mark.parametrize("files", ["files", "none"])
def test_system_calls_that_no_inference_needs_are_refused(fork_server: ForkServer, files: str) -> None:
    if platform.machine() not in confine.MACHINES:
        pytest.skip(f"no filter for {platform.machine()}")
    status, said = end(fork_server, f"confined {files}")
    assert status != 77, "this kernel installs no filter"
    assert (status, said) == (0, b"-")


def test_a_model_that_ends_the_compilers_process_ends_nothing_else(fork_server: ForkServer) -> None:
    """No injected fault: the runtime itself, on an integer division that cannot be represented."""
    assert end(fork_server, "divide")[0] < 0
    assert end(fork_server, "exit 0")[0] == 0


def test_filters_are_well_formed() -> None:
    """Jumps stay within the program, and it ends by allowing."""
    for machine in confine.MACHINES.values():
        for files in (True, False):
            code = confine.program(machine, files)
            assert len(code) < 4096
            for at, word in enumerate(code):
                assert len(word) == 8
                if int.from_bytes(word[:2], "little") & 7 == 5:
                    assert at + 1 + max(word[2], word[3]) < len(code)
            assert code[-1] == confine._op(0x06, 0x7FFF0000)
