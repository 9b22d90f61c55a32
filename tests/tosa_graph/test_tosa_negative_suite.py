"""Arm's own negative conformance tests, a sample: graphs with one ERROR_IF each, generated here and refused here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tosa_reference_model

from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import TosaError
from virtaccel.tosa_graph.validate import validate

LIBRARIES = Path(tosa_reference_model.__file__).parent
TOOLS = LIBRARIES.parent / "bin"
OPERATORS = ("cond_if", "rescale", "resize", "while_loop")


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    programs = Path(sys.executable).parent
    options = {
        "tosa-version": "1.0.2",
        "test-type": "negative",
        "output-type": "binary",
        "ref-model-path": TOOLS / "tosa_reference_model",
        "generate-lib-path": LIBRARIES / "libtosa_reference_generate_lib.so",
        "schema-path": TOOLS / "tosa.fbs",
        "flatc-path": TOOLS / "flatc",
        "build-directory": folder / "build",
        "output-directory": folder / "tests",
    }
    command = [programs / "tosa_verif_conformance_generator", "--profile", "all", "--extension", "all", "-j", "1"]
    command += ["--operators", *OPERATORS]
    command += [part for name, value in options.items() for part in (f"--{name}", value)]
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(list(map(str, command)), check=True, capture_output=True, env=environment, timeout=280)
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
