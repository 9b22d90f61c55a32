"""Drives a backend through its contract alone, as the engine would, with numpy arrays at the edges."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from virtaccel.device.backend import (
    Accepted,
    Artifact,
    Backend,
    Binding,
    BufferRequest,
    Handle,
    Loaded,
    Loading,
    Polled,
    Rejected,
)
from virtaccel.device.wire import Access, Domain, EventState, Status, Usage
from virtaccel.tosa_graph.elements import Array, pack, unpack
from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.target import ARTIFACT_FORMAT, to_words
from virtaccel.tosa_graph.validate import required

ANYTHING = int(
    Usage.TRANSFER_SOURCE
    | Usage.TRANSFER_DESTINATION
    | Usage.PROGRAM_INPUT
    | Usage.PROGRAM_OUTPUT
    | Usage.MUTABLE_STATE
)
UNBOUNDED = (1 << 64) - 1


def artifact(tosa: bytes, target: tuple[int, ...] | None = None) -> Artifact:
    words = to_words(required(read(tosa))) if target is None else target
    # Two pieces, as a descriptor chain would bring them.
    pieces = [memoryview(tosa[:7]), memoryview(tosa[7:])]
    return Artifact(ARTIFACT_FORMAT, words, [piece for piece in pieces if len(piece)], len(tosa), UNBOUNDED)


class EngineRoom:
    """One context and queue on a backend."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.context = backend.create_context()
        self.queue = backend.create_queue(self.context)

    def load(self, tosa: bytes) -> Handle:
        outcome = self.backend.load_program(self.context, artifact(tosa))
        end = time.monotonic() + 60
        while isinstance(outcome, Loading):
            assert time.monotonic() < end, "the load does not end"
            loaded = self.backend.poll_load(outcome.ticket)
            if loaded is not None:
                return loaded.program
            self.backend.wait(1.0)
        assert isinstance(outcome, Loaded)
        return outcome.program

    def buffer(self, size: int, fill: bytes | None = None, alignment: int = 64) -> Handle:
        request = BufferRequest(size, alignment, Domain.SHARED, ANYTHING)
        handle = self.backend.allocate_buffer(self.context, request).handle
        if fill is not None:
            self.backend.write_buffer(handle, 0, [memoryview(fill)])
        return handle

    def bytes_of(self, buffer: Handle, size: int) -> bytes:
        sink = bytearray(size)
        self.backend.read_buffer(buffer, 0, [memoryview(sink)])
        return bytes(sink)

    def submit(
        self, program: Handle, inputs: Sequence[Binding], outputs: Sequence[Binding], timeout_ns: int = 0
    ) -> Handle:
        outcome = self.backend.submit(self.queue, program, [*inputs, *outputs], timeout_ns)
        assert isinstance(outcome, Accepted), outcome
        return outcome.event

    def refused(self, program: Handle, bindings: Sequence[Binding]) -> Status:
        outcome = self.backend.submit(self.queue, program, bindings, 0)
        assert isinstance(outcome, Rejected), outcome
        return outcome.status

    def finish(self, event: Handle, seconds: float = 60) -> Polled:
        """Wait for the event's end and destroy it."""
        end = time.monotonic() + seconds
        while (polled := self.backend.poll_event(event)).state is EventState.PENDING:
            assert time.monotonic() < end, "the submission does not end"
            self.backend.wait(1.0)
        self.backend.destroy_event(event)
        return polled

    def call(
        self, program: Handle, tosa: bytes, inputs: Sequence[Array], shapes: Sequence[tuple[int, ...]] = ()
    ) -> list[Array]:
        """Run once; `shapes` are the outputs' where the graph leaves them open. Outputs start as 0xA5 bytes."""
        graph = read(tosa)
        packed = [pack(array, tensor.dtype) for array, tensor in zip(inputs, graph.inputs, strict=True)]
        outs = [shapes[index] if shapes else tensor.shape for index, tensor in enumerate(graph.outputs)]
        sizes = [len(pack(np.zeros(s), t.dtype)) for s, t in zip(outs, graph.outputs, strict=True)]
        buffers = [self.buffer(len(data), data) for data in packed] + [self.buffer(n, b"\xa5" * n) for n in sizes]
        lengths = [len(data) for data in packed] + sizes
        bindings = [
            Binding(buffer, 0, length, slot, Access.READ if slot < len(packed) else Access.WRITE)
            for slot, (buffer, length) in enumerate(zip(buffers, lengths, strict=True))
        ]
        assert self.finish(self.submit(program, bindings, [])) == Polled(EventState.COMPLETE, Status.OK)
        results = [self.bytes_of(buffer, size) for buffer, size in zip(buffers[len(packed) :], sizes, strict=True)]
        for buffer in buffers:
            self.backend.free_buffer(buffer)
        return [unpack(d, t.dtype, s) for d, t, s in zip(results, graph.outputs, outs, strict=True)]
