"""The contract over a worker, with a reference backend in it that goes wrong on demand; real processes throughout."""

from __future__ import annotations

import gc
import os
import select
import signal
import time
from pathlib import Path

import pytest
from shared_reference import ABORT, BREAK, DOUBT, HANG, LATE_LOAD, LEAVE, LINGER, LOSE, PEND, SLOW_LOAD

from virtaccel.device.backend import (
    RELEASED,
    Accepted,
    Artifact,
    BackendError,
    BackendUnavailable,
    Binding,
    BufferRequest,
    Handle,
    Indeterminate,
    Loaded,
    Loading,
    Polled,
    Rejected,
    ReleaseIndeterminate,
    ReleaseRejected,
)
from virtaccel.device.isolated import WorkerLauncher
from virtaccel.device.isolated import backend as isolated
from virtaccel.device.isolated.backend import IsolatedBackend
from virtaccel.device.isolated.completion_page import SLOTS, CompletionPage, Ending
from virtaccel.device.isolated.messages import ProtocolError
from virtaccel.device.reference import FORMAT, Operation, Program
from virtaccel.device.wire import Access, EventState, Status
from virtaccel.processes.sealed import Mapping, is_sealed, sealed_file

COMPLETE = Polled(EventState.COMPLETE, Status.OK)
CANCELLED = Polled(EventState.CANCELLED, Status.OK)
ANYTHING = 31


class Room:
    """A context with a queue, two buffers and a program that XORs with `operand`."""

    def __init__(self, backend: IsolatedBackend, operand: int = 0x5A, size: int = 64) -> None:
        self.backend = backend
        self.size = size
        self.context = backend.create_context()
        self.queue = backend.create_queue(self.context)
        self.source, self.target = self.buffer(), self.buffer()
        self.program = self.load(operand)

    def buffer(self) -> Handle:
        return self.backend.allocate_buffer(self.context, BufferRequest(self.size, 64, 3, ANYTHING)).handle

    def offer(self, operand: int) -> Loaded | Loading:
        payload = Program(Operation.XOR, operand, 1, 1, 0).pack()
        return self.backend.load_program(
            self.context, Artifact(FORMAT, (0,) * 12, [memoryview(payload)], len(payload), 0)
        )

    def load(self, operand: int) -> Handle:
        outcome = self.offer(operand)
        assert isinstance(outcome, Loaded)
        return outcome.program

    def bindings(self) -> list[Binding]:
        return [
            Binding(self.source, 0, self.size, 0, Access.READ),
            Binding(self.target, 0, self.size, 1, Access.WRITE),
        ]

    def submit(self) -> Handle:
        outcome = self.backend.submit(self.queue, self.program, self.bindings(), 0)
        assert isinstance(outcome, Accepted), outcome
        return outcome.event

    def write(self, buffer: Handle, data: bytes) -> None:
        self.backend.write_buffer(buffer, 0, [memoryview(data[:7]), memoryview(data[7:])])

    def read(self, buffer: Handle) -> bytes:
        sink = bytearray(self.size)
        self.backend.read_buffer(buffer, 0, [memoryview(sink)[:5], memoryview(sink)[5:]])
        return bytes(sink)


def wait_until_ended(backend: IsolatedBackend, event: Handle, seconds: float = 20.0) -> Polled:
    until = time.monotonic() + seconds
    while (polled := backend.poll_event(event)).state is EventState.PENDING:
        assert time.monotonic() < until
        backend.wait(0.1)
    return polled


def expect_lost(backend: IsolatedBackend) -> str:
    """A call says that the device is lost, and so does the next; the reason."""
    for _ in range(2):
        with pytest.raises(BackendError) as caught:
            backend.create_context()
        assert caught.value.status is Status.DEVICE_LOST
    return str(caught.value)


# ---- what works


def test_the_process_of_the_daemon_runs_nothing_itself(backend: IsolatedBackend, opener: WorkerLauncher) -> None:
    room = Room(backend)
    worker = backend._process.born(1.0)  # type: ignore[attr-defined]
    assert worker not in (os.getpid(), opener.fork_server.pid if opener.fork_server else 0)
    before = Path(f"/proc/{worker}/stat").read_text().split()[13]
    for _ in range(2000):
        backend.destroy_event(_finished(backend, room))
    after = Path(f"/proc/{worker}/stat").read_text().split()[13]
    assert int(after) > int(before)


def _finished(backend: IsolatedBackend, room: Room) -> Handle:
    event = room.submit()
    wait_until_ended(backend, event)
    return event


