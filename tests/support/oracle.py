"""The right answer: Arm's TOSA reference model (tosa-tools), run in this process where it can be. Not our own code.

Arrays go in and come out in the numpy types of `virtaccel.tosa_graph.elements.CARRIER`: BF16 and FP8 as float32, INT4
as int8, INT48 as int64. The model keeps no VARIABLE state between runs.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tosa_reference_model

from virtaccel.tosa_graph.elements import CARRIER, Array, pack, unpack
from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import DType, Tensor

PROGRAM = Path(tosa_reference_model.__file__).parents[1] / "bin" / "tosa_reference_model"
"""The model as a program: it reads and writes INT4 and INT48 tensors, which its Python form cannot."""

_BITS_ONLY = {DType.BF16: np.uint16, DType.FP8E4M3: np.uint8, DType.FP8E5M2: np.uint8}
_PROGRAM_ONLY = {DType.INT4, DType.INT48}


class ReferenceRefused(Exception):
    """The reference model calls the graph an error or its result unpredictable."""


def reference(tosa: bytes, inputs: Sequence[Array], precise: bool = False) -> list[Array]:
    """Outputs of `tosa` for `inputs`, both in graph order. `precise` computes floating point in float64.

    Unsigned arrays for BF16 and FP8 are bit patterns. Raises ReferenceRefused unless the model calls the result valid.
    """
    graph = read(tosa)
    arrays = [_encode(np.asarray(array), tensor.dtype) for array, tensor in zip(inputs, graph.inputs, strict=True)]
    if any(tensor.dtype in _PROGRAM_ONLY for tensor in graph.inputs + graph.outputs):
        return _by_program(tosa, arrays, graph.inputs, graph.outputs, precise)
    try:
        outputs, status = tosa_reference_model.run(tosa, arrays, precise_mode=int(precise))
    except ValueError as error:
        raise ReferenceRefused(str(error)) from error
    if status != tosa_reference_model.GraphStatus.TOSA_VALID:
        raise ReferenceRefused(status.name)
    return [_decode(array, tensor.dtype) for array, tensor in zip(outputs, graph.outputs, strict=True)]


def _encode(array: Array, dtype: DType) -> Array:
    if dtype in _BITS_ONLY:
        return np.frombuffer(pack(array, dtype), _BITS_ONLY[dtype]).reshape(array.shape)
    return np.ascontiguousarray(array, CARRIER[dtype]).reshape(array.shape)


def _decode(array: Array, dtype: DType) -> Array:
    if array.dtype == CARRIER[dtype]:
        return array.copy()
    return unpack(array.tobytes(), dtype, array.shape).copy()


def _by_program(
    tosa: bytes, arrays: Sequence[Array], inputs: Sequence[Tensor], outputs: Sequence[Tensor], precise: bool
) -> list[Array]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "graph.tosa").write_bytes(tosa)
        for position, array in enumerate(arrays):
            np.save(folder / f"in{position}.npy", array)
        command = [
            str(PROGRAM),
            "--tosa_file=graph.tosa",
            f"--precise_mode={int(precise)}",
            f"--ofm_name={','.join(tensor.name for tensor in outputs)}",
            f"--ofm_file={','.join(f'out{position}.npy' for position in range(len(outputs)))}",
        ]
        if arrays:
            command.append(f"--ifm_name={','.join(tensor.name for tensor in inputs)}")
            command.append(f"--ifm_file={','.join(f'in{position}.npy' for position in range(len(arrays)))}")
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise ReferenceRefused(done.stderr[-500:])
        results = [np.load(folder / f"out{position}.npy") for position in range(len(outputs))]
    return [_decode(array, tensor.dtype) for array, tensor in zip(results, outputs, strict=True)]
