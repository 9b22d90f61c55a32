"""Compiled models on disk: found again, never believed when they are not whole, bounded, nobody else's."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
from pathlib import Path

import graphs
import numpy as np
import openvino as ov
import pytest

from virtaccel.backend_openvino import compile as runtime
from virtaccel.backend_openvino import open_backend, programs, store
from virtaccel.backend_openvino.programs import Host, Variant
from virtaccel.backend_openvino.store import Store
from virtaccel.device.backend import BackendUnavailable
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
    source = programs.load(tosa, words, host)
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


def test_models_are_kept_where_the_options_say(tmp_path: Path) -> None:
    open_backend("CPU").close()
    assert not list(tmp_path.iterdir())
    open_backend("CPU", {"model-cache": str(tmp_path / "new"), "model-cache-bytes": "123"}).close()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    with pytest.raises(BackendUnavailable, match="not a number"):
        open_backend("CPU", {"model-cache": str(tmp_path), "model-cache-bytes": "many"})


FULL = """
import ctypes, os, resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
folder = Path(sys.argv[1])
user, group = os.getuid(), os.getgid()
libc = ctypes.CDLL(None)
full = "a file system of 8 KiB"
try:
    if libc.unshare(0x1002_0000):  # CLONE_NEWUSER | CLONE_NEWNS: a mount that only this process sees
        raise OSError
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path("/proc/self", name).write_text(text)
    if libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, b"size=8k,mode=0700"):
        raise OSError
except OSError:
    full = "no file above 8 KiB (RLIMIT_FSIZE), since nothing can be mounted here"
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
import numpy as np
import test_store
x = np.linspace(-2, 2, 4096, dtype=np.float32)
for seed in (11, 12):
    answer = test_store.run(test_store.load(folder, test_store.artifact(seed, 4096)), x)
    constant = np.random.default_rng(seed).normal(size=4096).astype(np.float32)
    np.testing.assert_array_equal(answer, np.maximum(x, constant))
print(full, sorted(path.name for path in folder.iterdir()), sep="|")
"""


def test_a_full_disk_costs_the_shortcut_only(tmp_path: Path) -> None:
    """Loads go on, and nothing half written is left behind."""
    support = f"{Path(__file__).parent}{os.pathsep}{Path(__file__).parent.parent / 'support'}"
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path), str(Path(__file__).parent)],
        env={**os.environ, "PYTHONPATH": support}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    how, left = done.stdout.strip().split("|")
    print(how)
    assert left == "[]"
    assert done.stderr.count("compiled model is not kept") == 2, done.stderr


def test_where_nothing_may_be_written_what_is_kept_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a confined worker, whose kernel says EPERM; root may write anywhere, so that is put in its place here."""
    load(tmp_path, artifact(8))
    [path] = kept(tmp_path)
    tried = []

    def refuse(**_: object) -> None:
        tried.append(1)
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(store.tempfile, "NamedTemporaryFile", refuse)
    one = Store(tmp_path)
    compiled = load(tmp_path, artifact(9)).model
    assert tried == [1]
    for variant in ("a", "b"):
        one.save(one.path(b"x", variant, "CPU", runtime.Tuning()), compiled, None)
    assert tried == [1, 1], "asked once by each store"
    found = one.load(path, "CPU", runtime.Tuning())
    assert found is not None
    assert kept(tmp_path) == [path]
