"""Results of a benchmark and how they are shown: a table with bars for people, one JSON object for machines.

Knows nothing of what was measured. A `Figure` is a number somebody may rely on, with its bound if there is one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from virtaccel.harness.bench import host
from virtaccel.harness.bench.measure import Timing, in_words

BAR = 24


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was timed, in a lane (in process, over the socket, directly)."""

    what: str
    lane: str
    timing: Timing
    note: str = ""

    def plain(self) -> dict[str, Any]:
        return {"what": self.what, "lane": self.lane, **self.timing.plain(), "note": self.note}


@dataclass(frozen=True, slots=True)
class Figure:
    """A derived number; `bound` is the largest (or, with `at_least`, the smallest) that is good enough."""

    name: str
    value: float
    unit: str = ""
    bound: float | None = None
    at_least: bool = False

    @property
    def holds(self) -> bool:
        if self.bound is None:
            return True
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def plain(self) -> dict[str, Any]:
        return {
            "name": self.name, "value": self.value, "unit": self.unit, "bound": self.bound,
            "at_least": self.at_least, "holds": self.holds,
        }  # fmt: skip


@dataclass(slots=True)
class Report:
    """Everything one subcommand found."""

    command: str
    rows: list[Row] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=host.describe)

    def show(self, as_json: bool, console: Console) -> None:
        if as_json:
            click.echo(json.dumps(self.plain()))
        else:
            self._print(console)

    def plain(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "host": self.machine,
            "rows": [row.plain() for row in self.rows],
            "figures": [figure.plain() for figure in self.figures],
            "notes": self.notes,
        }

    def _print(self, console: Console) -> None:
        console.print(f"virtaccel bench {self.command}", style="bold")
        console.print(host.line(self.machine), markup=False, highlight=False)
        console.print()
        if self.rows:
            console.print(_rows(self.rows))
            console.print()
        if self.figures:
            console.print(_figures(self.figures))
        for note in self.notes:
            console.print(note, markup=False, highlight=False)


def _rows(rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("what", "lane"):
        table.add_column(heading)
    for heading in ("p50", "p99", "min", "times"):
        table.add_column(heading, justify="right")
    table.add_column("p50, longest is full")
    table.add_column("")
    longest = max(row.timing.median for row in rows)
    before = ""
    for row in rows:
        found = row.timing
        times = [in_words(found.median), in_words(found.p99), in_words(found.least), str(found.times)]
        what = row.what if row.what != before else ""
        table.add_row(what, row.lane, *times, bar(found.median / longest), row.note)
        before = row.what
    return table


def bar(share: float) -> str:
    """A bar of eighths of a character, `share` of the full width; anything above nothing is seen."""
    eighths = max(round(share * BAR * 8), 1 if share > 0 else 0)
    return "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")


def _figures(figures: list[Figure]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("bound", justify="right")
    table.add_column("")
    for figure in figures:
        sign = ">=" if figure.at_least else "<="
        bound = "" if figure.bound is None else f"{sign} {figure.bound:g}"
        verdict = "" if figure.bound is None else "holds" if figure.holds else "missed"
        style = "" if figure.holds else "yellow"
        table.add_row(figure.name, f"{figure.value:.3g} {figure.unit}".rstrip(), bound, verdict, style=style)
    return table
