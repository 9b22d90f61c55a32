"""The program itself: conventions of vhost-user back ends, where sockets come from, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from daemons import PATIENCE, Daemon, Memory, Vm, wait_until
from frames import request

from virtaccel.device.vhost_user import message as m
from virtaccel.device.vhost_user.message import Request
from virtaccel.guest_tools.transport.base import TransportError

PROGRAM = [sys.executable, "-m", "virtaccel.device.cli"]


def run(*options: str, **keywords: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *options], capture_output=True, text=True, timeout=60, **keywords)  # type: ignore[call-overload, no-any-return]


def assert_served(path: str) -> None:
    with Vm(path).start() as vm:
        assert len(vm.call_device(request(1))) == 92


def test_print_capabilities_ignores_everything_else() -> None:
    for options in (["--print-capabilities"], ["--socket-path", "/nowhere/x", "--nonsense", "--print-capabilities"]):
        done = run(*options)
        assert done.returncode == 0
        assert json.loads(done.stdout) == {"type": "accel", "features": []}


def test_description_file_agrees_with_the_program(root: Path) -> None:
    described = json.loads((root / "share/qemu/vhost-user/50-virtaccel.json").read_text())
    assert set(described) == {"description", "type", "binary", "features"}
    assert {key: described[key] for key in ("type", "features")} == json.loads(run("--print-capabilities").stdout)
    assert Path(described["binary"]).name == "vhost-user-accel"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "no socket to serve"),
        (["--socket-path", "a", "--fd", "3"], "not allowed with"),
        (["--socket-path", "a", "--backend", "nothing"], "no backend is called nothing; installed:"),
        (["--socket-path", "/no/such/folder/a"], "No such file"),
        (["--socket-path", "x" * 120], "longer than"),
        (["--fd", "99"], "descriptor 99"),
        (["--fd", "2"], "descriptor 2"),
        (["--connect", "/no/such/socket", "--connect-timeout", "0.1"], "/no/such/socket"),
        (["--socket-path", "a", "--queue-size", "0"], "--queue-size"),
        (["--socket-path", "a", "--max-chain", "300"], "max_chain_descriptors"),
        (["--socket-path", "a", "--max-request-bytes", "5"], "max_request_bytes"),
        (["--socket-path", "a", "--max-response-bytes", "1G"], "max_response_bytes"),
        (["--socket-path", "a", "--max-backing-bytes", "lots"], "no number of bytes"),
        (["--socket-path", "a", "--turn", "0"], "--turn"),
        (["--socket-path", "a", "--threads", "0"], "--threads"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(tmp_path: Path, options: list[str], says: str) -> None:
    done = run("--backend", "reference", *options, cwd=tmp_path)
    assert done.returncode != 0
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == []


def test_backend_that_is_not_there_takes_the_socket_away_again(tmp_path: Path) -> None:
    done = run("--backend", "openvino", "--device", "NO_SUCH_DEVICE", "--socket-path", str(tmp_path / "a"))
    assert done.returncode == 1
    assert "NO_SUCH_DEVICE" in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ends_cleanly(tmp_path: Path, number: int) -> None:
    with Daemon(tmp_path) as daemon:
        assert_served(daemon.path)
        assert daemon.stop(number) == 0  # within its patience
        assert sorted(os.listdir(tmp_path)) == ["daemon.log"]


def test_ends_cleanly_with_a_front_end_connected(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, Vm(daemon.path).start() as vm:
        assert len(vm.call_device(request(1))) == 92
        vm.publish(request(1, request_id=2))
        assert daemon.stop() == 0
        with pytest.raises(TransportError):
            vm.front.ask(Request.GET_QUEUE_NUM)


def test_a_stale_socket_file_is_replaced(tmp_path: Path) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "accel.sock"))
    stale.close()
    process = subprocess.Popen([*PROGRAM, "--backend", "reference", "--socket-path", str(tmp_path / "accel.sock")])
    try:
        wait_until(lambda: connects(tmp_path / "accel.sock"), "listens")
        assert_served(str(tmp_path / "accel.sock"))
    finally:
        process.terminate()
        assert process.wait(PATIENCE) == 0


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def test_a_live_socket_is_not_stolen(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        for connected in (False, True):
            vm = Vm(daemon.path).start() if connected else None
            second = run("--backend", "reference", "--socket-path", daemon.path)
            assert second.returncode == 1
            assert "another process listens there" in second.stderr
            if vm is not None:
                assert len(vm.call_device(request(1))) == 92
                vm.close()
        assert_served(daemon.path)


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("precious")
    done = run("--backend", "reference", "--socket-path", str(tmp_path / "a"))
    assert done.returncode == 1
    assert "is no socket" in done.stderr
    assert (tmp_path / "a").read_text() == "precious"


def test_a_socket_file_that_somebody_replaced_is_not_removed_at_the_end(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        os.unlink(daemon.path)
        theirs = socket.socket(socket.AF_UNIX)
        theirs.bind(daemon.path)
        assert daemon.stop() == 0
        assert os.path.exists(daemon.path)
        theirs.close()


def assert_served_on(connection: socket.socket) -> None:
    """A few messages as a front end, on a socket that is there already."""
    connection.settimeout(PATIENCE)
    connection.sendall(m.encode(Request.GET_QUEUE_NUM) + m.encode(Request.GET_MAX_MEM_SLOTS))
    data = b""
    while len(data) < 40:
        piece = connection.recv(40 - len(data))
        assert piece, "the program closed the connection"
        data += piece
    assert data[:20] == m.encode_reply(Request.GET_QUEUE_NUM, m.U64.pack(1))


def test_fd_connected(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [*PROGRAM, "--backend", "reference", "--fd", str(theirs.fileno())], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    assert_served_on(ours)
    ours.close()
    assert process.wait(PATIENCE) == 0, "ends with its session"


def test_fd_listening(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "a"))
        listening.listen()
        process = subprocess.Popen(
            [*PROGRAM, "--backend", "reference", "--fd", str(listening.fileno())], pass_fds=[listening.fileno()]
        )
    assert_served(str(tmp_path / "a"))
    assert_served(str(tmp_path / "a"))
    process.terminate()
    assert process.wait(PATIENCE) == 0
    assert os.path.exists(tmp_path / "a"), "whoever made the socket removes it"


ACTIVATE = """
import os, sys
for target, source in enumerate(map(int, sys.argv[1].split(",")), 3):
    os.dup2(source, target)
