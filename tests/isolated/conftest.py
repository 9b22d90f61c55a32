"""Workers for the tests of this folder: one nursery of reference workers for all of a module."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from virtaccel.device.backend import Backend
from virtaccel.device.isolated import IsolatingOpener
from virtaccel.device.isolated.backend import IsolatedBackend

SUPPORT = str(Path(__file__).resolve().parent.parent / "support")


@pytest.fixture(scope="module")
def support_on_path() -> Iterator[None]:
    """Interpreters started meanwhile find the support modules."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = SUPPORT + (os.pathsep + before if before else "")
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="module")
def opener(support_on_path: None) -> Iterator[IsolatingOpener]:
    made = IsolatingOpener("shared_reference:open_backend")
    yield made
    made.close()


@pytest.fixture
def backend(opener: IsolatingOpener) -> Iterator[IsolatedBackend]:
    made: Backend = opener()
    assert isinstance(made, IsolatedBackend)
    yield made
    made.close()
