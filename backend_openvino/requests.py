"""What a submission runs with: a compiled model, a request of its own, and tensors laid over guest buffers.

Knows the runtime's requests and what is bound to them; when they are started, and what becomes of them, is
execution.py's. A request holds what it is bound to, so that memory cannot go away under it; a call whose buffer is
freed lets go of its idle requests.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from virtaccel.backend_openvino.buffers import Buffer
from virtaccel.tosa_graph.graph import DType

_RUNS = 4
"""A program's cost is the median of so many runs."""

UNKNOWN_COST = 1 << 63

_infer = super(ov.InferRequest, ov.InferRequest).infer
"""The runtime's own: the public one around it copies the outputs, and looks through inputs that nobody gave."""

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
"""Concrete shapes of a program's inputs, in order."""


class Slot(NamedTuple):
    """A program argument: TOSA type and packed bytes; the model's input and output it is (a VARIABLE that is written is
    both); type and shape of these ports."""

    dtype: DType
    bytes: int
    input: int | None
    output: int | None
    element: ov.Type
    ov_shape: ov.Shape


class Guard(NamedTuple):
    """What an input has to be for the model to hold: no element's magnitude, its bits without the sign read as an
    integer, is above `largest`. `unsigned` and `signed` are integers of an element's size, `magnitude` all bits but the
    sign."""

    slot: int
    bytes: int
    unsigned: np.dtype[Any]
    signed: np.dtype[Any]
    magnitude: int
    largest: int