def test_new_memory_is_zeroed_and_freed_memory_is_given_back(backend: IsolatedBackend) -> None:
    room = Room(backend)
    room.write(room.source, b"\xee" * room.size)
    assert backend.free_buffer(room.source) is RELEASED
    for _ in range(50):
        buffer = room.buffer()
        assert room.read(buffer) == bytes(room.size)
        room.write(buffer, b"\xaa" * room.size)
        assert backend.free_buffer(buffer) is RELEASED
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "virtaccel-reference" in line]
    assert len(mapped) == 1, "the target's buffer alone"


def test_thousands_of_buffers_take_no_descriptors(backend: IsolatedBackend) -> None:
    room = Room(backend)
    before = len(os.listdir("/proc/self/fd"))
    buffers = [room.buffer() for _ in range(500)]
    assert len(os.listdir("/proc/self/fd")) == before
    for buffer in buffers:
        backend.free_buffer(buffer)


def test_refusals_cross_with_status_and_reason(backend: IsolatedBackend) -> None:
    room = Room(backend)
    artifact = Artifact(0x1234, (0,) * 12, [memoryview(bytes(12))], 12, 0)
    with pytest.raises(BackendError, match="artifact format 0x1234") as caught:
        backend.load_program(room.context, artifact)
    assert caught.value.status is Status.UNSUPPORTED
    assert backend.last_refusal == "artifact format 0x1234"
    assert backend.submit(room.queue, room.program, room.bindings()[:1], 0) == Rejected(Status.INVALID_ARGUMENT)
    assert backend.destroy_context(room.context) == ReleaseRejected(Status.BUSY)
    with pytest.raises(BackendError, match="alignment") as caught:
        backend.allocate_buffer(room.context, BufferRequest(64, 1 << 20, 3, ANYTHING))
    assert caught.value.status is Status.UNSUPPORTED
    assert wait_until_ended(backend, room.submit()) == COMPLETE


def test_a_release_that_cannot_be_told_is_told_so(backend: IsolatedBackend) -> None:
    room = Room(backend)
    second = backend.create_queue(room.context)
    assert backend.destroy_queue(room.queue) is RELEASED
    assert backend.destroy_queue(second) == ReleaseIndeterminate(Status.INTERNAL_ERROR)


def test_a_submission_in_doubt_keeps_its_event(backend: IsolatedBackend) -> None:
    room = Room(backend, DOUBT)
    outcome = backend.submit(room.queue, room.program, room.bindings(), 0)
    assert isinstance(outcome, Indeterminate)
    assert outcome.status is Status.INTERNAL_ERROR
    assert backend.poll_event(outcome.event).state is EventState.PENDING
    with pytest.raises(BackendError) as caught:
        backend.cancel_event(outcome.event)
    assert caught.value.status is Status.BUSY


# ---- submissions under way


def test_buffers_of_a_pending_submission_are_guarded_here(backend: IsolatedBackend) -> None:
    room = Room(backend, PEND)
    room.write(room.source, b"\x01" * room.size)
    event = room.submit()
    assert backend.poll_event(event).state is EventState.PENDING
    assert backend.destroy_event(event) == ReleaseRejected(Status.BUSY)
    for refused in (lambda: room.write(room.source, bytes(64)), lambda: room.read(room.target)):
        with pytest.raises(BackendError) as caught:
            refused()
        assert caught.value.status is Status.BUSY
    assert room.read(room.source) == b"\x01" * room.size, "what is only read may be read"
    assert backend.submit(room.queue, room.program, room.bindings(), 0) == Rejected(Status.BUSY)
    assert backend.free_buffer(room.source) == ReleaseRejected(Status.BUSY)
    backend.cancel_event(event)
    assert backend.poll_event(event) == CANCELLED
    with pytest.raises(BackendError) as caught:
        backend.cancel_event(event)
    assert caught.value.status is Status.BUSY
    room.write(room.source, bytes(64))
    assert backend.destroy_event(event) is RELEASED


def test_buffers_of_cancelled_work_that_goes_on_stay_in_use(backend: IsolatedBackend) -> None:
    """Only the worker knows whether native work has stopped, and it is asked."""
    room = Room(backend, LINGER)
    event = room.submit()
    backend.cancel_event(event)
    assert backend.poll_event(event) == CANCELLED
    assert backend.destroy_event(event) is RELEASED
    for _ in range(3):
        for refused in (lambda: room.write(room.source, bytes(64)), lambda: room.read(room.target)):
            with pytest.raises(BackendError) as caught:
                refused()
            assert caught.value.status is Status.BUSY


