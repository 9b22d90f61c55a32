"""What a case of the protocol and backend suites is, and what became of one. Standard library only."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

PASSED, FAILED, NOT_SHOWN = "passed", "failed", "not shown"
Bed = TypeVar("Bed")


class Failed(Exception):
    """The device does not do what the case asks for."""


class NotShown(Exception):
    """The case cannot be shown on this device, or not by a driver at all."""


def must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Failed(otherwise)


class Case(NamedTuple, Generic[Bed]):
    """One case: its stable name, what it asserts, and how it is shown on a test bed."""

    name: str
    asserts: str
    show: Callable[[Bed], None]

    def is_asked_for(self, only: str) -> bool:
        return only.lower() in self.name.lower()


class Result(NamedTuple):
    """What became of one case; `detail` says what was wrong, or why it was not shown."""

    name: str
    asserts: str
    outcome: str
    detail: str
    seconds: float


def judge(case: Case[Bed], show: Callable[[], None], expected: Callable[[Exception], str | None]) -> Result:
    """Show one case. `expected` says what an exception other than our own tells of the device; None lets it out."""
    start = time.monotonic()
    outcome, detail = PASSED, ""
    try:
        show()
    except NotShown as reason:
        outcome, detail = NOT_SHOWN, str(reason)
    except Failed as error:
        outcome, detail = FAILED, str(error)
    except Exception as error:
        told = expected(error)
        if told is None:
            raise
        outcome, detail = FAILED, told
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


def is_sound(results: Sequence[Result]) -> bool:
    """Something was run, and nothing failed."""
    return bool(results) and all(one.outcome != FAILED for one in results)
