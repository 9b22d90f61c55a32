"""`bench model`: models through the device, and their lowered graphs, against OpenVINO called directly.

Against `direct`: the device's own compiled model, inferred by hand, one at a time and as an AsyncInferQueue. Against a
.tflite: OpenVINO's own reader on the original file, compiled with the same settings, beside the lowered graph. The
clock runs from the request to submit to the answer that it is complete; inputs lie in their buffers before, and the
event is destroyed afterwards. One row says what a call with arrays costs in all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino as ov

from virtaccel.backend_openvino import compile as runtime
from virtaccel.guest_tools.arrays.accelerator import read_model
from virtaccel.guest_tools.arrays.program import Array, Invocation, Pending, Program
from virtaccel.guest_tools.errors import InputError
from virtaccel.harness.bench.measure import Work, alternate, median_ratio, timing
from virtaccel.harness.bench.programs import run
from virtaccel.harness.bench.report import Figure, Report, Row
from virtaccel.harness.bench.tflite import original
from virtaccel.harness.compiled import Opened, compiled, open_device

IN_FLIGHT = 4
SETTLING_SECONDS = 1.0
"""A device that sees several submissions under way for long compiles a model that suits them."""
DIRECT, FETCHED = "direct", "tflite"
DEVICE, OPENVINO, READER, LOWERED = "device", "OpenVINO", "TFLite reader", "lowered graph"


def inputs_for(program: Program) -> list[Array]:
    """Numbers between 0 and 1, or small integers, the same every time."""
    generator = np.random.default_rng(0)
    arrays = []
    for tensor in program.inputs:
        if tensor.dynamic:
            raise InputError(f"{program.name}: input {tensor.name!r} has no known size")
        whole = tensor.carrier.kind in "iub"
        values = generator.integers(0, 2, tensor.shape) if whole else generator.random(tensor.shape)
        arrays.append(values.astype(tensor.carrier))
    return arrays


def request_for(model: ov.CompiledModel, arrays: Sequence[Array]) -> ov.InferRequest:
    """A request whose inputs are `arrays`, which it keeps."""
    request = model.create_infer_request()
    for number, (array, port) in enumerate(zip(arrays, model.inputs, strict=True)):
        request.set_input_tensor(number, ov.Tensor(array.reshape(port.get_shape())))
    return request


def measure(models: Sequence[Path], against: str, rounds: int, device: str | None) -> Report:
    """All models, one after another. Raises AcceleratorError."""
    report = Report(f"model --against {against}")
    opened = open_device(device)
    with opened.accelerator:
        ratios = []
        for path in models:
            data, name = read_model(path)
            if against == DIRECT:
                _through(report, opened, data, name, rounds)
            else:
                file = original(path.stem) if against == FETCHED else Path(against)
                ratios.append(_lowered(report, opened, data, name, file, rounds))
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        report.figures.append(Figure("lowered over reader, geometric mean", mean, bound=0.95))
        report.figures.append(Figure("lowered over reader, worst", max(ratios), bound=1.02))
    return report


# ---- through the device


def _through(report: Report, opened: Opened, data: bytes, name: str, rounds: int) -> None:
    accelerator = opened.accelerator
    program = accelerator.load(data, name)
    model = compiled(opened, data, name)
    arrays = inputs_for(program)
    request = request_for(model, arrays)
    invocation = program.new_invocation()
    invocation.write(arrays)
    works: dict[str, Work] = {
        DEVICE: lambda: run(accelerator, program, invocation.packed),
        OPENVINO: request.infer,
        "device, arrays in and out": lambda: program(*arrays),
    }
    session = accelerator.session
    tidy = {DEVICE: lambda event: session.call(session.client.destroy_event(event))}
    samples = alternate(works, rounds, after=tidy)
    report.rows += [Row(name, lane, timing(found)) for lane, found in samples.items()]
    ratio = median_ratio(samples[DEVICE], samples[OPENVINO])
    report.figures.append(Figure(f"{name}: device over OpenVINO", ratio, bound=1.03))
    report.figures.append(_in_flight(report, program, model, arrays, name, rounds))
    invocation.close()
    program.close()


def _in_flight(
    report: Report, program: Program, model: ov.CompiledModel, arrays: list[Array], name: str, rounds: int
) -> Figure:
    """Throughput with several submissions under way, against an AsyncInferQueue of as many requests."""
    invocations = [program.new_invocation() for _ in range(IN_FLIGHT)]
    for invocation in invocations:
        invocation.write(arrays)
    queue = ov.AsyncInferQueue(model, IN_FLIGHT)
    for request in queue:
        for number, (array, port) in enumerate(zip(arrays, model.inputs, strict=True)):
            request.set_input_tensor(number, ov.Tensor(array.reshape(port.get_shape())))
    burst = 16 * IN_FLIGHT
    end = time.monotonic() + SETTLING_SECONDS
    while time.monotonic() < end:
        _keep_busy(invocations, burst)

    def directly() -> None:
        for _ in range(burst):
            queue.start_async()
        queue.wait_all()

    lanes: dict[str, Work] = {DEVICE: lambda: _keep_busy(invocations, burst), OPENVINO: directly}
    samples = alternate(lanes, max(8 * rounds // burst, 5), warm_up=1)
    what = f"{name}, {IN_FLIGHT} in flight"
    report.rows += [
        Row(what, lane, timing([taken // burst for taken in found]), "each") for lane, found in samples.items()
    ]
    for invocation in invocations:
        invocation.close()
    ratio = median_ratio(samples[OPENVINO], samples[DEVICE])
    return Figure(f"{name}: throughput over AsyncInferQueue", ratio, bound=0.95, at_least=True)


def _keep_busy(invocations: Sequence[Invocation], count: int) -> None:
    """`count` runs, the oldest awaited whenever every buffer is in use."""
    pending: list[Pending] = []
    for number in range(count):
        if len(pending) == len(invocations):
            pending.pop(0).wait()
        pending.append(invocations[number % len(invocations)].submit())
    for submission in pending:
        submission.wait()


# ---- the graph alone


def _lowered(report: Report, opened: Opened, data: bytes, name: str, file: Path, rounds: int) -> float:
    """Whichever of two models is compiled first runs the slower when the other has just run, by a sixth where a run
    takes 350 us. So both are compiled twice, once in either order, and half the rounds are taken with either pair."""
    host = opened.backend.host

    def reader() -> ov.CompiledModel:
        try:
            return runtime.compile_model(runtime.core().read_model(str(file)), host.device, host.tuning)
        except RuntimeError as error:
            raise InputError(f"OpenVINO does not read {file}: {error}") from error

    makers = {LOWERED: lambda: compiled(opened, data, name), READER: reader}
    program = opened.accelerator.load(data, name)
    arrays = inputs_for(program)
    program.close()
    samples: dict[str, list[int]] = {LOWERED: [], READER: []}
    for first, second in ((LOWERED, READER), (READER, LOWERED)):
        made = {lane: makers[lane]() for lane in (first, second)}
        works: dict[str, Work] = {lane: request_for(made[lane], arrays).infer for lane in (LOWERED, READER)}
        for lane, found in alternate(works, -(-rounds // 2), warm_up=5).items():
            samples[lane] += found
        del made, works
    report.rows += [Row(name, lane, timing(found)) for lane, found in samples.items()]
    ratio = median_ratio(samples[LOWERED], samples[READER])
    report.figures.append(Figure(f"{name}: lowered over reader", ratio))
    return ratio
