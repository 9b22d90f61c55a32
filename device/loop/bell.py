"""Signalling an eventfd without ever blocking, whoever has filled it and whatever its flags are.

write(2) blocks on a full counter, poll(2) tells only how it was a moment ago, and pwritev2's RWF_NOWAIT is not for
eventfds. But the kernel signals an eventfd by itself when a request of asynchronous I/O ends (io_submit(2),
IOCB_FLAG_RESFD), and then a counter that is full just stays so. The request here is the cheapest there is: one byte
read from a memory file, which has ended when io_submit returns. Knows that one thing; nothing of front ends.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import platform
import struct
from typing import Final, NamedTuple

log = logging.getLogger(__name__)


class _Calls(NamedTuple):
    """Numbers of io_setup, io_submit and io_getevents."""

    setup: int
    submit: int
    events: int


_CALLS: Final = {"x86_64": _Calls(206, 209, 208), "aarch64": _Calls(0, 2, 4)}
# struct iocb: data, key, flags, operation, priority, file, memory, bytes, offset, reserved, flags, eventfd.
_REQUEST: Final = struct.Struct("<QIIHhIQQqQII")
_PREAD, _HAS_EVENTFD = 0, 1
# Offset of aio_resfd in struct iocb (linux/aio_abi.h).
_EVENTFD_AT: Final = 60
# sizeof(struct io_event).
_EVENT_BYTES: Final = 32
# Ended requests that are left unread before they are read at one go.
_ROOM: Final = 32

_syscall = ctypes.PyDLL(None, use_errno=True).syscall  # never blocks, so the interpreter's lock is kept


class Bell:
    """One queue of asynchronous I/O, for any number of eventfds, used by one thread. Raises OSError where machine or
    kernel has none."""

    def __init__(self) -> None:
        calls = _CALLS.get(platform.machine())
        if calls is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._calls = calls
        self._context = ctypes.c_ulong(0)
        _checked(_syscall(calls.setup, _ROOM, ctypes.byref(self._context)))
        self._source = os.memfd_create("virtaccel-bell", os.MFD_CLOEXEC)
        os.write(self._source, b"\0")
        self._byte = ctypes.create_string_buffer(1)
        request = _REQUEST.pack(
            0, 0, 0, _PREAD, 0, self._source, ctypes.addressof(self._byte), 1, 0, 0, _HAS_EVENTFD, 0
        )  # fmt: skip
        self._request = ctypes.create_string_buffer(request, len(request))
        self._eventfd = ctypes.c_uint32.from_buffer(self._request, _EVENTFD_AT)
        self._requests = (ctypes.c_void_p * 1)(ctypes.addressof(self._request))
        self._ended = ctypes.create_string_buffer(_EVENT_BYTES * _ROOM)
        self._unread = 0

    def ring(self, eventfd: int) -> None:
        """Add one to the counter, or leave it as it is if it is full. Raises OSError: EINVAL for no eventfd."""
        if self._unread == _ROOM:
            _checked(_syscall(self._calls.events, self._context, 0, _ROOM, self._ended, None))
            self._unread = 0
        self._eventfd.value = eventfd
        _checked(_syscall(self._calls.submit, self._context, 1, self._requests))
        self._unread += 1


def _checked(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@functools.cache
def bell() -> Bell | None:
    """The process's own, None where there can be none."""
    try:
        return Bell()
    except OSError as error:
        log.warning("a front end that fills a blocking eventfd can stop this process: no asynchronous I/O (%s)", error)
        return None
