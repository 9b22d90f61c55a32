"""`virtaccel conformance tosa`: Arm's official TOSA conformance suite through a whole device, and a table of results.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from virtaccel.cli.options import Way, device_options, json_option, with_defaults
from virtaccel.guest_tools.errors import Unavailable
from virtaccel.harness.conformance import report
from virtaccel.harness.conformance.judge import Outcome
from virtaccel.harness.conformance.pool import Result, Work, WorkerFailed, run
from virtaccel.harness.conformance.suite import EXTENSIONS, PROFILES, Entry, Selection, obtain, sample
from virtaccel.harness.conformance.tools import find_tools

EXIT_UNSOUND = 1
SECONDS = 120.0
MOST_LINES = 40  # a screen


def _names(given: Sequence[str], known: Sequence[str], what: str) -> frozenset[str]:
    """`all`, `none`, or names, separated by commas or given again. Raises BadParameter."""
    names = {name.strip().lower() for text in given for name in text.split(",") if name.strip()}
    if "all" in names:
        return frozenset(known)
    unknown = names - set(known) - {"none"}
    if unknown:
        raise click.BadParameter(f"no {what} {min(unknown)!r}; there are all, none, {', '.join(known)}")
    return frozenset(names - {"none"})


@click.command()
@click.option("--profile", "profiles", multiple=True, default=["all"], metavar="NAME", help="pro-int, pro-fp or all.")
@click.option(
    "--extension",
    "extensions",
    multiple=True,
    default=["none"],
    metavar="NAME",
    help="none, all, or names: " + ", ".join(EXTENSIONS) + ".",
)
@click.option("--operators", multiple=True, metavar="NAME", help="Only these operators, as in CONV2D,MATMUL.")
@click.option("--only", "substring", metavar="TEXT", help="Only tests whose path contains this.")
@click.option("--sample", "count", type=click.IntRange(1), help="This many, spread over operators and types; fixed.")
@click.option("--jobs", type=click.IntRange(1), help="Worker processes; default is one for each processor.")
@click.option("--cache", type=click.Path(path_type=Path), help="Where suites are kept; default is the user's cache.")
@click.option("--seconds", type=click.FloatRange(1), default=SECONDS, show_default=True, help="Limit for each test.")
@click.option("--at-least", type=click.IntRange(0), default=0, help="Exit 1 if fewer tests than this have passed.")
@click.option("--results", type=click.Path(path_type=Path), help="Write what became of every test there, as JSON.")
@device_options
@json_option
def tosa(
    profiles: tuple[str, ...],
    extensions: tuple[str, ...],
    operators: tuple[str, ...],
    substring: str | None,
    count: int | None,
    jobs: int | None,
    cache: Path | None,
    seconds: float,
    at_least: int,
    results: Path | None,
    way: Way,
    as_json: bool,
) -> None:
    """Run Arm's TOSA conformance suite through a device.

    The suite is generated once and kept. Exit 1 if any answer is wrong, anything crashed, or too few have passed.
    """
    console = Console(stderr=True)
    tools = find_tools()
    selection = Selection(
        _names(profiles, tuple(PROFILES), "profile"),
        _names(extensions, tuple(EXTENSIONS), "extension"),
        frozenset(name.strip().upper() for text in operators for name in text.split(",") if name.strip()),
    )
    jobs = jobs or (os.cpu_count() or 1 if way.via.startswith("in-process") else 1)
    # Workers share the processors; each with as many threads as there are would have them wait for one another.
    threads = {"threads": str(max(1, (os.cpu_count() or 1) // jobs))}
    options = with_defaults(way.via, way.options, threads)
    suite = obtain(selection, tools, cache, jobs, lambda text: console.print(text, highlight=False))
    entries: Sequence[Entry] = [entry for entry in suite.entries if substring is None or substring in entry.path]
    if count is not None:
        entries = sample(entries, count)
    if not entries:
        raise Unavailable("no test is left to run")
    began = time.monotonic()
    found = _run(entries, Work(suite.folder, tools, way.via, way.device, seconds, jobs, options), console)
    _report(found, time.monotonic() - began, results, as_json, console)
    if not report.sound(report.total(report.tallies(found)), at_least):
        raise SystemExit(EXIT_UNSOUND)


def _run(entries: Sequence[Entry], work: Work, console: Console) -> list[Result]:
    """All results, with a progress bar meanwhile, or a line now and then where nobody watches. Raises Unavailable if no
    device can be opened."""
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    columns = (BarColumn(), MofNCompleteColumn(), *times, TextColumn("{task.description}"))
    found: list[Result] = []
    bad = refused = 0
    step = max(1, len(entries) // 20)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(entries))
        try:
            for result in run(entries, work):
                found.append(result)
                refused += result.verdict.outcome == Outcome.REFUSED
                bad += result.verdict.outcome in (Outcome.WRONG, Outcome.CRASHED)
                text = f"{result.entry.operator}  refused {refused}  wrong or crashed {bad}"
                progress.update(task, advance=1, description=text)
                if not console.is_terminal and len(found) % step == 0:
                    console.print(f"{len(found)} of {len(entries)}: {text}", highlight=False)
        except WorkerFailed as error:
            raise Unavailable(str(error)) from error
    return found


def _report(found: list[Result], seconds: float, results: Path | None, as_json: bool, console: Console) -> None:
    if results is not None:
        results.write_text(json.dumps(report.as_json(found, every=True), indent=1))
    if as_json:
        click.echo(json.dumps({**report.as_json(found, every=False), "seconds": round(seconds, 1)}))
        return
    output = Console()
    output.print(report.table(report.tallies(found), report.refusals(found)))
    lines = report.failures(found)
    for line in lines[:MOST_LINES]:
        output.print(line, highlight=False, markup=False)
    if len(lines) > MOST_LINES:
        output.print(f"and {len(lines) - MOST_LINES} more; --results FILE has them all")
    output.print(f"{len(found)} tests in {seconds:.0f} s", highlight=False)
