"""`virtaccel vm run` as people start it, in a process of its own, and what it leaves behind: nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from virtaccel.guest_tools.qemu import Sysroot

pytestmark = [pytest.mark.vm, pytest.mark.timeout(400)]


def vm_run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from virtaccel.guest_tools.cli import main; main()", "vm", "run", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )


def check(model: Path, folder: Path) -> None:
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
    check(root / "examples/digits/digits.tosa", folder)


def test_the_shared_face_detector(sysroot: Sysroot, shared: Path, folder: Path) -> None:
    check(shared / "models/face_detection_short_range.tosa", folder)


def test_a_file_that_is_no_model_ends_with_status_2(sysroot: Sysroot, folder: Path) -> None:
    model = folder / "junk.tosa"
    model.write_bytes(b"junk")
    done = vm_run(str(model))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
