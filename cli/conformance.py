"""`virtaccel conformance`: suites that hold a device to the standards, each imported only when it is used; and what
the suites of cases have in common on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from virtaccel.harness.conformance import outcome
from virtaccel.harness.conformance.outcome import Result
from virtaccel.harness.oracle.programs import SAMPLES, TOSA_FORMAT, UNBOUNDED, Sample

EXIT_FAILED: Final = 1
F = TypeVar("F", bound=Callable[..., Any])
SUITES = {
    "tosa": ("virtaccel.cli.conformance_tosa", "Arm's official TOSA suite through a whole device."),
    "protocol": (
        "virtaccel.cli.conformance_protocol",
        "The protocol's own cases, hostile ones too, against any device.",
    ),
    "backend": ("virtaccel.cli.conformance_backend", "The backend contract, for people who write backends."),
}
"""Module (with a click command under the suite's name) and one line."""


class Suites(click.Group):
    """Subcommands from the table."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUITES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        row = SUITES.get(cmd_name)
        if row is None:
            return None
        command = getattr(import_module(row[0]), cmd_name)
        assert isinstance(command, click.Command), f"{row[0]} has no command {cmd_name}"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Suites"):
            formatter.write_dl([(name, summary) for name, (_, summary) in SUITES.items()])


@click.command(cls=Suites)
def conformance() -> None:
    """Hold a device to the standards."""


# The suites of cases


def case_options(function: F) -> F:
    """--only, and a program of the user's own."""
    options = (
        click.option("--only", default="", metavar="TEXT", help="Only cases whose name contains this: VQ-006, BC-07."),
        click.option("--artifact", type=click.Path(path_type=Path, exists=True, dir_okay=False),
                     help="A program that copies its one input (slot 0) to its one output (slot 1)."),
        click.option("--artifact-format", type=int, default=TOSA_FORMAT, show_default=True, help="Its format number."),
        # What cases bind is 64 bytes long.
        click.option("--artifact-bytes", type=click.IntRange(1, 64), default=16, show_default=True,
                     help="Bytes of each slot."),
    )  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


def samples(
    artifact: Path | None, format_id: int, size: int, target: tuple[int, ...] = (0,) * 12
) -> tuple[Sample, ...]:
    """Programs to try, the user's own first."""
    if artifact is None:
        return SAMPLES
    return Sample(artifact.name, format_id, target, artifact.read_bytes(), UNBOUNDED, size, 0), *SAMPLES


def show(results: Iterable[Result], as_json: bool, **head: str) -> None:
    """Cases as they come, or one object with `head` at its beginning. Ends the program with 1 if one failed."""
    seen = []
    for result in results:
        seen.append(result)
        if not as_json:
            click.echo(outcome.line(result))
    content = outcome.as_json(seen)
    counts = ", ".join(f"{count} {kind}" for kind, count in content["counts"].items())
    click.echo(json.dumps({**head, **content}) if as_json else counts)
    if not outcome.is_sound(seen):
        raise SystemExit(EXIT_FAILED)
