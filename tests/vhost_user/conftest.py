"""Daemons for the tests of this folder: one process for many tests where nothing of it is broken, else a fresh one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import Daemon


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with the reference backend, for all tests of a module."""
    with Daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


@pytest.fixture
def daemon(shared_daemon: Daemon) -> Iterator[Daemon]:
    """The module's daemon, which has to survive the test and to be idle after it."""
    yield shared_daemon
    assert shared_daemon.alive(), shared_daemon.log()[-3000:]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose paths are short enough for sockets."""
    return tmp_path
