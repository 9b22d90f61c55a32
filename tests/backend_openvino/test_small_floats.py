"""BF16 and FP8 against Arm's reference model: casts bit for bit over whole types, other operators on samples."""

from __future__ import annotations

import graphs
import lowered
import numpy as np
import oracle
import pytest
from graphs import Const, Dims

from virtaccel.tosa_graph.elements import CARRIER, unpack
from virtaccel.tosa_graph.graph import DType, Op, packed_bytes
from virtaccel.tosa_graph.write import GraphWriter

FP8 = (DType.FP8E4M3, DType.FP8E5M2)
SMALL = (DType.BF16, *FP8)
TINY = {DType.FP32: 2.0**-126, DType.BF16: 2.0**-126}
"""Numbers below may become 0 in these types."""


def every(dtype: DType) -> np.ndarray:
    """Every value of a type of 8 or 16 bits; for longer ones samples, with neighbours of FP8's and FP16's ties."""
    width = packed_bytes(dtype, 1)
    if width <= 2:
        codes = np.arange(1 << 8 * width, dtype="<u2" if width == 2 else np.uint8)
        return unpack(codes.tobytes(), dtype, codes.shape)
    rng = np.random.default_rng(1)
    if dtype is DType.INT32:
        powers = np.array([sign * (1 << bit) + near for bit in range(31) for sign in (1, -1) for near in (-1, 0, 1)])
        last = rng.choice([0, 1, 1 << 17, (1 << 17) - 1, (1 << 17) + 1], 500)
        ties = rng.integers(1 << 10, 1 << 13, 500) << 18 | last
        spread = rng.integers(-(2**31), 2**31, 500) >> rng.integers(0, 31, 500)
        return np.concatenate([powers, ties, -ties, spread, [2**31 - 1, -(2**31)]]).astype(np.int32)
    with np.errstate(all="ignore"):  # signalling NaNs
        shorts = [every(kind).astype(np.float32) for kind in (DType.FP8E4M3, DType.FP8E5M2, DType.FP16)]
        middles = [(np.sort(x[np.isfinite(x)])[:-1] + np.sort(x[np.isfinite(x)])[1:]) / 2 for x in shorts]
        spread = (rng.normal(size=2000) * 10.0 ** rng.integers(-30, 30, 2000)).astype(np.float32)
        exact = np.concatenate([*shorts, *middles, spread])
        neighbours = [np.nextafter(exact, np.float32(side)) for side in (np.inf, -np.inf)]
        return np.concatenate([exact, *neighbours])


CASTS = [
    *[(one, other) for one in (DType.FP16, DType.BF16, DType.FP32) for other in FP8],
    *[(one, other) for one in FP8 for other in (DType.FP16, DType.BF16, DType.FP32)],
    *[(one, DType.BF16) for one in (DType.INT8, DType.INT16, DType.INT32, DType.FP32)],
    *[(DType.BF16, other) for other in (DType.INT8, DType.INT16, DType.INT32, DType.FP32)],
    (DType.INT32, DType.FP16),
]


@pytest.mark.parametrize(("source", "target"), CASTS, ids=lambda dtype: dtype.name)
def test_cast(source: DType, target: DType) -> None:
    data = every(source)
    if target in (DType.INT8, DType.INT16, DType.INT32):
        data = data[~np.isnan(data)]
    tosa = graphs.single(Op.CAST, [(data.shape, source)], (data.shape, target))
    with np.errstate(invalid="ignore"):  # signalling NaNs
        [got], [want] = lowered.run(tosa, [data]), oracle.reference(tosa, [data])
    if source is DType.INT32 and target in (DType.FP16, DType.BF16):
        # The reference model rounds to FP32 first. The nearest value is no further from the number than its.
        exact = data.astype(np.float64)
        assert (np.abs(got - exact) <= np.abs(want - exact)).all()
        got, want, data = got[np.abs(data) < 1 << 24], want[np.abs(data) < 1 << 24], data[np.abs(data) < 1 << 24]
    if target in TINY:
        flushed = (np.abs(want) < TINY[target]) & (got == 0)
        want = np.where(flushed, got, want)
    wrong = ~((got == want) | ((got != got) & (want != want)))
    assert not wrong.any(), list(zip(data[wrong][:5], got[wrong][:5], want[wrong][:5], strict=True))


