"""Waiting in process: what has ended is told once, so that waiting for the rest is no busy loop; and nothing but a wait
blocks, least of all a submission of a model that runs already."""

from __future__ import annotations

import select

import graphs
import numpy as np
import pytest
from engine_room import EngineRoom
from slow_graphs import rotated, rotations

from virtaccel.backend_openvino import open_backend
from virtaccel.backend_openvino.loader import Loader
from virtaccel.device.backend import Accepted, Binding
from virtaccel.device.wire import Access, EventState, Status
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.write import GraphWriter

SIDE = 512


def products(number: int) -> bytes:
    """A chain of matrix products, for some hundred milliseconds."""
    writer = GraphWriter()
    x = writer.input("x", (1, SIDE, SIDE), DType.FP32)
    zero = writer.constant(np.zeros(1, np.float32))
    for _ in range(number):
        x = writer.operator(Op.MATMUL, [x, x, zero, zero], ((1, SIDE, SIDE), DType.FP32))
    writer.output(x)
    return writer.to_bytes()


def bound(room: EngineRoom, size: int) -> list[Binding]:
    source, target = room.buffer(size, bytes(size)), room.buffer(size)
    return [Binding(source, 0, size, 0, Access.READ), Binding(target, 0, size, 1, Access.WRITE)]


def test_an_ended_submission_nobody_polls_does_not_keep_a_waiter_awake() -> None:
    backend = open_backend("CPU")
    room = EngineRoom(backend)
    constant = graphs.Const(np.ones(8, np.float32))
    quick = room.load(graphs.single(Op.ADD, [((8,), DType.FP32), constant], ((8,), DType.FP32)))
    slow = room.load(products(60))
    ended = room.submit(quick, bound(room, 32), [])
    pending = room.submit(slow, bound(room, SIDE * SIDE * 4), [])
    looks = 0
    while backend.poll_event(pending).state is EventState.PENDING:
        backend.wait(30.0)
        looks += 1
    assert looks <= 4  # a busy loop takes thousands
    assert backend.poll_event(ended).state is EventState.COMPLETE
    backend.close()


STEPS = 40


def slow_input(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((1, SIDE, SIDE)).astype(np.float32)


def bound_to(room: EngineRoom, x: np.ndarray) -> list[Binding]:
    source, target = room.buffer(x.nbytes, x.tobytes()), room.buffer(x.nbytes)
    return [Binding(source, 0, x.nbytes, 0, Access.READ), Binding(target, 0, x.nbytes, 1, Access.WRITE)]


@pytest.mark.parametrize("owner", ["same", "another"])
def test_a_submission_of_a_model_that_runs_does_not_wait_for_it(owner: str) -> None:
    """The runtime makes no second request of a model while one runs: such a submission starts when that has ended,
    also if the run is another device's of this process, which shares the compiled model."""
    first = EngineRoom(open_backend("CPU"))
    second = first if owner == "same" else EngineRoom(open_backend("CPU"))
    tosa = rotations(SIDE, STEPS)
    running, waiting = first.load(tosa), second.load(tosa)
    x, y = slow_input(1), slow_input(2)
    outer, inner = bound_to(first, x), bound_to(second, y)
    earlier = first.submit(running, outer, [])
    later = second.submit(waiting, inner, [])
    assert first.backend.poll_event(earlier).state is EventState.PENDING, "the submission waited for the run"
    assert second.backend.poll_event(later).state is EventState.PENDING
    assert second.finish(later).state is EventState.COMPLETE
    assert first.finish(earlier).state is EventState.COMPLETE
    for room, bindings, value in ((first, outer, x), (second, inner, y)):
        answer = np.frombuffer(room.bytes_of(bindings[1].buffer, value.nbytes), np.float32).reshape(value.shape)
        np.testing.assert_array_equal(answer, rotated(value, STEPS))
        room.backend.close()


def test_submissions_that_wait_for_a_run_end_by_cancel_deadline_and_turn() -> None:
    backend = open_backend("CPU")
    room = EngineRoom(backend)
    program = room.load(rotations(SIDE, STEPS))
    values = [slow_input(seed) for seed in range(4)]
    bindings = [bound_to(room, value) for value in values]
    started = room.submit(program, bindings[0], [])
    cancelled, hurried, last = (room.submit(program, bindings[n], [], 1 if n == 2 else 0) for n in (1, 2, 3))
    backend.cancel_event(cancelled)
    assert backend.poll_event(cancelled).state is EventState.CANCELLED
    assert backend.poll_event(hurried).error is Status.DEADLINE_EXPIRED
    backend.write_buffer(bindings[1][1].buffer, 0, [memoryview(bytes(4))])  # nothing of it had begun
    assert backend.poll_event(started).state is EventState.PENDING
    assert room.finish(last).state is EventState.COMPLETE
    assert room.finish(started).state is EventState.COMPLETE
    answer = np.frombuffer(room.bytes_of(bindings[3][1].buffer, values[3].nbytes), np.float32)
    np.testing.assert_array_equal(answer.reshape(values[3].shape), rotated(values[3], STEPS))
    outcome = backend.submit(room.queue, program, bindings[0], 0)
    assert isinstance(outcome, Accepted)
    backend.cancel_event(outcome.event)
    backend.close()


def test_what_was_acknowledged_is_quiet_however_soon() -> None:
    """A reader may see the descriptor readable before the thread that wrote to it goes on."""
    loader = Loader("quiet")
    for _ in range(2000):
        job = loader.submit(lambda: 1)
        assert select.select([loader.descriptor], [], [], 10.0)[0]
        assert job.result() == 1
        loader.acknowledge()
        assert not select.select([loader.descriptor], [], [], 0)[0]
    loader.close()
