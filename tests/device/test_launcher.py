"""A daemon as a child process: ready when it says so, and the reason where it never is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from virtaccel.device.launcher import PROGRAM, Daemon, DaemonFailed
from virtaccel.guest_tools.transport.vhost_user import VhostUserTransport

REFERENCE = ("--backend", "reference")


def test_ready_means_that_every_socket_is_served(tmp_path: Path) -> None:
    sockets = [tmp_path / name for name in "ab"]
    with Daemon(sockets, tmp_path / "log", *REFERENCE) as daemon:
        for path in daemon.sockets:
            VhostUserTransport(path, timeout=5.0).close()
    assert daemon.status == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--backend", "nothing"), "no backend is called nothing"),
        ((*REFERENCE, "--option", "speed=3"), "backend reference has no option 'speed'"),
        ((*REFERENCE, "--option", "speed"), "'speed' is not NAME=VALUE"),
    ],
)
def test_why_it_does_not_start_is_told(tmp_path: Path, options: tuple[str, ...], reason: str) -> None:
    with pytest.raises(DaemonFailed, match=reason):
        Daemon([tmp_path / "a"], tmp_path / "log", *options)


def test_one_that_never_says_it_is_ready_is_ended(tmp_path: Path) -> None:
    script = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(60)"
    with pytest.raises(DaemonFailed, match="not ready within"):
        Daemon([tmp_path / "a"], tmp_path / "log", program=(sys.executable, "-c", script), seconds=1.0)
    process = int((tmp_path / "log").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_descriptor_that_is_none_is_refused(tmp_path: Path) -> None:
    command = [*PROGRAM, *REFERENCE, "--socket-path", str(tmp_path / "a"), "--ready-fd", "77"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "vhost-user-accel: --ready-fd 77: Bad file descriptor\n"
