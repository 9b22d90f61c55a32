"""Options that several subcommands share, and opening the accelerator they name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from rich.console import Console

from virtaccel.guest_tools.arrays import accelerator
from virtaccel.guest_tools.arrays.accelerator import Accelerator
from virtaccel.guest_tools.via import VIAS

F = TypeVar("F", bound=Callable[..., Any])

PLAIN_WIDTH = 160
_VIA_HELP = "Way to the device: " + ", ".join(row.usage for row in VIAS.values()) + "."


def device_options(function: F) -> F:
    """--via and --device."""
    device = click.option("--device", metavar="NAME", help="The backend's device (CPU, GPU, NPU); else its choice.")
    via = click.option("--via", default="in-process", show_default=True, metavar="WAY", help=_VIA_HELP)
    return via(device(function))


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


def open_accelerator(via: str, device: str | None) -> Accelerator:
    """What --via and --device name. Raises AcceleratorError and TransportError, which the command line shows."""
    return accelerator.open(via, device)


def terminal() -> Console:
    """Where text goes: as wide as the terminal, or wide enough for tables where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)
