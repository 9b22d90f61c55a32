"""Convolution, pooling and MATMUL against Arm's reference model."""

from __future__ import annotations

import graphs
import lowered
import numpy as np
import oracle
import pytest

from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.write import GraphWriter

FLOATS = [DType.FP32, DType.FP16]
NUMPY = {DType.FP32: np.float32, DType.FP16: np.float16}


def random(seed: int, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(NUMPY[dtype])


def assert_like_reference(tosa: bytes, inputs: list[np.ndarray], dtype: DType) -> None:
    """Within a few units of the type's last place of the largest output."""
    [got], [want] = lowered.run(tosa, inputs), oracle.reference(tosa, inputs)
    bound = {DType.FP32: 2e-6, DType.FP16: 1e-3}[dtype] * max(float(np.abs(want).max()), 1.0)
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=0, atol=bound)


def convolve(
    op: Op,
    dtype: DType,
    data: tuple[int, ...],
    kernel: tuple[int, ...],
    out: tuple[int, ...],
    bias: int,
    constant_weights: bool = True,
    **attributes: object,
) -> tuple[bytes, list[np.ndarray]]:
    writer = GraphWriter()
    x = writer.input("x", data, dtype)
    weights = random(2, kernel, dtype)
    w = writer.constant(weights) if constant_weights else writer.input("w", kernel, dtype)
    b = writer.constant(random(3, (bias,), dtype))
    zero = writer.constant(np.zeros(1, NUMPY[dtype]))
    writer.output(
        writer.operator(op, [x, w, b, zero, zero], (out, dtype), {"acc_type": DType.FP32, **attributes})  # type: ignore[dict-item]
    )
    inputs = [random(1, data, dtype)] + ([] if constant_weights else [weights])
    return writer.to_bytes(), inputs


