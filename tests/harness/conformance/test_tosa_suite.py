"""The conformance tool itself: Arm's reference model in the device's place must pass everything, and each kind of wrong
answer must be seen. The suite is generated here by Arm's tools, for a few operators.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from virtaccel.cli.main import main
from virtaccel.harness.conformance import pool, report
from virtaccel.harness.conformance.case import Case, load, target_of
from virtaccel.harness.conformance.judge import Failure, Outcome, Outputs, Refusal, System
from virtaccel.harness.conformance.pool import TestBed, Work
from virtaccel.harness.conformance.suite import Entry, Selection, Suite, obtain, sample
from virtaccel.harness.conformance.tools import Generator, Tools, find_tools, storage
from virtaccel.tosa_graph.elements import pack
from virtaccel.tosa_graph.graph import DType
from virtaccel.tosa_graph.target import Extension, Profile

OPERATORS = ("MATMUL", "CLZ")
SELECTION = Selection(extensions=frozenset({"int16"}), operators=frozenset(OPERATORS))


@pytest.fixture(scope="session")
def tools() -> Tools:
    return find_tools()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("suites")


@pytest.fixture(scope="session")
def suite(tools: Tools, cache: Path) -> Suite:
    return obtain(SELECTION, tools, cache, jobs=2)


class ReferenceSystem:
    """Arm's reference model as the system under test: it runs the very artifact that a device is given, constants and
    all, in the types' own precision."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._generator = Generator(tools)

    def run(self, case: Case, load_only: bool) -> Refusal | Failure | Outputs:
        assert case.graph is not None
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "filled.tosa").write_bytes(case.artifact)
            inputs = [name for name in case.graph.main.inputs if name in case.description["ifm_name"]]
            for name in inputs:
                self._write(folder / f"{name}.npy", case, name)
            files = [f"{name}.npy" for name in inputs]
            reduced = {"tosa_file": "filled.tosa", "ifm_name": inputs, "ifm_file": files}
            (folder / "desc.json").write_text(json.dumps({**case.description, **reduced}))
            status, said = self._call(folder)
            if status == 2:
                return Refusal(said)
            if status:
                return Failure(said)
            if load_only:
                return Outputs([])
            arrays = {tensor: np.load(folder / file) for tensor, file in case.outputs}
            outputs = [(arrays[tensor.name], tensor.dtype) for tensor in case.concrete_outputs()]
            return Outputs([array.tobytes() if array.dtype.kind == "V" else pack(array, t) for array, t in outputs])

    def _write(self, file: Path, case: Case, name: str) -> None:
        described = case.description["meta"]["data_gen"]
        tensor = described["tensors"][name]
        data = self._generator.packed(described, name)
        np.save(file, storage(data, DType[tensor["data_type"]], tensor["shape"]))

    def _call(self, folder: Path) -> tuple[int, str]:
        command = [str(self._tools.reference_model), "--test_desc=desc.json", "--tosa_level=EIGHTK"]
        command.append(f"--operator_fbs={self._tools.schema}")
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stderr[-300:]


class Spoilt:
    """A system whose answers are changed on the way."""

    def __init__(self, system: System, spoil: Callable[[bytearray], None]) -> None:
        self._system, self._spoil = system, spoil

    def run(self, case: Case, load_only: bool) -> Refusal | Failure | Outputs:
        answer = self._system.run(case, load_only)
        if not isinstance(answer, Outputs) or not answer.data:
            return answer
        data = bytearray(answer.data[0])
        self._spoil(data)
        return Outputs([bytes(data), *answer.data[1:]])


class Fixed:
    """A system that answers everything alike."""

    def __init__(self, answer: Refusal | Failure | Outputs) -> None:
        self._answer = answer

    def run(self, case: Case, load_only: bool) -> Refusal | Failure | Outputs:
        return self._answer


def bed_of(suite: Suite, tools: Tools, system: System) -> TestBed:
    return TestBed(Work(suite.folder, tools), system)


def chosen(suite: Suite, operator: str, negative: bool = False, types: str = "") -> Entry:
    return next(e for e in suite.entries if e.operator == operator and e.negative == negative and types in e.types)


