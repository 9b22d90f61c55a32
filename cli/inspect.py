"""`virtaccel inspect`: inputs, outputs, operators and constants of a model, and what a device says of each operator.

The device is asked, not guessed: the whole model is offered to it, and where it refuses, every kind of operator in the
model is offered by itself, so that each one gets the device's own verdict and reason.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.table import Table

from virtaccel.cli.options import Way, device_options, json_option, open_accelerator, terminal
from virtaccel.guest_tools.arrays.accelerator import Accelerator, parse, read_model
from virtaccel.guest_tools.errors import AcceleratorError, Refused
from virtaccel.tosa_graph import single
from virtaccel.tosa_graph.graph import Block, Graph, Op, Operator, Tensor, TosaError
from virtaccel.tosa_graph.single import NOT_ALONE, Signature
from virtaccel.tosa_graph.target import names
from virtaccel.tosa_graph.validate import required

ADMITTED = "admitted"
_SHAPE = re.compile(r"\[[^\]]*\]")


class Row(NamedTuple):
    """One kind of operator in the model, how often it is there, and the verdict."""

    signature: Signature
    times: int
    verdict: str


def judge(accelerator: Accelerator, graph: Graph, data: bytes, name: str) -> tuple[str, dict[Signature, str]]:
    """The device's verdict on the whole model, and on each kind of operator."""
    kinds: dict[Signature, tuple[Operator, Block]] = {}
    for operator, block in operators(graph):
        kinds.setdefault(single.signature(operator, block), (operator, block))
    try:
        accelerator.load(data, name).close()
    except Refused as refusal:
        verdicts = {kind: _judge_alone(accelerator, graph, *place) for kind, place in kinds.items()}
        return _reason(refusal), verdicts
    # A device admits a program only if it admits every operator in it.
    return ADMITTED, dict.fromkeys(kinds, ADMITTED)


def operators(graph: Graph) -> Iterator[tuple[Operator, Block]]:
    """Every operator with the block it is in, those of branches and loops included."""
    for region in graph.regions:
        for block in region.blocks:
            for operator in block.operators:
                yield operator, block


def _judge_alone(accelerator: Accelerator, graph: Graph, operator: Operator, block: Block) -> str:
    if operator.op in NOT_ALONE:
        return "not judged alone"
    try:
        accelerator.load(single.alone(operator, block, graph), operator.op.name).close()
    except Refused as refusal:
        return _reason(refusal)
    except AcceleratorError as error:
        return f"cannot be asked alone: {error}"
    return ADMITTED


def _reason(refusal: Refused) -> str:
    return f"refused: {refusal.reasons[-1] if refusal.reasons else refusal}"


def rows(graph: Graph, verdicts: dict[Signature, str]) -> list[Row]:
    """Operators by kind, most frequent first; constants are counted elsewhere."""
    counts = Counter(
        single.signature(operator, block)
        for operator, block in operators(graph)
        if operator.op not in (Op.CONST, Op.CONST_SHAPE)
    )
    return [Row(kind, count, verdicts.get(kind, "not asked")) for kind, count in counts.most_common()]


def constants(graph: Graph) -> dict[str, int]:
    """How many constants there are, and their bytes."""
    data = [
        tensor.data
        for region in graph.regions
        for block in region.blocks
        for tensor in block.tensors.values()
        if tensor.data is not None and not tensor.variable
    ]
    return {"count": len(data), "bytes": sum(map(len, data))}


def _plain(tensors: Iterable[Tensor]) -> list[dict[str, Any]]:
    return [{"name": t.name, "type": t.dtype.name, "shape": list(t.shape)} for t in tensors]


def needs(graph: Graph) -> dict[str, Any] | None:
    """The least that a device has to offer; None for a graph that no device may run."""
    try:
        target = required(graph)
    except TosaError:
        return None
    return {"profiles and extensions": list(names(target.profiles, target.extensions)), "level": target.level.name}


def describe(graph: Graph, name: str, size: int) -> dict[str, Any]:
    """What the file says, as plain values."""
    version = graph.version
    draft = "-draft" if version.draft else ""
    return {
        "model": name,
        "bytes": size,
        "tosa": f"{version.major}.{version.minor}.{version.patch}{draft}",
        "needs": needs(graph),
        "regions": [region.name for region in graph.regions],
        "inputs": _plain(graph.inputs),
        "outputs": _plain(graph.outputs),
        "variables": _plain(graph.variables),
        "constants": constants(graph),
    }


