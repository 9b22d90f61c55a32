"""The machine a figure was taken on: processor, versions, and how busy it was."""

from __future__ import annotations

import os
import platform
from collections import namedtuple
from importlib.metadata import PackageNotFoundError, version
from timeit import repeat
from typing import Any

from virtaccel import __version__

_PACKAGES = ("openvino", "numpy")
_Pair = namedtuple("_Pair", "first second")


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def interpreter_speed() -> float:
    """Nanoseconds that a NamedTuple of two fields takes to make, at best: other machines compare by this."""
    number = 10_000
    return min(repeat(lambda: _Pair(1, 2), number=number, repeat=10)) / number * 1e9


def describe() -> dict[str, Any]:
    """Plain values for the header and for JSON."""
    return {
        "virtaccel": __version__,
        "processor": _processor(),
        "processors": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
        "load": round(os.getloadavg()[0], 2),
        "named_tuple_ns": round(interpreter_speed(), 1),
    }


def line(host: dict[str, Any]) -> str:
    """The same for people."""
    return (
        f"{host['processor']}, {host['processors']} processors, load {host['load']}; Python {host['python']}, "
        f"OpenVINO {host['openvino']}, virtaccel {host['virtaccel']}; a NamedTuple takes {host['named_tuple_ns']} ns"
    )
