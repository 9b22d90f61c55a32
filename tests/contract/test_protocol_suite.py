"""The protocol suite on our own device, in process and through a socket; and that it fails a device that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from virtaccel.cli.main import main
from virtaccel.device import commands, decode, engine
from virtaccel.device.objects import Table
from virtaccel.guest_tools.transport.in_process import open_transport
from virtaccel.harness.conformance import outcome
from virtaccel.harness.conformance import protocol_suite as suite
from virtaccel.virtqueue import chain

NOT_SHOWN = {"VQ-020"}


def outcomes(backend: str) -> dict[str, str]:
    transport = open_transport(backend)
    try:
        return {result.name: result.outcome for result in suite.run(transport)}
    finally:
        transport.close()


@pytest.mark.parametrize("backend", ["reference", "openvino"])
def test_our_device_passes(backend: str) -> None:
    found = outcomes(backend)
    assert {name for name, seen in found.items() if seen != outcome.PASSED} == NOT_SHOWN
    assert [f"VQ-{number:03}" for number in range(1, 21)] == [name for name in found if name.startswith("VQ")]


def test_case_names_are_unique() -> None:
    names = [case.name for case in suite.CASES]
    assert len(set(names)) == len(names)


def _no_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    insert = Table.insert

    def reuse(table: Table[object], record: object) -> int:
        if table._free:
            table._generations[table._free[-1]] -= 1
        return insert(table, record)

    monkeypatch.setattr(Table, "insert", reuse)


def _no_range_check(monkeypatch: pytest.MonkeyPatch) -> None:
    original = commands._transferable

    def transferable(state: object, request: decode.Transfer, usage: int) -> object:
        return original(state, request._replace(offset=0, bytes=1), usage)  # type: ignore[arg-type]

    monkeypatch.setattr(commands, "_transferable", transferable)


WRONG: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "indirect tables followed as memory": ("VQ-006", lambda patch: patch.setattr(chain, "KNOWN_FLAGS", 7)),
    "unknown usage accepted": ("VQ-010", lambda patch: patch.setattr(decode, "KNOWN_USAGE", 0xFFFFFFFF)),
    "any memory domain": ("WA-4", lambda patch: patch.setattr(decode, "DOMAINS", frozenset(range(256)))),
    "any access": ("WA-5.6", lambda patch: patch.setattr(decode, "ACCESSES", frozenset(range(256)))),
    "usage of transfers ignored": ("OB-4.4u", lambda patch: patch.setattr(commands, "TRANSFER_SOURCE", 3)),
    "IDs given twice": ("OB-4.1", _no_generations),
    "ranges not checked": ("OB-4.4", _no_range_check),
    "the wrong status": ("VQ-009", lambda patch: patch.setattr(engine, "UNSUPPORTED", 3)),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_device_that_is_wrong_fails_the_case(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, spoil = WRONG[what]
    spoil(monkeypatch)
    found = outcomes("reference")
    assert found[case] == outcome.FAILED
    assert found["VQ-001"] == outcome.PASSED


def test_command_line(tmp_path: Path) -> None:
    arguments = ["conformance", "protocol", "--via", "in-process:reference", "--json"]
    run = CliRunner().invoke(main, arguments)
    assert run.exit_code == 0, run.output
    content = json.loads(run.output)
    assert content["counts"] == {"passed": len(suite.CASES) - 1, "failed": 0, "not shown": 1}
    one = CliRunner().invoke(main, [*arguments[:-1], "--only", "vq-006"])
    assert one.output.splitlines()[0].startswith("VQ-006   passed")
    none = CliRunner().invoke(main, [*arguments, "--only", "no such case"])
    assert none.exit_code == 1
