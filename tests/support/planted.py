"""Plants a known fault into this process and fuzzes until it is found: `planted.py MODULE TARGET SECONDS < changes`.

The changes on standard input are JSON, a list of [function, kind, names, ...]: one node of the module's syntax tree, in
that function, of the sort that the kind is about and with all these names in it, is changed as a slip of the keyboard
would. There must be exactly one. The module is compiled from the changed tree, in this process alone; with no changes
nothing is planted. Prints one JSON object: what was found, and after how long.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, Final

ONLY: Final = "only"  # among the names: and no others
SIMPLE: Final = (ast.Assign, ast.AugAssign, ast.Expr, ast.Raise, ast.Return, ast.Delete)


def _never(node: ast.If, *_: Any) -> ast.stmt:
    """The condition never holds."""
    node.test = ast.Constant(False)
    return node


def _not_tidied(node: ast.ExceptHandler, *_: Any) -> ast.ExceptHandler:
    """A handler of errors leaves out the first thing it does."""
    del node.body[0]
    return node


def _twice(node: ast.stmt, *_: Any) -> list[ast.stmt]:
    return [node, node]


def _more(node: Any, add: int) -> ast.expr:
    """The right side of a comparison, or the last argument of a call, is `add` more."""
    values = node.comparators if isinstance(node, ast.Compare) else node.args
    values[-1] = ast.BinOp(values[-1], ast.Add(), ast.Constant(add))
    return ast.fix_missing_locations(node)


def _without(node: ast.BoolOp, name: str) -> ast.expr:
    """One of several conditions is not looked at: the one that mentions `name`."""
    node.values = [value for value in node.values if name not in _names(value)]
    return node.values[0] if len(node.values) == 1 else node


def _modulo(node: ast.BinOp, number: int) -> ast.expr:
    """Another modulus than the mask's."""
    return ast.BinOp(node.left, ast.Mod(), ast.Constant(number))


def _operator(node: ast.Compare, *names: str) -> ast.expr:
    node.ops = [getattr(ast, name)() for name in names]
    return node


def _judged_by_its_start(node: ast.If, *_: Any) -> ast.If:
    """Whether a range ends inside is judged by where it begins."""
    compare: Any = node.test.values[-1]  # type: ignore[attr-defined]
    compare.left, compare.ops = compare.left.left, [ast.Lt()]
    return node


def _empty(node: ast.Call, *_: Any) -> ast.expr:
    """The last argument is lost."""
    node.args[-1] = ast.Constant(b"")
    return node


def _kept(node: ast.stmt, name: str) -> list[ast.stmt]:
    """Something is never let go of."""
    kept = ast.parse(f"globals().setdefault('_KEPT', []).append({name})").body
    return [*kept, node]


KINDS: Final[dict[str, tuple[tuple[type[ast.AST], ...], Callable[..., Any]]]] = {
    "never": ((ast.If,), _never),
    "after the next statement": ((ast.If,), lambda node, *_: node),
    "dropped": (SIMPLE, lambda node, *_: ast.Pass()),
    "not tidied": ((ast.ExceptHandler,), _not_tidied),
    "twice": (SIMPLE, _twice),
    "kept": (SIMPLE, _kept),
    "more": ((ast.Compare,), _more),
    "longer": ((ast.Call,), _more),
    "judged by its start": ((ast.If,), _judged_by_its_start),
    "without": ((ast.BoolOp,), _without),
    "left side only": ((ast.BinOp,), lambda node, *_: node.left),
    "modulo": ((ast.BinOp,), _modulo),
    "operator": ((ast.Compare,), _operator),
    "empty": ((ast.Call,), _empty),
}


def _names(node: ast.AST) -> set[str]:
    """Names and attributes in a node; of an `if`, in its condition."""
    within = ast.walk(node.test if isinstance(node, ast.If) else node)
    return {getattr(one, "id", getattr(one, "attr", "")) for one in within} - {""}


class _Planter(ast.NodeTransformer):
    """Makes one change, in one function (qualified by its class where that is needed)."""

    def __init__(self, function: str, kind: str, names: Sequence[str], arguments: Sequence[Any]) -> None:
        self.function, self.kind, self.names, self.arguments = function, kind, set(names), arguments
        self.inside: list[str] = []
        self.planted = 0

    def generic_visit(self, node: ast.AST) -> Any:
        named = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        if named:
            self.inside.append(node.name)  # type: ignore[attr-defined]
        super().generic_visit(node)
        if named:
            self.inside.pop()
        sorts, change = KINDS[self.kind]
        here = ".".join(self.inside)
        if not isinstance(node, sorts) or not (here == self.function or here.endswith(f".{self.function}")):
            return self._moved(node)
        found = _names(node)
        if not (found == self.names - {ONLY} if ONLY in self.names else self.names <= found):
            return node
        self.planted += 1
        changed = change(node, *self.arguments)
        for one in changed if isinstance(changed, list) else [changed]:
            ast.copy_location(one, node)
            ast.fix_missing_locations(one)
        if self.kind == "after the next statement":
            node._later = True  # type: ignore[attr-defined]
        return changed

    @staticmethod
    def _moved(node: ast.AST) -> ast.AST:
        """Statements marked to come later change places with the next."""
        body = getattr(node, "body", None)
        for at, one in enumerate(body[:-1] if isinstance(body, list) else ()):
            if getattr(one, "_later", False):
                one._later = False
                body[at : at + 2] = [body[at + 1], one]
                break
        return node


def plant(tree: ast.Module, changes: Sequence[Sequence[Any]]) -> ast.Module:
    for function, kind, names, *arguments in changes:
        planter = _Planter(function, kind, names, arguments)
        planter.visit(tree)
        assert planter.planted == 1, f"{planter.planted} places in {function} for {kind!r} with {names}"
    return ast.fix_missing_locations(tree)


class Changed(importlib.abc.SourceLoader):
    """Loads one module from a changed tree."""

    def __init__(self, path: str, changes: Sequence[Sequence[Any]]) -> None:
        self.path = path
        self.changes = changes

    def get_filename(self, fullname: str) -> str:
        return self.path

    def get_data(self, path: str) -> bytes:
        if path != self.path:
            raise OSError(path)  # no bytecode from a cache, and none into it
        with open(path, "rb") as file:
            return file.read()

    def source_to_code(self, data: Any, path: Any) -> types.CodeType:  # type: ignore[override]
        code: types.CodeType = compile(plant(ast.parse(data), self.changes), path, "exec")
        return code


class Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, changes: Sequence[Sequence[Any]]) -> None:
        self.name = name
        self.changes = changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.origin is not None
        return importlib.util.spec_from_loader(fullname, Changed(spec.origin, self.changes))


def main() -> None:
    module, name, seconds = sys.argv[1:]
    changes = json.load(sys.stdin)
    if changes:
        sys.meta_path.insert(0, Finder(module, changes))
    logging.disable(logging.CRITICAL)
    from virtaccel.harness.fuzz.engine import Fuzzer, Limits
    from virtaccel.harness.fuzz.targets import make

    target = make(name)
    if changes:
        assert isinstance(sys.modules[module].__loader__, Changed), f"{name} does not use {module}"
    fuzzer = Fuzzer(target)
    fuzzer.run(1, Limits(seconds=float(seconds), findings=1))
    found = [found.what for found in fuzzer.findings]
    print(json.dumps({"found": found, "seconds": fuzzer.seconds, "inputs": fuzzer.inputs, "steps": fuzzer.steps}))


if __name__ == "__main__":
    main()
