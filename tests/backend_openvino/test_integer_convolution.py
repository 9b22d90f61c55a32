"""Convolutions, pools and products of integers against Arm's reference model, bit for bit."""

from __future__ import annotations

from itertools import pairwise

import lowered
import numpy as np
import oracle
import pytest

from virtaccel.backend_openvino.lowering.integer_convolution import Integers, Sum
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.write import GraphWriter

I8, I16, I4 = (DType.INT8, DType.INT8), (DType.INT16, DType.INT8), (DType.INT8, DType.INT4)
ACCUMULATORS = {DType.INT8: DType.INT32, DType.INT16: DType.INT48}
LIMITS = {
    DType.INT4: (-7, 7),
    DType.INT8: (-128, 127),
    DType.INT16: (-32768, 32767),
    DType.INT32: (-(2**31), 2**31 - 1),
}
NUMPY = {DType.INT4: np.int8, DType.INT8: np.int8, DType.INT16: np.int16, DType.INT32: np.int32}


def numbers(seed: int, shape: tuple[int, ...], dtype: DType, extreme: bool = False) -> np.ndarray:
    """Numbers of the whole range, or only its two ends."""
    low, high = LIMITS[dtype]
    rng = np.random.default_rng(seed)
    drawn = rng.choice([low, high], shape) if extreme else rng.integers(low, high + 1, shape)
    return drawn.astype(NUMPY[dtype])


def assert_like_reference(tosa: bytes, *inputs: np.ndarray) -> None:
    for got, want in zip(lowered.run(tosa, inputs), oracle.reference(tosa, inputs), strict=True):
        np.testing.assert_array_equal(got, want)


def convolve(
    op: Op,
    types: tuple[DType, DType],
    data: tuple[int, ...],
    kernel: tuple[int, ...],
    out: tuple[int, ...],
    *,
    zeros: tuple[int, int] = (0, 0),
    extreme: bool = False,
    constant: bool = True,
    bias: int | None = None,
    **attributes: object,
) -> None:
    """One convolution of random numbers, compared."""
    writer, accumulator = GraphWriter(), ACCUMULATORS[types[0]]
    x = writer.input("x", data, types[0])
    weights = numbers(2, kernel, types[1], extreme)
    w = writer.constant(weights, types[1]) if constant else writer.input("w", kernel, types[1])
    terms = numbers(3, (out[-1] if bias is None else bias,), DType.INT32) // 8
    b = writer.constant(terms.astype(np.int64), accumulator)
    points = [writer.constant(np.array([zero]), dtype) for zero, dtype in zip(zeros, types, strict=True)]
    attributes["acc_type"] = accumulator
    writer.output(writer.operator(op, [x, w, b, *points], (out, accumulator), attributes))  # type: ignore[arg-type]
    assert_like_reference(writer.to_bytes(), numbers(1, data, types[0], extreme), *([] if constant else [weights]))


FLAT = {"pad": [0] * 4, "stride": [1, 1], "dilation": [1, 1]}


def assert_dynamic(op: Op, x: tuple[int, ...], w: tuple[int, ...], out: tuple[int, ...], **attributes: object) -> None:
    """Zero points that only a call tells: the same as constant ones give."""
    results = []
    data, weights = numbers(1, x, DType.INT8, True), numbers(2, w, DType.INT8, True)
    for constant in (True, False):
        writer = GraphWriter()
        names = [writer.input("x", x, DType.INT8), writer.constant(weights)]
        if op is not Op.MATMUL:
            names.append(writer.constant(np.array([7], np.int32)))
        zeros = [np.array([zero], np.int8) for zero in (-128, 127)]
        names += [
            writer.constant(zero) if constant else writer.input(f"zero{index}", (1,), DType.INT8)
            for index, zero in enumerate(zeros)
        ]
        given = {} if op is Op.MATMUL else {**attributes, "acc_type": DType.INT32}
        writer.output(writer.operator(op, names, (out, DType.INT32), given))  # type: ignore[arg-type]
        results.append(lowered.run(writer.to_bytes(), [data, *([] if constant else zeros)])[0])
    np.testing.assert_array_equal(results[1], results[0])


