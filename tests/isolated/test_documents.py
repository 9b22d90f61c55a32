"""What docs/isolation.md and docs/threat-model.md name is there: every test, and every constant in its file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCUMENTS = ("isolation.md", "threat-model.md")
CODE = ("backend_openvino", "device", "processes", "tosa_graph", "virtqueue")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_test_that_is_named_exists(root: Path, document: str) -> None:
    text = (root / "docs" / document).read_text()
    tests = list((root / "tests").rglob("test_*.py"))
    defined = {name for path in tests for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}
    files = {path.stem for path in tests}
    named = re.findall(r"\b(test_\w+)(\.\.\.|\*)?", text)
    assert len(named) > 15
    missing = [
        name
        for name, more in named
        if name not in files and not (any(one.startswith(name) for one in defined) if more else name in defined)
    ]
    assert not missing
    for folder in re.findall(r"\btests/[\w/]+(?:\.py)?", text):
        assert (root / folder).exists(), folder


def test_every_constant_that_is_named_is_in_its_file(root: Path) -> None:
    text = "".join((root / "docs" / document).read_text() for document in DOCUMENTS)
    named = re.findall(r"([\w/]+\.py): (\w+)", text)
    assert len(named) > 15
    for file, name in named:
        if name.startswith("test_"):
            continue
        found = [path for folder in CODE for path in (root / folder).rglob("*.py") if str(path).endswith(f"/{file}")]
        assert any(re.search(rf"\b{name}\b", path.read_text()) for path in found), f"{name} in {file}"
