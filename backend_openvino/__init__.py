"""Runs TOSA programs on OpenVINO in the device's own buffers. The runtime is imported when a backend is opened."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from virtaccel.device.backend import Backend, BackendUnavailable

if TYPE_CHECKING:
    from virtaccel.processes.fork_server import Run

_REPORTS_HOME = "openvino.tools.ovc"
"""Part of the runtime's package that it imports at once: converts models, which nothing here needs, takes half of the
import's time, and starts a thread that reports the import to the vendor over the network."""


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


def open_backend(device: str | None = None) -> Backend:
    """A fresh instance on the named device or class (CPU, GPU, GPU.1, NPU), None for the first that computes in FP32.

    VIRTACCEL_THREADS bounds the inference threads, VIRTACCEL_HINT=throughput prefers throughput over latency,
    VIRTACCEL_COMPILE=sandbox compiles programs for the CPU in processes of their own (sandbox.py);
    VIRTACCEL_MODEL_CACHE names a folder where compiled models are kept (store.py). Raises BackendUnavailable.
    """
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

    threads = os.environ.get("VIRTACCEL_THREADS", "0")
    if not threads.isdecimal():
        raise BackendUnavailable(f"VIRTACCEL_THREADS is {threads!r}, not a number")
    tuning = Tuning(int(threads), os.environ.get("VIRTACCEL_HINT") == "throughput")
    wanted = os.environ.get("VIRTACCEL_COMPILE", "here")
    if wanted not in ("here", "sandbox"):
        raise BackendUnavailable(f"VIRTACCEL_COMPILE is {wanted!r}, neither 'here' nor 'sandbox'")
    try:
        store = Store.from_environment(os.environ)
    except (ValueError, OSError) as error:
        raise BackendUnavailable(f"no models can be kept: {error}") from error
    # Before a device is opened, which starts threads: where there are none yet the sandbox's fork server is a mere
    # fork.
    compiler = sandbox.sandbox() if wanted == "sandbox" else None
    chosen = choose(device)
    return OpenVinoBackend(chosen, tuning, compiler if chosen == sandbox.DEVICE else None, store)
