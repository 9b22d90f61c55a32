"""Convolution, pooling and MATMUL: TOSA 1.0, section 2.2 (tensor operators).

Convolutions and pools work on channels-first data and leave it so; weights are laid out while lowering. Types shorter
than FP32 are computed in it and rounded once, which is inside the bounds of both accumulators that TOSA allows. MATMUL
of INT8 is exact: sums are cut so that each part stays below 2^24, where FP32 holds every integer, and parts are added
as INT32.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import numpy as np
import openvino as ov

from virtaccel.backend_openvino.lowering import layout as axes
from virtaccel.backend_openvino.lowering import nodes as ops
from virtaccel.backend_openvino.lowering.elementwise import linear
from virtaccel.backend_openvino.lowering.half import narrowed
from virtaccel.backend_openvino.lowering.numbers import ELEMENT_TYPES
from virtaccel.backend_openvino.lowering.operands import FLOATS, FP8
from virtaccel.backend_openvino.lowering.registry import Array, Layout, Record, Site, Value, register
from virtaccel.tosa_graph.graph import DType, Op

_F32_EXACT = 1 << 24
_NARROWED = frozenset({*FLOATS, *FP8})
PROPAGATE = 1
"""NanPropagationMode of the schema; IGNORE is 2."""


# ---- attributes


class Window(NamedTuple):
    """Geometry of a sliding window over the spatial axes, outermost axis first; in elements."""

    stride: list[int]
    begin: list[int]
    end: list[int]
    dilation: list[int]


def _ints(site: Site, name: str) -> list[int]:
    value = site.attributes.get(name)
    return list(value) if isinstance(value, tuple) else []


def window_of(site: Site) -> Window:
    pad = _ints(site, "pad")
    stride = _ints(site, "stride")
    dilation = _ints(site, "dilation") or [1] * len(stride)
    if len(pad) != 2 * len(stride) or len(dilation) != len(stride):
        raise site.refuse("attributes of the window have wrong lengths")
    return Window(stride, pad[0::2], pad[1::2], dilation)


def _operand(site: Site, index: int) -> Value:
    value = site.inputs[index] if index < len(site.inputs) else None
    if value is None:
        raise site.refuse(f"operand {index} is missing")
    return value


Zero: TypeAlias = int | ov.Output
"""A zero point: its value, or the INT8 node of one element that holds it."""


def zero_point(site: Site, index: int) -> Zero:
    """A zero point operand. One that is not INT8 has to be 0, which is taken for granted if it is not known."""
    value = _operand(site, index)
    if math.prod(value.shape) != 1:
        raise site.refuse("zero point has more than one element")
    if value.constant is not None:
        return int(value.constant.item())
    return reshaped(value.output, []) if value.dtype is DType.INT8 else 0


def no_zero(zero: Zero) -> bool:
    """Whether nothing has to be subtracted."""
    return isinstance(zero, int) and zero == 0


def zero_bounds(zero: Zero) -> tuple[int, int]:
    return (zero, zero) if isinstance(zero, int) else (-128, 127)


def _no_zero_points(site: Site, *indices: int) -> None:
    for index in indices:
        if not no_zero(zero_point(site, index)):
            raise site.refuse("zero point of a floating-point operand is not 0")


# ---- operands in FP32


def _widened(node: ov.Output, dtype: DType) -> ov.Output:
    return node if dtype is DType.FP32 else ops.convert(node, ov.Type.f32).output(0)


def _constant(array: Array) -> ov.Output:
    return ops.constant(array.astype(np.float32, copy=False)).output(0)


def _scalar(value: float) -> ov.Output:
    return _constant(np.array(value))


def _weights(site: Site, value: Value, order: Layout, shape: list[int]) -> ov.Output:
    """Weights with TOSA's axes in `order`, then seen as `shape`, in FP32."""
    if value.constant is not None:
        return _constant(np.transpose(value.constant, order).reshape(shape))
    return reshaped(_widened(site.builder.to_layout(value, order), value.dtype), shape)


def _biased(site: Site, node: ov.Output, bias: Value, rank: int) -> ov.Output:
    """Adds a bias of [OC] or [1] to channels-first data; none is added if it is known to be zero."""
    shape = [1, bias.shape[0]] + [1] * (rank - 2)
    if bias.constant is None:
        wide = _widened(site.builder.tosa(bias), bias.dtype)
        return ops.add(node, reshaped(wide, shape)).output(0)
    if not bias.constant.any():
        return node
    return ops.add(node, _constant(bias.constant.reshape(shape))).output(0)


