"""The official TOSA conformance suite: what to generate, where it is kept, and a list of its tests.

A generated suite stays in the user's cache (XDG base directory specification), keyed by the version of Arm's tools and
by what was asked for, and serves every later request that it covers. Knows desc.json files as far as listing goes;
`case` reads one to run it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from virtaccel.guest_tools.errors import Unavailable
from virtaccel.harness.conformance.tools import Tools
from virtaccel.tosa_graph.target import Extension, Profile

SPECIFICATION: Final = "1.0.2"
PROFILES: Final = {"pro-int": Profile.INTEGER, "pro-fp": Profile.FLOATING_POINT}
EXTENSIONS: Final = {str(extension.name).lower(): extension for extension in Extension}
_INDEX: Final = "index.json"
_LOG: Final = "generator.log"
_BUILD: Final = "build"
_EAGER: Final = frozenset({"COND_IF", "WHILE_LOOP"})
"""Operators whose tests' data the generator makes only at once."""


class Entry(NamedTuple):
    """One test of a suite: its folder relative to the suite's, and what selects it."""

    path: str
    operator: str
    types: str
    negative: bool
    profiles: tuple[str, ...]
    extensions: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tests: profiles by short name ("pro-int"), extensions ("int16"), operators ("CONV2D"; none is all)."""

    profiles: frozenset[str] = frozenset(PROFILES)
    extensions: frozenset[str] = frozenset()
    operators: frozenset[str] = frozenset()

    def covers(self, other: Selection) -> bool:
        """Whether a suite of this selection has every test of the other."""
        operators = not self.operators or (bool(other.operators) and other.operators <= self.operators)
        return operators and other.profiles <= self.profiles and other.extensions <= self.extensions

    def has(self, entry: Entry) -> bool:
        """As the official runner selects: any of the profiles, all of the extensions."""
        return (
            (not entry.profiles or any(name in self.profiles for name in entry.profiles))
            and all(name in self.extensions for name in entry.extensions)
            and (not self.operators or entry.operator in self.operators)
        )

    def as_json(self) -> dict[str, list[str]]:
        return {name: sorted(getattr(self, name)) for name in ("profiles", "extensions", "operators")}

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(self.as_json()).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Suite:
    """A generated suite in `folder`, and those of its tests that were asked for."""

    folder: Path
    entries: tuple[Entry, ...]

    def path(self, entry: Entry) -> Path:
        return self.folder / entry.path


def default_cache() -> Path:
    """Where suites are kept unless the user says otherwise."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "virtaccel" / "conformance"


def obtain(
    selection: Selection, tools: Tools, cache: Path | None = None, jobs: int = 1, say: Callable[[str], None] = print
) -> Suite:
    """The suite of this selection, from the cache or generated now (minutes). Raises Unavailable if it cannot be."""
    root = (cache or default_cache()) / f"tosa-{SPECIFICATION}-{tools.version}"
    found = _cached(root, selection)
    if found is None:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root):
            found = _cached(root, selection)
            if found is None:
                say(f"generating the TOSA {SPECIFICATION} conformance suite; all of it takes minutes, once")
                found = _generate(root, selection, tools, jobs)
    entries = tuple(entry for entry in _read_index(found) if selection.has(entry))
    if not entries:
        raise Unavailable("the conformance suite has no test for this selection; are the operators' names right?")
    return Suite(found, entries)


def _cached(root: Path, selection: Selection) -> Path | None:
    """The smallest suite in the cache that has every test of the selection."""
    fitting = []
    for index in root.glob(f"*/{_INDEX}"):
        stored = json.loads(index.read_text())["selection"]
        if Selection(**{name: frozenset(values) for name, values in stored.items()}).covers(selection):
            fitting.append((index.stat().st_size, index.parent))
    return min(fitting)[1] if fitting else None


