"""The reference backend against the contract's text in backend.py, called directly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from virtaccel.device.backend import (
    Accepted,
    Artifact,
    Backend,
    BackendError,
    Binding,
    BufferRequest,
    Loaded,
    Polled,
    ReleaseRejected,
)
from virtaccel.device.reference import FORMAT, Operation, Program, Reference, Script, open_backend
from virtaccel.device.wire import Access, EventState, Status

READ, WRITE, BOTH = Access.READ, Access.WRITE, Access.READ_WRITE


@pytest.fixture
def backend() -> Iterator[Reference]:
    made = Reference(script=Script(immediate=False))
    yield made
    made.close()


def artifact(program: Program | bytes, format_id: int = FORMAT) -> Artifact:
    payload = program if isinstance(program, bytes) else program.pack()
    return Artifact(format_id, (0,) * 12, [memoryview(payload)], len(payload), 64)


def loaded(backend: Reference, context: object, program: Program) -> object:
    outcome = backend.load_program(context, artifact(program))
    assert isinstance(outcome, Loaded)
    return outcome.program


def buffer(backend: Reference, context: object, data: bytes) -> object:
    made = backend.allocate_buffer(context, BufferRequest(len(data), 64, 3, 31))
    assert made.allocation_bytes >= len(data)
    assert made.alignment >= 64
    assert made.direct
    backend.write_buffer(made.handle, 0, [memoryview(data)])
    return made.handle


def contents(backend: Reference, target: object, size: int) -> bytes:
    sink = bytearray(size)
    halves = memoryview(sink)
    backend.read_buffer(target, 0, [halves[: size // 2], halves[size // 2 :]])
    return bytes(sink)


def test_it_is_a_backend_and_the_entry_point_opens_it() -> None:
    opened: Backend = open_backend("any")
    assert opened.info.limits.max_contexts
    opened.close()
    opened.close()


@pytest.mark.parametrize(
    ("program", "accesses", "before", "after"),
    [
        (Program(Operation.IDENTITY, 9, 1, 1, 0), (READ, WRITE), (b"abc", b"..."), (b"abc", b"abc")),
        (Program(Operation.XOR, 0xFF, 1, 2, 0), (READ, WRITE, WRITE), (b"\0\1", b"xx", b"yy"),
         (b"\0\1", b"\xff\xfe", b"\xff\xfe")),
        (Program(Operation.ADD, 1, 2, 1, 0), (READ, READ, WRITE), (b"\1\xff", b"\2\1", b"??"),
         (b"\1\xff", b"\2\1", b"\4\1")),
        (Program(Operation.ADD, 0, 1, 1, 1), (READ, WRITE, BOTH), (b"\1", b"?", b"\7"), (b"\1", b"\x08", b"\x08")),
        (Program(Operation.XOR, 0x5A, 0, 0, 1), (BOTH,), (b"\0\x5a",), (b"\x5a\0",)),
    ],
)  # fmt: skip
def test_programs_compute(
    backend: Reference, program: Program, accesses: tuple[int, ...], before: tuple[bytes, ...], after: tuple[bytes, ...]
) -> None:
    context = backend.create_context()
    queue = backend.create_queue(context)
    buffers = [buffer(backend, context, data) for data in before]
    bindings = [
        Binding(one, 0, len(data), slot, accesses[slot])
        for slot, (one, data) in enumerate(zip(buffers, before, strict=True))
    ]
    outcome = backend.submit(queue, loaded(backend, context, program), bindings[::-1], 0)
    assert isinstance(outcome, Accepted)
    assert backend.poll_event(outcome.event) == Polled(EventState.PENDING, Status.OK)
    assert backend.free_buffer(buffers[-1]) == ReleaseRejected(Status.BUSY)
    backend.complete()
    assert backend.poll_event(outcome.event) == Polled(EventState.COMPLETE, Status.OK)
    assert tuple(contents(backend, one, len(data)) for one, data in zip(buffers, after, strict=True)) == after


@pytest.mark.parametrize(
    ("payload", "status"),
    [
        (b"", Status.INVALID_ARGUMENT),
        (b"VREF", Status.INVALID_ARGUMENT),
        (b"FERV" + bytes(8), Status.INVALID_ARGUMENT),
        (Program(Operation.XOR, 0, 1, 1, 0).pack() + b"\0", Status.INVALID_ARGUMENT),
        (Program(3, 0, 1, 1, 0).pack(), Status.INCOMPATIBLE),
        (Program(Operation.XOR, 0, 0, 1, 0).pack(), Status.INVALID_ARGUMENT),
        (Program(Operation.XOR, 0, 1, 0, 0).pack(), Status.INVALID_ARGUMENT),
        (Program(Operation.XOR, 0, 1, 1, 0).pack()[:-1] + b"\1", Status.INVALID_ARGUMENT),
    ],
)
def test_programs_that_are_none(backend: Reference, payload: bytes, status: Status) -> None:
    context = backend.create_context()
    before = backend.live
    with pytest.raises(BackendError) as caught:
        backend.load_program(context, artifact(payload))
    assert caught.value.status is status
    assert backend.live == before


def test_handles_of_another_kind_are_a_bug_and_say_so(backend: Reference) -> None:
    context = backend.create_context()
    with pytest.raises(TypeError):
        backend.free_buffer(context)