def _result(site: Site, node: ov.Output, layout: Layout, exact: bool = False) -> tuple[Value, ...]:
    dtype = site.out_dtypes[0]
    output = narrowed(site, node, exact) if dtype in _NARROWED else ops.convert(node, ELEMENT_TYPES[dtype]).output(0)
    return (site.builder.value(output, dtype, site.out_shapes[0], layout),)


# ---- PAD in front of a window


def without_pad(site: Site, window: Window, admitted: float | None) -> tuple[Value, Window]:
    """The operand and window with a PAD operator in front made part of the window's own padding, where that PAD only
    touches spatial axes and its constant is `admitted` (None: nothing is)."""
    value = _operand(site, 0)
    producer = site.builder.producers.get(site.operator.inputs[0])
    if producer is None or producer.op is not Op.PAD or admitted is None:
        return value, window
    pad = site.builder.site(producer)
    source, constant = pad.inputs[0], pad.inputs[1]
    amounts = next(iter(pad.shapes.values()), ())
    if source is None or constant is None or constant.constant is None or len(amounts) != 2 * len(value.shape):
        return value, window
    if float(constant.constant.reshape(-1)[0]) != admitted or any(amounts[:2]) or any(amounts[-2:]):
        return value, window
    begin = [own + more for own, more in zip(window.begin, amounts[2:-2:2], strict=True)]
    end = [own + more for own, more in zip(window.end, amounts[3:-2:2], strict=True)]
    return source, window._replace(begin=begin, end=end)


def _operand_and_window(site: Site, weight: Value) -> tuple[Value, Window]:
    """The operand of a convolution, whose padding by zeros is no more than that if the weights are finite."""
    window = window_of(site)
    producer = site.builder.producers.get(site.operator.inputs[0])
    if producer is None or producer.op is not Op.PAD:
        return _operand(site, 0), window
    constant = weight.constant
    finite = constant is not None and bool(np.isfinite(constant.astype(np.float32)).all())
    return without_pad(site, window, 0.0 if finite else None)


# ---- convolutions


def _convolution(site: Site) -> tuple[Value, ...]:
    """CONV2D and CONV3D: [N, (D,) H, W, IC] by [OC, (KD,) KH, KW, IC]."""
    _no_zero_points(site, 3, 4)
    weight, bias = _operand(site, 1), _operand(site, 2)
    value, window = _operand_and_window(site, weight)
    rank = len(value.shape)
    first = (0, rank - 1, *range(1, rank - 1))
    data = _widened(site.builder.to_layout(value, first), value.dtype)
    kernel = _weights(site, weight, first, [weight.shape[axis] for axis in first])
    return _result(site, _biased(site, convolved(data, kernel, window), bias, rank), first)


def convolved(data: ov.Output, kernel: ov.Output, window: Window) -> ov.Output:
    """Convolution of channels-first operands.

    The runtime moves the stride of a kernel of one point to the node before, which is wrong where there is padding. So
    there every place is computed and some are taken.
    """
    steps = window.stride
    skips = max(steps) > 1 and any(window.begin + window.end) and max(list(kernel.get_shape())[2:]) == 1
    strides = [1] * len(steps) if skips else steps
    node = ops.convolution(data, kernel, strides, window.begin, window.end, window.dilation).output(0)
    if not skips:
        return node
    spatial = list(node.get_shape())[2:]
    bounds = ([0] * len(steps), spatial, steps, range(2, 2 + len(steps)))
    return ops.slice(node, *(np.array(list(bound), np.int64) for bound in bounds)).output(0)


def _depthwise(site: Site) -> tuple[Value, ...]:
    """DEPTHWISE_CONV2D: [N, H, W, C] by [KH, KW, C, M]; output channel c * M + m."""
    _no_zero_points(site, 3, 4)
    weight, bias = _operand(site, 1), _operand(site, 2)
    value, window = _operand_and_window(site, weight)
    height, width, channels, multiplier = weight.shape
    if (height, width, multiplier) == (1, 1, 1) and max(window.stride) == 1 and not any(window.begin + window.end):
        return _scaled(site, value, weight, bias)
    data = _widened(site.builder.to_layout(value, axes.NCHW), value.dtype)
    kernel = _weights(site, weight, (2, 3, 0, 1), [channels, multiplier, 1, height, width])
    node = ops.group_convolution(data, kernel, window.stride, window.begin, window.end, window.dilation).output(0)
    return _result(site, _biased(site, node, bias, 4), axes.NCHW)


