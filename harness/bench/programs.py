"""Small TOSA programs to measure with, written with our own writer; and a device daemon for the length of a `with`.

Random weights make an artifact like no other, so that nothing compiled before can be used again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from virtaccel.device.launcher import Daemon, DaemonFailed
from virtaccel.device.wire import EventState
from virtaccel.guest_tools.arrays.accelerator import Accelerator
from virtaccel.guest_tools.arrays.program import Program
from virtaccel.guest_tools.client import Event, PackedBindings, status_name
from virtaccel.guest_tools.errors import ExecutionFailed, Unavailable
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.write import GraphWriter

ELEMENTS = 8


def add() -> bytes:
    """Sum of two tensors of 8 FP32: three bindings, hardly any work."""
    writer = GraphWriter()
    left, right = (writer.input(name, (ELEMENTS,), DType.FP32) for name in ("left", "right"))
    writer.output(writer.operator(Op.ADD, [left, right], ((ELEMENTS,), DType.FP32), {}))
    return writer.to_bytes()


def joined(inputs: int) -> bytes:
    """`inputs` tensors of 8 INT32 one behind another: `inputs` + 1 bindings, nothing but moves."""
    writer = GraphWriter()
    names = [writer.input(f"in{number}", (ELEMENTS,), DType.INT32) for number in range(inputs)]
    attributes = {"axis": 0}
    writer.output(writer.operator(Op.CONCAT, names, ((ELEMENTS * inputs,), DType.INT32), attributes))
    return writer.to_bytes()


def with_stamp(artifact: bytes, seed: int) -> bytes:
    """The same program as bytes that no cache has seen: a FlatBuffer may be followed by anything."""
    return artifact + np.random.default_rng(seed).bytes(16)


def run(accelerator: Accelerator, program: Program, packed: PackedBindings) -> Event:
    """One submission, from its request to the answer that it is complete; the event still has to be destroyed. Raises
    ExecutionFailed."""
    session = accelerator.session
    event = session.submit(session.client.submit(accelerator.queue, program.id, packed), at_once=True)
    status = session.wait(event)
    if status.state != EventState.COMPLETE:
        raise ExecutionFailed(f"the submission ended as {status.state.name} ({status_name(status.error)})")
    return event


@contextmanager
def daemon(*options: str, backend: str = "openvino", device: str | None = None) -> Iterator[str]:
    """A `vhost-user-accel` of its own; the path of its socket. Raises Unavailable if it does not start."""
    chosen = ["--device", device] if device is not None else []
    with tempfile.TemporaryDirectory(prefix="virtaccel-bench-") as folder:
        path, log = Path(folder) / "accel.sock", Path(folder) / "daemon.log"
        try:
            running = Daemon([path], log, "--backend", backend, "--log-level", "error", *chosen, *options)
        except DaemonFailed as error:
            raise Unavailable(str(error)) from error
        with running:
            yield str(path)
