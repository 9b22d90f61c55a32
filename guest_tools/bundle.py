"""Builds the one-file guest program: which modules go in, and the zip with a line that names the interpreter.

Knows the list of modules that run on a bare python3; that the list is complete is tested by running the file on one.
"""

from __future__ import annotations

import importlib.util
import io
import zipfile
from pathlib import Path

INTERPRETER = b"#!/usr/bin/env python3\n"
MODULES = (
    "virtaccel",
    "virtaccel.device",
    "virtaccel.device.wire",
    "virtaccel.virtqueue",
    "virtaccel.virtqueue.barrier",
    "virtaccel.virtqueue.layout",
    "virtaccel.virtqueue.driver",
    "virtaccel.tosa_graph",
    "virtaccel.tosa_graph.graph",
    "virtaccel.tosa_graph.operators",
    "virtaccel.tosa_graph.schema",
    "virtaccel.tosa_graph.target",
    "virtaccel.tosa_graph.flatbuffer",
    "virtaccel.guest_tools",
    "virtaccel.guest_tools.artifact",
    "virtaccel.guest_tools.client",
    "virtaccel.guest_tools.session",
    "virtaccel.guest_tools.transport",
    "virtaccel.guest_tools.transport.base",
    "virtaccel.guest_tools.transport.raw",
    "virtaccel.guest_tools.transport.ring",
    "virtaccel.guest_tools.pci",
    "virtaccel.guest_tools.pci.capabilities",
    "virtaccel.guest_tools.pci.dma",
    "virtaccel.guest_tools.pci.function",
    "virtaccel.guest_tools.pci.interrupt",
    "virtaccel.guest_tools.pci.registers",
    "virtaccel.guest_tools.pci.transport",
    "virtaccel.guest_tools.conformance",
    "virtaccel.guest_tools.conformance.protocol_bench",
    "virtaccel.guest_tools.conformance.protocol_objects",
    "virtaccel.guest_tools.conformance.protocol_programs",
    "virtaccel.guest_tools.conformance.protocol_queue",
    "virtaccel.guest_tools.conformance.protocol_suite",
    "virtaccel.guest_tools.guest",
    "virtaccel.guest_tools.guest.arrays",
    "virtaccel.guest_tools.guest.model",
    "virtaccel.guest_tools.guest.remote",
    "virtaccel.guest_tools.guest_main",
)
START = "import sys\nfrom virtaccel.guest_tools.guest_main import main\nsys.exit(main())\n"
EPOCH = (1980, 1, 1, 0, 0, 0)


def build_guest() -> bytes:
    """The file's bytes; the same sources give the same bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in MODULES:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:
                raise FileNotFoundError(name)
            path = name.replace(".", "/") + ("/__init__.py" if spec.submodule_search_locations else ".py")
            archive.writestr(zipfile.ZipInfo(path, EPOCH), Path(spec.origin).read_bytes(), zipfile.ZIP_DEFLATED)
        archive.writestr(zipfile.ZipInfo("__main__.py", EPOCH), START, zipfile.ZIP_DEFLATED)
    return INTERPRETER + out.getvalue()
