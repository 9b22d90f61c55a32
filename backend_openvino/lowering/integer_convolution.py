"""Convolutions, AVG_POOL2D and MATMUL of integers, bit for bit: TOSA 1.0, section 2.2.

The kernels multiply and add in FP32, which holds every integer up to 2^24. So a sum of products is cut until no part
can pass that: along the channels it runs over, and where one channel is too much, the operands into digits of fewer
bits. Parts are then joined as INT32, or in the 16-bit words of INT48. Constant weights are weighed as they are, so most
convolutions of INT8 are one FP32 convolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import openvino as ov

from virtaccel.backend_openvino.lowering import int48
from virtaccel.backend_openvino.lowering import layout as axes
from virtaccel.backend_openvino.lowering import nodes as ops
from virtaccel.backend_openvino.lowering.convolution import (
    Window,
    Zero,
    convolved,
    no_zero,
    padded,
    product_in_parts,
    reshaped,
    shifted,
    window_of,
    without_pad,
    zero_bounds,
    zero_point,
)
from virtaccel.backend_openvino.lowering.exact import (
    as_i32,
    clipped_i32,
    f32,
    i32,
    low_bits,
    product,
    scaled,
    shifted_left,
    shifted_right,
)
from virtaccel.backend_openvino.lowering.int48 import Term
from virtaccel.backend_openvino.lowering.integer import BITS, back
from virtaccel.backend_openvino.lowering.operands import operand
from virtaccel.backend_openvino.lowering.registry import Array, Layout, Record, Site, Value, register
from virtaccel.tosa_graph.graph import DType, Op

_EXACT = 1 << 24
_JOINED = 127
"""Parts of up to 2^24 that INT32 holds together."""
_PART_COST = 64
"""What converting and adding one part costs for each result, in products."""
_BYTES_DEEP = 258
"""Products of two bytes that FP32 adds exactly."""
_WIDTHS = BITS | {DType.INT4: 4}

Kernel: TypeAlias = Callable[[ov.Output, ov.Output], ov.Output]


# ---- digits


class Integers(NamedTuple):
    """An operand less its zero point: as numbers if they are known, else as a node of INT8 or INT16 and a zero point.
    `low` and `high` are its bounds."""

    node: ov.Output | None
    array: Array | None
    zero: Zero
    low: int
    high: int

    @property
    def bits(self) -> int:
        """With the sign."""
        return max(self.high, -1 - self.low).bit_length() + 1

    def reach(self, count: int) -> list[int]:
        """Largest magnitude of each digit, if it is cut into `count`."""
        if count == 1:
            return [max(self.high, -self.low)]
        width = self.width(count)
        return [(1 << width) - 1] * (count - 1) + [1 << max(self.bits - 1 - (count - 1) * width, 0)]

    def width(self, count: int) -> int:
        """Bits of each digit but the last."""
        return -(-self.bits // count)

    def digits(self, count: int) -> list[ov.Output]:
        """FP32 nodes, the lowest digit first; all but the last are not negative."""
        if self.array is not None:
            return [f32(digit) for digit in self.known_digits(count)]
        assert self.node is not None  # one of the two is there
        if count == 1:
            return [shifted(self.node, self.zero)]
        width, whole = self.width(count), as_i32(self.node)
        if not no_zero(self.zero):
            whole = ops.subtract(whole, _i32(self.zero)).output(0)
        fields = [shifted_right(whole, index * width) if index else whole for index in range(count)]
        fields = [low_bits(field, width) for field in fields[:-1]] + fields[-1:]
        return [ops.convert(field, ov.Type.f32).output(0) for field in fields]

    def known_digits(self, count: int) -> list[Array]:
        """The same of known numbers, as INT32 arrays."""
        assert self.array is not None
        width = self.width(count)
        fields = [self.array >> (index * width) for index in range(count)]
        return [field & ((1 << width) - 1) for field in fields[:-1]] + fields[-1:]


def _i32(zero: Zero) -> ov.Output:
    return i32(zero) if isinstance(zero, int) else as_i32(zero)


def _integers(node: ov.Output, dtype: DType, zero: Zero) -> Integers:
    """An operand that is not known while lowering."""
    half = 1 << (_WIDTHS[dtype] - 1)
    least, most = zero_bounds(zero)
    return Integers(node, None, zero, -half - most, half - 1 - least)


def _weights(site: Site, index: int, zero: Zero, order: Layout, shape: Sequence[int]) -> Integers:
    """Weights with TOSA's axes in `order`, then seen as `shape`."""
    value = operand(site, index)
    if value.constant is None or not isinstance(zero, int):
        node = reshaped(site.builder.to_layout(_byte(value), order), list(shape))
        return _integers(node, value.dtype, zero)
    array = np.transpose(value.constant, order).reshape(shape).astype(np.int32) - zero
    return Integers(None, array, 0, int(array.min()), int(array.max()))


