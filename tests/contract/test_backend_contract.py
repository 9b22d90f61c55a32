"""Every promise of the backend contract over every backend there is, and backends that break one, each found out.

A case of the suite is one test. The reference backend runs with its script holding submissions back, so that states
which it passes through at once by itself can be looked at; the refusing one fails every method once before it works.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from click.testing import CliRunner

from virtaccel.backend_openvino import open_backend as open_openvino
from virtaccel.cli.main import main
from virtaccel.device.backend import (
    AllocatedBuffer,
    Artifact,
    Backend,
    BackendError,
    Binding,
    BufferRequest,
    Handle,
    Loaded,
    Loading,
    Polled,
    Segments,
    SubmitOutcome,
)
from virtaccel.device.isolated.launcher import WorkerLauncher
from virtaccel.device.reference import INFO, Reference, Refuse, Script
from virtaccel.device.wire import EventState, Status
from virtaccel.harness.conformance.backend_cases import CASES
from virtaccel.harness.conformance.backend_suite import run_case
from virtaccel.harness.conformance.backend_test_bed import Subject, slow_tosa
from virtaccel.harness.conformance.outcome import FAILED, NOT_SHOWN, PASSED
from virtaccel.harness.fuzz.contract_checker import ContractChecker
from virtaccel.harness.oracle.programs import REFERENCE_XOR

METHODS = (
    "create_context",
    "allocate_buffer",
    "write_buffer",
    "read_buffer",
    "load_program",
    "create_queue",
    "poll_event",
)


class Held(Reference):
    """The reference backend that ends nothing by itself, until the suite lets it."""

    def __init__(self) -> None:
        super().__init__(script=Script(immediate=False, deferred_loads=True))

    def load_program(self, context: Handle, artifact: Artifact) -> Loaded | Loading:
        outcome = super().load_program(context, artifact)
        self.finish_load()  # told by the descriptor, collected by poll_load
        return outcome


class Refusing(Held):
    """Refuses each method once: after a refusal everything has to be as before, so its callers try again."""

    def __init__(self) -> None:
        super().__init__()
        for method in METHODS:
            self.script.next(method, Refuse(Status.OUT_OF_MEMORY))


class Insisting:
    """Calls a backend once more where it was refused with OUT_OF_MEMORY."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if name not in METHODS:
            return found

        def call(*arguments: Any) -> Any:
            try:
                return found(*arguments)
            except BackendError as error:
                if error.status is not Status.OUT_OF_MEMORY:
                    raise
                return found(*arguments)

        return call


def let_end(backend: Any) -> None:
    while isinstance(backend, Insisting):
        backend = backend._backend
    backend.complete()


HELD: dict[str, Any] = {"slow": REFERENCE_XOR, "let_end": let_end, "deadlines": False}
_isolating: list[WorkerLauncher] = []


def open_isolated() -> Backend:
    if not _isolating:
        _isolating.append(WorkerLauncher("openvino"))
    return _isolating[0]("CPU")


@pytest.fixture(scope="module", autouse=True)
def workers_end() -> Iterator[None]:
    yield
    for opener in _isolating:
        opener.close()


SUBJECTS = {
    "reference": Subject(Held, **HELD),
    "refusing": Subject(lambda: Insisting(Refusing()), **HELD),  # type: ignore[arg-type, return-value]
    "openvino": Subject(lambda: open_openvino("CPU"), slow=slow_tosa()),
    "isolated": Subject(open_isolated, slow=slow_tosa()),
}
# What cannot be shown, and why: the reference keeps no time, and knows no work that goes on after a cancel.
UNSHOWN = {"reference": {"BC-25"}, "refusing": {"BC-25"}}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", SUBJECTS)
def test_promise(name: str, case: Any) -> None:
    result = run_case(SUBJECTS[name], case)
    expected = NOT_SHOWN if case.name in UNSHOWN.get(name, ()) else PASSED
    assert result.outcome == expected, result.detail


# Backends that break one promise


class NotZeroed(Held):
    def allocate_buffer(self, context: Handle, request: BufferRequest) -> AllocatedBuffer:
        made = super().allocate_buffer(context, request)
        super().write_buffer(made.handle, 0, [memoryview(b"\x5a" * min(64, request.bytes))])
        return made


class TooSmall(Held):
    def allocate_buffer(self, context: Handle, request: BufferRequest) -> AllocatedBuffer:
        return super().allocate_buffer(context, request)._replace(allocation_bytes=request.bytes - 1)


class FirstSegmentOnly(Held):
    def write_buffer(self, buffer: Handle, offset: int, source: Segments) -> None:
        super().write_buffer(buffer, offset, source[:1])


