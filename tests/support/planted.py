"""Plants a known fault into this process and fuzzes until it is found: `planted.py MODULE TARGET SECONDS < patch`.

The patch on standard input is JSON, a list of [old, new] pairs of source text. Each `old` must be in the module exactly
once; the module is then compiled from the changed text, in this process alone. With no pairs nothing is planted. Prints
one JSON object: what was found, and after how long.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import sys
import types
from collections.abc import Sequence


class Patched(importlib.abc.SourceLoader):
    """Loads one module from changed source."""

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        self.source = source

    def get_filename(self, fullname: str) -> str:
        return self.path

    def get_data(self, path: str) -> bytes:
        if path != self.path:
            raise OSError(path)  # no bytecode from a cache, and none into it
        return self.source.encode()


class Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, edits: Sequence[tuple[str, str]]) -> None:
        self.name = name
        self.edits = edits

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.origin is not None
        with open(spec.origin) as file:
            source = file.read()
        for old, new in self.edits:
            assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {fullname}"
            source = source.replace(old, new)
        return importlib.util.spec_from_loader(fullname, Patched(spec.origin, source))


def main() -> None:
    module, name, seconds = sys.argv[1:]
    edits = json.load(sys.stdin)
    if edits:
        sys.meta_path.insert(0, Finder(module, edits))
    logging.disable(logging.CRITICAL)
    from virtaccel.harness.fuzz.engine import Fuzzer, Limits
    from virtaccel.harness.fuzz.targets import make

    target = make(name)
    if edits:
        assert isinstance(sys.modules[module].__loader__, Patched), f"{name} does not use {module}"
    tally = Fuzzer(target)
    tally.run(1, Limits(seconds=float(seconds), findings=1))
    found = [found.what for found in tally.findings]
    print(json.dumps({"found": found, "seconds": tally.seconds, "inputs": tally.inputs, "steps": tally.steps}))


if __name__ == "__main__":
    main()
