"""Runs the protocol cases on one device and says what became of each. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from virtaccel.guest_tools.transport.base import TransportError
from virtaccel.guest_tools.transport.raw import HasRawRing
from virtaccel.harness.conformance import protocol_objects, protocol_queue
from virtaccel.harness.conformance.outcome import Case, Result, judge
from virtaccel.harness.conformance.test_bed import TestBed
from virtaccel.harness.oracle.programs import SAMPLES, Sample

CASES: Final[tuple[Case[TestBed], ...]] = (*protocol_queue.CASES, *protocol_objects.CASES)


def run(
    transport: HasRawRing, samples: Sequence[Sample] = SAMPLES, only: str = "", patience: float = 20.0
) -> Iterator[Result]:
    """Each case on a device just reset. Raises TransportError or Failed if the device does not even begin."""
    bed = TestBed(transport.raw_ring(), transport.config, patience, samples)
    bed.begin()
    for case in CASES:
        if case.is_asked_for(only):
            yield judge(case, lambda case=case: _show(bed, case), _said_by_transport)  # type: ignore[misc]


def _show(bed: TestBed, case: Case[TestBed]) -> None:
    bed.renew()
    case.show(bed)


def _said_by_transport(error: Exception) -> str | None:
    return str(error) if isinstance(error, TransportError) else None
