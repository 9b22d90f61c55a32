"""Runs a TOSA file straight on its lowered OpenVINO model: no device, no backend, tensors as packed bytes."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import numpy as np
import openvino as ov
import oracle

from virtaccel.backend_openvino.lowering.builder import lower
from virtaccel.tosa_graph.elements import Array, pack, unpack
from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import Graph, Tensor, packed_bytes

CONFIG = {"EXECUTION_MODE_HINT": "ACCURACY", "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}


@functools.cache
def core() -> ov.Core:
    return ov.Core()


def compiled(graph: Graph, bounded: Collection[str] = ()) -> ov.CompiledModel:
    return core().compile_model(lower(graph, bounded), "CPU", CONFIG)


def _bytes_of(tensor: Tensor) -> int:
    return packed_bytes(tensor.dtype, int(np.prod(tensor.shape, dtype=np.int64)))


def run(tosa: bytes, inputs: Sequence[Array], bounded: Collection[str] = ()) -> list[Array]:
    """Outputs for `inputs`, both in graph order and in numpy's carrier types; outputs start as 0xA5 bytes."""
    graph = read(tosa)
    packed = [pack(array, tensor.dtype) for array, tensor in zip(inputs, graph.inputs, strict=True)]
    results = run_bytes(tosa, packed, bounded)
    return [unpack(data, tensor.dtype, tensor.shape) for data, tensor in zip(results, graph.outputs, strict=True)]


def run_bytes(tosa: bytes, inputs: Sequence[bytes], bounded: Collection[str] = ()) -> list[bytes]:
    """The same on packed bytes."""
    graph = read(tosa)
    model = compiled(graph, bounded)
    request = model.create_infer_request()
    buffers = [np.frombuffer(bytearray(data), np.uint8) for data in inputs]
    for index, (buffer, port) in enumerate(zip(buffers, model.inputs, strict=True)):
        request.set_input_tensor(index, ov.Tensor(buffer, port.get_shape(), port.get_element_type()))
    results = [np.full(_bytes_of(tensor), 0xA5, np.uint8) for tensor in graph.outputs]
    for index, (buffer, port) in enumerate(zip(results, model.outputs, strict=False)):  # loops have one more
        request.set_output_tensor(index, ov.Tensor(buffer, port.get_shape(), port.get_element_type()))
    request.infer()
    return [buffer.tobytes() for buffer in results]


def assert_near_reference(tosa: bytes, inputs: Sequence[Array], atol: float) -> None:
    """Compare with Arm's reference model, absolute error at most `atol`."""
    for got, want in zip(run(tosa, inputs), oracle.reference(tosa, inputs), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=atol)