def _tensor_lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [("file", f"{facts['model']}, {facts['bytes']:,} bytes, TOSA {facts['tosa']}")]
    if facts["needs"] is not None:
        wanted = ", ".join(facts["needs"]["profiles and extensions"])
        lines.append(("needs", f"{wanted}, level {facts['needs']['level']}"))
    for kind in ("inputs", "outputs", "variables"):
        lines += [
            (kind if index == 0 else "", f"{tensor['name']}  {tensor['type']} {tensor['shape']}")
            for index, tensor in enumerate(facts[kind])
        ]
    if len(facts["regions"]) > 1:
        lines.append(("regions", ", ".join(facts["regions"])))
    held = facts["constants"]
    return [*lines, ("constants", f"{held['count']}, {held['bytes']:,} bytes")]


def by_type(found: Iterable[Row]) -> list[Row]:
    """Kinds that differ in shapes alone, with one verdict, as one row."""
    merged: Counter[tuple[Signature, str]] = Counter()
    for (op, operands, results), times, verdict in found:
        kind = Signature(op, _SHAPE.sub("", operands), _SHAPE.sub("", results))
        merged[kind, verdict] += times
    return [Row(kind, times, verdict) for (kind, verdict), times in merged.most_common()]


def _report(facts: dict[str, Any], found: list[Row]) -> None:
    console = terminal()
    top = Table(show_header=False, box=None, pad_edge=False)
    top.add_column(style="bold")
    top.add_column(overflow="fold")
    for title, text in _tensor_lines(facts):
        top.add_row(title, text)
    console.print(top)
    console.print()
    table = Table(box=None, pad_edge=False)
    for heading in ("operator", "count", "operands", "results", "the device says"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "count" else "left")
    for row in found:
        op, operands, results = row.signature
        style = "" if row.verdict == ADMITTED else "yellow"
        table.add_row(op.name, str(row.times), operands, results, row.verdict, style=style)
    console.print(table)
    if facts["verdict"] is not None:
        console.print(f"\n{facts['device'] or 'The device'}, the whole model: {facts['verdict']}", markup=False)
    if any(size < 0 for tensor in facts["inputs"] for size in tensor["shape"]):
        console.print("Sizes of -1 are those of a call; a size that the model cannot take fails that call alone.")


def _compiled(data: bytes, name: str, way: Way, as_json: bool) -> None:
    """The runtime's own graph of the model."""
    from virtaccel.harness import compiled as runtime

    opened = runtime.open_device(way.device, way.options)
    with opened.accelerator as accelerator:
        accelerator.load(data, name)  # refused as a program is
        found = runtime.nodes(runtime.compiled(opened, data, name))
    if as_json:
        click.echo(json.dumps({"model": name, "device": opened.backend.device, "nodes": [n._asdict() for n in found]}))
        return
    console = terminal()
    table = Table(box=None, pad_edge=False)
    for heading in ("node", "primitive", "precision", "layout", "shape", "does the work of"):
        table.add_column(heading, overflow="fold")
    for node in found:
        kind, primitive, precision, layout, shape, fused = node
        table.add_row(kind, primitive, precision, layout, str(list(shape)), ", ".join(fused))
    console.print(table)
    counted = ", ".join(f"{times} {kind} ({primitive})" for kind, primitive, times in runtime.by_kind(found))
    console.print(f"\n{len(found)} nodes: {counted}", markup=False)


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--shapes", is_flag=True, help="A line for each set of shapes, not only for each set of types.")
@click.option("--offline", is_flag=True, help="Only read the file; ask no device.")
@click.option("--compiled", is_flag=True, help="What the runtime made of it, node by node, on a device in process.")
@device_options
@json_option
def inspect(model: Path, shapes: bool, offline: bool, compiled: bool, way: Way, as_json: bool) -> None:
    """What is in MODEL (a .tosa file), and what a device says of each operator."""
    data, name = read_model(model)
    if compiled:
        _compiled(data, name, way, as_json)
        return
    graph = parse(data, name)
    facts = describe(graph, name, len(data))
    verdict: str | None = None
    verdicts: dict[Signature, str] = {}
    executes: str | None = None
    if not offline:
        with open_accelerator(way) as accelerator:
            verdict, verdicts = judge(accelerator, graph, data, name)
            executes = accelerator.device_name
    found = rows(graph, verdicts)
    facts |= {"device": executes, "verdict": verdict}
    if as_json:
        facts["operators"] = [
            {"op": kind.op.name, "operands": kind.operands, "results": kind.results, "count": times, "verdict": said}
            for kind, times, said in found
        ]
        click.echo(json.dumps(facts))
        return
    _report(facts, found if shapes else by_type(found))
