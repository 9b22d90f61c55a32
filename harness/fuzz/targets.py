"""What can be fuzzed, by name. A row is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple, cast

from virtaccel.guest_tools.errors import Unavailable
from virtaccel.harness.fuzz.target import TargetBase


class Row(NamedTuple):
    """Module and class of a target; one line; what its work is counted in; whether it may be pointed at somebody else's
    device."""

    module: str
    maker: str
    summary: str
    unit: str = "inputs"
    elsewhere: bool = False


TARGETS = {
    "ring": Row("ring", "RingTarget", "descriptor tables and index games against the device's ring"),
    "frame": Row("frame", "FrameTarget", "request bytes against the engine, compared with the oracle"),
    "session": Row("session", "SessionTarget", "command sequences with backend faults, against a model", "steps", True),
    "vhost": Row("vhost", "VhostTarget", "vhost-user messages with descriptors over a real socket", "messages", True),
    "tosa": Row("tosa", "TosaTarget", "TOSA files against reader, validator and lowering"),
    "device": Row("hostile_device", "DeviceTarget", "a hostile device against the guest's client and driver"),
}


def make(name: str, via: str = "") -> TargetBase:
    """A target by its name here, or MODULE:CLASS for one of somebody's own; `via` is the way to a device for those that
    may be pointed elsewhere, empty for this process. Raises Unavailable."""
    if ":" in name:
        module, _, maker = name.partition(":")
        return cast(TargetBase, getattr(import_module(module), maker)())
    row = TARGETS.get(name)
    if row is None:
        raise Unavailable(f"there is no target called {name!r}; there are {', '.join(TARGETS)}")
    if via and not row.elsewhere:
        ways = " and ".join(name for name, row in TARGETS.items() if row.elsewhere)
        raise Unavailable(f"{name} runs in this process only; --via is for {ways}")
    maker = getattr(import_module(f"virtaccel.harness.fuzz.{row.module}"), row.maker)
    return cast(TargetBase, cast(Callable[..., object], maker)(via) if row.elsewhere else maker())
