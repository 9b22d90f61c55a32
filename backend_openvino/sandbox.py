"""Compiling in a process of its own: lowering and the runtime's compiler see a guest's graph there first.

For each load a fresh process is forked from a fork server that has the runtime in memory (processes.fork_server).
It gives up opening files, starting programs and the network, is bounded in memory and time, compiles, and exports the
model; what crosses back is that blob and a few words, which count only after the process has ended well. The device
then imports the blob, which takes a third of the time that compiling does. A process that crashes, hangs or eats memory
is the end of that load and of nothing else.

Only for the CPU: other devices are driven through files that the sandbox may not open.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import logging
import math
import mmap
import os
import signal
import struct
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from virtaccel.backend_openvino import compile as runtime
from virtaccel.backend_openvino.compile import Tuning
from virtaccel.backend_openvino.loader import current_job
from virtaccel.backend_openvino.programs import Compiled, Host, Variant, compile_here, concrete
from virtaccel.device.backend import BackendError, BackendUnavailable
from virtaccel.device.wire import Status
from virtaccel.processes import confine
from virtaccel.processes.fork_server import Child, ForkServer, ForkServerLost, Run
from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import Graph, TosaError
from virtaccel.tosa_graph.target import from_words

log = logging.getLogger(__name__)

DEVICE: Final = "CPU"
START_SECONDS: Final = 60.0
"""How long a process may take to come into being: the first one's fork server has to import the runtime."""
MAX_RESULT_BYTES: Final = 1 << 30
"""A compiled model and its header; beyond it the program is refused."""
FAULTS_SWITCH: Final = "VIRTACCEL_SANDBOX_FAULTS"
"""Fault injection, for tests only: with this set, a graph whose first input is called fault:crash, fault:hang or
fault:memory makes the sandbox do that. Read nowhere but inside the sandbox."""

_PACKAGE: Final = __name__.rpartition(".")[0]
_HEADER: Final = struct.Struct("<I")
_RAN_OUT: Final = {-signal.SIGXCPU: "its processor time", -signal.SIGXFSZ: "the size of a compiled model"}


@dataclass(frozen=True, slots=True)
class Bounds:
    """What compiling one program may take: `seconds` by the clock, `memory` in bytes of private writable memory."""

    seconds: float = 60.0
    memory: int = 4 << 30

    @classmethod
    def of(cls, seconds: str, memory: str) -> Bounds:
        """From the options' values. Raises BackendUnavailable."""
        try:
            made = cls(float(seconds), int(memory))
        except ValueError as error:
            raise BackendUnavailable(f"option compile-seconds or compile-memory: {error}") from error
        # Less than 1 MiB is a slip of the unit: no interpreter runs in that.
        if not 0 < made.seconds < math.inf or made.memory < 1 << 20:
            raise BackendUnavailable("compile-seconds and compile-memory are to be more than nothing")
        return made


_SIGNS_OF_HUNGER: Final = ("bad_alloc", "Resource temporarily unavailable", "Cannot allocate memory")
"""What the runtime's errors say where memory, or memory for a thread's stack, was refused."""


# ---- the side that asks


class Sandbox:
    """Starts a process for each program. Used by loader threads, any number of them."""

    def __init__(self, bounds: Bounds, device: str = DEVICE) -> None:
        self.bounds = bounds
        self.device = device
        self._lock = threading.Lock()
        self._fork_server = self._begin()

    def _begin(self) -> ForkServer:
        if len(os.listdir("/proc/self/task")) == 1:
            # Nothing runs here yet, and nothing of a guest's has been seen: a copy of this process will do.
            return ForkServer.fork(prepare(self.device))
        return ForkServer.spawn(_PACKAGE, self.device)

    def compile(self, payload: bytes, target_words: tuple[int, ...], variant: Variant, host: Host) -> Compiled:
        """As programs.Compiler."""
        work = {
            "target": target_words, "shapes": variant.shapes, "within": variant.within, "device": host.device,
            "tuning": asdict(host.tuning), "seconds": self.bounds.seconds, "memory": self.bounds.memory,
        }  # fmt: skip
        with contextlib.ExitStack() as opened:
            artifact = _memory_file("virtaccel-artifact", opened)
            result = _memory_file("virtaccel-compiled", opened)
            _write(artifact, payload)
            try:
                child = self._start(json.dumps(work).encode(), [artifact, result])
            except OSError as error:
                raise BackendError(Status.OUT_OF_MEMORY, f"no sandbox: {error.strerror}") from error
            opened.callback(child.close)
            self._wait(child)
            size = min(os.fstat(result).st_size, MAX_RESULT_BYTES)
            if size <= _HEADER.size:
                raise BackendError(Status.INTERNAL_ERROR, "the compiling process left nothing")
            with mmap.mmap(result, size, prot=mmap.PROT_READ) as mapped:
                return _imported(mapped, host)

    def close(self) -> None:
        """End whatever is being compiled, and the fork server."""
        with self._lock:
            self._fork_server.close()

    def _start(self, work: bytes, descriptors: Sequence[int]) -> Child:
        with self._lock:
            try:
                return self._fork_server.start(work, descriptors)
            except ForkServerLost as error:
                log.warning("starting another fork server: %s", error)
            self._fork_server.close()
            try:
                self._fork_server = ForkServer.spawn(_PACKAGE, self.device)
                return self._fork_server.start(work, descriptors)
            except ForkServerLost as error:  # a confined worker may start no program: its daemon starts another worker
                raise BackendError(Status.DEVICE_LOST, f"nothing can be compiled any more: {error}") from error

    def _wait(self, child: Child) -> None:
        """Until it has ended well. Raises BackendError."""
        job = current_job()
        if job is not None:
            job.on_abandon = child.kill
        try:
            child.born(START_SECONDS)
            status = child.ended(self.bounds.seconds)
        except (ForkServerLost, TimeoutError) as error:
            raise BackendError(Status.INTERNAL_ERROR, f"the compiling process is lost: {error}") from error
        finally:
            if job is not None:
                job.on_abandon = None
        if status is None:
            child.kill()
            raise BackendError(Status.RESOURCE_LIMIT, f"compiling takes more than {self.bounds.seconds} s")
        if status in _RAN_OUT:
            raise BackendError(Status.RESOURCE_LIMIT, f"compiling exceeds {_RAN_OUT[status]}")
        if status:
            how = signal.Signals(-status).name if status < 0 else f"status {status}"
            raise BackendError(Status.INTERNAL_ERROR, f"the compiling process ended with {how}")


