"""Which tensors hold finite numbers only, if the inputs are no larger than some limit: interval arithmetic on a graph.

TOSA wants NaN kept where the runtime's kernels drop it, and keeping it costs passes over memory. Where no NaN and no
infinity can be, none of that is needed. So a program is compiled for inputs within a limit, and once more, with all
care, if a submission ever brings others. Intervals are kept for each index of the last axis (the channel), so that a
channel's own weights count. Knows TOSA operators as real functions; nothing of the runtime.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from virtaccel.tosa_graph.elements import unpack
from virtaccel.tosa_graph.graph import Block, DType, Graph, Op, Operator, packed_bytes

LIMITS = (2.0**40, 2.0**20, 2.0**15, 1024.0, 256.0)
"""Limits tried for the inputs' magnitude, widest first; the last takes bytes as they come."""

FLOATS = frozenset({DType.FP32, DType.FP16, DType.BF16})
_LARGEST = {DType.FP32: 1e36, DType.FP16: 6e4, DType.BF16: 1e36}
"""What counts as finite, with a margin for rounding and for algorithms that scale their partial sums."""
_MARGIN = 2.0**-10
"""Relative to the size of a sum's terms: more than rounding does to a sum of 8192, or to a result."""
_INTEGERS = {DType.BOOL: 1.0, DType.INT4: 8.0, DType.INT8: 255.0, DType.INT16: 65535.0, DType.INT32: 2.0**31}
_SENSITIVE = frozenset({Op.CLAMP, Op.MAX_POOL2D, Op.MAXIMUM, Op.MINIMUM, Op.REDUCE_MAX, Op.REDUCE_MIN, Op.ARGMAX})
"""Operators whose lowering is simpler for finite numbers."""

Reals = NDArray[Any]


class Interval(NamedTuple):
    """Bounds by index of the last axis, or one for all."""

    low: Reals
    high: Reals

    @property
    def magnitude(self) -> Reals:
        return np.maximum(np.abs(self.low), np.abs(self.high))

    def whole(self) -> Interval:
        """One interval for all channels."""
        return Interval(self.low.min(keepdims=True), self.high.max(keepdims=True))

    def for_axis(self, size: int) -> Interval:
        """One interval for each of `size` channels."""
        if len(self.low) == size:
            return self
        return Interval(np.full(size, self.low.min()), np.full(size, self.high.max()))


@dataclass(frozen=True, slots=True)
class Bounds:
    """If no floating-point input's magnitude is above `limit`, the `tensors` named hold finite numbers only."""

    limit: float
    tensors: frozenset[str]


class _Known(NamedTuple):
    """What holds for any limit: values of constants, their intervals, and sums of weights by tensor."""

    constants: dict[str, NDArray[Any]]
    intervals: dict[str, Interval]
    sums: dict[str, tuple[Reals, Reals]]


class _Walk(NamedTuple):
    """What is known so far: intervals of tensors, and what is known anyway."""

    block: Block
    intervals: dict[str, Interval]
    known: _Known

    @property
    def constants(self) -> dict[str, NDArray[Any]]:
        return self.known.constants

    def of(self, operator: Operator, index: int) -> Interval | None:
        name = operator.inputs[index] if index < len(operator.inputs) else ""
        found = self.intervals.get(name) or self.known.intervals.get(name)
        if found is None and name in self.constants:
            found = self.known.intervals[name] = _of_constant(self.constants[name])
        return found

    def shape(self, operator: Operator, index: int) -> tuple[int, ...]:
        return self.block.tensors[operator.inputs[index]].shape

    def out_shape(self, operator: Operator) -> tuple[int, ...]:
        return self.block.tensors[operator.outputs[0]].shape


Rule = Callable[[_Walk, Operator], Interval | None]


def _scalar(low: float, high: float) -> Interval:
    return Interval(np.array([low]), np.array([high]))


def _hull(*intervals: Interval) -> Interval:
    lows = np.broadcast_arrays(*[interval.low for interval in intervals])
    highs = np.broadcast_arrays(*[interval.high for interval in intervals])
    return Interval(np.min(lows, axis=0), np.max(highs, axis=0))


