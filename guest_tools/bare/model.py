"""One TOSA program in a guest without numpy: the core's program on buffers, fed with bytes, several runs side by side.

Knows no transport and no numpy. Standard library only.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from virtaccel.device.wire import Usage
from virtaccel.guest_tools import program as core
from virtaccel.guest_tools.artifact import target_words
from virtaccel.guest_tools.client import ClientError, Event, Request
from virtaccel.guest_tools.context import DeviceContext, parse
from virtaccel.guest_tools.errors import ModelError
from virtaccel.guest_tools.program import OUTPUT, LoadedProgram, Pending, TensorInfo
from virtaccel.guest_tools.session import Session
from virtaccel.guest_tools.transport.base import TransportError

# An emulated processor is a hundred times slower than the host; what takes longer than this has hung.
RUN_TIMEOUT_S: Final = 120.0
# No answer of a small model is made of it, as one of zeros might be.
OUTPUT_BLANK: Final = 0xA5

Invocation: TypeAlias = core.Invocation[TensorInfo]
State: TypeAlias = core.State[TensorInfo]


class Lane(NamedTuple):
    """Buffers for one run at a time: outputs and variables of its own, inputs that all lanes read."""

    run: Invocation
    state: State | None


class Model:
    """A loaded program in a context of its own, and lanes to run in."""

    def __init__(self, session: Session, artifact: bytes, name: str = "the model") -> None:
        graph = parse(artifact, name)
        if any(tensor.unranked or min(tensor.shape, default=0) < 0 for tensor in (*graph.inputs, *graph.outputs)):
            raise ModelError(f"{name}: shapes are not known before the call; this tool needs fixed shapes")
        self.context = DeviceContext(session)
        start = time.monotonic()
        handle = self.context.offer(artifact, target_words(graph), name)
        self.load_seconds = time.monotonic() - start
        self.program = LoadedProgram(self.context, handle, graph, name, TensorInfo)
        self.lanes: list[Lane] = []
        self.lanes.append(self.new_lane())

    def new_lane(self) -> Lane:
        """Buffers for one more run beside those under way; variables hold their initial values."""
        inputs = self.lanes[0].run.buffers if self.lanes else ()
        given = dict(zip((tensor.name for tensor in self.program.inputs), inputs, strict=False))
        # Outputs can be written too, so that they can be blanked.
        run = self.program.new_invocation(buffers=given, output_usage=OUTPUT | Usage.TRANSFER_DESTINATION)
        return Lane(run, self.program.new_state() if self.program.variables else None)

    def submission(self, lane: Lane) -> Request[Event]:
        """The command that starts a run in `lane`."""
        return lane.run.request(lane.state)

    def finish(self, event: Event, timeout: float = RUN_TIMEOUT_S) -> None:
        """Wait for a run and destroy its event. Raises ExecutionFailed, TimeoutError."""
        Pending(self.context, event, self.program.pace).wait(timeout)

    def blank(self, lane: Lane) -> None:
        """Fill the outputs with 0xA5, so that what one run left cannot pass for the next one's answer."""
        for buffer in lane.run.buffers[len(self.program.inputs) :]:
            buffer.write(memoryview(bytes([OUTPUT_BLANK]) * buffer.bytes))

    def restart(self, lane: Lane) -> None:
        """Give every variable its initial value again."""
        if lane.state is not None:
            lane.state.reset()

    def run(self, inputs: Sequence[bytes]) -> tuple[bytes, ...]:
        """One whole round in the first lane: write, submit, wait, read."""
        lane = self.lanes[0]
        lane.run.write(inputs)
        self.finish(self.context.session.call(self.submission(lane)))
        return lane.run.read()

    def close(self) -> None:
        """Give everything back, children first. What the device refuses is left to its reset."""
        with contextlib.suppress(ClientError, TransportError, TimeoutError):
            self.context.give_back()
