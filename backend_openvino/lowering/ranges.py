"""Which tensors hold finite numbers only, if the inputs are no larger than some limit: interval arithmetic on a graph.

TOSA wants NaN kept where the runtime's kernels drop it, and keeping it costs passes over memory. Where no NaN and no
infinity can be, none of that is needed. So a program is compiled for inputs within a limit, and once more, with all
care, if a submission ever brings others. Intervals are kept for each index of the last axis (the channel), so that a
channel's own weights count, and for all limits at once. Knows TOSA operators as real functions; nothing of the runtime.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from virtaccel.backend_openvino.lowering.constants import FOLDED, Constants
from virtaccel.tosa_graph.graph import Block, DType, Graph, Op, Operator
from virtaccel.tosa_graph.node import decode, width

LIMITS = (2.0**40, 2.0**20, 2.0**15, 1024.0, 256.0)
"""Limits tried for the inputs' magnitude, widest first; the last takes bytes as they come."""

FLOATS = frozenset({DType.FP32, DType.FP16, DType.BF16})
_FLOATING = FLOATS | {DType.FP8E4M3, DType.FP8E5M2}
_LARGEST = {DType.FP32: 1e36, DType.FP16: 6e4, DType.BF16: 1e36}
"""What counts as finite, with a margin for rounding and for algorithms that scale their partial sums."""
_MARGIN = 2.0**-10
"""Relative to the size of a sum's terms: more than rounding does to a sum of 4096, or to a result."""
_ROUNDING = 2.0**-22
"""The same for each term of longer sums: a quarter for the runtime's rounding, a quarter for that of the bounds."""
_TINY = 2.0**-90
"""More than a result loses where terms below FP32's smallest normal number count as zero, be they as many as there may
be in a file."""
_SUBNORMAL = 2.0**-126
"""More than a constant loses by that."""
_INTEGERS = {DType.BOOL: 1.0, DType.INT4: 8.0, DType.INT8: 255.0, DType.INT16: 65535.0, DType.INT32: 2.0**31}
_SENSITIVE = frozenset({Op.CLAMP, Op.MAX_POOL2D, Op.MAXIMUM, Op.MINIMUM, Op.REDUCE_MAX, Op.REDUCE_MIN, Op.ARGMAX})
"""Operators whose lowering is simpler for finite numbers."""
_BLOCK = 1 << 14
"""Weights looked at together: few enough to stay in the cache, and for a product that is not worth several threads."""

Reach: TypeAlias = NDArray[np.float32]
"""How far values reach below and above zero, [2, limits or 1, channels or 1]: the negated lower bounds, then the upper
ones. NaN for a limit within which nothing is known. FP32 does: what its rounding takes is a small part of the margin.
"""


@dataclass(frozen=True, slots=True)
class Bounds:
    """If no floating-point input's magnitude is above `limit`, the `tensors` named hold finite numbers only."""

    limit: float
    tensors: frozenset[str]


