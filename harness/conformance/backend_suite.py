"""Runs the cases of the backend contract, each on a fresh instance, and says what became of each."""

from __future__ import annotations

import time
from collections.abc import Iterator

from virtaccel.device.backend import BackendError
from virtaccel.harness.conformance.backend_bench import Bench, Subject
from virtaccel.harness.conformance.backend_cases import CASES, Case
from virtaccel.harness.conformance.protocol_bench import Failed, NotShown
from virtaccel.harness.conformance.protocol_suite import FAILED, NOT_SHOWN, PASSED, Result


def run(subject: Subject, only: str = "") -> Iterator[Result]:
    """Each case on a fresh instance."""
    for case in CASES:
        if only.lower() in case.name.lower():
            yield run_case(subject, case)


def run_case(subject: Subject, case: Case) -> Result:
    """One case. Raises BackendUnavailable if no instance can be opened."""
    start = time.monotonic()
    outcome, detail = PASSED, ""
    bench = Bench(subject)
    try:
        case.show(bench)
    except NotShown as reason:
        outcome, detail = NOT_SHOWN, str(reason)
    except Failed as error:
        outcome, detail = FAILED, str(error)
    except BackendError as error:
        outcome, detail = FAILED, f"{error.status.name} where nothing stands against it: {error}"
    except Exception as error:  # outside the contract, and that is the verdict
        outcome, detail = FAILED, f"raised {type(error).__name__}: {error}"
    finally:
        bench.close()
    return Result(case.name, case.asserts, outcome, detail, time.monotonic() - start)
