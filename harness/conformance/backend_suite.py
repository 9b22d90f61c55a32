"""Runs the cases of the backend contract, each on a fresh instance, and says what became of each."""

from __future__ import annotations

from collections.abc import Iterator

from virtaccel.device.backend import BackendError
from virtaccel.harness.conformance.backend_cases import CASES
from virtaccel.harness.conformance.backend_test_bed import BackendTestBed, Subject
from virtaccel.harness.conformance.outcome import Case, Result, judge


def run(subject: Subject, only: str = "") -> Iterator[Result]:
    """Each case on a fresh instance."""
    for case in CASES:
        if case.is_asked_for(only):
            yield run_case(subject, case)


def run_case(subject: Subject, case: Case[BackendTestBed]) -> Result:
    """One case. Raises BackendUnavailable if no instance can be opened."""
    bed = BackendTestBed(subject)
    try:
        return judge(case, lambda: case.show(bed), _outside_the_contract)
    finally:
        bed.close()


def _outside_the_contract(error: Exception) -> str:
    if isinstance(error, BackendError):
        return f"{error.status.name} where nothing stands against it: {error}"
    return f"raised {type(error).__name__}: {error}"  # a backend raises nothing else, and that is the verdict
