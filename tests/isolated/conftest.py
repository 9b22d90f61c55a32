"""Workers for the tests of this folder: one fork server of reference workers for all of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from virtaccel.device.backend import Backend
from virtaccel.device.isolated import WorkerLauncher
from virtaccel.device.isolated.backend import IsolatedBackend


@pytest.fixture(scope="module")
def opener(support_on_path: None) -> Iterator[WorkerLauncher]:
    made = WorkerLauncher("shared_reference:open_backend")
    yield made
    made.close()


@pytest.fixture
def backend(opener: WorkerLauncher) -> Iterator[IsolatedBackend]:
    made: Backend = opener()
    assert isinstance(made, IsolatedBackend)
    yield made
    made.close()