class KeepsThePayload(Held):
    """Looks at the artifact when it is asked, not when it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.late: dict[int, tuple[Handle, Artifact]] = {}

    def load_program(self, context: Handle, artifact: Artifact) -> Loaded | Loading:
        self.late[len(self.late)] = context, artifact
        return Loading(len(self.late) - 1)

    def poll_load(self, ticket: Handle) -> Loaded | None:
        assert isinstance(ticket, int)
        context, artifact = self.late.pop(ticket)
        outcome = super().load_program(context, artifact)
        assert isinstance(outcome, Loading)
        return super().poll_load(outcome.ticket)


class Silent(Held):
    def _wake_up(self) -> None:
        """Nobody is told."""


class AnyFormat(Held):
    def load_program(self, context: Handle, artifact: Artifact) -> Loaded | Loading:
        return super().load_program(context, artifact._replace(format=REFERENCE_XOR.format))


class Waits(Held):
    def submit(self, queue: Handle, program: Handle, bindings: Sequence[Binding], timeout_ns: int) -> SubmitOutcome:
        time.sleep(0.6)
        return super().submit(queue, program, bindings, timeout_ns)


class WritesWhileBusy(Held):
    def write_buffer(self, buffer: Any, offset: int, source: Segments) -> None:
        readers, writers = buffer.readers, buffer.writers
        buffer.readers = buffer.writers = 0
        super().write_buffer(buffer, offset, source)
        buffer.readers, buffer.writers = readers, writers


class ChangesItsMind(Held):
    """A cancelled event becomes complete after all."""

    def poll_event(self, event: Any) -> Polled:
        polled = super().poll_event(event)
        if polled.state is EventState.CANCELLED:
            event.state = EventState.COMPLETE
        return polled


class SharesHandles(Held):
    one = object()

    def create_context(self) -> Handle:
        return _CONTEXTS.setdefault(id(self), super().create_context())


class SlowToClose(Held):
    def close(self) -> None:
        time.sleep(0.6)
        super().close()


class KeepsWhatItRefuses(Held):
    """A rejected submission leaves its buffers in use."""

    def submit(self, queue: Handle, program: Handle, bindings: Sequence[Binding], timeout_ns: int) -> SubmitOutcome:
        outcome = super().submit(queue, program, bindings, timeout_ns)
        if hasattr(outcome, "status"):
            for binding in bindings:
                binding.buffer.readers += 1  # type: ignore[attr-defined]
        return outcome


class Unstable(Held):
    count = 0

    @property
    def info(self) -> Any:
        Unstable.count += 1
        return INFO.__class__(Unstable.count.to_bytes(16, "big"), *[getattr(INFO, name) for name in INFO.__slots__[1:]])


_CONTEXTS: dict[int, Handle] = {}
BREAKERS: dict[type[Held], str] = {
    Unstable: "BC-01", NotZeroed: "BC-04", TooSmall: "BC-04", FirstSegmentOnly: "BC-08", KeepsThePayload: "BC-11",
    Silent: "BC-12", AnyFormat: "BC-13", KeepsWhatItRefuses: "BC-17", Waits: "BC-18", WritesWhileBusy: "BC-19",
    ChangesItsMind: "BC-21", SharesHandles: "BC-26", SlowToClose: "BC-27",
}  # fmt: skip


@pytest.mark.parametrize("breaker", BREAKERS, ids=lambda breaker: breaker.__name__)
def test_a_broken_promise_is_found(breaker: Callable[[], Backend]) -> None:
    name = BREAKERS[breaker]  # type: ignore[index]
    case = next(case for case in CASES if case.name == name)
    assert run_case(Subject(breaker, **HELD), case).outcome == FAILED


def test_the_suite_itself_keeps_the_engines_half() -> None:
    """It uses no handle that is not alive, releases none twice, and asks nothing of a backend that is closed."""
    checkers: list[ContractChecker] = []

    def checked() -> Backend:
        checkers.append(ContractChecker(Held()))
        return checkers[-1]

    def end(checker: Any) -> None:
        checker.backend.complete()

    subject = Subject(checked, slow=REFERENCE_XOR, let_end=end, deadlines=False)
    for case in CASES:
        assert run_case(subject, case).outcome in (PASSED, NOT_SHOWN)
    # The one thing that an engine would not ask, and a backend still has to answer.
    assert {checker.breach for checker in checkers} <= {None, "an event known to be terminal was cancelled"}


def test_command_line() -> None:
    run = CliRunner().invoke(main, ["conformance", "backend", "reference", "--json"])
    assert run.exit_code == 0, run.output
    content = json.loads(run.output)
    assert content["counts"]["failed"] == 0
    assert len(content["cases"]) == len(CASES)
    by_function = CliRunner().invoke(
        main, ["conformance", "backend", "virtaccel.device.reference:open_backend", "--only", "bc-04"]
    )
    assert by_function.output.startswith("BC-04    passed")
    unknown = CliRunner().invoke(main, ["conformance", "backend", "nobody"])
    assert unknown.exit_code == 2