class _Walk:
    """What is known so far of a block's tensors. `everywhere` are finite within all limits, `partly` within those that
    are marked."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.constants = Constants(block)
        self.reaches: dict[str, Reach] = {}
        self._constant: dict[str, Reach | None] = {}
        self.everywhere: set[str] = set()
        self.partly: dict[str, NDArray[np.bool_]] = {}

    def of(self, operator: Operator, index: int) -> Reach | None:
        name = operator.inputs[index] if index < len(operator.inputs) else ""
        found = self.reaches.get(name)
        return self.constant(name) if found is None and name in self.constants else found

    def constant(self, name: str) -> Reach | None:
        """None if there are others than finite numbers, or larger ones than the type's."""
        if name not in self._constant:
            self._constant[name] = self._of_constant(name)
        return self._constant[name]

    def _of_constant(self, name: str) -> Reach | None:
        array = self.constants.array(name)
        if array.dtype == np.float16:  # whose extremes numpy is slow to find
            array = self.constants.wide(name)
        rows = array.reshape(-1, array.shape[-1] if array.ndim else 1)
        found = np.empty((2, 1, rows.shape[1]), np.float32)
        found[0, 0] = rows[0] if len(rows) == 1 else np.minimum.reduce(rows)
        found[1, 0] = rows[0] if len(rows) == 1 else np.maximum.reduce(rows)
        np.negative(found[0], out=found[0])
        found += _SUBNORMAL
        largest = math.inf
        if self.constants.made(name):
            found = _widened(found)
            largest = _LARGEST.get(self.block.tensors[name].dtype, math.inf)
        top = float(found.max())
        return found if top <= largest and top < math.inf else None

    def weights(self, operator: Operator) -> NDArray[np.float32] | None:
        """The second operand if it is known, in FP32."""
        name = operator.inputs[1]
        return self.constants.wide(name) if name in self.constants else None

    def shape(self, operator: Operator, index: int) -> tuple[int, ...]:
        return self.block.tensors[operator.inputs[index]].shape

    def out_shape(self, operator: Operator) -> tuple[int, ...]:
        return self.block.tensors[operator.outputs[0]].shape

    def keep(self, name: str, found: Reach, dtype: DType) -> None:
        """Keep what was found, widened by what rounding may add; nothing for limits within which it is too large."""
        largest = _LARGEST[dtype]
        if np.maximum.reduce(found, axis=None) <= largest:
            self.everywhere.add(name)
        else:
            fits = found.max(axis=(0, 2)) <= largest
            if not fits.any():
                return
            found = np.where(fits[:, np.newaxis], found, np.float32(math.nan))
            self.partly[name] = fits
        self.reaches[name] = _widened(found)


Rule = Callable[[_Walk, Operator], Reach | None]


def _scalar(low: float, high: float) -> Reach:
    return np.array([[[-low]], [[high]]], np.float32)


_UPWARDS = _scalar(0.0, 1.0)


def _joined(down: Reach, up: Reach) -> Reach:
    reach = np.empty((2, *down.shape), np.float32)
    reach[0], reach[1] = down, up
    return reach


def _widened(reach: Reach) -> Reach:
    """With room for what rounding one result may do."""
    wide: Reach = reach + (_MARGIN * np.maximum.reduce(reach) + _TINY)
    return wide


def _whole(reach: Reach) -> Reach:
    """One interval for all channels."""
    if reach.shape[2] == 1:
        return reach
    found: Reach = np.maximum.reduce(reach, axis=2, keepdims=True)
    return found


def _largest(reach: Reach) -> Reach:
    """The largest magnitude within each limit, [1, limits or 1, 1]."""
    found: Reach = reach.max(axis=(0, 2), keepdims=True)
    return found


# ---- rules


def _with_zeros(reach: Reach, channels: int) -> Reach:
    """For each of the channels, the values and the zeros of padding."""
    if reach.shape[2] != channels:
        reach = np.broadcast_to(_whole(reach), (2, reach.shape[1], channels))
    return np.maximum(reach, 0.0)


