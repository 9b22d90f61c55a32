"""State and sizes through the whole device: a streaming network in interleaved streams, one program at many batches,
and a shape that cannot be had, which costs the submission that asked for it and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from oracle import reference

from virtaccel.cli.main import main
from virtaccel.device.wire import Access, EventState, Status
from virtaccel.guest_tools.arrays.accelerator import Accelerator
from virtaccel.guest_tools.arrays.files import compare, load_answers
from virtaccel.guest_tools.arrays.program import Program
from virtaccel.guest_tools.client import Binding, DeviceError, Event, EventStatus
from virtaccel.guest_tools.errors import InputError
from virtaccel.tosa_graph.elements import Array
from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.specialise import specialise
from virtaccel.tosa_graph.write import GraphWriter, encode

# ---- streams


def test_okay_nabu_step_by_step_from_the_command_line(shared: Path) -> None:
    models = shared / "models"
    arguments = ["run", models / "okay_nabu.tosa", "--check", models / "okay_nabu.seq.npz", "--atol", "1", "--json"]
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["ok"] is True
    assert facts["latency"]["calls"] == 84


@pytest.mark.parametrize("lag", [0, 13])
def test_okay_nabu_in_two_interleaved_streams_on_one_program(accelerator: Accelerator, shared: Path, lag: int) -> None:
    """Both hear the same, one `lag` steps later; each must answer as if it were alone."""
    program = accelerator.load(shared / "models" / "okay_nabu.tosa")
    answers = load_answers(shared / "models" / "okay_nabu.seq.npz", program.inputs, program.outputs)
    steps = answers.steps or 0
    assert steps == 84
    streams = (program.new_state(), program.new_state())
    heard: tuple[list[Array], list[Array]] = ([], [])
    for turn in range(steps + lag):
        for which, step in ((0, turn), (1, turn - lag)):
            if 0 <= step < steps:
                heard[which].append(program(*answers.step(step), state=streams[which])[0])
    for outputs in heard:
        assert compare("score", np.stack(outputs), answers.outputs[0], atol=1).ok
    np.testing.assert_array_equal(heard[0], heard[1])
    assert np.stack(heard[0]).view(np.uint8).max() >= 254, "it was said"
    program.close()


# ---- sizes


def test_sine_float_at_batch_1_2_7_1000_on_one_program(accelerator: Accelerator, shared: Path) -> None:
    tosa = (shared / "models" / "sine_float.tosa").read_bytes()
    program = accelerator.load(tosa, "sine_float")
    for batch in (1, 2, 7, 1000, 2):
        x = np.random.default_rng(batch).uniform(0, 2 * np.pi, (batch, 1)).astype(np.float32)
        # The reference model takes no unknown dimension, so it gets the same graph with this one in it.
        (expected,) = reference(encode(specialise(read(tosa), [(batch, 1)])), [x])
        (got,) = program(x)
        assert compare("sine", got, expected).ok
        assert np.abs(got - np.sin(x)).max() < 0.2
    program.close()


def pairs_of(count: str = "x") -> bytes:
    """(-1, 3) as (-1, 2): only multiples of 2 rows can be had."""
    writer = GraphWriter()
    x = writer.input(count, (-1, 3), DType.FP32)
    shape = writer.const_shape((-1, 2))
    flat = writer.operator(Op.RESHAPE, [x, shape], ((-1, 2), DType.FP32))
    writer.output(writer.operator(Op.ADD, [flat, flat], ((-1, 2), DType.FP32)))
    return writer.to_bytes()


class Bench:
    """A dynamic program with a buffer in front and one behind it, bound in any number of bytes."""

    def __init__(self, accelerator: Accelerator, program: Program) -> None:
        self.accelerator = accelerator
        self.program = program
        self.source, self.sink = accelerator.buffer(1 << 12), accelerator.buffer(1 << 12)

    def submit(self, taken: int, given: int) -> Event:
        slots = [
            Binding(self.source.id, 0, taken, 0, Access.READ),
            Binding(self.sink.id, 0, given, 1, Access.WRITE),
        ]
        session, client = self.accelerator.session, self.accelerator.session.client
        return session.call(client.submit(self.accelerator.queue, self.program.id, slots, 0))

    def finish(self, event: Event) -> EventStatus:
        session = self.accelerator.session
        status = session.wait(event, 60.0)
        session.call(session.client.destroy_event(event))
        return status

    def failure(self, taken: int, given: int) -> int:
        """The status that a submission ends with: known at once, or when the program is made for this size."""
        try:
            return self.finish(self.submit(taken, given)).error
        except DeviceError as error:
            return error.status

    def rows(self, count: int) -> Array:
        """A run of so many rows, and the right answer's check."""
        x = np.arange(3 * count, dtype=np.float32)
        self.source.write(x)
        assert self.finish(self.submit(12 * count, 12 * count)).state == EventState.COMPLETE
        got = np.empty(3 * count, np.float32)
        self.sink.read(got)
        np.testing.assert_array_equal(got, x + x)
        return got


def test_a_shape_that_cannot_be_had_costs_one_submission(accelerator: Accelerator) -> None:
    program, other = accelerator.load(pairs_of(), "pairs"), accelerator.load(pairs_of("y"), "others")
    bench, beside = Bench(accelerator, program), Bench(accelerator, other)
    bench.rows(2)
    for taken, given in ((12 * 3, 12 * 3), (12 * 4, 12 * 2), (12 * 4 + 1, 12 * 4), (12 * 4, 8), (4, 4)):
        running = beside.submit(12 * 4, 12 * 4)  # meanwhile, another program at a size of its own
        assert bench.failure(taken, given) == Status.INCOMPATIBLE
        assert beside.finish(running).state == EventState.COMPLETE
        bench.rows(4)
    for count in (2, 4, 6, 2):
        bench.rows(count)
    for one in (bench, beside):
        one.source.free()
        one.sink.free()
        one.program.close()


def test_the_library_says_so_before_the_device_does(accelerator: Accelerator) -> None:
    program = accelerator.load(pairs_of(), "pairs")
    with pytest.raises(InputError, match="cannot take inputs of shape"):
        program(np.zeros((3, 3), np.float32))
    with pytest.raises(InputError, match="takes float32 of shape"):
        program(np.zeros((2, 4), np.float32))
    np.testing.assert_array_equal(program(np.ones((2, 3), np.float32))[0], np.full((3, 2), 2))
    program.close()
