"""Constants of a block as arrays: what is in the file, and what follows from it by moving or casting.

Most constants are weights, which pass a CAST, a RESHAPE or a TRANSPOSE on their way; they are looked at when somebody
asks for them, and once. Knows nothing of the runtime but how to make FP32 of FP16.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from virtaccel.backend_openvino.lowering.numbers import as_f32
from virtaccel.tosa_graph.elements import unpack
from virtaccel.tosa_graph.graph import Block, Op, Operator, Tensor

Weights: TypeAlias = NDArray[Any]

FOLDED: Final = frozenset({Op.CAST, Op.RESHAPE, Op.TRANSPOSE, Op.IDENTITY})
"""Operators that constants are followed through."""


class Constants:
    """Tensors of a block whose values are known."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._stored: dict[str, Tensor] = {}
        self._made: dict[str, Operator] = {}
        self._arrays: dict[str, Weights] = {}
        self._wide: dict[str, NDArray[np.float32]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._stored or name in self._made

    def store(self, tensor: Tensor) -> None:
        """A tensor with data."""
        self._stored[tensor.name] = tensor

    def make(self, operator: Operator) -> None:
        """An operator of `FOLDED` on a constant."""
        self._made[operator.outputs[0]] = operator

    def made(self, name: str) -> bool:
        """Whether an operator made it: perhaps a CAST, which rounds."""
        return name in self._made

    def array(self, name: str) -> Weights:
        """The values, not rounded by any CAST."""
        waiting: list[Operator] = []
        array = self._arrays.get(name)
        while array is None:
            operator = self._made.get(name)
            if operator is None:
                tensor = self._stored[name]
                array = self._arrays[name] = unpack(tensor.data or b"", tensor.dtype, tensor.shape)
                break
            waiting.append(operator)
            name = operator.inputs[0]
            array = self._arrays.get(name)
        while waiting:
            operator = waiting.pop()
            name = operator.outputs[0]
            perms = operator.attributes.get("perms")
            if operator.op is Op.TRANSPOSE and isinstance(perms, tuple):
                array = np.transpose(array, perms)
            elif operator.op is Op.RESHAPE:
                array = array.reshape(self._block.tensors[name].shape)
            self._arrays[name] = array
        return array

    def wide(self, name: str) -> NDArray[np.float32]:
        """The values in FP32."""
        found = self._wide.get(name)
        if found is None:
            found = self._wide[name] = as_f32(self.array(name))
        return found