def _convolution(walk: _Walk, operator: Operator) -> Reach | None:
    """Sums over windows; weights are [OC, window..., IC]."""
    value, bias, weights = walk.of(operator, 0), walk.of(operator, 2), walk.weights(operator)
    if value is None or bias is None or weights is None:
        return None
    count, channels = weights.shape[0], weights.shape[-1]
    low, high = _with_zeros(value, channels)
    middle, span = (high - low).T, (high + low).T
    window = weights.size // (count * channels)
    rows = weights.reshape(count, channels) if window == 1 else weights.reshape(count, window, channels)
    step = max(_BLOCK // (window * channels), 1)
    shifts, spans = np.empty((2, count, span.shape[1]), np.float32)
    sizes = np.empty((min(step, count), *rows.shape[1:]), np.float32)
    for start in range(0, count, step):
        end = start + step
        part = rows[start:end]
        size = np.abs(part, out=sizes[: len(part)])
        if window != 1:
            part, size = np.add.reduce(part, axis=1), np.add.reduce(size, axis=1)
        np.matmul(part, middle, out=shifts[start:end])
        np.matmul(size, span, out=spans[start:end])
    return _summed(shifts.T, spans.T, bias, window * channels)


def _depthwise(walk: _Walk, operator: Operator) -> Reach | None:
    """Sums over windows of each channel by itself; weights are [window..., C, M]."""
    value, bias, weights = walk.of(operator, 0), walk.of(operator, 2), walk.weights(operator)
    if value is None or bias is None or weights is None:
        return None
    channels, multiplier = weights.shape[2:]
    value = _with_zeros(value, channels)
    if multiplier != 1:
        value = np.repeat(value, multiplier, axis=2)
    rows = weights.reshape(-1, channels * multiplier)
    shifts = np.add.reduce(rows) * (value[1] - value[0])
    return _summed(shifts, np.add.reduce(np.abs(rows)) * (value[1] + value[0]), bias, len(rows))


def _summed(shifts: Reach, spans: Reach, bias: Reach, count: int) -> Reach:
    """Sums of `count` products and a bias, [limits, channels]. With weights w and operands between c - r and c + r they
    are between w c - |w| r and w c + |w| r: `shifts` are 2 w c, `spans` 2 |w| r. Operands may be zero, so that none is
    larger than 2 r, and the magnitudes of the products do not add up to more than `spans`."""
    terms = spans + np.maximum.reduce(bias)
    reach = np.empty((2, *terms.shape), np.float32)
    np.subtract(spans, shifts, out=reach[0])
    np.add(spans, shifts, out=reach[1])
    reach *= 0.5
    reach += bias
    reach += max(_MARGIN, count * _ROUNDING) * terms
    if not np.maximum.reduce(terms, axis=None) <= _LARGEST[DType.FP32]:
        reach[:, ~(terms.max(axis=1) <= _LARGEST[DType.FP32])] = math.nan
    return reach


def _product_sum(reach: Reach, count: int) -> Reach:
    """Sums of `count` numbers of magnitudes up to these."""
    wide: Reach = np.repeat(reach * (count * (1 + count * _ROUNDING)), 2, axis=0)
    return wide


def _matmul(walk: _Walk, operator: Operator) -> Reach | None:
    left, right = walk.of(operator, 0), walk.of(operator, 1)
    if left is None or right is None:
        return None
    return _product_sum(_largest(left) * _largest(right), walk.shape(operator, 0)[-1])


def _reduce_sum(walk: _Walk, operator: Operator) -> Reach | None:
    value, axis = walk.of(operator, 0), operator.attributes.get("axis")
    if value is None or not isinstance(axis, int):
        return None
    return _product_sum(_largest(value), walk.shape(operator, 0)[axis])


def _add(walk: _Walk, operator: Operator) -> Reach | None:
    left, right = walk.of(operator, 0), walk.of(operator, 1)
    return None if left is None or right is None else left + right


def _subtract(walk: _Walk, operator: Operator) -> Reach | None:
    left, right = walk.of(operator, 0), walk.of(operator, 1)
    return None if left is None or right is None else left + right[::-1]


def _multiply(walk: _Walk, operator: Operator) -> Reach | None:
    """The extremes are among the products of ends: ends of one side give positive products, of two sides negative."""
    left, right = walk.of(operator, 0), walk.of(operator, 1)
    if left is None or right is None:
        return None
    alike, crossed = left * right, left * right[::-1]
    return _joined(
        np.maximum(np.maximum.reduce(crossed), -np.minimum.reduce(alike)),
        np.maximum(np.maximum.reduce(alike), -np.minimum.reduce(crossed)),
    )


def _maximum(walk: _Walk, operator: Operator) -> Reach | None:
    left, right = walk.of(operator, 0), walk.of(operator, 1)
    if left is None or right is None:
        return None
    return _joined(np.minimum(left[0], right[0]), np.maximum(left[1], right[1]))


def _minimum(walk: _Walk, operator: Operator) -> Reach | None:
    left, right = walk.of(operator, 0), walk.of(operator, 1)
    if left is None or right is None:
        return None
    return _joined(np.maximum(left[0], right[0]), np.minimum(left[1], right[1]))


def _clamp(walk: _Walk, operator: Operator) -> Reach | None:
    value = walk.of(operator, 0)
    if value is None:
        return None
    dtype = walk.block.tensors[operator.inputs[0]].dtype
    low, high = (
        float(decode(given, dtype)) if isinstance(given, bytes) and len(given) >= width(dtype) else math.nan
        for given in (operator.attributes.get("min_val"), operator.attributes.get("max_val"))
    )
    ends = _scalar(low, high)
    return np.minimum(np.maximum(value, -ends[::-1]), ends)


def _same(walk: _Walk, operator: Operator) -> Reach | None:
    """The values of the operand, its last axis kept."""
    return walk.of(operator, 0)


def _mixed(walk: _Walk, operator: Operator) -> Reach | None:
    """The values of the operand, in other places."""
    value = walk.of(operator, 0)
    return None if value is None else _whole(value)


def _reshape(walk: _Walk, operator: Operator) -> Reach | None:
    value, before, after = walk.of(operator, 0), walk.shape(operator, 0), walk.out_shape(operator)
    if value is None or (before and after and before[-1] == after[-1]):
        return value
    return _whole(value)


def _pad(walk: _Walk, operator: Operator) -> Reach | None:
    value, constant = walk.of(operator, 0), walk.of(operator, 2)
    return None if value is None or constant is None else np.maximum(_whole(value), _whole(constant))


def _concat(walk: _Walk, operator: Operator) -> Reach | None:
    total: Reach | None = None
    for index in range(len(operator.inputs)):
        found = walk.of(operator, index)
        if found is None:
            return None
        total = _whole(found) if total is None else np.maximum(total, _whole(found))
    return total


def _select(walk: _Walk, operator: Operator) -> Reach | None:
    on_true, on_false = walk.of(operator, 1), walk.of(operator, 2)
    return None if on_true is None or on_false is None else np.maximum(on_true, on_false)


def _absolute(walk: _Walk, operator: Operator) -> Reach | None:
    value = walk.of(operator, 0)
    return None if value is None else np.maximum.reduce(value) * _UPWARDS


def _negate(walk: _Walk, operator: Operator) -> Reach | None:
    value = walk.of(operator, 0)
    return None if value is None else value[::-1]


def _rounding(walk: _Walk, operator: Operator) -> Reach | None:
    value = walk.of(operator, 0)
    return None if value is None else value + 1.0


def _between(low: float, high: float) -> Rule:
    """A function with these values for every finite operand."""
    ends = _scalar(low, high)

    def rule(walk: _Walk, operator: Operator) -> Reach | None:
        value = walk.of(operator, 0)
        return None if value is None else ends + 0.0 * _largest(value)

    return rule


def _cast(walk: _Walk, operator: Operator) -> Reach | None:
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


def _visit(walk: _Walk, operator: Operator, sensitive: set[str]) -> None:
    name = operator.outputs[0] if operator.outputs else ""
    tensor = walk.block.tensors.get(name)
    if tensor is None:
        return
    if operator.op is Op.CONST and tensor.data is not None:
        walk.constants.store(tensor)
        return
    if operator.op in FOLDED and operator.inputs and operator.inputs[0] in walk.constants:
        walk.constants.make(operator)
        if walk.block.tensors[operator.inputs[0]].dtype in _FLOATING and operator.inputs[0] not in walk.reaches:
            # Still a constant when it is lowered, which then needs no bounds.
            if name in sensitive and walk.constant(name) is not None:
                walk.everywhere.add(name)
            return
    rule = _RULES.get(operator.op)
    found = rule(walk, operator) if rule is not None and tensor.dtype in FLOATS else None
    if found is not None:
        walk.keep(name, found, tensor.dtype)


def _walked(graph: Graph, sensitive: set[str]) -> _Walk:
    """What is finite for inputs within each of the limits, apart from constants."""
    walk = _Walk(graph.main)
    limits = np.array(LIMITS, np.float32)
    for tensor in graph.inputs:
        if tensor.dtype in FLOATS:
            fits = limits <= _LARGEST[tensor.dtype]
            reach = np.where(fits, limits, np.float32(math.nan))
            walk.reaches[tensor.name] = _joined(reach, reach)[:, :, np.newaxis]
            walk.partly[tensor.name] = fits
    for operator in graph.main.operators:
        _visit(walk, operator, sensitive)
    return walk


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
    if not sensitive:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        walk = _walked(graph, sensitive)
    always = len(walk.everywhere & sensitive)
    helped = [
        always + sum(bool(fits[index]) for name, fits in walk.partly.items() if name in sensitive)
        for index in range(len(LIMITS))
    ]
    best = helped.index(max(helped))
    if helped[best] == 0:
        return None
    tensors = walk.everywhere | {name for name, fits in walk.partly.items() if fits[best]}
    return Bounds(LIMITS[best], frozenset(tensors))