def _byte(value: Value) -> Value:
    """INT4 as INT8, which can be moved."""
    if value.dtype is not DType.INT4:
        return value
    byte = ops.convert(value.output, ov.Type.i8).output(0)
    return Value(byte, value.dtype, value.shape, value.layout, value.constant)


# ---- cutting sums


class Cut(NamedTuple):
    """Into how many digits data and weights are cut, and where the channels are, for each digit of the weights."""

    data: int
    weights: int
    channels: list[list[int]]

    @property
    def parts(self) -> int:
        return self.data * sum(len(bounds) - 1 for bounds in self.channels)


class Sum(NamedTuple):
    """A sum of products: operands laid out for `kernel`, which is linear in both. Data have their channels on axis 1,
    weights on axis `channel_axis`; None if each result has a channel of its own. `others` are the axes of the weights
    over which it sums besides."""

    data: Integers
    weights: Integers
    kernel: Kernel
    shape: Sequence[int]
    channel_axis: int | None
    others: tuple[int, ...]

    @property
    def channels(self) -> int:
        return 1 if self.channel_axis is None else self.shape[self.channel_axis]

    def loads(self, count: int) -> list[Array]:
        """Sums of magnitudes by [result, channel], for each of `count` digits of the weights."""
        if self.weights.array is None:
            points = math.prod(self.shape[axis] for axis in self.others)
            return [np.full((1, self.channels), reach * points, np.int64) for reach in self.weights.reach(count)]
        loads = []
        for digit in self.weights.known_digits(count):
            load = np.abs(digit).astype(np.int64).sum(axis=self.others, keepdims=True)
            if self.channel_axis is not None:
                load = np.moveaxis(load, self.channel_axis, -1)
            loads.append(load.reshape(-1, self.channels))
        return loads

    def cut(self) -> Cut | None:
        """The cheapest way that keeps every part exact, None if there is none."""
        best: tuple[int, Cut] | None = None
        depth = math.prod(self.shape[axis] for axis in self.others) * self.channels
        for weights in range(1, self.weights.bits + 1):
            if best is not None and best[0] <= weights * (depth + _PART_COST):
                break
            loads = self.loads(weights)
            for data in range(1, self.data.bits + 1):
                reach = max(self.data.reach(data))
                bounds = [_bounds(load * reach) for load in loads]
                whole = [found for found in bounds if found is not None]
                if len(whole) == len(bounds):
                    cut = Cut(data, weights, whole)
                    cost = data * weights * depth + cut.parts * _PART_COST
                    if best is None or cost < best[0]:
                        best = cost, cut
        return None if best is None else best[1]

    def terms(self, site: Site) -> list[Term]:
        """The sum as INT32 nodes, none of which has wrapped. Refused if no cut is exact."""
        cut = self.cut()
        if cut is None:
            raise site.refuse("a sum too long to be cut")
        found: list[Term] = []
        digits = self.weights.digits(cut.weights)
        for index, data in enumerate(self.data.digits(cut.data)):
            for position, (weights, bounds) in enumerate(zip(digits, cut.channels, strict=True)):
                shift = index * self.data.width(cut.data) + position * self.weights.width(cut.weights)
                parts = [as_i32(part) for part in self._parts(data, weights, bounds)]
                for start in range(0, len(parts), _JOINED):
                    found.append(Term(_added(parts[start : start + _JOINED]), shift))
        return found

    def _parts(self, data: ov.Output, weights: ov.Output, bounds: list[int]) -> Iterator[ov.Output]:
        if len(bounds) == 2:
            yield self.kernel(data, weights)
            return
        assert self.channel_axis is not None  # otherwise there is one channel, and no bounds between
        for start, end in pairwise(bounds):
            yield self.kernel(_sliced(data, 1, start, end), _sliced(weights, self.channel_axis, start, end))


def _bounds(loads: Array) -> list[int] | None:
    """Where to cut channels so that no result's load passes what FP32 holds; None if one channel does."""
    if loads.max() > _EXACT:
        return None
    if loads.sum(axis=1).max() <= _EXACT:
        return [0, loads.shape[1]]
    bounds, held = [0], np.zeros(loads.shape[0], np.int64)
    for channel in range(loads.shape[1]):
        held = held + loads[:, channel]
        if held.max() > _EXACT:
            bounds.append(channel)
            held = loads[:, channel]
    return [*bounds, loads.shape[1]]


def _sliced(node: ov.Output, axis: int, start: int, end: int) -> ov.Output:
    return ops.slice(node, *(np.array([bound], np.int64) for bound in (start, end, 1, axis))).output(0)


def _added(nodes: list[ov.Output]) -> ov.Output:
    total = nodes[0]
    for node in nodes[1:]:
        total = ops.add(total, node).output(0)
    return total


