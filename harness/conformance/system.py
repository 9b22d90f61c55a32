"""A whole device as the system under test: every case goes through the guest client, the ring and the engine.

One accelerator is kept alive over many cases; each case loads, binds, submits, reads and gives back what it took.
Outputs are filled with a pattern first, so that an output nobody writes cannot pass for one full of zeros.
"""

from __future__ import annotations

import math
from typing import Final

from virtaccel.guest_tools.arrays.accelerator import Accelerator, DeviceBuffer
from virtaccel.guest_tools.arrays.program import Invocation, Program
from virtaccel.guest_tools.client import DeviceError, ProtocolViolation
from virtaccel.guest_tools.errors import AcceleratorError, ModelError, Refused
from virtaccel.harness.conformance.case import Case
from virtaccel.harness.conformance.judge import Failure, Outputs, Refusal
from virtaccel.tosa_graph.graph import packed_bytes

POISON: Final = 0xA5  # no likely result in any of the element types


class DeviceSystem:
    """Runs cases on `accelerator`. `patience` bounds one submission, in seconds."""

    def __init__(self, accelerator: Accelerator, patience: float) -> None:
        self._accelerator = accelerator
        self._patience = patience

    def run(self, case: Case, load_only: bool) -> Refusal | Failure | Outputs:
        accelerator = self._accelerator
        try:
            handle = accelerator.offer(case.artifact, case.words, case.folder.name)
        except Refused as error:
            return Refusal(error.reasons[-1] if error.reasons else str(error))
        except ModelError as error:
            return Refusal(str(error))
        if case.graph is None or load_only:
            accelerator.session.call(accelerator.session.client.unload_program(handle))
            return Outputs([])
        program = Program(accelerator, handle, case.graph, case.folder.name)
        try:
            return self._submit(program, case)
        except ProtocolViolation:
            raise
        except (AcceleratorError, DeviceError) as error:
            return Failure(str(error))
        finally:
            program.close()

    def _submit(self, program: Program, case: Case) -> Outputs:
        shapes = case.input_shapes()
        buffers: dict[str, DeviceBuffer] = {}
        try:
            for tensor in case.concrete_outputs():
                size = packed_bytes(tensor.dtype, math.prod(tensor.shape))
                buffer = buffers[tensor.name] = self._accelerator.buffer(size)
                buffer.write(memoryview(bytes([POISON]) * size))
            invocation = program.new_invocation(shapes, buffers)
            try:
                return self._invoke(invocation, program, case)
            finally:
                invocation.close()
        finally:
            for buffer in buffers.values():
                buffer.free()

    def _invoke(self, invocation: Invocation, program: Program, case: Case) -> Outputs:
        for tensor, buffer in zip(invocation.inputs, invocation.buffers, strict=False):
            buffer.write(memoryview(case.data[tensor.name]))
        state = program.new_state() if program.variables else None
        invocation.submit(state, self._patience).wait(2 * self._patience)
        return Outputs([_read(buffer) for buffer in invocation.buffers[len(invocation.inputs) :]])


def _read(buffer: DeviceBuffer) -> bytes:
    data = bytearray(buffer.bytes)
    buffer.read(memoryview(data))
    return bytes(data)
