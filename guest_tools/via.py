"""Ways to a device by name: `in-process[:BACKEND]`, `vhost-user:PATH`, `pci[:ADDRESS]`.

One row per transport; a row is imported when it is asked for. Each names a function that takes the text after the colon
(empty if there is none) and a device name or None, and returns a Transport or raises errors.Unavailable. Where the
backend is on this side, it takes the backend's options, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Final, NamedTuple

from virtaccel.guest_tools.errors import Unavailable
from virtaccel.guest_tools.transport.base import Transport

NO_OPTIONS: Final[Mapping[str, str]] = MappingProxyType({})


class Via(NamedTuple):
    """Where a transport's opening function is, how its name is written, whether it takes a backend's options."""

    module: str
    function: str
    usage: str
    takes_options: bool = False


VIAS = {
    "in-process": Via("virtaccel.guest_tools.transport.in_process", "open_transport", "in-process[:BACKEND]", True),
    "vhost-user": Via("virtaccel.guest_tools.transport.vhost_user", "open_transport", "vhost-user:PATH"),
    "pci": Via("virtaccel.guest_tools.pci.transport", "open_transport", "pci[:ADDRESS]"),
}


def open_transport(via: str, device: str | None = None, options: Mapping[str, str] = NO_OPTIONS) -> Transport:
    """Open the way called `via` to a device; `device` is a backend's device name or class prefix, None for its choice,
    `options` are the backend's. Raises Unavailable."""
    name, _, argument = via.partition(":")
    row = VIAS.get(name)
    if row is None:
        usages = ", ".join(row.usage for row in VIAS.values())
        raise Unavailable(f"there is no way to a device called {via!r}; use one of {usages}")
    if options and not row.takes_options:
        raise Unavailable("the daemon has its backend already: give --option to vhost-user-accel")
    try:
        # Imported when it is asked for: a guest that lacks the modules of one way still has the others.
        opener: Callable[..., Transport] = getattr(import_module(row.module), row.function)
    except (ImportError, AttributeError) as error:
        raise Unavailable(f"{name} is not available here: {error}") from error
    return opener(argument, device, options) if row.takes_options else opener(argument, device)
