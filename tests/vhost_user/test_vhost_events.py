"""Event descriptors of a front end that wants the device to wait: whatever it fills, and whenever it takes O_NONBLOCK
away, a signal returns at once. A signal that blocks is this file's time limit."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator

import pytest

from virtaccel.device.loop import events
from virtaccel.device.loop.bell import Bell
from virtaccel.device.loop.events import Kick, Signal

pytestmark = pytest.mark.timeout(20)
MOST = 2**64 - 2  # what write(2) lets a counter hold


@pytest.fixture
def eventfd() -> Iterator[int]:
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("wary", [True, False])
@pytest.mark.parametrize("blocking", [True, False])
def test_each_signal_adds_one(eventfd: int, wary: bool, blocking: bool) -> None:
    os.set_blocking(eventfd, blocking)
    signal = Signal(os.dup(eventfd), wary)
    for _ in range(100):
        signal.send()
    assert os.eventfd_read(eventfd) == 100
    signal.close()


@pytest.mark.parametrize("wary", [True, False])
def test_a_full_counter_that_blocks_holds_up_nobody(eventfd: int, wary: bool) -> None:
    os.set_blocking(eventfd, True)
    os.eventfd_write(eventfd, MOST)
    signal = Signal(os.dup(eventfd), wary)
    for _ in range(100):
        signal.send()
    assert os.eventfd_read(eventfd) >= MOST
    signal.send()
    assert os.eventfd_read(eventfd) == 1
    signal.close()


def test_a_counter_made_to_block_later_holds_up_nobody(eventfd: int) -> None:
    signal = Signal(os.dup(eventfd), wary=True)
    os.set_blocking(eventfd, True)
    os.eventfd_write(eventfd, MOST)
    signal.send()
    assert os.eventfd_read(eventfd) >= MOST
    signal.close()


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_full_pipes_and_sockets_made_to_block_hold_up_nobody(kind: str) -> None:
    if kind == "pipe":
        reading, writing = os.pipe()
    else:
        reading, writing = (end.detach() for end in socket.socketpair())
    signal = Signal(os.dup(writing))
    for _ in range(20_000):  # more than either holds
        signal.send()
    signal.send()
    assert os.read(reading, 8) == (1).to_bytes(8, "little")
    signal.close()
    os.close(reading)
    os.close(writing)


def test_without_asynchronous_io_full_counters_are_looked_at_first(
    eventfd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "bell", lambda: None)
    os.set_blocking(eventfd, True)
    signal = Signal(os.dup(eventfd))
    signal.send()
    assert os.eventfd_read(eventfd) == 1
    os.eventfd_write(eventfd, MOST)
    signal.send()
    assert os.eventfd_read(eventfd) == MOST
    signal.close()


@pytest.mark.parametrize("kind", [Kick, Signal])
def test_files_are_no_event_descriptors(kind: type[Kick | Signal]) -> None:
    with tempfile.TemporaryFile() as file, pytest.raises(OSError, match="neither an eventfd nor a pipe"):
        kind(file.fileno())
    memory = os.memfd_create("anon_inode:[eventfd]")
    with pytest.raises(OSError, match="neither an eventfd nor a pipe"):
        kind(memory)
    os.close(memory)


def test_a_bell_rings_eventfds_only(eventfd: int) -> None:
    bell = Bell()
    with open(os.devnull) as file, pytest.raises(OSError, match="Invalid argument"):
        bell.ring(file.fileno())
    with pytest.raises(OSError, match="Bad file descriptor"):
        bell.ring(1 << 20)
    bell.ring(eventfd)
    assert os.eventfd_read(eventfd) == 1
