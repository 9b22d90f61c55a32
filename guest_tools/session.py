"""A client and a transport together: blocking calls, many commands outstanding, transfers of any size, waiting.

Knows time, and that completions come in any order (virtqueue.md, section 7). Knows no ring and no array. Standard
library only: this also runs inside a guest.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from virtaccel.device.pacing import ACROSS_A_RING, EAGER_QUESTIONS, TOLD_OF_CHANGES, Pace
from virtaccel.guest_tools.client import Buffer, Client, ClientError, Event, EventStatus, Request
from virtaccel.guest_tools.transport.base import Backpressure, Completion, Shared, Transport, TransportError

T = TypeVar("T")

# Compiling a large model takes minutes on a small machine; longer than this is a device that has hung.
PATIENCE_SECONDS = 300.0
# Two keep the copy on this side and the one on the other busy at once; four also cover a turn of the device in between.
# More would only take the transport's memory from others.
TRANSFER_WINDOW = 4


class NoAnswer(TransportError):
    """The device did not answer in time. The command stays outstanding; only a reset settles it."""


class Finished(NamedTuple):
    """A command that came back: its value, or the ClientError that `receive` raised."""

    token: int
    request: Request[Any]
    value: Any
    error: ClientError | None


class Session:
    """Commands to one device over one transport. Single threaded.

    `patience` is how many seconds any one command may take, None for no limit.
    """

    __slots__ = (
        "_eager", "_finished", "_looks", "_outstanding", "_pause", "_together", "client", "patience", "transport",
    )  # fmt: skip

    def __init__(self, transport: Transport, patience: float | None = PATIENCE_SECONDS) -> None:
        self.transport = transport
        self.client = Client(transport.config)
        self.patience = patience
        self._outstanding: dict[int, Request[Any]] = {}
        self._finished: dict[int, Finished] = {}
        self._eager = EAGER_QUESTIONS
        # A transport that learns of changes (the in-process one) has a better rest than sleeping, and no need to look
        # every so often.
        self._together = transport.together
        self._pause: Callable[[float], None] = transport.pause if self._together else time.sleep
        self._looks = TOLD_OF_CHANGES if self._together else ACROSS_A_RING

    @property
    def outstanding(self) -> int:
        """Commands started and not yet collected by `finish` or `result`."""
        return len(self._outstanding) + len(self._finished)

    def call(self, request: Request[T]) -> T:
        """One round trip. Raises what Client.receive raises, NoAnswer, TransportError."""
        transport = self.transport
        try:
            token = transport.publish(request.frame, request.capacity)
        except Backpressure:
            token = self._publish_after_collecting(request)
        completion = transport.collect(self.patience)
        # Nearly always: with one command outstanding nothing else can come.
        if completion is not None and completion.token == token:
            return self.client.receive(request, completion.response)
        return self._call_out_of_order(request, token, completion)

    def _call_shared(self, request: Request[T]) -> T:
        """`call` for a request with shared memory."""
        try:
            token = self._publish(request)
        except Backpressure:
            token = self._publish_after_collecting(request)
        completion = self.transport.collect(self.patience)
        return self._call_out_of_order(request, token, completion)

    def start(self, request: Request[Any]) -> int:
        """Publish without waiting for the answer. Returns a token for `result`. Raises Backpressure."""
        token = self._publish(request)
        # Kept, for its answer may still come, and must then not be taken for another's.
        self._outstanding[token] = request
        return token

    def _publish(self, request: Request[Any]) -> int:
        source, sink = request.source, request.sink
        if source is None and not isinstance(sink, Shared):
            return self.transport.publish(request.frame, request.capacity)
        shared = sink if isinstance(sink, Shared) else None
        return self.transport.publish_shared(request.frame, request.capacity, source, shared)

    def finish(self, timeout: float | None = None) -> Finished | None:
        """The next command that came back, of those started; None if none did within `timeout` seconds."""
        if not self._finished and not self._absorb(timeout):
            return None
        return self._finished.pop(next(iter(self._finished)))

    def result(self, token: int) -> Any:
        """Wait for one started command: its value, or raises its error."""
        while (finished := self._finished.pop(token, None)) is None:
            if token not in self._outstanding:
                raise KeyError(f"no command outstanding with token {token}")
            if not self._absorb(self.patience):
                raise NoAnswer(f"no answer from the device in {self.patience} s")
        if finished.error is not None:
            raise finished.error
        return finished.value

    def run(self, requests: Iterable[Request[Any]]) -> None:
        """Carry out all `requests`, a few at a time. After the first error, those outstanding are awaited and the
        error is raised; the rest is not sent."""
        tokens: deque[int] = deque()
        try:
            for request in requests:
                if len(tokens) == TRANSFER_WINDOW:
                    self.result(tokens.popleft())
                tokens.append(self._start_after_collecting(request))
            while tokens:
                self.result(tokens.popleft())
        finally:
            # Their sinks belong to the caller, who may reuse them when this has raised: so nothing may be under way.
            for token in tokens:
                self._drop(token)

    def write(self, buffer: Buffer, data: memoryview | Shared, offset: int = 0) -> None:
        """Write `data` (format 'B', contiguous) into `buffer` from byte `offset` on, in as few frames as fit."""
        if len(data) <= self.client.largest_write:
            call = self._call_shared if isinstance(data, Shared) else self.call
            call(self.client.write_buffer(buffer, offset, data))
        else:
            self.run(self.client.write_chunks(buffer, offset, data))

    def read(self, buffer: Buffer, sink: memoryview | Shared, offset: int = 0) -> None:
        """Fill `sink` (writable, format 'B', contiguous) from byte `offset` of `buffer` on."""
        if len(sink) <= self.client.largest_read:
            call = self._call_shared if isinstance(sink, Shared) else self.call
            call(self.client.read_buffer(buffer, offset, sink))
        else:
            self.run(self.client.read_chunks(buffer, offset, sink))

    def submit(self, request: Request[Event], at_once: bool = False) -> Event:
        """One SUBMIT. With `at_once` its event is waited for next, before anything else is asked of the device: where
        device and caller are one process, the caller then does the work itself. Raises as `call` does."""
        if at_once and self._together:
            self.transport.expect_patience()
        return self.call(request)

    def wait(self, event: Event, timeout: float | None = None, pace: Pace | None = None) -> EventStatus:
        """Poll `event` until it is terminal, or `timeout` seconds have gone (then the state is PENDING). `pace` is that
        of the program, if the event was submitted just now.

        The protocol has no signal for a finished submission, so this asks a few times at once, then rests ever longer
        between questions. Where the last wait took long, asking at once would only take processors from the work.
        """
        if pace is not None and not self._together:
            return self._wait_paced(event, timeout, pace)
        call, poll = self.call, self.client.poll_event
        # No clock is read between these: they are over before the shortest rest would be.
        for _ in range(self._eager):
            status = call(poll(event))
            if status.state:
                self._eager = EAGER_QUESTIONS
                return status
        begin = time.monotonic()
        looks = self._looks
        rest = looks.shortest
        while timeout is None or (left := begin + timeout - time.monotonic()) > 0:
            self._pause(rest if timeout is None else min(rest, left))
            status = call(poll(event))
            if status.state:
                break
            rest = looks.longer(rest)
        self._eager = EAGER_QUESTIONS if time.monotonic() < begin + looks.eager else 1
        return status

    def _wait_paced(self, event: Event, timeout: float | None, pace: Pace) -> EventStatus:
        begin = time.monotonic()
        rested, pending = pace.seconds, 0.0
        looks = self._looks
        if rested > looks.eager:
            self._pause(rested if timeout is None else min(rested, timeout))
        else:
            rested = 0.0
        call, poll = self.call, self.client.poll_event
        # After a long program a sixteenth of its time is late enough to be noticed by nobody.
        rest = max(looks.shortest, rested / 16)
        eager = 1 if rested else EAGER_QUESTIONS
        while True:
            asked = time.monotonic() - begin
            status = call(poll(event))
            if status.state:
                pace.learn(rested, pending)
                return status
            pending = asked
            if timeout is not None and asked >= timeout:
                return status
            if eager > 1:
                eager -= 1
                continue
            self._pause(rest if timeout is None else max(min(rest, timeout - asked), 0.0))
            rest = looks.longer(rest)

    def reset(self) -> None:
        """Reset the device: all handles and outstanding commands are gone."""
        self.transport.reset()
        self._outstanding.clear()
        self._finished.clear()
        self.client.reset()

    def close(self) -> None:
        """Close the transport. May be called twice."""
        self.transport.close()

    def _absorb(self, timeout: float | None) -> bool:
        """Collect one completion and keep what it says; False if there was none."""
        completion = self.transport.collect(timeout)
        if completion is None:
            return False
        self._keep(completion)
        return True

    def _keep(self, completion: Completion) -> None:
        request = self._outstanding.pop(completion.token, None)
        if request is None:
            raise TransportError(f"completion of a command that was never published (token {completion.token})")
        value, error = None, None
        try:
            value = self.client.receive(request, completion.response, completion.beyond)
        except ClientError as failure:
            error = failure
        self._finished[completion.token] = Finished(completion.token, request, value, error)

    def _call_out_of_order(self, request: Request[T], token: int, completion: Completion | None) -> T:
        """Others came first: keep them for whoever started them."""
        while completion is not None and completion.token != token:
            self._keep(completion)
            completion = self.transport.collect(self.patience)
        if completion is None:
            self._outstanding[token] = request
            raise NoAnswer(f"no answer from the device in {self.patience} s")
        return self.client.receive(request, completion.response, completion.beyond)

    def _publish_after_collecting(self, request: Request[Any]) -> int:
        while self._outstanding:
            if not self._absorb(self.patience):
                raise NoAnswer(f"no answer from the device in {self.patience} s")
            try:
                return self._publish(request)
            except Backpressure:
                continue
        # Nothing is outstanding any more: if it does not fit now, it never will.
        return self._publish(request)

    def _start_after_collecting(self, request: Request[Any]) -> int:
        try:
            return self.start(request)
        except Backpressure:
            token = self._publish_after_collecting(request)
            self._outstanding[token] = request
            return token

    def _drop(self, token: int) -> None:
        """Await a command whose outcome no longer matters: its parts and sink must not be in use any more."""
        try:
            self.result(token)
        except (ClientError, KeyError):
            return