def test_casts_between_operators_are_not_dropped() -> None:
    """FP32 to a short type and back, before and after arithmetic that could be merged."""
    data = every(DType.FP32)[::17]
    data = data[np.isfinite(data) & (np.abs(data) > 1e-30) & (np.abs(data) < 1e30)]
    for target in SMALL:
        writer = GraphWriter()
        spec = (data.shape, DType.FP32)
        x = writer.input("x", *spec)
        three = writer.constant(np.full(1, 3, np.float32))
        tripled = writer.operator(Op.MUL, [x, three, writer.constant(np.zeros(1, np.int8))], spec)
        short = writer.operator(Op.CAST, [tripled], (data.shape, target))
        back = writer.operator(Op.CAST, [short], spec)
        writer.output(back, writer.operator(Op.SUB, [tripled, back], spec))
        tosa = writer.to_bytes()
        for got, want in zip(lowered.run(tosa, [data]), oracle.reference(tosa, [data]), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [DType.FP16, DType.FP8E5M2], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("shape", [(), (7,), (3, 7), (1, 2, 3, 4)])
def test_constants_are_rounded_like_inputs(dtype: DType, shape: tuple[int, ...]) -> None:
    """A product, or a mean, that is rounded to a short type and read by another operator."""
    data = (np.random.default_rng(7).normal(size=shape) * 50).astype(np.float16)
    results = []
    for constant in (True, False):
        writer = GraphWriter()
        x = writer.constant(data) if constant else writer.input("x", shape, DType.FP16)
        none = writer.constant(np.zeros(1, np.int8))
        product = writer.operator(Op.MUL, [x, x, none], (shape, DType.FP16))
        if dtype in FP8:
            product = writer.operator(Op.CAST, [product], (shape, dtype))
            product = writer.operator(Op.CAST, [product], (shape, DType.FP16))
        writer.output(writer.operator(Op.SUB, [product, x], (shape, DType.FP16)))
        tosa, inputs = writer.to_bytes(), [] if constant else [data]
        results.append(lowered.run(tosa, inputs)[0])
        np.testing.assert_array_equal(results[-1], oracle.reference(tosa, inputs)[0])


# ---- moving data: every value comes through, subnormals and NaN included


def moving(dtype: DType) -> list[bytes]:
    shape = (1, 16, 16) if dtype in FP8 else (4, 128, 128)
    batch, rows, columns = shape
    spec = (shape, dtype)
    filler = Const(np.array([0.5]), dtype)
    indices = Const(np.tile(np.arange(rows)[::-1], (batch, 1)).astype(np.int32))
    return [
        graphs.single(Op.TRANSPOSE, [spec], ((columns, batch, rows), dtype), {"perms": [2, 0, 1]}),
        graphs.single(Op.REVERSE, [spec], spec, {"axis": 2}),
        graphs.single(Op.RESHAPE, [spec, Dims((batch * columns, rows))], ((batch * columns, rows), dtype)),
        graphs.single(Op.CONCAT, [spec, spec], ((batch, rows, 2 * columns), dtype), {"axis": 2}),
        graphs.single(Op.TILE, [spec, Dims((1, 2, 1))], ((batch, 2 * rows, columns), dtype)),
        graphs.single(Op.PAD, [spec, Dims((0, 0, 1, 2, 0, 3)), filler], ((batch, rows + 3, columns + 3), dtype)),
        graphs.single(Op.SLICE, [spec, Dims((0, 1, 2)), Dims((batch, 5, 7))], ((batch, 5, 7), dtype)),
        graphs.single(Op.GATHER, [spec, indices], spec),
        graphs.single(Op.SCATTER, [spec, indices, spec], spec),
        graphs.single(Op.IDENTITY, [spec], spec),
    ]


@pytest.mark.parametrize("dtype", SMALL, ids=lambda dtype: dtype.name)
def test_moving_data(dtype: DType) -> None:
    shape = (1, 16, 16) if dtype in FP8 else (4, 128, 128)
    data = every(dtype).reshape(shape)
    for tosa in moving(dtype):
        inputs = [data, data[:, ::-1].copy()][: tosa.count(b"in0") and 2]
        graph_inputs = inputs[: len(lowered.read(tosa).inputs)]
        [got], [want] = lowered.run(tosa, graph_inputs), oracle.reference(tosa, graph_inputs)
        np.testing.assert_array_equal(got, want)


# ---- BF16 arithmetic

UNARY = (Op.ABS, Op.CEIL, Op.FLOOR, Op.NEGATE, Op.EXP, Op.LOG, Op.RECIPROCAL, Op.RSQRT, Op.SIGMOID, Op.TANH, Op.ERF,
         Op.SIN, Op.COS)  # fmt: skip
BINARY = (Op.ADD, Op.SUB, Op.MUL, Op.MAXIMUM, Op.MINIMUM, Op.POW)


def assert_near(got: np.ndarray, want: np.ndarray, units: float) -> None:
    """Within units of BF16's last place of the value."""
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(all="ignore"):
        close = np.abs(got.astype(np.float64) - want) <= units * np.maximum(np.abs(want) * 2.0**-7, 2.0**-126)
    assert (same | close).all(), (got[~(same | close)][:5], want[~(same | close)][:5])


def bf16(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)


@pytest.mark.parametrize("op", UNARY, ids=lambda op: op.name)
def test_bf16_unary(op: Op) -> None:
    data = bf16(1, (500,)) * 4
    data = np.abs(data) + 0.125 if op in (Op.LOG, Op.RSQRT) else data
    data = (data.view(np.uint32) & 0xFFFF0000).view(np.float32)
    data[:3] = np.nan, np.inf, 0.0
    zeros = [Const(np.zeros(1), DType.BF16)] * 2 if op is Op.NEGATE else []
    spec = (data.shape, DType.BF16)
    tosa = graphs.single(op, [spec, *zeros], spec)
    [got], [want] = lowered.run(tosa, [data]), oracle.reference(tosa, [data])
    assert_near(got, want, 0 if op in (Op.ABS, Op.CEIL, Op.FLOOR, Op.NEGATE) else 1.01)


@pytest.mark.parametrize("op", BINARY, ids=lambda op: op.name)
def test_bf16_binary(op: Op) -> None:
    spec = ((300,), DType.BF16)
    a, b = bf16(1, (300,)), bf16(2, (300,))
    if op is Op.POW:
        a = np.abs(a)
    else:
        a[:2], b[1:3] = np.nan, np.nan
    extra = [Const(np.zeros(1, np.int8))] if op is Op.MUL else []
    tosa = graphs.single(op, [spec, spec, *extra], spec)
    [got], [want] = lowered.run(tosa, [a, b]), oracle.reference(tosa, [a, b])
    assert_near(got, want, 1.01 if op is Op.POW else 0)


def test_bf16_is_rounded_between_operators() -> None:
    spec = ((300,), DType.BF16)
    writer = GraphWriter()
    x, y = writer.input("x", *spec), writer.input("y", *spec)
    none = writer.constant(np.zeros(1, np.int8))
    product = writer.operator(Op.MUL, [x, y, none], spec)
    total = writer.operator(Op.ADD, [product, y], spec)
    writer.output(writer.operator(Op.SUB, [writer.operator(Op.MUL, [total, x, none], spec), product], spec))
    tosa, data = writer.to_bytes(), [bf16(1, (300,)), bf16(2, (300,))]
    assert_near(lowered.run(tosa, data)[0], oracle.reference(tosa, data)[0], 0)


def test_bf16_clamp_select_compare_and_reductions() -> None:
    spec = ((4, 50), DType.BF16)
    data, other = bf16(3, (4, 50)), bf16(4, (4, 50))
    bound = {"min_val": b"\x00\xbf", "max_val": b"\x40\x3f"}  # -0.5, 0.75
    cases = [
        (graphs.single(Op.CLAMP, [spec], spec, bound), 0.0),
        (graphs.single(Op.GREATER, [spec, spec], ((4, 50), DType.BOOL)), 0.0),
        (graphs.single(Op.SELECT, [Const(data > 0), spec, spec], spec), 0.0),
        (graphs.single(Op.ARGMAX, [spec], ((4,), DType.INT32), {"axis": 1}), 0.0),
        (graphs.single(Op.REDUCE_MAX, [spec], ((4, 1), DType.BF16), {"axis": 1}), 0.0),
        (graphs.single(Op.REDUCE_SUM, [spec], ((4, 1), DType.BF16), {"axis": 1}), 8.0),
    ]
    for tosa, units in cases:
        inputs = [data, other][: len(lowered.read(tosa).inputs)]
        [got], [want] = lowered.run(tosa, inputs), oracle.reference(tosa, inputs)
        assert_near(got, want, units) if got.dtype == np.float32 else np.testing.assert_array_equal(got, want)


# ---- products and pools

TYPES = [(DType.BF16, DType.BF16), *((dtype, DType.FP16) for dtype in FP8)]
ACCUMULATORS = {DType.BF16: DType.FP32, DType.FP8E4M3: DType.FP16, DType.FP8E5M2: DType.FP16}


def sample(dtype: DType, seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Small multiples of 1/4, so that every sum below is exact in any accumulator."""
    return (np.random.default_rng(seed).integers(-4, 5, shape) / 4).astype(CARRIER[dtype])


@pytest.mark.parametrize(("dtype", "out"), TYPES, ids=lambda dtype: dtype.name)
def test_convolutions_and_matmul(dtype: DType, out: DType) -> None:
    window = {"pad": [1] * 4, "stride": [1, 1], "dilation": [1, 1], "acc_type": ACCUMULATORS[dtype]}
    zero = Const(np.zeros(1), dtype)
    bias = Const(np.array([0.5, -1, 2]), out)
    x, deep = ((1, 5, 4, 3), dtype), ((2, 3, 9), dtype)
    turned = {"out_pad": [0] * 4, "stride": [1, 1], "acc_type": ACCUMULATORS[dtype]}
    weights = Const(sample(dtype, 2, (3, 3, 3, 3)), dtype)
    matrix = Const(sample(dtype, 3, (2, 9, 4)), dtype)
    product = DType.FP32 if dtype is DType.BF16 else DType.FP16
    spatial = Const(sample(dtype, 4, (3, 3, 3, 1)), dtype)
    cases = [
        graphs.single(Op.CONV2D, [x, weights, bias, zero, zero], ((1, 5, 4, 3), out), window),
        graphs.single(Op.DEPTHWISE_CONV2D, [x, spatial, bias, zero, zero], ((1, 5, 4, 3), out), window),
        graphs.single(Op.TRANSPOSE_CONV2D, [x, weights, bias, zero, zero], ((1, 7, 6, 3), out), turned),
        graphs.single(Op.MATMUL, [deep, matrix, zero, zero], ((2, 3, 4), product)),
    ]
    for tosa in cases:
        data = [sample(dtype, 1, tensor.shape) for tensor in lowered.read(tosa).inputs]
        np.testing.assert_array_equal(lowered.run(tosa, data)[0], oracle.reference(tosa, data)[0])


@pytest.mark.parametrize("dtype", SMALL, ids=lambda dtype: dtype.name)
def test_pools(dtype: DType) -> None:
    zero = Const(np.zeros(1), dtype)
    spec, result = ((1, 6, 6, 2), dtype), ((1, 3, 3, 2), dtype)
    pool = {"kernel": [2, 2], "stride": [2, 2], "pad": [0] * 4}
    data = sample(dtype, 5, (1, 6, 6, 2))
    mean = graphs.single(Op.AVG_POOL2D, [spec, zero, zero], result, {**pool, "acc_type": ACCUMULATORS[dtype]})
    assert_near(lowered.run(mean, [data])[0], oracle.reference(mean, [data])[0], 16 if dtype in FP8 else 1)
    data[0, 1, 1, 0] = np.nan
    for mode in (1, 2):
        most = graphs.single(Op.MAX_POOL2D, [spec], result, {**pool, "nan_mode": mode})
        np.testing.assert_array_equal(lowered.run(most, [data])[0], oracle.reference(most, [data])[0])