def test_slots_come_back_and_their_old_words_mean_nothing(backend: IsolatedBackend) -> None:
    room = Room(backend, PEND)
    for _ in range(300):
        event = room.submit()
        assert backend.poll_event(event).state is EventState.PENDING, "not what an earlier one left in the slot"
        backend.cancel_event(event)
        assert backend.poll_event(event) == CANCELLED
        backend.destroy_event(event)
    assert len(backend._free_slots) == SLOTS


def test_a_thousand_bindings_cross(backend: IsolatedBackend) -> None:
    room = Room(backend)
    many = [Binding(room.source, 0, 64, slot, Access.READ) for slot in range(4096)]
    assert backend.submit(room.queue, room.program, many, 0) == Rejected(Status.INVALID_ARGUMENT)


# ---- loads


def test_an_abandoned_load_is_forgotten_however_it_stands(backend: IsolatedBackend) -> None:
    room = Room(backend)
    under_way = room.offer(SLOW_LOAD)
    assert isinstance(under_way, Loading)
    assert backend.poll_load(under_way.ticket) is None
    backend.abandon_load(under_way.ticket)
    over = room.offer(LATE_LOAD)
    assert isinstance(over, Loading)
    time.sleep(0.1)
    backend.abandon_load(over.ticket)
    for handle in (room.source, room.target):
        backend.free_buffer(handle)
    backend.unload_program(room.program)
    backend.destroy_queue(room.queue)
    assert backend.destroy_context(room.context) is RELEASED, "no child is left behind"


# ---- the worker goes wrong


@pytest.mark.parametrize(
    ("operand", "says"),
    [
        (ABORT, f"ended by signal {int(signal.SIGABRT)}"),
        (LEAVE, "ended with 3"),
        (BREAK, "the backend failed: RuntimeError"),
        (LOSE, "its device is lost"),
    ],
)
def test_a_worker_that_goes_wrong_is_a_lost_device(opener: WorkerLauncher, operand: int, says: str) -> None:
    backend = opener()
    assert isinstance(backend, IsolatedBackend)
    room = Room(backend, operand)
    process = backend._process.born(1.0)  # type: ignore[attr-defined]
    assert backend.submit(room.queue, room.program, room.bindings(), 0) == Rejected(Status.DEVICE_LOST)
    assert says in expect_lost(backend)
    with pytest.raises(BackendError):
        room.read(room.target)
    with pytest.raises(BackendError):
        room.offer(0)
    assert not select.select([backend.fileno()], [], [], 0)[0], "nothing that keeps a loop busy"
    backend.close()
    wait_until_gone(process)
    other = opener()
    assert isinstance(other, IsolatedBackend)
    assert wait_until_ended(other, Room(other).submit()) == COMPLETE
    other.close()


