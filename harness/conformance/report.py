"""Results of a conformance run as people and programs read them: a table by operator, and one JSON object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich.markup import escape
from rich.table import Table

from virtaccel.harness.conformance.judge import Outcome
from virtaccel.harness.conformance.pool import Result

COLUMNS = tuple(Outcome)
_STYLES = {Outcome.PASSED: "green", Outcome.REFUSED: "yellow", Outcome.WRONG: "bold red", Outcome.CRASHED: "bold red"}
_REASON_WIDTH = 300  # a runtime's own words can be pages
_SHORT_REASON = 60  # what is left of a terminal's width beside the counts


class Tally(NamedTuple):
    """Counts by outcome for one operator."""

    operator: str
    counts: Counter[Outcome]

    @property
    def total(self) -> int:
        return self.counts.total()


def tallies(results: Iterable[Result]) -> list[Tally]:
    """One row an operator, in order of name."""
    counts: dict[str, Counter[Outcome]] = {}
    for result in results:
        counts.setdefault(result.entry.operator, Counter())[result.verdict.outcome] += 1
    return [Tally(name, counts[name]) for name in sorted(counts)]


def total(rows: Iterable[Tally]) -> Tally:
    return Tally("total", sum((row.counts for row in rows), Counter[Outcome]()))


def sound(summary: Tally, at_least: int) -> bool:
    """Nothing wrong, nothing crashed, and as many passed as are asked for."""
    counts = summary.counts
    return not counts[Outcome.WRONG] and not counts[Outcome.CRASHED] and counts[Outcome.PASSED] >= at_least


def table(rows: Sequence[Tally], reasons: dict[str, Counter[str]]) -> Table:
    """Operators with their counts, and the commonest reason for what the device refuses."""
    shown = Table(box=None, pad_edge=False)
    shown.add_column("operator", no_wrap=True)
    for outcome in COLUMNS:
        shown.add_column(outcome.value, justify="right", no_wrap=True)
    shown.add_column("total", justify="right", no_wrap=True)
    shown.add_column("refused because, mostly", overflow="fold")
    for row in [*rows, total(rows)]:
        cells = [_cell(outcome, row.counts[outcome]) for outcome in COLUMNS]
        common = reasons.get(row.operator, Counter()).most_common(1)
        reason = common[0][0].removeprefix(f"{row.operator}: ")[:_SHORT_REASON] if common else ""
        shown.add_row(row.operator, *cells, str(row.total), escape(reason))
    return shown


def _cell(outcome: Outcome, count: int) -> str:
    return f"[{_STYLES[outcome]}]{count}[/]" if count else "0"


def refusals(results: Iterable[Result]) -> dict[str, Counter[str]]:
    """Reasons for refusing, by operator."""
    found: dict[str, Counter[str]] = {}
    for result in results:
        if result.verdict.outcome == Outcome.REFUSED:
            found.setdefault(result.entry.operator, Counter())[result.verdict.reason] += 1
    return found


def failures(results: Iterable[Result]) -> list[str]:
    """A line for every test that is wrong or crashed, in order of path."""
    bad = [result for result in results if result.verdict.outcome in (Outcome.WRONG, Outcome.CRASHED)]
    return [
        f"{result.verdict.outcome.value}: {result.entry.path}: {result.verdict.reason[:_REASON_WIDTH]}"
        for result in sorted(bad, key=lambda result: result.entry.path)
    ]


def as_json(results: Sequence[Result], every: bool) -> dict[str, Any]:
    """Counts by operator and in all, and the tests that did not pass with their reasons (`every`: all tests)."""
    rows = tallies(results)
    kept = [result for result in results if every or result.verdict.outcome != Outcome.PASSED]
    return {
        "total": _counts(total(rows)),
        "operators": {row.operator: _counts(row) for row in rows},
        "tests": [
            {
                "test": result.entry.path,
                "operator": result.entry.operator,
                "types": result.entry.types,
                "outcome": result.verdict.outcome.value,
                "reason": result.verdict.reason,
                "seconds": round(result.seconds, 3),
            }
            for result in sorted(kept, key=lambda result: result.entry.path)
        ],
    }


def _counts(row: Tally) -> dict[str, int]:
    return {**{outcome.value: row.counts[outcome] for outcome in COLUMNS}, "total": row.total}