class Executable:
    """A compiled model with its slots (inputs, outputs, variables) and its conditions. Shared by all programs of the
    same artifact. `steps` is the output that tells how many loop iterations were left, None if there are no loops."""

    def __init__(
        self, model: ov.CompiledModel, slots: Sequence[Slot], guards: Sequence[Guard] = (), steps: int | None = None
    ) -> None:
        self.model = model
        self.slots = tuple(slots)
        self.steps = steps
        self.guards = tuple(guards)
        self.brief = True
        """Whether the latest run waited for ended within a short look; if not, looking takes processors from it."""
        self.cost = UNKNOWN_COST
        """What a run takes, in nanoseconds, as far as is known. What has loops has none: it depends on the data."""
        self._runs: list[int] = []
        self.requests: weakref.WeakSet[Request] = weakref.WeakSet()

    def took(self, nanoseconds: int) -> None:
        """Learn from a run. One that was interrupted says little, hence the median of several."""
        runs = self._runs
        runs.append(nanoseconds)
        if len(runs) == _RUNS:
            if self.steps is None:
                self.cost = sorted(runs)[_RUNS // 2]
            runs.clear()

    def at_work(self) -> bool:
        """Whether a run of this model is under way, whoever's: the runtime makes no further request until it ends."""
        return any(request.started and not request.stopped() for request in self.requests)


class Range(NamedTuple):
    """What one slot is bound to."""

    buffer: Buffer
    offset: int


class Request:
    """An infer request and the tensors bound to it, which it keeps alive: the runtime holds bare pointers.

    What is written to a VARIABLE goes to memory of the request's own, and to the buffer when the run is known to be
    complete: the old value may be read until the end, and a run that fails leaves the stream where it was.
    """

    __slots__ = (
        "__weakref__", "_checked", "_outputs", "_steps", "_tensors", "_written", "executable", "infer", "ranges",
        "started",
    )  # fmt: skip

    def __init__(self, executable: Executable) -> None:
        """Blocks while another request of the model runs (`Executable.at_work`)."""
        self.executable = executable
        self.infer = executable.model.create_infer_request()
        self.started = False
        executable.requests.add(self)
        self.ranges: tuple[Range, ...] = ()
        self._tensors: list[ov.Tensor] = []
        self._outputs: list[tuple[int, int]] = []
        self._written: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []
        self._steps = np.ones(1, np.int32)
        self._checked = False

    def bind(self, ranges: tuple[Range, ...]) -> None:
        """Lay the tensors over the buffers. If that fails the request is of no more use."""
        infer = self.infer
        tensors: list[ov.Tensor] = []
        outputs: list[tuple[int, int]] = []
        written: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []
        for slot, (buffer, offset) in zip(self.executable.slots, ranges, strict=True):
            memory = buffer.array[offset : offset + slot.bytes]
            if slot.input is not None:
                tensors.append(ov.Tensor(memory, slot.ov_shape, slot.element))
                infer.set_input_tensor(slot.input, tensors[-1])
            if slot.output is not None:
                if slot.input is not None:
                    target, memory = memory, np.empty(slot.bytes, np.uint8)
                    written.append((target, memory))
                tensors.append(ov.Tensor(memory, slot.ov_shape, slot.element))
                infer.set_output_tensor(slot.output, tensors[-1])
                outputs.append((slot.output, memory.ctypes.data))
        if self.executable.steps is not None:
            tensors.append(ov.Tensor(self._steps, [1], ov.Type.i32))
            infer.set_output_tensor(self.executable.steps, tensors[-1])
            outputs.append((self.executable.steps, self._steps.ctypes.data))
        self.ranges, self._tensors, self._outputs, self._written = ranges, tensors, outputs, written
        self._checked = False

    def wrote_in_place(self) -> bool:
        """Whether the outputs lie in the caller's memory still; looked at once for each binding."""
        if not self._checked:
            self._checked = all(
                self.infer.get_output_tensor(port).data.ctypes.data == address for port, address in self._outputs
            )
        return self._checked

    def ran_out(self) -> bool:
        """Whether a loop was ended before its condition said so."""
        return self.executable.steps is not None and self._steps[0] <= 0

    def keep_variables(self) -> None:
        """The run is complete: what it wrote to variables is what they hold."""
        for target, memory in self._written:
            target[:] = memory

    def run(self) -> None:
        """Run it here, to its end. Raises RuntimeError as the runtime does."""
        _infer(self.infer, {}, True, False)

    def stopped(self) -> bool:
        """Whether no native work is left, however it ended."""
        try:
            return bool(self.infer.wait_for(0))
        except RuntimeError:
            return True


class Call:
    """A program's slots bound to certain ranges: checked once, then submitted as often as the guest likes.

    `idle` are requests bound to these ranges, by model. When one of the buffers is freed or the program is unloaded the
    call is dead: idle requests die with it, one at work dies when it ends.
    """

    __slots__ = ("dead", "executable", "idle", "passed", "ranges", "readers", "shapes", "sizes", "writers")

    def __init__(
        self, ranges: tuple[Range, ...], sizes: tuple[int, ...], shapes: Shapes, reads: set[Buffer], writes: set[Buffer]
    ) -> None:
        self.ranges = ranges
        self.sizes = sizes
        self.shapes = shapes
        self.readers = tuple(reads - writes)
        self.writers = tuple(writes)
        self.executable: Executable | None = None
        self.idle: dict[Executable, Request] = {}
        self.passed: dict[Guard, int] = {}
        """Guards that its inputs have passed, and how many changes their buffers had seen then."""
        self.dead = False
        for buffer in reads | writes:
            buffer.calls.add(self)

    def refused(self) -> bool:
        """Whether running work over one of the buffers stands against running this."""
        for buffer in self.writers:
            if buffer.writer or buffer.readers:
                return True
        return any(buffer.writer for buffer in self.readers)

    def take(self) -> None:
        """Guard the buffers."""
        for buffer in self.readers:
            buffer.readers += 1
        for buffer in self.writers:
            buffer.writer = True
            buffer.changes += 1

    def release(self) -> None:
        for buffer in self.readers:
            buffer.readers -= 1
        for buffer in self.writers:
            buffer.writer = False

    def finished(self, request: Request) -> None:
        """The native work over these buffers is over."""
        self.release()
        if not self.dead:
            self.idle[request.executable] = request

    def let_go(self) -> None:
        self.dead = True
        self.idle.clear()
        for buffer, _ in self.ranges:
            buffer.calls.discard(self)
