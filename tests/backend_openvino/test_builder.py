"""Inputs, outputs, constants and layouts of lowered graphs: what no single operator is responsible for."""

from __future__ import annotations

import lowered
import numpy as np
import pytest
from graphs import Const, single

from virtaccel.backend_openvino.lowering import layout as axes
from virtaccel.backend_openvino.lowering.builder import lower
from virtaccel.backend_openvino.lowering.numbers import as_f32
from virtaccel.backend_openvino.lowering.ranges import bounded
from virtaccel.backend_openvino.lowering.registry import Refused
from virtaccel.tosa_graph.elements import pack
from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import DType, Op, TosaError
from virtaccel.tosa_graph.write import GraphWriter

MODELS = ["face_detection_short_range", "hand_recrop", "face_landmark", "hand_landmark_lite", "palm_detection_lite"]

EVERY_TYPE = [
    DType.BOOL, DType.INT4, DType.INT8, DType.INT16, DType.INT32, DType.FP32, DType.FP16, DType.BF16,
    DType.FP8E4M3, DType.FP8E5M2,
]  # fmt: skip


def transposes(tosa: bytes) -> int:
    return sum(node.get_type_name() == "Transpose" for node in lower(read(tosa)).get_ops())


# ---- N2


@pytest.mark.parametrize("dtype", EVERY_TYPE, ids=lambda dtype: dtype.name)
def test_n2_inputs_and_constants_as_outputs_twice(dtype: DType) -> None:
    rng = np.random.default_rng(dtype)
    if dtype in (DType.FP32, DType.FP16, DType.BF16, DType.FP8E4M3, DType.FP8E5M2):
        data = rng.integers(-8, 8, (3, 5)).astype(np.float16 if dtype is DType.FP16 else np.float32)
    else:
        top = {DType.BOOL: 2, DType.INT4: 8}.get(dtype, 100)
        kind = {DType.BOOL: np.bool_, DType.INT16: np.int16, DType.INT32: np.int32}.get(dtype, np.int8)
        data = rng.integers(0, top, (3, 5)).astype(kind)
    writer = GraphWriter()
    x = writer.input("x", (3, 5), dtype)
    constant = writer.constant(data, dtype)
    same = writer.operator(Op.IDENTITY, [x], ((3, 5), dtype))
    writer.output(same, constant, same, constant, x)
    for got in lowered.run(writer.to_bytes(), [data]):
        np.testing.assert_array_equal(got, data)


# ---- layouts


def test_layout_arithmetic() -> None:
    shape = (2, 5, 7, 3)
    array = np.arange(210).reshape(shape)
    stored = array.transpose(axes.NCHW)
    assert axes.stored(shape, axes.NCHW) == stored.shape
    back = stored.transpose(axes.permutation(axes.NCHW, axes.identity(4)))
    np.testing.assert_array_equal(back, array)
    perms = (3, 1, 0, 2)
    wanted = array.transpose(perms)
    layout = axes.transposed(axes.NCHW, perms)
    np.testing.assert_array_equal(stored.transpose(axes.permutation(layout, axes.identity(4))), wanted)
    assert axes.same_memory((1, 1, 1, 9), axes.identity(4), axes.NCHW)
    assert axes.same_memory((1, 4, 5, 1), axes.identity(4), axes.NCHW)
    assert not axes.same_memory((1, 2, 1, 9), axes.identity(4), axes.NCHW)
    assert axes.stored_axis(axes.NCHW, 3) == 1


def network(shape: tuple[int, ...]) -> tuple[GraphWriter, str]:
    writer = GraphWriter()
    x = writer.input("x", shape, DType.FP32)
    rng = np.random.default_rng(9)
    zero = writer.constant(np.zeros(1, np.float32))
    w = writer.constant(rng.normal(size=(4, 3, 3, shape[-1])).astype(np.float32))
    b = writer.constant(rng.normal(size=4).astype(np.float32))
    window = {"pad": [1, 1, 1, 1], "stride": [1, 1], "dilation": [1, 1], "acc_type": DType.FP32}
    return writer, writer.operator(Op.CONV2D, [x, w, b, zero, zero], ((*shape[:3], 4), DType.FP32), window)


