"""What a backend case works with: one backend under test, programs that it takes, and how to let its work end.

Drives a backend through its contract alone (device/backend.py), as the engine would. Knows no wire and no ring.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from virtaccel.device.backend import (
    Accepted,
    Artifact,
    Backend,
    BackendError,
    Binding,
    BufferRequest,
    Handle,
    Loaded,
    Loading,
    Polled,
    Rejected,
    Released,
    ReleaseOutcome,
)
from virtaccel.device.wire import Access, Capability, Domain, EventState, Status, Usage
from virtaccel.guest_tools.artifact import target_words
from virtaccel.harness.conformance.outcome import Failed, NotShown
from virtaccel.harness.oracle.programs import SAMPLES, TOSA_FORMAT, UNBOUNDED, Sample
from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.write import GraphWriter

PATIENCE: Final = 60.0  # seconds: compiling may take many on a busy machine
PROMPT: Final = 0.5
"""Seconds within which a method that must not wait returns, on a machine that is busy with other things."""
PLAIN_USE: Final = int(
    Usage.TRANSFER_SOURCE | Usage.TRANSFER_DESTINATION | Usage.PROGRAM_INPUT | Usage.PROGRAM_OUTPUT
)  # fmt: skip
DOMAINS: Final = (
    (Domain.SHARED, Capability.SHARED_MEMORY),
    (Domain.HOST, Capability.HOST_VISIBLE_MEMORY),
    (Domain.DEVICE, Capability.DEVICE_LOCAL_MEMORY),
)
# Together enough work to be pending while a case looks at it.
_SIDE: Final = 1024
_PRODUCTS: Final = 40


def slow_tosa() -> Sample:
    """A TOSA program that runs for a second or more: a long chain of matrix products. What it computes is of no
    interest, so no `operand` describes it."""
    writer = GraphWriter()
    shape = (1, _SIDE, _SIDE)
    x = writer.input("x", shape, DType.FP32)
    zero = writer.constant(np.zeros(1, np.float32))
    y = x
    for _ in range(_PRODUCTS):
        y = writer.operator(Op.MATMUL, [y, x, zero, zero], (shape, DType.FP32))
    writer.output(y)
    data = writer.to_bytes()
    return Sample("a chain of products", TOSA_FORMAT, target_words(read(data)), data, UNBOUNDED, 4 * _SIDE * _SIDE, 0)


@dataclass(frozen=True, slots=True)
class Subject:
    """A backend under test. `open` opens a fresh instance; `samples` are programs to try; `slow` one whose submissions
    stay pending for a second or more, or until `let_end` is called; None where there is none."""

    open: Callable[[], Backend]
    samples: Sequence[Sample] = SAMPLES
    slow: Sample | None = None
    let_end: Callable[[Backend], None] = lambda backend: None
    deadlines: bool = True


class Running(NamedTuple):
    """A submission under way and what it uses."""

    event: Handle
    source: Handle
    target: Handle
    program: Handle
    size: int


class BackendTestBed:
    """One instance with a context and an execution queue."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.backend = subject.open()
        self.context = self.backend.create_context()
        self.queue = self.backend.create_queue(self.context)
        self.closed = False

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.backend.close()

    @property
    def domain(self) -> Domain:
        capabilities = self.backend.info.capabilities
        return next((domain for domain, bit in DOMAINS if capabilities & bit), Domain.HOST)

    def buffer(self, size: int = 64, fill: bytes | None = None, usage: int = PLAIN_USE, alignment: int = 64) -> Handle:
        handle = self.backend.allocate_buffer(self.context, BufferRequest(size, alignment, self.domain, usage)).handle
        if fill is not None:
            self.backend.write_buffer(handle, 0, [memoryview(fill)])
        return handle

    def content(self, buffer: Handle, size: int, offset: int = 0) -> bytes:
        sink = bytearray(size)
        self.backend.read_buffer(buffer, offset, [memoryview(sink)])
        return bytes(sink)

    def artifact(self, sample: Sample, pieces: Sequence[memoryview] | None = None) -> Artifact:
        payload = pieces if pieces is not None else [memoryview(sample.artifact)]
        return Artifact(sample.format, sample.target, payload, sum(map(len, payload)), sample.resident)

    def load(self, sample: Sample) -> Handle:
        """A loaded program. Raises BackendError as the backend does."""
        return self.finish_load(self.backend.load_program(self.context, self.artifact(sample)))

    def finish_load(self, outcome: Loaded | Loading) -> Handle:
        until = time.monotonic() + PATIENCE
        while isinstance(outcome, Loading):
            if time.monotonic() > until:
                raise Failed(f"a load is not done after {PATIENCE:.0f} s")
            loaded = self.backend.poll_load(outcome.ticket)
            if loaded is not None:
                return loaded.program
            self.backend.wait(0.2)
        return outcome.program

    def sample(self) -> Sample:
        """The first program that the backend takes. Raises NotShown."""
        for sample in self.subject.samples:
            with suppress(BackendError):
                gone(self.backend.unload_program(self.load(sample)))
                return sample
        raise NotShown("the backend takes none of the programs at hand; bring one with --artifact")

    def slow(self) -> Sample:
        if self.subject.slow is None:
            raise NotShown("no program at hand runs long enough")
        return self.subject.slow

    def bindings(self, source: Handle, target: Handle, size: int) -> list[Binding]:
        return [Binding(source, 0, size, 0, Access.READ), Binding(target, 0, size, 1, Access.WRITE)]

    def submit(self, program: Handle, bindings: Sequence[Binding], timeout_ns: int = 0) -> Handle:
        outcome = self.backend.submit(self.queue, program, bindings, timeout_ns)
        if not isinstance(outcome, Accepted):
            raise Failed(f"a sound submission was not accepted: {outcome}")
        return outcome.event

    def start_slow(self, timeout_ns: int = 0) -> Running:
        """A submission that is pending for a while. Raises NotShown where it ends too soon."""
        sample = self.slow()
        program = self.load(sample)
        source, target = self.buffer(sample.bytes), self.buffer(sample.bytes)
        event = self.submit(program, self.bindings(source, target, sample.bytes), timeout_ns)
        return Running(event, source, target, program, sample.bytes)

    def pending(self) -> Running:
        running = self.start_slow()
        if self.backend.poll_event(running.event).state is not EventState.PENDING:
            raise NotShown("the slow program had ended already")
        return running

    def end(self, event: Handle) -> Polled:
        """Wait for the event to become terminal."""
        self.subject.let_end(self.backend)
        until = time.monotonic() + PATIENCE
        while (polled := self.backend.poll_event(event)).state is EventState.PENDING:
            if time.monotonic() > until:
                raise Failed(f"a submission is not done after {PATIENCE:.0f} s")
            self.backend.wait(0.2)
        return polled


def gone(outcome: ReleaseOutcome) -> None:
    if not isinstance(outcome, Released):
        raise Failed(f"a release that nothing stands against: {outcome}")


def refuses(what: str, act: Callable[[], object], *statuses: Status) -> None:
    """`act` must raise BackendError with one of `statuses`."""
    try:
        result = act()
    except BackendError as error:
        if error.status not in statuses:
            raise Failed(f"{what}: {error.status.name}, should be {' or '.join(s.name for s in statuses)}") from error
        return
    raise Failed(f"{what} was not refused: {result}")


def rejects(what: str, outcome: object, *statuses: Status) -> None:
    """A submission's outcome must be a rejection with one of `statuses`."""
    if not isinstance(outcome, Rejected) or outcome.status not in statuses:
        raise Failed(f"{what}: {outcome}, should be rejected with {' or '.join(s.name for s in statuses)}")


class Prompt:
    """A stretch of code that must not wait."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        taken = time.monotonic() - self._start
        if kind is None and taken > PROMPT:
            raise Failed(f"{self._what} took {taken:.2f} s; it must not wait")