def _memory_file(name: str, opened: contextlib.ExitStack) -> int:
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError as error:
        raise BackendError(Status.OUT_OF_MEMORY, f"no memory file: {error.strerror}") from error
    opened.callback(os.close, descriptor)
    return descriptor


def _write(descriptor: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _imported(mapped: mmap.mmap, host: Host) -> Compiled:
    """The model in a result. Raises BackendError: what the sandbox refused with, INCOMPATIBLE if it cannot be used."""
    try:
        (length,) = _HEADER.unpack_from(mapped)
        said: dict[str, Any] = json.loads(mapped[_HEADER.size : _HEADER.size + length])
        if "status" in said:
            raise BackendError(Status(said["status"]), str(said["text"]))
        limit = None if said["limit"] is None else float.fromhex(said["limit"])
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise BackendError(Status.INTERNAL_ERROR, f"the compiling process left nonsense: {error}") from error
    blob = io.BytesIO(mapped[_HEADER.size + length :])
    try:
        return Compiled(runtime.import_model(blob, host.device, host.tuning), limit)
    except (RuntimeError, runtime.PrecisionRefused) as error:
        raise BackendError(Status.INCOMPATIBLE, f"the compiled model cannot be imported: {error}") from error


@functools.cache
def sandbox(bounds: Bounds) -> Sandbox:
    """The process's own for these bounds."""
    made = Sandbox(bounds)
    atexit.register(made.close)
    return made


# ---- the sandbox itself


def prepare(device: str) -> Run:
    """For a fork server: have the runtime and the device's plugin in memory, without starting a thread."""
    try:
        runtime.full_name(device)
    except RuntimeError as error:
        log.error("no compiling for %s: %s", device, error)
    return _run


def _run(work: bytes, descriptors: list[int]) -> int:
    settings: dict[str, Any] = json.loads(work)
    artifact, result = descriptors
    processors = os.cpu_count() or 1
    confine.limit(
        memory=settings["memory"], cpu_seconds=math.ceil(settings["seconds"]) * processors + 1,
        file_bytes=MAX_RESULT_BYTES, descriptors=64,
    )  # fmt: skip
    confine.filter_calls(files=False)
    with mmap.mmap(artifact, os.fstat(artifact).st_size, prot=mmap.PROT_READ) as mapped:
        payload = mapped[:]
    try:
        blob, limit = _compile(payload, settings)
    except BackendError as error:
        _leave(result, {"status": int(error.status), "text": str(error)[:2000]})
        return 0
    except MemoryError:
        _leave(result, {"status": int(Status.OUT_OF_MEMORY), "text": "out of memory while compiling"})
        return 0
    _leave(result, {"limit": None if limit is None else float(limit).hex()}, blob)
    return 0


def _compile(payload: bytes, settings: dict[str, Any]) -> tuple[memoryview, float | None]:
    """The exported model and the bound on its inputs. Raises BackendError, MemoryError."""
    try:
        target, graph = from_words(tuple(settings["target"])), read(payload)
    except TosaError as error:
        raise BackendError(Status.INVALID_ARGUMENT, str(error)) from error
    if FAULTS_SWITCH in os.environ:
        _misbehave(graph)
    variant = Variant(tuple(map(tuple, settings["shapes"])), settings["within"])
    host = Host(settings["device"], Tuning(**settings["tuning"]), target)
    try:
        compiled = compile_here(concrete(graph, target, variant), variant.within, host)
        exported = compiled.model.export_model()
    except RuntimeError as error:
        raise BackendError(Status.INCOMPATIBLE, f"OpenVINO does not export it: {error}") from error
    except BackendError as error:
        if any(sign in str(error) for sign in _SIGNS_OF_HUNGER):
            raise MemoryError from error
        raise
    return exported.getbuffer() if isinstance(exported, io.BytesIO) else memoryview(exported), compiled.limit


def _leave(result: int, said: dict[str, Any], blob: bytes | memoryview = b"") -> None:
    header = json.dumps(said).encode()
    _write(result, _HEADER.pack(len(header)) + header)
    _write(result, blob)


def _misbehave(graph: Graph) -> None:
    """The injected faults. No graph is known that makes this compiler do it by itself: the lowering avoids those that
    were found."""
    fault = graph.inputs[0].name if graph.inputs else ""
    if fault == "fault:crash":
        os.abort()
    while fault == "fault:hang":
        signal.pause()
    eaten = []
    while fault == "fault:memory":
        eaten.append(bytearray(b"x") * (64 << 20))
