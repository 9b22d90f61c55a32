"""Arrays in files: .npy inputs and outputs, and .npz files with known answers. Never unpickles anything.

An answers file holds `in_K` and `out_K` in the order in which the model declares its inputs and outputs. An array with
one more leading axis than its tensor holds the steps of a sequence, to be run in order.
"""

from __future__ import annotations

import contextlib
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from virtaccel.guest_tools.arrays.program import Array, TensorInfo
from virtaccel.guest_tools.bare.arrays import ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE
from virtaccel.guest_tools.errors import InputError

_NAME = re.compile(r"(in|out)_(\d+)")


class Answers(NamedTuple):
    """Inputs and expected outputs by position; `steps` is the length of the sequence, None for a single run."""

    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    steps: int | None
    stepped_inputs: tuple[bool, ...]
    stepped_outputs: tuple[bool, ...]

    def step(self, index: int) -> list[Array]:
        """The inputs of one step."""
        pairs = zip(self.inputs, self.stepped_inputs, strict=True)
        return [array[index] if stepped else array for array, stepped in pairs]


class Comparison(NamedTuple):
    """One output against its expectation: worst absolute error, what was allowed, how many elements exceed it."""

    name: str
    worst: float
    allowed: float
    wrong: int
    elements: int

    @property
    def ok(self) -> bool:
        return self.wrong == 0


def load_npy(path: Path) -> Array:
    """One array. Raises InputError with one line."""
    # Never unpickled: a file from elsewhere must not run code.
    with _readable(path, ".npy"):
        loaded = np.load(path, allow_pickle=False)
    # numpy opens an archive under either name.
    if not isinstance(loaded, np.ndarray):
        loaded.close()
        raise InputError(f"{path} holds several arrays; a .npy file with one is wanted")
    return loaded


@contextlib.contextmanager
def _readable(path: Path, kind: str) -> Iterator[None]:
    """Whatever numpy raises on a bad file, as one line."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} is no {kind} file of numbers: {error}") from error


def load_answers(path: Path, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]) -> Answers:
    """The answers for a program with these tensors. Raises InputError."""
    arrays = _load_npz(path)
    declared = {"in": inputs, "out": outputs}
    found = {kind: _by_position(path, arrays, kind, len(tensors)) for kind, tensors in declared.items()}
    stepped = {
        kind: tuple(array.ndim == len(tensor.shape) + 1 for array, tensor in zip(found[kind], tensors, strict=True))
        for kind, tensors in declared.items()
    }
    # Step axes of different lengths cannot be one sequence.
    lengths = {
        len(array) for kind in found for array, has in zip(found[kind], stepped[kind], strict=True) if has
    }
    if len(lengths) > 1:
        raise InputError(f"{path}: sequences of different lengths {sorted(lengths)}")
    steps = lengths.pop() if lengths else None
    if steps is not None and not all(stepped["out"]):
        raise InputError(f"{path}: inputs are steps of a sequence, then every out_K must have a leading step axis too")
    arrays_in = tuple(same_bits(array, tensor.carrier) for array, tensor in zip(found["in"], inputs, strict=True))
    return Answers(arrays_in, found["out"], steps, stepped["in"], stepped["out"])


def same_bits(array: Array, dtype: np.dtype[Any]) -> Array:
    """TOSA has no unsigned types: an unsigned array stands for a signed tensor of that width, bit for bit, and back."""
    # Only between the two kinds of integers: a float's bits are not a number of another type.
    if {array.dtype.kind, dtype.kind} == {"u", "i"} and array.dtype.itemsize == dtype.itemsize:
        return array.view(dtype)
    return array


def _load_npz(path: Path) -> dict[str, Array]:
    with _readable(path, ".npz"):
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise InputError(f"{path} is no .npz file; one with in_K and out_K is wanted")
        with archive:
            return {name: archive[name] for name in archive.files}


def _by_position(path: Path, arrays: dict[str, Array], kind: str, wanted: int) -> tuple[Array, ...]:
    matches = [_NAME.fullmatch(name) for name in arrays]
    positions = sorted(int(match[2]) for match in matches if match and match[1] == kind)
    if positions != list(range(wanted)):
        names = ", ".join(f"{kind}_{position}" for position in positions) or "none"
        raise InputError(f"{path} has {names}; the model needs {kind}_0 to {kind}_{wanted - 1}")
    return tuple(arrays[f"{kind}_{position}"] for position in positions)


def compare(name: str, got: Array, expected: Array, atol: float = 0.0) -> Comparison:
    """Floats within 1e-4 of the largest expected magnitude plus 1e-5; anything else exactly, or within `atol`.

    NaN answers NaN, an infinity itself. Signed outputs are taken as unsigned where the expected ones are. Raises
    InputError if the shapes or the kinds of number differ.
    """
    got = same_bits(got, expected.dtype)
    if got.shape != expected.shape or (got.dtype.kind == "f") != (expected.dtype.kind == "f"):
        raise InputError(
            f"output {name!r} is {got.dtype} {list(got.shape)}, expected are {expected.dtype} {list(expected.shape)}"
        )
    if got.dtype.kind == "f":
        finite = np.abs(expected[np.isfinite(expected)], dtype=np.float64)
        allowed = RELATIVE_TOLERANCE * float(finite.max(initial=0.0)) + ABSOLUTE_TOLERANCE
    else:
        allowed = float(atol)
    return _compare_within(name, got.astype(np.float64), expected.astype(np.float64), allowed)


def _compare_within(name: str, got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], allowed: float) -> Comparison:
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(got - expected))
    # NaN on one side only, or infinities of two signs: as wrong as can be.
    error = np.where(np.isnan(error), np.inf, error)
    return Comparison(name, float(error.max(initial=0.0)), allowed, int((error > allowed).sum()), got.size)