def wait_until_gone(process: int, seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while os.path.exists(f"/proc/{process}"):
        assert time.monotonic() < until, f"process {process} lives"
        time.sleep(0.01)


def test_a_worker_that_hangs_is_given_up(opener: WorkerLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "ANSWER_SECONDS", 0.3)
    backend = opener()
    assert isinstance(backend, IsolatedBackend)
    room = Room(backend, HANG)
    process = backend._process.born(1.0)  # type: ignore[attr-defined]
    assert backend.submit(room.queue, room.program, room.bindings(), 0) == Rejected(Status.DEVICE_LOST)
    assert "no answer within 0.3 s" in expect_lost(backend)
    wait_until_gone(process)
    backend.close()


def test_a_killed_worker_is_noticed_by_those_who_wait_and_by_those_who_poll(opener: WorkerLauncher) -> None:
    for watch in (True, False):
        backend = opener()
        assert isinstance(backend, IsolatedBackend)
        room = Room(backend, PEND)
        event = room.submit()
        os.kill(backend._process.born(1.0), signal.SIGKILL)  # type: ignore[attr-defined]
        if watch:
            assert select.select([backend.fileno()], [], [], 20.0)[0]
            backend.acknowledge()
            assert not select.select([backend.fileno()], [], [], 0)[0]
        until = time.monotonic() + 20
        told: BackendError | None = None
        while told is None and time.monotonic() < until:
            try:
                assert backend.poll_event(event).state is EventState.PENDING
            except BackendError as error:
                told = error
        assert told is not None
        assert told.status is Status.DEVICE_LOST
        assert "signal 9" in str(told)
        backend.close()


def test_the_fork_server_takes_its_workers_along_and_another_is_started(opener: WorkerLauncher) -> None:
    backend = opener()
    assert isinstance(backend, IsolatedBackend)
    process = backend._process.born(1.0)  # type: ignore[attr-defined]
    assert opener.fork_server is not None
    os.kill(opener.fork_server.pid, signal.SIGKILL)
    wait_until_gone(process)
    assert "gone" in expect_lost(backend)
    backend.close()
    other = opener()
    assert isinstance(other, IsolatedBackend)
    assert wait_until_ended(other, Room(other).submit()) == COMPLETE
    other.close()


@pytest.mark.parametrize("say", [b"", b"x", bytes(29), b"\x03" + b"\xff" * 28, b"\x09" * 29])
def test_nonsense_from_a_worker_is_a_lost_device(opener: WorkerLauncher, say: bytes) -> None:
    """Its side of the socket, in other hands."""
    import socket

    backend = opener()
    assert isinstance(backend, IsolatedBackend)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    backend._news.unregister(backend._connection.fileno())
    backend._connection.close()
    backend._connection = ours
    backend._news.register(ours.fileno(), select.EPOLLIN)
    theirs.send(say) if say else theirs.close()
    expect_lost(backend)
    theirs.close()
    backend.close()


def test_a_board_that_says_what_cannot_be_is_a_lost_device(opener: WorkerLauncher) -> None:
    backend = opener()
    assert isinstance(backend, IsolatedBackend)
    room = Room(backend, PEND)
    event = room.submit()
    backend._page._words[event.slot] = event.turn << 32 | 9 << 16  # type: ignore[attr-defined]
    with pytest.raises(BackendError) as caught:
        backend.poll_event(event)
    assert caught.value.status is Status.DEVICE_LOST
    backend.close()


@pytest.mark.parametrize(("device", "says"), [("none", "there is no such device"), ("crash", "signal 6")])
def test_a_backend_that_cannot_be_opened_says_why(opener: WorkerLauncher, device: str, says: str) -> None:
    with pytest.raises(BackendUnavailable, match=says):
        opener(device)


@pytest.mark.parametrize(
    ("backend_name", "says"),
    [("shared_reference:open_private", "cannot be shared"), ("no_such_module:x", "no_such_module"), ("zzz", "zzz")],
)
def test_what_cannot_be_isolated_says_why(support_on_path: None, backend_name: str, says: str) -> None:
    made = WorkerLauncher(backend_name)
    with pytest.raises(BackendUnavailable, match=says):
        made()
    made.close()


def test_nothing_is_left_of_backends_that_were_closed(opener: WorkerLauncher) -> None:
    opener().close()
    before = len(os.listdir("/proc/self/fd"))
    processes = []
    for _ in range(5):
        backend = opener()
        assert isinstance(backend, IsolatedBackend)
        wait_until_ended(backend, Room(backend).submit())
        processes.append(backend._process.born(1.0))  # type: ignore[attr-defined]
        backend.close()
        backend.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before  # what earlier tests left may go meanwhile
    for process in processes:
        wait_until_gone(process)


def test_another_worker_is_made_ready_when_one_is_lost(opener: WorkerLauncher) -> None:
    backend = opener()
    assert isinstance(backend, IsolatedBackend)
    os.kill(backend._process.born(1.0), signal.SIGKILL)  # type: ignore[attr-defined]
    expect_lost(backend)
    spare = opener._spare
    assert spare is not None
    ready = spare.child.born(20.0)
    backend.close()
    other = opener()
    assert isinstance(other, IsolatedBackend)
    assert other._process.born(1.0) == ready  # type: ignore[attr-defined]
    other.close()


# ---- the parts


def test_memory_that_is_shared_cannot_shrink() -> None:
    file = sealed_file("test")
    os.ftruncate(file, 8192)
    mapping = Mapping(file, 100, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(file, 4096)
    assert is_sealed(file)
    mapping.view[0] = 7
    assert os.pread(file, 1, 100) == b"\x07"
    with pytest.raises(OSError, match="do not lie"):
        Mapping(file, 4097, 4096)
    mapping.close()
    mapping.close()
    os.close(file)
    plain = os.memfd_create("plain")
    assert not is_sealed(plain)
    os.close(plain)


def test_words_on_the_board() -> None:
    page = CompletionPage()
    assert page.look(5, 1) is None
    for turn, ending in enumerate(
        (Ending(1, 0, True, True), Ending(2, 8, False, False), Ending(3, 0, True, False)), start=7
    ):
        assert not page.note(5, turn, ending)
        assert page.look(5, turn) == ending
        assert page.look(5, turn + 1) is None
    page.tell(True)
    assert page.note(SLOTS - 1, 0xFFFFFFFF, Ending(1, 0, True, True))
    for word in (0, 4 << 16, 1 << 16 | 12, 1 << 26 | 1 << 16):
        page._words[9] = 3 << 32 | word
        with pytest.raises(ProtocolError):
            page.look(9, 3)
    page.close()
