"""Rules of the standard, one broken graph each: refused, operator and rule named; the good form admitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from graphs import Const, Dims, single

from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import DType, Op, TosaError
from virtaccel.tosa_graph.schema import ATTRIBUTES, NanMode, ResizeMode, RoundingMode
from virtaccel.tosa_graph.validate import validate

F32, F16, I8, I16, I32, I48, BOOL = (
    DType.FP32,
    DType.FP16,
    DType.INT8,
    DType.INT16,
    DType.INT32,
    DType.INT48,
    DType.BOOL,
)


class Good(NamedTuple):
    """A valid operator, to be varied."""

    operands: Sequence[Any]
    outputs: Any
    attributes: Mapping[str, Any]


def zero(dtype: DType, value: int = 0) -> Const:
    return Const(np.array([value]), dtype)


def weights(*shape: int, dtype: DType = I8) -> Const:
    return Const(np.ones(shape, np.int8), dtype)


def convolution(shape: tuple[int, ...], weight: tuple[int, ...], out: tuple[int, ...], axes: int = 2) -> Good:
    attributes = {"pad": (0,) * 2 * axes, "stride": (1,) * axes, "dilation": (1,) * axes, "acc_type": I32}
    channels = out[-1]
    operands = [(shape, I8), weights(*weight), Const(np.zeros(channels, np.int32)), zero(I8, 3), zero(I8, -2)]
    return Good(operands, (out, I32), attributes)


POOL = {"kernel": (2, 2), "stride": (2, 2), "pad": (0, 0, 0, 0)}
RESCALE = {"scale32": True, "rounding_mode": RoundingMode.SINGLE_ROUND}
BOUNDS8 = {"min_val": np.int8(-1), "max_val": np.int8(1)}

GOOD: dict[Op, Good] = {
    Op.ARGMAX: Good([((2, 3), F32)], ((2,), I32), {"axis": 1}),
    Op.AVG_POOL2D: Good([((1, 4, 4, 3), I8), zero(I8, 1), zero(I8, 2)], ((1, 2, 2, 3), I8), {**POOL, "acc_type": I32}),
    Op.CONV2D: convolution((1, 5, 5, 3), (2, 3, 3, 3), (1, 3, 3, 2)),
    Op.CONV3D: convolution((1, 5, 5, 5, 3), (2, 3, 3, 3, 3), (1, 3, 3, 3, 2), 3),
    Op.DEPTHWISE_CONV2D: convolution((1, 5, 5, 3), (3, 3, 3, 2), (1, 3, 3, 6)),
    Op.FFT2D: Good([((1, 4, 8), F32), ((1, 4, 8), F32)], [((1, 4, 8), F32), ((1, 4, 8), F32)], {}),
    Op.MATMUL: Good([((1, 2, 3), I8), ((1, 3, 4), I8), zero(I8, 1), zero(I8, 2)], ((1, 2, 4), I32), {}),
    Op.MAX_POOL2D: Good([((1, 4, 4, 3), F32)], ((1, 2, 2, 3), F32), POOL),
    Op.RFFT2D: Good([((1, 4, 8), F32)], [((1, 4, 5), F32), ((1, 4, 5), F32)], {}),
    Op.TRANSPOSE_CONV2D: Good(
        [((1, 3, 3, 2), I8), weights(4, 2, 2, 2), Const(np.zeros(4, np.int32)), zero(I8, 1), zero(I8, 2)],
        ((1, 6, 6, 4), I32),
        {"out_pad": (0, 0, 0, 0), "stride": (2, 2), "acc_type": I32},
    ),
    Op.CLAMP: Good([((2,), I8)], ((2,), I8), BOUNDS8),
    Op.MUL: Good([((2, 1), I32), ((1, 3), I32), zero(I8, 5)], ((2, 3), I32), {}),
    Op.TABLE: Good([((2,), I8), Const(np.zeros(256, np.int8))], ((2,), I8), {}),
    Op.NEGATE: Good([((2,), I8), zero(I8, 1), zero(I8, 2)], ((2,), I8), {}),
    Op.SELECT: Good([((1, 3), BOOL), ((2, 3), F32), ((2, 1), F32)], ((2, 3), F32), {}),
    Op.CONCAT: Good([((2, 3), F32), ((2, 1), F32)], ((2, 4), F32), {"axis": 1}),
    Op.PAD: Good([((2, 3), F32), Dims((0, 1, 2, 0)), Const(np.zeros(1, np.float32))], ((3, 5), F32), {}),
    Op.RESHAPE: Good([((2, 3), F32), Dims((3, 2))], ((3, 2), F32), {}),
    Op.REVERSE: Good([((2, 3), F32)], ((2, 3), F32), {"axis": 1}),
    Op.SLICE: Good([((4, 5), F32), Dims((1, 2)), Dims((3, 2))], ((3, 2), F32), {}),
    Op.TILE: Good([((2, 3), F32), Dims((2, 1))], ((4, 3), F32), {}),
    Op.TRANSPOSE: Good([((2, 3, 4), F32)], ((4, 2, 3), F32), {"perms": (2, 0, 1)}),
    Op.GATHER: Good([((2, 3, 4), F32), ((2, 5), I32)], ((2, 5, 4), F32), {}),
    Op.SCATTER: Good([((2, 5, 4), F32), ((2, 3), I32), ((2, 3, 4), F32)], ((2, 5, 4), F32), {}),
    Op.RESIZE: Good(
        [((1, 3, 3, 2), I8), Dims((4, 2, 4, 2)), Dims((0, 0)), Dims((0, 0))],
        ((1, 5, 5, 2), I32),
        {"mode": ResizeMode.BILINEAR},
    ),
    Op.CAST: Good([((2,), F32)], ((2,), I8), {}),
    Op.RESCALE: Good(
        [((2, 3), I32), zero(I32, 1 << 30), zero(I8, 31), zero(I32), zero(I8, 5)], ((2, 3), I8), RESCALE
    ),
    Op.IDENTITY: Good([((2,), DType.INT4)], ((2,), DType.INT4), {}),
    Op.CUSTOM: Good([((2,), F32)], ((3,), F32), {"operator_name": "x", "domain_name": "y"}),
}
for op in (
    Op.ERF, Op.SIGMOID, Op.TANH, Op.ABS, Op.CEIL, Op.COS, Op.EXP, Op.FLOOR, Op.LOG, Op.RECIPROCAL, Op.RSQRT, Op.SIN,
):  # fmt: skip
    GOOD[op] = Good([((2, 3), F16)], ((2, 3), F16), {})
for op in (Op.BITWISE_NOT, Op.CLZ):
    GOOD[op] = Good([((2, 3), I32)], ((2, 3), I32), {})
GOOD[Op.LOGICAL_NOT] = Good([((), BOOL)], ((), BOOL), {})
for op in (
    Op.ADD, Op.ARITHMETIC_RIGHT_SHIFT, Op.BITWISE_AND, Op.BITWISE_OR, Op.BITWISE_XOR, Op.INTDIV, Op.LOGICAL_LEFT_SHIFT,
    Op.LOGICAL_RIGHT_SHIFT, Op.MAXIMUM, Op.MINIMUM, Op.SUB,
):  # fmt: skip
    GOOD[op] = Good([((2, 1), I32), ((2, 3), I32)], ((2, 3), I32), {})
GOOD[Op.POW] = Good([((2, 1), F32), ((2, 3), F32)], ((2, 3), F32), {})
for op in (Op.LOGICAL_AND, Op.LOGICAL_OR, Op.LOGICAL_XOR):
    GOOD[op] = Good([((2, 1), BOOL), ((2, 3), BOOL)], ((2, 3), BOOL), {})
for op in (Op.EQUAL, Op.GREATER, Op.GREATER_EQUAL):
    GOOD[op] = Good([((2, 1), I32), ((2, 3), I32)], ((2, 3), BOOL), {})
for op in (Op.REDUCE_ALL, Op.REDUCE_ANY):
    GOOD[op] = Good([((2, 3), BOOL)], ((2, 1), BOOL), {"axis": 1})
for op in (Op.REDUCE_MAX, Op.REDUCE_MIN, Op.REDUCE_PRODUCT, Op.REDUCE_SUM):
    GOOD[op] = Good([((2, 3), F32)], ((2, 1), F32), {"axis": 1})


def author(op: Op, good: Good) -> bytes:
    return single(op, good.operands, good.outputs, good.attributes)


@pytest.mark.parametrize("op", GOOD, ids=lambda op: op.name)
def test_every_operator_written_reads_back_and_is_valid(op: Op) -> None:
    good = GOOD[op]
    graph = read(author(op, good))
    validate(graph)
    operator = graph.main.operators[-1]
    assert operator.op == op
    assert len(operator.inputs) == len(good.operands)
    expected = good.outputs if isinstance(good.outputs, list) else [good.outputs]
    assert [(tensor.shape, tensor.dtype) for tensor in graph.outputs] == [(tuple(s), d) for s, d in expected]
    for field in ATTRIBUTES[op]:
        value = good.attributes.get(field.name, NanMode.PROPAGATE if field.name == "nan_mode" else None)
        if value is not None:
            value = value.tobytes() if isinstance(value, np.generic) else value
            assert operator.attributes[field.name] == value


def test_every_operator_of_the_standard_is_covered_here_or_with_its_regions() -> None:
    elsewhere = {
        Op.COND_IF, Op.WHILE_LOOP, Op.VARIABLE, Op.VARIABLE_READ, Op.VARIABLE_WRITE, Op.CONST, Op.CONST_SHAPE,
    }  # fmt: skip
    assert set(GOOD) | elsewhere == set(Op)


@pytest.mark.parametrize("op", GOOD, ids=lambda op: op.name)
def test_too_many_and_too_few_operands(op: Op) -> None:
    good = GOOD[op]
    if op not in (Op.CONCAT, Op.CUSTOM):
        more = good._replace(operands=[*good.operands, ((2,), F32)])
        expect_error(op, more, "operands")
        expect_error(op, good._replace(operands=good.operands[:-1]), "operands")
        outputs = good.outputs if isinstance(good.outputs, list) else [good.outputs]
        expect_error(op, good._replace(outputs=[*outputs, outputs[0]]), "results")
        expect_error(op, good._replace(outputs=[]), "results")


@pytest.mark.parametrize("op", GOOD, ids=lambda op: op.name)
def test_declared_shape_and_type_are_compared(op: Op) -> None:
    if op == Op.CUSTOM:
        return
    good = GOOD[op]
    outputs = good.outputs if isinstance(good.outputs, list) else [good.outputs]
    shape, dtype = outputs[0]
    expect_error(op, good._replace(outputs=[((*shape, 1), dtype), *outputs[1:]]), "rank")
    if shape:
        expect_error(op, good._replace(outputs=[((shape[0] + 1, *shape[1:]), dtype), *outputs[1:]]), "shape|broadcast")
    wrong = DType.BF16 if dtype != DType.BF16 else F32
    wrong = DType.INT48 if op == Op.CAST else wrong
    expect_error(op, good._replace(outputs=[(shape, wrong), *outputs[1:]]), "types|must be")


def expect_error(op: Op, good: Good, reason: str) -> None:
    with pytest.raises(TosaError, match=reason) as caught:
        validate(read(author(op, good)))
    assert op.name in str(caught.value)


def operands(op: Op, changes: Mapping[int, Any]) -> Good:
    good = GOOD[op]
    return good._replace(operands=[changes.get(position, given) for position, given in enumerate(good.operands)])


def attributes(op: Op, **changes: Any) -> Good:
    good = GOOD[op]
    return good._replace(attributes={**good.attributes, **changes})


def same_operands(op: Op, shape: tuple[int, ...]) -> Good:
    return GOOD[op]._replace(operands=[(shape, F32)] * len(GOOD[op].operands))


CONVOLUTIONS = (Op.CONV2D, Op.CONV3D, Op.DEPTHWISE_CONV2D)
POOLS = (Op.AVG_POOL2D, Op.MAX_POOL2D)
AXES = (
    Op.ARGMAX, Op.REDUCE_ALL, Op.REDUCE_ANY, Op.REDUCE_MAX, Op.REDUCE_MIN, Op.REDUCE_PRODUCT, Op.REDUCE_SUM, Op.CONCAT,
    Op.REVERSE,
)  # fmt: skip


def _axes(op: Op) -> int:
    return 3 if op == Op.CONV3D else 2


BROKEN: list[tuple[Op, Good, str]] = [
    *((op, attributes(op, axis=axis), "axis") for op in AXES for axis in (-1, 2, 2**31 - 1)),
    *((op, attributes(op, pad=(-1,) + (0,) * (2 * _axes(op) - 1)), "negative") for op in CONVOLUTIONS + POOLS),
    *((op, attributes(op, pad=(0,)), "pad has 1 elements") for op in CONVOLUTIONS + POOLS),
    *((op, attributes(op, pad=(8193,) * 2 * _axes(op)), "MAX_KERNEL") for op in CONVOLUTIONS),
    *((op, attributes(op, stride=(0,) * _axes(op)), "stride must") for op in CONVOLUTIONS + POOLS),
    *((op, attributes(op, stride=(8193,) * _axes(op)), "MAX_STRIDE") for op in CONVOLUTIONS + POOLS),
    *((op, attributes(op, stride=(3,) * _axes(op)), "stride does not divide") for op in CONVOLUTIONS),
    *((op, attributes(op, dilation=(0,) * _axes(op)), "dilation must") for op in CONVOLUTIONS),
    *((op, attributes(op, dilation=(2731,) * _axes(op)), "MAX_KERNEL") for op in CONVOLUTIONS),
    *((op, attributes(op, dilation=(9,) * _axes(op)), "larger than the padded") for op in CONVOLUTIONS),
    *((op, attributes(op, acc_type=F32), "types") for op in (*CONVOLUTIONS, Op.AVG_POOL2D, Op.TRANSPOSE_CONV2D)),
    *((op, attributes(op, acc_type=99), "types") for op in (*CONVOLUTIONS, Op.AVG_POOL2D, Op.TRANSPOSE_CONV2D)),
    *((op, operands(op, {2: Const(np.zeros(5, np.int32))}), "bias") for op in (*CONVOLUTIONS, Op.TRANSPOSE_CONV2D)),
    (Op.CONV2D, operands(Op.CONV2D, {0: ((1, 5, 5, 4), I8)}), "channels"),
    (Op.CONV2D, operands(Op.CONV2D, {3: Const(np.zeros(2, np.int8))}), "input_zp"),
    (Op.DEPTHWISE_CONV2D, operands(Op.DEPTHWISE_CONV2D, {0: ((1, 5, 5, 4), I8)}), "channels"),
    (Op.TRANSPOSE_CONV2D, attributes(Op.TRANSPOSE_CONV2D, out_pad=(-2, 0, 0, 0)), "out_pad must"),
    (Op.TRANSPOSE_CONV2D, attributes(Op.TRANSPOSE_CONV2D, out_pad=(8193, 0, 0, 0)), "MAX_KERNEL"),
    (Op.TRANSPOSE_CONV2D, attributes(Op.TRANSPOSE_CONV2D, stride=(0, 1)), "stride"),
    *((op, attributes(op, kernel=(0, 2)), "kernel must") for op in POOLS),
    *((op, attributes(op, kernel=(8193, 2)), "MAX_KERNEL") for op in POOLS),
    *((op, attributes(op, pad=(2, 0, 0, 0)), "pad must be less") for op in POOLS),
    *((op, attributes(op, kernel=(3, 2)), "stride does not divide") for op in POOLS),
    (Op.MAX_POOL2D, attributes(Op.MAX_POOL2D, nan_mode=3), "nan_mode"),
    (Op.MATMUL, operands(Op.MATMUL, {1: ((2, 3, 4), I8)}), "batch"),
    (Op.MATMUL, operands(Op.MATMUL, {1: ((1, 4, 4), I8)}), "columns"),
    (Op.FFT2D, operands(Op.FFT2D, {1: ((1, 8, 8), F32)}), "differ in shape"),
    *((op, same_operands(op, (1, 4, 6)), "powers") for op in (Op.FFT2D, Op.RFFT2D)),
    *((op, same_operands(op, (1, 1, 16384)), "MAX_KERNEL") for op in (Op.FFT2D, Op.RFFT2D)),
    (Op.CLAMP, attributes(Op.CLAMP, min_val=np.int8(2)), "exceeds"),
    (Op.CLAMP, attributes(Op.CLAMP, min_val=b""), "bytes"),
    (Op.CLAMP, attributes(Op.CLAMP, max_val=b"\1\1"), "more than one"),
    (Op.CLAMP, Good([((2,), F32)], ((2,), F32), {"min_val": np.float32("nan"), "max_val": np.float32(1)}), "NaN"),
    (Op.CLAMP, Good([((2,), F16)], ((2,), F16), {"min_val": np.float16(0), "max_val": np.float16("nan")}), "NaN"),
    (Op.MUL, operands(Op.MUL, {2: zero(I8, 64)}), "shift"),
    (Op.MUL, Good([((2,), F32), ((2,), F32), zero(I8, 1)], ((2,), F32), {}), "shift"),
    (Op.MUL, operands(Op.MUL, {2: Const(np.zeros(1, np.int32))}), "INT8"),
    (Op.TABLE, operands(Op.TABLE, {1: Const(np.zeros(255, np.int8))}), "table has shape"),
    (Op.NEGATE, Good([((2,), I16), zero(I16, 1), zero(I16)], ((2,), I16), {}), "input1_zp must be zero"),
    (Op.NEGATE, Good([((2,), F32), zero(F32), zero(F32, 1)], ((2,), F32), {}), "output_zp must be zero"),
    *((op, operands(op, {0: ((2, 2), dtype)}), "broadcast") for op, dtype in ((Op.ADD, I32), (Op.POW, F32))),
    *((op, operands(op, {0: ((3,), dtype)}), "ranks differ") for op, dtype in ((Op.SUB, I32), (Op.EQUAL, I32))),
    (Op.ADD, Good([((2,), I32), ((2,), F32)], ((2,), I32), {}), "input2 must be INT32"),
    (Op.ADD, Good([((2,), I8), ((2,), I8)], ((2,), I8), {}), "types INT8 are not supported"),
    (Op.SELECT, operands(Op.SELECT, {0: ((1, 3), I8)}), "must be BOOL"),
    (Op.CONCAT, operands(Op.CONCAT, {1: ((2, 1, 1), F32)}), "rank"),
    (Op.CONCAT, operands(Op.CONCAT, {1: ((3, 1), F32)}), "dimension 0"),
    (Op.CONCAT, GOOD[Op.CONCAT]._replace(operands=[]), "at least one"),
    (Op.CONCAT, Good([((1,), F32)] * 65, ((65,), F32), {"axis": 0}), "MAX_TENSOR_LIST_SIZE"),
    (Op.PAD, operands(Op.PAD, {1: Dims((0, 1, 2))}), "padding has shape"),
    (Op.PAD, operands(Op.PAD, {1: Dims((0, -1, 2, 0))}), "negative"),
    (Op.PAD, operands(Op.PAD, {2: Const(np.zeros(2, np.float32))}), "pad_const"),
    (Op.RESHAPE, operands(Op.RESHAPE, {1: Dims((7,))}), "cannot take shape"),
    (Op.RESHAPE, operands(Op.RESHAPE, {1: Dims((-1, -1))}), "more than one"),
    (Op.RESHAPE, operands(Op.RESHAPE, {1: Dims((0, 6))}), "less than 1"),
    (Op.SLICE, operands(Op.SLICE, {1: Dims((1,))}), "start has shape"),
    (Op.SLICE, operands(Op.SLICE, {1: Dims((-1, 2))}), "start must"),
    (Op.SLICE, operands(Op.SLICE, {2: Dims((0, 2))}), "size must"),
    (Op.SLICE, operands(Op.SLICE, {2: Dims((4, 2))}), "outside"),
    (Op.TILE, operands(Op.TILE, {1: Dims((2,))}), "multiples has shape"),
    (Op.TILE, operands(Op.TILE, {1: Dims((0, 1))}), "at least 1"),
    *(
        (Op.TRANSPOSE, attributes(Op.TRANSPOSE, perms=perms), "perm")
        for perms in ((0, 1), (0, 0, 1), (0, 1, 3), (-1, 0, 1))
    ),
    (Op.GATHER, operands(Op.GATHER, {1: ((3, 5), I32)}), "batch"),
    (Op.GATHER, operands(Op.GATHER, {1: ((2, 5), I16)}), "types"),
    (Op.SCATTER, operands(Op.SCATTER, {2: ((2, 4, 4), F32)}), "number"),
    (Op.SCATTER, operands(Op.SCATTER, {2: ((2, 3, 5), F32)}), "channels"),
    (Op.RESIZE, attributes(Op.RESIZE, mode=0), "mode"),
    (Op.RESIZE, attributes(Op.RESIZE, mode=ResizeMode.NEAREST), "NEAREST gives INT8"),
    *((Op.RESIZE, operands(Op.RESIZE, {position: Dims(values)}), reason) for position, values, reason in (
        (1, (4, 2, 4), "scale has shape"),
        (1, (0, 2, 4, 2), "scale must be positive"),
        (1, (4, -2, 4, 2), "scale must be positive"),
        (1, (2049, 2, 4, 2), "2048"),
        (1, (4, 64, 4, 2), "1/16"),
        (1, (514, 2, 4, 2), "MAX_SCALE"),
        (2, (-5, 0), "offset"),
        (2, (0, 64), "offset"),
        (3, (-65, 0), "border"),
        (3, (0, 4), "border"),
        (3, (1, 0), "whole number"),
    )),
    (Op.RESIZE, operands(Op.RESIZE, {0: ((1, 16384, 3, 2), I8)}), "16384"),
    (Op.RESCALE, attributes(Op.RESCALE, rounding_mode=0), "rounding_mode"),
    (Op.RESCALE, attributes(Op.RESCALE, rounding_mode=9), "rounding_mode"),
    (Op.RESCALE, attributes(Op.RESCALE, scale32=False), "multiplier must be INT16"),
    (Op.RESCALE, attributes(Op.RESCALE, input_unsigned=True), "unsigned"),
    (Op.RESCALE, attributes(Op.RESCALE, output_unsigned=True), "unsigned"),
    (Op.RESCALE, attributes(Op.RESCALE, per_channel=True), "multiplier has shape"),
    (Op.RESCALE, operands(Op.RESCALE, {3: zero(I32, 1)}), "input_zp must be zero for INT32"),
    (Op.CAST, Good([((2,), F32)], ((2,), F32), {}), "types"),
    (Op.CAST, Good([((2,), F32)], ((2,), BOOL), {}), "types"),
    (Op.ABS, Good([((1,) * 7, F32)], ((1,) * 7, F32), {}), "MAX_RANK"),
    (Op.ABS, Good([((2, 0), F32)], ((2, 0), F32), {}), "empty dimension"),
    (Op.ABS, Good([((-3,), F32)], ((-3,), F32), {}), "empty dimension"),
    (Op.ABS, Good([((2,), F32)], ((-1,), F32), {}), ""),
    (Op.MAX_POOL2D, operands(Op.MAX_POOL2D, {0: ((4, 4, 3), F32)}), "rank"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "broken", "reason"), BROKEN)
def test_broken_rule(op: Op, broken: Good, reason: str) -> None:
    if not reason:
        validate(read(author(op, broken)))  # a dimension left open that follows from the input is no fault
        return
    with pytest.raises(TosaError, match=reason):
        validate(read(author(op, broken)))


def rescale(source: DType, result: DType, zero_in: int, zero_out: int, **flags: Any) -> bytes:
    scale32 = flags.pop("scale32", True)
    per_channel = flags.get("per_channel", False)
    count = 3 if per_channel else 1
    multiplier = Const(np.full(count, 1 << (30 if scale32 else 14)), I32 if scale32 else I16)
    shift = Const(np.full(count, 20), I8)
    return single(
        Op.RESCALE,
        [((2, 3), source), multiplier, shift, zero(source, zero_in), zero(result, zero_out)],
        ((2, 3), result),
        {"scale32": scale32, "rounding_mode": RoundingMode.SINGLE_ROUND, **flags},
    )


@pytest.mark.parametrize(
    ("source", "result", "zero_in", "zero_out", "flags"),
    [
        (I8, I8, -128, 127, {}),
        (I8, I8, 255, 0, {"input_unsigned": True}),
        (I16, I8, -32768, 0, {"input_unsigned": True}),
        (I8, I16, 0, 32768, {"output_unsigned": True}),
        (I48, I32, 0, 0, {"scale32": False}),
        (I32, I8, 0, 9, {"per_channel": True}),
    ],
)
def test_rescale_zero_points_admitted(source: DType, result: DType, zero_in: int, zero_out: int, flags: Any) -> None:
    validate(read(rescale(source, result, zero_in, zero_out, **flags)))


@pytest.mark.parametrize(
    ("source", "result", "zero_in", "zero_out", "flags", "reason"),
    [
        (I16, I8, 1, 0, {}, "input_zp"),
        (I16, I8, 1, 0, {"input_unsigned": True}, "0 or 32768"),
        (I8, I16, 0, 7, {"output_unsigned": True}, "0 or 32768"),
        (I8, I16, 0, 7, {}, "output_zp"),
        (I8, I32, 0, 1, {}, "output_zp"),
        (I48, I32, 0, 0, {}, "INT48"),
        (I8, I8, 0, 0, {"input_unsigned": True, "output_unsigned": True}, "both"),
        (I8, I32, 0, 0, {"input_unsigned": True}, "unsigned input"),
        (I48, I8, 0, 0, {"scale32": False, "output_unsigned": True}, "unsigned output"),
        (I16, I16, 0, 0, {"scale32": False, "rounding_mode": RoundingMode.DOUBLE_ROUND}, "DOUBLE_ROUND"),
    ],
)
def test_rescale_refused(
    source: DType, result: DType, zero_in: int, zero_out: int, flags: Any, reason: str
) -> None:
    with pytest.raises(TosaError, match=reason):
        validate(read(rescale(source, result, zero_in, zero_out, **flags)))


def test_rescale_per_channel_needs_a_channel() -> None:
    data = single(
        Op.RESCALE,
        [((), I32), zero(I32, 1 << 30), zero(I8, 31), zero(I32), zero(I8)],
        ((), I8),
        {**RESCALE, "per_channel": True},
    )
    with pytest.raises(TosaError, match="rank 0"):
        validate(read(data))
