"""`virtaccel operators`: which of TOSA's operators the OpenVINO backend of this host runs, and how.

The one command that asks no device: it prints the backend's own table, which docs/operators.md is made of.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import click
from rich.table import Table

from virtaccel.cli.options import json_option, terminal
from virtaccel.guest_tools.errors import InputError, Unavailable
from virtaccel.tosa_graph.graph import Op
from virtaccel.tosa_graph.operators import SIGNATURES


def _chosen(names: Sequence[str]) -> list[Op]:
    known = {op.name: op for op in SIGNATURES}
    for name in names:
        if name.upper() not in known:
            raise InputError(f"TOSA 1.0 has no operator {name!r}")
    return [known[name.upper()] for name in names] or list(SIGNATURES)


@click.command()
@click.argument("names", nargs=-1, metavar="[OPERATOR]...")
@click.option("--device", default="CPU", show_default=True, metavar="NAME", help="The OpenVINO device.")
@click.option("--markdown", is_flag=True, help="Print docs/operators.md.")
@json_option
def operators(names: tuple[str, ...], device: str, markdown: bool, as_json: bool) -> None:
    """Which of TOSA's operators the OpenVINO backend runs: types, exact or bounded, and how."""
    chosen = _chosen(names)
    try:
        from virtaccel.backend_openvino import compile as runtime
        from virtaccel.backend_openvino import operators as table
        from virtaccel.backend_openvino.programs import offered
        from virtaccel.device.backend import BackendUnavailable
    except ImportError as error:
        raise Unavailable(f"the OpenVINO backend cannot be loaded: {error}; install what it needs") from error
    try:
        target = offered(runtime.choose(device))
    except BackendUnavailable as error:
        raise Unavailable(str(error)) from error
    if markdown:
        click.echo(table.markdown(target), nl=False)
        return
    rows = table.rows(target, chosen)
    if as_json:
        click.echo(json.dumps([{**row._asdict(), "op": row.op.name} for row in rows]))
        return
    output = Table(box=None, pad_edge=False)
    for heading in ("operator", "types", "part of", "result", "how"):
        output.add_column(heading, overflow="fold")
    for row in rows:
        style = "yellow" if row.exactness == table.NOT_RUN else ""
        output.add_row(row.op.name, ", ".join(row.types) or "any", row.needs, row.exactness, row.how, style=style)
    terminal().print(output)
