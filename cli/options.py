"""Options that several subcommands share, and opening the accelerator they name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import click
from rich.console import Console

from virtaccel.device import installed
from virtaccel.device.backend import BackendUnavailable
from virtaccel.guest_tools.arrays import accelerator
from virtaccel.guest_tools.arrays.accelerator import Accelerator
from virtaccel.guest_tools.via import VIAS

F = TypeVar("F", bound=Callable[..., Any])

PLAIN_WIDTH = 160
_VIA_HELP = "Way to the device: " + ", ".join(row.usage for row in VIAS.values()) + "."


class Way(NamedTuple):
    """What --via, --device and --option name. `options` are for a backend in this process."""

    via: str
    device: str | None
    options: Mapping[str, str]


def _parse(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
    try:
        return dict(map(installed.parse_option, texts))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


option_option = click.option(
    "--option", "options", multiple=True, metavar="NAME=VALUE", callback=_parse,
    help="Something to tell a backend in this process, once for each; `virtaccel info --backends` lists what there is.",
)  # fmt: skip
device_option = click.option("--device", metavar="NAME", help="The backend's device (CPU, GPU, NPU); else its choice.")


def with_defaults(via: str, options: Mapping[str, str], defaults: Mapping[str, str]) -> Mapping[str, str]:
    """`options`, and `defaults` as far as a backend in this process has such."""
    name, _, backend = via.partition(":")
    if name != "in-process":
        return options
    try:
        return installed.with_defaults(installed.find(backend or installed.DEFAULT), options, defaults)
    except BackendUnavailable:
        return options  # opening it will say so, too


def device_options(function: F) -> F:
    """--via, --device and --option, as the argument `way`."""

    @functools.wraps(function)
    def call(*, via: str, device: str | None, options: dict[str, str], **rest: Any) -> Any:
        found = with_defaults(via, options, installed.from_environment())
        return function(way=Way(via, device, found), **rest)

    via = click.option("--via", default="in-process", show_default=True, metavar="WAY", help=_VIA_HELP)
    return via(device_option(option_option(call)))  # type: ignore[return-value]


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


def open_accelerator(way: Way) -> Accelerator:
    """What --via, --device and --option name. Raises AcceleratorError and TransportError, which the command line shows.
    """
    return accelerator.open(way.via, way.device, options=way.options)


def terminal() -> Console:
    """Where text goes: as wide as the terminal, or wide enough for tables where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)