def _total_i32(terms: list[Term]) -> ov.Output:
    return _added([shifted_left(node, shift) if shift else node for node, shift in terms])


# ---- convolutions


def _biased(site: Site, terms: list[Term], layout: Layout) -> tuple[Value, ...]:
    """The sum and the bias, a vector along axis 1 of what is stored, as the result."""
    bias, rank = operand(site, 2), len(layout)
    shape = [1, bias.shape[0]] + [1] * (rank - 2)
    if site.out_dtypes[0] is DType.INT48:
        sums = int48.total(terms)
        if bias.constant is None or np.any(bias.constant):
            words = int48.words(site.builder.tosa(bias))
            sums = int48.plus(sums, type(sums)(*(reshaped(word, shape) for word in words)))
        return (int48.value(site, sums, layout),)
    result = _total_i32(terms)
    if bias.constant is None:
        result = ops.add(result, reshaped(site.builder.tosa(bias), shape)).output(0)
    elif np.any(bias.constant):
        result = ops.add(result, i32(bias.constant.reshape(shape))).output(0)
    return (site.builder.value(result, DType.INT32, site.out_shapes[0], layout),)


def _known(zero: Zero) -> float | None:
    return float(zero) if isinstance(zero, int) else None


def _convolution(site: Site) -> tuple[Value, ...]:
    """CONV2D and CONV3D: [N, (D,) H, W, IC] by [OC, (KD,) KH, KW, IC]."""
    zeros = zero_point(site, 3), zero_point(site, 4)
    value, window = without_pad(site, window_of(site), _known(zeros[0]))
    rank = len(value.shape)
    first = (0, rank - 1, *range(1, rank - 1))
    shape = [operand(site, 1).shape[axis] for axis in first]
    data = _integers(site.builder.to_layout(value, first), value.dtype, zeros[0])
    weights = _weights(site, 1, zeros[1], first, shape)
    total = Sum(data, weights, _convolver(window), shape, 1, tuple(range(2, rank)))
    return _biased(site, total.terms(site), first)


def _convolver(window: Window) -> Kernel:
    return lambda data, weights: convolved(data, weights, window)


def _grouped(window: Window) -> Kernel:
    return lambda data, weights: ops.group_convolution(
        data, weights, window.stride, window.begin, window.end, window.dilation
    ).output(0)


def _depthwise(site: Site) -> tuple[Value, ...]:
    """DEPTHWISE_CONV2D: [N, H, W, C] by [KH, KW, C, M]; output channel c * M + m."""
    zeros = zero_point(site, 3), zero_point(site, 4)
    value, window = without_pad(site, window_of(site), _known(zeros[0]))
    height, width, channels, multiplier = operand(site, 1).shape
    shape = [channels, multiplier, 1, height, width]
    weights = _weights(site, 1, zeros[1], (2, 3, 0, 1), shape)
    data = _integers(site.builder.to_layout(value, axes.NCHW), value.dtype, zeros[0])
    total = Sum(data, weights, _grouped(window), shape, None, (2, 3, 4))
    return _biased(site, total.terms(site), axes.NCHW)


def _transpose_convolution(site: Site) -> tuple[Value, ...]:
    """TRANSPOSE_CONV2D: [N, IH, IW, IC] by [OC, KH, KW, IC]. A negative out_pad crops, a positive one adds rows that
    only the bias reaches."""
    zeros = zero_point(site, 3), zero_point(site, 4)
    value = operand(site, 0)
    out_pad, stride = site.attributes.get("out_pad"), site.attributes.get("stride")
    if not isinstance(out_pad, tuple) or not isinstance(stride, tuple) or len(out_pad) != 4 or len(stride) != 2:
        raise site.refuse("out_pad or stride has a wrong length")
    crop, grow = [max(-amount, 0) for amount in out_pad], [max(amount, 0) for amount in out_pad]

    def kernel(data: ov.Output, weights: ov.Output) -> ov.Output:
        node = ops.convolution_backprop_data(
            data, weights, list(stride), pads_begin=crop[0::2], pads_end=crop[1::2], dilations=[1, 1]
        ).output(0)
        return padded(node, [0, 0, *grow[1::2]], [0, 0, *grow[0::2]]) if any(grow) else node

    shape = [operand(site, 1).shape[axis] for axis in (3, 0, 1, 2)]
    weights = _weights(site, 1, zeros[1], (3, 0, 1, 2), shape)
    data = _integers(site.builder.to_layout(value, axes.NCHW), value.dtype, zeros[0])
    total = Sum(data, weights, kernel, shape, 0, (2, 3))
    return _biased(site, total.terms(site), axes.NCHW)


# ---- AVG_POOL2D


