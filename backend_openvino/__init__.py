"""Runs TOSA programs on OpenVINO in the device's own buffers. The runtime is imported when a backend is opened."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from virtaccel.device.backend import NO_OPTIONS, Backend, BackendUnavailable, Option, option_values

if TYPE_CHECKING:
    from virtaccel.processes.fork_server import Run

_REPORTS_HOME = "openvino.tools.ovc"
"""Part of the runtime's package that it imports at once: converts models, which nothing here needs, takes half of the
import's time, and starts a thread that reports the import to the vendor over the network."""

OPTIONS: Final = (
    Option("threads", "processors that one guest's inference may use at a time; 0 is all", "0"),
    Option("prefer", "latency, or throughput: always run submissions side by side", "latency"),
    Option("compile", "here, or sandbox: programs for the CPU are compiled in processes of their own", "here"),
    Option("compile-seconds", "longest that compiling in a sandbox may take", "60"),
    # A compiler takes a few hundred MiB for the largest models seen; what needs ten times that has gone astray.
    Option("compile-memory", "bytes that compiling in a sandbox may need", str(4 << 30)),
    Option("model-cache", "folder where compiled models are kept; none unless named"),
    Option("model-cache-bytes", "most bytes in that folder", str(1 << 30)),
)
_WORDS: Final = {"prefer": ("latency", "throughput"), "compile": ("here", "sandbox")}
_WHOLE_NUMBERS: Final = ("threads", "compile-memory", "model-cache-bytes")


def preload() -> None:
    """Import everything, start no thread and open no device. Raises ImportError."""
    wanted = "openvino" not in sys.modules and _REPORTS_HOME not in sys.modules
    if wanted:
        sys.modules[_REPORTS_HOME] = None  # type: ignore[assignment]  # an import of it fails, which is provided for
    try:
        import virtaccel.backend_openvino.backend
        import virtaccel.backend_openvino.sandbox  # noqa: F401
    finally:
        if wanted:
            del sys.modules[_REPORTS_HOME]


def prepare(words: Sequence[str]) -> Run:
    """For a fork server of sandboxes, on the device `words[0]` (processes.fork_server)."""
    preload()
    from virtaccel.backend_openvino import sandbox

    return sandbox.prepare(words[0])


def _values(options: Mapping[str, str]) -> dict[str, str]:
    """A sensible value of each option. Raises BackendUnavailable."""
    values = option_values("openvino", OPTIONS, options)
    for name, words in _WORDS.items():
        if values[name] not in words:
            raise BackendUnavailable(f"option {name} is {values[name]!r}, neither {' nor '.join(map(repr, words))}")
    for name in _WHOLE_NUMBERS:
        if not values[name].isdecimal():
            raise BackendUnavailable(f"option {name} is {values[name]!r}, not a number")
    return values


def open_backend(device: str | None = None, options: Mapping[str, str] = NO_OPTIONS) -> Backend:
    """A fresh instance on the named device or class (CPU, GPU, GPU.1, NPU), None for the first that computes in FP32.
    Raises BackendUnavailable."""
    values = _values(options)
    try:
        preload()
    except ImportError as error:
        if error.name is None or not error.name.startswith("openvino"):
            raise
        message = f"the OpenVINO runtime is missing ({error}); install the package 'openvino'"
        raise BackendUnavailable(message) from error
    from virtaccel.backend_openvino import sandbox
    from virtaccel.backend_openvino.backend import OpenVinoBackend
    from virtaccel.backend_openvino.compile import Tuning, choose
    from virtaccel.backend_openvino.store import Store

    tuning = Tuning(int(values["threads"]), values["prefer"] == "throughput")
    bounds = sandbox.Bounds.of(values["compile-seconds"], values["compile-memory"])
    folder = values["model-cache"]
    try:
        store = Store(Path(folder).expanduser(), int(values["model-cache-bytes"])) if folder else None
    except OSError as error:
        raise BackendUnavailable(f"no models can be kept: {error}") from error
    # Before a device is opened, which starts threads: where there are none yet the sandbox's fork server is a mere
    # fork.
    compiler = sandbox.sandbox(bounds) if values["compile"] == "sandbox" else None
    chosen = choose(device)
    return OpenVinoBackend(chosen, tuning, compiler if chosen == sandbox.DEVICE else None, store)
