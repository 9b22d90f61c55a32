"""`bench load`: LOAD_PROGRAM, first and again, against compiling the lowered graph and nothing else.

A first load reads, validates, lowers and compiles bytes that nothing has seen (the same model with a stamp behind it);
a second one finds the compiled model. The baseline compiles the graph that the first load lowers to, made anew each
time, since the runtime keeps nothing between two graphs. The time the artifact takes to get there is a row of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import openvino as ov

from virtaccel.backend_openvino import compile as runtime
from virtaccel.backend_openvino.lowering.builder import lower
from virtaccel.backend_openvino.lowering.ranges import bounded
from virtaccel.guest_tools.arrays.accelerator import parse, read_model
from virtaccel.guest_tools.artifact import target_words
from virtaccel.harness.bench.measure import clock, median_ratio, timing, undisturbed
from virtaccel.harness.bench.programs import with_stamp
from virtaccel.harness.bench.report import Figure, Report, Row
from virtaccel.harness.compiled import Opened, open_device
from virtaccel.tosa_graph.graph import Graph

FIRST, AGAIN, ALONE, TRANSFER = "first load", "second load", "compile alone", "transfer of the artifact"


def measure(models: Sequence[Path], rounds: int, device: str | None) -> Report:
    """All models, one after another. Raises AcceleratorError."""
    report = Report("load")
    opened = open_device(device)
    with opened.accelerator:
        for path in models:
            data, name = read_model(path)
            samples = _alternate(opened, data, name, rounds)
            report.rows += [Row(name, lane, timing(found)) for lane, found in samples.items()]
            ratio = median_ratio(samples[FIRST], samples[ALONE])
            report.figures.append(Figure(f"{name}: first load over compile alone", ratio, bound=1.15))
            again = (timing(samples[AGAIN]).median - timing(samples[TRANSFER]).median) / 1e6
            report.figures.append(Figure(f"{name}: second load without transfer", again, "ms", 5.0))
    return report


def _alternate(opened: Opened, data: bytes, name: str, rounds: int) -> dict[str, list[int]]:
    accelerator, host, graph = opened.accelerator, opened.backend.host, parse(data, name)
    words, stamps = target_words(graph), count(1)
    samples: dict[str, list[int]] = {FIRST: [], AGAIN: [], ALONE: [], TRANSFER: []}
    buffer = accelerator.buffer(len(data))
    session = accelerator.session

    def take(lane: str, work: Any) -> Any:
        start = clock()
        result = work()
        samples[lane].append(clock() - start)
        return result

    with undisturbed():
        for number in range(-1, rounds):
            if number == 0:
                for found in samples.values():
                    found.clear()
            fresh, model = with_stamp(data, next(stamps)), lowered(graph)
            orders = (FIRST, ALONE) if number % 2 else (ALONE, FIRST)
            for lane in orders:
                if lane == ALONE:
                    take(ALONE, lambda model=model: runtime.compile_model(model, host.device, host.tuning))
                else:
                    first = take(FIRST, lambda fresh=fresh: accelerator.offer(fresh, words, name))
            second = take(AGAIN, lambda fresh=fresh: accelerator.offer(fresh, words, name))
            take(TRANSFER, lambda: buffer.write(memoryview(data)))
            for program in (first, second):
                session.call(session.client.unload_program(program))
    buffer.free()
    return samples


def lowered(graph: Graph) -> ov.Model:
    """As a first load lowers it."""
    bounds = bounded(graph)
    return lower(graph, bounds.tensors if bounds is not None else ())
