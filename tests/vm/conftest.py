"""Real guests for the tests marked `vm`: QEMU, a Linux kernel, the daemon on OpenVINO. Nothing here is simulated.

Machines where QEMU cannot be had skip these tests and say why; with VIRTACCEL_REQUIRE_VM set they fail instead.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from slow_graphs import rotated, rotations

from virtaccel.vm import qemu
from virtaccel.vm.machine import Machine
from virtaccel.vm.qemu import QemuUnavailable, Sysroot
from virtaccel.vm.session import Options, VmSession

SLOW_SIZE, SLOW_STEPS = 1024, 40
BACKING_LIMIT = 192 << 20


def npz(**arrays: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


@pytest.fixture(scope="session")
def sysroot() -> Sysroot:
    try:
        return qemu.obtain()
    except QemuUnavailable as error:
        if os.environ.get("VIRTACCEL_REQUIRE_VM"):
            raise
        pytest.skip(f"no QEMU on this machine: {error}")


@pytest.fixture(scope="session")
def job_files(root: Path) -> dict[str, bytes]:
    """Models and known answers, by their path in the guest; shared models only where they are."""
    digits = root / "examples/digits"
    files = {"/job/digits.tosa": (digits / "digits.tosa").read_bytes()}
    with np.load(digits / "digits.io.npz") as answers:
        for index in range(2):
            files[f"/job/digits{index}.npz"] = npz(**{name: answers[name][index] for name in answers})
        first = {name: answers[name][0].copy() for name in answers}
    first["out_0"][0, 3] += 0.01
    files["/job/wrong.npz"] = npz(**first)
    face = root.parent / "shared/models/face_detection_short_range"
    if face.with_suffix(".tosa").exists():
        files["/job/face.tosa"] = face.with_suffix(".tosa").read_bytes()
        files["/job/face.npz"] = face.with_suffix(".io.npz").read_bytes()
    x = np.random.default_rng(7).standard_normal((1, SLOW_SIZE, SLOW_SIZE)).astype(np.float32)
    files["/job/slow.tosa"] = rotations(SLOW_SIZE, SLOW_STEPS)
    files["/job/slow.npz"] = npz(in_0=x, out_0=rotated(x, SLOW_STEPS))
    return files


@pytest.fixture(scope="module")
def vm(sysroot: Sysroot, job_files: dict[str, bytes]) -> Iterator[VmSession]:
    """One daemon and one guest for all tests of a module."""
    daemon = ("--max-backing-bytes", str(BACKING_LIMIT))
    with VmSession(Options(reboots=True, files=job_files, daemon=daemon)) as session:
        session.start()
        yield session


@pytest.fixture
def guest(vm: VmSession) -> Machine:
    """The guest with its device freshly opened, so that each test stands alone."""
    assert vm.machine is not None
    vm.machine.ask("open", lost_after=20.0)
    return vm.machine


@contextmanager
def temporary() -> Iterator[Path]:
    """A short path: Unix sockets live in it."""
    path = Path(tempfile.mkdtemp(prefix="virtaccel-test-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    with temporary() as path:
        yield path


@pytest.fixture(scope="module")
def short_folder() -> Iterator[Path]:
    with temporary() as path:
        yield path


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure in a guest is told with the last words of daemon, QEMU and console."""
    report = yield
    session = getattr(item, "funcargs", {}).get("vm")
    if report.failed and isinstance(session, VmSession):
        for name, data in session.logs().items():
            report.sections.append((name, data.decode(errors="replace")[-4000:]))
        report.sections.append(("daemon", f"exit status {session.daemon.status}"))
    return report