def _of_constant(array: NDArray[Any]) -> Interval:
    rows = array.reshape(-1, array.shape[-1] if array.ndim else 1)
    low, high = rows.min(axis=0).astype(np.float64), rows.max(axis=0).astype(np.float64)
    if np.isfinite(low).all() and np.isfinite(high).all():
        return Interval(low, high)
    return _scalar(-math.inf, math.inf)


# ---- rules


def _parts(walk: _Walk, name: str, weights: NDArray[Any], axes: tuple[int, ...]) -> tuple[Reals, Reals]:
    """Sums of the positive and of the negative weights over `axes`; `name` is whose weights they are."""
    found = walk.known.sums.get(name)
    if found is None:
        wide = weights.astype(np.float32, copy=False)
        positive = np.maximum(wide, 0).sum(axis=axes)
        found = walk.known.sums[name] = positive, wide.sum(axis=axes) - positive
    return found


def _convolution(walk: _Walk, operator: Operator) -> Interval | None:
    """Sums over windows; weights are [OC, window..., IC]."""
    value, bias = walk.of(operator, 0), walk.of(operator, 2)
    weights = walk.constants.get(operator.inputs[1])
    if value is None or bias is None or weights is None:
        return None
    window = tuple(range(1, weights.ndim - 1))
    # Padding brings in zeros.
    value = _hull(value, _scalar(0, 0)).for_axis(weights.shape[-1])
    return _summed(value, *_parts(walk, operator.outputs[0], weights, window), bias)


def _summed(value: Interval, positive: Reals, negative: Reals, bias: Interval) -> Interval | None:
    """Sums over channels of weights [OC, IC], or of each channel by itself for weights [C]."""
    times = np.matmul if positive.ndim == 2 else np.multiply
    terms = times(positive - negative, value.magnitude) + bias.magnitude
    margin = _MARGIN * terms
    low = times(positive, value.low) + times(negative, value.high) + bias.low - margin
    high = times(positive, value.high) + times(negative, value.low) + bias.high + margin
    return Interval(low, high) if terms.max() <= _LARGEST[DType.FP32] else None


def _depthwise(walk: _Walk, operator: Operator) -> Interval | None:
    value, bias = walk.of(operator, 0), walk.of(operator, 2)
    weights = walk.constants.get(operator.inputs[1])
    if value is None or bias is None or weights is None:
        return None
    channels, multiplier = weights.shape[2:]
    positive, negative = _parts(walk, operator.outputs[0], weights.reshape(-1, channels * multiplier), (0,))
    value = _hull(value, _scalar(0, 0)).for_axis(channels)
    repeated = Interval(np.repeat(value.low, multiplier), np.repeat(value.high, multiplier))
    return _summed(repeated, positive, negative, bias)


def _matmul(walk: _Walk, operator: Operator) -> Interval | None:
    left, right = walk.of(operator, 0), walk.of(operator, 1)
    if left is None or right is None:
        return None
    reach = float(left.magnitude.max() * right.magnitude.max() * walk.shape(operator, 0)[-1])
    return _scalar(-reach, reach)


def _add(walk: _Walk, operator: Operator) -> Interval | None:
    left, right = walk.of(operator, 0), walk.of(operator, 1)
    return None if left is None or right is None else Interval(left.low + right.low, left.high + right.high)


def _subtract(walk: _Walk, operator: Operator) -> Interval | None:
    left, right = walk.of(operator, 0), walk.of(operator, 1)
    return None if left is None or right is None else Interval(left.low - right.high, left.high - right.low)


def _multiply(walk: _Walk, operator: Operator) -> Interval | None:
    left, right = walk.of(operator, 0), walk.of(operator, 1)
    if left is None or right is None:
        return None
    corners = np.broadcast_arrays(*[a * b for a in left for b in right])
    return Interval(np.min(corners, axis=0), np.max(corners, axis=0))


def _maximum(walk: _Walk, operator: Operator) -> Interval | None:
    left, right = walk.of(operator, 0), walk.of(operator, 1)
    if left is None or right is None:
        return None
    return Interval(np.maximum(left.low, right.low), np.maximum(left.high, right.high))


