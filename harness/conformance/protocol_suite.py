"""Runs the protocol cases on one device and says what became of each. Standard library only."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from virtaccel.guest_tools.transport.base import TransportError
from virtaccel.guest_tools.transport.raw import HasRawRing
from virtaccel.harness.conformance import protocol_objects, protocol_queue
from virtaccel.harness.conformance.protocol_bench import Bench, Case, Failed, NotShown
from virtaccel.harness.conformance.protocol_programs import SAMPLES, Sample

CASES: Final[tuple[Case, ...]] = (*protocol_queue.CASES, *protocol_objects.CASES)
PASSED, FAILED, NOT_SHOWN = "passed", "failed", "not shown"


class Result(NamedTuple):
    """What became of one case; `detail` says what was wrong, or why it was not shown."""

    name: str
    asserts: str
    outcome: str
    detail: str
    seconds: float


def run(
    transport: HasRawRing, samples: Sequence[Sample] = SAMPLES, only: str = "", patience: float = 20.0
) -> Iterator[Result]:
    """Each case on a device just reset. Raises TransportError or Failed if the device does not even begin."""
    bench = Bench(transport.raw_ring(), transport.config, patience, samples)
    bench.begin()
    for case in CASES:
        if only.lower() in case.name.lower():
            yield _one(bench, case)


def _one(bench: Bench, case: Case) -> Result:
    start = time.monotonic()
    outcome, detail = PASSED, ""
    try:
        bench.renew()
        case.show(bench)
    except NotShown as reason:
        outcome, detail = NOT_SHOWN, str(reason)
    except (Failed, TransportError) as error:
        outcome, detail = FAILED, str(error)
    return Result(case.name, case.asserts, outcome, detail, time.monotonic() - start)


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """Counts by outcome, and every case."""
    return {
        "counts": {kind: sum(one.outcome == kind for one in results) for kind in (PASSED, FAILED, NOT_SHOWN)},
        "cases": [{**one._asdict(), "seconds": round(one.seconds, 3)} for one in results],
    }


def line(result: Result) -> str:
    """One case for people."""
    text = f"{result.name:8} {result.outcome:9} {result.asserts}"
    return f"{text}: {result.detail}" if result.detail else text