def _scaled(site: Site, value: Value, weight: Value, bias: Value) -> tuple[Value, ...]:
    """A depthwise convolution by a kernel of one point is a factor and a term for each channel, which the runtime makes
    part of the node before or after."""
    data = _widened(site.builder.to_layout(value, axes.NCHW), value.dtype)
    factor = _weights(site, weight, (0, 1, 2, 3), [1, value.shape[-1], 1, 1])
    node = linear(ops.multiply, data, factor)
    return _result(site, _biased(site, node, bias, 4), axes.NCHW)


def _transpose_convolution(site: Site) -> tuple[Value, ...]:
    """TRANSPOSE_CONV2D: [N, IH, IW, IC] by [OC, KH, KW, IC]. A negative out_pad crops, a positive one adds rows that
    only the bias reaches."""
    _no_zero_points(site, 3, 4)
    value, weight, bias = (_operand(site, index) for index in range(3))
    out_pad, stride = _ints(site, "out_pad"), _ints(site, "stride")
    if len(out_pad) != 4 or len(stride) != 2:
        raise site.refuse("out_pad or stride has a wrong length")
    crop, grow = [max(-amount, 0) for amount in out_pad], [max(amount, 0) for amount in out_pad]
    data = _widened(site.builder.to_layout(value, axes.NCHW), value.dtype)
    kernel = _weights(site, weight, (3, 0, 1, 2), [weight.shape[axis] for axis in (3, 0, 1, 2)])
    node = ops.convolution_backprop_data(
        data, kernel, stride, pads_begin=crop[0::2], pads_end=crop[1::2], dilations=[1, 1]
    ).output(0)
    if any(grow):
        node = padded(node, [0, 0, *grow[1::2]], [0, 0, *grow[0::2]])
    return _result(site, _biased(site, node, bias, 4), axes.NCHW)


# ---- pooling


def _average(site: Site) -> tuple[Value, ...]:
    """AVG_POOL2D, padding not counted; a PAD in front counts, and is made the pool's own where the pool has none."""
    _no_zero_points(site, 1, 2)
    window, kernel = window_of(site), _ints(site, "kernel")
    own = any(window.begin) or any(window.end)
    value, window = without_pad(site, window, None if own else 0.0)
    data = _widened(site.builder.to_layout(value, axes.NCHW), value.dtype)
    node = ops.avg_pool(data, window.stride, window.begin, window.end, kernel, exclude_pad=own, rounding_type="floor")
    return _result(site, node.output(0), axes.NCHW)


def _max_nodes(data: ov.Output, window: Window, kernel: list[int]) -> ov.Output:
    return ops.max_pool(
        data, window.stride, window.dilation, window.begin, window.end, kernel, rounding_type="floor"
    ).output(0)


def _maximum(site: Site) -> tuple[Value, ...]:
    """MAX_POOL2D of numbers; see `_exceptional` for NaN and infinity."""
    window, kernel = window_of(site), _ints(site, "kernel")
    value = _operand(site, 0)
    data = ops.convert(site.builder.to_layout(value, axes.NCHW), ov.Type.f32).output(0)
    pooled = _max_nodes(data, window, kernel)
    if value.dtype in _NARROWED and site.builder.may_be_nan(value):
        pooled = _exceptional(site, data, pooled, window, kernel)
    return _result(site, pooled, axes.NCHW, exact=True)


def _exceptional(site: Site, data: ov.Output, pooled: ov.Output, window: Window, kernel: list[int]) -> ov.Output:
    """The runtime's pool skips NaN and starts from the lowest finite number. Marks of what each element is are pooled
    beside it: the strongest mark in a window says whether the result is a NaN, minus infinity or the pool's own."""
    propagate = site.attributes.get("nan_mode") == PROPAGATE
    nan, lowest, number = (2.0, 0.0, 1.0) if propagate else (0.0, 1.0, 2.0)
    minus_infinity = ops.equal(data, _scalar(-math.inf))
    marks = ops.select(minus_infinity, _scalar(lowest), _scalar(number))
    marks = ops.select(ops.is_nan(data), _scalar(nan), marks)
    strongest = _max_nodes(marks.output(0), window, kernel)
    result = ops.select(ops.equal(strongest, _scalar(lowest)), _scalar(-math.inf), pooled)
    return ops.select(ops.equal(strongest, _scalar(nan)), _scalar(math.nan), result).output(0)


# ---- MATMUL


