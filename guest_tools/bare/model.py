"""One TOSA program on one device, from files to answers: load, bind, submit, wait, read.

Knows slots (inputs, then outputs, then variables) and which buffer usage each needs. Knows no transport and no numpy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

from virtaccel.device.pacing import Pace
from virtaccel.device.wire import Access, EventState, Usage
from virtaccel.guest_tools.artifact import TOSA_FORMAT, target_words
from virtaccel.guest_tools.client import (
    Binding,
    Buffer,
    ClientError,
    Event,
    PackedBindings,
    Request,
    pack_bindings,
    status_name,
)
from virtaccel.guest_tools.session import Session
from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import Graph, Tensor, TosaError, packed_bytes

RUN_TIMEOUT_S = 120.0
INPUT = Usage.PROGRAM_INPUT | Usage.TRANSFER_DESTINATION
OUTPUT = Usage.PROGRAM_OUTPUT | Usage.TRANSFER_SOURCE | Usage.TRANSFER_DESTINATION
OUTPUT_BLANK = 0xA5
STATE = Usage.MUTABLE_STATE | Usage.TRANSFER_DESTINATION | Usage.TRANSFER_SOURCE


class ModelError(Exception):
    """The model cannot be run as asked; the text says why."""


class Bound(NamedTuple):
    """A tensor and the buffer that holds it; `size` in bytes."""

    tensor: Tensor
    buffer: Buffer
    size: int


class Lane(NamedTuple):
    """Buffers for one run at a time: outputs and variables of its own, inputs that all lanes read."""

    outputs: list[Bound]
    states: list[Bound]
    bindings: PackedBindings


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor whose shape is known. Raises ModelError for a dynamic one."""
    if tensor.unranked or any(extent < 0 for extent in tensor.shape):
        raise ModelError(
            f"{tensor.name}: shape {tensor.shape} is not known before the call; this tool needs fixed shapes"
        )
    return packed_bytes(tensor.dtype, math.prod(tensor.shape))


class Model:
    """A loaded program with buffers of its own: context, queue, program, inputs, and a lane to run in."""

    def __init__(self, session: Session, artifact: bytes) -> None:
        self.session = session
        try:
            self.graph: Graph = read(artifact)
        except TosaError as error:
            raise ModelError(str(error)) from error
        client, call = session.client, session.call
        self.domain = call(client.get_device_info()).domain
        self.context = call(client.create_context())
        start = time.monotonic()
        words = target_words(self.graph)
        self.pace = Pace()
        self.program = call(client.load_program(self.context, TOSA_FORMAT, words, artifact))
        self.load_seconds = time.monotonic() - start
        self.queue = call(client.create_queue(self.context))
        self.inputs = [self._bind(tensor, INPUT) for tensor in self.graph.inputs]
        self.lanes = [self.new_lane()]

    def new_lane(self) -> Lane:
        """Buffers for one more run beside those under way; variables hold their initial values."""
        outputs = [self._bind(tensor, OUTPUT) for tensor in self.graph.outputs]
        states = [self._bind(tensor, STATE) for tensor in self.graph.variables]
        slots = [(bound, Access.READ) for bound in self.inputs]
        slots += [(bound, Access.WRITE) for bound in outputs]
        slots += [(bound, Access.READ_WRITE) for bound in states]
        bindings = [Binding(bound.buffer, 0, bound.size, slot, access) for slot, (bound, access) in enumerate(slots)]
        lane = Lane(outputs, states, pack_bindings(bindings))
        self.restart(lane)
        return lane

    def _bind(self, tensor: Tensor, usage: Usage) -> Bound:
        size = tensor_bytes(tensor)
        request = self.session.client.allocate_buffer(self.context, size, usage, domain=self.domain)
        return Bound(tensor, self.session.call(request), size)

    def restart(self, lane: Lane) -> None:
        """Give every variable its initial value again."""
        for bound in lane.states:
            self.session.write(bound.buffer, memoryview(bound.tensor.data or bytes(bound.size)))

    def write(self, inputs: Sequence[bytes]) -> None:
        """Fill the input buffers, in the graph's order."""
        if len(inputs) != len(self.inputs):
            raise ModelError(f"the model has {len(self.inputs)} inputs, {len(inputs)} were given")
        for bound, data in zip(self.inputs, inputs, strict=True):
            if len(data) != bound.size:
                raise ModelError(f"{bound.tensor.name}: {len(data)} bytes were given, {bound.size} are needed")
            self.session.write(bound.buffer, memoryview(data))

    def submission(self, lane: Lane) -> Request[Event]:
        """The command that starts a run in `lane`."""
        return self.session.client.submit(self.queue, self.program, lane.bindings)

    def finish(self, event: Event, timeout: float = RUN_TIMEOUT_S) -> None:
        """Wait for a run and destroy its event. Raises ModelError if it did not complete."""
        status = self.session.wait(event, timeout, self.pace)
        if status.state == EventState.PENDING:
            raise ModelError(f"the run did not end in {timeout:.0f} s")
        self.session.call(self.session.client.destroy_event(event))
        if status.state != EventState.COMPLETE:
            raise ModelError(f"the run ended as {status.state.name} ({status_name(status.error)})")

    def read(self, lane: Lane) -> list[bytes]:
        """The output buffers' bytes, in the graph's order."""
        results = []
        for bound in lane.outputs:
            sink = bytearray(bound.size)
            self.session.read(bound.buffer, memoryview(sink))
            results.append(bytes(sink))
        return results

    def blank(self, lane: Lane) -> None:
        """Fill the outputs with 0xA5, so that what one run left cannot pass for the next one's answer."""
        for bound in lane.outputs:
            self.session.write(bound.buffer, memoryview(bytes([OUTPUT_BLANK]) * bound.size))

    def run(self, inputs: Sequence[bytes]) -> list[bytes]:
        """One whole round in the first lane: write, submit, wait, read."""
        self.write(inputs)
        self.finish(self.session.call(self.submission(self.lanes[0])))
        return self.read(self.lanes[0])

    def close(self) -> None:
        """Give everything back, children first. What the device refuses is left to its reset."""
        client, call = self.session.client, self.session.call
        bounds = [*self.inputs, *(bound for lane in self.lanes for bound in (*lane.outputs, *lane.states))]
        try:
            for bound in bounds:
                call(client.free_buffer(bound.buffer))
            call(client.unload_program(self.program))
            call(client.destroy_queue(self.queue))
            call(client.destroy_context(self.context))
        except ClientError:
            return
