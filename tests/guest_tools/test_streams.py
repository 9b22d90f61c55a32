"""VARIABLE tensors as streams: slots after the outputs, initial values, one program for many streams.

The reference backend stands behind the TOSA format here: to each byte it answers input XOR state, which is also the new
state. So the library's slot numbers, usages and initial values are what is shown; what TOSA operators do with state is
shown where a backend runs them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from graphs import Const, single

from virtaccel.device import reference
from virtaccel.device.reference import Reference
from virtaccel.guest_tools.arrays.accelerator import Accelerator
from virtaccel.guest_tools.arrays.program import Program
from virtaccel.guest_tools.artifact import TOSA_FORMAT, target_words
from virtaccel.guest_tools.session import Session
from virtaccel.guest_tools.transport.in_process import InProcessTransport
from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.target import Extension, from_words
from virtaccel.tosa_graph.write import GraphWriter

BYTES = ((4,), DType.INT8)
INITIAL = np.array([1, 2, 4, 8], np.int8)


def streaming() -> bytes:
    writer = GraphWriter()
    x = writer.input("x", *BYTES)
    state = writer.variable(INITIAL, name="state")
    writer.place(Op.VARIABLE, [], [state])
    old = writer.tensor("old", *BYTES)
    writer.place(Op.VARIABLE_READ, [state], [old])
    new = writer.operator(Op.BITWISE_XOR, [x, old], BYTES)
    writer.place(Op.VARIABLE_WRITE, [new], [state])
    writer.output(new)
    return writer.to_bytes()


@pytest.fixture
def program() -> Iterator[Program]:
    behind = reference.Program(reference.Operation.XOR, 0, inputs=1, outputs=1, states=1)
    backend = Reference(readers={TOSA_FORMAT: lambda payload: behind})
    with Accelerator(Session(InProcessTransport(lambda: backend))) as accelerator:
        yield accelerator.load(streaming(), "streaming.tosa")
    assert backend.live == 0


X = np.array([16, 16, 32, 32], np.int8)


def test_a_stream_goes_on_from_its_initial_values(program: Program) -> None:
    assert [tensor.name for tensor in program.variables] == ["state"]
    state = program.new_state()
    np.testing.assert_array_equal(state.read()["state"], INITIAL)
    np.testing.assert_array_equal(program(X, state=state)[0], X ^ INITIAL)
    np.testing.assert_array_equal(state.read()["state"], X ^ INITIAL)
    np.testing.assert_array_equal(program(X, state=state)[0], INITIAL)


def test_streams_do_not_touch_each_other(program: Program) -> None:
    first, second = program.new_state(), program.new_state()
    zero = np.zeros(4, np.int8)
    program(X, state=first)
    np.testing.assert_array_equal(program(zero, state=second)[0], INITIAL)
    np.testing.assert_array_equal(program(zero, state=first)[0], X ^ INITIAL)


def test_calls_without_a_stream_share_the_program_s_own(program: Program) -> None:
    np.testing.assert_array_equal(program(X)[0], X ^ INITIAL)
    np.testing.assert_array_equal(program(X)[0], INITIAL)


def test_reset_takes_a_stream_back_to_its_beginning(program: Program) -> None:
    state = program.new_state()
    program(X, state=state)
    state.reset()
    np.testing.assert_array_equal(program(X, state=state)[0], X ^ INITIAL)


def test_declared_target_names_the_extension() -> None:
    assert Extension.VARIABLE in from_words(target_words(read(streaming()))).extensions


def test_an_operand_given_at_run_time_is_declared() -> None:
    row = ((4,), DType.INT32)
    for shift, extension in ((((1,), DType.INT8), Extension.DYNAMIC), (Const(np.zeros(1, np.int8)), Extension(0))):
        assert from_words(target_words(read(single(Op.MUL, [row, row, shift], row)))).extensions == extension
