"""Compiled models on disk: found again, never believed when they are not whole, bounded, nobody else's."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import graphs
import numpy as np
import openvino as ov
import pytest

from virtaccel.backend_openvino import compile as runtime
from virtaccel.backend_openvino import programs, store
from virtaccel.backend_openvino.programs import Host, Variant
from virtaccel.backend_openvino.store import Store
from virtaccel.guest_tools.artifact import target_words
from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import DType, Op


def artifact(seed: int, size: int = 8) -> bytes:
    """max(x, c), whose model is compiled for bounded inputs."""
    constant = graphs.Const(np.random.default_rng(seed).normal(size=size).astype(np.float32))
    return graphs.single(Op.MAXIMUM, [((size,), DType.FP32), constant], ((size,), DType.FP32))


def load(folder: Path, tosa: bytes, limit: int = store.DEFAULT_BYTES) -> programs.Executable:
    """The program's model, as a process that has nothing loaded gets it."""
    gc.collect()  # what is no longer used is not shared
    host = Host("CPU", runtime.Tuning(), programs.offered("CPU"), store=Store(folder, limit))
    words = target_words(read(tosa))
    source = programs.load(tosa, words, host, programs.digest(tosa, words, host))
    return source.compile(Variant(source.declared(), True))


def run(executable: programs.Executable, x: np.ndarray) -> np.ndarray:
    request = executable.model.create_infer_request()
    request.set_input_tensor(0, ov.Tensor(x))
    request.infer()
    return np.array(request.get_output_tensor(0).data)


def kept(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@pytest.fixture
def no_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_here(*_: object) -> None:
        raise AssertionError("compiled although it was kept")

    monkeypatch.setattr(programs, "compile_here", compile_here)


def test_a_kept_model_answers_as_the_compiled_one_and_keeps_its_bound(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    x = np.linspace(-2, 2, 8, dtype=np.float32)
    made = load(tmp_path, artifact(1))
    answer, guards = run(made, x), made.guards
    assert len(kept(tmp_path)) == 1
    del made
    request.getfixturevalue("no_compiling")
    found = load(tmp_path, artifact(1))
    np.testing.assert_array_equal(run(found, x), answer)
    np.testing.assert_array_equal(answer, np.maximum(x, np.random.default_rng(1).normal(size=8).astype(np.float32)))
    assert [guard.largest for guard in found.guards] == [guard.largest for guard in guards]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other limit"])
def test_a_file_that_is_not_whole_is_compiled_anew(tmp_path: Path, damage: str) -> None:
    load(tmp_path, artifact(2))
    [path] = kept(tmp_path)
    good = path.read_bytes()
    bad = bytearray(good)
    bad[-100] ^= 1
    where = store._HEADER.size - 1
    other = good[:where] + b"\x7e" + good[where + 1 :]
    path.write_bytes({"cut": good[:-1], "flipped": bytes(bad), "empty": b"", "other limit": other}[damage])
    x = np.zeros(8, np.float32)
    answer = run(load(tmp_path, artifact(2)), x)
    np.testing.assert_array_equal(answer, np.maximum(x, np.random.default_rng(2).normal(size=8).astype(np.float32)))
    [again] = kept(tmp_path)
    assert again.read_bytes()[:8] == good[:8]
    assert len(again.read_bytes()) > 1000


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    load(tmp_path, artifact(3))
    [first] = kept(tmp_path)
    room = int(first.stat().st_size * 2.5)
    load(tmp_path, artifact(4), room)
    [second] = set(kept(tmp_path)) - {first}
    os.utime(first, ns=(1, 1))
    os.utime(second, ns=(2, 2))
    load(tmp_path, artifact(3), room)  # used again: now the second is the older one
    load(tmp_path, artifact(5), room)
    assert first in kept(tmp_path)
    assert second not in kept(tmp_path)
    assert sum(path.stat().st_size for path in kept(tmp_path)) <= room


def test_a_model_larger_than_the_store_is_not_kept(tmp_path: Path) -> None:
    load(tmp_path, artifact(6), 100)
    assert kept(tmp_path) == []


def test_another_tuning_or_other_code_is_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Store(tmp_path)
    path = one.path(b"artifact", "variant", "CPU", runtime.Tuning())
    assert path == one.path(b"artifact", "variant", "CPU", runtime.Tuning())
    assert path != one.path(b"artifact", "variant", "CPU", runtime.Tuning(threads=1))
    assert path != one.path(b"artifact", "other", "CPU", runtime.Tuning())
    monkeypatch.setattr(store, "code", lambda: b"other code")
    assert path != one.path(b"artifact", "variant", "CPU", runtime.Tuning())


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="nobody else"):
        Store(tmp_path)


def test_a_folder_that_cannot_be_written_costs_the_shortcut_only(tmp_path: Path) -> None:
    one = Store(tmp_path / "models")
    (tmp_path / "models").rmdir()
    executable = load(tmp_path / "other", artifact(7))
    one.save(one.path(b"a", "v", "CPU", runtime.Tuning()), executable.model, None)
    assert one.load(one.path(b"a", "v", "CPU", runtime.Tuning()), "CPU", runtime.Tuning()) is None


def test_from_the_environment(tmp_path: Path) -> None:
    assert Store.from_environment({}) is None
    named = Store.from_environment({store.FOLDER: str(tmp_path / "new"), store.BYTES: "123"})
    assert named is not None
    assert (named.folder, named.limit) == (tmp_path / "new", 123)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ValueError, match="not a number"):
        Store.from_environment({store.FOLDER: str(tmp_path), store.BYTES: "many"})
