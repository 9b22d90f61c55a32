"""`bench commands`: a round trip of every command, in process and over the socket, and a small program's whole way.

Lanes take their rounds in turn. In a round one device goes through the life of everything it has several times, the
first of which only warms the processor's caches up. What stands beside them is OpenVINO called directly on the same
graph, with no device at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from virtaccel.device.wire import Access, EventState
from virtaccel.guest_tools.arrays.accelerator import ANY_USE, Accelerator
from virtaccel.guest_tools.arrays.program import Program
from virtaccel.guest_tools.artifact import TOSA_FORMAT, target_words
from virtaccel.guest_tools.client import Binding, DeviceError, Event, PackedBindings, Request, pack_bindings
from virtaccel.guest_tools.errors import ExecutionFailed
from virtaccel.guest_tools.session import Session
from virtaccel.guest_tools.transport.vhost_user import VhostUserTransport
from virtaccel.guest_tools.via import open_transport
from virtaccel.harness.bench import programs
from virtaccel.harness.bench.measure import clock, timing, undisturbed
from virtaccel.harness.bench.report import Figure, Report, Row
from virtaccel.tosa_graph.flatbuffer import read

T = TypeVar("T")

IN_PROCESS, SLEEPING, POLLING, DIRECT = "in process", "socket", "socket, polling", "OpenVINO"
POLL_SECONDS = 200e-6
COMPLETE = "SUBMIT until complete"
_BYTES = 4 * programs.ELEMENTS
_MOST_POLLS = 1_000_000
_WARM, _RUNS = 8, 32
"""Submissions of `steady` in a round: to warm up, and timed."""
_LIVES = 4
_AGAIN = 8
"""How often a round repeats the whole, and within it a command that changes nothing."""


class Lane(NamedTuple):
    """One way to a device, and a program there bound to buffers."""

    accelerator: Accelerator
    program: Program
    bindings: PackedBindings


class Stopwatch:
    """Round trips of one lane, by command."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.samples: dict[str, list[int]] = {}

    def call(self, name: str, make: Callable[[], Request[T]]) -> T:
        """Build the request, send it, check the answer; the time of all three."""
        start = clock()
        value = self._session.call(make())
        self.add(name, clock() - start)
        return value

    def refused(self, name: str, make: Callable[[], Request[T]]) -> None:
        """A command that has to fail; the time until it has."""
        start = clock()
        try:
            self._session.call(make())
        except DeviceError:
            self.add(name, clock() - start)
            return
        raise ExecutionFailed(f"{name} was to be refused")

    def add(self, name: str, nanoseconds: int) -> None:
        self.samples.setdefault(name, []).append(nanoseconds)


def life(lane: Lane, watch: Stopwatch, artifact: bytes, words: Sequence[int]) -> None:
    """Make, use and give back one of everything."""
    session, client, domain = lane.accelerator.session, lane.accelerator.session.client, lane.accelerator.domain
    call = watch.call
    for _ in range(_AGAIN):
        call("GET_DEVICE_INFO", client.get_device_info)
    context = call("CREATE_CONTEXT", client.create_context)
    queue = call("CREATE_QUEUE", lambda: client.create_queue(context))
    allocate = partial(client.allocate_buffer, context, _BYTES, ANY_USE, domain=domain)
    buffers = [call("ALLOCATE_BUFFER", allocate) for _ in range(3)]
    data, sink = np.ones(programs.ELEMENTS, np.float32).view(np.uint8).data, memoryview(bytearray(_BYTES))
    for buffer in buffers[:2]:
        call("WRITE_BUFFER", partial(client.write_buffer, buffer, 0, data))
    program = call("LOAD_PROGRAM", lambda: client.load_program(context, TOSA_FORMAT, words, artifact))
    access = (Access.READ, Access.READ, Access.WRITE)
    bindings = pack_bindings(
        [Binding(buffer, 0, _BYTES, slot, how) for slot, (buffer, how) in enumerate(zip(buffers, access, strict=True))]
    )
    for _ in range(_AGAIN):
        event = complete(session, client.submit(queue, program, bindings))
        for _ in range(_AGAIN):
            call("POLL_EVENT", partial(client.poll_event, event))
        watch.refused("CANCEL_EVENT (too late)", partial(client.cancel_event, event))
        call("DESTROY_EVENT", partial(client.destroy_event, event))
    call("READ_BUFFER", lambda: client.read_buffer(buffers[2], 0, sink))
    call("UNLOAD_PROGRAM", lambda: client.unload_program(program))
    for buffer in buffers:
        call("FREE_BUFFER", partial(client.free_buffer, buffer))
    call("DESTROY_QUEUE", lambda: client.destroy_queue(queue))
    call("DESTROY_CONTEXT", lambda: client.destroy_context(context))