@contextmanager
def _lock(root: Path) -> Iterator[None]:
    """One generation at a time in a cache."""
    with (root / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _generate(root: Path, selection: Selection, tools: Tools, jobs: int) -> Path:
    """Run Arm's generator into a folder that appears under its name only when it is complete."""
    work = Path(tempfile.mkdtemp(prefix="unfinished-", dir=root))
    try:
        for command in _commands(selection, tools, work, jobs):
            with (work / _LOG).open("a") as log:
                done = subprocess.run(
                    command, cwd=work, env=tools.environment(), stdout=log, stderr=subprocess.STDOUT, check=False
                )
            if done.returncode:
                tail = (work / _LOG).read_text().strip().splitlines()[-1:]
                raise Unavailable(f"Arm's generator ended with {done.returncode}: {' '.join(tail)}")
        shutil.rmtree(work / _BUILD, ignore_errors=True)
        entries = list_tests(work)
        text = json.dumps({"selection": selection.as_json(), "tests": entries}, indent=0)
        (work / _INDEX).write_text(text)
        target = root / selection.key
        work.rename(target)
        return target
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _commands(selection: Selection, tools: Tools, work: Path, jobs: int) -> Iterator[list[str]]:
    """Most operators' data can be made when a test runs; the generator skips the others then, so they come apart."""
    eager = _EAGER & (selection.operators or _EAGER)
    if not selection.operators or selection.operators - _EAGER:
        yield [*_command(selection, tools, work, jobs), "--lazy-data-generation"]
    if eager and str(Extension.CONTROLFLOW.name).lower() in selection.extensions:
        yield _command(replace(selection, operators=eager), tools, work, jobs)


def _command(selection: Selection, tools: Tools, work: Path, jobs: int) -> list[str]:
    """Binary files, the specification's version fixed."""
    command = [sys.executable, "-m", "conformance.tosa_verif_conformance_generator"]
    command += ["--tosa-version", SPECIFICATION, "--output-type", "binary"]
    command += ["--profile", *(f"tosa-{name}" for name in sorted(selection.profiles))]
    command += ["--extension", *([f"tosa-ext-{name}" for name in sorted(selection.extensions)] or ["none"])]
    if selection.operators:
        command += ["--operators", *(name.lower() for name in sorted(selection.operators))]
    command += ["--ref-model-path", str(tools.reference_model), "--generate-lib-path", str(tools.generate_library)]
    command += ["--schema-path", str(tools.schema), "--flatc-path", str(tools.flatc)]
    command += ["--cts-config-directory", str(tools.configurations)]
    command += ["--build-directory", str(work / _BUILD), "--output-directory", str(work / "tests")]
    return [*command, "--jobs", str(jobs)]


def list_tests(folder: Path) -> list[Entry]:
    """Every test below a folder, in order of its path."""
    return sorted(entry_of(file, folder) for file in folder.rglob("desc.json"))


def entry_of(file: Path, folder: Path) -> Entry:
    description: dict[str, Any] = json.loads(file.read_text())
    needs = description.get("test_requirements", {})
    details = description.get("test_details", {})
    operator = details.get("operator") or file.parent.parent.name.upper()
    return Entry(
        str(file.parent.relative_to(folder)),
        operator,
        _types(description, details),
        bool(description["expected_failure"]),
        tuple(name.removeprefix("tosa-") for name in needs.get("profiles_supported", ())),
        tuple(name.removeprefix("tosa-ext-") for name in needs.get("extensions_required", ())),
    )


def _types(description: dict[str, Any], details: dict[str, Any]) -> str:
    """Element types of the operands, an arrow, those of the results; each once."""
    tensors = description.get("meta", {}).get("data_gen", {}).get("tensors", {})
    inputs = [tensor["data_type"] for tensor in tensors.values()]
    sides = (dict.fromkeys(inputs), dict.fromkeys(details.get("output_types", ())))
    return "->".join("+".join(side) for side in sides)


def _read_index(folder: Path) -> list[Entry]:
    rows = json.loads((folder / _INDEX).read_text())["tests"]
    return [Entry(row[0], row[1], row[2], row[3], tuple(row[4]), tuple(row[5])) for row in rows]


def sample(entries: Sequence[Entry], count: int) -> list[Entry]:
    """`count` tests spread over all operators and types, the same ones whenever the suite is the same.

    Within each group (operator, types, positive or negative) tests are ordered by a hash of their name; the groups give
    one each in turn until there are enough.
    """
    groups: dict[tuple[str, str, bool], list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: hashlib.sha256(entry.path.encode()).digest()):
        groups.setdefault((entry.operator, entry.types, entry.negative), []).append(entry)
    chosen: list[Entry] = []
    for turn in range(max(map(len, groups.values()), default=0)):
        chosen += (group[turn] for group in _by_hash(groups) if turn < len(group))
        if len(chosen) >= count:
            break
    return sorted(chosen[:count])


def _by_hash(groups: dict[tuple[str, str, bool], list[Entry]]) -> Iterable[list[Entry]]:
    """Groups in an order that favours no operator: the last turn may not reach all of them."""
    return (groups[key] for key in sorted(groups, key=lambda key: hashlib.sha256(repr(key).encode()).digest()))