def test_elementwise_follows_a_convolution_without_transposes() -> None:
    writer, y = network((1, 6, 5, 3))
    spec = ((1, 6, 5, 4), DType.FP32)
    scale = writer.constant(np.arange(4, dtype=np.float32).reshape(1, 1, 1, 4))
    y = writer.operator(Op.ADD, [scale, y], spec)
    y = writer.operator(Op.MAXIMUM, [y, writer.constant(np.zeros((1, 1, 1, 1), np.float32))], spec)
    rows = writer.operator(Op.REDUCE_SUM, [y], ((1, 1, 5, 4), DType.FP32), {"axis": 1})
    writer.output(writer.operator(Op.SUB, [y, rows], spec))
    tosa = writer.to_bytes()
    assert transposes(tosa) == 2
    lowered.assert_near_reference(tosa, [np.random.default_rng(1).normal(size=(1, 6, 5, 3)).astype(np.float32)], 1e-4)


def test_one_transpose_serves_every_reader() -> None:
    writer, y = network((1, 6, 5, 3))
    outs = [
        writer.operator(Op.RESHAPE, [y, writer.const_shape(shape)], (shape, DType.FP32))
        for shape in ((30, 4), (120,), (2, 60))
    ]
    writer.output(*outs, y)
    tosa = writer.to_bytes()
    assert transposes(tosa) == 2
    lowered.assert_near_reference(tosa, [np.random.default_rng(2).normal(size=(1, 6, 5, 3)).astype(np.float32)], 1e-4)


