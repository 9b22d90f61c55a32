"""The one-file guest program on a python3 that has nothing but its standard library."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from virtaccel.vm.bundle import build_guest


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("guest") / "virtaccel-guest.pyz"
    path.write_bytes(build_guest())
    return path


def bare(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """-I and -S: no environment, no site-packages."""
    return subprocess.run(
        [sys.executable, "-I", "-S", str(program), *arguments], capture_output=True, text=True, timeout=60
    )


def test_it_starts_and_shows_its_actions(program: Path) -> None:
    done = bare(program, "--help")
    assert done.returncode == 0, done.stderr
    for action in ("info", "run", "serve"):
        assert action in done.stdout


def test_without_a_function_it_says_so_in_one_line(program: Path) -> None:
    # No such virtio ID is on any machine that runs these tests.
    done = bare(program, "--virtio-id", "63", "info")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "1af4:107f" in done.stderr


def test_it_holds_no_module_that_a_bare_python_lacks(program: Path) -> None:
    with zipfile.ZipFile(program) as archive:
        names = archive.namelist()
        for name in names:
            text = archive.read(name).decode()
            for module in ("numpy", "cffi", "click", "flatbuffers", "openvino"):
                assert not re.search(rf"^\s*(import|from) {module}\b", text, re.MULTILINE), (name, module)
    assert "__main__.py" in names


def test_every_module_in_it_can_be_imported(program: Path) -> None:
    code = (
        "import sys, zipfile, importlib; p = sys.argv[1]; sys.path.insert(0, p)\n"
        "for n in zipfile.ZipFile(p).namelist():\n"
        "    if n.startswith('virtaccel'):\n"
        "        importlib.import_module(n.removesuffix('.py').removesuffix('/__init__').replace('/', '.'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(program)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_two_builds_are_equal() -> None:
    assert build_guest() == build_guest()


def test_the_build_script_writes_the_same_file(root: Path, tmp_path: Path) -> None:
    output = tmp_path / "guest.pyz"
    done = subprocess.run(
        [sys.executable, str(root / "scripts" / "build-guest"), str(output)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert output.read_bytes() == build_guest()
