"""Event descriptors that a front end handed over: eventfds, or pipes where it had none.

Their other end is not trusted. A front end could empty a kick descriptor between our look and our read, or fill a call
descriptor until a write blocks, and one thread serves every guest of the daemon. Yet O_NONBLOCK belongs to the open
file, which the front end shares, so it is not ours to set: kicks are read with RWF_NOWAIT and calls are written only
when poll(2) says that there is room.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select

_ONE = (1).to_bytes(8, "little")
_NOTHING_THERE = (errno.EAGAIN, errno.EINTR)


class Kick:
    """A descriptor that we read. Owned from here on."""

    __slots__ = ("_buffers", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
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
    """A descriptor that we write: call or error. Owned from here on."""

    __slots__ = ("_room", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._room: select.poll | None = None
        if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_NONBLOCK:
            self._room = select.poll()
            self._room.register(fd, select.POLLOUT)

    def send(self) -> None:
        """Signal once. If there is no room the other end has signals enough that it has not read."""
        if self._room is not None and not self._room.poll(0):
            return
        try:
            os.write(self.fd, _ONE)
        except OSError:
            return  # full, or nobody is there any more: the socket will tell

    def close(self) -> None:
        os.close(self.fd)
