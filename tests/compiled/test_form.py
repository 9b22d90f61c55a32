"""Which form of the modules is being tested, and what has to hold of the compiled one by itself."""

from __future__ import annotations

import importlib
import os
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

COMPILED = os.environ.get("VIRTACCEL_TEST_COMPILED") == "1"
"""Set by scripts/test-compiled, whose run is one of the compiled wheel; any other is one of the sources."""

CONFIGURATION = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
MODULES = sorted(name for names in CONFIGURATION["tool"]["virtaccel"]["compiled"].values() for name in names)


@pytest.fixture(params=MODULES)
def module(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def test_a_run_tests_the_form_it_is_said_to_test(module: ModuleType) -> None:
    """No run of the sources picks up a library left behind, and none of the compiled wheel falls back on a source."""
    assert module.__file__ is not None
    assert module.__file__.endswith(".so" if COMPILED else ".py")


def test_sources_lie_beside_libraries(module: ModuleType) -> None:
    """Tracebacks and the guest program, which is bundled from sources, need them."""
    assert module.__file__ is not None
    assert Path(module.__file__).with_name(f"{module.__name__.rpartition('.')[2]}.py").is_file()


def test_no_compiled_class_has_an_interpreted_base(module: ModuleType) -> None:
    """mypyc frees objects of such a class without clearing weak references to them, and some bases (logging.Handler)
    make such references by themselves: a crash later."""
    for kind in vars(module).values():
        if not isinstance(kind, type) or kind.__module__ != module.__name__ or "__mypyc_attrs__" not in vars(kind):
            continue
        for base in kind.__mro__:
            native = hasattr(base, "__mypyc_attrs__")
            assert native or base.__module__ in ("builtins", "typing"), f"{kind.__name__} derives from {base!r}"
