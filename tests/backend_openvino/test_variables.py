"""VARIABLE tensors on OpenVINO through the whole device: state lives in the guest's buffers, one program for many."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from virtaccel.backend_openvino import open_backend
from virtaccel.guest_tools.arrays.accelerator import Accelerator
from virtaccel.guest_tools.arrays.files import load_answers
from virtaccel.guest_tools.session import Session
from virtaccel.guest_tools.transport.in_process import InProcessTransport
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.write import GraphWriter, RegionWriter

_COUNT = count()


@pytest.fixture(scope="module")
def accelerator() -> Iterator[Accelerator]:
    with Accelerator(Session(InProcessTransport(lambda: open_backend("CPU")))) as opened:
        yield opened


def declared(writer: RegionWriter, initial: np.ndarray, name: str) -> str:
    state = writer.variable(initial, name=name)
    writer.place(Op.VARIABLE, [], [state])
    return state


def value_of(writer: RegionWriter, state: str, shape: tuple[int, ...], dtype: DType) -> str:
    value = writer.tensor(f"{state} read {next(_COUNT)}", shape, dtype)
    writer.place(Op.VARIABLE_READ, [state], [value])
    return value


def running_sum() -> bytes:
    """Gives the sum so far before and after this step; `unused` is never written, `last` never read."""
    spec = ((2,), DType.FP32)
    writer = GraphWriter()
    x = writer.input("x", *spec)
    total = declared(writer, np.array([0.5, -1.0], np.float32), "total")
    unused = declared(writer, np.array([3.0, 4.0], np.float32), "unused")
    last = declared(writer, np.array([0.0, 0.0], np.float32), "last")
    before = value_of(writer, total, *spec)
    new = writer.operator(Op.ADD, [x, before], spec)
    writer.place(Op.VARIABLE_WRITE, [new], [total])
    writer.place(Op.VARIABLE_WRITE, [x], [last])
    writer.output(before, value_of(writer, total, *spec), value_of(writer, unused, *spec))
    return writer.to_bytes()


def test_reads_see_the_write_before_them_and_the_next_run_goes_on(accelerator: Accelerator) -> None:
    program = accelerator.load(running_sum(), "running sum")
    state, total = program.new_state(), np.array([0.5, -1.0], np.float32)
    for step in range(1, 5):
        x = np.array([step, -step], np.float32)
        before, after, unused = program(x, state=state)
        np.testing.assert_array_equal(before, total)
        total = total + x
        np.testing.assert_array_equal(after, total)
        np.testing.assert_array_equal(unused, [3, 4])
        held = state.read()
        np.testing.assert_array_equal(held["total"], total)
        np.testing.assert_array_equal(held["last"], x)
        np.testing.assert_array_equal(held["unused"], [3, 4])


def test_a_window_slides_over_its_own_old_values(accelerator: Accelerator) -> None:
    """The new state is made of the old one, moved by one place: neither may be overwritten while it is read."""
    writer = GraphWriter()
    x = writer.input("x", (1, 8), DType.INT8)
    state = declared(writer, np.zeros((9, 8), np.int8), "window")
    old = value_of(writer, state, (9, 8), DType.INT8)
    tail = writer.operator(
        Op.SLICE, [old, writer.const_shape([1, 0]), writer.const_shape([8, 8])], ((8, 8), DType.INT8)
    )
    new = writer.operator(Op.CONCAT, [tail, x], ((9, 8), DType.INT8), {"axis": 0})
    writer.place(Op.VARIABLE_WRITE, [new], [state])
    writer.output(old)
    program = accelerator.load(writer.to_bytes(), "window")
    stream, expected = program.new_state(), np.zeros((9, 8), np.int8)
    for step in range(20):
        row = np.arange(step, step + 8, dtype=np.int8)[None]
        np.testing.assert_array_equal(program(row, state=stream)[0], expected)
        expected = np.concatenate([expected[1:], row])


def test_okay_nabu_in_two_interleaved_streams(accelerator: Accelerator, shared: Path) -> None:
    """A real INT8 wake word model with six states: a stream from the start, another ten steps behind."""
    program = accelerator.load(shared / "models" / "okay_nabu.tosa")
    answers = load_answers(shared / "models" / "okay_nabu.seq.npz", program.inputs, program.outputs)
    steps, lag = answers.steps or 0, 10
    assert steps == 84
    ahead, behind = program.new_state(), program.new_state()
    for step in range(steps + lag):
        for stream, index in ((ahead, step), (behind, step - lag)):
            if 0 <= index < steps:
                (got,) = program(*answers.step(index), state=stream)
                expected = answers.outputs[0][index]
                error = np.abs(got.view(np.uint8).astype(int) - expected.astype(int)).max()  # its answers are unsigned
                assert error <= 1, (index, got, expected)
