"""Every subcommand of `virtaccel bench`, for real and briefly: that it measures what it says, never how fast."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from virtaccel.cli.main import main
from virtaccel.guest_tools.errors import Unavailable
from virtaccel.harness.bench import tflite
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.write import GraphWriter

OPCODES = {
    "GET_DEVICE_INFO", "CREATE_CONTEXT", "DESTROY_CONTEXT", "ALLOCATE_BUFFER", "FREE_BUFFER", "WRITE_BUFFER",
    "READ_BUFFER", "LOAD_PROGRAM", "UNLOAD_PROGRAM", "CREATE_QUEUE", "DESTROY_QUEUE", "SUBMIT", "POLL_EVENT",
    "DESTROY_EVENT",
}  # fmt: skip


def bench(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(main, ["bench", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    for row in found["rows"]:
        assert 0 < row["min_ns"] <= row["p50_ns"] <= row["p99_ns"]
    return found


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A model of one convolution."""
    writer = GraphWriter()
    x = writer.input("x", (1, 16, 16, 3), DType.FP32)
    w = writer.constant(np.random.default_rng(1).normal(size=(4, 3, 3, 3)).astype(np.float32))
    b, zero = writer.constant(np.zeros(4, np.float32)), writer.constant(np.zeros(1, np.float32))
    window = {"pad": [1, 1, 1, 1], "stride": [1, 1], "dilation": [1, 1], "acc_type": DType.FP32}
    writer.output(writer.operator(Op.CONV2D, [x, w, b, zero, zero], ((1, 16, 16, 4), DType.FP32), window))
    path = tmp_path / "small.tosa"
    path.write_bytes(writer.to_bytes())
    return path


def test_commands_times_every_opcode_in_every_lane() -> None:
    found = bench("commands", "--rounds", "1")
    lanes: dict[str, set[str]] = {}
    for row in found["rows"]:
        lanes.setdefault(row["lane"], set()).add(row["what"])
    assert lanes.keys() == {"in process", "socket", "socket, polling", "OpenVINO"}
    for lane in ("in process", "socket", "socket, polling"):
        assert lanes[lane] >= OPCODES | {"SUBMIT until complete"}
    assert lanes["OpenVINO"] == {"SUBMIT until complete"}


def test_model_against_openvino_on_the_same_compiled_model(small: Path) -> None:
    found = bench("model", str(small), "--rounds", "16")
    names = [figure["name"] for figure in found["figures"]]
    assert names == ["small.tosa: device over OpenVINO", "small.tosa: throughput over AsyncInferQueue"]


def test_load_first_again_and_alone(small: Path) -> None:
    found = bench("load", str(small), "--rounds", "2")
    assert [row["lane"] for row in found["rows"]] == [
        "first load", "second load", "compile alone", "transfer of the artifact"
    ]  # fmt: skip
    first, again = found["rows"][0]["p50_ns"], found["rows"][1]["p50_ns"]
    assert again < first  # or nothing is shared


def test_transfer_of_every_size_beside_memcpy() -> None:
    found = bench("transfer", "--rounds", "2", "--no-socket")
    assert {row["what"] for row in found["rows"]} == {"4 KiB", "64 KiB", "1024 KiB", "8192 KiB"}
    assert "memcpy" in {row["lane"] for row in found["rows"]}


def test_scale_to_a_thousand_objects_and_sixty_four_bindings() -> None:
    found = bench("scale", "--rounds", "1")
    assert {"1 live", "10 live", "100 live", "1000 live", "2 bindings", "64 bindings"} == {
        row["lane"] for row in found["rows"]
    }
    assert len(found["figures"]) == 5


def test_check_makes_a_missed_bound_an_exit_status(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from virtaccel.harness.bench.report import Figure

    monkeypatch.setattr(Figure, "holds", property(lambda figure: False))
    result = CliRunner().invoke(main, ["bench", "load", str(small), "--rounds", "1", "--check"])
    assert result.exit_code == 1
    assert "missed" in result.output


def test_a_model_that_is_none_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "none.tosa"
    path.write_bytes(b"not a model")
    result = CliRunner().invoke(main, ["bench", "model", str(path)])
    assert result.exit_code == 2
    assert len(result.output.strip().splitlines()) == 1


def test_an_original_comes_out_of_the_cached_package(tmp_path: Path) -> None:
    # The archive stands in for the package, which tests do not download; unpacking and finding are the real ones.
    with zipfile.ZipFile(tmp_path / "mediapipe-0.10.14-made-up.whl", "w") as archive:
        archive.writestr("mediapipe/modules/face/face.tflite", b"model")
        archive.writestr("../../outside.tflite", b"elsewhere")
        archive.writestr("mediapipe/code.py", b"")
    assert tflite.original("face", tmp_path).read_bytes() == b"model"
    assert not (tmp_path.parent.parent / "outside.tflite").exists()
    assert not (tmp_path / "code.py").exists()
    with pytest.raises(Unavailable, match=r"no other\.tflite"):
        tflite.original("other", tmp_path)


def test_inspect_compiled_lists_what_the_runtime_runs(small: Path) -> None:
    result = CliRunner().invoke(main, ["inspect", str(small), "--compiled", "--json"], catch_exceptions=False)
    nodes = json.loads(result.stdout)["nodes"]
    [convolution] = [node for node in nodes if node["kind"] == "Convolution"]
    assert convolution["shape"] == [1, 4, 16, 16]
    assert convolution["precision"] == "f32"
    assert not [node for node in nodes if node["kind"] == "Transpose"]
    table = CliRunner().invoke(main, ["inspect", str(small), "--compiled"], catch_exceptions=False)
    assert "1 Convolution" in table.output
