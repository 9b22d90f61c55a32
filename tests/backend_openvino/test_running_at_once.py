"""Programs that are over sooner than a thread could be told of them run within their SUBMIT; and whoever said it would
wait for the next submission runs it itself. Neither may change what a guest sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import graphs
import numpy as np
import pytest
from engine_room import EngineRoom
from slow_graphs import rotated, rotations

from virtaccel.backend_openvino import open_backend
from virtaccel.backend_openvino.backend import OpenVinoBackend
from virtaccel.backend_openvino.programs import Program, Variant
from virtaccel.backend_openvino.requests import Executable
from virtaccel.device.backend import BackendError, Binding, Handle
from virtaccel.device.wire import Access, EventState, Status
from virtaccel.tosa_graph.graph import DType, Op

SIDE, STEPS = 64, 3
QUICK, SLOW = 1, 1_000_000


def executable(program: Handle) -> Executable:
    assert isinstance(program, Program)
    found = program.source.ready(Variant(program.source.declared(), True))
    assert found is not None
    return found


@pytest.fixture
def room() -> Iterator[EngineRoom]:
    backend = open_backend("CPU")
    yield EngineRoom(backend)
    backend.close()


def bound_to(room: EngineRoom, x: np.ndarray) -> list[Binding]:
    source, target = room.buffer(x.nbytes, x.tobytes()), room.buffer(x.nbytes)
    return [Binding(source, 0, x.nbytes, 0, Access.READ), Binding(target, 0, x.nbytes, 1, Access.WRITE)]


def answer(room: EngineRoom, bindings: list[Binding], like: np.ndarray) -> np.ndarray:
    return np.frombuffer(room.bytes_of(bindings[1].buffer, like.nbytes), like.dtype).reshape(like.shape)


def numbers(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((1, SIDE, SIDE)).astype(np.float32)


def patiently(room: EngineRoom, program: Handle, bindings: list[Binding], timeout_ns: int = 0) -> Handle:
    assert isinstance(room.backend, OpenVinoBackend)
    room.backend.expect_patience()
    return room.submit(program, bindings, [], timeout_ns)


def refused(call: Callable[[], None]) -> Status | None:
    try:
        call()
    except BackendError as error:
        return error.status
    return None


def test_the_cost_of_a_program_is_learnt_and_it_then_ends_within_its_submission(room: EngineRoom) -> None:
    constant = graphs.Const(np.full(8, 2, np.float32))
    program = room.load(graphs.single(Op.ADD, [((8,), DType.FP32), constant], ((8,), DType.FP32)))
    bindings = bound_to(room, np.zeros(8, np.float32))
    unknown = executable(program).cost
    for run in range(40):
        x = np.arange(8, dtype=np.float32) + run
        room.backend.write_buffer(bindings[0].buffer, 0, [memoryview(x.tobytes())])
        assert room.finish(room.submit(program, bindings, [])).state is EventState.COMPLETE
        np.testing.assert_array_equal(answer(room, bindings, x), x + 2)
    assert executable(program).cost < unknown
    executable(program).cost = QUICK
    event = room.submit(program, bindings, [])
    assert room.backend.poll_event(event).state is EventState.COMPLETE
    with pytest.raises(BackendError) as refusal:
        room.backend.cancel_event(event)
    assert refusal.value.status is Status.BUSY


def test_what_has_loops_has_no_known_cost(room: EngineRoom) -> None:
    """How long it runs depends on what the guest puts into its inputs."""
    model = executable(room.load(rotations(SIDE, STEPS))).model
    looping = Executable(model, (), steps=1)
    unknown = looping.cost
    for _ in range(40):
        looping.took(QUICK)
    assert looping.cost == unknown


def test_a_run_within_its_submission_gives_its_buffers_back(room: EngineRoom) -> None:
    program = room.load(rotations(SIDE, STEPS))
    x = numbers(1)
    bindings = bound_to(room, x)
    executable(program).cost = QUICK
    room.submit(program, bindings, [])
    again = room.submit(program, bindings, [])  # would be BUSY
    np.testing.assert_array_equal(answer(room, bindings, x), rotated(x, STEPS))
    room.backend.destroy_event(again)
    for binding in bindings:
        room.backend.free_buffer(binding.buffer)


def test_an_expired_deadline_is_seen_after_a_run_within_its_submission(room: EngineRoom) -> None:
    program = room.load(rotations(SIDE, STEPS))
    bindings = bound_to(room, numbers(1))
    executable(program).cost = QUICK
    event = room.submit(program, bindings, [], timeout_ns=1)
    assert room.backend.poll_event(event).error is Status.DEADLINE_EXPIRED


def test_who_would_only_wait_runs_it(room: EngineRoom) -> None:
    program = room.load(rotations(SIDE, STEPS))
    x = numbers(2)
    bindings = bound_to(room, x)
    executable(program).cost = SLOW
    event = patiently(room, program, bindings)
    assert room.backend.poll_event(event).state is EventState.COMPLETE
    np.testing.assert_array_equal(answer(room, bindings, x), rotated(x, STEPS))


def test_an_expired_deadline_is_seen_by_who_waited(room: EngineRoom) -> None:
    program = room.load(rotations(SIDE, STEPS))
    executable(program).cost = SLOW
    event = patiently(room, program, bound_to(room, numbers(3)), timeout_ns=1)
    assert room.backend.poll_event(event).error is Status.DEADLINE_EXPIRED


def test_patience_is_for_one_submission_that_is_alone(room: EngineRoom) -> None:
    """Beside others it starts like them; and a submission after it is not waited for."""
    program, other = room.load(rotations(512, 40)), room.load(rotations(SIDE, STEPS))
    x, y = np.random.default_rng(4).standard_normal((1, 512, 512)).astype(np.float32), numbers(5)
    long, short = bound_to(room, x), bound_to(room, y)
    executable(other).cost = SLOW
    executable(program).cost = 1 << 62
    first = patiently(room, program, long)
    assert room.backend.poll_event(first).state is EventState.PENDING, "too long to be run within its submission"
    second = patiently(room, other, short)
    third = room.submit(other, bound_to(room, y), [])
    for event in (first, second, third):
        assert room.finish(event).state is EventState.COMPLETE
    np.testing.assert_array_equal(answer(room, long, x), rotated(x, 40))
    np.testing.assert_array_equal(answer(room, short, y), rotated(y, STEPS))
