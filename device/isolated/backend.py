"""The contract over a worker: what the engine calls, in a process that runs no native code of a backend.

Every call is one round trip to the worker, except those that need none: WRITE and READ go straight to the buffers'
memory, which is mapped here too, and the end of a submission is read off the completion page. Whether a buffer is in
use is known here from the submissions that have not ended; only after a cancelled or expired one the worker is asked,
since native work may go on over its buffers. The worker is not trusted: what it says is judged, and whatever it does
(end, stop answering, say what cannot be) makes this backend lost: it is killed, and every call raises DEVICE_LOST from
then on.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final, NoReturn, Protocol, TypeVar

from virtaccel.device.backend import (
    RELEASED,
    Accepted,
    AllocatedBuffer,
    Artifact,
    BackendError,
    Binding,
    BufferRequest,
    DeviceInfo,
    Handle,
    Indeterminate,
    Loaded,
    Loading,
    Polled,
    Rejected,
    ReleaseIndeterminate,
    ReleaseOutcome,
    ReleaseRejected,
    Segments,
    SubmitOutcome,
)
from virtaccel.device.isolated import messages
from virtaccel.device.isolated.completion_page import SLOTS, CompletionPage, Ending
from virtaccel.device.isolated.messages import Answer, Greeting, Kind, Op, Outcome, ProtocolError
from virtaccel.device.pacing import IN_A_BACKEND
from virtaccel.device.wire import Access, EventState, Status
from virtaccel.processes.fork_server import ForkServerLost
from virtaccel.processes.sealed import Mapping, is_sealed

log = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 5.0
"""How long a request may take. Nothing that is asked waits for native work, so a worker that takes longer hangs."""
_LOOKS: Final = 64
"""How often a pending submission is looked at on the completion page before the worker's life is."""
_PENDING: Final = Polled(EventState.PENDING, Status.OK)
_STATUS: Final = {int(status): status for status in Status}
_STATE: Final = {int(state): state for state in EventState}

T = TypeVar("T")


class Process(Protocol):
    """The worker's process, as far as this file minds it."""

    def ended(self, timeout: float) -> int | None: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


class _Context:
    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class _Queue(_Context):
    __slots__ = ()


class _Program(_Context):
    """A program, or a load that may become one; `ended` is what the worker said about its end."""

    __slots__ = ("ended",)

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.ended: Answer | None = None


class _Buffer:
    """`readers` and `writers` are submissions that have not been seen to end. `doubtful`: one has ended over this
    buffer whose native work may go on."""

    __slots__ = ("doubtful", "mapping", "number", "readers", "view", "writers")

    def __init__(self, number: int, mapping: Mapping) -> None:
        self.number = number
        self.mapping = mapping
        self.view = mapping.view
        self.readers: set[_Event] = set()
        self.writers: set[_Event] = set()
        self.doubtful = False


class _Event:
    __slots__ = ("buffers", "ending", "looks", "polled", "slot", "turn")

    def __init__(self, slot: int, turn: int, buffers: set[_Buffer]) -> None:
        self.slot = slot
        self.turn = turn
        self.buffers = buffers
        self.polled = _PENDING
        self.ending: Ending | None = None
        self.looks = 0


def _as(handle: Handle, kind: type[T]) -> T:
    """A handle of another kind means a broken engine, not a broken guest."""
    if not isinstance(handle, kind):
        raise TypeError(f"{handle!r} is no {kind.__name__}")
    return handle


