"""Many submissions at a time: a program that always has several under way gets a model that runs them side by side.
What they answer is the same, and one that comes alone still gets all threads."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest
from engine_room import EngineRoom
from slow_graphs import rotated, rotations

from virtaccel.backend_openvino import open_backend, programs
from virtaccel.backend_openvino.compile import Tuning
from virtaccel.backend_openvino.programs import Compiled, Host, Program, Variant
from virtaccel.device.backend import BackendError, Binding, Handle
from virtaccel.device.wire import Access, EventState, Status
from virtaccel.tosa_graph.graph import Graph

SIDE, STEPS, BESIDE = 64, 3, 4
MOST = 5000


@pytest.fixture
def room() -> Iterator[EngineRoom]:
    backend = open_backend("CPU")
    yield EngineRoom(backend)
    backend.close()


def numbers(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((1, SIDE, SIDE)).astype(np.float32)


def bound_to(room: EngineRoom, x: np.ndarray) -> list[Binding]:
    source, target = room.buffer(x.nbytes, x.tobytes()), room.buffer(x.nbytes)
    return [Binding(source, 0, x.nbytes, 0, Access.READ), Binding(target, 0, x.nbytes, 1, Access.WRITE)]


def crowd(room: EngineRoom, program: Handle, count: int) -> None:
    """`count` submissions, BESIDE at a time, each of numbers of its own and each answer looked at."""
    places = [bound_to(room, numbers(0)) for _ in range(BESIDE)]
    under_way: deque[tuple[Handle, list[Binding], np.ndarray]] = deque()
    for number in range(count + BESIDE):
        if len(under_way) == BESIDE or number >= count:
            event, bindings, x = under_way.popleft()
            assert room.finish(event).state is EventState.COMPLETE
            answer = np.frombuffer(room.bytes_of(bindings[1].buffer, x.nbytes), np.float32).reshape(x.shape)
            np.testing.assert_array_equal(answer, rotated(x, STEPS))
        if number < count:
            bindings, x = places[number % BESIDE], numbers(number)
            room.backend.write_buffer(bindings[0].buffer, 0, [memoryview(x.tobytes())])
            under_way.append((room.submit(program, bindings, []), bindings, x))
    for bindings in places:
        for binding in bindings:
            room.backend.free_buffer(binding.buffer)


def slow_to_judge(program: Handle) -> Program:
    """Runs of this program are not done within their submission, however short they are."""
    assert isinstance(program, Program)
    found = program.source.ready(Variant(program.source.declared(), True))
    assert found is not None
    found.took = lambda nanoseconds: None  # type: ignore[method-assign]
    return program


def streams(program: Program, crowded: bool) -> int | None:
    found = program.source.ready(Variant(program.source.declared(), True, crowded))
    return None if found is None else int(found.model.get_property("NUM_STREAMS"))


def test_a_steady_crowd_gets_a_model_of_its_own(room: EngineRoom) -> None:
    program = slow_to_judge(room.load(rotations(SIDE, STEPS)))
    crowd(room, program, 8)
    assert streams(program, True) is None, "too early: it may be over in a moment"
    for _ in range(MOST // 32):
        crowd(room, program, 32)
        if streams(program, True) is not None:
            break
    assert streams(program, True) is not None
    assert streams(program, False) == 1
    crowd(room, program, 32)


def test_submissions_one_by_one_never_get_it(room: EngineRoom) -> None:
    program = slow_to_judge(room.load(rotations(SIDE, STEPS)))
    bindings = bound_to(room, numbers(1))
    for _ in range(100):
        assert room.finish(room.submit(program, bindings, [])).state is EventState.COMPLETE
    assert streams(program, True) is None


def test_where_it_cannot_be_compiled_the_other_model_goes_on(
    room: EngineRoom, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_here = programs.compile_here

    def refused(graph: Graph, within: bool, host: Host) -> Compiled:
        if host.tuning == Tuning(throughput=True):
            raise BackendError(Status.OUT_OF_MEMORY, "as if there were no memory")
        return compile_here(graph, within, host)

    monkeypatch.setattr(programs, "compile_here", refused)
    program = slow_to_judge(room.load(rotations(SIDE, STEPS)))
    with caplog.at_level(logging.WARNING):
        for _ in range(MOST // 32):
            crowd(room, program, 32)
            if caplog.records:
                break
        crowd(room, program, 32)
    assert [record.getMessage() for record in caplog.records] == [
        "no model for many submissions at a time: as if there were no memory"
    ]


@pytest.mark.parametrize(("threads", "hint", "expected"), [("1", "latency", (1, 1)), ("2", "throughput", (2, 2))])
def test_threads_and_streams_are_as_the_host_says(threads: str, hint: str, expected: tuple[int, int]) -> None:
    """What `vhost-user-accel --threads --prefer` sets."""
    if (os.cpu_count() or 1) < int(threads):
        threads, expected = "1", (1, 1)
    backend = open_backend("CPU", {"threads": threads, "prefer": hint})
    room = EngineRoom(backend)
    program = room.load(rotations(SIDE, STEPS))
    assert isinstance(program, Program)
    found = program.source.ready(Variant(program.source.declared(), True))
    assert found is not None
    names = ("INFERENCE_NUM_THREADS", "NUM_STREAMS")
    assert tuple(int(found.model.get_property(name)) for name in names) == expected
    if threads == "1":
        crowd(room, program, 200)
        assert streams(program, True) is None, "one thread serves a crowd no better"
    backend.close()