def complete(session: Session, request: Request[Event]) -> Event:
    """Submit and ask until it is complete; the event still has to be destroyed. Raises ExecutionFailed."""
    event = session.call(request)
    poll = session.client.poll_event
    for _ in range(_MOST_POLLS):
        state = session.call(poll(event)).state
        if state:
            break
    if state is not EventState.COMPLETE:
        raise ExecutionFailed(f"the submission ended as {state.name}")
    return event


def steady(lane: Lane, watch: Stopwatch) -> None:
    """One program on the same buffers again and again, from building the request to the answer that it is complete."""
    accelerator, program, bindings = lane
    session, client = accelerator.session, accelerator.session.client
    for number in range(_WARM + _RUNS):
        start = clock()
        event = session.call(client.submit(accelerator.queue, program.id, bindings))
        submitted = clock()
        while not session.call(client.poll_event(event)).state:
            pass
        ended = clock()
        if number >= _WARM:
            watch.add("SUBMIT", submitted - start)
            watch.add(COMPLETE, ended - start)
        status = session.call(client.poll_event(event))
        if status.state is not EventState.COMPLETE:
            raise ExecutionFailed(f"the submission ended as {status.state.name}")
        session.call(client.destroy_event(event))


def direct(artifact: bytes, device: str | None) -> Callable[[], object]:
    """The same graph with OpenVINO alone: start it and look until it has ended."""
    import openvino as ov

    from virtaccel.backend_openvino import compile as runtime
    from virtaccel.backend_openvino.lowering.builder import lower

    model = runtime.compile_model(lower(read(artifact)), runtime.choose(device), runtime.Tuning())
    request = model.create_infer_request()
    for number in range(2):
        request.set_input_tensor(number, ov.Tensor(np.ones(programs.ELEMENTS, np.float32)))

    def run() -> None:
        request.start_async()
        while not request.wait_for(0):
            pass

    return run


def measure(rounds: int, socket: bool, device: str | None, poll_us: int) -> Report:
    """All lanes there are. Raises what opening a device and running one raise."""
    report = Report("commands")
    artifact = programs.add()
    words = target_words(read(artifact))
    with ExitStack() as stack:
        opened = {IN_PROCESS: Session(open_transport("in-process", device))}
        if socket:
            for name, options, spin in (
                (SLEEPING, (), 0.0),
                (POLLING, ("--poll-us", str(poll_us)), POLL_SECONDS),
            ):
                path = stack.enter_context(programs.daemon(*options, device=device))
                opened[name] = Session(VhostUserTransport(path, spin=spin))
        lanes = {name: _lane(stack.enter_context(Accelerator(session)), artifact) for name, session in opened.items()}
        watches = {name: Stopwatch(session) for name, session in opened.items()}
        baseline = direct(artifact, device)
        alone: list[int] = []
        with undisturbed():
            for _ in range(rounds):
                for name, lane in lanes.items():
                    life(lane, Stopwatch(opened[name]), artifact, words)
                    for _ in range(_LIVES - 1):
                        life(lane, watches[name], artifact, words)
                    steady(lane, watches[name])
                alone += alone_for_a_round(baseline)
    _tell(report, {name: watch.samples for name, watch in watches.items()}, alone)
    return report


def alone_for_a_round(work: Callable[[], object]) -> list[int]:
    """As often as a round measures a submission, and warmed up as those are."""
    samples = []
    for _ in range(_WARM + _RUNS):
        start = clock()
        work()
        samples.append(clock() - start)
    return samples[_WARM:]


def _lane(accelerator: Accelerator, artifact: bytes) -> Lane:
    """This program stays loaded, so that what is measured of LOAD_PROGRAM is no compilation."""
    program = accelerator.load(artifact, "add")
    return Lane(accelerator, program, program.new_invocation().packed)


def _tell(report: Report, samples: dict[str, dict[str, list[int]]], alone: list[int]) -> None:
    for name in samples[IN_PROCESS]:
        report.rows += [Row(name, lane, timing(found[name])) for lane, found in samples.items()]
    report.rows.append(Row(COMPLETE, DIRECT, timing(alone), "started and looked at until it has ended"))

    def median(lane: str, name: str) -> float:
        return timing(samples[lane][name]).median / 1e3

    figures = report.figures
    figures.append(Figure("ADD, submit to complete, in process", median(IN_PROCESS, COMPLETE), "us", 30.0))
    figures.append(Figure("POLL_EVENT in process", median(IN_PROCESS, "POLL_EVENT"), "us", 6.0))
    if SLEEPING in samples:
        figures.append(Figure("GET_DEVICE_INFO, socket, sleeping", median(SLEEPING, "GET_DEVICE_INFO"), "us", 60.0))
        figures.append(Figure("GET_DEVICE_INFO, socket, polling", median(POLLING, "GET_DEVICE_INFO"), "us", 25.0))
    figures.append(Figure("ADD, device over OpenVINO alone", median(IN_PROCESS, COMPLETE) * 1e3 / timing(alone).median))
