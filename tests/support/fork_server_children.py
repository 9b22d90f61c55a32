"""What children of a test's fork server do: one thing each, named by their work, and a report on their first
descriptor."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from virtaccel.processes import confine
from virtaccel.processes.fork_server import Run


def prepare(words: Sequence[str]) -> Run:
    assert list(words) == ["a", "b"]
    return run


def run(work: bytes, descriptors: list[int]) -> int:
    name, _, argument = work.decode().partition(" ")
    return DEEDS[name](argument, descriptors)


def _exit(argument: str, descriptors: list[int]) -> int:
    return int(argument)


def _fail(argument: str, descriptors: list[int]) -> int:
    raise RuntimeError("failed by the test")


def _signal(argument: str, descriptors: list[int]) -> int:
    os.kill(os.getpid(), int(argument))
    return 0


def _sleep(argument: str, descriptors: list[int]) -> int:
    time.sleep(float(argument))
    return 0


def _descriptors(argument: str, descriptors: list[int]) -> int:
    said = " ".join(sorted(os.listdir("/proc/self/fd"), key=int))
    os.write(descriptors[0], said.encode())
    return 0


def _memory(argument: str, descriptors: list[int]) -> int:
    """Take 100 MB with a limit of 64 above what there is."""
    confine.limit(memory=_private_bytes() + (64 << 20))
    try:
        bytearray(100 << 20)
    except MemoryError:
        return 9
    return 0


def _private_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData"):
            return int(line.split()[1]) << 10
    return 0


def _processor(argument: str, descriptors: list[int]) -> int:
    confine.limit(cpu_seconds=1)
    while True:
        pass


def _file_size(argument: str, descriptors: list[int]) -> int:
    confine.limit(file_bytes=1000)
    os.write(descriptors[0], bytes(1000))
    os.write(descriptors[0], bytes(1))
    return 0


FORBIDDEN: dict[str, Callable[[], object]] = {
    "network": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
    "local socket": lambda: socket.socket(socket.AF_UNIX),
    "program": lambda: os.execv("/bin/true", ["true"]),
    "process": os.fork,
    "child": lambda: subprocess.run(["/bin/true"]),
    "write a file": lambda: os.open("/dev/null", os.O_WRONLY),
    "make a file": lambda: os.open("/dev/shm/virtaccel-never", os.O_CREAT | os.O_RDONLY),
    "remove a file": lambda: os.unlink("/nowhere"),
    "rename a file": lambda: os.rename("/nowhere", "/nowhere2"),
    "make a folder": lambda: os.mkdir("/dev/shm/virtaccel-never"),
    "signal another": lambda: os.kill(os.getppid(), 0),
    "change a file": lambda: os.chmod("/nowhere", 0),
}


def _confined(argument: str, descriptors: list[int]) -> int:
    """Each thing that must fail with EPERM, and what has to work still; names of those that came out otherwise."""
    files = argument == "files"
    waiting = threading.Event()
    other = threading.Thread(target=lambda: waiting.wait(30) and FORBIDDEN["local socket"]())
    other.start()
    if not confine.filter_calls(files=files):
        return 77
    wrong = [name for name, deed in FORBIDDEN.items() if not _refused(deed)]
    waiting.set()  # a thread that was there before is confined too, or it makes a socket
    other.join()
    if _refused(lambda: os.close(os.open("/dev/null", os.O_RDONLY))) is files:
        wrong.append("reading files")
    threading.Thread(target=lambda: None).start()
    os.close(os.memfd_create("fine"))
    ours, theirs = socket.socketpair()
    ours.send(b"fine")
    if theirs.recv(4) != b"fine":
        wrong.append("sockets there are")
    status = Path("/proc/self/status").read_text() if files else "NoNewPrivs:\t1"
    if "NoNewPrivs:\t1" not in status:
        wrong.append("privileges")
    os.write(descriptors[0], ", ".join(wrong).encode() or b"-")
    return 0


def _refused(deed: Callable[[], object]) -> bool:
    try:
        deed()
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _abort_confined(argument: str, descriptors: list[int]) -> int:
    """abort(3) has to end the process even so."""
    confine.filter_calls(files=False)
    os.abort()


def _divide(argument: str, descriptors: list[int]) -> int:
    """A model that ends the real runtime's process while it is compiled."""
    import numpy as np
    import openvino as ov
    from openvino import opset15 as ops

    confine.limit(memory=4 << 30)
    core = ov.Core()
    core.get_property("CPU", "FULL_DEVICE_NAME")
    confine.filter_calls(files=False)
    least = ops.constant(np.full(4, -(2**31), np.int32))
    quotient = ops.divide(least, ops.constant(np.full(4, -1, np.int32)))
    parameter = ops.parameter([4], ov.Type.i32)
    core.compile_model(ov.Model([ops.result(ops.add(parameter, quotient))], [parameter], "divide"), "CPU")
    return 0


def _ignore(argument: str, descriptors: list[int]) -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return _sleep("1000", descriptors)


DEEDS: dict[str, Callable[[str, list[int]], int]] = {
    "exit": _exit,
    "fail": _fail,
    "signal": _signal,
    "sleep": _sleep,
    "descriptors": _descriptors,
    "memory": _memory,
    "processor": _processor,
    "file-size": _file_size,
    "confined": _confined,
    "abort": _abort_confined,
    "divide": _divide,
    "ignore": _ignore,
}