def _minimum(walk: _Walk, operator: Operator) -> Interval | None:
    left, right = walk.of(operator, 0), walk.of(operator, 1)
    if left is None or right is None:
        return None
    return Interval(np.minimum(left.low, right.low), np.minimum(left.high, right.high))


def _clamp(walk: _Walk, operator: Operator) -> Interval | None:
    value = walk.of(operator, 0)
    if value is None:
        return None
    dtype = walk.block.tensors[operator.inputs[0]].dtype
    low, high = (
        float(unpack(given[: packed_bytes(dtype, 1)], dtype, (1,))[0]) if isinstance(given, bytes) else math.nan
        for given in (operator.attributes.get("min_val"), operator.attributes.get("max_val"))
    )
    return Interval(np.clip(value.low, low, high), np.clip(value.high, low, high))


def _same(walk: _Walk, operator: Operator) -> Interval | None:
    """The values of the operand, its last axis kept."""
    return walk.of(operator, 0)


def _mixed(walk: _Walk, operator: Operator) -> Interval | None:
    """The values of the operand, in other places."""
    value = walk.of(operator, 0)
    return None if value is None else value.whole()


def _reshape(walk: _Walk, operator: Operator) -> Interval | None:
    value, before, after = walk.of(operator, 0), walk.shape(operator, 0), walk.out_shape(operator)
    if value is None or (before and after and before[-1] == after[-1]):
        return value
    return value.whole()


def _pad(walk: _Walk, operator: Operator) -> Interval | None:
    value, constant = walk.of(operator, 0), walk.of(operator, 2)
    return None if value is None or constant is None else _hull(value.whole(), constant.whole())


def _concat(walk: _Walk, operator: Operator) -> Interval | None:
    found = [walk.of(operator, index) for index in range(len(operator.inputs))]
    pieces = [interval.whole() for interval in found if interval is not None]
    return _hull(*pieces) if len(pieces) == len(operator.inputs) else None


def _select(walk: _Walk, operator: Operator) -> Interval | None:
    on_true, on_false = walk.of(operator, 1), walk.of(operator, 2)
    return None if on_true is None or on_false is None else _hull(on_true, on_false)


def _absolute(walk: _Walk, operator: Operator) -> Interval | None:
    value = walk.of(operator, 0)
    return None if value is None else Interval(np.zeros_like(value.low), value.magnitude)


def _negate(walk: _Walk, operator: Operator) -> Interval | None:
    value = walk.of(operator, 0)
    return None if value is None else Interval(-value.high, -value.low)


def _rounding(walk: _Walk, operator: Operator) -> Interval | None:
    value = walk.of(operator, 0)
    return None if value is None else Interval(value.low - 1, value.high + 1)


def _reduce_sum(walk: _Walk, operator: Operator) -> Interval | None:
    value, axis = walk.of(operator, 0), operator.attributes.get("axis")
    if value is None or not isinstance(axis, int):
        return None
    reach = float(value.magnitude.max()) * walk.shape(operator, 0)[axis]
    return _scalar(-reach, reach)


def _between(low: float, high: float) -> Rule:
    """A function with these values for every finite operand."""

    def rule(walk: _Walk, operator: Operator) -> Interval | None:
        return None if walk.of(operator, 0) is None else _scalar(low, high)

    return rule


def _cast(walk: _Walk, operator: Operator) -> Interval | None:
    dtype = walk.block.tensors[operator.inputs[0]].dtype
    if dtype in _INTEGERS:
        return _scalar(-_INTEGERS[dtype], _INTEGERS[dtype])
    return walk.of(operator, 0)


