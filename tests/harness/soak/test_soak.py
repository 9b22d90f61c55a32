"""The soak, for seconds instead of minutes: a device in order passes, and each planted fault is seen.

Devices are real daemons with OpenVINO in workers. Faults are planted in the daemon (tests/support/soaked_daemon.py);
a guest that gets nothing done is one that was stopped.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click.testing
import pytest
from daemons import Daemon

from virtaccel.cli.main import main
from virtaccel.harness.soak import census
from virtaccel.harness.soak.census import Count, Holding
from virtaccel.harness.soak.counters import Own
from virtaccel.harness.soak.runner import Outcome, Plan, Runner

SUPPORT = Path(__file__).resolve().parents[2] / "support"


@contextmanager
def faulty(folder: Path, fault: str) -> Iterator[tuple[str, ...]]:
    paths = tuple(str(folder / name) for name in "ab")
    program = [sys.executable, str(SUPPORT / "soaked_daemon.py"), fault]
    with Daemon(folder, "--sockets", *paths, program=program) as daemon:
        yield paths
        assert daemon.alive()


def test_a_device_in_order_passes() -> None:
    result = click.testing.CliRunner().invoke(main, ["soak", "--seconds", "8", "--guests", "4", "--json"])
    found = json.loads(result.stdout)
    assert found["findings"] == []
    assert result.exit_code == 0
    assert found["rests"] > 0
    assert found["at_rest"].keys() >= {"daemon", "oldest worker", "first guest"}
    for name in ("answers", "bytes", "loads", "connections"):
        assert found["counts"][name] > 0, name


def test_a_wrong_bit_now_and_then_is_seen(tmp_path: Path) -> None:
    with faulty(tmp_path, "wrong") as paths:
        outcome = Runner(Plan(60.0, 2, 1, paths, kill_workers=False, findings=1)).run()
    assert {finding.kind for finding in outcome.findings} == {"wrong"}


def test_a_command_that_never_comes_back_is_seen(tmp_path: Path) -> None:
    with faulty(tmp_path, "lost") as paths:
        outcome = Runner(Plan(60.0, 2, 1, paths, 3.0, kill_workers=False, kill_guests=False, findings=1)).run()
    assert {finding.kind for finding in outcome.findings} == {"stuck"}


def test_descriptors_left_behind_by_each_connection_is_seen(tmp_path: Path) -> None:
    with faulty(tmp_path, "kept") as paths:
        result = click.testing.CliRunner().invoke(
            main, ["soak", "--seconds", "14", "--json", *(word for path in paths for word in ("--socket", path))]
        )
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert [finding["kind"] for finding in found["findings"]] == ["leak"]
    assert "daemon: descriptors" in found["findings"][0]["text"]


def test_a_guest_that_gets_nothing_done_is_seen(tmp_path: Path) -> None:
    stopped: list[int] = []

    def stop_one(_: Outcome) -> None:
        slot = runner.slots[1]
        process = slot.process
        assert process is not None
        if not stopped and slot.words[Own.STEPS]:
            stopped.append(process.pid)
            os.kill(process.pid, signal.SIGSTOP)

    with faulty(tmp_path, "none") as paths:
        plan = Plan(60.0, 2, 1, paths, 5.0, kill_workers=False, kill_guests=False, findings=1)
        runner = Runner(plan, stop_one)
        outcome = runner.run()
    assert [finding.kind for finding in outcome.findings] == ["stuck"]
    assert "guest 1, life 1: nothing done in 5 s" in outcome.findings[0].text
    assert census.gone(stopped[0])


@pytest.mark.parametrize(
    ("values", "flat"),
    [
        ([50, 52, 51, 50, 52, 51, 50, 52], True),
        ([50, 51, 52, 53, 54, 55, 56, 57], False),
        ([90, 80, 50, 50, 50, 50, 50, 50], True),
        ([10, 30, 50, 50, 50, 50, 50, 50], True),  # rises while warming up only
    ],
)
def test_the_rule(values: list[int], flat: bool) -> None:
    counts = [Count(float(at), Holding(value, 3, 1)) for at, value in enumerate(values)]
    memory, descriptors, threads = census.judge("daemon", counts, 8.0, Holding(4, 0, 0))
    assert memory.holds == flat
    assert descriptors.holds
    assert threads.holds
    assert memory.rests == 6


def test_too_few_rests_say_nothing() -> None:
    counts = [Count(float(at), Holding(1, 1, 1)) for at in range(census.FEWEST)]
    assert census.judge("daemon", counts, 4.0, Holding(0, 0, 0)) == []
