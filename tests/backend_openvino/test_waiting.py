"""Waiting in process: what has ended is told once, so that waiting for the rest is no busy loop."""

from __future__ import annotations

import graphs
import numpy as np
from engine_room import EngineRoom

from virtaccel.backend_openvino import open_backend
from virtaccel.device.backend import Binding
from virtaccel.device.wire import Access, EventState
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
