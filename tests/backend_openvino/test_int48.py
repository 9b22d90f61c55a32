"""INT48 between operators: RESCALE from it, RESIZE to it, against Arm's reference model, bit for bit."""

from __future__ import annotations

import lowered
import numpy as np
import oracle
import pytest

from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.schema import ResizeMode, RoundingMode
from virtaccel.tosa_graph.write import GraphWriter

MOST = (1 << 47) - 1
EDGES = np.array([0, 1, -1, 65535, 65536, -65536, -65537, 1 << 31, -(1 << 31), 1 << 32, -(1 << 33), MOST, -MOST - 1])


def rescaled(shape: tuple[int, ...], target: DType, multiplier: list[int], shift: list[int]) -> bytes:
    writer = GraphWriter()
    x = writer.input("x", shape, DType.INT48)
    scale = writer.constant(np.array(multiplier), DType.INT16), writer.constant(np.array(shift), DType.INT8)
    zeros = writer.constant(np.zeros(1), DType.INT48), writer.constant(np.array([5 * (target is DType.INT8)]), target)
    attributes = {
        "scale32": False, "rounding_mode": RoundingMode.SINGLE_ROUND, "per_channel": len(multiplier) > 1,
        "input_unsigned": False, "output_unsigned": False,
    }  # fmt: skip
    writer.output(writer.operator(Op.RESCALE, [x, *scale, *zeros], (shape, target), attributes))
    return writer.to_bytes()


@pytest.mark.parametrize("target", [DType.INT8, DType.INT16, DType.INT32])
def test_rescale_of_int48(target: DType) -> None:
    drawn = np.random.default_rng(1).integers(-MOST, MOST, 300) >> np.random.default_rng(2).integers(0, 40, 300)
    data = np.concatenate([EDGES, drawn]).astype(np.int64)
    for multiplier, shift in ((32767, 40), (16384, 33), (1, 17), (29_000, 62)):
        wanted = (data * multiplier + (1 << (shift - 1))) >> shift
        fits = data[np.abs(wanted) < 1 << 31]
        tosa = rescaled(fits.shape, target, [multiplier], [shift])
        np.testing.assert_array_equal(lowered.run(tosa, [fits])[0], oracle.reference(tosa, [fits])[0])


def test_rescale_of_int48_with_a_scale_for_each_channel() -> None:
    data = np.random.default_rng(1).integers(-(1 << 30), 1 << 30, (2, 5, 3))
    tosa = rescaled(data.shape, DType.INT16, [30_000, 17_000, 1], [31, 30, 2])
    np.testing.assert_array_equal(lowered.run(tosa, [data])[0], oracle.reference(tosa, [data])[0])


@pytest.mark.parametrize("extreme", [False, True])
def test_resize_of_int16_to_int48(extreme: bool) -> None:
    rng = np.random.default_rng(3)
    shape = (1, 4, 3, 2)
    data = rng.choice([-32768, 32767], shape) if extreme else rng.integers(-32768, 32768, shape)
    writer = GraphWriter()
    x = writer.input("x", shape, DType.INT16)
    dims = [writer.const_shape(values) for values in ([2048, 768, 1920, 640], [0, 0], [0, 0])]
    result = ((1, 9, 7, 2), DType.INT48)
    writer.output(writer.operator(Op.RESIZE, [x, *dims], result, {"mode": ResizeMode.BILINEAR}))
    tosa, inputs = writer.to_bytes(), [data.astype(np.int16)]
    np.testing.assert_array_equal(lowered.run(tosa, inputs)[0], oracle.reference(tosa, inputs)[0])


def test_convolution_of_int16_to_int16_by_way_of_int48() -> None:
    """What a quantised model does: CONV2D to INT48, RESCALE back."""
    rng = np.random.default_rng(4)
    writer = GraphWriter()
    x = writer.input("x", (1, 6, 5, 8), DType.INT16)
    w = writer.constant(rng.integers(-127, 128, (6, 3, 3, 8)).astype(np.int8))
    b = writer.constant(rng.integers(-(1 << 30), 1 << 30, 6), DType.INT48)
    zeros = writer.constant(np.zeros(1), DType.INT16), writer.constant(np.zeros(1, np.int8))
    window = {"pad": [1] * 4, "stride": [1, 1], "dilation": [1, 1], "acc_type": DType.INT48}
    wide = writer.operator(Op.CONV2D, [x, w, b, *zeros], ((1, 6, 5, 6), DType.INT48), window)
    scale = writer.constant(np.array([20_000]), DType.INT16), writer.constant(np.array([32]), DType.INT8)
    points = writer.constant(np.zeros(1), DType.INT48), writer.constant(np.zeros(1), DType.INT16)
    attributes = {
        "scale32": False, "rounding_mode": RoundingMode.SINGLE_ROUND, "per_channel": False,
        "input_unsigned": False, "output_unsigned": False,
    }  # fmt: skip
    writer.output(writer.operator(Op.RESCALE, [wide, *scale, *points], ((1, 6, 5, 6), DType.INT16), attributes))
    tosa, data = writer.to_bytes(), rng.integers(-32768, 32768, (1, 6, 5, 8)).astype(np.int16)
    np.testing.assert_array_equal(lowered.run(tosa, [data])[0], oracle.reference(tosa, [data])[0])
