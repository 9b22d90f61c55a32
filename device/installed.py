"""Backends by name: those of installed distributions, and any function as MODULE:FUNCTION; and their options.

Knows the entry points (group `virtaccel.backends`, each a function as in backend.OpenBackend) and which environment
variables stand for options. Only command lines read those; a backend is told everything by argument. Knows nothing of
what a backend does, and imports none until it is asked for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Final, cast

from virtaccel.device.backend import ANY_OPTION, BackendUnavailable, OpenBackend, Option

GROUP: Final = "virtaccel.backends"
DEFAULT: Final = "openvino"
VARIABLES: Final = {
    "backend": "VIRTACCEL_ISOLATED",
    "threads": "VIRTACCEL_THREADS",
    "prefer": "VIRTACCEL_HINT",
    "compile": "VIRTACCEL_COMPILE",
    "compile-seconds": "VIRTACCEL_COMPILE_SECONDS",
    "compile-memory": "VIRTACCEL_COMPILE_MEMORY",
    "model-cache": "VIRTACCEL_MODEL_CACHE",
    "model-cache-bytes": "VIRTACCEL_MODEL_CACHE_BYTES",
}
"""Options that an environment variable may give, too."""


def names() -> list[str]:
    """Backends that are installed, without importing any."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def require(name: str) -> None:
    """Raises BackendUnavailable if no backend goes by that name. Imports nothing, as MODULE:FUNCTION may be wrong."""
    if ":" not in name and name not in names():
        raise BackendUnavailable(f"no backend is called {name}; installed: {', '.join(names()) or 'none'}")


def find(name: str) -> OpenBackend:
    """How to open the backend of that name, or MODULE:FUNCTION. Raises BackendUnavailable."""
    require(name)
    try:
        if ":" in name:
            module, _, function = name.partition(":")
            return cast(OpenBackend, getattr(import_module(module), function))
        [entry, *_] = entry_points(group=GROUP, name=name)
        return cast(OpenBackend, entry.load())
    except (ImportError, AttributeError) as error:
        raise BackendUnavailable(f"backend {name} cannot be loaded: {error}; install what it needs") from error


def options_of(opener: OpenBackend) -> tuple[Option, ...]:
    """What a backend's module says of its options, in OPTIONS beside the function that opens it."""
    return tuple(getattr(sys.modules[opener.__module__], "OPTIONS", ()))


def with_defaults(opener: OpenBackend, given: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """What was asked for, and `defaults` as far as the backend knows such options."""
    known = {option.name for option in options_of(opener)}
    return {name: value for name, value in defaults.items() if known & {name, ANY_OPTION}} | dict(given)


def from_environment() -> dict[str, str]:
    """Options that environment variables give: for command lines, to be used as defaults."""
    return {name: os.environ[variable] for name, variable in VARIABLES.items() if os.environ.get(variable)}


def parse_option(text: str) -> tuple[str, str]:
    """NAME=VALUE as it is typed. Raises ValueError."""
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise ValueError(f"{text!r} is not NAME=VALUE")
    return name, value
