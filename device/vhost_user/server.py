"""The one loop of the daemon: listeners, connections, kicks, finished loads and signals, for every guest it serves.

Knows descriptors and turns. Everything else happens in callbacks, each of them bounded: a connection handles a few
messages a turn, a ring a few chains. One front end at a time per socket; the next is accepted when it has gone. What
goes wrong while serving one front end ends that connection and nothing else.
"""

from __future__ import annotations

import errno
import logging
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple, TypeAlias

from virtaccel.device.loop.bell import bell
from virtaccel.device.ring_service import Device
from virtaccel.device.vhost_user.channel import Channel, Closed
from virtaccel.device.vhost_user.guest import ConnectedGuest, Settings
from virtaccel.device.vhost_user.message import MessageError
from virtaccel.device.vhost_user.session import EndSession, Session
from virtaccel.device.vhost_user.sockets import Listener

Callback: TypeAlias = Callable[[], None]
Fail: TypeAlias = Callable[[Exception], None]
Source: TypeAlias = Listener | socket.socket
"""Where front ends come from: a listener, or the one connection there will ever be."""

POLLED_RING_S = 0.001
"""How often a ring is looked at whose front end asked for polling instead of kicks."""
_MESSAGES_A_TURN = 16
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ACCEPT_AGAIN_S = 0.25
"""Rest before accepting again when descriptors or memory have run out: the front end that waits keeps its place."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


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
            for key, _ in select(0 if again else POLLED_RING_S if polled else None):
                callback, fail = key.data
                try:
                    callback()
                except Exception as error:
                    fail(error)
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
        self._loop.selector.register(fd, events, Entry(callback, self._fail))
        self._fds.add(fd)

    def change(self, fd: int, callback: Callback, events: int) -> None:
        self._loop.selector.modify(fd, events, Entry(callback, self._fail))

    def forget(self, fd: int) -> None:
        if fd in self._fds:
            self._fds.remove(fd)
            self._loop.selector.unregister(fd)

    def again(self, service: Callback, wanted: bool) -> None:
        self._wish(self._loop.again, service, wanted)

    def poll(self, service: Callback, wanted: bool) -> None:
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
        for service in self._services:
            self.again(service, False)
            self.poll(service, False)


class Connection:
    """One front end: messages in, replies out, until it goes or has to. `ended` is called once, at the very end."""

    def __init__(
        self, loop: EventLoop, given: socket.socket, device: Device, settings: Settings, log: logging.Logger,
        ended: Callback, after_reset: Callback,
    ) -> None:
        self._log = log
        self._ended: Callback | None = ended
        self._scope = Scope(loop, self._failed)
        self._channel = Channel(given)
        self.guest = ConnectedGuest(device, settings, self._scope, log, after_reset)
        self._session = Session(self.guest, log)
        self.guest.started = self._session.kicked
        self._scope.watch(self._channel.fileno(), self._ready)

    def _ready(self) -> None:
        """A bounded number of messages; what is left keeps the descriptor readable."""
        channel = self._channel
        if self._ended is None:
            return
        for _ in range(_MESSAGES_A_TURN):
            received = channel.receive()
            if received is None:
                return
            with received.descriptors as descriptors:
                reply = self._session.handle(received.message, descriptors)
            if reply is not None and not channel.send(reply):
                # A front end that does not read its replies is not asked for more messages.
                self._scope.change(channel.fileno(), self._writable, selectors.EVENT_WRITE)
                return

    def _writable(self) -> None:
        if self._ended is not None and self._channel.flush():
            self._scope.change(self._channel.fileno(), self._ready, selectors.EVENT_READ)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, Closed):
            self.end(f"front end gone: {error}")
        elif isinstance(error, (EndSession, MessageError)):
            self.end(f"session ended: {error}", logging.WARNING)
        else:
            self._log.error("unexpected failure", exc_info=error)
            self.end("session ended: unexpected failure", logging.ERROR)

    def end(self, why: str, level: int = logging.INFO) -> None:
        """Protocol reset, then give everything back. What fails here is logged and does not stop the rest."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        self._log.log(level, "%s", why)
        for step in (self._session.close, self.guest.close, self._scope.close, self._channel.close):
            try:
                step()
            except Exception:
                self._log.exception("ending a session")
        ended()


