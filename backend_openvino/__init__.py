"""Runs TOSA programs on OpenVINO in the device's own buffers. The runtime is imported when a backend is opened."""

from __future__ import annotations

import os

from virtaccel.device.backend import Backend, BackendUnavailable


def open_backend(device: str | None = None) -> Backend:
    """A fresh instance on the named device or class (CPU, GPU, GPU.1, NPU), None for the first that computes in FP32.

    VIRTACCEL_THREADS bounds the inference threads, VIRTACCEL_HINT=throughput prefers throughput over latency. Raises
    BackendUnavailable.
    """
    try:
        from virtaccel.backend_openvino.backend import OpenVinoBackend
        from virtaccel.backend_openvino.compile import Tuning, choose
    except ImportError as error:
        if error.name is None or not error.name.startswith("openvino"):
            raise
        message = f"the OpenVINO runtime is missing ({error}); install the package 'openvino'"
        raise BackendUnavailable(message) from error
    threads = os.environ.get("VIRTACCEL_THREADS", "0")
    if not threads.isdecimal():
        raise BackendUnavailable(f"VIRTACCEL_THREADS is {threads!r}, not a number")
    tuning = Tuning(int(threads), os.environ.get("VIRTACCEL_HINT") == "throughput")
    return OpenVinoBackend(choose(device), tuning)
