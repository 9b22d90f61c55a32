"""`virtaccel conformance`: suites that hold a device to the standards, each imported only when it is used."""

from __future__ import annotations

from importlib import import_module

import click

SUITES = {
    "tosa": ("virtaccel.cli.conformance_tosa", "Arm's official TOSA suite through a whole device."),
    "protocol": (
        "virtaccel.cli.conformance_protocol", "The protocol's own cases, hostile ones too, against any device."
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
