"""Programs run with numpy arrays: what an array is as a tensor's value, and calling a program with them.

Knows tensors (tosa_graph) and element types; slots, buffers and submissions are the core's (guest_tools/program.py).
Knows no transport. A tensor with a dimension of -1 gets its size from the arrays of a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from virtaccel.guest_tools import program as core
from virtaccel.guest_tools.client import Program as ProgramId
from virtaccel.guest_tools.context import DeviceContext
from virtaccel.guest_tools.errors import InputError
from virtaccel.guest_tools.program import MOST_SHAPES_KEPT, Pending, Shapes
from virtaccel.tosa_graph.elements import CARRIER, pack, unpack
from virtaccel.tosa_graph.graph import DType, Graph, TosaError
from virtaccel.tosa_graph.specialise import specialise

__all__ = ["MOST_SHAPES_KEPT", "Array", "Arrays", "Invocation", "Pending", "Program", "Shapes", "State", "TensorInfo"]

Array: TypeAlias = NDArray[Any]
Arrays: TypeAlias = tuple[Array, ...]

# Elements that numpy does not hold as TOSA packs them.
_PACKED_OTHERWISE: Final = (DType.INT4, DType.INT48, DType.BF16, DType.FP8E4M3, DType.FP8E5M2)


class TensorInfo(core.TensorInfo):
    """A tensor whose values are arrays."""

    __slots__ = ()

    @property
    def carrier(self) -> np.dtype[Any]:
        """The numpy type of arrays for this tensor (BF16 and FP8 travel as float32, INT4 as int8, INT48 as int64)."""
        return CARRIER[self.dtype]

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
        # Everything else lies in memory as TOSA packs it and is not copied on this side.
        if self.dtype in _PACKED_OTHERWISE:
            return memoryview(pack(array, self.dtype))
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data

    def empty(self) -> tuple[Array | None, memoryview]:
        """Room for the packed bytes, and the array over it if it can be used as it is."""
        if self.dtype in _PACKED_OTHERWISE:
            return None, memoryview(bytearray(self.bytes))
        array = np.empty(self.shape, self.carrier)
        return array, array.reshape(-1).view(np.uint8).data

    def decode(self, raw: memoryview) -> Array:
        return unpack(raw, self.dtype, self.shape)


State: TypeAlias = core.State[TensorInfo]
Invocation: TypeAlias = core.Invocation[TensorInfo]


class Program(core.LoadedProgram[TensorInfo]):
    """A loaded program: call it with arrays. Sizes of -1 are decided by the arrays of a call."""

    def __init__(self, context: DeviceContext, program: ProgramId, graph: Graph, name: str) -> None:
        super().__init__(context, program, graph, name, TensorInfo)

    def __call__(
        self, *arrays: ArrayLike, state: State | None = None, timeout: float | None = None, **named: ArrayLike
    ) -> Arrays:
        """Run once: arrays in the order of `inputs`, or by name. Returns the outputs in order, as fresh arrays.

        `state` is the stream to go on with; a program with variables keeps one of its own for calls without. Raises
        InputError and ExecutionFailed; `timeout` in seconds bounds the execution on the device.
        """
        checked = self._check(arrays, named)
        invocation = self.invocation(tuple(array.shape for array in checked))
        invocation.write(checked)  # checks again what is cheap to check, against the sizes of this very call
        invocation.run(state or self.own_state(), timeout)
        return invocation.read()

    def run(self, inputs: Mapping[str, ArrayLike], **options: Any) -> dict[str, Array]:
        """The same by name on both sides; for names that are no Python identifiers."""
        return dict(zip((t.name for t in self.outputs), self(*self._by_name(inputs), **options), strict=True))

    def specialised(self, shapes: Shapes | None) -> Graph:
        if shapes is None or any(dimension < 0 for shape in shapes for dimension in shape):
            raise InputError(f"{self.name} has inputs of no fixed size: say which shapes")
        try:
            return specialise(self.graph, shapes)
        except TosaError as error:
            asked = ", ".join(str(list(shape)) for shape in shapes)
            raise InputError(f"{self.name} cannot take inputs of shape {asked}: {error}") from error

    def _by_name(self, named: Mapping[str, ArrayLike]) -> list[ArrayLike]:
        names = [tensor.name for tensor in self.inputs]
        unknown, missing = set(named) - set(names), set(names) - set(named)
        if unknown or missing:
            wrong = f"no input {sorted(unknown)[0]!r}" if unknown else f"input {sorted(missing)[0]!r} is missing"
            raise InputError(f"{self.name}: {wrong}; inputs are {', '.join(map(repr, names))}")
        return [named[name] for name in names]

    def _check(self, arrays: Sequence[ArrayLike], named: Mapping[str, ArrayLike]) -> list[Array]:
        if named:
            # Positions first, names after, as Python itself calls.
            first = {tensor.name: array for tensor, array in zip(self.inputs, arrays, strict=False)}
            arrays = self._by_name({**first, **named})
        if len(arrays) != len(self.inputs):
            raise InputError(f"{self.name} takes {len(self.inputs)} inputs, {len(arrays)} given")
        # All are judged before one is written: a call that is refused has changed nothing on the device.
        checked = [np.asarray(array) for array in arrays]
        for tensor, array in zip(self.inputs, checked, strict=True):
            tensor.check(array)
        return checked