def test_reference_model_passes_every_positive_and_negative_test(suite: Suite, tools: Tools) -> None:
    entries = sample(suite.entries, 40)
    assert {entry.operator for entry in entries} == set(OPERATORS)
    assert any(entry.negative for entry in entries)
    judged = bed_of(suite, tools, ReferenceSystem(tools))
    verdicts = {entry.name: judged.verdict(entry) for entry in entries}
    assert {name: verdict for name, verdict in verdicts.items() if verdict.outcome != Outcome.PASSED} == {}


@pytest.mark.parametrize(
    ("operator", "types"),
    [("MATMUL", "INT8"), ("MATMUL", "INT48"), ("MATMUL", "FP32"), ("MATMUL", "FP16"), ("CLZ", "")],
)
def test_one_wrong_element_is_wrong(suite: Suite, tools: Tools, operator: str, types: str) -> None:
    def flip(data: bytearray) -> None:
        # The highest bits of the last element: of a float its sign and exponent, of an integer its size.
        data[-1] ^= 0x70

    entry = chosen(suite, operator, types=types)
    verdict = bed_of(suite, tools, Spoilt(ReferenceSystem(tools), flip)).verdict(entry)
    assert verdict.outcome == Outcome.WRONG
    assert "1 of" in verdict.reason or "differ" in verdict.reason


def test_answer_of_another_size_is_wrong(suite: Suite, tools: Tools) -> None:
    entry = chosen(suite, "CLZ")
    assert bed_of(suite, tools, Fixed(Outputs([b"\0" * 3]))).verdict(entry).outcome == Outcome.WRONG


def test_failed_submission_is_wrong_and_refusal_is_refused(suite: Suite, tools: Tools) -> None:
    entry = chosen(suite, "CLZ")
    assert bed_of(suite, tools, Fixed(Failure("no"))).verdict(entry).outcome == Outcome.WRONG
    refused = bed_of(suite, tools, Fixed(Refusal("CLZ: not run"))).verdict(entry)
    assert refused == (Outcome.REFUSED, "CLZ: not run")


def test_negative_test_that_is_admitted_is_wrong(suite: Suite, tools: Tools) -> None:
    verdict = bed_of(suite, tools, Fixed(Outputs([]))).verdict(chosen(suite, "MATMUL", negative=True))
    assert verdict.outcome == Outcome.WRONG
    assert "admitted" in verdict.reason


def test_constants_are_in_the_artifact_and_only_inputs_remain(suite: Suite, tools: Tools) -> None:
    entry = next(e for e in suite.entries if e.operator == "MATMUL" and e.types.startswith("INT8"))
    case = load(suite.path(entry), entry, Generator(tools))
    assert case.graph is not None
    made = {name: tensor for name, tensor in case.graph.main.tensors.items() if tensor.data is not None}
    assert set(made) == {name for name in case.description["ifm_name"] if name.startswith("const-")}
    assert all(tensor.data == case.data[name] for name, tensor in made.items())
    assert not set(case.graph.main.inputs) & set(made)


def test_target_is_what_the_test_is_for_and_no_more() -> None:
    entry = Entry("x/y", "FFT2D", "", False, ("pro-fp",), ("fft", "bf16"))
    target = target_of(entry)
    assert (target.profiles, target.extensions) == (Profile.FLOATING_POINT, Extension.FFT | Extension.BF16)


def test_second_request_is_served_from_the_cache(suite: Suite, tools: Tools, cache: Path) -> None:
    def never(text: str) -> None:
        raise AssertionError(text)

    part = obtain(Selection(operators=frozenset({"CLZ"})), tools, cache, say=never)
    assert part.folder == suite.folder
    assert {entry.operator for entry in part.entries} == {"CLZ"}
    whole = Selection(operators=frozenset({"CLZ"}), extensions=frozenset({"bf16"}))
    with pytest.raises(AssertionError, match="generating"):
        obtain(whole, tools, cache, say=never)


def test_selection_needs_one_profile_and_every_extension(suite: Suite) -> None:
    def selects(selection: Selection) -> list[Entry]:
        return [entry for entry in suite.entries if selection.has(entry)]

    assert all("int16" not in entry.extensions for entry in selects(Selection()))
    assert any("int16" in entry.extensions for entry in selects(Selection(extensions=frozenset({"int16", "fft"}))))
    integer = selects(Selection(profiles=frozenset({"pro-int"})))
    assert integer
    assert all("pro-int" in entry.profiles for entry in integer)