@pytest.mark.parametrize("constant_weights", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
def test_conv2d(dtype: DType, constant_weights: bool) -> None:
    tosa, inputs = convolve(
        Op.CONV2D, dtype, (2, 9, 8, 5), (7, 3, 2, 5), (2, 5, 8, 7), 7, constant_weights,
        pad=[1, 1, 2, 1], stride=[2, 1], dilation=[1, 3],
    )  # fmt: skip
    assert_like_reference(tosa, inputs, dtype)


@pytest.mark.parametrize("bias", [1, 6])
def test_conv2d_over_maps_of_one_point(bias: int) -> None:
    tosa, inputs = convolve(
        Op.CONV2D, DType.FP32, (3, 1, 1, 5), (6, 1, 1, 5), (3, 1, 1, 6), bias,
        pad=[0] * 4, stride=[1, 1], dilation=[1, 1],
    )  # fmt: skip
    assert_like_reference(tosa, inputs, DType.FP32)


def test_conv2d_of_one_point_with_stride_and_padding_behind_another_operator() -> None:
    writer = GraphWriter()
    x = writer.input("x", (1, 11, 12, 8), DType.FP32)
    half = writer.constant(np.full((1, 1, 1, 1), 0.5, np.float32))
    moved = writer.operator(Op.ADD, [x, half], ((1, 11, 12, 8), DType.FP32))
    w, b = writer.constant(random(2, (5, 1, 1, 8), DType.FP32)), writer.constant(np.ones(5, np.float32))
    zero = writer.constant(np.zeros(1, np.float32))
    window = {"pad": [1, 1, 1, 0], "stride": [1, 2], "dilation": [1, 1], "acc_type": DType.FP32}
    writer.output(writer.operator(Op.CONV2D, [moved, w, b, zero, zero], ((1, 13, 7, 5), DType.FP32), window))
    assert_like_reference(writer.to_bytes(), [random(1, (1, 11, 12, 8), DType.FP32)], DType.FP32)


@pytest.mark.parametrize("dtype", FLOATS)
def test_conv3d(dtype: DType) -> None:
    tosa, inputs = convolve(
        Op.CONV3D, dtype, (1, 4, 6, 5, 3), (4, 2, 3, 2, 3), (1, 3, 6, 3, 4), 4,
        pad=[0, 0, 1, 1, 1, 0], stride=[1, 1, 2], dilation=[1, 1, 1],
    )  # fmt: skip
    assert_like_reference(tosa, inputs, dtype)


@pytest.mark.parametrize("multiplier", [1, 3])
@pytest.mark.parametrize("dtype", FLOATS)
def test_depthwise_conv2d(dtype: DType, multiplier: int) -> None:
    tosa, inputs = convolve(
        Op.DEPTHWISE_CONV2D, dtype, (2, 7, 6, 4), (3, 2, 4, multiplier), (2, 7, 3, 4 * multiplier), 4 * multiplier,
        pad=[1, 1, 0, 0], stride=[1, 2], dilation=[1, 1],
    )  # fmt: skip
    assert_like_reference(tosa, inputs, dtype)


@pytest.mark.parametrize("bias", [1, 4])
@pytest.mark.parametrize("constant_weights", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
def test_depthwise_conv2d_of_one_point(dtype: DType, constant_weights: bool, bias: int) -> None:
    tosa, inputs = convolve(
        Op.DEPTHWISE_CONV2D, dtype, (2, 7, 6, 4), (1, 1, 4, 1), (2, 7, 6, 4), bias, constant_weights,
        pad=[0] * 4, stride=[1, 1], dilation=[1, 1],
    )  # fmt: skip
    assert_like_reference(tosa, inputs, dtype)


def test_depthwise_conv2d_of_one_point_rounds_apart_from_what_is_around_it() -> None:
    # (x - 1) * 3.3 near x = 1 has hardly any error, x * 3.3 - 3.3 has little else.
    writer = GraphWriter()
    x = writer.input("x", (1, 2, 3, 4), DType.FP32)
    one = writer.constant(np.ones((1, 1, 1, 1), np.float32))
    moved = writer.operator(Op.SUB, [x, one], ((1, 2, 3, 4), DType.FP32))
    w, b = writer.constant(np.full((1, 1, 4, 1), 3.3, np.float32)), writer.constant(np.zeros(4, np.float32))
    zero = writer.constant(np.zeros(1, np.float32))
    window = {"pad": [0] * 4, "stride": [1, 1], "dilation": [1, 1], "acc_type": DType.FP32}
    writer.output(writer.operator(Op.DEPTHWISE_CONV2D, [moved, w, b, zero, zero], ((1, 2, 3, 4), DType.FP32), window))
    inputs = [(1 + np.arange(24).reshape(1, 2, 3, 4) * 2.0**-23).astype(np.float32)]
    [got], [want] = lowered.run(writer.to_bytes(), inputs), oracle.reference(writer.to_bytes(), inputs)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("out_pad", [(0, 0, 0, 0), (-1, -2, 0, -1), (1, 0, 2, 1), (-1, 2, 1, -1)])
def test_transpose_conv2d(out_pad: tuple[int, ...]) -> None:
    height, width = 3 * 2 + out_pad[0] + out_pad[1] + 3, 2 * 1 + out_pad[2] + out_pad[3] + 4
    tosa, inputs = convolve(
        Op.TRANSPOSE_CONV2D, DType.FP32, (2, 4, 3, 5), (6, 3, 4, 5), (2, height, width, 6), 6,
        out_pad=list(out_pad), stride=[2, 1],
    )  # fmt: skip
    assert_like_reference(tosa, inputs, DType.FP32)


@pytest.mark.parametrize("dtype", FLOATS)
def test_avg_pool2d_does_not_count_padding(dtype: DType) -> None:
    writer = GraphWriter()
    x, zero = writer.input("x", (2, 7, 6, 3), dtype), writer.constant(np.zeros(1, NUMPY[dtype]))
    attributes = {"kernel": [3, 2], "stride": [2, 2], "pad": [1, 1, 1, 1], "acc_type": DType.FP32}
    writer.output(writer.operator(Op.AVG_POOL2D, [x, zero, zero], ((2, 4, 4, 3), dtype), attributes))
    assert_like_reference(writer.to_bytes(), [random(1, (2, 7, 6, 3), dtype)], dtype)


def matmul(
    left: tuple[int, ...], right: tuple[int, ...], dtype: DType, out: DType, zeros: tuple[int, int] = (0, 0)
) -> bytes:
    points = [graphs.Const(np.array([zero]), dtype) for zero in zeros]
    shape = (left[0], left[1], right[2])
    return graphs.single(Op.MATMUL, [(left, dtype), (right, dtype), *points], (shape, out))


def pool(dtype: DType, nan_mode: int) -> bytes:
    writer = GraphWriter()
    x = writer.input("x", (1, 4, 6, 2), dtype)
    attributes = {"kernel": [2, 3], "stride": [2, 3], "pad": [0, 0, 0, 0], "nan_mode": nan_mode}
    writer.output(writer.operator(Op.MAX_POOL2D, [x], ((1, 2, 2, 2), dtype), attributes))
    return writer.to_bytes()


@pytest.mark.parametrize("place", [(0, 0), (0, 1), (1, 2)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_n3_max_pool2d_nan(dtype: DType, place: tuple[int, int]) -> None:
    data = random(4, (1, 4, 6, 2), dtype)
    data[0, place[0], place[1], 0] = np.nan
    data[0, 2:4, 3:6, 1] = np.nan
    clean = np.where(np.isnan(data), -np.inf, data)
    windows = clean.reshape(1, 2, 2, 2, 3, 2).max(axis=(2, 4))
    ignore, propagate = windows.copy(), windows.copy()
    propagate[0, 0, 0, 0] = np.nan
    ignore[0, 1, 1, 1] = propagate[0, 1, 1, 1] = np.nan
    np.testing.assert_array_equal(lowered.run(pool(dtype, 1), [data])[0], propagate)
    np.testing.assert_array_equal(lowered.run(pool(dtype, 2), [data])[0], ignore)


def test_max_pool2d_extremes_and_padding() -> None:
    writer = GraphWriter()
    x = writer.input("x", (1, 3, 3, 1), DType.FP32)
    attributes = {"kernel": [2, 2], "stride": [1, 1], "pad": [1, 0, 1, 0], "nan_mode": 2}
    writer.output(writer.operator(Op.MAX_POOL2D, [x], ((1, 3, 3, 1), DType.FP32), attributes))
    data = np.full((1, 3, 3, 1), -np.inf, np.float32)
    data[0, 2, 2, 0], data[0, 0, 0, 0] = np.finfo(np.float32).min, np.nan
    tosa = writer.to_bytes()
    np.testing.assert_array_equal(lowered.run(tosa, [data])[0], oracle.reference(tosa, [data])[0])


def test_max_pool2d_int8() -> None:
    data = np.random.default_rng(5).integers(-128, 128, (1, 4, 6, 2), np.int8)
    tosa = pool(DType.INT8, 1)
    np.testing.assert_array_equal(lowered.run(tosa, [data])[0], oracle.reference(tosa, [data])[0])


def test_pad_before_a_convolution_and_before_pools() -> None:
    writer = GraphWriter()
    x = writer.input("x", (1, 5, 5, 3), DType.FP32)
    zero = writer.constant(np.zeros(1, np.float32))
    padded = writer.operator(
        Op.PAD, [x, writer.const_shape([0, 0, 1, 2, 0, 1, 0, 0]), zero], ((1, 8, 6, 3), DType.FP32)
    )
    w, b = writer.constant(random(2, (4, 3, 3, 3), DType.FP32)), writer.constant(random(3, (4,), DType.FP32))
    window = {"pad": [0, 0, 1, 0], "stride": [1, 1], "dilation": [1, 1], "acc_type": DType.FP32}
    convolved = writer.operator(Op.CONV2D, [padded, w, b, zero, zero], ((1, 6, 5, 4), DType.FP32), window)
    pools = {"kernel": [2, 2], "stride": [2, 2], "pad": [0] * 4, "acc_type": DType.FP32}
    average = writer.operator(Op.AVG_POOL2D, [padded, zero, zero], ((1, 4, 3, 3), DType.FP32), pools)
    writer.output(convolved, average)
    tosa, data = writer.to_bytes(), random(1, (1, 5, 5, 3), DType.FP32)
    for got, want in zip(lowered.run(tosa, [data]), oracle.reference(tosa, [data]), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_n1_matmul_is_computed_in_fp32() -> None:
    tosa = matmul((1, 64, 256), (1, 256, 64), DType.FP32, DType.FP32)
    left, right = random(1, (1, 64, 256), DType.FP32), random(2, (1, 256, 64), DType.FP32)
    want = left.astype(np.float64) @ right.astype(np.float64)
    assert np.abs(lowered.run(tosa, [left, right])[0] - want).max() < 1e-3


@pytest.mark.parametrize("out", FLOATS)
def test_matmul_fp16_operands(out: DType) -> None:
    tosa = matmul((2, 5, 33), (2, 33, 4), DType.FP16, out)
    left, right = random(1, (2, 5, 33), DType.FP16), random(2, (2, 33, 4), DType.FP16)
    want = (left.astype(np.float64) @ right.astype(np.float64)).astype(NUMPY[out])
    np.testing.assert_allclose(
        lowered.run(tosa, [left, right])[0], want, rtol=1e-3 if out is DType.FP16 else 1e-6, atol=1e-5
    )


@pytest.mark.parametrize("depth", [1, 258, 259, 515, 1031, 4096, 30_000])
def test_n7_int8_matmul_is_exact_at_any_depth(depth: int) -> None:
    worst = np.full((1, 2, depth), -128, np.int8)
    tosa = matmul((1, 2, depth), (1, depth, 3), DType.INT8, DType.INT32, zeros=(127, 127))
    got = lowered.run(tosa, [worst, worst[:, :1].reshape(1, depth, 1).repeat(3, axis=2)])[0]
    assert (got == 65025 * depth).all()
    rng = np.random.default_rng(depth)
    left, right = rng.integers(-128, 128, (1, 2, depth), np.int8), rng.integers(-128, 128, (1, depth, 3), np.int8)
    want = (left.astype(np.int64) - 127) @ (right.astype(np.int64) - 127)
    np.testing.assert_array_equal(lowered.run(tosa, [left, right])[0], want)
