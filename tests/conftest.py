"""What every test may use: the folder of shared models and vectors, a guard on how the packages are imported, and the
machine for itself where two tests run at a time."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "backend_openvino", "cli", "device", "guest_tools", "harness", "processes", "tosa_graph", "virtqueue", "vm",
)


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    with path.open() as file:
        fcntl.flock(file, how)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # said aloud: a process that was forked meanwhile has the file open, too


@pytest.hookimpl(wrapper=True, tryfirst=True)  # first, so that waiting is none of the test's own time limit
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Tests marked `alone` measure times: under pytest-xdist nothing else runs beside them. The machine is a lock that
    all others share, and whoever waits for it stands in the door: else others could go in past it for ever."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    alone = item.get_closest_marker("alone") is not None
    door, machine = ROOT / "pyproject.toml", ROOT / "README.md"  # any two files that are there
    with _locked(door, fcntl.LOCK_EX):
        inside = _locked(machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        inside.__enter__()
    try:
        return (yield)
    finally:
        inside.__exit__(None, None, None)


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's root folder."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared models, fixtures and conformance data beside the project; skips where it is absent."""
    folder = ROOT.parent / "shared"
    if not (folder / "conformance").is_dir():
        pytest.skip("no ../shared beside the project: its models and vectors are not on this machine")
    return folder


@pytest.fixture(scope="session", autouse=True)
def imported_by_full_name() -> Iterator[None]:
    """Each package is one module, `virtaccel.X`: a second one called `X` would have its own classes and registries."""
    yield
    bare = [name for name in sys.modules if name.split(".")[0] in PACKAGES]
    assert not bare, f"imported without the virtaccel prefix: {bare}"


@pytest.fixture(scope="module")
def support_on_path() -> Iterator[None]:
    """Interpreters started meanwhile find the support modules."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT / "tests" / "support") + (os.pathsep + before if before else "")
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before
