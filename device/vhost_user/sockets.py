"""Where front ends come from: a socket at a path, an inherited descriptor, socket activation, or a VMM that listens.

Knows paths, ownership of socket files and sd_listen_fds(3); nothing of messages. A socket file that nobody listens on
is replaced, one that somebody does is left alone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress

# SD_LISTEN_FDS_START, sd_listen_fds(3).
_FIRST_ACTIVATED = 3
# sun_path has 108 bytes, the last of them zero (unix(7)).
_MAX_PATH_BYTES = 107
# Front ends that come while one is served wait here; more than a handful is a mistake of theirs.
_BACKLOG = 16


class SocketError(Exception):
    """No socket can be had this way; the text says why and names the path or descriptor."""


class Listener:
    """A listening Unix socket, and the file it is known by if that is ours to remove."""

    def __init__(self, listening: socket.socket, name: str, path: str | None = None) -> None:
        self.socket = listening
        self.name = name
        self._path = path
        self._file = _identity(path) if path else None

    def close(self) -> None:
        self.socket.close()
        if self._path is not None and self._file is not None and _identity(self._path) == self._file:
            os.unlink(self._path)


def listen(path: str) -> Listener:
    """Listen at `path`, replacing a stale socket file. The file appears when it can be connected to, not before: it is
    bound under another name first. Raises SocketError."""
    # A front end that sees the file may connect: it must be listened on by then.
    hidden = f"{path}~"
    if len(os.fsencode(hidden)) > _MAX_PATH_BYTES:
        raise SocketError(f"{path}: longer than the {_MAX_PATH_BYTES - 1} bytes that a socket's path may have here")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _directory_lock(path):
            _refuse_live(path)
            with suppress(FileNotFoundError):
                os.unlink(hidden)
            listening.bind(hidden)
            listening.listen(_BACKLOG)
            os.rename(hidden, path)
    except OSError as error:
        listening.close()
        raise SocketError(f"{path}: {error.strerror or error}") from error
    except SocketError:
        listening.close()
        raise
    return Listener(listening, path, path)


@contextmanager
def _directory_lock(path: str) -> Iterator[None]:
    """Two daemons that find the same stale file must not remove each other's new one. The folder itself is locked, so
    nothing is left behind."""
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _refuse_live(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SocketError(f"{path}: exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        failure = probe.connect_ex(path)
    if failure != errno.ECONNREFUSED:
        raise SocketError(f"{path}: another process listens there")


def _identity(path: str) -> tuple[int, int, int] | None:
    """Device, inode and time: an inode's number alone is given out again as soon as it is free."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def inherited(fd: int) -> Listener | socket.socket:
    """A Unix stream socket that this process was started with: a connection, or a listener. Raises SocketError."""
    try:
        given = socket.socket(fileno=fd)
    except OSError as error:
        raise SocketError(f"descriptor {fd}: {error.strerror}") from error
    if given.family != socket.AF_UNIX or given.type != socket.SOCK_STREAM:
        given.detach()
        raise SocketError(f"descriptor {fd} is not a Unix stream socket")
    # Workers must not hold a guest's socket open.
    given.set_inheritable(False)
    if given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return Listener(given, f"descriptor {fd}")
    return given


def activated(environment: MutableMapping[str, str]) -> list[Listener | socket.socket]:
    """The sockets of socket activation, none if there was none. The variables are removed: they are for this process
    alone. Raises SocketError."""
    owner, count = environment.get("LISTEN_PID"), environment.get("LISTEN_FDS")
    if owner is None or count is None or owner != str(os.getpid()):
        return []
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        environment.pop(name, None)
    # Each of them is opened below: a wild number would touch descriptors that are nobody's.
    if not count.isdecimal() or not 0 < int(count) <= 64:
        raise SocketError(f"LISTEN_FDS={count} is no sensible number of sockets")
    return [inherited(fd) for fd in range(_FIRST_ACTIVATED, _FIRST_ACTIVATED + int(count))]


def connect(path: str, timeout: float) -> socket.socket:
    """Connect to a VMM that listens at `path`, waiting up to `timeout` seconds for it to appear. Raises SocketError."""
    until = time.monotonic() + timeout
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
            return connection
        except OSError as error:
            connection.close()
            missing = error.errno in (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN)
            if not missing or time.monotonic() >= until:
                raise SocketError(f"{path}: {error.strerror or error}") from error
        # A VMM that starts takes seconds; twenty looks a second cost nothing.
        time.sleep(0.05)
