"""`virtaccel vm run` as people start it, in a process of its own, and what it leaves behind: nothing."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from virtaccel.vm.qemu import Sysroot

pytestmark = [pytest.mark.vm, pytest.mark.timeout(400)]


def vm_run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from virtaccel.cli.main import main; main()", "vm", "run", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )


def assert_good_run(model: Path, folder: Path) -> None:
    answers = model.with_suffix(".io.npz")
    done = vm_run(str(model), "--check", str(answers), "--logs", str(folder / "logs"), TMPDIR=str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "good" in done.stdout
    assert "MISMATCH" not in done.stdout
    assert (folder / "logs" / "daemon.log").stat().st_size > 0
    assert [path.name for path in folder.iterdir()] == ["logs"], "the run's own folder is gone"
    assert processes_with(str(folder)) == []


def processes_with(text: str) -> list[str]:
    """Command lines that name `text`: the daemon and QEMU have the run's folder in theirs."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line:
            found.append(line)
    return found


def test_the_digits_example(sysroot: Sysroot, root: Path, folder: Path) -> None:
    assert_good_run(root / "examples/digits/digits.tosa", folder)


def test_the_shared_face_detector(sysroot: Sysroot, shared: Path, folder: Path) -> None:
    assert_good_run(shared / "models/face_detection_short_range.tosa", folder)


def test_shell_is_a_console_with_the_guest_program(sysroot: Sysroot) -> None:
    """A person at a terminal, played through a pty."""
    command = [sys.executable, "-c", "from virtaccel.cli.main import main; main()", "vm", "shell"]
    person, terminal = pty.openpty()
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True)
    os.close(terminal)
    try:
        wait_until_read(person, b"# ")
        os.write(person, b"python3 /virtaccel-guest.pyz info; echo status=$?\n")
        assert b"max_contexts" in wait_until_read(person, b"status=0")
        os.write(person, b"poweroff -f\n")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(person)


def wait_until_read(fd: int, wanted: bytes, timeout: float = 120.0) -> bytes:
    """What the terminal shows, up to and with `wanted`."""
    seen = b""
    limit = time.monotonic() + timeout
    while wanted not in seen:
        assert time.monotonic() < limit, seen.decode(errors="replace")
        if select.select([fd], [], [], 1.0)[0]:
            seen += os.read(fd, 4096)
    return seen
