"""The one loop of a daemon: readable descriptors, work left over and signals, in turns of one thread.

Knows descriptors, callbacks and who hears of their failures; knows nothing of front ends, rings or devices. Callbacks
are expected to be bounded: one that is not holds up every guest.
"""

from __future__ import annotations

import selectors
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, NamedTuple, TypeAlias

from virtaccel.device.loop.bell import bell

Callback: TypeAlias = Callable[[], None]
Fail: TypeAlias = Callable[[Exception], None]

# How often a service is called that asked to be polled: its guest would feel more, and 1000 looks a second of some
# microseconds each are half a percent of a processor.
POLLED_S: Final = 0.001
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Entry(NamedTuple):
    """A callback, and who hears of an exception out of it."""

    callback: Callback
    fail: Fail


class EventLoop:
    """Readable descriptors and work left over, in turns."""

    def __init__(self) -> None:
        bell()  # before descriptors can run out
        self.selector = selectors.DefaultSelector()
        self.again: dict[Callback, Fail] = {}
        self.polled: dict[Callback, Fail] = {}
        self._running = False

    def run(self) -> None:
        """Until `stop`."""
        self._running = True
        select, again, polled = self.selector.select, self.again, self.polled
        while self._running:
            for key, _ in select(0 if again else POLLED_S if polled else None):
                callback, fail = key.data
                try:
                    callback()
                except Exception as error:
                    fail(error)
            # A copy: a callback may add to these, or end a guest and with it its entries.
            for callback, fail in (*again.items(), *polled.items()) if again or polled else ():
                try:
                    callback()
                except Exception as error:
                    fail(error)

    def stop(self) -> None:
        self._running = False

    def close(self) -> None:
        self.selector.close()


class Scope:
    """The part of the loop that belongs to one owner, which hears of failures and ends all of it at once."""

    def __init__(self, loop: EventLoop, fail: Fail) -> None:
        self._loop = loop
        self._fail = fail
        self._fds: set[int] = set()
        self._services: set[Callback] = set()

    def watch(self, fd: int, callback: Callback, events: int = selectors.EVENT_READ) -> None:
        """Call when `fd` is ready. Raises OSError for a descriptor that cannot be watched."""
        self._loop.selector.register(fd, events, Entry(callback, self._fail))
        self._fds.add(fd)

    def change(self, fd: int, callback: Callback, events: int) -> None:
        self._loop.selector.modify(fd, events, Entry(callback, self._fail))

    def forget(self, fd: int) -> None:
        if fd in self._fds:
            self._fds.remove(fd)
            self._loop.selector.unregister(fd)

    def again(self, service: Callback, wanted: bool) -> None:
        """Whether to call `service` in the next turn, readable descriptors or not."""
        self._wish(self._loop.again, service, wanted)

    def poll(self, service: Callback, wanted: bool) -> None:
        """Whether to call `service` every so often, for a front end that does not kick."""
        self._wish(self._loop.polled, service, wanted)

    def _wish(self, wishes: dict[Callback, Fail], service: Callback, wanted: bool) -> None:
        if wanted:
            wishes[service] = self._fail
            self._services.add(service)
        else:
            wishes.pop(service, None)

    def close(self) -> None:
        for fd in tuple(self._fds):
            self.forget(fd)
        # Also what is due in this very turn: the owner may be closing in the middle of it.
        for service in self._services:
            self.again(service, False)
            self.poll(service, False)


@contextmanager
def stopped_by_signals(loop: EventLoop) -> Iterator[None]:
    """SIGTERM and SIGINT end the loop between two turns, through a descriptor that it watches."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)

    def handler(_number: int, _frame: FrameType | None) -> None:
        """Only here so that the signal does not act by itself: Python writes its number to the wakeup descriptor."""

    # A descriptor, not an exception: a signal must not end a turn in the middle of a guest's command.
    old_fd = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    old = [signal.signal(number, handler) for number in _STOP_SIGNALS]
    loop.selector.register(ours, selectors.EVENT_READ, Entry(loop.stop, _raise))
    try:
        yield
    finally:
        loop.selector.unregister(ours)
        for number, action in zip(_STOP_SIGNALS, old, strict=True):
            signal.signal(number, action)
        signal.set_wakeup_fd(old_fd)
        ours.close()
        theirs.close()


def _raise(error: Exception) -> None:
    raise error