def test_zero_points_that_only_a_call_tells() -> None:
    assert_dynamic(Op.CONV2D, (1, 5, 4, 70), (3, 3, 3, 70), (1, 5, 4, 3), pad=[1] * 4, stride=[1, 1], dilation=[1, 1])
    assert_dynamic(
        Op.DEPTHWISE_CONV2D, (1, 22, 21, 2), (20, 20, 2, 1), (1, 3, 2, 2), pad=[0] * 4, stride=[1, 1], dilation=[1, 1]
    )
    assert_dynamic(Op.TRANSPOSE_CONV2D, (1, 4, 3, 5), (6, 3, 4, 5), (1, 9, 6, 6), out_pad=[0] * 4, stride=[2, 1])
    assert_dynamic(Op.MATMUL, (1, 2, 700), (1, 700, 3), (1, 2, 3))


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("types", [I8, I16, I4])
def test_conv2d(types: tuple[DType, DType], constant: bool) -> None:
    zeros = (-128, 127) if types is I8 else (0, 0)
    window = {"pad": [1, 1, 2, 1], "stride": [2, 1], "dilation": [1, 3]}
    convolve(Op.CONV2D, types, (2, 9, 8, 5), (7, 3, 2, 5), (2, 5, 8, 7), zeros=zeros, constant=constant, **window)


def test_conv2d_of_one_point_with_stride_and_padding() -> None:
    window = {"pad": [1, 1, 1, 0], "stride": [1, 2], "dilation": [1, 1]}
    convolve(Op.CONV2D, I8, (1, 11, 44, 13), (15, 1, 1, 13), (1, 13, 23, 15), zeros=(-17, -66), **window)


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("types", [I8, I16])
def test_conv2d_of_extremes_beyond_one_part(types: tuple[DType, DType], constant: bool) -> None:
    zeros = (-128, 127) if types is I8 else (0, 0)
    shapes = (1, 5, 4, 70), (3, 3, 3, 70), (1, 3, 2, 3)
    convolve(Op.CONV2D, types, *shapes, zeros=zeros, extreme=True, constant=constant, bias=1, **FLAT)


@pytest.mark.parametrize("types", [I8, I16])
def test_conv2d_of_a_kernel_too_large_for_one_channel(types: tuple[DType, DType]) -> None:
    zeros = (-128, 127) if types is I8 else (0, 0)
    convolve(Op.CONV2D, types, (1, 24, 24, 2), (2, 20, 20, 2), (1, 5, 5, 2), zeros=zeros, extreme=True, **FLAT)


@pytest.mark.parametrize("types", [I8, I16])
def test_conv3d(types: tuple[DType, DType]) -> None:
    window = {"pad": [0, 0, 1, 1, 1, 0], "stride": [1, 1, 2], "dilation": [1, 1, 1]}
    convolve(Op.CONV3D, types, (1, 4, 6, 5, 3), (4, 2, 3, 2, 3), (1, 3, 6, 3, 4), **window)


@pytest.mark.parametrize("multiplier", [1, 3])
@pytest.mark.parametrize("types", [I8, I16, I4])
def test_depthwise_conv2d(types: tuple[DType, DType], multiplier: int) -> None:
    zeros = (17, -5) if types is I8 else (0, 0)
    window = {"pad": [1, 1, 0, 0], "stride": [1, 2], "dilation": [1, 1]}
    shapes = (2, 7, 6, 4), (3, 2, 4, multiplier), (2, 7, 3, 4 * multiplier)
    convolve(Op.DEPTHWISE_CONV2D, types, *shapes, zeros=zeros, **window)


