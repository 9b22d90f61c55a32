"""What every test may use: the folder of shared models and vectors, and a guard on how the packages are imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "backend_openvino", "cli", "device", "guest_tools", "harness", "processes", "tosa_graph", "virtqueue", "vm",
)


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
