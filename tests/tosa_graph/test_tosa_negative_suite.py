"""Arm's own negative conformance tests, a sample: graphs with one ERROR_IF each, generated here and refused here."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from virtaccel.harness.conformance import suite as suites
from virtaccel.harness.conformance.tools import find_tools
from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import TosaError
from virtaccel.tosa_graph.validate import validate

SELECTION = suites.Selection(
    extensions=frozenset(suites.EXTENSIONS), operators=frozenset({"COND_IF", "RESCALE", "RESIZE", "WHILE_LOOP"})
)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tools = tmp_path_factory.mktemp("suite"), find_tools()
    command = [*suites._command(SELECTION, tools, folder, 1), "--test-type", "negative"]
    subprocess.run(command, check=True, capture_output=True, env=tools.environment(), cwd=folder, timeout=280)
    return folder / "tests"


@pytest.mark.timeout(300)
def test_every_negative_test_is_refused(suite: Path) -> None:
    admitted = []
    count = 0
    for path in sorted(suite.rglob("desc.json")):
        description = json.loads(path.read_text())
        assert description["expected_failure"]
        count += 1
        data = (path.parent / description["tosa_file"]).read_bytes()
        graph = read(data)  # the files are well formed: it is the rules that refuse them
        try:
            validate(graph)
        except TosaError:
            continue
        admitted.append(f"{path.parent.name}: {description['expected_failure_desc']}")
    assert count >= 60
    assert not admitted
