"""Everybody that a daemon serves, on one event loop: listeners, connections, backends with news.

Knows who belongs to whom and in which order things end. What happens in a turn is bounded: a connection handles a few
messages, a ring a few chains. One front end at a time per socket; the next is accepted when it has gone. What goes
wrong while serving one front end ends that connection and nothing else.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import time
from typing import Final, TypeAlias

from virtaccel.device.loop.event_loop import Callback, EventLoop, Scope, stopped_by_signals
from virtaccel.device.ring_service import Device
from virtaccel.device.vhost_user.channel import Channel, Closed
from virtaccel.device.vhost_user.guest import ConnectedGuest, Settings
from virtaccel.device.vhost_user.message import MessageError
from virtaccel.device.vhost_user.session import EndSession, FrontEndSession
from virtaccel.device.vhost_user.sockets import Listener

# Where front ends come from: a listener, or the one connection there will ever be.
Source: TypeAlias = Listener | socket.socket

# A front end sends about a dozen messages to start; with 16 it is served in one turn, and no flood holds up the others.
_MESSAGES_A_TURN: Final = 16
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# Rest before accepting again when descriptors or memory have run out: the front end that waits keeps its place.
_ACCEPT_AGAIN_S: Final = 0.25


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
        self._session = FrontEndSession(self.guest, log)
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
        # The reset first, while the memory that loads answer into is still mapped; the socket last, since its end tells
        # the front end that all of it is over.
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
        # One at a time: the next stays in the backlog until this one has gone.
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
        # First, so that news that come while these are handled make the descriptor readable again.
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
                with stopped_by_signals(self._loop):
                    self._loop.run()
        finally:
            for port in self._ports:
                port.close()
            self._loop.close()