_RULES: dict[Op, Rule] = {
    Op.CONV2D: _convolution,
    Op.CONV3D: _convolution,
    Op.TRANSPOSE_CONV2D: _convolution,
    Op.DEPTHWISE_CONV2D: _depthwise,
    Op.MATMUL: _matmul,
    Op.ADD: _add,
    Op.SUB: _subtract,
    Op.MUL: _multiply,
    Op.MAXIMUM: _maximum,
    Op.MINIMUM: _minimum,
    Op.CLAMP: _clamp,
    Op.IDENTITY: _same,
    Op.AVG_POOL2D: _same,
    Op.MAX_POOL2D: _same,
    Op.RESIZE: _same,
    Op.TRANSPOSE: _mixed,
    Op.SLICE: _mixed,
    Op.TILE: _mixed,
    Op.REVERSE: _mixed,
    Op.GATHER: _mixed,
    Op.REDUCE_MAX: _mixed,
    Op.REDUCE_MIN: _mixed,
    Op.RESHAPE: _reshape,
    Op.PAD: _pad,
    Op.CONCAT: _concat,
    Op.SELECT: _select,
    Op.ABS: _absolute,
    Op.NEGATE: _negate,
    Op.CEIL: _rounding,
    Op.FLOOR: _rounding,
    Op.REDUCE_SUM: _reduce_sum,
    Op.SIGMOID: _between(0, 1),
    Op.TANH: _between(-1, 1),
    Op.ERF: _between(-1, 1),
    Op.SIN: _between(-1, 1),
    Op.COS: _between(-1, 1),
    Op.CAST: _cast,
}
"""Operators not listed give anything."""


# ---- the walk


def _fold(walk: _Walk, operator: Operator) -> None:
    """Follow constants through what weights commonly pass on their way."""
    source = walk.constants.get(operator.inputs[0]) if operator.inputs else None
    if source is None or operator.op not in (Op.CAST, Op.RESHAPE, Op.TRANSPOSE, Op.IDENTITY):
        return
    perms = operator.attributes.get("perms")
    if operator.op is Op.TRANSPOSE and isinstance(perms, tuple):
        source = np.transpose(source, perms)
    elif operator.op is Op.RESHAPE:
        source = source.reshape(walk.out_shape(operator))
    walk.constants[operator.outputs[0]] = source


def _visit(walk: _Walk, operator: Operator) -> None:
    if not operator.outputs or operator.outputs[0] not in walk.block.tensors:
        return
    name = operator.outputs[0]
    tensor = walk.block.tensors[name]
    if name in walk.constants:
        return
    if operator.op is Op.CONST and tensor.data is not None:
        walk.constants[name] = unpack(tensor.data, tensor.dtype, tensor.shape)
        return
    _fold(walk, operator)
    rule = _RULES.get(operator.op)
    found = rule(walk, operator) if rule is not None and tensor.dtype in FLOATS else None
    if found is not None and float(found.magnitude.max()) <= _LARGEST[tensor.dtype]:
        margin = _MARGIN * found.magnitude
        walk.intervals[name] = Interval(found.low - margin, found.high + margin)


def _within(graph: Graph, limit: float, known: _Known) -> frozenset[str]:
    """Tensors that are finite for inputs within `limit`, apart from constants."""
    walk = _Walk(graph.main, {}, known)
    for tensor in graph.inputs:
        if tensor.dtype in FLOATS and limit <= _LARGEST[tensor.dtype]:
            walk.intervals[tensor.name] = _scalar(-limit, limit)
    for operator in graph.main.operators:
        _visit(walk, operator)
    return frozenset(walk.intervals)


def _sensitive(block: Block) -> set[str]:
    """Operands whose operators are lowered more simply if they are finite."""
    halves = {one.outputs[0]: one.inputs[0] for one in block.operators if one.op is Op.GREATER_EQUAL}
    found = {operator.inputs[0] for operator in block.operators if operator.op in _SENSITIVE}
    # x >= 0 ? x : x * slope, see compare.py.
    return found | {
        operator.inputs[1]
        for operator in block.operators
        if operator.op is Op.SELECT and halves.get(operator.inputs[0]) == operator.inputs[1]
    }


def bounded(graph: Graph) -> Bounds | None:
    """The widest limit that is worth most, and what is finite within it; None if it helps no operator."""
    sensitive = {name for name in _sensitive(graph.main) if graph.main.tensors[name].dtype in FLOATS}
    known = _Known({}, {}, {})
    best: Bounds | None = None
    helped = 0
    for limit in LIMITS if sensitive else ():
        with np.errstate(over="ignore", invalid="ignore"):
            tensors = _within(graph, limit, known)
        if len(tensors & sensitive) > helped:
            best, helped = Bounds(limit, tensors), len(tensors & sensitive)
        if helped == len(sensitive):
            break
    return best
