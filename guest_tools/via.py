"""Ways to a device by name: `in-process[:BACKEND]`, `vhost-user:PATH`, `pci[:ADDRESS]`.

One row per transport; a row is imported when it is asked for. Each names a function that takes the text after the colon
(empty if there is none) and a device name or None, and returns a Transport or raises errors.Unavailable.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple, TypeAlias, cast

from virtaccel.guest_tools.errors import Unavailable
from virtaccel.guest_tools.transport.base import Transport

OpenTransport: TypeAlias = Callable[[str, str | None], Transport]


class Via(NamedTuple):
    """Where a transport's opening function is, and how its name is written."""

    module: str
    function: str
    usage: str


VIAS = {
    "in-process": Via("virtaccel.guest_tools.transport.in_process", "open_transport", "in-process[:BACKEND]"),
    "vhost-user": Via("virtaccel.guest_tools.transport.vhost_user", "open_transport", "vhost-user:PATH"),
    "pci": Via("virtaccel.guest_tools.pci.transport", "open_transport", "pci[:ADDRESS]"),
}


def open_transport(via: str, device: str | None = None) -> Transport:
    """Open the way called `via` to a device; `device` is a backend's device name or class prefix, None for its choice.
    Raises Unavailable."""
    name, _, argument = via.partition(":")
    row = VIAS.get(name)
    if row is None:
        usages = ", ".join(row.usage for row in VIAS.values())
        raise Unavailable(f"there is no way to a device called {via!r}; use one of {usages}")
    try:
        opener = getattr(import_module(row.module), row.function)
    except (ImportError, AttributeError) as error:
        raise Unavailable(f"{name} is not available here: {error}") from error
    return cast(OpenTransport, opener)(argument, device)
