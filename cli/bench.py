"""The command `virtaccel bench`: options of its subcommands; what is measured is in a module for each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from virtaccel.cli.options import json_option, terminal
from virtaccel.harness.bench.report import Report

F = TypeVar("F", bound=Callable[..., Any])
EXIT_MISSED = 1


def _common(function: F) -> F:
    device = click.option("--device", metavar="NAME", help="The backend's device (CPU, GPU, NPU); else its choice.")
    check = click.option("--check", is_flag=True, help=f"Exit with {EXIT_MISSED} if a figure misses its bound.")
    return device(check(json_option(function)))


def _rounds(default: int) -> Callable[[F], F]:
    return click.option(
        "--rounds", type=click.IntRange(1), default=default, show_default=True, help="Times each thing is measured."
    )


_socket_option = click.option(
    "--socket/--no-socket", default=True, help="Also over vhost-user, with daemons of its own."
)


def _finish(report: Report, as_json: bool, check: bool) -> None:
    report.show(as_json, terminal())
    if check and not all(figure.holds for figure in report.figures):
        raise click.exceptions.Exit(EXIT_MISSED)


@click.group()
def bench() -> None:
    """What the device costs, against the same work done directly in the same run."""


@bench.command()
@_rounds(60)
@_socket_option
@click.option("--poll-us", default=200, show_default=True, help="For the lane that polls instead of sleeping.")
@_common
def commands(rounds: int, socket: bool, poll_us: int, device: str | None, check: bool, as_json: bool) -> None:
    """A round trip of every command, and a small program from submission to completion."""
    from virtaccel.harness.bench import commands as work

    _finish(work.measure(rounds, socket, device, poll_us), as_json, check)


@bench.command()
@click.argument("models", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--against", default="direct", show_default=True, metavar="direct|tflite|FILE.tflite",
    help="OpenVINO on the device's own compiled model, or OpenVINO's reader on the original file (tflite: fetched).",
)  # fmt: skip
@_rounds(150)
@_common
def model(
    models: tuple[Path, ...], against: str, rounds: int, device: str | None, check: bool, as_json: bool
) -> None:
    """MODELS (.tosa) through the device, or their lowered graphs, against OpenVINO called directly."""
    from virtaccel.harness.bench import model as work

    _finish(work.measure(models, against, rounds, device), as_json, check)


@bench.command()
@_rounds(200)
@_socket_option
@_common
def transfer(rounds: int, socket: bool, device: str | None, check: bool, as_json: bool) -> None:
    """WRITE_BUFFER and READ_BUFFER of several sizes against a copy in memory."""
    from virtaccel.harness.bench import transfer as work

    _finish(work.measure(rounds, socket, device), as_json, check)


@bench.command()
@click.argument("models", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_rounds(7)
@_common
def load(models: tuple[Path, ...], rounds: int, device: str | None, check: bool, as_json: bool) -> None:
    """LOAD_PROGRAM of MODELS (.tosa), first and again, against compiling the lowered graph alone."""
    from virtaccel.harness.bench import load as work

    _finish(work.measure(models, rounds, device), as_json, check)


@bench.command()
@_rounds(300)
@_common
def scale(rounds: int, device: str | None, check: bool, as_json: bool) -> None:
    """Whether a command costs the same beside a thousand live objects, and what many bindings cost."""
    from virtaccel.harness.bench import scale as work

    _finish(work.measure(rounds, device), as_json, check)
