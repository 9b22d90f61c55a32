"""Arrays for a Python that has no numpy: .npy and .npz files, and comparing what came back with what should have.

Knows the npy format (NumPy Enhancement Proposal 1). Data are little-endian bytes in C order; nothing is computed on
them but the comparison.
"""

from __future__ import annotations

import ast
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from struct import Struct, iter_unpack
from typing import NamedTuple

from virtaccel.tosa_graph.graph import DType

MAGIC = b"\x93NUMPY"
# Version 1 of the format cannot say more, and no header of a tensor comes near it.
LARGEST_HEADER = 1 << 16
# The one rule for floats, here, in the numpy API and in the soak: what sums in another order may cost in FP32, against
# the largest value and against nothing. A wrong kernel is off by far more.
RELATIVE_TOLERANCE = 1e-4
ABSOLUTE_TOLERANCE = 1e-5

# numpy's name of an element type -> struct's, and the bytes of one element.
FORMATS: dict[str, str] = {
    "<f4": "f",
    "<f2": "e",
    "<f8": "d",
    "|i1": "b",
    "|u1": "B",
    "<i2": "h",
    "<u2": "H",
    "<i4": "i",
    "<u4": "I",
    "<i8": "q",
    "|b1": "?",
}
NAMES: dict[DType, str] = {
    DType.BOOL: "|b1",
    DType.INT8: "|i1",
    DType.INT16: "<i2",
    DType.INT32: "<i4",
    DType.FP32: "<f4",
    DType.FP16: "<f2",
}
FLOATS = ("<f4", "<f2", "<f8")


class ArrayError(ValueError):
    """The file is no array this program can read; the text says why."""


class Array(NamedTuple):
    """`kind` is numpy's name of the element type ("<f4"), `data` little-endian in C order."""

    kind: str
    shape: tuple[int, ...]
    data: bytes


class Difference(NamedTuple):
    """The worst element of a comparison: where, by how much, and what was allowed there."""

    position: int
    error: float
    allowed: float

    @property
    def good(self) -> bool:
        return self.error <= self.allowed


def read_npy(raw: bytes, name: str = "array") -> Array:
    """Parse one .npy file. Raises ArrayError."""
    if raw[:6] != MAGIC or len(raw) < 12:
        raise ArrayError(f"{name}: not a .npy file")
    # Version 2 has four bytes of header length where version 1 has two.
    wide = raw[6] >= 2
    size = int.from_bytes(raw[8:12] if wide else raw[8:10], "little")
    start = (12 if wide else 10) + size
    if size > LARGEST_HEADER or start > len(raw):
        raise ArrayError(f"{name}: the header is cut off")
    try:
        header = ast.literal_eval(raw[start - size : start].decode("latin-1").strip())
        kind, order, shape = header["descr"], header["fortran_order"], tuple(header["shape"])
    except (ValueError, SyntaxError, KeyError, TypeError) as error:
        raise ArrayError(f"{name}: the header cannot be read") from error
    if kind not in FORMATS:
        raise ArrayError(f"{name}: elements of type {kind} are not supported")
    # A single axis is the same in both orders, and numpy writes either.
    if order and len(shape) > 1:
        raise ArrayError(f"{name}: stored in Fortran order")
    if not all(isinstance(extent, int) and extent >= 0 for extent in shape):
        raise ArrayError(f"{name}: shape {shape}")
    data = raw[start:]
    if len(data) != math.prod(shape) * Struct("<" + FORMATS[kind]).size:
        raise ArrayError(f"{name}: {len(data)} bytes of data do not make shape {shape} of {kind}")
    return Array(kind, shape, data)


def write_npy(array: Array) -> bytes:
    """The .npy file of an array."""
    header = repr({"descr": array.kind, "fortran_order": False, "shape": array.shape})
    # Data begins at a multiple of 64 bytes, as the format asks for mapping.
    header += " " * (-(len(header) + 11) % 64) + "\n"
    return MAGIC + b"\x01\x00" + len(header).to_bytes(2, "little") + header.encode("latin-1") + array.data


def read_npz(path: Path) -> dict[str, Array]:
    """All arrays of a .npz file by name. Raises ArrayError, OSError."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {
                name.removesuffix(".npy"): read_npy(archive.read(name), f"{path.name}:{name}")
                for name in archive.namelist()
            }
    except zipfile.BadZipFile as error:
        raise ArrayError(f"{path.name}: not a .npz file") from error


def write_npz(path: Path, arrays: Mapping[str, Array]) -> None:
    """Store arrays under their names."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            archive.writestr(f"{name}.npy", write_npy(array))


def compare(got: bytes, expected: Array, tolerance: float = 0.0) -> Difference:
    """The worst difference between `got` (bytes of the same element type) and `expected`.

    Floats may differ by 1e-4 of the largest expected magnitude plus 1e-5, integers by `tolerance`. A NaN equals a NaN
    only.
    """
    if len(got) != len(expected.data):
        return Difference(0, math.inf, 0.0)
    if got == expected.data:
        return Difference(0, 0.0, 0.0)
    code = "<" + FORMATS[expected.kind]
    wanted = [value for (value,) in iter_unpack(code, expected.data)]
    values = [value for (value,) in iter_unpack(code, got)]
    if expected.kind in FLOATS:
        allowed = RELATIVE_TOLERANCE * max((abs(value) for value in wanted if math.isfinite(value)), default=0.0)
        allowed += ABSOLUTE_TOLERANCE
    else:
        allowed = float(tolerance)
    worst, position = 0.0, 0
    for index, (value, want) in enumerate(zip(values, wanted, strict=True)):
        if value == want or (value != value and want != want):
            continue
        error = abs(value - want)
        # Written this way round, a NaN counts as worse than everything.
        if not error <= worst:
            worst, position = (error, index) if error == error else (math.inf, index)
    return Difference(position, worst, allowed)
