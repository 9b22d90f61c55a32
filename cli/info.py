"""`virtaccel info`: identity, capabilities and limits of a device, and the backends that are installed."""

from __future__ import annotations

import json
import uuid

import click
from rich.table import Table

from virtaccel.cli.options import Way, device_options, json_option, open_accelerator, terminal
from virtaccel.device import installed
from virtaccel.device.wire import AcceleratorClass, Capability
from virtaccel.guest_tools.client import DeviceInfo
from virtaccel.guest_tools.transport.base import Config


def class_name(value: int) -> str:
    """The standard's name of an accelerator class, or its number."""
    try:
        return AcceleratorClass(value).name
    except ValueError:
        return f"class {value}"


def capability_names(bits: int) -> list[str]:
    """Names of the assigned capability bits, and the rest as a number (section 5.1: preserved by diagnostic tools)."""
    names = [str(bit.name) for bit in Capability if bits & bit]
    rest = bits & ~sum(Capability)
    return [*names, f"unknown {rest:#x}"] if rest else names


def describe(info: DeviceInfo, config: Config, executes: str | None, via: str) -> dict[str, object]:
    """Everything as plain values, for JSON and for the table."""
    return {
        "via": via,
        "executes on": executes or "not told over this transport",
        "uuid": str(uuid.UUID(bytes=info.uuid)),
        "class": class_name(info.accelerator_class),
        "vendor_id": info.vendor_id,
        "device_id": info.device_id,
        "capabilities": capability_names(info.capabilities),
        "protocol": f"{config.protocol_major}.{config.protocol_minor}",
        "limits": dict(zip((*info._fields[5:], *config._fields[3:]), (*info[5:], *config[3:]), strict=True)),
        "backends installed": installed.names(),
    }


def _rows(facts: dict[str, object]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in facts.items():
        if isinstance(value, dict):
            rows += [(key.replace("_", " "), f"{number:,}") for key, number in value.items()]
        elif isinstance(value, list):
            rows.append((name, ", ".join(value)))
        else:
            rows.append((name.replace("_", " "), str(value)))
    return rows


@click.command()
@device_options
@json_option
def info(way: Way, as_json: bool) -> None:
    """What a device is, can do and allows."""
    with open_accelerator(way) as accelerator:
        facts = describe(accelerator.info, accelerator.session.transport.config, accelerator.device_name, way.via)
    if as_json:
        click.echo(json.dumps(facts))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in _rows(facts):
        table.add_row(*row)
    terminal().print(table)
