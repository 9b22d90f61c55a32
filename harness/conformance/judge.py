"""The verdict on one test: what a device did with it, against Arm's reference model and verifier.

    passed   the answer is one the standard allows; or a negative test was refused while loading
    refused  the device does not admit the program: honest, but not there yet
    wrong    an answer the standard does not allow, a submission that failed, or a negative test admitted
    crashed  the process that ran the device ended, or gave no answer in time (this one is seen from outside)

A negative test passes only if its own rule is what it is refused for: a device that merely lacks the operator has shown
nothing, and is counted as refusing. Nothing here knows a transport.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np

from virtaccel.harness.conformance.case import Case
from virtaccel.harness.conformance.tools import Reference, Tools, Verifier, storage
from virtaccel.tosa_graph.elements import Array, unpack
from virtaccel.tosa_graph.graph import DType

MOST_LINES_OF_REASON = 4  # the verifier goes on for every element


class Outcome(StrEnum):
    PASSED = "passed"
    REFUSED = "refused"
    WRONG = "wrong"
    CRASHED = "crashed"


class Verdict(NamedTuple):
    """`reason` is empty for a test that passed."""

    outcome: Outcome
    reason: str = ""


class Refusal(NamedTuple):
    """The device did not admit the program."""

    reason: str


class Failure(NamedTuple):
    """The device admitted the program and then did not run it."""

    reason: str


class Outputs(NamedTuple):
    """Packed bytes of every output, in the graph's order."""

    data: list[bytes]


class System(Protocol):
    """What is under test: a device, or whatever a test puts in its place."""

    def run(self, case: Case, load_only: bool) -> Refusal | Failure | Outputs: ...


class Judge:
    """Gives verdicts; single threaded. Lines that the verify library prints become part of the reason."""

    def __init__(self, tools: Tools, answered: Callable[[], None] | None = None) -> None:
        """`answered` is called when the system has answered and the judging, which may take longer, begins."""
        self._reference = Reference(tools)
        self._verifier = Verifier(tools)
        self._answered = answered

    def verdict(self, case: Case, system: System) -> Verdict:
        """Raises ToolFailed if there is no right answer to compare with."""
        answer = system.run(case, load_only=case.negative)
        if self._answered is not None:
            self._answered()
        if case.negative:
            return _negative(case, answer)
        if isinstance(answer, Refusal):
            return Verdict(Outcome.REFUSED, answer.reason)
        if isinstance(answer, Failure):
            return Verdict(Outcome.WRONG, f"admitted, then: {answer.reason}")
        return self._compare(case, answer)

    def _compare(self, case: Case, answer: Outputs) -> Verdict:
        compliance = case.description["meta"]["compliance"]
        bounds = bool(case.description.get("test_requirements", {}).get("bounds_file_required"))
        right = self._reference.outputs(case.folder / "desc.json", case.write_inputs, bounds)
        order = _positions(case)
        for (tensor, _), (expected, limit) in zip(case.outputs, right, strict=True):
            dtype = DType[compliance["tensors"][tensor]["data_type"]]
            data = answer.data[order[tensor]]
            try:
                got = storage(data, dtype, expected.shape)
            except ValueError as error:
                return Verdict(Outcome.WRONG, f"{tensor}: {error}")
            with _said() as said:
                fine = self._verifier.accepts(compliance, tensor, got, expected, limit)
            if not fine:
                return Verdict(Outcome.WRONG, _difference(tensor, dtype, got, expected, said))
        return Verdict(Outcome.PASSED)


def _negative(case: Case, answer: Refusal | Failure | Outputs) -> Verdict:
    if not isinstance(answer, Refusal):
        return Verdict(Outcome.WRONG, f"admitted, though it breaks {case.expected_failure}")
    if case.rule() is None:
        return Verdict(Outcome.REFUSED, f"not for breaking {case.expected_failure}: {answer.reason}")
    return Verdict(Outcome.PASSED)


def _positions(case: Case) -> dict[str, int]:
    assert case.graph is not None
    return {tensor.name: position for position, tensor in enumerate(case.graph.outputs)}


def _values(array: Array, dtype: DType) -> Array:
    """Numbers for people: bit patterns decoded."""
    if array.dtype.kind == "V" or dtype == DType.FP8E5M2:
        return array if array.dtype == np.float64 else unpack(array.tobytes(), dtype, array.shape)
    return array


def _difference(tensor: str, dtype: DType, got: Array, expected: Array, said: Sequence[str]) -> str:
    """How many elements differ and the first that does, then what the verifier said."""
    ours, theirs = _values(got, dtype).astype(np.float64), _values(expected, dtype).astype(np.float64)
    different = ~((ours == theirs) | (np.isnan(ours) & np.isnan(theirs)))
    places = np.flatnonzero(different)
    text = f"{tensor}: {len(places)} of {got.size} differ"
    if len(places):
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.abs(ours - theirs).reshape(-1)[places]
        worst = int(places[int(np.argmax(np.where(np.isnan(distance), np.inf, distance)))])
        for title, place in dict.fromkeys([("first", int(places[0])), ("worst", worst)]):
            at = tuple(int(index) for index in np.unravel_index(place, got.shape))
            text += f"; {title} at {at}: {ours.reshape(-1)[place]!r}, right is {theirs.reshape(-1)[place]!r}"
    return "; ".join([text, *said[:MOST_LINES_OF_REASON]])


@contextmanager
def _said() -> Iterator[list[str]]:
    """Lines that native code prints meanwhile, taken off this process's standard output."""
    lines: list[str] = []
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            yield lines
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(kept, 1)
            os.close(kept)
            file.seek(0)
            lines += [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