def _covered(extent: int, kernel: int, stride: int, before: int, results: int) -> Array:
    """How many elements of an axis each window covers; padding does not count."""
    start = np.arange(results, dtype=np.int64) * stride - before
    covered: Array = np.minimum(start + kernel, extent) - np.maximum(start, 0)
    return covered


def _average(site: Site) -> tuple[Value, ...]:
    """AVG_POOL2D: the sum by a reciprocal of the count, as RESCALE scales, then the output's zero point, clipped."""
    value, window = operand(site, 0), window_of(site)
    kernel = site.attributes.get("kernel")
    if not isinstance(kernel, tuple) or len(kernel) != 2:
        raise site.refuse("kernel has a wrong length")
    in_zero, out_zero = zero_point(site, 1), zero_point(site, 2)
    channels = value.shape[3]
    shape = [channels, 1, 1, *kernel]
    ones = Integers(None, np.ones(shape, np.int32), 0, 1, 1)
    data = _integers(site.builder.to_layout(value, axes.NCHW), value.dtype, in_zero)
    total = Sum(data, ones, _grouped(window), shape, None, (2, 3, 4))
    results = site.out_shapes[0][1:3]
    rows, columns = (
        _covered(value.shape[1 + axis], kernel[axis], window.stride[axis], window.begin[axis], results[axis])
        for axis in (0, 1)
    )
    multiplier, shift = _reciprocals(np.outer(rows, columns))
    mean = scaled(product(_total_i32(total.terms(site)), i32(multiplier)), shift)
    half = 1 << (BITS[value.dtype] - 1)
    clipped = clipped_i32(ops.add(mean, _i32(out_zero)).output(0) if not no_zero(out_zero) else mean, -half, half - 1)
    return (site.builder.value(back(clipped, value.dtype), value.dtype, site.out_shapes[0], axes.NCHW),)


def _reciprocals(counts: Array) -> tuple[Array, Array]:
    """reciprocal_scale of the standard's pseudocode library; one pair for all if all are alike."""
    if counts.min() == counts.max():
        counts = counts.reshape(-1)[:1].reshape(())
    power = np.array([int(count - 1).bit_length() for count in counts.reshape(-1)], np.int64).reshape(counts.shape)
    return (((1 << 30) + 1) << power) // counts, power + 30


# ---- MATMUL


def _product(site: Site) -> tuple[Value, ...]:
    """MATMUL of INT16: [N, H, C] by [N, C, W], to INT48."""
    if not all(no_zero(zero_point(site, index)) for index in (2, 3)):
        raise site.refuse("zero point of INT16 is not 0")
    left, right = (_integers(site.builder.tosa(operand(site, index)), DType.INT16, 0) for index in (0, 1))
    depth = operand(site, 0).shape[2]
    terms = []
    for index, first in enumerate(left.digits(2)):
        for position, second in enumerate(right.digits(2)):
            shift = index * left.width(2) + position * right.width(2)
            for start in range(0, depth, _JOINED * _BYTES_DEEP):
                end = min(start + _JOINED * _BYTES_DEEP, depth)
                pieces = _sliced(first, 2, start, end), _sliced(second, 1, start, end)
                parts = -(-(end - start) // _BYTES_DEEP)
                terms.append(Term(product_in_parts(*pieces, _BYTES_DEEP, parts), shift))
    return (int48.value(site, int48.total(terms), axes.identity(3)),)


# ---- rows

_CONVOLUTIONS = frozenset(
    {
        (DType.INT8, DType.INT8, DType.INT32),
        (DType.INT8, DType.INT4, DType.INT32),
        (DType.INT16, DType.INT8, DType.INT48),
    }
)
_HOW = "{} in FP32, sums cut below 2^24 and joined as integers"

register(
    Record(Op.CONV2D, _CONVOLUTIONS, _convolution, _HOW.format("integers: Convolution"), True),
    Record(Op.CONV3D, _CONVOLUTIONS, _convolution, _HOW.format("integers: Convolution"), True),
    Record(Op.DEPTHWISE_CONV2D, _CONVOLUTIONS, _depthwise, _HOW.format("integers: GroupConvolution"), True),
    Record(
        Op.TRANSPOSE_CONV2D, _CONVOLUTIONS, _transpose_convolution,
        _HOW.format("integers: ConvolutionBackpropData"), True,
    ),
    Record(
        Op.AVG_POOL2D, frozenset({(DType.INT8,), (DType.INT16,)}), _average,
        "integers: sums by GroupConvolution in FP32, 64-bit product with the reciprocal in limbs", True,
    ),
    Record(
        Op.MATMUL, frozenset({(DType.INT16, DType.INT16, DType.INT48)}), _product,
        "INT16: four products of bytes in parts below 2^24, joined in the words of INT48", True,
    ),
)  # fmt: skip
