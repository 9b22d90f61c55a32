"""The fuzzers on the device as it is: nothing is found, the same seed does the same, findings become files that replay.

Longer runs of each target are for the command line; here each does enough to show that it gets somewhere.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner

from virtaccel.cli.main import main
from virtaccel.guest_tools.errors import InputError, Unavailable
from virtaccel.harness.fuzz import reproducer
from virtaccel.harness.fuzz.engine import Fuzzer, Limits, attempt, shrink, signature
from virtaccel.harness.fuzz.reproducer import Reproducer
from virtaccel.harness.fuzz.run import Plan, Run
from virtaccel.harness.fuzz.target import Finding, TargetBase
from virtaccel.harness.fuzz.targets import TARGETS, make

# Work for each target, and behaviours that so much work has to show.
ENOUGH = {
    "ring": (20_000, 60),
    "frame": (10_000, 80),
    "session": (60_000, 80),
    "vhost": (8_000, 35),
    "tosa": (2_500, 200),
    "device": (6_000, 20),
}
REGRESSIONS = sorted((Path(__file__).parent / "regressions").glob("*.json"))


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_found(name: str) -> None:
    steps, behaviours = ENOUGH[name]
    target = make(name)
    fuzzer = Fuzzer(target)
    fuzzer.run(20, Limits(seconds=60, steps=steps))
    target.close()
    assert not fuzzer.findings, fuzzer.findings[0].trace
    assert fuzzer.steps >= steps
    assert len(target.features) >= behaviours


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_regression(path: Path) -> None:
    """What was found once, and fixed, stays fixed."""
    saved = reproducer.load(path)
    target = make(saved.target)
    _, error = attempt(target, saved.data)
    target.close()
    assert error is None, f"{saved.what}: {error}"


@pytest.mark.parametrize("name", ["ring", "session", "frame", "device"])
def test_the_same_seed_gives_the_same_inputs(name: str) -> None:
    def inputs() -> list[bytes]:
        target = make(name)
        seen: list[bytes] = []
        original = target.execute

        def execute(data: bytes) -> int:
            seen.append(data)
            return original(data)

        target.execute = execute  # type: ignore[method-assign]
        Fuzzer(target).run(5, Limits(steps=400))
        return seen

    first = inputs()
    assert len(first) > 1
    assert first == inputs()


@pytest.mark.parametrize("name", ["ring", "session", "vhost", "device"])
def test_any_bytes_are_an_input(name: str) -> None:
    target = make(name)
    for data in (b"", b"\0", b"\xff" * 3, bytes(200), b"\xff" * 200, bytes(range(256))):
        assert attempt(target, data)[1] is None
    target.close()


class Picky(TargetBase):
    """A target with a fault of its own: any input with three records that begin with 7."""

    stride = 2

    def generate(self, random: Random) -> bytes:
        return random.randbytes(400)

    def execute(self, data: bytes) -> int:
        sevens = data[::2].count(7)
        self.features.add(sevens)
        if sevens >= 3:
            raise Finding(f"{sevens} sevens")
        return 1


def test_findings_are_shrunk_to_what_matters() -> None:
    target = Picky()
    noise = bytes([1, 2] * 30 + [7, 5] + [1, 2] * 30 + [7, 6, 7, 9] + [1, 2] * 5)
    _, error = attempt(target, noise)
    assert error is not None
    assert shrink(target, noise, signature(error)) == bytes([7, 0] * 3)


def test_a_finding_is_shrunk_and_told_once() -> None:
    fuzzer = Fuzzer(Picky())
    fuzzer.run(3, Limits(steps=2_000, findings=2))
    assert [found.data for found in fuzzer.findings] == [bytes([7, 0] * 3)]


def test_reproducer_round_trip(tmp_path: Path) -> None:
    saved = Reproducer("ring", "", b"\1\2\3", "what was wrong")
    path = saved.save(tmp_path / "new", "line 1\nline 2")
    assert reproducer.load(path) == saved
    (tmp_path / "bad").write_text("{}")
    with pytest.raises(InputError, match="is no reproducer"):
        reproducer.load(tmp_path / "bad")


def test_target_names_are_told() -> None:
    with pytest.raises(Unavailable, match="ring, frame, session, vhost, tosa, device"):
        make("rings")
    with pytest.raises(Unavailable, match="in this process only"):
        make("ring", "vhost-user:/nowhere")


def test_command_line(tmp_path: Path) -> None:
    run = CliRunner().invoke(
        main, ["fuzz", "ring", "--steps", "3000", "--seed", "4", "--json", "--output", str(tmp_path)]
    )
    assert run.exit_code == 0, run.output
    content = json.loads(run.output)
    assert content["work"] >= 3000
    assert content["findings"] == []
    assert not list(tmp_path.iterdir())


def test_coverage_guided(tmp_path: Path) -> None:
    """By libFuzzer, which ends its process itself; it is ours that counts and reports."""
    arguments = ["fuzz", "tosa", "--engine", "atheris", "--seconds", "6", "--json", "--output", str(tmp_path)]
    run = CliRunner().invoke(main, arguments)
    assert run.exit_code == 0, run.output
    content = json.loads(run.output.splitlines()[-1])
    assert content["engine"] == "atheris"
    assert content["work"] > 200


def test_corpus_is_read_and_added_to(tmp_path: Path) -> None:
    arguments = ["fuzz", "device", "--steps", "300", "--corpus", str(tmp_path), "--json"]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept
    assert CliRunner().invoke(main, arguments).exit_code == 0


def test_replay_says_whether_it_still_shows(tmp_path: Path) -> None:
    path = Reproducer("ring", "", bytes(80), "something").save(tmp_path)
    run = CliRunner().invoke(main, ["fuzz", "replay", str(path)])
    assert run.exit_code == 0
    assert "nothing wrong" in run.output


DEADLY = """
import os, signal, time

from virtaccel.harness.fuzz.target import TargetBase

class Deadly(TargetBase):
    def generate(self, random):
        return bytes([random.choice((1, 2, {first}))]) + b"rest"

    def execute(self, data):
        if data[0] == 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        if data[0] == 4:
            time.sleep(60)
        return 1
"""


@pytest.mark.parametrize(("first", "what"), [(3, "ended with SIGSEGV"), (4, "not done after")])
def test_a_process_that_dies_or_hangs_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, what: str
) -> None:
    """Its input is known all the same, and saved. The target is a module of its own beside this run."""
    (tmp_path / "deadly_target.py").write_text(DEADLY.format(first=first))
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = Plan("deadly_target:Deadly", limits=Limits(seconds=30, findings=1), output=tmp_path / "found")
    outcome = Run(plan, lambda outcome: None, hang_seconds=1.0).run()
    assert [what in saved.what for saved in outcome.findings] == [True]
    assert reproducer.load(Path(outcome.findings[0].path)).data == bytes([first]) + b"rest"
