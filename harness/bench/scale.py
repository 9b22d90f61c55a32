"""`bench scale`: whether a command costs the same beside a thousand live objects, and what many bindings cost.

Devices with 1, 10, 100 and 1,000 live buffers and as many live events take turns; SUBMITs of 2 and of 64 bindings take
turns on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

from virtaccel.guest_tools.arrays.accelerator import Accelerator, DeviceBuffer
from virtaccel.guest_tools.arrays.program import Program
from virtaccel.guest_tools.client import Event, PackedBindings
from virtaccel.guest_tools.session import Session
from virtaccel.guest_tools.via import open_transport
from virtaccel.harness.bench import programs
from virtaccel.harness.bench.measure import clock, timing, undisturbed
from virtaccel.harness.bench.report import Figure, Report, Row

LIVE = (1, 10, 100, 1000)
BINDINGS = (2, 64)
_PER_TURN = 8


class Crowd(NamedTuple):
    """A device with so many live buffers and events, and the last of them."""

    accelerator: Accelerator
    buffers: list[DeviceBuffer]
    program: Program
    packed: PackedBindings
    event: Event


def crowd(stack: ExitStack, live: int, device: str | None) -> Crowd:
    """A device of its own, filled."""
    accelerator = stack.enter_context(Accelerator(Session(open_transport("in-process", device))))
    program = accelerator.load(programs.add(), "add")
    invocation = program.new_invocation()
    packed = invocation.packed
    buffers = [accelerator.buffer(64) for _ in range(live)]
    event = [programs.run(accelerator, program, packed) for _ in range(live)][-1]
    return Crowd(accelerator, buffers, program, packed, event)


def commands(one: Crowd) -> dict[str, Callable[[], object]]:
    """What is asked of each crowd: the last objects made, and new ones."""
    session, client = one.accelerator.session, one.accelerator.session.client
    data = memoryview(bytes(64))
    return {
        "POLL_EVENT": lambda: session.call(client.poll_event(one.event)),
        "WRITE_BUFFER": lambda: one.buffers[-1].write(data),
        "ALLOCATE_BUFFER, FREE_BUFFER": lambda: one.accelerator.buffer(64).free(),
        "SUBMIT to DESTROY_EVENT": lambda: session.call(
            client.destroy_event(programs.run(one.accelerator, one.program, one.packed))
        ),
    }


def measure(rounds: int, device: str | None) -> Report:
    """Both questions."""
    report = Report("scale")
    with ExitStack() as stack:
        crowds = {live: commands(crowd(stack, live, device)) for live in LIVE}
        _crowds(report, crowds, rounds)
        _bindings(report, stack.enter_context(Accelerator(Session(open_transport("in-process", device)))), rounds)
    return report


def _crowds(report: Report, crowds: dict[int, dict[str, Callable[[], object]]], rounds: int) -> None:
    samples: dict[tuple[str, int], list[int]] = {(what, live): [] for live in crowds for what in crowds[live]}
    with undisturbed():
        for _ in range(rounds):
            for live, works in crowds.items():
                for what, work in works.items():
                    work()  # for the caches
                    start = clock()
                    for _ in range(_PER_TURN):
                        work()
                    samples[what, live].append((clock() - start) // _PER_TURN)
    for what in crowds[LIVE[0]]:
        report.rows += [Row(what, f"{live} live", timing(samples[what, live])) for live in LIVE]
        medians = [timing(samples[what, live]).median for live in LIVE]
        name = f"{what}: most over least, 1 to {LIVE[-1]:,} live"
        report.figures.append(Figure(name, max(medians) / min(medians), bound=1.3))


def _bindings(report: Report, accelerator: Accelerator, rounds: int) -> None:
    """SUBMIT alone: the program moves 32 bytes for each input."""
    loaded = {number: accelerator.load(programs.joined(number - 1), f"{number} bindings") for number in BINDINGS}
    packed = {number: program.new_invocation().packed for number, program in loaded.items()}
    samples: dict[int, list[int]] = {number: [] for number in BINDINGS}
    session, client = accelerator.session, accelerator.session.client
    with undisturbed():
        for _ in range(rounds):
            for number, program in loaded.items():
                for turn in range(3):
                    start = clock()
                    event = session.call(client.submit(accelerator.queue, program.id, packed[number]))
                    if turn:
                        samples[number].append(clock() - start)
                    session.wait(event)
                    session.call(client.destroy_event(event))
    report.rows += [Row("SUBMIT", f"{number} bindings", timing(found)) for number, found in samples.items()]
    few, many = (timing(samples[number]).median for number in BINDINGS)
    report.figures.append(Figure("SUBMIT with 64 bindings over SUBMIT with 2", many / few, bound=6.0))
