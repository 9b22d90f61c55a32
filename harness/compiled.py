"""What a program becomes on a device in this process: the nodes of the runtime's own compiled graph, in its order.

Knows the OpenVINO backend and nothing of the command line. Says what a graph's operators were fused into, in which
precision and memory layout they run, and where data is still moved about (Reorder, Transpose, Convert).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import openvino as ov

from virtaccel.backend_openvino import programs as sources
from virtaccel.backend_openvino.backend import OpenVinoBackend
from virtaccel.device.backend import NO_OPTIONS
from virtaccel.guest_tools.arrays.accelerator import Accelerator, parse
from virtaccel.guest_tools.artifact import target_words
from virtaccel.guest_tools.errors import InputError, Unavailable
from virtaccel.guest_tools.session import Session
from virtaccel.guest_tools.transport.in_process import open_transport

UNSEEN = frozenset({"Const", "Input", "Output"})


class Opened(NamedTuple):
    """A device in this process, with the backend behind it in sight."""

    accelerator: Accelerator
    backend: OpenVinoBackend


class Node(NamedTuple):
    """One step of the compiled graph. `fused` are the names of the lowered nodes that it does the work of."""

    kind: str
    primitive: str
    precision: str
    layout: str
    shape: tuple[int, ...]
    fused: tuple[str, ...]


def open_device(device: str | None, options: Mapping[str, str] = NO_OPTIONS) -> Opened:
    """On OpenVINO. Raises Unavailable."""
    transport = open_transport("openvino", device, options)
    backend = transport.device.backend
    if not isinstance(backend, OpenVinoBackend):
        transport.close()
        raise Unavailable("the backend called openvino is another one")
    return Opened(Accelerator(Session(transport)), backend)


def compiled(opened: Opened, data: bytes, name: str) -> ov.CompiledModel:
    """The model that the device runs for these bytes: the very one, if a program of it is loaded. Raises InputError,
    device.backend.BackendError."""
    words, host = target_words(parse(data, name)), opened.backend.host
    source = sources.load(data, words, host)
    if source.dynamic:
        raise InputError(f"{name} has inputs of unknown size")
    return source.compile(sources.Variant(source.declared(), True)).model


def nodes(model: ov.CompiledModel) -> list[Node]:
    """What runs, in order, constants and ports left out."""
    found = []
    for node in model.get_runtime_model().get_ordered_ops():
        said = {name: str(getattr(value, "value", value)) for name, value in node.get_rt_info().items()}
        if said.get("layerType", "") in UNSEEN:
            continue
        port = node.get_output_partial_shape(0) if node.get_output_size() else None
        shape = tuple(port.to_shape()) if port is not None and port.is_static else ()
        fused = tuple(filter(None, said.get("originalLayersNames", "").split(",")))
        precision = said.get("runtimePrecision", said.get("outputPrecisions", ""))
        layout = said.get("outputLayouts", "")
        found.append(Node(said["layerType"], said.get("primitiveType", ""), precision, layout, shape, fused))
    return found


def by_kind(found: list[Node]) -> list[tuple[str, str, int]]:
    """Kind, primitive and how often, most frequent first."""
    counts = Counter((node.kind, node.primitive) for node in found)
    return [(kind, primitive, times) for (kind, primitive), times in counts.most_common()]