def test_sample_is_fixed_and_spread() -> None:
    entries = [
        Entry(f"a/{operator}/{operator}_{number}_{types}", operator, types, number % 5 == 0, ("pro-int",), ())
        for operator in ("ADD", "SUB", "CONV2D")
        for types in ("INT8", "INT32", "FP16")
        for number in range(40)
    ]
    first = sample(entries, 36)
    assert first == sample(list(reversed(entries)), 36)
    groups = {(entry.operator, entry.types, entry.negative) for entry in first}
    assert len(first) == 36
    assert len(groups) == 18


@pytest.mark.parametrize(("how", "reason"), [(signal.SIGSEGV, "SIGSEGV"), (signal.SIGSTOP, "no answer in 3 s")])
def test_worker_that_dies_or_hangs_is_crashed_and_replaced(
    suite: Suite, tools: Tools, how: signal.Signals, reason: str
) -> None:
    entries = [entry for entry in suite.entries if entry.operator == "CLZ"][:3]
    results = []
    for result in pool.run(entries, Work(suite.folder, tools, "in-process:reference", seconds=3)):
        results.append(result)
        if len(results) == 1:
            (worker,) = multiprocessing.active_children()
            assert worker.pid is not None
            os.kill(worker.pid, how)
    assert [result.entry for result in results] == entries
    assert [result.verdict.outcome == Outcome.CRASHED for result in results] == [False, True, False]
    assert reason in results[1].verdict.reason


def test_device_without_tosa_refuses_positive_and_negative_tests_alike(suite: Suite, tools: Tools) -> None:
    """A refusal for want of support is no proof that a rule was seen: the reference backend takes no TOSA at all."""
    entries = sample([entry for entry in suite.entries if entry.operator == "CLZ" and not entry.negative], 4)
    results = list(pool.run(entries, Work(suite.folder, tools, "in-process:reference", jobs=2)))
    assert {result.verdict.outcome for result in results} == {Outcome.REFUSED}
    assert report.refusals(results)["CLZ"].total() == 4


def test_command_runs_the_device_and_reports_each_operator(suite: Suite, cache: Path) -> None:
    arguments = ["conformance", "tosa", "--operators", "clz,matmul", "--sample", "12", "--jobs", "2", "--json"]
    result = CliRunner().invoke(main, [*arguments, "--cache", str(cache)])
    facts = json.loads(result.stdout)
    assert set(facts["operators"]) == {"CLZ", "MATMUL"}
    assert facts["total"]["total"] == 12
    assert facts["total"]["wrong"] == facts["total"]["crashed"] == 0
    assert facts["operators"]["CLZ"]["passed"] == facts["operators"]["CLZ"]["total"]
    assert result.exit_code == 0


def test_command_exits_1_when_fewer_pass_than_asked_for(suite: Suite, cache: Path) -> None:
    arguments = ["conformance", "tosa", "--operators", "CLZ", "--sample", "2", "--jobs", "1", "--at-least", "3"]
    result = CliRunner().invoke(main, [*arguments, "--cache", str(cache)])
    assert result.exit_code == 1
    assert "CLZ" in result.stdout


def test_official_runner_takes_the_device_as_its_system(suite: Suite, tools: Tools, tmp_path: Path) -> None:
    entries = [chosen(suite, "CLZ"), chosen(suite, "CLZ", negative=True), chosen(suite, "MATMUL", types="FP32")]
    folders = [tmp_path / entry.name for entry in entries]
    for entry, folder in zip(entries, folders, strict=True):
        shutil.copytree(suite.path(entry), folder)
    command = [sys.executable, "-m", "runner.tosa_verif_run_tests", "--no-color"]
    command += ["--sut-module", "virtaccel.harness.conformance.tosa_sut"]
    command += ["--ref-model-path", str(tools.reference_model), "--generate-lib-path", str(tools.generate_library)]
    command += ["--schema-path", str(tools.schema), "--flatc-path", str(tools.flatc)]
    command += ["--verify-path", str(tools.verify_program), "--test", *map(str, folders)]
    code = "import sys; from runner.tosa_verif_run_tests import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *command[3:]],
        cwd=tmp_path,
        env=tools.environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    totals = [line for line in done.stdout.splitlines() if line.startswith("Totals (virtaccel")]
    assert totals, done.stdout[-2000:] + done.stderr[-2000:]
    assert "2 expected_pass, 1 expected_failure, 0 unexpected_pass, 0 unexpected_failure" in totals[0]
