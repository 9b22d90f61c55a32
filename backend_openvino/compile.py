"""The OpenVINO runtime: one core a process, the choice of a device, and compiling in a precision that is asserted.

It knows models and devices, nothing of the protocol's objects. Compiling is always for ACCURACY with FP32 inference:
the runtime's own choice on CPUs that have BF16 would be BF16.
"""

from __future__ import annotations

import functools
import hashlib
import io
import logging
import threading
from dataclasses import dataclass
from typing import Any

import openvino as ov
from openvino import opset15 as ops

from virtaccel.device.backend import BackendUnavailable
from virtaccel.device.wire import AcceleratorClass

log = logging.getLogger(__name__)

ORDER = ("NPU", "GPU", "CPU")
"""Device classes, first choice first."""

CLASSES = {"NPU": AcceleratorClass.NPU, "GPU": AcceleratorClass.GPU}

_CONFIG: dict[str, Any] = {"EXECUTION_MODE_HINT": "ACCURACY", "INFERENCE_PRECISION_HINT": "f32"}


@dataclass(frozen=True, slots=True)
class Tuning:
    """How a host shares itself out: inference threads (0: the runtime's choice), and whether to prefer throughput."""

    threads: int = 0
    throughput: bool = False

    @property
    def config(self) -> dict[str, Any]:
        config = dict(_CONFIG, PERFORMANCE_HINT="THROUGHPUT" if self.throughput else "LATENCY")
        return dict(config, INFERENCE_NUM_THREADS=self.threads) if self.threads else config


class PrecisionRefused(Exception):
    """The device would not compute in FP32."""


_core_lock = threading.Lock()


@functools.cache
def _make_core() -> ov.Core:
    return ov.Core()


def core() -> ov.Core:
    """The process's only core. Raises BackendUnavailable."""
    with _core_lock:
        try:
            return _make_core()
        except RuntimeError as error:
            raise BackendUnavailable(f"the OpenVINO core does not start: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def devices() -> list[str]:
    """Names of the devices the runtime finds, in order of choice. Raises BackendUnavailable."""
    try:
        found = list(core().available_devices)
    except RuntimeError as error:
        raise BackendUnavailable(f"OpenVINO cannot enumerate devices: {_first_line(error)}") from error

    def rank(name: str) -> int:
        kind = name.split(".")[0]
        return ORDER.index(kind) if kind in ORDER else len(ORDER)

    return sorted(found, key=rank)


def choose(wanted: str | None) -> str:
    """The device called `wanted`, or the first of that class; without a wish the first that computes in FP32.

    Raises BackendUnavailable with the devices there are.
    """
    found = devices()
    if not found:
        raise BackendUnavailable("OpenVINO finds no device on this host")
    if wanted is not None:
        named = [name for name in found if name == wanted] or [n for n in found if n.split(".")[0] == wanted]
        if not named:
            raise BackendUnavailable(f"OpenVINO has no device {wanted!r} here; there is {', '.join(found)}")
        problem = probe(named[0])
        if problem is not None:
            raise BackendUnavailable(f"device {named[0]} cannot be used: {problem}")
        return named[0]
    for name in found:
        problem = probe(name)
        if problem is None:
            return name
        log.warning("device %s is not used: %s", name, problem)
    raise BackendUnavailable(f"none of the devices {', '.join(found)} computes in FP32")


@functools.cache
def probe(device: str) -> str | None:
    """Compiles a small program on the device; what is wrong with the device, None if nothing is."""
    left, right = (ops.parameter([8], ov.Type.f32) for _ in range(2))
    try:
        compile_model(ov.Model([ops.result(ops.add(left, right))], [left, right], "probe"), device, Tuning())
    except (PrecisionRefused, RuntimeError) as error:
        return _first_line(error)
    return None


@functools.cache
def runs_fp8(device: str) -> bool:
    """Whether a program with FP8 tensors compiles."""
    try:
        for element in (ov.Type.f8e4m3, ov.Type.f8e5m2):
            parameter = ops.parameter([8], element)
            wide = ops.convert(parameter, ov.Type.f32)
            narrow = ops.convert(ops.add(wide, wide), ov.Type.f16)
            moved = ops.convert(parameter, element)
            model = ov.Model([ops.result(narrow), ops.result(moved)], [parameter], "probe-fp8")
            compile_model(model, device, Tuning())
    except RuntimeError:
        return False
    return True


def compile_model(model: ov.Model, device: str, tuning: Tuning) -> ov.CompiledModel:
    """Compile for FP32. Raises RuntimeError as the runtime does, PrecisionRefused if the device computes otherwise."""
    return _asserted(core().compile_model(model, device, tuning.config))


def import_model(blob: io.BytesIO, device: str, tuning: Tuning) -> ov.CompiledModel:
    """What `export_model` of a model compiled for this device gave. Raises as `compile_model` does."""
    return _asserted(core().import_model(blob, device, tuning.config))


def _asserted(compiled: ov.CompiledModel) -> ov.CompiledModel:
    precision = compiled.get_property("INFERENCE_PRECISION_HINT")
    if precision != ov.Type.f32:
        raise PrecisionRefused(f"inference precision is {precision}, not FP32")
    return compiled


def full_name(device: str) -> str:
    """What the device calls itself."""
    return str(core().get_property(device, "FULL_DEVICE_NAME"))


def identity(device: str) -> bytes:
    """16 bytes that stay the same for this device and runtime version."""
    return hashlib.sha256(f"{device}\0{full_name(device)}\0{ov.__version__}".encode()).digest()[:16]
