"""Event descriptors that a front end handed over: eventfds, or pipes where it had none.

Their other end is not trusted. A front end could empty a kick descriptor between our look and our read, or fill a call
descriptor until a write blocks, and one thread serves every guest of the daemon. Yet O_NONBLOCK belongs to the open
file, which the front end shares, so it is not ours to set, and the front end may take it away at any time. So kicks are
read with RWF_NOWAIT, pipes are written with it, and eventfds are signalled in a way that cannot block (bell.py).
Descriptors of other kinds are refused: reading and writing them may take as long as whoever serves the file likes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import stat
from enum import Enum

from virtaccel.device.loop.bell import bell

_ONE = (1).to_bytes(8, "little")
# Both mean that somebody else took the kick, which is not our trouble.
_NOTHING_THERE = (errno.EAGAIN, errno.EINTR)


class _Kind(Enum):
    EVENTFD = "eventfd"
    STREAM = "pipe or socket"


def _kind(fd: int) -> _Kind:
    """Raises OSError for anything else."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        return _Kind.STREAM
    if os.readlink(f"/proc/self/fd/{fd}") != "anon_inode:[eventfd]":  # no path in a file system looks like this
        raise OSError(errno.EINVAL, "neither an eventfd nor a pipe")
    return _Kind.EVENTFD


class Kick:
    """A descriptor that we read. Owned from here on, unless it is refused with an OSError."""

    __slots__ = ("_buffers", "fd")

    def __init__(self, fd: int) -> None:
        _kind(fd)
        self.fd = fd
        # Made once: a kick is read for every batch.
        self._buffers = (bytearray(8),)

    def drain(self) -> bool:
        """Make it quiet until the next kick. False if it never will be: the other end of a pipe has gone."""
        try:
            return bool(os.preadv(self.fd, self._buffers, -1, os.RWF_NOWAIT))
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:
                return self._drain_plainly()
            return error.errno in _NOTHING_THERE

    def _drain_plainly(self) -> bool:
        """Kernels before 5.8 know no RWF_NOWAIT for eventfds."""
        if not select_readable(self.fd):
            return True
        try:
            return bool(os.read(self.fd, 8))
        except OSError as error:
            return error.errno in _NOTHING_THERE

    def close(self) -> None:
        os.close(self.fd)


def select_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


class Signal:
    """A descriptor that we write: call or error. Owned from here on, unless it is refused with an OSError.

    `wary`: others would suffer if the front end made the descriptor block, now or later. Otherwise one that does not
    block is simply written, which costs less."""

    __slots__ = ("_room", "_send", "fd")

    def __init__(self, fd: int, wary: bool = True) -> None:
        kind = _kind(fd)
        self.fd = fd
        self._room: select.poll | None = None
        if kind is _Kind.STREAM:
            self._send = self._write_stream
        # Alone with its guest a daemon may trust the flag: who takes it away stops only itself.
        elif not wary and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_NONBLOCK:
            self._send = self._write
        elif bell() is not None:
            self._send = self._ring
        else:
            self._room = select.poll()
            self._room.register(fd, select.POLLOUT)
            self._send = self._write_if_room

    def send(self) -> None:
        """Signal once. If there is no room the other end has signals enough that it has not read."""
        try:
            self._send()
        except OSError:
            return  # full, or nobody is there any more: the socket will tell

    def _write(self) -> None:
        os.write(self.fd, _ONE)

    def _write_stream(self) -> None:
        os.pwritev(self.fd, (_ONE,), -1, os.RWF_NOWAIT)

    def _ring(self) -> None:
        chosen = bell()
        if chosen is not None:
            chosen.ring(self.fd)

    def _write_if_room(self) -> None:
        """Where nothing better can be had: the front end might fill the counter between the look and the write."""
        if self._room is not None and self._room.poll(0):
            os.write(self.fd, _ONE)

    def close(self) -> None:
        os.close(self.fd)
