"""One run of a program through a whole device: frames, ring, engine, backend, and back; outputs start as 0xA5 bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from virtaccel.device.wire import Access, EventState
from virtaccel.guest_tools.arrays.accelerator import Accelerator
from virtaccel.guest_tools.client import Binding
from virtaccel.tosa_graph.elements import Array, pack, unpack

DIRT = 0xA5


def run_bytes(accelerator: Accelerator, tosa: bytes, inputs: Sequence[bytes]) -> list[bytes]:
    """Outputs for `inputs`, both packed and in graph order. Asserts that the inputs are what they were afterwards."""
    session, client = accelerator.session, accelerator.session.client
    program = accelerator.load(tosa, "case")
    tensors = (*program.inputs, *program.outputs)
    buffers = [accelerator.buffer(tensor.bytes) for tensor in tensors]
    filled = [*inputs, *(bytes([DIRT]) * tensor.bytes for tensor in program.outputs)]
    for buffer, data in zip(buffers, filled, strict=True):
        buffer.write(memoryview(data))
    access = [Access.READ] * len(inputs) + [Access.WRITE] * len(program.outputs)
    slots = [
        Binding(buffer.id, 0, buffer.bytes, slot, how)
        for slot, (buffer, how) in enumerate(zip(buffers, access, strict=True))
    ]
    event = session.call(client.submit(accelerator.queue, program.id, slots, 0))
    status = session.wait(event, 60.0)
    session.call(client.destroy_event(event))
    assert status.state == EventState.COMPLETE, status
    held = []
    for buffer in buffers:
        sink = memoryview(bytearray(buffer.bytes))
        buffer.read(sink)
        held.append(bytes(sink))
        buffer.free()
    program.close()
    assert held[: len(inputs)] == [bytes(data) for data in inputs], "an input was written"
    return held[len(inputs) :]


def run(accelerator: Accelerator, tosa: bytes, inputs: Sequence[Array]) -> list[Array]:
    """The same on arrays, in numpy's carrier types."""
    from virtaccel.tosa_graph.flatbuffer import read

    graph = read(tosa)
    packed = [pack(np.asarray(array), tensor.dtype) for array, tensor in zip(inputs, graph.inputs, strict=True)]
    results = run_bytes(accelerator, tosa, packed)
    return [unpack(data, tensor.dtype, tensor.shape) for data, tensor in zip(results, graph.outputs, strict=True)]