class IsolatedBackend:
    """A worker's backend. Owns the socket, the process and the completion page, and first waits up to
    `greeting_seconds` for the worker to be ready. `lost` is called once if it is lost. Raises ProtocolError,
    OSError."""

    def __init__(
        self, connection: socket.socket, process: Process, page: CompletionPage, greeting_seconds: float,
        lost: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._tell_lost = lost
        self._connection = connection
        self._process = process
        self._page = page
        self._numbers = count(1)
        self._buffers: set[_Buffer] = set()
        self._loads: dict[int, _Program] = {}
        self._free_slots = list(range(SLOTS - 1, -1, -1))
        self._turns = count(1)
        self._pending: set[_Event] = set()
        self._lost: str | None = None
        self._closed = False
        self._memory = -1
        self._news = select.epoll()
        self.last_refusal: str | None = None
        """Why the latest load failed, for tools on the host."""
        try:
            greeting = self._greeted(greeting_seconds)
        except BaseException:
            self.close()
            raise
        self._info = greeting.info
        self.device = greeting.device
        self._news.register(connection.fileno(), select.EPOLLIN)

    def _greeted(self, seconds: float) -> Greeting:
        """Wait for the worker to be ready. Raises ProtocolError; OSError, TimeoutError among them."""
        connection = self._connection
        connection.settimeout(seconds)
        data, ancillary, _, _ = connection.recvmsg(messages.MAX_MESSAGE, 64, socket.MSG_CMSG_CLOEXEC)
        descriptors = array.array("i")
        for _, _, content in ancillary:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
        if not data:
            raise ProtocolError(f"the worker does not start: {self._exit_reason()}")
        if descriptors:
            self._memory = descriptors[0]
        for extra in descriptors[1:]:
            os.close(extra)
        greeting = messages.read_greeting(data)
        if isinstance(greeting, str):
            raise ProtocolError(greeting)
        if self._memory < 0 or not is_sealed(self._memory):
            raise ProtocolError("the buffers' memory could shrink under this process")
        # Time limits of the kernel's own: Python's would cost a system call each time.
        connection.settimeout(None)
        whole = int(ANSWER_SECONDS)
        limit = struct.pack("@ll", whole, int((ANSWER_SECONDS - whole) * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        return greeting

    # ---- talking to the worker

    def _lose(self, reason: str) -> NoReturn:
        """The worker is of no more use: end it and remember why."""
        if self._lost is None:
            self._lost = reason
            log.error("the worker is lost: %s", reason)
            with contextlib.suppress(OSError, ValueError):
                self._news.unregister(self._connection.fileno())
            self._process.kill()
            self._tell_lost()
        raise BackendError(Status.DEVICE_LOST, self._lost)

    def _gone(self) -> NoReturn:
        self._lose(self._exit_reason())

    def _exit_reason(self) -> str:
        """How its process ended."""
        status: int | None = None
        with contextlib.suppress(ForkServerLost, OSError):
            status = self._process.ended(0.2)
        if status is None:
            return "its process has gone"
        return f"its process was ended by signal {-status}" if status < 0 else f"its process ended with {status}"

    def _usable(self) -> None:
        if self._lost is not None:
            raise BackendError(Status.DEVICE_LOST, self._lost)

    def _ask(self, request: bytes, descriptor: int | None = None) -> Answer:
        """One round trip. Raises BackendError: what the worker refused with, or DEVICE_LOST."""
        if self._lost is not None:
            raise BackendError(Status.DEVICE_LOST, self._lost)
        connection = self._connection
        try:
            if descriptor is None:
                connection.send(request, socket.MSG_NOSIGNAL)
            else:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
                connection.sendmsg([request], rights, socket.MSG_NOSIGNAL)
            while True:
                data = connection.recv(messages.MAX_MESSAGE)
                if not data:
                    self._gone()
                answer = messages.read_answer(data)
                if answer.kind == Kind.REPLY:
                    break
                self._take(answer)
        except BlockingIOError:
            self._lose(f"no answer within {ANSWER_SECONDS} s")
        except ProtocolError as error:
            self._lose(str(error))
        except OSError:
            self._gone()
        if answer.outcome == Outcome.REFUSED:
            raise BackendError(self._status(answer), answer.text)
        if answer.outcome == Outcome.BROKEN:
            self._lose(f"the backend failed: {answer.text}")
        return answer

    def _status(self, answer: Answer) -> Status:
        status = _STATUS.get(answer.status)
        if status is None or status is Status.OK:
            self._lose(f"it failed with status {answer.status}")
        if status is Status.DEVICE_LOST:
            self._lose(answer.text or "its device is lost")
        return status

    def _take(self, answer: Answer) -> None:
        """A message that nobody asked for."""
        if answer.kind == Kind.LOAD_ENDED:
            load = self._loads.get(answer.a)
            if load is not None:
                load.ended = answer

    def _release(self, op: Op, number: int) -> ReleaseOutcome:
        try:
            answer = self._ask(messages.OBJECT.pack(op, number, 0))
        except BackendError as error:
            if error.status is Status.DEVICE_LOST:
                raise
            return ReleaseRejected(error.status)
        return ReleaseIndeterminate(self._status(answer)) if answer.outcome == Outcome.DOUBTFUL else RELEASED

    # ---- waiting

    @property
    def info(self) -> DeviceInfo:
        return self._info

    def fileno(self) -> int:
        return self._news.fileno()

    def acknowledge(self) -> None:
        """Read what the worker has sent by itself. Its end is noticed here, and told by the next call."""
        with contextlib.suppress(BackendError):
            self._read_news()

    def _read_news(self) -> None:
        while self._lost is None:
            try:
                data = self._connection.recv(messages.MAX_MESSAGE, socket.MSG_DONTWAIT)
                if not data:
                    self._gone()
                answer = messages.read_answer(data)
            except BlockingIOError:
                return
            except ProtocolError as error:
                self._lose(str(error))
            except OSError:
                self._gone()
            if answer.kind == Kind.REPLY:
                self._lose("an answer that nobody asked for")
            self._take(answer)

    def wait(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        spin = min(until, time.monotonic() + IN_A_BACKEND.eager)
        while time.monotonic() < spin:
            if self._changed():
                return
        self._page.tell(True)
        try:
            while not self._changed() and self._lost is None:
                left = until - time.monotonic()
                if left <= 0 or not (self._pending or self._loads):
                    return
                select.select([self._news], [], [], left)
                self.acknowledge()
        finally:
            self._page.tell(False)

    def _changed(self) -> bool:
        if any(load.ended is not None for load in self._loads.values()):
            return True
        return any(self._page.look(event.slot, event.turn) is not None for event in self._pending)

    def close(self) -> None:
        """The worker ends, and with it whatever still ran in it."""
        if self._closed:
            return
        self._closed = True
        self._lost = self._lost or "closed"
        self._process.close()
        self._connection.close()
        self._news.close()
        self._page.close()
        for buffer in self._buffers:
            buffer.mapping.close()
        self._buffers.clear()
        if self._memory >= 0:
            os.close(self._memory)

    # ---- contexts, queues

    def create_context(self) -> Handle:
        context = _Context(next(self._numbers))
        self._ask(messages.OBJECT.pack(Op.CREATE_CONTEXT, context.number, 0))
        return context

    def destroy_context(self, context: Handle) -> ReleaseOutcome:
        return self._release(Op.DESTROY_CONTEXT, _as(context, _Context).number)

    def create_queue(self, context: Handle) -> Handle:
        queue = _Queue(next(self._numbers))
        self._ask(messages.OBJECT.pack(Op.CREATE_QUEUE, queue.number, _as(context, _Context).number))
        return queue

    def destroy_queue(self, queue: Handle) -> ReleaseOutcome:
        return self._release(Op.DESTROY_QUEUE, _as(queue, _Queue).number)

    # ---- buffers

    def allocate_buffer(self, context: Handle, request: BufferRequest) -> AllocatedBuffer:
        number = next(self._numbers)
        answer = self._ask(
            messages.ALLOCATE.pack(Op.ALLOCATE_BUFFER, number, _as(context, _Context).number, *request)
        )  # fmt: skip
        try:
            mapping = Mapping(self._memory, answer.a, max(request.bytes, answer.b))
        except OSError as error:
            self._release(Op.FREE_BUFFER, number)
            raise BackendError(Status.OUT_OF_MEMORY, f"cannot map a buffer: {error}") from error
        buffer = _Buffer(number, mapping)
        self._buffers.add(buffer)
        return AllocatedBuffer(buffer, answer.b, answer.c, answer.flag)

    def free_buffer(self, buffer: Handle) -> ReleaseOutcome:
        freed = _as(buffer, _Buffer)
        outcome = self._release(Op.FREE_BUFFER, freed.number)
        if outcome is RELEASED:
            self._buffers.discard(freed)
            freed.mapping.close()
        return outcome

    def write_buffer(self, buffer: Handle, offset: int, source: Segments) -> None:
        target = _as(buffer, _Buffer)
        if target.readers or target.writers or target.doubtful or self._lost is not None:
            self._free_for(target, True)
        view = target.view
        for piece in source:
            end = offset + len(piece)
            view[offset:end] = piece
            offset = end

    def read_buffer(self, buffer: Handle, offset: int, sink: Segments) -> None:
        origin = _as(buffer, _Buffer)
        if origin.writers or origin.doubtful or self._lost is not None:
            self._free_for(origin, False)
        view = origin.view
        for piece in sink:
            end = offset + len(piece)
            piece[:] = view[offset:end]
            offset = end

    def _free_for(self, buffer: _Buffer, writes: bool) -> None:
        """Raises BUSY while a submission uses the buffer, or writes it."""
        self._usable()
        for event in list(buffer.writers | buffer.readers if writes else buffer.writers):
            self._observe(event)
        if buffer.writers or (writes and buffer.readers):
            raise BackendError(Status.BUSY, "a submission uses the buffer")
        if buffer.doubtful:
            self._ask(messages.OBJECT.pack(Op.IN_USE, buffer.number, writes))
            if writes:
                buffer.doubtful = False

    # ---- programs

    def load_program(self, context: Handle, artifact: Artifact) -> Loaded | Loading:
        program = _Program(next(self._numbers))
        owner, words = _as(context, _Context).number, artifact.target
        try:
            descriptor = os.memfd_create("virtaccel-artifact", os.MFD_CLOEXEC)
        except OSError as error:
            raise BackendError(Status.OUT_OF_MEMORY, f"no memory file: {error.strerror}") from error
        try:
            _write_all(descriptor, artifact.payload)
            size = os.fstat(descriptor).st_size
            request = messages.LOAD.pack(
                Op.LOAD_PROGRAM, program.number, owner, artifact.format, *words, size, artifact.resident_bytes
            )
            answer = self._ask(request, descriptor)
        except BackendError as error:
            self.last_refusal = str(error)
            raise
        except OSError as error:
            raise BackendError(Status.OUT_OF_MEMORY, f"artifact: {error.strerror}") from error
        finally:
            os.close(descriptor)
        if answer.outcome == Outcome.DONE:
            return Loaded(program)
        self._loads[program.number] = program
        return Loading(program)

    def poll_load(self, ticket: Handle) -> Loaded | None:
        load = _as(ticket, _Program)
        if load.ended is None:
            self._read_news()
        self._usable()
        ended = load.ended
        if ended is None:
            return None
        del self._loads[load.number]
        if ended.outcome == Outcome.DONE:
            return Loaded(load)
        if ended.outcome != Outcome.REFUSED:
            self._lose(f"the backend failed: {ended.text}")
        self.last_refusal = ended.text
        raise BackendError(self._status(ended), ended.text)

    def abandon_load(self, ticket: Handle) -> None:
        load = _as(ticket, _Program)
        self._loads.pop(load.number, None)
        self._ask(messages.OBJECT.pack(Op.ABANDON_LOAD, load.number, 0))

    def unload_program(self, program: Handle) -> ReleaseOutcome:
        return self._release(Op.UNLOAD_PROGRAM, _as(program, _Program).number)

    # ---- submissions

    def submit(self, queue: Handle, program: Handle, bindings: Sequence[Binding], timeout_ns: int) -> SubmitOutcome:
        if not self._free_slots:
            return Rejected(Status.RESOURCE_LIMIT)
        turn = next(self._turns) & 0xFFFF_FFFF or next(self._turns) & 0xFFFF_FFFF
        slot = self._free_slots[-1]
        deadline = time.monotonic_ns() + timeout_ns if timeout_ns else 0
        packed: list[tuple[int, int, int, int, int]] = []
        reads: set[_Buffer] = set()
        writes: set[_Buffer] = set()
        for handle, offset, size, place, access in bindings:
            buffer = _as(handle, _Buffer)
            packed.append((buffer.number, offset, size, place, access))
            (reads if access == Access.READ else writes).add(buffer)
        request = messages.SUBMIT.pack(
            Op.SUBMIT, _as(queue, _Queue).number, _as(program, _Program).number, slot, turn,
            min(deadline, (1 << 64) - 1), len(packed),
        )  # fmt: skip
        try:
            answer = self._ask(request + messages.pack_bindings(packed))
        except BackendError as error:
            return Rejected(error.status)
        self._free_slots.pop()
        event = _Event(slot, turn, reads | writes)
        for buffer in reads:
            buffer.readers.add(event)
        for buffer in writes:
            buffer.writers.add(event)
        self._pending.add(event)
        if answer.outcome == Outcome.DOUBTFUL:
            return Indeterminate(event, self._status(answer))
        return Accepted(event)

    def _observe(self, event: _Event) -> Polled:
        """The event's state now; once it has ended, its buffers are no longer guarded by it."""
        if event.ending is not None:
            return event.polled
        try:
            ending = self._page.look(event.slot, event.turn)
        except ProtocolError as error:
            self._lose(str(error))
        if ending is None:
            return _PENDING
        event.ending = ending
        event.polled = Polled(_STATE[ending.state], _STATUS[ending.error])
        self._pending.discard(event)
        for buffer in event.buffers:
            buffer.readers.discard(event)
            buffer.writers.discard(event)
            buffer.doubtful = buffer.doubtful or not ending.settled
        return event.polled

    def poll_event(self, event: Handle) -> Polled:
        self._usable()
        polled = self._observe(_as(event, _Event))
        if polled is _PENDING:
            asked = _as(event, _Event)
            asked.looks += 1
            if asked.looks % _LOOKS == 0:
                self._read_news()  # or its end would go unnoticed where nobody watches `fileno`
        return polled

    def cancel_event(self, event: Handle) -> None:
        cancelled = _as(event, _Event)
        self._ask(messages.EVENT.pack(Op.CANCEL_EVENT, cancelled.slot, cancelled.turn))

    def destroy_event(self, event: Handle) -> ReleaseOutcome:
        destroyed = _as(event, _Event)
        self._usable()
        if self._observe(destroyed) is _PENDING or destroyed.ending is None:
            return ReleaseRejected(Status.BUSY)
        outcome: ReleaseOutcome = RELEASED
        if not destroyed.ending.released:
            outcome = self._release(Op.DESTROY_EVENT, destroyed.slot)
        if outcome is RELEASED:
            self._free_slots.append(destroyed.slot)
        return outcome


def _write_all(descriptor: int, payload: Segments) -> None:
    """One copy of the payload, which another processor may be changing, into a file that is ours alone."""
    for piece in payload:
        rest = memoryview(piece)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
