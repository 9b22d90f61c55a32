"""The .tflite files that known models were converted from, fetched from the package index on request.

The public package mediapipe carries them. It is downloaded with pip, as pip is configured here, once, into a cache
folder; nothing of it is installed or run. A wheel is a zip archive.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from virtaccel.guest_tools.errors import Unavailable

PACKAGE = "mediapipe==0.10.14"


def cache_folder() -> Path:
    """Where files are kept: below XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "virtaccel" / "tflite"


def original(stem: str, folder: Path | None = None) -> Path:
    """The file `stem`.tflite, downloaded if need be. Raises Unavailable if the package cannot be had or lacks it."""
    kept = folder or cache_folder()
    wanted = kept / f"{stem}.tflite"
    if not wanted.exists():
        kept.mkdir(parents=True, exist_ok=True)
        _unpack(_wheel(kept), kept)
    if not wanted.exists():
        raise Unavailable(f"{PACKAGE} has no {stem}.tflite; give --against a file")
    return wanted


def _wheel(folder: Path) -> Path:
    def found() -> list[Path]:
        return sorted(folder.glob(f"{PACKAGE.replace('==', '-')}-*.whl"))

    if not found():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode or not found():
            lines = run.stderr.strip().splitlines() or ["pip gave no reason"]
            raise Unavailable(f"{PACKAGE} cannot be downloaded: {lines[-1]}")
    return found()[-1]


def _unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            name = Path(member.filename).name  # only the last part: an archive may name any path
            if name.endswith(".tflite"):
                (folder / name).write_bytes(archive.read(member))
