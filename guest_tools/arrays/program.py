"""Programs, their buffers on the device, and running them with numpy arrays.

Knows tensors (tosa_graph) and the slot rules of TOSA artifacts: inputs 0..N-1, outputs N..N+M-1, VARIABLE tensors from
N+M on, bound read and write to buffers of the mutable-state usage, so that one program serves many streams. Knows no
transport. A tensor with a dimension of -1 gets its size from the arrays of a call; buffers are kept per set of shapes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from virtaccel.device.pacing import Pace
from virtaccel.device.wire import Access, EventState, Status, Usage
from virtaccel.guest_tools.client import (
    Binding,
    DeviceError,
    Event,
    EventStatus,
    IndeterminateSubmit,
    PackedBindings,
    pack_bindings,
    status_name,
)
from virtaccel.guest_tools.client import Program as ProgramId
from virtaccel.guest_tools.errors import ExecutionFailed, InputError, ModelError
from virtaccel.tosa_graph.elements import CARRIER, pack, unpack
from virtaccel.tosa_graph.graph import DType, Graph, Tensor, TosaError, packed_bytes

if TYPE_CHECKING:
    from virtaccel.guest_tools.arrays.accelerator import Accelerator, DeviceBuffer

Array: TypeAlias = NDArray[Any]
Arrays: TypeAlias = tuple[Array, ...]
Shapes: TypeAlias = tuple[tuple[int, ...], ...]

MOST_SHAPES_KEPT = 8
_INPUT = Usage.TRANSFER_DESTINATION | Usage.PROGRAM_INPUT
_OUTPUT = Usage.TRANSFER_SOURCE | Usage.PROGRAM_OUTPUT
_PACKED_OTHERWISE = (DType.INT4, DType.INT48, DType.BF16, DType.FP8E4M3, DType.FP8E5M2)


class TensorInfo(NamedTuple):
    """An input, output or variable: name, shape in elements (-1 where a call decides) and element type."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def carrier(self) -> np.dtype[Any]:
        """The numpy type of arrays for this tensor (BF16 and FP8 travel as float32, INT4 as int8, INT48 as int64)."""
        return CARRIER[self.dtype]

    @property
    def dynamic(self) -> bool:
        return any(dimension < 0 for dimension in self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the packed tensor; the shape must be known."""
        count = 1
        for dimension in self.shape:
            count *= dimension
        return packed_bytes(self.dtype, count)

    def __str__(self) -> str:
        return f"{self.name!r}, {self.dtype.name} {list(self.shape)}"

    def check(self, array: Array) -> None:
        """Raises InputError unless type and shape fit, any size standing for -1."""
        if array.dtype == self.carrier:
            if array.shape == self.shape:
                return
            if self.dynamic and array.ndim == len(self.shape):
                pairs = zip(self.shape, array.shape, strict=True)
                if all(want in (-1, got) and got > 0 for want, got in pairs):
                    return
        advice = f"; convert it with array.astype({str(self.carrier)!r})" if array.dtype != self.carrier else ""
        raise InputError(
            f"input {self.name!r} takes {self.carrier} of shape {list(self.shape)} ({self.dtype.name}), "
            f"got {array.dtype} of shape {list(array.shape)}{advice}"
        )

    def encode(self, array: Array) -> memoryview:
        """The tensor's packed bytes; those of the array itself where its memory is laid out that way."""
        if self.dtype in _PACKED_OTHERWISE:
            return memoryview(pack(array, self.dtype))
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data

    def empty(self) -> tuple[Array | None, memoryview]:
        """Room for the packed bytes, and the array over it if it can be used as it is."""
        if self.dtype in _PACKED_OTHERWISE:
            return None, memoryview(bytearray(self.bytes))
        array = np.empty(self.shape, self.carrier)
        return array, array.reshape(-1).view(np.uint8).data


def _info(tensor: Tensor) -> TensorInfo:
    return TensorInfo(tensor.name, tensor.shape, tensor.dtype)


class State:
    """The VARIABLE tensors of one stream: buffers on the device, with the program's initial values to begin with."""

    def __init__(self, accelerator: Accelerator, variables: Sequence[Tensor]) -> None:
        usage = Usage.TRANSFER_SOURCE | Usage.TRANSFER_DESTINATION | Usage.MUTABLE_STATE
        self._variables = [(_info(tensor), tensor.data) for tensor in variables]
        self.buffers = [accelerator.buffer(info.bytes, usage) for info, _ in self._variables]
        self.reset()

    def reset(self) -> None:
        """Back to the initial values."""
        for (info, data), buffer in zip(self._variables, self.buffers, strict=True):
            buffer.write(memoryview(data or bytes(info.bytes)))

    def read(self) -> dict[str, Array]:
        """The values now, by variable."""
        values = {}
        for (info, _), buffer in zip(self._variables, self.buffers, strict=True):
            raw = memoryview(bytearray(info.bytes))
            buffer.read(raw)
            values[info.name] = unpack(raw, info.dtype, info.shape)
        return values

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.free()


class Pending:
    """One submission under way. `wait` must be called once; it gives the event back."""

    def __init__(self, accelerator: Accelerator, event: Event, pace: Pace | None = None) -> None:
        """`pace` is the program's, if the submission is waited for before anything else."""
        self._accelerator = accelerator
        self._event: Event | None = event
        self._pace = pace

    def done(self) -> bool:
        """Whether it has ended, one way or another. Never waits."""
        if self._event is None:
            return True
        session = self._accelerator.session
        return bool(session.call(session.client.poll_event(self._event)).state)

    def cancel(self) -> bool:
        """Ask to cancel; False if it had already ended. Raises DeviceError UNSUPPORTED if the device cannot."""
        session = self._accelerator.session
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
        session = self._accelerator.session
        pace, self._pace = self._pace, None  # later it says nothing
        status = session.wait(self._event, patience, pace)
        if status.state == EventState.PENDING:
            raise TimeoutError(f"still running after {patience} s")
        event, self._event = self._event, None
        self._accelerator.pending.discard(self)
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


class Invocation:
    """A program with buffers for one set of shapes, to be run again and again.

    `buffers` holds one DeviceBuffer per input and output, in slot order. Buffers passed in are used as they are and
    stay their owner's, so what one program wrote another can read with no transfer in between.
    """

    def __init__(
        self,
        program: Program,
        inputs: Sequence[TensorInfo],
        outputs: Sequence[TensorInfo],
        given: Mapping[str, DeviceBuffer] | None = None,
    ) -> None:
        self.program = program
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self._accelerator = program.accelerator
        self._own: list[DeviceBuffer] = []
        self.buffers: list[DeviceBuffer] = []
        given = given or {}
        for index, tensor in enumerate((*self.inputs, *self.outputs)):
            buffer = given.get(tensor.name)
            if buffer is None:
                buffer = self._allocate(tensor, index < len(self.inputs))
            elif buffer.bytes != tensor.bytes:
                raise InputError(f"{tensor} takes {tensor.bytes} bytes, the given buffer has {buffer.bytes}")
            self.buffers.append(buffer)
        self._packed = pack_bindings(self._slots(None))
        self._packed_for: State | None = None

    @property
    def packed(self) -> PackedBindings:
        """Wire form of the bindings, without state."""
        return self._packed if self._packed_for is None else pack_bindings(self._slots(None))

    def _allocate(self, tensor: TensorInfo, is_input: bool) -> DeviceBuffer:
        buffer = self._accelerator.buffer(tensor.bytes, _INPUT if is_input else _OUTPUT)
        self._own.append(buffer)
        return buffer

    def _slots(self, state: State | None) -> list[Binding]:
        access = [Access.READ] * len(self.inputs) + [Access.WRITE] * len(self.outputs)
        buffers = list(self.buffers)
        if state is not None:
            buffers += state.buffers
            access += [Access.READ_WRITE] * len(state.buffers)
        return [
            Binding(buffer.id, 0, buffer.bytes, slot, how)
            for slot, (buffer, how) in enumerate(zip(buffers, access, strict=True))
        ]

    def write(self, arrays: Sequence[Array]) -> None:
        """Copy `arrays` into the input buffers, in order. Raises InputError where one does not fit."""
        if len(arrays) != len(self.inputs):
            raise InputError(f"{self.program.name} takes {len(self.inputs)} inputs, {len(arrays)} given")
        for tensor, buffer, array in zip(self.inputs, self.buffers, arrays, strict=False):
            tensor.check(array)
            buffer.write(tensor.encode(array))

    def run(self, state: State | None = None, timeout: float | None = None) -> None:
        """One run, from start to end. Raises ExecutionFailed; `timeout` as in `submit`."""
        self._submit(state, timeout, True).wait()

    def submit(self, state: State | None = None, timeout: float | None = None) -> Pending:
        """Start one run on what the buffers hold now. `timeout` in seconds from admission; None is no limit.

        Raises ExecutionFailed if the device does not take it, BUSY meaning that a run still uses these buffers.
        """
        return self._submit(state, timeout, False)

    def _submit(self, state: State | None, timeout: float | None, at_once: bool) -> Pending:
        accelerator = self._accelerator
        session = accelerator.session
        if state is not self._packed_for:
            self._packed, self._packed_for = pack_bindings(self._slots(state)), state
        timeout_ns = 0 if timeout is None else max(1, int(timeout * 1e9))
        request = session.client.submit(accelerator.queue, self.program.id, self._packed, timeout_ns)
        try:
            event = session.submit(request, at_once)
        except IndeterminateSubmit as error:
            # It may be running. Its event is kept, and given back when the accelerator is closed.
            accelerator.pending.add(Pending(accelerator, error.event))
            text = f"nobody knows whether the submission runs ({error}); it keeps its buffers until it has ended"
            raise ExecutionFailed(text, error.status) from error
        except DeviceError as error:
            raise ExecutionFailed(f"the device did not take the submission: {error}", error.status) from error
        pending = Pending(accelerator, event, self.program.pace if at_once else None)
        accelerator.pending.add(pending)
        return pending

    def read(self) -> Arrays:
        """The output buffers as fresh arrays, in order."""
        results = []
        for tensor, buffer in zip(self.outputs, self.buffers[len(self.inputs) :], strict=True):
            array, room = tensor.empty()
            buffer.read(room)
            results.append(unpack(room, tensor.dtype, tensor.shape) if array is None else array)
        return tuple(results)

    def close(self) -> None:
        """Free the buffers that were allocated here."""
        for buffer in self._own:
            buffer.free()
        self._own.clear()


class Program:
    """A loaded program: call it with arrays.

    `inputs`, `outputs` and `variables` describe its tensors; sizes of -1 are decided by the arrays of a call.
    """

    def __init__(self, accelerator: Accelerator, program: ProgramId, graph: Graph, name: str) -> None:
        self.accelerator = accelerator
        self.id = program
        self.name = name
        self.graph = graph
        self.inputs = tuple(_info(tensor) for tensor in graph.inputs)
        self.outputs = tuple(_info(tensor) for tensor in graph.outputs)
        self.variables = tuple(_info(tensor) for tensor in graph.variables)
        self.pace = Pace()
        self._invocations: dict[Shapes, Invocation] = {}
        self._states: list[State] = []
        self._closed = False

    def __call__(
        self,
        *arrays: ArrayLike,
        state: State | None = None,
        timeout: float | None = None,
        **named: ArrayLike,
    ) -> Arrays:
        """Run once: arrays in the order of `inputs`, or by name. Returns the outputs in order, as fresh arrays.

        `state` is the stream to go on with; a program with variables keeps one of its own for calls without. Raises
        InputError and ExecutionFailed; `timeout` in seconds bounds the execution on the device.
        """
        checked = self._check(arrays, named)
        invocation = self.invocation(tuple(array.shape for array in checked))
        invocation.write(checked)  # checks again what is cheap to check, against the sizes of this very call
        invocation.run(state or self._own_state(), timeout)
        return invocation.read()

    def run(self, inputs: Mapping[str, ArrayLike], **options: Any) -> dict[str, Array]:
        """The same by name on both sides; for names that are no Python identifiers."""
        return dict(zip((t.name for t in self.outputs), self(*self._by_name(inputs), **options), strict=True))

    def new_state(self) -> State:
        """A fresh stream for a program with VARIABLE tensors."""
        state = State(self.accelerator, self.graph.variables)
        self._states.append(state)
        return state

    def invocation(self, shapes: Shapes | None = None) -> Invocation:
        """The kept buffers for these input shapes (None: the program's own), allocated on first use."""
        key = tuple(tensor.shape for tensor in self.inputs) if shapes is None else shapes
        invocation = self._invocations.get(key)
        if invocation is None:
            if len(self._invocations) >= MOST_SHAPES_KEPT:
                self._invocations.pop(next(iter(self._invocations))).close()
            invocation = self._invocations[key] = self.new_invocation(key)
        return invocation

    def new_invocation(
        self, shapes: Shapes | None = None, buffers: Mapping[str, DeviceBuffer] | None = None
    ) -> Invocation:
        """Buffers of its own, for running beside others, except where `buffers` names one for a tensor. Close it."""
        if self._closed:
            raise ModelError(f"{self.name} has been unloaded")
        inputs, outputs = self.inputs, self.outputs
        if any(tensor.dynamic for tensor in (*inputs, *outputs)):
            inputs, outputs = self._specialised(shapes)
        return Invocation(self, inputs, outputs, buffers)

    def close(self) -> None:
        """Unload the program and free its buffers and states. Submissions must have ended."""
        if self._closed:
            return
        self._closed = True
        owners: list[Invocation | State] = [*self._invocations.values(), *self._states]
        for owner in owners:
            owner.close()
        session = self.accelerator.session
        session.call(session.client.unload_program(self.id))
        self.accelerator.programs.discard(self)

    def _own_state(self) -> State | None:
        if not self.variables:
            return None
        return self._states[0] if self._states else self.new_state()

    def _specialised(self, shapes: Shapes | None) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]:
        from virtaccel.tosa_graph.specialise import specialise

        if shapes is None or any(dimension < 0 for shape in shapes for dimension in shape):
            raise InputError(f"{self.name} has inputs of no fixed size: say which shapes")
        try:
            graph = specialise(self.graph, shapes)
        except TosaError as error:
            asked = ", ".join(str(list(shape)) for shape in shapes)
            raise InputError(f"{self.name} cannot take inputs of shape {asked}: {error}") from error
        return tuple(_info(tensor) for tensor in graph.inputs), tuple(_info(tensor) for tensor in graph.outputs)

    def _by_name(self, named: Mapping[str, ArrayLike]) -> list[ArrayLike]:
        names = [tensor.name for tensor in self.inputs]
        unknown, missing = set(named) - set(names), set(names) - set(named)
        if unknown or missing:
            wrong = f"no input {sorted(unknown)[0]!r}" if unknown else f"input {sorted(missing)[0]!r} is missing"
            raise InputError(f"{self.name}: {wrong}; inputs are {', '.join(map(repr, names))}")
        return [named[name] for name in names]

    def _check(self, arrays: Sequence[ArrayLike], named: Mapping[str, ArrayLike]) -> list[Array]:
        if named:
            first = {tensor.name: array for tensor, array in zip(self.inputs, arrays, strict=False)}
            arrays = self._by_name({**first, **named})
        if len(arrays) != len(self.inputs):
            raise InputError(f"{self.name} takes {len(self.inputs)} inputs, {len(arrays)} given")
        checked = [np.asarray(array) for array in arrays]
        for tensor, array in zip(self.inputs, checked, strict=True):
            tensor.check(array)
        return checked
