"""The fuzzers and the protocol suite against a daemon behind a real socket, as they may be pointed at anybody's."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from daemons import Daemon, wait_until

from virtaccel.cli.main import main

BACKENDS = ("reference", "openvino")


@pytest.fixture(scope="module", params=BACKENDS)
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    folder = Path(tempfile.mkdtemp(prefix="virtaccel-test-"))  # short: a Unix socket lives in it
    running = Daemon(folder, backend=request.param)
    yield running
    running.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(("target", "least"), [("session", 300), ("vhost", 600)])
def test_a_socket_is_fuzzed(daemon: Daemon, target: str, least: int, tmp_path: Path) -> None:
    before = daemon.idle_fds()
    arguments = ["--via", f"vhost-user:{daemon.path}", "--steps", str(least), "--seed", "9", "--json"]
    arguments += ["--output", str(tmp_path)]
    run = CliRunner().invoke(main, ["fuzz", target, *arguments])
    assert run.exit_code == 0, run.output
    content = json.loads(run.output.splitlines()[-1])
    assert content["work"] >= least
    assert daemon.process.poll() is None
    # The front end's end is noticed a little later than it is.
    wait_until(lambda: daemon.fds() == before, f"descriptors are {before} again", daemon)


def test_protocol_cases_through_a_socket(daemon: Daemon) -> None:
    run = CliRunner().invoke(main, ["conformance", "protocol", "--via", f"vhost-user:{daemon.path}", "--json"])
    assert run.exit_code == 0, run.output
    assert json.loads(run.output)["counts"]["not shown"] == 1
    before = daemon.cpu_seconds()
    time.sleep(0.3)
    assert daemon.cpu_seconds() - before <= 0.02, "the daemon sleeps again, whatever chains it was given"


def test_an_answer_that_never_comes_is_a_finding(tmp_path: Path) -> None:
    """A back end that is no longer there: said in one line, not a traceback."""
    run = CliRunner().invoke(main, ["fuzz", "session", "--via", f"vhost-user:{tmp_path}/none", "--seconds", "1"])
    assert run.exit_code == 2
    assert "is vhost-user-accel running there?" in run.output
