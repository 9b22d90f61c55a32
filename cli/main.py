"""The command line `virtaccel`: a table of subcommands, each imported only when it is used.

Knows how failures reach people: one line on standard error that says what is wrong and what to do, exit status 2, never
a traceback. A subcommand that compares something exits 1 if it does not match.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import Any, NamedTuple

import click

from virtaccel import __version__
from virtaccel.device.backend import BackendUnavailable
from virtaccel.guest_tools.client import ClientError
from virtaccel.guest_tools.errors import AcceleratorError
from virtaccel.guest_tools.transport.base import Backpressure, TransportError

EXIT_BAD_INPUT = 2


class Command(NamedTuple):
    """Module of a subcommand (it has a click command under the subcommand's name, dashes as underscores), one line."""

    module: str
    summary: str


COMMANDS = {
    "info": Command("virtaccel.cli.info", "What a device is, can do and allows."),
    "inspect": Command("virtaccel.cli.inspect", "What is in a model, and what a device says of it."),
    "run": Command("virtaccel.cli.run", "Run a model on arrays, or check it against known answers."),
    "operators": Command("virtaccel.cli.operators", "Which TOSA operators the backend runs, and how."),
    "conformance": Command("virtaccel.cli.conformance", "Hold a device to the standards."),
    "fuzz": Command("virtaccel.cli.fuzz", "Look for inputs that break a device."),
    "soak": Command("virtaccel.cli.soak", "Guests with random load, kills and resets, for hours."),
    "bench": Command("virtaccel.cli.bench", "What the device costs, against the same work done directly."),
    "vm": Command("virtaccel.cli.vm", "A virtual machine with the device in it."),
}


class OneLine(click.ClickException):
    """A failure as people see it."""

    exit_code = EXIT_BAD_INPUT

    def show(self, file: Any = None) -> None:
        click.echo(f"virtaccel: {self.format_message()}", file=file or sys.stderr)


class Subcommands(click.Group):
    """Commands from the table."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        row = COMMANDS.get(cmd_name)
        if row is None:
            return None
        command = getattr(import_module(row.module), cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command), f"{row.module} has no command {cmd_name}"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # From the table, so that `--help` imports nothing.
        with formatter.section("Commands"):
            formatter.write_dl([(name, row.summary) for name, row in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (AcceleratorError, BackendUnavailable, ClientError, TransportError, Backpressure, OSError) as error:
            raise OneLine(str(error)) from error


@click.command(cls=Subcommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="virtaccel")
@click.option("-v", "--verbose", count=True, help="Say more: once for what the device logs, twice for everything.")
def main(verbose: int) -> None:
    """A virtio-accel device and its tools: TOSA programs, run on OpenVINO."""
    level = (logging.ERROR, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    handler = logging.StreamHandler()
    handler.setLevel(level)  # here, not on a logger: loggers keep what a refusal's reason is taken from
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
