"""`virtaccel run`: a model on arrays from files, timed, and compared with known answers if asked to."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from rich.table import Table

from virtaccel.cli.options import Way, device_options, json_option, open_accelerator, terminal
from virtaccel.guest_tools.arrays.accelerator import Accelerator
from virtaccel.guest_tools.arrays.files import Answers, Comparison, compare, load_answers, load_npy, same_bits
from virtaccel.guest_tools.arrays.program import Array, Program
from virtaccel.guest_tools.errors import InputError, ModelError, Refused

EXIT_MISMATCH = 1


class Run(NamedTuple):
    """Outputs of the last repetition in declared order (a leading step axis for sequences), seconds of every call."""

    outputs: tuple[Array, ...]
    seconds: list[float]


def run_once(program: Program, inputs: Sequence[Array], repeat: int) -> Run:
    """`repeat` calls with the same arrays, each a fresh stream if the program has state."""
    seconds: list[float] = []
    state = program.new_state() if program.variables else None
    for _ in range(repeat):
        if state is not None:
            state.reset()
        start = time.perf_counter()
        outputs = program(*inputs, state=state)
        seconds.append(time.perf_counter() - start)
    return Run(outputs, seconds)


def run_sequence(program: Program, answers: Answers, repeat: int) -> Run:
    """All steps in order, `repeat` times, each time from the initial state."""
    seconds: list[float] = []
    state = program.new_state() if program.variables else None
    for _ in range(repeat):
        if state is not None:
            state.reset()
        steps = []
        for index in range(answers.steps or 0):
            inputs = answers.step(index)
            start = time.perf_counter()
            steps.append(program(*inputs, state=state))
            seconds.append(time.perf_counter() - start)
    return Run(tuple(np.stack(parts) for parts in zip(*steps, strict=True)), seconds)


def inputs_from_files(program: Program, arguments: Sequence[str]) -> list[Array]:
    """`[NAME=]FILE.npy` for each input: by name, or in order for those without one. Raises InputError."""
    names = [tensor.name for tensor in program.inputs]
    found: dict[str, Array] = {}
    for argument in arguments:
        name, file = _split_argument(argument, names)
        if name is None:
            unnamed = [other for other in names if other not in found]
            if not unnamed:
                raise InputError(f"{program.name} takes {len(names)} inputs; --input {argument} is one too many")
            name = unnamed[0]
        if name in found:
            raise InputError(f"input {name!r} is given twice")
        found[name] = load_npy(Path(file))
    for tensor in program.inputs:
        if tensor.name not in found:
            wanted = f"{tensor.carrier} of shape {list(tensor.shape)} ({tensor.dtype.name})"
            raise InputError(f"input {tensor.name!r} is missing: give --input {tensor.name}=FILE.npy, {wanted}")
    return [same_bits(found[tensor.name], tensor.carrier) for tensor in program.inputs]


def _split_argument(argument: str, names: Sequence[str]) -> tuple[str | None, str]:
    """Names may hold any character, so a known one is looked for first; any other = then follows a wrong name."""
    for name in sorted(names, key=len, reverse=True):
        if argument.startswith(f"{name}="):
            return name, argument[len(name) + 1 :]
    if "=" in argument and not Path(argument).exists():
        known = ", ".join(map(repr, names))
        raise InputError(f"there is no input {argument.partition('=')[0]!r}; inputs are {known}")
    return None, argument


def check(program: Program, run: Run, answers: Answers, atol: float) -> list[Comparison]:
    """Every output against its expectation."""
    triples = zip(program.outputs, run.outputs, answers.outputs, strict=True)
    return [compare(tensor.name, got, expected, atol) for tensor, got, expected in triples]


def save(outputs: Sequence[Array], folder: Path) -> list[str]:
    """out_K.npy for each output; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for index, array in enumerate(outputs):
        path = folder / f"out_{index}.npy"
        np.save(path, array)
        paths.append(str(path))
    return paths


def latency(seconds: Sequence[float]) -> dict[str, float | int]:
    """Milliseconds a call: inputs written, executed, outputs read."""
    ordered = np.sort(np.asarray(seconds)) * 1e3
    return {
        "calls": len(seconds),
        "median_ms": round(float(np.median(ordered)), 4),
        "p90_ms": round(float(np.quantile(ordered, 0.9)), 4),
        "min_ms": round(float(ordered[0]), 4),
    }