class Port:
    """One place where front ends come in, and the device that they find there. Both belong to it from here on."""

    def __init__(
        self, loop: EventLoop, source: Source, device: Device, settings: Settings, log: logging.Logger,
        finished: Callback,
    ) -> None:
        self._loop = loop
        self._source = source
        self._device = device
        self._settings = settings
        self._log = log
        self._finished = finished
        self._scope = Scope(loop, self._failed)
        self._connection: Connection | None = None
        self._backend: int | None = None
        self._closing = False
        self._accept_at = 0.0
        self._watch_backend()
        self._open()

    def _open(self) -> None:
        """Wait for the next front end, or serve the only one there will be."""
        if isinstance(self._source, Listener):
            self._source.socket.setblocking(False)
            self._scope.watch(self._source.socket.fileno(), self._accept)
        else:
            self._serve(self._source)

    def _accept(self) -> None:
        if not isinstance(self._source, Listener):
            return
        listening = self._source.socket
        try:
            given, _ = listening.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self._rest_from_accepting(error)
            return  # or the front end has gone again
        self._accept_at = 0.0
        self._scope.forget(listening.fileno())
        self._serve(given)

    def _rest_from_accepting(self, error: OSError) -> None:
        """The listener stays readable, so watching it on would be a busy loop."""
        if not self._accept_at:
            self._log.error("accept: %s", error.strerror)
        self._accept_at = time.monotonic() + _ACCEPT_AGAIN_S
        if isinstance(self._source, Listener):
            self._scope.forget(self._source.socket.fileno())
        self._scope.poll(self._accept_again, True)

    def _accept_again(self) -> None:
        if time.monotonic() >= self._accept_at:
            self._scope.poll(self._accept_again, False)
            self._open()

    def _serve(self, given: socket.socket) -> None:
        self._log.info("front end connected")
        self._connection = Connection(
            self._loop, given, self._device, self._settings, self._log, self._ended, self._watch_backend
        )

    def _ended(self) -> None:
        """The front end has gone and everything of it has been reset."""
        self._connection = None
        if self._closing:
            return
        if isinstance(self._source, Listener):
            self._open()
        else:
            self._finished()

    def _watch_backend(self) -> None:
        """Anew after every reset, which may have replaced the backend and with it the descriptor."""
        if self._backend is not None:
            self._scope.forget(self._backend)
        self._backend = self._device.fileno()
        if self._backend is not None:
            self._scope.watch(self._backend, self._backend_ready)

    def _backend_ready(self) -> None:
        self._device.backend.acknowledge()
        if self._connection is not None:
            self._connection.guest.loads_ended()

    def _failed(self, error: Exception) -> None:
        """Serving the backend went wrong: whoever is connected cannot be served on."""
        self._log.error("unexpected failure", exc_info=error)
        if self._connection is not None:
            self._connection.end("session ended: unexpected failure", logging.ERROR)

    def close(self) -> None:
        self._closing = True
        if self._connection is not None:
            self._connection.end("daemon stops")
        self._scope.close()
        if isinstance(self._source, Listener):
            self._source.close()
        self._device.close()


class Server:
    """Every port of this process on one loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop = EventLoop()
        self._ports: list[Port] = []
        self._open = 0

    def add(self, source: Source, device: Device, log: logging.Logger) -> None:
        self._open += 1
        self._ports.append(Port(self._loop, source, device, self._settings, log, self._finished))

    def _finished(self) -> None:
        """A port whose only connection has ended. With the last one the daemon has nothing left to do."""
        self._open -= 1
        if not self._open:
            self._loop.stop()

    def run(self) -> None:
        """Until SIGTERM or SIGINT, or until no front end can come any more. Gives everything back, whatever happens."""
        try:
            if self._open:
                with _signals(self._loop):
                    self._loop.run()
        finally:
            for port in self._ports:
                port.close()
            self._loop.close()


@contextmanager
def _signals(loop: EventLoop) -> Iterator[None]:
    """SIGTERM and SIGINT end the loop between two turns, through a descriptor that it watches."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)

    def handler(_number: int, _frame: FrameType | None) -> None:
        """Only here so that the signal does not act by itself: Python writes its number to the wakeup descriptor."""

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
