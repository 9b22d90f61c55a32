"""The command `virtaccel soak`: options, a progress line, and the tables at the end."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from virtaccel.cli.options import json_option, terminal
from virtaccel.harness.bench import host
from virtaccel.harness.soak.census import MEBIBYTE, Verdict
from virtaccel.harness.soak.runner import Outcome, Plan, Runner

EXIT_FOUND: Final = 1
_LINES_EVERY: Final = 15.0


class _Progress:
    """A line that is written over on a terminal, a line now and then anywhere else."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._next = 0.0
        self._told = 0

    def __call__(self, outcome: Outcome) -> None:
        for finding in outcome.findings[self._told :]:
            self.end()
            click.echo(f"after {outcome.seconds:.0f} s, {finding.kind}: {finding.text}", err=True)
        self._told = len(outcome.findings)
        if outcome.seconds < self._next:
            return
        self._next = outcome.seconds + (0.0 if self._terminal else _LINES_EVERY)
        kills = ", ".join(f"{number} {name}" for name, number in outcome.kills.items())
        line = f"soak: {outcome.seconds:.0f} of {outcome.plan.seconds:.0f} s, killed {kills}, "
        line += f"{outcome.rests} rests, {len(outcome.findings)} findings"
        click.echo(f"\r{line}\x1b[K" if self._terminal else line, err=True, nl=not self._terminal)

    def end(self) -> None:
        if self._terminal:
            click.echo("\r\x1b[K", err=True, nl=False)


@click.command()
@click.option("--seconds", type=click.FloatRange(1.0), default=60.0, show_default=True, help="How long.")
@click.option("--guests", type=click.IntRange(1, 64), default=4, show_default=True, help="Guests at a time.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of random choices, not of their timing.")
@click.option(
    "--socket", "sockets", multiple=True, metavar="PATH",
    help="A socket of a daemon that runs already, once per guest; without, a daemon is started. Its workers are let be "
    "unless --kill-workers.",
)  # fmt: skip
@click.option(
    "--patience", type=click.FloatRange(1.0), default=30.0, show_default=True,
    help="Seconds in which a guest must get something done; else it is stuck.",
)  # fmt: skip
@click.option("--findings", type=click.IntRange(1), default=20, show_default=True, help="Stop after so many.")
@click.option("--kill-guests/--no-kill-guests", default=True, help="Kill guests at random.")
@click.option("--kill-workers/--no-kill-workers", default=None, help="Kill workers and compilers of the daemon.")
@json_option
def soak(
    seconds: float, guests: int, seed: int, sockets: tuple[str, ...], patience: float, kill_guests: bool,
    kill_workers: bool | None, findings: int, as_json: bool,
) -> None:  # fmt: skip
    """Guests with random load, kills and resets: no wrong answer, no stuck guest, nothing that grows.

    Exit status 1 if anything was found, or if it was ended before its time.
    """
    kill = not sockets if kill_workers is None else kill_workers
    progress = _Progress()
    plan = Plan(seconds, len(sockets) or guests, seed, sockets, patience, kill_guests, kill, findings)
    # SIGTERM ends it as Ctrl-C does: tables at once, no process left behind.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        outcome = Runner(plan, progress).run()
    finally:
        signal.signal(signal.SIGTERM, before)
    progress.end()
    if as_json:
        click.echo(json.dumps(plain(outcome)))
    else:
        _show(outcome, terminal())
    if outcome.findings or outcome.seconds < seconds:
        raise SystemExit(EXIT_FOUND)


def plain(outcome: Outcome) -> dict[str, Any]:
    """Everything as plain values."""
    return {
        "plan": asdict(outcome.plan),
        "host": host.describe(),
        "seconds": round(outcome.seconds, 1),
        "counts": outcome.counts,
        "kills": outcome.kills,
        "rests": outcome.rests,
        "peaks": {name: found._asdict() for name, found in outcome.peaks.items()},
        "at_rest": {
            name: [{"at": round(count.at, 1), **count.holding._asdict()} for count in counts]
            for name, counts in outcome.series.items()
        },
        "verdicts": [{**verdict._asdict(), "holds": verdict.holds} for verdict in outcome.verdicts],
        "findings": [finding._asdict() for finding in outcome.findings],
        "notes": outcome.notes,
    }


def _show(outcome: Outcome, console: Console) -> None:
    plan = outcome.plan
    console.print(f"virtaccel soak, {outcome.seconds:.0f} s, {plan.guests} guests, seed {plan.seed}", style="bold")
    console.print(host.line(host.describe()), markup=False, highlight=False)
    console.print()
    numbers = Table(box=None, pad_edge=False, show_header=False)
    numbers.add_column()
    numbers.add_column(justify="right")
    for name, number in (*outcome.counts.items(), *((f"killed {name}", n) for name, n in outcome.kills.items())):
        numbers.add_row(name, f"{number:,}")
    console.print(numbers)
    console.print()
    if outcome.verdicts:
        console.print(_holdings(outcome))
    for note in outcome.notes:
        console.print(note, markup=False, highlight=False)
    for finding in outcome.findings:
        console.print(f"{finding.kind}: {finding.text}", style="red", markup=False, highlight=False)
    found = f"{len(outcome.findings)} findings" if outcome.findings else "nothing found"
    early = f", ended {plan.seconds - outcome.seconds:.0f} s early" if outcome.seconds < plan.seconds else ""
    console.print(found + early, style="bold")


def _holdings(outcome: Outcome) -> Table:
    table = Table(box=None, pad_edge=False, title="at rest, after the warm-up", title_justify="left")
    for heading in ("process", "holds"):
        table.add_column(heading)
    for heading in ("rests", "first", "last", "most", "under load", "rise", "bound"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for verdict in outcome.verdicts:
        peak = outcome.peaks.get(verdict.process)
        loaded = "" if peak is None else _spell(verdict, getattr(peak, verdict.what))
        values = [_spell(verdict, value) for value in (verdict.first, verdict.last, verdict.most)]
        limits = [_spell(verdict, value) for value in (verdict.rise, verdict.bound)]
        word = "flat" if verdict.holds else "grows"
        style = "" if verdict.holds else "red"
        table.add_row(verdict.process, verdict.what, str(verdict.rests), *values, loaded, *limits, word, style=style)
    return table


def _spell(verdict: Verdict, value: float) -> str:
    if verdict.what == "memory":
        return f"{value / MEBIBYTE:.1f} MiB"
    return f"{value:.1f}" if isinstance(value, float) else str(value)
