"""`virtaccel fuzz TARGET` and `virtaccel fuzz replay FILE`."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Final

import click

from virtaccel.cli.options import json_option
from virtaccel.guest_tools.errors import Unavailable
from virtaccel.harness.fuzz import reproducer
from virtaccel.harness.fuzz.engine import MOST_FINDINGS, Limits, attempt
from virtaccel.harness.fuzz.run import Outcome, Plan, Run
from virtaccel.harness.fuzz.targets import TARGETS, make

EXIT_FOUND: Final = 1
SECONDS: Final = 60.0  # where neither --seconds nor --steps is given: long enough for every planted fault of the tests
_TERMINAL_EVERY: Final = 0.5  # a line that is written over
_LINES_EVERY: Final = 15.0  # a line more in a log


class _Progress:
    """One line that is written over on a terminal, a line now and then anywhere else."""

    def __init__(self, target: str, unit: str) -> None:
        self._name, self._unit = target, unit
        self._terminal = sys.stderr.isatty()
        self._every = _TERMINAL_EVERY if self._terminal else _LINES_EVERY
        self._next = time.monotonic() + self._every

    def __call__(self, outcome: Outcome) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._every
        line = f"{_summary(self._name, self._unit, outcome)}, {outcome.inputs:,} inputs"
        click.echo(f"\r{line}\x1b[K" if self._terminal else line, err=True, nl=not self._terminal)

    def end(self) -> None:
        if self._terminal:
            click.echo("\r\x1b[K", err=True, nl=False)


class Targets(click.Group):
    """A subcommand for each target, and `replay`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*TARGETS, "replay"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "replay":
            return replay
        return _command(cmd_name) if cmd_name in TARGETS else None


@click.command(cls=Targets)
def fuzz() -> None:
    """Look for inputs that break a device, or what talks to one.

    Exit status 1 if something was found; each finding is saved as a file for `virtaccel fuzz replay`.
    """


_FOLDER: Final = click.Path(path_type=Path, file_okay=False)
_OPTIONS: Final = (
    click.option("--seconds", type=click.FloatRange(0.1), help="Stop after so long (60, unless --steps)."),
    click.option("--steps", type=click.IntRange(1), help="Stop after so much work."),
    click.option("--seed", type=int, default=0, show_default=True, help="The same seed, the same inputs."),
    click.option("--jobs", type=click.IntRange(1, 64), default=1, show_default=True, help="Processes."),
    click.option("--corpus", type=_FOLDER, help="Inputs to start with; what shows something new is added."),
    click.option("--output", type=_FOLDER, default=Path(), help="Folder for reproducers (default: this one)."),
    click.option("--findings", type=click.IntRange(1), default=MOST_FINDINGS, show_default=True,
                 help="Stop after so many."),
    click.option("--engine", type=click.Choice(["seeded", "atheris"]), default="seeded", show_default=True,
                 help="Who chooses inputs: a seed, or libFuzzer by the code they reach."),
)  # fmt: skip
_VIA: Final = click.option("--via", default="", metavar="WAY", help="Somebody's device, vhost-user:PATH.")


def _command(name: str) -> click.Command:
    def run(engine: str, as_json: bool, seconds: float | None, steps: int | None, findings: int, **plan: Any) -> None:
        limits = Limits(seconds if seconds or steps else SECONDS, steps, findings)
        _run(Plan(name, limits=limits, coverage=engine == "atheris", **plan), as_json)

    row = TARGETS[name]
    options = (*_OPTIONS, _VIA, json_option) if row.elsewhere else (*_OPTIONS, json_option)
    for option in reversed(options):
        run = option(run)
    return click.command(name, help=f"{row.summary[0].upper()}{row.summary[1:]}.")(run)


def _run(plan: Plan, as_json: bool) -> None:
    if plan.coverage and importlib.util.find_spec("atheris") is None:
        raise Unavailable("atheris is not installed: pip install 'virtaccel[fuzz]', or use --engine seeded")
    if plan.via and plan.jobs > 1:
        raise Unavailable("a device elsewhere serves one front end at a time: use --jobs 1")
    unit = TARGETS[plan.target].unit
    progress = _Progress(plan.target, unit)
    outcome = Run(plan, progress).run()
    progress.end()
    if as_json:
        content = {
            "target": plan.target,
            "via": plan.via,
            "engine": "atheris" if plan.coverage else "seeded",
            "seed": plan.seed,
            "jobs": plan.jobs,
            "unit": unit,
            "work": outcome.steps,
            "inputs": outcome.inputs,
            "seconds": round(outcome.seconds, 2),
            "findings": [{"what": saved.what, "file": saved.path} for saved in outcome.findings],
        }
        click.echo(json.dumps(content))
    else:
        for saved in outcome.findings:
            click.echo(f"{saved.what}\n    virtaccel fuzz replay {saved.path}")
        click.echo(_summary(plan.target, unit, outcome))
    if outcome.findings:
        raise SystemExit(EXIT_FOUND)


def _summary(target: str, unit: str, outcome: Outcome) -> str:
    rate = outcome.steps / max(outcome.seconds, 0.001)
    found = f"{len(outcome.findings)} findings" if outcome.findings else "nothing found"
    return f"{target}: {outcome.steps:,} {unit} in {outcome.seconds:.1f} s ({rate:,.0f}/s), {found}"


@click.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--via", default=None, metavar="WAY", help="Another way to a device than the one recorded.")
@click.option("--trace", is_flag=True, help="Show where it went wrong.")
def replay(file: Path, via: str | None, trace: bool) -> None:
    """Run one reproducer. Exit status 1 if it still shows something."""
    saved = reproducer.load(file)
    target = make(saved.target, saved.via if via is None else via)
    _, error = attempt(target, saved.data)
    target.close()
    if error is None:
        click.echo(f"{saved.target}: {len(saved.data)} bytes, nothing wrong (was: {saved.what})")
        return
    click.echo(f"{saved.target}: {type(error).__name__}: {error}")
    if trace:
        click.echo("".join(traceback.format_exception(error)))
    raise SystemExit(EXIT_FOUND)
