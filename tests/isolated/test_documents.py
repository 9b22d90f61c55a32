"""What docs/isolation.md and docs/threat-model.md name is there: every test, and every constant in its module."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

DOCUMENTS = ("isolation.md", "threat-model.md")
CODE = ("backend_base", "backend_openvino", "device", "processes", "tosa_graph", "virtqueue")


def defined(path: Path) -> set[str]:
    """Names that a module, its classes and their initialisers bind, by its syntax tree."""
    names = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_test_that_is_named_exists(root: Path, document: str) -> None:
    text = (root / "docs" / document).read_text()
    tests = list((root / "tests").rglob("test_*.py"))
    known = {path.stem for path in tests}.union(*map(defined, tests))
    named = re.findall(r"\b(test_\w+)(\.\.\.|\*)?", text)
    assert len(named) > 15
    missing = [name for name, more in named
               if not (any(one.startswith(name) for one in known) if more else name in known)]  # fmt: skip
    assert not missing
    for folder in re.findall(r"\btests/[\w/]+(?:\.py)?", text):
        assert (root / folder).exists(), folder


def test_every_constant_that_is_named_is_in_its_module(root: Path) -> None:
    text = "".join((root / "docs" / document).read_text() for document in DOCUMENTS)
    named = re.findall(r"([\w/]+\.py): (\w+)", text)
    assert len(named) > 15
    for file, name in named:
        if not name.startswith("test_"):
            found = [path for folder in CODE for path in (root / folder).rglob(Path(file).name)]
            assert any(name in defined(path) for path in found if str(path).endswith(f"/{file}")), f"{name} in {file}"
