"""Before a submission runs on a model that was compiled for inputs within a limit, the inputs are looked through."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from engine_room import EngineRoom
from hypothesis import given
from hypothesis import strategies as st

from virtaccel.backend_openvino import open_backend
from virtaccel.backend_openvino.backend import OpenVinoBackend
from virtaccel.backend_openvino.bindings import guards_for, within
from virtaccel.backend_openvino.requests import Executable, Slot
from virtaccel.device.backend import Binding
from virtaccel.device.wire import Access, EventState
from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.write import GraphWriter

TYPES: dict[DType, Any] = {
    DType.FP32: np.float32,
    DType.FP16: np.float16,
    DType.BF16: ml_dtypes.bfloat16,
}
AROUND = [0.0, -0.0, 1.0, -1.0, 3.5, -3.5, 4.0, -4.0, 4.03125, -4.03125, 1e30, -1e30, np.inf, -np.inf, np.nan, -np.nan]
LIMIT = 4.0


def looked_through(values: list[float], dtype: DType, offset: int) -> bool:
    data = np.array(values, np.float32).astype(TYPES[dtype]).view(np.uint8)
    memory = np.concatenate([np.full(offset, 0xFF, np.uint8), data])
    slot = Slot(dtype, data.nbytes, 0, None, cast(Any, None), cast(Any, None))
    executable = cast(Executable, SimpleNamespace(guards=guards_for([slot], LIMIT)))
    buffer = SimpleNamespace(array=memory, changes=0, arena=SimpleNamespace(exposed=False))
    return within(executable, cast(Any, SimpleNamespace(ranges=((buffer, offset),), passed={})))


@pytest.mark.parametrize("dtype", list(TYPES))
@given(values=st.lists(st.sampled_from(AROUND), min_size=1, max_size=40))
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_numbers_within_the_limit_pass_and_nothing_else(dtype: DType, values: list[float]) -> None:
    right = all(abs(value) <= LIMIT for value in values)  # a NaN is not
    assert looked_through(values, dtype, 0) == right
    assert looked_through(values, dtype, 64) == right


def test_what_is_no_number_with_a_limit_is_not_looked_at() -> None:
    assert guards_for([Slot(DType.INT32, 4, 0, None, cast(Any, None), cast(Any, None))], LIMIT) == []


@pytest.fixture
def room() -> Iterator[EngineRoom]:
    backend = open_backend("CPU")
    yield EngineRoom(backend)
    backend.close()


@pytest.mark.parametrize("written", ["by a write", "by another program", "in the shared file"])
def test_an_input_that_was_changed_is_looked_through_again(room: EngineRoom, shared: Path, written: str) -> None:
    """A NaN has to come out of a network whose model is compiled for numbers, however it got in."""
    tosa = (shared / "models/face_detection_short_range.tosa").read_bytes()
    program = room.load(tosa)
    graph = read(tosa)
    (tensor,) = graph.inputs
    size = 4 * math.prod(tensor.shape)
    exposed = written == "in the shared file"
    backend = room.backend
    assert isinstance(backend, OpenVinoBackend)
    memory = backend.memory() if exposed else -1
    source = room.buffer(size, bytes(size))
    outputs = [room.buffer(4 * math.prod(out.shape)) for out in graph.outputs]
    bindings = [Binding(source, 0, size, 0, Access.READ)] + [
        Binding(buffer, 0, 4 * math.prod(out.shape), slot, Access.WRITE)
        for slot, (buffer, out) in enumerate(zip(outputs, graph.outputs, strict=True), 1)
    ]

    def any_nan() -> bool:
        assert room.finish(room.submit(program, bindings, [])).state is EventState.COMPLETE
        found = (
            room.bytes_of(buffer, 4 * math.prod(out.shape)) for buffer, out in zip(outputs, graph.outputs, strict=True)
        )
        return any(np.isnan(np.frombuffer(data, np.float32)).any() for data in found)

    for _ in range(3):
        assert not any_nan()
    bad = np.full(size // 4, np.nan, np.float32)
    if written == "by a write":
        backend.write_buffer(source, 0, [memoryview(bad.tobytes())])
    elif exposed:
        os.pwrite(memory, bad.tobytes(), backend.place(source))
    else:
        writer = GraphWriter()
        left = writer.input("left", (size // 4,), DType.FP32)
        writer.output(writer.operator(Op.ADD, [left, left], ((size // 4,), DType.FP32), {}))
        spoils = room.load(writer.to_bytes())
        other = room.buffer(size, bad.tobytes())
        pair = [Binding(other, 0, size, 0, Access.READ), Binding(source, 0, size, 1, Access.WRITE)]
        assert room.finish(room.submit(spoils, pair, [])).state is EventState.COMPLETE
    assert any_nan()
