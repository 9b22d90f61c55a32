"""Target `vhost`: streams of vhost-user messages with descriptors over a real socket, answers held to the rules.

An input is a list of records: messages sound or damaged, cut into pieces, with descriptors of every sort or none;
ring memory filled with anything and kicked; connections that end and begin. Between them whole sound negotiations,
after which a command through the ring must be answered. In this process the server's own loop is turned by hand, and
when an input is over every descriptor and every mapping must be gone. `via` names another back end's socket.
"""

from __future__ import annotations

import mmap
import os
import socket
import time
from pathlib import Path
from random import Random
from typing import Final

from virtaccel.device.loop.event_loop import EventLoop
from virtaccel.device.reference import Reference
from virtaccel.device.ring_service import Device
from virtaccel.device.vhost_user.guest import Settings
from virtaccel.device.vhost_user.server import Connection
from virtaccel.guest_tools.errors import Unavailable
from virtaccel.harness.fuzz.target import Finding, TargetBase, quiet
from virtaccel.harness.fuzz.vhost_stream import BLOCK, PAGE, PATIENCE, Front, Stream

RECORD: Final = 8
LONGEST: Final = 60  # records; a sound negotiation alone is a dozen messages
NAME: Final = "virtaccel-fuzz"


class _Local:
    """A back end in this process, one turn of its loop at a time."""

    remote = False

    def __init__(self) -> None:
        log = quiet()
        self._loop = EventLoop()
        self._device = Device(Reference, log=log)
        self._log = log
        self._connection: Connection | None = None
        self.config = self._device.config.wire.pack()

    def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.settimeout(0)
        self._connection = Connection(
            self._loop, theirs, self._device, Settings(), self._log, self._ended, lambda: None
        )
        return ours

    def _ended(self) -> None:
        self._connection = None

    def turn(self) -> None:
        """One turn: what is readable now, then work left over."""
        self._loop.again[self._loop.stop] = _fail
        self._loop.run()
        self._loop.again.pop(self._loop.stop, None)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.end("the input is over")
        self._device.close()
        self._loop.close()


def _fail(error: Exception) -> None:
    raise error


class _Remote:
    """Somebody's back end at a socket."""

    remote = True

    def __init__(self, path: str) -> None:
        self._path = path
        self.config = b""

    def connect(self) -> socket.socket:
        until = time.monotonic() + PATIENCE
        while True:
            given = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            given.settimeout(PATIENCE)
            try:
                given.connect(self._path)
                return given
            except OSError as error:
                given.close()
                if time.monotonic() > until:
                    raise Finding(f"the back end takes no connection: {error}") from error
            time.sleep(0.01)

    def turn(self) -> None:
        """It turns by itself."""

    def close(self) -> None:
        return None


class VhostTarget(TargetBase):
    """See the module. `via` is empty, or vhost-user:PATH."""

    name = "vhost"
    stride = RECORD

    def __init__(self, via: str = "") -> None:
        super().__init__()
        way, _, path = via.partition(":")
        if via and (way != "vhost-user" or not path):
            raise Unavailable("vhost speaks to vhost-user:PATH")
        self.path = path
        EventLoop().close()  # what a process with a loop keeps is there before anything is counted
        memory = os.memfd_create(NAME, os.MFD_CLOEXEC)
        os.ftruncate(memory, BLOCK)
        other = os.memfd_create(NAME, os.MFD_CLOEXEC)
        os.ftruncate(other, PAGE)
        kick, call, error = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(3))
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        ends = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._fds = (memory, other, kick, call, error, null, *ends)
        odd = (null, *ends, other, kick, memory, call)
        self._front = Front(self.features, memory, mmap.mmap(memory, BLOCK), kick, call, error, odd)

    def generate(self, random: Random) -> bytes:
        return random.randbytes(RECORD * random.randrange(6, LONGEST))

    def execute(self, data: bytes) -> int:
        held = _descriptors()
        mapped = _mappings()
        back = _Remote(self.path) if self.path else _Local()
        stream = Stream(self._front, back)
        try:
            for at in range(0, len(data) - RECORD + 1, RECORD):
                stream.move(data[at], data[at + 1 : at + RECORD])
            stream.proves_alive()
        finally:
            stream.disconnect()
            back.turn()
            back.close()
        if not self.path:
            self._is_clean(held, mapped)
        return stream.messages

    def _is_clean(self, held: int, mapped: int) -> None:
        if _descriptors() != held:
            raise Finding(f"{_descriptors() - held} descriptors are left open")
        if _mappings() != mapped:
            raise Finding(f"{_mappings() - mapped} mappings of guest memory are left")

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count(NAME)
