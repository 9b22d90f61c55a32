"""`virtaccel fuzz TARGET` and `virtaccel fuzz replay FILE`."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import click

from virtaccel.guest_tools.errors import Unavailable
from virtaccel.harness.fuzz import reproducer
from virtaccel.harness.fuzz.engine import Limits, attempt
from virtaccel.harness.fuzz.run import Outcome, Plan, Run
from virtaccel.harness.fuzz.targets import TARGETS, make

EXIT_FOUND: Final = 1
_TERMINAL_EVERY: Final = 0.5
_LINES_EVERY: Final = 15.0


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
        rate = outcome.steps / max(outcome.seconds, 0.001)
        line = (
            f"{self._name}: {outcome.steps:,} {self._unit} in {outcome.seconds:.0f} s ({rate:,.0f}/s), "
            f"{outcome.inputs:,} inputs, {len(outcome.findings)} findings"
        )
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


def _command(name: str) -> click.Command:
    row = TARGETS[name]
    options: list[click.Parameter] = [
        click.Option(["--seconds"], type=click.FloatRange(0.1), help="Stop after so long (60, unless --steps)."),
        click.Option(["--steps"], type=click.IntRange(1), help="Stop after so much work."),
        click.Option(["--seed"], type=int, default=0, show_default=True, help="The same seed, the same inputs."),
        click.Option(["--jobs"], type=click.IntRange(1, 64), default=1, show_default=True, help="Processes."),
        click.Option(["--corpus"], type=click.Path(path_type=Path, file_okay=False), help="Inputs to start with; what "
                     "shows something new is added."),
        click.Option(["--output"], type=click.Path(path_type=Path, file_okay=False), default=Path(),
                     help="Folder for reproducers (default: this one)."),
        click.Option(["--findings"], type=click.IntRange(1), default=20, show_default=True, help="Stop after so many."),
        click.Option(["--engine"], type=click.Choice(["seeded", "atheris"]), default="seeded", show_default=True,
                     help="Who chooses inputs: our own engine, or libFuzzer by the code they reach."),
    ]  # fmt: skip
    if row.elsewhere:
        options.append(click.Option(["--via"], default="", metavar="WAY", help="Somebody's device, vhost-user:PATH."))
    options.append(click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object instead of text."))
    return click.Command(name, params=options, callback=_run(name), help=f"{row.summary[0].upper()}{row.summary[1:]}.")


def _run(name: str) -> Any:
    def run(
        seconds: float | None, steps: int | None, seed: int, jobs: int, corpus: Path | None, output: Path,
        findings: int, engine: str, as_json: bool, via: str = "",
    ) -> None:  # fmt: skip
        if engine == "atheris" and importlib.util.find_spec("atheris") is None:
            raise Unavailable("atheris is not installed: pip install 'virtaccel[fuzz]', or use --engine seeded")
        if via and jobs > 1:
            raise Unavailable("a device elsewhere serves one front end at a time: use --jobs 1")
        limits = Limits(seconds if seconds or steps else 60.0, steps, findings)
        plan = Plan(name, via, seed, jobs, limits, corpus, output, engine == "atheris")
        unit = _unit(name)
        progress = _Progress(name, unit)
        outcome = Run(plan, progress).run()
        progress.end()
        _report(plan, outcome, unit, engine, as_json)
        if outcome.findings:
            raise SystemExit(EXIT_FOUND)

    return run


def _unit(name: str) -> str:
    return {"session": "steps", "vhost": "messages"}.get(name, "inputs")


def _report(plan: Plan, outcome: Outcome, unit: str, engine: str, as_json: bool) -> None:
    if as_json:
        content = {
            "target": plan.target,
            "via": plan.via,
            "engine": engine,
            "seed": plan.seed,
            "jobs": plan.jobs,
            "unit": unit,
            "work": outcome.steps,
            "inputs": outcome.inputs,
            "seconds": round(outcome.seconds, 2),
            "findings": [{"what": saved.what, "file": saved.path} for saved in outcome.findings],
        }
        click.echo(json.dumps(content))
        return
    for saved in outcome.findings:
        click.echo(f"{saved.what}\n    virtaccel fuzz replay {saved.path}")
    rate = outcome.steps / max(outcome.seconds, 0.001)
    found = f"{len(outcome.findings)} findings" if outcome.findings else "nothing found"
    click.echo(f"{plan.target}: {outcome.steps:,} {unit} in {outcome.seconds:.1f} s ({rate:,.0f}/s), {found}")


@click.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--via", default=None, metavar="WAY", help="Another way to a device than the one recorded.")
@click.option("--trace", is_flag=True, help="Show where it went wrong.")
def replay(file: Path, via: str | None, trace: bool) -> None:
    """Run one reproducer. Exit status 1 if it still shows something."""
    import traceback

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
