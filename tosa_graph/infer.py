"""Shapes and ERROR_IF rules of the other operators, and the table of all: one function a kind of operator.

Chapter 2 of TOSA 1.0. Each function takes a Node and returns the shapes its results must have. Control flow is not
here: it needs the regions. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isnan, prod
from typing import Final, TypeAlias, cast

from virtaccel.tosa_graph import infer_tensor as tensor
from virtaccel.tosa_graph.graph import DType, Op, TosaError
from virtaccel.tosa_graph.node import UNKNOWN, Dims, Node, broadcast, decode, require, same, size, width
from virtaccel.tosa_graph.schema import NanMode, RoundingMode

Inference: TypeAlias = Callable[[Node], tuple[Dims, ...]]

_TABLE_SIZES: Final = {DType.INT8: 256, DType.INT16: 513}
_U16_MIDDLE: Final = 32768


def unary(node: Node) -> tuple[Dims, ...]:
    return (node.shapes[0],)


def declared(node: Node) -> tuple[Dims, ...]:
    return node.declared


def elementwise(node: Node) -> tuple[Dims, ...]:
    """Binary operators, comparisons and SELECT."""
    return (broadcast(*node.shapes),)


def multiply(node: Node) -> tuple[Dims, ...]:
    node.fixed(2, (1,), "shift")
    shift = node.scalar(2)
    if shift is not None:
        require(0 <= shift <= 63, "shift must be 0 to 63")
        require(shift == 0 or node.dtypes[0] == DType.INT32, "shift must be 0 unless the type is INT32")
    return (broadcast(node.shapes[0], node.shapes[1]),)


def negate(node: Node) -> tuple[Dims, ...]:
    node.zero_point(1, "input1_zp")
    node.zero_point(2, "output_zp")
    return (node.shapes[0],)


def clamp(node: Node) -> tuple[Dims, ...]:
    dtype = node.dtypes[0]
    count = width(dtype)
    bounds = []
    for name in ("min_val", "max_val"):
        data = cast(bytes, node.attributes[name])
        if len(data) < count:
            raise TosaError(f"{name} has {len(data)} bytes, not {count}")
        if any(data[count:]):
            raise TosaError(f"{name} holds more than one {dtype.name}")
        bounds.append(decode(data, dtype))
    require(not any(map(isnan, bounds)), "min_val and max_val must not be NaN")
    require(bounds[0] <= bounds[1], "min_val exceeds max_val")
    return (node.shapes[0],)


def table(node: Node) -> tuple[Dims, ...]:
    node.fixed(1, (_TABLE_SIZES[node.dtypes[0]],), "table")
    return (node.shapes[0],)


def _axis(node: Node, rank: int) -> int:
    axis = node.number("axis")
    if not 0 <= axis < rank:
        raise TosaError(f"axis {axis} is outside rank {rank}")
    return axis


def argmax(node: Node) -> tuple[Dims, ...]:
    shape = node.shapes[0]
    axis = _axis(node, len(shape))
    return (shape[:axis] + shape[axis + 1 :],)


def reduction(node: Node) -> tuple[Dims, ...]:
    shape = node.shapes[0]
    axis = _axis(node, len(shape))
    return ((*shape[:axis], 1, *shape[axis + 1 :]),)


def reverse(node: Node) -> tuple[Dims, ...]:
    _axis(node, len(node.shapes[0]))
    return (node.shapes[0],)


def concat(node: Node) -> tuple[Dims, ...]:
    require(bool(node.shapes), "there must be at least one input")
    first = node.shapes[0]
    axis = _axis(node, max(1, len(first)))
    require(all(len(shape) == len(first) for shape in node.shapes), "inputs differ in rank")
    result = []
    for position, extents in enumerate(zip(*node.shapes, strict=True)):
        if position == axis:
            result.append(UNKNOWN if UNKNOWN in extents else sum(extents))
        else:
            result.append(same(f"inputs differ in dimension {position}", *extents))
    return (tuple(result),)


def _values(node: Node, operand: int, length: int, name: str) -> Dims | None:
    """A shape operand of the length asked for; None if it is not constant."""
    node.fixed(operand, (length,), name)
    return node.values[operand]


def pad(node: Node) -> tuple[Dims, ...]:
    shape = node.shapes[0]
    node.fixed(2, (1,), "pad_const")
    padding = _values(node, 1, 2 * len(shape), "padding")
    if padding is None:
        return node.declared
    require(min(padding) >= 0, "padding must not be negative")
    pairs = zip(shape, padding[0::2], padding[1::2], strict=True)
    return (tuple(UNKNOWN if extent == UNKNOWN else before + extent + after for extent, before, after in pairs),)


def reshape(node: Node) -> tuple[Dims, ...]:
    """One dimension of the new shape may be -1, as converters write it for a dimension not known yet."""
    shape, target = node.shapes[0], node.values[1]
    if target is None:
        if UNKNOWN not in shape + node.declared[0]:
            require(size(shape) == size(node.declared[0]), "input and output differ in size")
        return node.declared
    unknown = target.count(UNKNOWN)
    require(unknown <= 1, "more than one dimension is to be found")
    for extent in target:
        if extent < 1 and extent != UNKNOWN:
            raise TosaError("a dimension is less than 1")
    elements = size(shape)
    if not unknown and elements == prod(target):
        return (target,)
    if elements == UNKNOWN:
        return (target,)
    known = size(tuple(extent for extent in target if extent != UNKNOWN))
    if UNKNOWN not in target:
        require(elements == known, f"{elements} elements cannot take shape {list(target)}")
        return (target,)
    require(elements % known == 0, f"{elements} elements cannot take shape {list(target)}")
    return (tuple(elements // known if extent == UNKNOWN else extent for extent in target),)


def slice_(node: Node) -> tuple[Dims, ...]:
    shape = node.shapes[0]
    start, extents = _values(node, 1, len(shape), "start"), _values(node, 2, len(shape), "size")
    if extents is not None:
        require(min(extents) >= 1, "size must be positive")
    if start is not None:
        require(min(start) >= 0, "start must not be negative")
    if start is None or extents is None:
        return node.declared if extents is None else (extents,)
    for first, extent, whole in zip(start, extents, shape, strict=True):
        require(whole == UNKNOWN or first + extent <= whole, "the slice ends outside the input")
    return (extents,)


def tile(node: Node) -> tuple[Dims, ...]:
    shape = node.shapes[0]
    multiples = _values(node, 1, len(shape), "multiples")
    if multiples is None:
        return node.declared
    require(min(multiples) >= 1, "multiples must be at least 1")
    pairs = zip(shape, multiples, strict=True)
    return (tuple(UNKNOWN if extent == UNKNOWN else extent * times for extent, times in pairs),)


def transpose(node: Node) -> tuple[Dims, ...]:
    shape = node.shapes[0]
    perms = node.numbers("perms", len(shape))
    if sorted(perms) != list(range(len(shape))):
        raise TosaError(f"perms {list(perms)} is no permutation of {len(shape)} axes")
    return (tuple(shape[axis] for axis in perms),)


def gather(node: Node) -> tuple[Dims, ...]:
    values, indices = node.shapes
    return ((same("values and indices differ in batch", values[0], indices[0]), indices[1], values[2]),)


def scatter(node: Node) -> tuple[Dims, ...]:
    values, indices, updates = node.shapes
    batch = same("operands differ in batch", values[0], indices[0], updates[0])
    same("indices and input differ in number", indices[1], updates[1])
    return ((batch, values[1], same("values and input differ in channels", values[2], updates[2])),)


def rescale(node: Node) -> tuple[Dims, ...]:
    """Zero points: INT8 any, unsigned INT16 0 or 32768, others 0."""
    scale32, rounding, per_channel, in_unsigned, out_unsigned = (
        node.number(name)
        for name in ("scale32", "rounding_mode", "per_channel", "input_unsigned", "output_unsigned")
    )
    shape, source, result = node.shapes[0], node.dtypes[0], node.result_dtypes[0]
    modes = (RoundingMode.SINGLE_ROUND, RoundingMode.INEXACT_ROUND, RoundingMode.DOUBLE_ROUND)
    require(rounding in modes, f"rounding_mode {rounding}")
    require(not (scale32 and source == DType.INT48), "scale32 with INT48 input")
    require(bool(scale32) or rounding != RoundingMode.DOUBLE_ROUND, "DOUBLE_ROUND without scale32")
    multiplier = DType.INT32 if scale32 else DType.INT16
    require(node.dtypes[1] == multiplier, f"multiplier must be {multiplier.name}, not {node.dtypes[1].name}")
    require(not (in_unsigned and out_unsigned), "input and output are both unsigned")
    wide = (DType.INT32, DType.INT48)
    require(not (in_unsigned and (source in wide or result == DType.INT32)), "unsigned input with a wide type")
    require(not (out_unsigned and (source in wide or result == DType.INT32)), "unsigned output with a wide type")
    require(not per_channel or len(shape) >= 1, "per_channel with rank 0")
    channels = shape[-1] if per_channel else 1
    node.fixed(1, (channels,), "multiplier")
    node.fixed(2, (channels,), "shift")
    _rescale_zero_point(node, 3, bool(in_unsigned), "input_zp")
    _rescale_zero_point(node, 4, bool(out_unsigned), "output_zp")
    return (shape,)


def _rescale_zero_point(node: Node, operand: int, unsigned: bool, name: str) -> None:
    node.fixed(operand, (1,), name)
    value, dtype = node.scalar(operand), node.dtypes[operand]
    if value is None or dtype == DType.INT8:
        return
    if dtype == DType.INT16 and unsigned:
        require(value in (0, _U16_MIDDLE, -_U16_MIDDLE), f"{name} of an unsigned INT16 must be 0 or 32768")
    else:
        require(value == 0, f"{name} must be zero for {dtype.name}")


def nan_mode(node: Node) -> None:
    """Every operator that has a NaN mode; 0 stands for the default, PROPAGATE."""
    mode = node.number("nan_mode") if "nan_mode" in node.attributes else NanMode.PROPAGATE
    if mode not in (NanMode.UNKNOWN, NanMode.PROPAGATE, NanMode.IGNORE):
        raise TosaError(f"nan_mode {mode}")


INFERENCE: Final[dict[Op, Inference]] = {
    **dict.fromkeys(
        (
            Op.ERF, Op.SIGMOID, Op.TANH, Op.ABS, Op.BITWISE_NOT, Op.CEIL, Op.CLZ, Op.COS, Op.EXP, Op.FLOOR, Op.LOG,
            Op.LOGICAL_NOT, Op.RECIPROCAL, Op.RSQRT, Op.SIN, Op.CAST, Op.IDENTITY, Op.VARIABLE_READ, Op.VARIABLE_WRITE,
        ),
        unary,
    ),
    **dict.fromkeys(
        (
            Op.ADD, Op.ARITHMETIC_RIGHT_SHIFT, Op.BITWISE_AND, Op.BITWISE_OR, Op.BITWISE_XOR, Op.INTDIV, Op.LOGICAL_AND,
            Op.LOGICAL_LEFT_SHIFT, Op.LOGICAL_RIGHT_SHIFT, Op.LOGICAL_OR, Op.LOGICAL_XOR, Op.MAXIMUM, Op.MINIMUM,
            Op.POW, Op.SUB, Op.SELECT, Op.EQUAL, Op.GREATER, Op.GREATER_EQUAL,
        ),
        elementwise,
    ),
    **dict.fromkeys(
        (Op.REDUCE_ALL, Op.REDUCE_ANY, Op.REDUCE_MAX, Op.REDUCE_MIN, Op.REDUCE_PRODUCT, Op.REDUCE_SUM), reduction
    ),
    **dict.fromkeys((Op.CONST, Op.CUSTOM, Op.VARIABLE, Op.CONST_SHAPE), declared),
    Op.ARGMAX: argmax,
    Op.AVG_POOL2D: tensor.average_pool,
    Op.CONV2D: tensor.convolution,
    Op.CONV3D: tensor.convolution,
    Op.DEPTHWISE_CONV2D: tensor.depthwise,
    Op.FFT2D: tensor.fft,
    Op.MATMUL: tensor.matmul,
    Op.MAX_POOL2D: tensor.max_pool,
    Op.RFFT2D: tensor.real_fft,
    Op.TRANSPOSE_CONV2D: tensor.transpose_convolution,
    Op.CLAMP: clamp,
    Op.MUL: multiply,
    Op.TABLE: table,
    Op.NEGATE: negate,
    Op.CONCAT: concat,
    Op.PAD: pad,
    Op.RESHAPE: reshape,
    Op.REVERSE: reverse,
    Op.SLICE: slice_,
    Op.TILE: tile,
    Op.TRANSPOSE: transpose,
    Op.GATHER: gather,
    Op.SCATTER: scatter,
    Op.RESIZE: tensor.resize,
    Op.RESCALE: rescale,
}  # fmt: skip