def _matmul(site: Site) -> tuple[Value, ...]:
    """MATMUL: [N, H, C] by [N, C, W]."""
    if _operand(site, 0).dtype is DType.INT8:
        return _integer_matmul(site)
    _no_zero_points(site, 2, 3)
    left, right = _operand(site, 0), _operand(site, 1)
    nodes = [_widened(site.builder.tosa(value), value.dtype) for value in (left, right)]
    return _result(site, ops.matmul(nodes[0], nodes[1], False, False).output(0), axes.identity(3))


def shifted(node: ov.Output, zero: Zero) -> ov.Output:
    """Integers less their zero point, as FP32."""
    wide = ops.convert(node, ov.Type.f32).output(0)
    if no_zero(zero):
        return wide
    return ops.subtract(wide, _scalar(float(zero)) if isinstance(zero, int) else _widened(zero, DType.INT8)).output(0)


def _integer_matmul(site: Site) -> tuple[Value, ...]:
    left, right = _operand(site, 0), _operand(site, 1)
    zeros = zero_point(site, 2), zero_point(site, 3)
    nodes = [shifted(site.builder.tosa(value), zero) for value, zero in zip((left, right), zeros, strict=True)]
    # The largest product of two shifted operands bounds how many of them a part may hold.
    reaches = [max(127 - low, high + 128) for low, high in map(zero_bounds, zeros)]
    step = max(_F32_EXACT // math.prod(reaches), 1)
    parts = -(-left.shape[2] // step)
    if parts == 1:
        total = ops.convert(ops.matmul(nodes[0], nodes[1], False, False), ov.Type.i32).output(0)
    else:
        total = product_in_parts(nodes[0], nodes[1], step, parts)
    return (site.builder.value(total, DType.INT32, site.out_shapes[0]),)


def product_in_parts(left: ov.Output, right: ov.Output, step: int, parts: int) -> ov.Output:
    """[N, H, C] by [N, C, W] as a batch of parts, each at most `step` deep, added pairwise as INT32."""
    batch, height, depth = left.get_shape()
    width = right.get_shape()[2]
    parts = 1 << (parts - 1).bit_length()
    step = -(-depth // parts)
    missing = parts * step - depth
    if missing:
        left = padded(left, [0, 0, missing])
        right = padded(right, [0, missing, 0])
    lefts = ops.transpose(reshaped(left, [batch, height, parts, step]), np.array([2, 0, 1, 3], np.int64))
    rights = ops.transpose(reshaped(right, [batch, parts, step, width]), np.array([1, 0, 2, 3], np.int64))
    total = ops.convert(ops.matmul(lefts, rights, False, False), ov.Type.i32).output(0)
    while parts > 1:
        first, second = ops.split(total, 0, 2).outputs()
        total = ops.add(first, second).output(0)
        parts //= 2
    return reshaped(total, [batch, height, width])


def reshaped(node: ov.Output, shape: list[int]) -> ov.Output:
    return ops.reshape(node, np.array(shape, np.int64), special_zero=False).output(0)


def padded(node: ov.Output, end: list[int], begin: list[int] | None = None) -> ov.Output:
    first = np.array(begin or [0] * len(end), np.int64)
    return ops.pad(node, first, np.array(end, np.int64), "constant", _scalar(0.0)).output(0)


# ---- rows

_SMALL = frozenset((dtype, dtype, DType.FP16) for dtype in FP8)
_CONVOLUTIONS = frozenset((dtype, dtype, dtype) for dtype in FLOATS) | _SMALL
_POOLS = frozenset((dtype,) for dtype in (*FLOATS, *FP8))

register(
    Record(Op.CONV2D, _CONVOLUTIONS, _convolution, "Convolution, channels first", False),
    Record(Op.CONV3D, _CONVOLUTIONS, _convolution, "Convolution, channels first", False),
    Record(Op.DEPTHWISE_CONV2D, _CONVOLUTIONS, _depthwise, "GroupConvolution, channels first", False),
    Record(
        Op.TRANSPOSE_CONV2D, _CONVOLUTIONS, _transpose_convolution, "ConvolutionBackpropData, channels first", False
    ),
    Record(Op.AVG_POOL2D, _POOLS, _average, "AvgPool without its padding, channels first", False),
    Record(
        Op.MAX_POOL2D, _POOLS | {(DType.INT8,), (DType.INT16,)}, _maximum, "MaxPool, and a pooled mask of NaNs", True
    ),
    Record(
        Op.MATMUL,
        frozenset((dtype, dtype, DType.FP32) for dtype in FLOATS)
        | {(DType.FP16, DType.FP16, DType.FP16), (DType.INT8, DType.INT8, DType.INT32)}
        | _SMALL,
        _matmul,
        "MatMul; INT8 in parts below 2^24 added as INT32",
        False,
    ),
)