@pytest.mark.parametrize("constant", [True, False])
def test_depthwise_conv2d_of_a_kernel_beyond_one_part(constant: bool) -> None:
    shapes = (1, 22, 21, 2), (20, 20, 2, 1), (1, 3, 2, 2)
    convolve(Op.DEPTHWISE_CONV2D, I8, *shapes, zeros=(127, 127), extreme=True, constant=constant, **FLAT)


@pytest.mark.parametrize("types", [I8, I16])
@pytest.mark.parametrize("out_pad", [(0, 0, 0, 0), (-1, -2, 0, -1), (1, 0, 2, 1)])
def test_transpose_conv2d(types: tuple[DType, DType], out_pad: tuple[int, ...]) -> None:
    zeros = (-128, 3) if types is I8 else (0, 0)
    height, width = 3 * 2 + out_pad[0] + out_pad[1] + 3, 2 * 1 + out_pad[2] + out_pad[3] + 4
    shapes = (2, 4, 3, 5), (6, 3, 4, 5), (2, height, width, 6)
    convolve(Op.TRANSPOSE_CONV2D, types, *shapes, zeros=zeros, out_pad=list(out_pad), stride=[2, 1])


@pytest.mark.parametrize("zeros", [(0, 0), (-128, 127), (127, -128)])
def test_n7_conv2d_of_extremes(zeros: tuple[int, int]) -> None:
    writer = GraphWriter()
    x = writer.input("x", (1, 5, 5, 64), DType.INT8)
    w, b = writer.constant(np.full((1, 5, 5, 64), 127, np.int8)), writer.constant(np.zeros(1, np.int32))
    points = [writer.constant(np.array([zero], np.int8)) for zero in zeros]
    attributes = {**FLAT, "acc_type": DType.INT32}
    writer.output(writer.operator(Op.CONV2D, [x, w, b, *points], ((1, 1, 1, 1), DType.INT32), attributes))
    [got] = lowered.run(writer.to_bytes(), [np.full((1, 5, 5, 64), -128, np.int8)])
    assert got.item() == (-128 - zeros[0]) * (127 - zeros[1]) * 64 * 5 * 5


def test_padding_counts_as_the_zero_point() -> None:
    """A PAD with the zero point in front becomes the convolution's own padding."""
    writer = GraphWriter()
    x = writer.input("x", (1, 3, 3, 2), DType.INT8)
    zero = writer.constant(np.array([-11], np.int8))
    padded = writer.operator(
        Op.PAD, [x, writer.const_shape([0, 0, 1, 1, 1, 1, 0, 0]), zero], ((1, 5, 5, 2), DType.INT8)
    )
    w, b = writer.constant(numbers(2, (4, 3, 3, 2), DType.INT8)), writer.constant(np.arange(4, dtype=np.int32))
    none = writer.constant(np.zeros(1, np.int8))
    attributes = {**FLAT, "acc_type": DType.INT32}
    writer.output(writer.operator(Op.CONV2D, [padded, w, b, zero, none], ((1, 3, 3, 4), DType.INT32), attributes))
    assert_like_reference(writer.to_bytes(), numbers(1, (1, 3, 3, 2), DType.INT8))


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("dtype", [DType.INT8, DType.INT16])
def test_avg_pool2d(dtype: DType, pad: int, extreme: bool) -> None:
    zeros = (-128, 127) if dtype is DType.INT8 else (0, 0)
    writer = GraphWriter()
    points = [writer.constant(np.array([zero]), dtype) for zero in zeros]
    x = writer.input("x", (2, 8, 7, 3), dtype)
    attributes = {"kernel": [4, 3], "stride": [2, 2], "pad": [pad] * 4, "acc_type": DType.INT32}
    writer.output(writer.operator(Op.AVG_POOL2D, [x, *points], ((2, 3 + pad, 3 + pad, 3), dtype), attributes))
    assert_like_reference(writer.to_bytes(), numbers(1, (2, 8, 7, 3), dtype, extreme))


