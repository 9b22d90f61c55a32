"""Builds the one-file guest program: its modules, found by following imports, in a zip that names the interpreter.

Knows how this project imports (absolute names, anywhere in a file). That nothing in the closure needs more than a bare
python3 is an import rule of the project, and is tested by importing every module of the file on one.
"""

from __future__ import annotations

import ast
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import virtaccel

INTERPRETER = b"#!/usr/bin/env python3\n"
ENTRY = "virtaccel.cli.guest"
START = f"import sys\nfrom {ENTRY} import main\nsys.exit(main())\n"
EPOCH = (1980, 1, 1, 0, 0, 0)
ROOT = Path(virtaccel.__file__).parent


def build_guest() -> bytes:
    """The file's bytes; the same sources give the same bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in closure(ENTRY):
            name = f"virtaccel/{path.relative_to(ROOT)}"
            archive.writestr(zipfile.ZipInfo(name, EPOCH), path.read_bytes(), zipfile.ZIP_DEFLATED)
        archive.writestr(zipfile.ZipInfo("__main__.py", EPOCH), START, zipfile.ZIP_DEFLATED)
    return INTERPRETER + out.getvalue()


def closure(entry: str) -> list[Path]:
    """Source files of `entry` and of all of this project's modules that it imports, packages included, sorted."""
    found: set[Path] = set()
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        path = _source(name)
        if path is None or path in found:
            continue
        found.add(path)
        waiting.append(name.rpartition(".")[0])
        waiting.extend(_imports(path))
    return sorted(found)


def _imports(path: Path) -> Iterator[str]:
    """Names that a file imports; of `from a import b` both `a` and `a.b`, which may be a module too."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _source(name: str) -> Path | None:
    """The file of one of this project's modules, None for any other name."""
    first, *rest = name.split(".")
    if first != "virtaccel":
        return None
    base = ROOT.joinpath(*rest)
    package, module = base / "__init__.py", base.with_suffix(".py")
    return package if package.exists() else module if rest and module.exists() else None