os.environ["LISTEN_FDS"] = str(len(sys.argv[1].split(",")))
os.environ["LISTEN_PID"] = str(os.getpid() + int(sys.argv[2]))
os.execv(sys.executable, [sys.executable, "-m", "virtaccel.device.cli", "--backend", "reference", *sys.argv[3:]])
"""


def activated(listening: list[socket.socket], pid_off_by: int = 0, *options: str) -> subprocess.Popen[str]:
    """Start the program as a service manager would, with its sockets from descriptor 3 on."""
    # Numbers far away, so that moving one down does not overwrite the next.
    high = [os.dup(each.fileno()) for each in listening]
    import fcntl

    far = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in high]
    process = subprocess.Popen(
        [sys.executable, "-c", ACTIVATE, ",".join(map(str, far)), str(pid_off_by), *options],
        pass_fds=far, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for fd in (*high, *far):
        os.close(fd)
    return process


def listener(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()
    return listening


def test_socket_activation(tmp_path: Path) -> None:
    sockets = [listener(tmp_path / name) for name in "ab"]
    process = activated(sockets)
    for each in sockets:
        each.close()
    with process:
        for name in "aba":
            assert_served(str(tmp_path / name))
        process.terminate()
        assert process.wait(PATIENCE) == 0
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_socket_activation_of_another_process_is_not_ours(tmp_path: Path) -> None:
    with listener(tmp_path / "a") as listening, activated([listening], 1) as process:
        assert process.wait(PATIENCE) == 1
        assert process.stderr is not None
        assert "no socket to serve" in process.stderr.read()


def test_connect_to_a_vmm_that_listens(tmp_path: Path) -> None:
    """The VMM may come later; the program ends with its session."""
    process = subprocess.Popen([*PROGRAM, "--backend", "reference", "--connect", str(tmp_path / "vmm")])
    time.sleep(0.2)
    with listener(tmp_path / "vmm") as listening:
        listening.settimeout(PATIENCE)
        connection, _ = listening.accept()
    with connection:
        assert_served_on(connection)
    assert process.wait(PATIENCE) == 0


def test_terminated_while_waiting_for_a_vmm(tmp_path: Path) -> None:
    process = subprocess.Popen([*PROGRAM, "--backend", "reference", "--connect", str(tmp_path / "vmm")])
    caught = re.compile(r"SigCgt:\s+\w+[4567c-f]\w{3}$", re.MULTILINE)  # 2^14 is signal 15
    wait_until(lambda: caught.search(Path(f"/proc/{process.pid}/status").read_text()), "it handles SIGTERM")
    time.sleep(0.7)  # it has looked for the VMM more than once
    process.terminate()
    assert process.wait(PATIENCE) == 0


def test_limits_given_on_the_command_line_are_what_a_guest_sees(tmp_path: Path) -> None:
    options = [
        "--max-request-bytes", "64K", "--max-response-bytes", "32k", "--max-chain", "8", "--queue-size", "64",
        "--max-contexts", "3", "--max-buffer-bytes", "1M", "--max-events-per-context", "5",
    ]  # fmt: skip
    with Daemon(tmp_path, *options) as daemon, Vm(daemon.path).start() as vm:
        space = vm.front.read_config(0, 16)
        assert space[6:8] == (8).to_bytes(2, "little")
        assert space[8:] == (64 << 10).to_bytes(4, "little") + (32 << 10).to_bytes(4, "little")
        information = vm.call_device(request(1))[16:]
        # DeviceInfo: uuid 16, class 2+2, vendor 4, device 4, capabilities 8, then counts of 4 bytes.
        counts = [int.from_bytes(information[at : at + 4], "little") for at in range(36, 60, 4)]
        assert counts[0] == 3
        assert counts[4] == 5
        assert int.from_bytes(information[60:68], "little") == 1 << 20
        assert int.from_bytes(information[68:76], "little") == (64 << 10) - 96
        for number in range(4):
            response = vm.call_device(request(0x0100, bytes(8), number + 2))
            assert response[0] == (0 if number < 3 else 7)


def test_sealed_memory_may_be_required(tmp_path: Path) -> None:
    from virtaccel.guest_tools.transport.vhost_user import VhostUserTransport

    with Daemon(tmp_path, "--require-sealed") as daemon:
        with Vm(daemon.path) as vm:
            vm.negotiate()
            with pytest.raises(TransportError, match="refuses"):
                vm.share()
        VhostUserTransport(daemon.path, bulk_bytes=1 << 20).close()


def sealed_vm(path: str) -> Vm:
    return Vm(path, memory=Memory(sealed=True))


@pytest.mark.parametrize(
    ("sockets", "option", "admitted"), [(1, None, True), (2, None, False), (2, "--no-require-sealed", True)]
)
def test_memory_that_may_shrink_is_refused_where_it_would_hurt_others(
    tmp_path: Path, sockets: int, option: str | None, admitted: bool
) -> None:
    """Shrinking it ends the daemon: with one front end that is its own loss."""
    paths = [str(tmp_path / name) for name in "ab"[:sockets]]
    with Daemon(tmp_path, "--sockets", *paths, *([option] if option else [])), Vm(paths[0]) as vm:
        vm.negotiate()
        if admitted:
            vm.share()
        else:
            with pytest.raises(TransportError, match="refuses"):
                vm.share()


def test_two_guests_in_one_process(tmp_path: Path) -> None:
    """Each socket is a device of its own: the other's objects cannot be named."""
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    with Daemon(tmp_path, "--sockets", *paths) as daemon:
        with sealed_vm(paths[0]).start() as one, sealed_vm(paths[1]).start() as two:
            first = one.call_device(request(0x0100, bytes(8)))[16:]
            second = two.call_device(request(0x0100, bytes(8)))[16:]
            assert first != second
            assert two.call_device(request(0x0101, first, 2))[0] == 11, "STALE_OBJECT"
            assert one.call_device(request(0x0101, second, 2))[0] == 11
            assert one.call_device(request(0x0101, first, 3))[0] == 0
            one.front.send(0xFFFF, b"", flags=4)
            assert len(two.call_device(request(1))) == 92
        assert daemon.stop() == 0
        assert sorted(os.listdir(tmp_path)) == ["daemon.log"]


@pytest.mark.parametrize("backend", ["reference", "openvino"])
def test_idle_costs_nothing_much(tmp_path: Path, backend: str) -> None:
    with Daemon(tmp_path, backend=backend) as daemon:
        assert_served(daemon.path)
        with Vm(daemon.path).start() as vm:
            assert len(vm.call_device(request(1))) == 92
            before = daemon.cpu_seconds()
            time.sleep(1.0)
            assert daemon.cpu_seconds() - before <= 0.02
            assert daemon.status("VmRSS") < 250 << 10