def test_transposes_of_a_graph_cancel() -> None:
    writer, y = network((1, 6, 5, 3))
    first = writer.operator(Op.TRANSPOSE, [y], ((1, 4, 6, 5), DType.FP32), {"perms": [0, 3, 1, 2]})
    writer.output(writer.operator(Op.ADD, [first, first], ((1, 4, 6, 5), DType.FP32)))
    tosa = writer.to_bytes()
    assert transposes(tosa) == 1
    lowered.assert_near_reference(tosa, [np.random.default_rng(3).normal(size=(1, 6, 5, 3)).astype(np.float32)], 1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_models_keep_transposes_at_their_ends(name: str, shared: object) -> None:
    tosa = (shared / "models" / f"{name}.tosa").read_bytes()  # type: ignore[operator]
    graph = read(tosa)
    assert transposes(tosa) <= len(graph.inputs) + 2 * len(graph.outputs)


# ---- refusals


def test_refusals_name_the_operator() -> None:
    writer = GraphWriter()
    x = writer.input("x", (4,), DType.FP32)
    writer.output(writer.operator(Op.CUSTOM, [x], ((4,), DType.FP32)))
    with pytest.raises(Refused, match="CUSTOM"):
        lower(read(writer.to_bytes()))


def test_a_tensor_that_nothing_writes() -> None:
    writer = GraphWriter()
    writer.input("x", (4,), DType.FP32)
    ghost = writer.tensor("ghost", (4,), DType.FP32)
    writer.output(writer.operator(Op.ABS, [ghost], ((4,), DType.FP32)))
    with pytest.raises(TosaError, match="ghost"):
        lower(read(writer.to_bytes()))


# ---- ranges


@pytest.mark.parametrize("name", MODELS)
def test_models_are_finite_within_a_wide_limit(name: str, shared: object) -> None:
    """Every operator that would need care for NaN is known to meet none, for any input of 2^10 at least."""
    graph = read((shared / "models" / f"{name}.tosa").read_bytes())  # type: ignore[operator]
    found = bounded(graph)
    assert found is not None
    assert found.limit >= 1024
    careful = [o for o in graph.main.operators if o.op in (Op.CLAMP, Op.MAX_POOL2D)]
    assert all(operator.inputs[0] in found.tensors for operator in careful)


def test_bounds_hold_at_the_limit() -> None:
    """Inputs at the limit, of the worst signs: everything called finite is."""
    writer, y = network((1, 6, 5, 3))
    spec = ((1, 6, 5, 4), DType.FP32)
    squared = writer.operator(Op.MUL, [y, y, writer.constant(np.zeros(1, np.int8))], spec)
    again = writer.operator(Op.MUL, [squared, squared, writer.constant(np.zeros(1, np.int8))], spec)
    clamp = {"min_val": np.float32(-1e30).tobytes(), "max_val": np.float32(1e30).tobytes()}
    outs = [writer.operator(Op.CLAMP, [value], spec, clamp) for value in (y, squared, again)]
    writer.output(y, squared, again, *outs)
    graph = read(writer.to_bytes())
    found = bounded(graph)
    assert found is not None
    weights = np.frombuffer(graph.main.tensors[graph.main.operators[1].outputs[0]].data or b"", np.float32)
    signs = np.sign(weights.reshape(4, 3, 3, 3))
    for channel in range(4):
        worst = np.tile(signs[channel], (1, 2, 2, 1))[:, :6, :5] * np.float32(found.limit)
        for name, got in zip(graph.main.outputs, lowered.run(writer.to_bytes(), [worst]), strict=True):
            assert name not in found.tensors or np.isfinite(got).all()


def clamped(writer: GraphWriter, value: str, shape: tuple[int, ...]) -> str:
    clamp = {"min_val": np.float32(-1).tobytes(), "max_val": np.float32(1).tobytes()}
    return writer.operator(Op.CLAMP, [value], (shape, DType.FP32), clamp)


def test_the_limit_is_the_one_that_helps_most_operators() -> None:
    """x to the fourth is finite for x up to 2^20 and x to the eighth for 2^14, but not above."""
    writer = GraphWriter()
    x = writer.input("x", (4,), DType.FP32)
    zero = writer.constant(np.zeros(1, np.int8))
    powers = [x]
    for _ in range(3):
        powers.append(writer.operator(Op.MUL, [powers[-1], powers[-1], zero], ((4,), DType.FP32)))
    writer.output(*(clamped(writer, power, (4,)) for power in powers[:3]))
    found = bounded(read(writer.to_bytes()))
    assert found is not None
    assert found.limit == 2.0**20
    assert set(powers[:3]) <= found.tensors
    assert powers[3] not in found.tensors
    writer.output(clamped(writer, powers[3], (4,)))
    found = bounded(read(writer.to_bytes()))
    assert found is not None
    assert found.limit == 1024.0
    assert set(powers) <= found.tensors


@pytest.mark.parametrize(("weight", "finite"), [(1e20, True), (3e34, False), (np.inf, False), (np.nan, False)])
def test_every_weight_counts(weight: float, finite: bool) -> None:
    """One odd weight among more than are looked at together: no sum of its channel is bounded."""
    rng = np.random.default_rng(7)
    weights = rng.standard_normal((70, 1, 1, 300), np.float32)
    weights[69, 0, 0, 299] = weight
    writer = GraphWriter()
    x = writer.input("x", (1, 1, 1, 300), DType.FP32)
    zeros = [writer.constant(np.zeros(1, np.float32)) for _ in range(2)]
    bias = writer.constant(np.zeros(70, np.float32))
    attributes = {
        "pad": (0, 0, 0, 0), "stride": (1, 1), "dilation": (1, 1), "local_bound": False, "acc_type": DType.FP32,
    }  # fmt: skip
    spec = ((1, 1, 1, 70), DType.FP32)
    y = writer.operator(Op.CONV2D, [x, writer.constant(weights), bias, *zeros], spec, attributes)
    writer.output(clamped(writer, x, (1, 1, 1, 300)), clamped(writer, y, (1, 1, 1, 70)))
    found = bounded(read(writer.to_bytes()))
    assert found is not None
    assert found.limit == 2.0**40
    assert (y in found.tensors) == finite


def test_halves_are_widened_as_numpy_widens_them() -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    for halves in (every, every[np.isfinite(every)], every.reshape(256, 256).T, every[:100]):
        wide = halves.astype(np.float32)
        assert np.array_equal(as_f32(halves).view(np.uint32), wide.view(np.uint32))


def test_no_bounds_where_they_help_nothing() -> None:
    writer = GraphWriter()
    x = writer.input("x", (4,), DType.FP32)
    writer.output(writer.operator(Op.ADD, [x, x], ((4,), DType.FP32)))
    assert bounded(read(writer.to_bytes())) is None


def test_unknown_functions_give_no_bound() -> None:
    writer = GraphWriter()
    x = writer.input("x", (4,), DType.FP32)
    y = writer.operator(Op.RECIPROCAL, [x], ((4,), DType.FP32))
    clamp = {"min_val": pack(np.float32([-1]), DType.FP32), "max_val": pack(np.float32([1]), DType.FP32)}
    writer.output(writer.operator(Op.CLAMP, [y], ((4,), DType.FP32), clamp))
    assert bounded(read(writer.to_bytes())) is None


def test_constants_with_subnormal_numbers_keep_the_signs_of_their_zeros() -> None:
    held = np.array([0x80000000, 0, 1, 0x80000001, 0x3F800000], np.uint32).view(np.float32)
    tosa = single(Op.RECIPROCAL, [Const(held)], ((5,), DType.FP32))
    assert lowered.run(tosa, [])[0][[0, 1, 4]].tolist() == [-np.inf, np.inf, 1]
    plain = GraphWriter()
    plain.output(plain.constant(held))
    assert lowered.run_bytes(plain.to_bytes(), []) == [held.tobytes()]
