"""Compiled models on disk under isolation: who writes them, who reads them, and what a rotten one costs.

A confined worker reads entries and can write none, so nothing that a guest's worker or sandbox does lasts longer than
it; the daemon writes in the form `compile` (docs/threat-model.md)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import graphs
import numpy as np
import pytest
from daemons import Daemon

from virtaccel.backend_openvino import store
from virtaccel.backend_openvino.sandbox import FAULTS_SWITCH
from virtaccel.guest_tools.arrays import accelerator
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.write import GraphWriter


def program(name: str, salt: float) -> bytes:
    writer = GraphWriter()
    x = writer.input(name, (8,), DType.FP32)
    constant = writer.constant(np.full(8, salt, np.float32))
    writer.output(writer.operator(Op.ADD, [x, constant], ((8,), DType.FP32)))
    return writer.to_bytes()


def assert_right(path: str, tosa: bytes, salt: float) -> None:
    with accelerator.open(f"vhost-user:{path}", patience=60.0) as device:
        (y,) = device.load(tosa)(np.arange(8, dtype=np.float32))
        np.testing.assert_array_equal(y, np.arange(8, dtype=np.float32) + np.float32(salt))


@contextmanager
def daemon(folder: Path, models: Path, isolation: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    monkeypatch.setenv("VIRTACCEL_MODEL_CACHE", str(models))
    monkeypatch.setenv(FAULTS_SWITCH, "1")
    place = folder / isolation
    place.mkdir()
    with Daemon(place, "--isolation", isolation, backend="openvino") as made:
        yield made
        assert "Traceback" not in made.log()
        assert made.stop() == 0


def test_the_daemon_writes_and_workers_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = tmp_path / "models"
    # In the form `none` nothing is injected, so a program whose compiling would crash a sandbox gets an entry.
    with daemon(tmp_path, models, "none", monkeypatch) as made:
        assert_right(made.path, program("fault:crash", 1.0), 1.0)
    [crashing] = models.iterdir()
    with daemon(tmp_path, models, "compile", monkeypatch) as made:
        assert_right(made.path, program("x", 2.0), 2.0)
        assert_right(made.path, program("fault:crash", 1.0), 1.0)
    [sound] = set(models.iterdir()) - {crashing}
    content = {path: path.read_bytes() for path in (crashing, sound)}
    with daemon(tmp_path, models, "worker", monkeypatch) as made:
        assert_right(made.path, program("fault:crash", 1.0), 1.0)
        assert_right(made.path, program("x", 3.0), 3.0)  # compiled, and not kept
        assert_right(made.path, program("x", 2.0), 2.0)
        assert {path: path.read_bytes() for path in models.iterdir()} == content
        sound.write_bytes(content[sound][:-1] + bytes([content[sound][-1] ^ 1]))
        assert_right(made.path, program("x", 2.0), 2.0)
        assert "is of no use" in made.log()


def test_one_guests_program_never_has_the_name_of_anothers(tmp_path: Path) -> None:
    """The name is worked out by the process that asks, from the bytes that the guest sent and nothing that a compiler
    said of them."""
    from virtaccel.backend_openvino import compile as runtime
    from virtaccel.backend_openvino import programs
    from virtaccel.guest_tools.artifact import target_words
    from virtaccel.tosa_graph.flatbuffer import read

    kept = store.Store(tmp_path)
    host = programs.Host("CPU", runtime.Tuning(), programs.offered("CPU"), store=kept)
    one = program("x", 1.0)
    names = set()
    for tosa in (one, one[:-1] + bytes([one[-1] ^ 1]), one + bytes(1), program("y", 1.0), graphs_of_another_kind()):
        key = programs.digest(tosa, target_words(read(one)), host)
        names.add(kept.path(key, "variant", "CPU", runtime.Tuning()))
    assert len(names) == 5
    assert os.listdir(tmp_path) == []


def graphs_of_another_kind() -> bytes:
    constant = graphs.Const(np.ones(8, np.float32))
    return graphs.single(Op.MUL, [((8,), DType.FP32), constant], ((8,), DType.FP32))
