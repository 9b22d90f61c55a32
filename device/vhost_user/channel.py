"""The socket of one front end: whole messages in, replies out, and every descriptor owned by exactly one place.

Knows stream framing and SCM_RIGHTS (unix(7), Vhost-user Protocol "Communication"); knows nothing of what a request
means. The socket is non-blocking. Descriptors arrive with the first byte of the piece they were sent with; all that
arrive until a message is complete belong to that message.
"""

from __future__ import annotations

import array
import os
import socket
from types import TracebackType
from typing import NamedTuple

from virtaccel.device.vhost_user import message as m

# Room for the most that a message may carry; the kernel closes what does not fit and says so.
_ANCILLARY_BYTES = socket.CMSG_SPACE(m.MAX_MEMORY_SLOTS * array.array("i").itemsize)


class Closed(Exception):
    """The other side has closed the connection, or it broke."""


class Descriptors:
    """Descriptors that came with a message. `take` hands one over, `close` (or leaving `with`) ends the rest."""

    __slots__ = ("_fds",)

    def __init__(self, fds: list[int]) -> None:
        self._fds = fds

    def __len__(self) -> int:
        return len(self._fds)

    def take(self) -> int:
        return self._fds.pop(0)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> Descriptors:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Received(NamedTuple):
    """A message and its descriptors; the receiver owns them."""

    message: m.Message
    descriptors: Descriptors


class Channel:
    """Framing over a connected Unix stream socket, which it owns from here on."""

    def __init__(self, connection: socket.socket) -> None:
        # One thread serves every guest: no front end may make it wait.
        connection.setblocking(False)
        self._socket = connection
        self._header: m.Header | None = None
        self._data = bytearray()
        self._fds: list[int] = []
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> Received | None:
        """The next whole message, or None if it is not there yet. Raises Closed, MessageError."""
        while True:
            wanted = self._header.size if self._header else m.HEADER.size
            if len(self._data) < wanted and not self._read(wanted - len(self._data)):
                return None
            if len(self._data) < wanted:
                continue
            data = bytes(self._data)
            self._data.clear()
            if self._header is None:
                self._header = m.decode_header(data)
                continue
            message = m.Message(self._header.request, self._header.flags, data)
            descriptors, self._fds, self._header = Descriptors(self._fds), [], None
            return Received(message, descriptors)

    def _read(self, size: int) -> bool:
        """Read up to `size` bytes with what comes along; False if there is nothing to read now."""
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(size, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise Closed(str(error)) from error
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                self._fds.extend(numbers)
        if flags & socket.MSG_CTRUNC:
            # The kernel has closed what did not fit; nobody can tell which region or ring lost its descriptor.
            raise m.MessageError(f"more descriptors than the {m.MAX_MEMORY_SLOTS} that a message may carry")
        # A front end could send one descriptor with each byte and never end its message.
        if len(self._fds) > m.MAX_MEMORY_SLOTS:
            raise m.MessageError("descriptors pile up without a message")
        if not data:
            raise Closed("in the middle of a message" if self._data or self._header else "end of stream")
        self._data += data
        return True

    def send(self, data: bytes) -> bool:
        """Send now what fits and keep the rest. True if all has gone, which receiving more should wait for: `flush`.
        Raises Closed."""
        self._unsent += data
        return self.flush()

    def flush(self) -> bool:
        """Send what is left; whether all has gone."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent, socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                raise Closed(str(error)) from error
            del self._unsent[:sent]
        return True

    def close(self) -> None:
        # Those of a message that never became whole.
        Descriptors(self._fds).close()
        self._socket.close()
