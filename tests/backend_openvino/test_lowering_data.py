"""Operators that move data, in every type: bytes must arrive as they were, whatever layout the operand is kept in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import Const, Dims, single
from lowered import run
from numpy.typing import NDArray
from oracle import reference

from virtaccel.backend_openvino.lowering.registry import Refused
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.write import GraphWriter

Array = NDArray[Any]

KINDS = {
    DType.BOOL: np.dtype(np.bool_), DType.INT8: np.dtype(np.int8), DType.INT16: np.dtype(np.int16),
    DType.INT32: np.dtype(np.int32), DType.FP16: np.dtype(np.float16), DType.FP32: np.dtype(np.float32),
}  # fmt: skip
EVERY_TYPE = pytest.mark.parametrize("dtype", KINDS, ids=lambda dtype: dtype.name)
WITHOUT_BOOL = pytest.mark.parametrize("dtype", list(KINDS)[1:], ids=lambda dtype: dtype.name)


def anything(shape: tuple[int, ...], dtype: DType, seed: int = 31) -> Array:
    """Any bit pattern, NaN, infinities and denormals included."""
    raw = np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint32)
    kind = KINDS[dtype]
    return raw > 2**31 if kind == np.bool_ else raw.astype(f"u{kind.itemsize}").view(kind)


def same(got: Array, expected: Array) -> bool:
    return got.shape == expected.shape and np.array_equal(got, expected, equal_nan=got.dtype.kind == "f")


@EVERY_TYPE
def test_reverse_tile_slice_transpose(dtype: DType) -> None:
    x = anything((2, 3, 4, 5), dtype)
    spec = (x.shape, dtype)
    for axis in range(4):
        assert same(run(single(Op.REVERSE, [spec], spec, {"axis": axis}), [x])[0], np.flip(x, axis))
    tosa = single(Op.TILE, [spec, Dims((2, 1, 3, 1))], ((4, 3, 12, 5), dtype))
    assert same(run(tosa, [x])[0], np.tile(x, (2, 1, 3, 1)))
    tosa = single(Op.SLICE, [spec, Dims((1, 0, 2, 1)), Dims((1, 3, 2, 3))], ((1, 3, 2, 3), dtype))
    assert same(run(tosa, [x])[0], x[1:2, :, 2:4, 1:4])
    tosa = single(Op.TRANSPOSE, [spec], ((5, 2, 4, 3), dtype), {"perms": (3, 0, 2, 1)})
    assert same(run(tosa, [x])[0], np.transpose(x, (3, 0, 2, 1)))


@EVERY_TYPE
def test_concat_pad_reshape(dtype: DType) -> None:
    a, b, c = anything((2, 3, 4), dtype, 1), anything((2, 1, 4), dtype, 2), anything((2, 5, 4), dtype, 3)
    tosa = single(Op.CONCAT, [(x.shape, dtype) for x in (a, b, c)], ((2, 9, 4), dtype), {"axis": 1})
    assert same(run(tosa, [a, b, c])[0], np.concatenate([a, b, c], 1))
    filler = anything((1,), dtype, 4)
    tosa = single(Op.PAD, [(a.shape, dtype), Dims((1, 0, 0, 2, 3, 1)), Const(filler)], ((3, 5, 8), dtype))
    expected = np.pad(a, ((1, 0), (0, 2), (3, 1)), constant_values=filler[0])
    assert same(run(tosa, [a])[0], expected)
    tosa = single(Op.RESHAPE, [(a.shape, dtype), Dims((4, 6))], ((4, 6), dtype))
    assert same(run(tosa, [a])[0], a.reshape(4, 6))


def test_pad_with_nan_and_zeros() -> None:
    x = anything((2, 3), DType.FP32)
    for filler in (np.nan, -np.inf, -0.0):
        value = Const(np.array([filler], np.float32))
        tosa = single(Op.PAD, [(x.shape, DType.FP32), Dims((1, 1, 0, 2)), value], ((4, 5), DType.FP32))
        assert same(run(tosa, [x])[0], np.pad(x, ((1, 1), (0, 2)), constant_values=filler))


def test_pad_with_a_filler_given_at_run_time_is_refused() -> None:
    tosa = single(Op.PAD, [((2,), DType.FP32), Dims((1, 1)), ((1,), DType.FP32)], ((4,), DType.FP32))
    with pytest.raises(Refused, match="PAD"):
        run(tosa, [np.zeros(2, np.float32), np.zeros(1, np.float32)])


def test_rank_6_and_scalars() -> None:
    x = anything((2, 1, 3, 1, 2, 2), DType.FP32)
    spec = (x.shape, DType.FP32)
    assert same(run(single(Op.REVERSE, [spec], spec, {"axis": 2}), [x])[0], np.flip(x, 2))
    perms = (5, 3, 0, 2, 4, 1)
    turned = np.transpose(x, perms)
    tosa = single(Op.TRANSPOSE, [spec], (turned.shape, DType.FP32), {"perms": perms})
    assert same(run(tosa, [x])[0], turned)
    tosa = single(Op.RESHAPE, [((1, 1), DType.INT32), Dims(())], ((), DType.INT32))
    assert same(run(tosa, [np.array([[7]], np.int32)])[0], np.array(7, np.int32))


def _after_transpose(
    x: Array, perms: tuple[int, ...], op: Op, rest: list[Any], out: tuple[int, ...], **attributes: int
) -> Array:
    writer = GraphWriter()
    turned = tuple(x.shape[axis] for axis in perms)
    value = writer.operator(
        Op.TRANSPOSE, [writer.input("x", x.shape, DType.FP32)], (turned, DType.FP32), {"perms": perms}
    )
    names = [value]
    for operand in rest:
        names.append(writer.const_shape(operand) if isinstance(operand, tuple) else writer.constant(operand))
    writer.output(writer.operator(op, names, (out, DType.FP32), attributes))
    return run(writer.to_bytes(), [x])[0]


def test_axes_are_mapped_through_the_layout_of_a_transposed_operand() -> None:
    x = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    perms = (0, 2, 3, 1)
    t = np.transpose(x, perms)  # (2, 4, 5, 3)
    assert same(_after_transpose(x, perms, Op.REVERSE, [], t.shape, axis=2), np.flip(t, 2))
    assert same(_after_transpose(x, perms, Op.TILE, [(1, 2, 1, 3)], (2, 8, 5, 9)), np.tile(t, (1, 2, 1, 3)))
    got = _after_transpose(x, perms, Op.SLICE, [(0, 1, 2, 0), (2, 2, 3, 2)], (2, 2, 3, 2))
    assert same(got, t[:, 1:3, 2:5, :2])
    got = _after_transpose(x, perms, Op.PAD, [(0, 0, 1, 2, 0, 0, 3, 0), np.full(1, 9, np.float32)], (2, 7, 5, 6))
    assert same(got, np.pad(t, ((0, 0), (1, 2), (0, 0), (3, 0)), constant_values=9))
    assert same(_after_transpose(x, perms, Op.RESHAPE, [(8, 15)], (8, 15)), t.reshape(8, 15))
    shape = (2, 1, 4, 5, 1, 3)
    assert same(_after_transpose(x, perms, Op.RESHAPE, [shape], shape), t.reshape(shape))


def test_reshape_that_adds_and_drops_unit_axes_after_a_transpose() -> None:
    x = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    t = np.transpose(x, (2, 0, 1))  # (4, 1, 3)
    for shape in ((4, 3), (1, 4, 3, 1), (4, 1, 1, 3), (1, 1, 4, 1, 3), (12,), (3, 4)):
        assert same(_after_transpose(x, (2, 0, 1), Op.RESHAPE, [shape], shape), t.reshape(shape)), shape


def test_concat_of_one_transposed_and_one_plain_operand() -> None:
    x = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    y = np.arange(36, dtype=np.float32).reshape(1, 3, 4, 3)
    writer = GraphWriter()
    value = writer.operator(
        Op.TRANSPOSE, [writer.input("x", x.shape, DType.FP32)], ((1, 3, 4, 2), DType.FP32), {"perms": (0, 2, 3, 1)}
    )
    names = [value, writer.input("y", y.shape, DType.FP32)]
    writer.output(writer.operator(Op.CONCAT, names, ((1, 3, 4, 5), DType.FP32), {"axis": 3}))
    expected = np.concatenate([np.transpose(x, (0, 2, 3, 1)), y], 3)
    assert same(run(writer.to_bytes(), [x, y])[0], expected)


@pytest.mark.parametrize("batches", [1, 3])
@WITHOUT_BOOL
def test_gather_and_scatter(dtype: DType, batches: int) -> None:
    rng = np.random.default_rng(33)
    values, update = anything((batches, 7, 5), dtype, 5), anything((batches, 4, 5), dtype, 6)
    rows = np.stack([rng.permutation(7)[:4] for _ in range(batches)]).astype(np.int32)
    specs = (values.shape, dtype), (rows.shape, DType.INT32), (update.shape, dtype)
    tosa = single(Op.GATHER, specs[:2], specs[2])
    assert same(run(tosa, [values, rows])[0], reference(tosa, [values, rows])[0])
    tosa = single(Op.SCATTER, specs, specs[0])
    assert same(run(tosa, [values, rows, update])[0], reference(tosa, [values, rows, update])[0])
    tosa = single(Op.SCATTER, [specs[0], Const(rows), specs[2]], specs[0])
    expected = values.copy()
    for batch in range(batches):
        expected[batch, rows[batch]] = update[batch]
    assert same(run(tosa, [values, update])[0], expected)


def test_n12_indices_outside_the_tensor_never_reach_outside() -> None:
    values = np.arange(1, 13, dtype=np.float32).reshape(1, 4, 3)
    rows = np.array([[-1, 4, -(2**31), 2**31 - 1, 0, 3]], np.int32)
    specs = (values.shape, DType.FP32), (rows.shape, DType.INT32), ((1, 6, 3), DType.FP32)
    for operands, inputs in (([*specs[:2]], [values, rows]), ([specs[0], Const(rows)], [values])):
        (got,) = run(single(Op.GATHER, operands, specs[2]), inputs)
        assert np.array_equal(got[0, 4:], values[0, [0, 3]])
        assert all(row in values[0].tolist() for row in got[0].tolist())
    update = np.arange(-18, 0, dtype=np.float32).reshape(1, 6, 3)
    duplicates = np.array([[1, 1, 4, -1, 2**31 - 1, -(2**31)]], np.int32)
    (got,) = run(single(Op.SCATTER, specs, specs[0]), [values, duplicates, update])
    assert np.array_equal(got[0, 2], values[0, 2])
    allowed = values[0].tolist() + update[0].tolist()
    assert all(row in allowed for row in got[0].tolist())


def test_a_slice_outside_its_operand_is_refused() -> None:
    tosa = single(Op.SLICE, [((4,), DType.FP32), Dims((2,)), Dims((3,))], ((3,), DType.FP32))
    with pytest.raises(Refused, match="SLICE"):
        run(tosa, [np.zeros(4, np.float32)])
