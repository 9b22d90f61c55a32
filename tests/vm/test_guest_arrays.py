"""The guest's own .npy reader and comparison, against numpy."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from virtaccel.guest_tools.bare.arrays import Array, ArrayError, compare, read_npy, read_npz, write_npy, write_npz

KINDS = ["<f4", "<f2", "<f8", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "|b1"]


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0, 4)])
def test_reads_what_numpy_writes(kind: str, shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind)
    array = read_npy(npy(values))
    assert array == Array(kind, shape, values.tobytes())


@pytest.mark.parametrize("kind", KINDS)
def test_numpy_reads_what_it_writes(kind: str) -> None:
    values = np.arange(12).reshape(3, 4).astype(kind)
    again = np.load(io.BytesIO(write_npy(Array(kind, (3, 4), values.tobytes()))))
    assert again.dtype == values.dtype
    np.testing.assert_array_equal(again, values)


def test_archives_both_ways(tmp_path: Path) -> None:
    values = {"in_0": np.linspace(0, 1, 7, dtype=np.float32), "out_0": np.arange(4, dtype=np.int8)}
    np.savez_compressed(tmp_path / "a.npz", **values)
    arrays = read_npz(tmp_path / "a.npz")
    assert {name: array.data for name, array in arrays.items()} == {n: v.tobytes() for n, v in values.items()}
    write_npz(tmp_path / "b.npz", arrays)
    with np.load(tmp_path / "b.npz") as again:
        for name, expected in values.items():
            np.testing.assert_array_equal(again[name], expected)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"not an array at all",
        npy(np.zeros(4, np.float32))[:-1],
        npy(np.zeros(4, np.float32)) + b"x",
        npy(np.zeros(4, np.complex64)),
        npy(np.zeros(4, ">f4")),
        npy(np.asfortranarray(np.zeros((2, 3)))),
        b"\x93NUMPY\x01\x00\xff\xff{'descr'",
        b"\x93NUMPY\x01\x00\x08\x00[1,2,3]\n",
    ],
)
def test_what_is_no_array_is_refused(raw: bytes) -> None:
    with pytest.raises(ArrayError):
        read_npy(raw)


def test_a_file_that_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"hello")
    with pytest.raises(ArrayError, match=r"x\.npz"):
        read_npz(tmp_path / "x.npz")


def floats(*values: float) -> Array:
    return Array("<f4", (len(values),), np.array(values, np.float32).tobytes())


@pytest.mark.parametrize(
    ("got", "expected", "good"),
    [
        ((1.0, 2.0), (1.0, 2.0), True),
        ((1.0, 100.009), (1.0, 100.0), True),
        ((1.009, 100.0), (1.0, 100.0), True),
        ((1.02, 100.0), (1.0, 100.0), False),
        ((0.0, 2e-5), (0.0, 0.0), False),
        ((0.0, 9e-6), (0.0, 0.0), True),
        ((float("nan"), 1.0), (1.0, 1.0), False),
        ((1.0, 1.0), (float("nan"), 1.0), False),
        ((float("nan"), 1.0), (float("nan"), 1.0), True),
        ((float("inf"), 1.0), (float("inf"), 1.0), True),
        ((float("inf"), 1.0), (1e30, 1.0), False),
        ((float("-inf"), 1.0), (float("inf"), 1.0), False),
    ],
)
def test_comparison_of_floats(got: tuple[float, ...], expected: tuple[float, ...], good: bool) -> None:
    assert compare(floats(*got).data, floats(*expected)).good is good


def test_comparison_of_integers() -> None:
    want = Array("|i1", (3,), np.array([1, -128, 127], np.int8).tobytes())
    near = np.array([1, -127, 127], np.int8).tobytes()
    assert compare(want.data, want).good
    assert not compare(near, want).good
    assert compare(near, want).position == 1
    assert compare(near, want, 1.0).good


def test_too_few_bytes_are_no_match() -> None:
    assert not compare(b"", floats(1.0)).good
