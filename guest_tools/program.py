"""A program on buffers: load, slots, bind, submit, wait, read; the core under the numpy API and the bare one.

Knows the slot rules of TOSA artifacts: inputs 0..N-1, outputs N..N+M-1, VARIABLE tensors from N+M on, bound read and
write to buffers of the mutable-state usage, so that one program serves many streams. What a tensor's value is on this
side says its `TensorInfo`: bytes here, arrays where numpy is. Standard library only: this runs inside a guest.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

from virtaccel.device.pacing import Pace
from virtaccel.device.wire import Access, EventState, Status, Usage
from virtaccel.guest_tools.client import (
    Binding,
    DeviceError,
    Event,
    EventStatus,
    IndeterminateSubmit,
    PackedBindings,
    Request,
    pack_bindings,
    status_name,
)
from virtaccel.guest_tools.client import Program as ProgramId
from virtaccel.guest_tools.context import DeviceBuffer, DeviceContext
from virtaccel.guest_tools.errors import ExecutionFailed, InputError, ModelError
from virtaccel.tosa_graph.graph import DType, Graph, Tensor, packed_bytes

Shapes: TypeAlias = tuple[tuple[int, ...], ...]

# Sets of shapes whose buffers are kept: callers with a few sizes in turn allocate nothing, and a stream of ever new
# sizes holds no more of the device than this.
MOST_SHAPES_KEPT: Final = 8
INPUT: Final = Usage.TRANSFER_DESTINATION | Usage.PROGRAM_INPUT
OUTPUT: Final = Usage.TRANSFER_SOURCE | Usage.PROGRAM_OUTPUT
STATE: Final = Usage.TRANSFER_SOURCE | Usage.TRANSFER_DESTINATION | Usage.MUTABLE_STATE


class TensorInfo(NamedTuple):
    """An input, output or variable: name, shape in elements (-1 where a call decides) and element type. Its values are
    packed bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def dynamic(self) -> bool:
        return any(dimension < 0 for dimension in self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the packed tensor; the shape must be known."""
        return packed_bytes(self.dtype, math.prod(self.shape))

    def __str__(self) -> str:
        return f"{self.name!r}, {self.dtype.name} {list(self.shape)}"

    def check(self, value: Any) -> None:
        """Raises InputError unless `value` fits, any size standing for -1."""
        if len(value) != self.bytes:
            raise InputError(f"{self.name}: {len(value)} bytes were given, {self.bytes} are needed")

    def encode(self, value: Any) -> memoryview:
        """The packed bytes of a value."""
        return memoryview(value)

    def empty(self) -> tuple[Any, memoryview]:
        """Room for the packed bytes, and the value over it if it can be used as it is, else None."""
        return None, memoryview(bytearray(self.bytes))

    def decode(self, raw: memoryview) -> Any:
        """The value in packed bytes."""
        return bytes(raw)


T = TypeVar("T", bound=TensorInfo)


def fetch(buffer: DeviceBuffer, tensor: TensorInfo) -> Any:
    """The value in a buffer."""
    value, room = tensor.empty()
    buffer.read(room)
    return tensor.decode(room) if value is None else value


class State(Generic[T]):
    """The VARIABLE tensors of one stream: buffers on the device, with the program's initial values to begin with."""

    def __init__(self, context: DeviceContext, variables: Sequence[T], initial: Sequence[bytes | None]) -> None:
        self._variables, self._initial = variables, initial
        self.buffers = [context.buffer(tensor.bytes, STATE) for tensor in variables]
        self.reset()

    def reset(self) -> None:
        """Back to the initial values."""
        for tensor, data, buffer in zip(self._variables, self._initial, self.buffers, strict=True):
            buffer.write(memoryview(data or bytes(tensor.bytes)))

    def read(self) -> dict[str, Any]:
        """The values now, by variable."""
        pairs = zip(self._variables, self.buffers, strict=True)
        return {tensor.name: fetch(buffer, tensor) for tensor, buffer in pairs}

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.free()


class Pending:
    """One submission under way. `wait` must be called once; it gives the event back."""

    def __init__(self, context: DeviceContext, event: Event, pace: Pace | None = None) -> None:
        """`pace` is the program's, if the submission is waited for before anything else."""
        self._context = context
        self._event: Event | None = event
        self._pace = pace

    def done(self) -> bool:
        """Whether it has ended, one way or another. Never waits."""
        if self._event is None:
            return True
        session = self._context.session
        return bool(session.call(session.client.poll_event(self._event)).state)

    def cancel(self) -> bool:
        """Ask to cancel; False if it had already ended. Raises DeviceError UNSUPPORTED if the device cannot."""
        session = self._context.session
        if self._event is None:
            return False
        try:
            session.call(session.client.cancel_event(self._event))
        except DeviceError as error:
            if error.status == Status.BUSY:
                return False
            raise
        return True

    def wait(self, patience: float | None = None) -> None:
        """Until it has ended. Raises ExecutionFailed if it did not complete, TimeoutError if it is still pending after
        `patience` seconds (then it goes on, and may be waited for again)."""
        if self._event is None:
            return
        session = self._context.session
        # A wait that was given up and taken up again began at another time than the run.
        pace, self._pace = self._pace, None  # later it says nothing
        status = session.wait(self._event, patience, pace)
        if status.state == EventState.PENDING:
            # Not an outcome: the event lives, and its buffers with it.
            raise TimeoutError(f"still running after {patience} s")
        event, self._event = self._event, None
        self._context.pending.discard(self)
        session.call(session.client.destroy_event(event))
        if status.state != EventState.COMPLETE:
            raise _failure(status)

    def settle(self, patience: float) -> None:
        """Cancel it if the device can, then wait as `wait` does, however it ends. Raises TimeoutError."""
        with contextlib.suppress(DeviceError):
            self.cancel()
        with contextlib.suppress(ExecutionFailed):
            self.wait(patience)


def _failure(status: EventStatus) -> ExecutionFailed:
    if status.state == EventState.CANCELLED:
        return ExecutionFailed("the submission was cancelled")
    if status.error == Status.DEADLINE_EXPIRED:
        return ExecutionFailed("the submission ran out of its time limit (DEADLINE_EXPIRED)", status.error)
    return ExecutionFailed(f"the device could not finish the submission ({status_name(status.error)})", status.error)


class Invocation(Generic[T]):
    """A program with buffers for one set of shapes, to be run again and again.

    `buffers` holds one DeviceBuffer per input and output, in slot order. Buffers passed in are used as they are and
    stay their owner's, so what one program wrote another can read with no transfer in between.
    """

    def __init__(
        self, program: LoadedProgram[T], inputs: Sequence[T], outputs: Sequence[T],
        given: Mapping[str, DeviceBuffer] | None = None, output_usage: Usage = OUTPUT,
    ) -> None:
        self.program = program
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self._context = program.accelerator
        self._own: list[DeviceBuffer] = []
        self.buffers: list[DeviceBuffer] = []
        given = given or {}
        # No more uses than needed: a device may place memory by them.
        usages = (INPUT,) * len(self.inputs) + (output_usage,) * len(self.outputs)
        for tensor, usage in zip((*self.inputs, *self.outputs), usages, strict=True):
            buffer = given.get(tensor.name)
            if buffer is None:
                buffer = self._context.buffer(tensor.bytes, usage)
                self._own.append(buffer)
            elif buffer.bytes != tensor.bytes:
                raise InputError(f"{tensor} takes {tensor.bytes} bytes, the given buffer has {buffer.bytes}")
            self.buffers.append(buffer)
        self._packed = self._bind(None)
        self._packed_for: State[T] | None = None

    @property
    def packed(self) -> PackedBindings:
        """Wire form of the bindings, without state."""
        return self._packed if self._packed_for is None else self._bind(None)

    def _bind(self, state: State[T] | None) -> PackedBindings:
        access = [Access.READ] * len(self.inputs) + [Access.WRITE] * len(self.outputs)
        buffers = list(self.buffers)
        if state is not None:
            buffers += state.buffers
            access += [Access.READ_WRITE] * len(state.buffers)
        slots = enumerate(zip(buffers, access, strict=True))
        return pack_bindings([Binding(buffer.id, 0, buffer.bytes, slot, how) for slot, (buffer, how) in slots])

    def write(self, values: Sequence[Any]) -> None:
        """Copy `values` into the input buffers, in order. Raises InputError where one does not fit."""
        if len(values) != len(self.inputs):
            raise InputError(f"{self.program.name} takes {len(self.inputs)} inputs, {len(values)} given")
        for tensor, buffer, value in zip(self.inputs, self.buffers, values, strict=False):
            tensor.check(value)
            buffer.write(tensor.encode(value))

    def run(self, state: State[T] | None = None, timeout: float | None = None) -> None:
        """One run, from start to end. Raises ExecutionFailed; `timeout` as in `submit`."""
        self._submit(state, timeout, True).wait()

    def submit(self, state: State[T] | None = None, timeout: float | None = None) -> Pending:
        """Start one run on what the buffers hold now. `timeout` in seconds from admission; None is no limit.

        Raises ExecutionFailed if the device does not take it, BUSY meaning that a run still uses these buffers.
        """
        return self._submit(state, timeout, False)

    def request(self, state: State[T] | None = None, timeout_ns: int = 0) -> Request[Event]:
        """The command that starts one run, for who publishes it as part of something larger."""
        # A stream keeps its state from call to call, so its bindings are packed once.
        if state is not self._packed_for:
            self._packed, self._packed_for = self._bind(state), state
        context = self._context
        return context.session.client.submit(context.queue, self.program.id, self._packed, timeout_ns)

    def _submit(self, state: State[T] | None, timeout: float | None, at_once: bool) -> Pending:
        context = self._context
        request = self.request(state, 0 if timeout is None else max(1, int(timeout * 1e9)))
        try:
            event = context.session.submit(request, at_once)
        except IndeterminateSubmit as error:
            # It may be running. Its event is kept, and given back when the context is closed.
            context.pending.add(Pending(context, error.event))
            text = f"nobody knows whether the submission runs ({error}); it keeps its buffers until it has ended"
            raise ExecutionFailed(text, error.status) from error
        except DeviceError as error:
            raise ExecutionFailed(f"the device did not take the submission: {error}", error.status) from error
        # Only who waits at once learns how long a run takes; in between others would be counted.
        pending = Pending(context, event, self.program.pace if at_once else None)
        context.pending.add(pending)
        return pending

    def read(self) -> tuple[Any, ...]:
        """The output buffers as fresh values, in order."""
        pairs = zip(self.outputs, self.buffers[len(self.inputs) :], strict=True)
        return tuple([fetch(buffer, tensor) for tensor, buffer in pairs])

    def close(self) -> None:
        """Free the buffers that were allocated here."""
        for buffer in self._own:
            buffer.free()
        self._own.clear()


class LoadedProgram(Generic[T]):
    """A loaded program. `inputs`, `outputs` and `variables` describe its tensors, each as `kind` has it."""

    def __init__(self, context: DeviceContext, program: ProgramId, graph: Graph, name: str, kind: type[T]) -> None:
        self.accelerator = context
        self.id = program
        self.name = name
        self.graph = graph
        self._kind = kind
        self.inputs, self.outputs, self.variables = map(self._described, (graph.inputs, graph.outputs, graph.variables))
        self.pace = Pace()
        self._invocations: dict[Shapes, Invocation[T]] = {}
        self._states: list[State[T]] = []
        self._closed = False
        context.programs.add(self)

    def _described(self, tensors: Sequence[Tensor]) -> tuple[T, ...]:
        return tuple(self._kind(tensor.name, tensor.shape, tensor.dtype) for tensor in tensors)

    def new_state(self) -> State[T]:
        """A fresh stream for a program with VARIABLE tensors."""
        state = State(self.accelerator, self.variables, [tensor.data for tensor in self.graph.variables])
        # Kept, since a stream lives as long as its program, whoever still holds it.
        self._states.append(state)
        return state

    def own_state(self) -> State[T] | None:
        """The stream of who names none; None where there are no variables."""
        if not self.variables:
            return None
        return self._states[0] if self._states else self.new_state()

    def invocation(self, shapes: Shapes | None = None) -> Invocation[T]:
        """The kept buffers for these input shapes (None: the program's own), allocated on first use."""
        key = tuple(tensor.shape for tensor in self.inputs) if shapes is None else shapes
        invocation = self._invocations.get(key)
        if invocation is None:
            if len(self._invocations) >= MOST_SHAPES_KEPT:
                # The set of shapes made first goes: callers with more sizes than this run through them in turn.
                self._invocations.pop(next(iter(self._invocations))).close()
            invocation = self._invocations[key] = self.new_invocation(key)
        return invocation

    def new_invocation(
        self, shapes: Shapes | None = None, buffers: Mapping[str, DeviceBuffer] | None = None,
        output_usage: Usage = OUTPUT,
    ) -> Invocation[T]:
        """Buffers of its own, for running beside others, except where `buffers` names one for a tensor. Close it."""
        # A handle of an unloaded program may by now name another one.
        if self._closed:
            raise ModelError(f"{self.name} has been unloaded")
        inputs, outputs = self.inputs, self.outputs
        if any(tensor.dynamic for tensor in (*inputs, *outputs)):
            graph = self.specialised(shapes)
            inputs, outputs = self._described(graph.inputs), self._described(graph.outputs)
        return Invocation(self, inputs, outputs, buffers, output_usage)

    def specialised(self, shapes: Shapes | None) -> Graph:
        """The graph for these input shapes, every size known. Raises InputError: bare guests take fixed sizes only."""
        raise InputError(f"{self.name} has tensors of no fixed size; this tool needs fixed shapes")

    def close(self) -> None:
        """Unload the program and free its buffers and states. Submissions must have ended."""
        if self._closed:
            return
        self._closed = True
        owners: list[Invocation[T] | State[T]] = [*self._invocations.values(), *self._states]
        # Buffers first: once the program is gone, nobody would look for them here.
        for owner in owners:
            owner.close()
        session = self.accelerator.session
        session.call(session.client.unload_program(self.id))
        self.accelerator.programs.discard(self)