def test_avg_pool2d_of_more_than_fp32_holds() -> None:
    writer = GraphWriter()
    zero = writer.constant(np.zeros(1), DType.INT16)
    x = writer.input("x", (1, 40, 40, 2), DType.INT16)
    attributes = {"kernel": [40, 40], "stride": [1, 1], "pad": [0] * 4, "acc_type": DType.INT32}
    writer.output(writer.operator(Op.AVG_POOL2D, [x, zero, zero], ((1, 1, 1, 2), DType.INT16), attributes))
    data = numbers(1, (1, 40, 40, 2), DType.INT16)
    data[..., 1] = 32767
    assert_like_reference(writer.to_bytes(), data)


def test_max_pool2d_int16() -> None:
    writer = GraphWriter()
    x = writer.input("x", (1, 4, 6, 2), DType.INT16)
    attributes = {"kernel": [2, 3], "stride": [1, 1], "pad": [1, 0, 1, 1], "nan_mode": 1}
    writer.output(writer.operator(Op.MAX_POOL2D, [x], ((1, 4, 6, 2), DType.INT16), attributes))
    assert_like_reference(writer.to_bytes(), numbers(1, (1, 4, 6, 2), DType.INT16) // 4 - 24000)


@pytest.mark.parametrize("depth", [1, 258, 259, 1031])
def test_matmul_int16(depth: int) -> None:
    writer = GraphWriter()
    zero = writer.constant(np.zeros(1), DType.INT16)
    a, b = writer.input("a", (2, 3, depth), DType.INT16), writer.input("b", (2, depth, 4), DType.INT16)
    writer.output(writer.operator(Op.MATMUL, [a, b, zero, zero], ((2, 3, 4), DType.INT48)))
    tosa = writer.to_bytes()
    assert_like_reference(tosa, numbers(1, (2, 3, depth), DType.INT16), numbers(2, (2, depth, 4), DType.INT16))
    worst = np.full((2, 3, depth), -32768, np.int16), np.full((2, depth, 4), -32768, np.int16)
    assert (lowered.run(tosa, worst)[0] == depth << 30).all()


def test_matmul_int16_deeper_than_int32_holds() -> None:
    depth = 33_000
    writer = GraphWriter()
    zero = writer.constant(np.zeros(1), DType.INT16)
    a, b = writer.input("a", (1, 1, depth), DType.INT16), writer.input("b", (1, depth, 2), DType.INT16)
    writer.output(writer.operator(Op.MATMUL, [a, b, zero, zero], ((1, 1, 2), DType.INT48)))
    data = np.full((1, 1, depth), 32767, np.int16), np.full((1, depth, 2), -1, np.int16)
    assert (lowered.run(writer.to_bytes(), data)[0] == -32767 * depth).all()


def test_int48_passed_through() -> None:
    writer = GraphWriter()
    x = writer.input("x", (3,), DType.INT48)
    values = np.array([-(1 << 47), (1 << 47) - 1, -3], np.int64)
    writer.output(writer.operator(Op.IDENTITY, [x], ((3,), DType.INT48)), writer.constant(values, DType.INT48))
    got = lowered.run(writer.to_bytes(), [values])
    np.testing.assert_array_equal(got, [values, values])


def test_no_part_passes_what_fp32_holds_and_most_convolutions_are_one() -> None:
    data = Integers(None, np.zeros((1, 64, 1, 1), np.int32), 0, 0, 255)
    usual = np.random.default_rng(1).integers(-127, 128, (64, 64, 3, 3)).astype(np.int32)
    worst = np.full((64, 64, 3, 3), 127, np.int32)
    for array, parts in ((usual, 1), (worst, 2)):
        weights = Integers(None, array, 0, -127, 127)
        cut = Sum(data, weights, lambda a, b: a, array.shape, 1, (2, 3)).cut()
        assert cut is not None
        assert (cut.data, cut.weights, cut.parts) == (1, 1, parts)
        (bounds,) = cut.channels
        loads = [np.abs(array[:, a:b]).sum(axis=(1, 2, 3)).max() * 255 for a, b in pairwise(bounds)]
        assert max(loads) <= 1 << 24