def summary(array: Array) -> str:
    """Enough of an output to see whether it is alive."""
    if array.size == 1:
        return str(array.reshape(-1)[0])
    if array.dtype == np.bool_:
        return f"{int(array.sum())} of {array.size} true"
    return f"{array.min():.6g} .. {array.max():.6g}, mean {array.mean(dtype=np.float64):.6g}"


def _report_text(program: Program, run: Run, facts: dict[str, Any], checks: Sequence[Comparison] | None) -> None:
    console = terminal()
    table = Table(box=None, pad_edge=False)
    for heading in ("output", "type", "shape", "values"):
        table.add_column(heading, overflow="fold")
    for tensor, array in zip(program.outputs, run.outputs, strict=True):
        table.add_row(tensor.name, tensor.dtype.name, str(list(array.shape)), summary(array))
    console.print(table)
    times = facts["latency"]
    timing = f"{times['median_ms']} ms a call (median of {times['calls']}, 90 % within {times['p90_ms']})"
    console.print(f"{program.name} on {facts['device'] or 'the device'}: {timing}", highlight=False, markup=False)
    for path in facts.get("files", ()):
        console.print(f"wrote {path}", highlight=False)
    for item in checks or ():
        verdict = "ok" if item.ok else f"WRONG in {item.wrong} of {item.elements} elements"
        line = f"check {item.name}: worst error {item.worst:.3g}, allowed {item.allowed:.3g}: {verdict}"
        console.print(line, highlight=False, markup=False)


def _load(accelerator: Accelerator, model: Path) -> Program:
    try:
        return accelerator.load(model)
    except Refused as refusal:
        advice = f"`virtaccel inspect {model}` tells what the device says of each operator"
        raise ModelError(f"{refusal}; {advice}") from refusal


def _runner(program: Program, inputs: Sequence[str], answers: Answers | None) -> Callable[[int], Run]:
    if answers is None:
        arrays = inputs_from_files(program, inputs)
        return lambda repeat: run_once(program, arrays, repeat)
    if inputs:
        raise InputError("--check brings its own inputs; leave out --input")
    if answers.steps is not None:
        return lambda repeat: run_sequence(program, answers, repeat)
    return lambda repeat: run_once(program, answers.inputs, repeat)


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--input", "inputs", multiple=True, metavar="[NAME=]FILE.npy", help="An input array; once for each.")
@click.option("--output-dir", type=click.Path(path_type=Path), help="Write the outputs there as out_K.npy.")
@click.option("--repeat", type=click.IntRange(1), default=1, show_default=True, help="How many times to run.")
@click.option(
    "--check",
    "answers_file",
    type=click.Path(path_type=Path),
    metavar="FILE.npz",
    help="Feed in_K, compare with out_K: floats within 1e-4 * max|out| + 1e-5, others exactly. Exit 1 on a mismatch.",
)
@click.option("--atol", type=click.FloatRange(0), default=0.0, help="What --check allows outputs that are no floats.")
@device_options
@json_option
def run(
    model: Path,
    inputs: tuple[str, ...],
    output_dir: Path | None,
    repeat: int,
    answers_file: Path | None,
    atol: float,
    way: Way,
    as_json: bool,
) -> None:
    """Run MODEL (a .tosa file) on arrays, or check it against known answers.

    Answers are an .npz file with in_K and out_K in the model's order; arrays with one more leading axis than their
    tensor are the steps of a sequence.
    """
    with open_accelerator(way) as accelerator:
        program = _load(accelerator, model)
        answers = load_answers(answers_file, program.inputs, program.outputs) if answers_file is not None else None
        result = _runner(program, inputs, answers)(repeat)
        checks = check(program, result, answers, atol) if answers is not None else None
        facts: dict[str, Any] = {
            "model": program.name,
            "via": way.via,
            "device": accelerator.device_name,
            "latency": latency(result.seconds),
        }
        if output_dir is not None:
            facts["files"] = save(result.outputs, output_dir)
        _report(program, result, facts, checks, as_json)
    if checks is not None and not all(item.ok for item in checks):
        raise SystemExit(EXIT_MISMATCH)


def _report(
    program: Program, result: Run, facts: dict[str, Any], checks: Sequence[Comparison] | None, as_json: bool
) -> None:
    if not as_json:
        _report_text(program, result, facts, checks)
        return
    facts["outputs"] = [
        {"name": tensor.name, "type": tensor.dtype.name, "shape": list(array.shape)}
        for tensor, array in zip(program.outputs, result.outputs, strict=True)
    ]
    if checks is not None:
        facts["check"] = [{**item._asdict(), "ok": item.ok} for item in checks]
        facts["ok"] = all(item.ok for item in checks)
    click.echo(json.dumps(facts))
