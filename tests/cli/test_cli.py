"""The command line: exit statuses, one line for every failure, --check against known answers, JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from graphs import single

from virtaccel.cli.main import COMMANDS, main
from virtaccel.guest_tools.arrays.program import Array
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.write import GraphWriter

MODELS = ("face_detection_short_range", "hand_recrop", "face_landmark", "hand_landmark_lite", "palm_detection_lite")
PAIR = ((2, 2), DType.FP32)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def run_json(*arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """out = first - second, INT32 too: second output is first_int + 1."""
    writer = GraphWriter()
    first, second = writer.input("first", *PAIR), writer.input("second", *PAIR)
    whole = writer.input("a=b", (3,), DType.INT32)
    one = writer.constant(np.ones(3, np.int32))
    writer.output(writer.operator(Op.SUB, [first, second], PAIR))
    writer.output(writer.operator(Op.ADD, [whole, one], ((3,), DType.INT32)))
    path = tmp_path / "model.tosa"
    path.write_bytes(writer.to_bytes())
    return path


FIRST = np.array([[1, 2], [3, 4]], np.float32)
SECOND = np.array([[0.5, 0.5], [0.5, 0.5]], np.float32)
WHOLE = np.array([1, 2**24 + 1, -5], np.int32)
ANSWERS = {"in_0": FIRST, "in_1": SECOND, "in_2": WHOLE, "out_0": FIRST - SECOND, "out_1": WHOLE + 1}


@pytest.fixture
def arrays(tmp_path: Path) -> dict[str, Path]:
    paths = {}
    for name, array in (("first", FIRST), ("second", SECOND), ("whole", WHOLE)):
        paths[name] = tmp_path / f"{name}.npy"
        np.save(paths[name], array)
    return paths


def answers(folder: Path, **changes: Array | None) -> Path:
    path = folder / "answers.npz"
    np.savez(path, **{name: array for name, array in {**ANSWERS, **changes}.items() if array is not None})
    return path


def test_every_command_in_the_table_can_be_imported_and_explains_itself() -> None:
    for name in COMMANDS:
        result = run(name, "--help")
        assert result.exit_code == 0, result.output


def test_help_lists_the_table() -> None:
    result = run("--help")
    assert all(name in result.output for name in COMMANDS)


def test_outputs_are_written_as_arrays(model: Path, arrays: dict[str, Path], tmp_path: Path) -> None:
    inputs = ["--input", arrays["first"], "--input", f"a=b={arrays['whole']}", "--input", arrays["second"]]
    result = run("run", model, *inputs, "--output-dir", tmp_path / "out")
    assert result.exit_code == 0, result.output
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "out_0.npy"), FIRST - SECOND)
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "out_1.npy"), WHOLE + 1)


def test_check_passes_and_reports_the_worst_error(model: Path, tmp_path: Path) -> None:
    facts = run_json("run", model, "--check", answers(tmp_path), "--repeat", 3)
    assert facts["ok"] is True
    assert facts["latency"]["calls"] == 3
    assert [item["worst"] for item in facts["check"]] == [0, 0]
    assert facts["check"][0]["allowed"] == pytest.approx(1e-4 * 3.5 + 1e-5)


@pytest.mark.parametrize(("error", "status"), [(3e-4, 0), (5e-4, 1), (np.nan, 1), (np.inf, 1)])
def test_check_allows_what_is_allowed_for_floats(error: float, status: int, model: Path, tmp_path: Path) -> None:
    wrong = (FIRST - SECOND).copy()
    wrong[0, 1] += error  # allowed: 1e-4 * 3.5 + 1e-5
    assert run("run", model, "--check", answers(tmp_path, out_0=wrong)).exit_code == status


@pytest.mark.parametrize(("atol", "status"), [(0, 1), (1, 1), (2, 0)])
def test_check_of_integers_is_exact_unless_atol_says_otherwise(
    atol: int, status: int, model: Path, tmp_path: Path
) -> None:
    result = run("run", model, "--check", answers(tmp_path, out_1=WHOLE + 3), "--atol", atol)
    assert result.exit_code == status
    assert ("WRONG in 3 of 3 elements" in result.output) is (status == 1)


def test_sequences_are_run_step_by_step(model: Path, tmp_path: Path) -> None:
    steps = np.stack([FIRST, FIRST * 2, FIRST * 3])
    path = answers(
        tmp_path, in_0=steps, out_0=steps - SECOND, in_2=np.stack([WHOLE] * 3), out_1=np.stack([WHOLE + 1] * 3)
    )
    facts = run_json("run", model, "--check", path)
    assert facts["ok"] is True
    assert facts["latency"]["calls"] == 3
    swapped = answers(
        tmp_path, in_0=steps, out_0=steps[::-1] - SECOND, in_2=np.stack([WHOLE] * 3), out_1=np.stack([WHOLE + 1] * 3)
    )
    assert run("run", model, "--check", swapped).exit_code == 1


def test_unsigned_arrays_stand_for_signed_tensors_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "identity.tosa"
    path.write_bytes(single(Op.IDENTITY, [((3,), DType.INT8)], ((3,), DType.INT8)))
    values = np.array([0, 127, 255], np.uint8)
    good, off = tmp_path / "good.npz", tmp_path / "off.npz"
    np.savez(good, in_0=values, out_0=values)
    np.savez(off, in_0=values, out_0=np.array([0, 127, 254], np.uint8))
    assert run_json("run", path, "--check", good)["ok"] is True
    assert run("run", path, "--check", off).exit_code == 1
    assert run("run", path, "--check", off, "--atol", 1).exit_code == 0


BAD_ANSWERS: dict[str, dict[str, Array | None]] = {
    "model needs in_0 to in_2": {"in_2": None},
    "model needs out_0 to out_1": {"out_2": FIRST},
    "takes float32 of shape": {"in_0": FIRST.astype(np.float64)},
    "output .* expected are float64|expected are float32": {"out_0": np.zeros((3, 3), np.float32)},
    "every out_K must have a leading step axis": {"in_0": FIRST[None]},
    "different lengths": {"in_0": FIRST[None], "in_1": np.stack([SECOND] * 2)},
}


@pytest.mark.parametrize("complaint", BAD_ANSWERS)
def test_answers_that_do_not_fit_are_bad_input(complaint: str, model: Path, tmp_path: Path) -> None:
    result = run("run", model, "--check", answers(tmp_path, **BAD_ANSWERS[complaint]))
    assert_one_line(result, complaint)


def assert_one_line(result: Result, complaint: str) -> None:
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("virtaccel: ")
    assert re.search(complaint, lines[0]), lines[0]


def test_bad_inputs_are_one_line_and_status_2(model: Path, arrays: dict[str, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.npy"
    text.write_text("no array")
    objects = tmp_path / "objects.npy"
    np.save(objects, np.array([{}]), allow_pickle=True)
    first = arrays["first"]
    cases: list[tuple[list[object], str]] = [
        (["run", tmp_path / "none.tosa"], "No such file"),
        (["run", text], "text.npy is not a TOSA model"),
        (["run", tmp_path], "Is a directory"),
        (["run", model], "input 'first' is missing: give --input first=FILE.npy, float32 of shape"),
        (["run", model, "--input", "nowhere.npy"], "cannot read nowhere.npy"),
        (["run", model, "--input", text], "is no .npy file"),
        (["run", model, "--input", objects], "is no .npy file"),
        (["run", model, "--input", f"third={first}"], "there is no input 'third'; inputs are 'first', 'second', 'a=b'"),
        (["run", model, "--input", first, "--input", f"first={first}"], "given twice"),
        (["run", model, *["--input", first] * 4], "one too many"),
        (["run", model, *["--input", first] * 3], r"'a=b' takes int32 .*; convert it with array.astype\('int32'\)"),
        (["run", model, "--check", text], "no .npz file"),
        (["run", model, "--check", first], "no .npz file"),
        (["run", model, "--check", tmp_path / "none.npz"], "cannot read"),
        (["run", model, "--check", answers(tmp_path), "--input", first], "brings its own inputs"),
        (["run", model, "--via", "smoke-signals"], "no way to a device"),
        (["run", model, "--via", "in-process:reference"], "refuses model.tosa"),
        (["run", model, "--device", "TOASTER"], "TOASTER"),
        (["info", "--device", "TOASTER"], "TOASTER"),
        (["inspect", text], "is not a TOSA model"),
    ]
    for arguments, complaint in cases:
        assert_one_line(run(*arguments), complaint)


def test_cut_models_are_bad_input(model: Path, tmp_path: Path) -> None:
    data = model.read_bytes()
    cut = tmp_path / "cut.tosa"
    cut.write_bytes(data[: len(data) // 2])
    assert_one_line(run("run", cut), "cut.tosa is not a TOSA model")


def test_info_tells_what_the_device_advertises() -> None:
    facts = run_json("info")
    assert facts["protocol"] == "1.0"
    assert facts["limits"]["max_artifact_bytes"] <= facts["limits"]["max_request_bytes"] - 96
    assert "openvino" in facts["backends installed"]
    assert facts["executes on"] in run("info").output


def test_inspect_gives_the_device_s_verdict_on_each_kind_of_operator(tmp_path: Path) -> None:
    writer = GraphWriter()
    x = writer.input("x", *PAIR)
    y = writer.operator(Op.EXP, [writer.operator(Op.EXP, [x], PAIR)], PAIR)
    writer.output(writer.operator(Op.CUSTOM, [y], PAIR, {"operator_name": "mystery", "domain_name": "d"}))
    path = tmp_path / "mixed.tosa"
    path.write_bytes(writer.to_bytes())
    facts = run_json("inspect", path)
    verdicts = {row["op"]: (row["count"], row["verdict"]) for row in facts["operators"]}
    assert verdicts["EXP"] == (2, "admitted")
    assert verdicts["CUSTOM"][1].startswith("refused: ")
    assert facts["verdict"].startswith("refused: ")
    text = run("inspect", path)
    assert text.exit_code == 0
    assert "CUSTOM" in text.output


def test_inspect_counts_what_is_in_branches_and_says_what_the_model_needs(tmp_path: Path) -> None:
    writer = GraphWriter()
    condition, x = writer.input("c", (1,), DType.BOOL), writer.input("x", *PAIR)
    regions = {"then_graph": "t", "else_graph": "e"}
    writer.output(writer.operator(Op.COND_IF, [condition, x], PAIR, regions))
    for name, count in (("t", 1), ("e", 2)):
        region = writer.region(name)
        value = region.input(f"{name} x", *PAIR)
        for _ in range(count):
            value = region.operator(Op.EXP, [value], PAIR)
        region.output(value)
    path = tmp_path / "branches.tosa"
    path.write_bytes(writer.to_bytes())
    facts = run_json("inspect", path)
    assert {row["op"]: row["count"] for row in facts["operators"]} == {"EXP": 3, "COND_IF": 1}
    assert facts["needs"] == {"profiles and extensions": ["PRO-FP", "EXT-CONTROLFLOW"], "level": "8K"}
    assert facts["regions"] == ["main", "t", "e"]
    assert "PRO-FP, EXT-CONTROLFLOW, level 8K" in run("inspect", path).output


def test_a_refused_model_leads_to_inspect(tmp_path: Path) -> None:
    path = tmp_path / "custom.tosa"
    path.write_bytes(single(Op.CUSTOM, [PAIR], PAIR, {"operator_name": "mystery", "domain_name": "d"}))
    assert_one_line(run("run", path), "CUSTOM: .*`virtaccel inspect .*custom.tosa`")


def test_inspect_offline_asks_no_device(tmp_path: Path) -> None:
    path = tmp_path / "exp.tosa"
    path.write_bytes(single(Op.EXP, [PAIR], PAIR))
    facts = run_json("inspect", path, "--offline", "--via", "smoke-signals")
    assert (facts["verdict"], facts["operators"][0]["verdict"]) == (None, "not asked")


@pytest.mark.parametrize("name", MODELS)
def test_shared_models_give_their_known_answers(name: str, shared: Path) -> None:
    models = shared / "models"
    facts = run_json("run", models / f"{name}.tosa", "--check", models / f"{name}.io.npz")
    assert facts["ok"] is True, facts["check"]


def test_inspect_reads_every_shared_model(shared: Path) -> None:
    for path in sorted((shared / "models").glob("*.tosa")):
        facts = run_json("inspect", path, "--offline")
        assert facts["inputs"]
        assert facts["operators"]


def test_digits_give_the_reference_model_s_answers(root: Path) -> None:
    folder = root / "examples" / "digits"
    facts = run_json("run", folder / "digits.tosa", "--check", folder / "digits.io.npz")
    assert facts["ok"] is True, facts["check"]
    assert facts["latency"]["calls"] == 360


def test_exit_statuses_of_the_real_program(model: Path, tmp_path: Path) -> None:
    wrong = answers(tmp_path, out_1=WHOLE)
    for arguments, status in (
        (["run", model, "--check", wrong], 1),
        (["run", tmp_path / "none.tosa"], 2),
        (["run"], 2),
        (["--version"], 0),
    ):
        command = [sys.executable, "-c", "from virtaccel.cli.main import main; main()", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr
