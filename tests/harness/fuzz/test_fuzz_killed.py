"""A fuzzing run that is killed takes its processes along."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = "from virtaccel.cli.main import main; main()"


def _children(parent: int) -> set[int]:
    """Processes whose parent is `parent`, by the system's own table."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.add(int(stat.parent.name))
    return found


def test_a_killed_run_leaves_no_process_behind() -> None:
    command = [sys.executable, "-c", PROGRAM, "fuzz", "ring", "--seconds", "60", "--jobs", "2"]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    workers: set[int] = set()
    try:
        end = time.monotonic() + 30
        while len(workers) < 3 and time.monotonic() < end:  # two, and the tracker of shared memory
            time.sleep(0.1)
            workers = _children(run.pid)
        assert len(workers) >= 2
        time.sleep(1.0)  # they have begun
    finally:
        run.kill()
        run.wait()
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < end:
        time.sleep(0.1)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
