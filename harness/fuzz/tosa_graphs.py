"""Small TOSA graphs of every operator, right ones mostly: what target `tosa` starts from.

Operands, types and results come from the table of operators (tosa_graph/operators.py); here stands only how their
shapes hang together and which attributes go with them. A few sizes and attributes are drawn at random, sometimes from
values that no graph may have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from virtaccel.tosa_graph.elements import NATURAL
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.operators import FIXED_TYPES, SIGNATURES
from virtaccel.tosa_graph.write import Attribute, GraphWriter, RegionWriter, Spec

Shape: TypeAlias = tuple[int, ...]
EDGES: Final = (0, 1, 2, 3, 5, 8, 64, 255, 8192, 8193, 1 << 20, (1 << 31) - 1, -1, -(1 << 31))


class Plan(NamedTuple):
    """Shapes of operands and results, values of constant operands by position, attributes."""

    operands: Sequence[Shape]
    results: Sequence[Shape]
    values: dict[int, Sequence[float]]
    attributes: dict[str, Attribute]


_Planner: TypeAlias = Callable[[Random], Plan]


def _dims(random: Random, low: int = 1, high: int = 4) -> Shape:
    return tuple(random.choice((1, 2, 3, 4)) for _ in range(random.randrange(low, high + 1)))


def _unary(random: Random) -> Plan:
    shape = _dims(random)
    return Plan([shape], [shape], {}, {})


def _binary(random: Random) -> Plan:
    shape = _dims(random)
    other = tuple(size if random.random() < 0.7 else 1 for size in shape)
    return Plan([shape, other], [shape], {}, {})


def _fixed(operands: Sequence[Shape], results: Sequence[Shape], **attributes: Attribute) -> _Planner:
    """The same shapes every time: what is drawn at random is their types and what is wrong with them."""
    return lambda random: Plan(operands, results, {}, dict(attributes))


def _like_first(*others: Shape | None) -> _Planner:
    """More operands than one, each of a shape of its own or that of the first."""

    def plan(random: Random) -> Plan:
        shape = _dims(random)
        return Plan([shape, *(shape if other is None else other for other in others)], [shape], {}, {})

    return plan


def _with(planner: _Planner, **attributes: Attribute) -> _Planner:
    def plan(random: Random) -> Plan:
        made = planner(random)
        return made._replace(attributes={**made.attributes, **attributes})

    return plan


def _reduce(random: Random) -> Plan:
    shape = _dims(random)
    axis = random.randrange(len(shape))
    return Plan([shape], [(*shape[:axis], 1, *shape[axis + 1:])], {}, {"axis": axis})


def _argmax(random: Random) -> Plan:
    shape = _dims(random, 2)
    axis = random.randrange(len(shape))
    return Plan([shape], [shape[:axis] + shape[axis + 1 :]], {}, {"axis": axis, "nan_mode": 1})


def _convolution(random: Random) -> Plan:
    kernel, stride, pad = random.choice((1, 2, 3)), random.choice((1, 2)), random.choice((0, 1))
    size = random.choice((5, 7))
    out = (size - 1 + 2 * pad - (kernel - 1)) // stride + 1
    if (size - 1 + 2 * pad - (kernel - 1)) % stride:
        stride, out = 1, size - kernel + 2 * pad + 1
    attributes: dict[str, Attribute] = {"pad": (pad,) * 4, "stride": (stride,) * 2, "dilation": (1, 1)}
    shapes = [(1, size, size, 3), (4, kernel, kernel, 3), (random.choice((1, 4)),), (1,), (1,)]
    return Plan(shapes, [(1, out, out, 4)], {}, attributes)


def _depthwise(random: Random) -> Plan:
    attributes: dict[str, Attribute] = {"pad": (0, 0, 0, 0), "stride": (1, 1), "dilation": (1, 1)}
    multiplier = random.choice((1, 2))
    shapes = [(1, 5, 5, 3), (2, 2, 3, multiplier), (3 * multiplier,), (1,), (1,)]
    return Plan(shapes, [(1, 4, 4, 3 * multiplier)], {}, attributes)


def _transpose_conv(random: Random) -> Plan:
    stride = random.choice((1, 2))
    attributes: dict[str, Attribute] = {"out_pad": (0,) * 4, "stride": (stride,) * 2}
    out = (4 - 1) * stride + 3
    return Plan([(1, 4, 4, 2), (3, 3, 3, 2), (3,), (1,), (1,)], [(1, out, out, 3)], {}, attributes)


def _pool(average: bool) -> _Planner:
    def plan(random: Random) -> Plan:
        kernel, stride = random.choice((1, 2, 3)), random.choice((1, 2))
        size = kernel + stride * random.choice((1, 2))
        out = (size - kernel) // stride + 1
        attributes: dict[str, Attribute] = {"kernel": (kernel,) * 2, "stride": (stride,) * 2, "pad": (0,) * 4}
        return Plan(
            [(1, size, size, 2), (1,), (1,)] if average else [(1, size, size, 2)], [(1, out, out, 2)], {}, attributes
        )

    return plan


def _matmul(random: Random) -> Plan:
    n, h, c, w = (random.choice((1, 2, 3)) for _ in range(4))
    return Plan([(n, h, c), (n, c, w), (1,), (1,)], [(n, h, w)], {}, {})


def _concat(random: Random) -> Plan:
    shape = _dims(random)
    axis = random.randrange(len(shape))
    return Plan([shape, shape], [(*shape[:axis], 2 * shape[axis], *shape[axis + 1:])], {}, {"axis": axis})


def _pad(random: Random) -> Plan:
    shape = _dims(random)
    pads = [random.choice((0, 1, 2)) for _ in range(2 * len(shape))]
    result = tuple(size + pads[2 * i] + pads[2 * i + 1] for i, size in enumerate(shape))
    return Plan([shape, (len(pads),), (1,)], [result], {1: pads}, {})


def _reshape(random: Random) -> Plan:
    shape = _dims(random)
    total = int(np.prod(shape))
    return Plan([shape, (2,)], [(1, total)], {1: [1, total]}, {})


def _slice(random: Random) -> Plan:
    shape = _dims(random)
    starts = [random.randrange(size) for size in shape]
    sizes = [random.randrange(1, size - start + 1) for size, start in zip(shape, starts, strict=True)]
    rank = (len(shape),)
    return Plan([shape, rank, rank], [tuple(sizes)], {1: starts, 2: sizes}, {})


def _tile(random: Random) -> Plan:
    shape = _dims(random)
    times = [random.choice((1, 2, 3)) for _ in shape]
    return Plan([shape, (len(shape),)], [tuple(a * b for a, b in zip(shape, times, strict=True))], {1: times}, {})


def _transpose(random: Random) -> Plan:
    shape = _dims(random)
    perms = random.sample(range(len(shape)), len(shape))
    return Plan([shape], [tuple(shape[axis] for axis in perms)], {}, {"perms": tuple(perms)})


def _reverse(random: Random) -> Plan:
    shape = _dims(random)
    return Plan([shape], [shape], {}, {"axis": random.randrange(len(shape))})


def _resize(random: Random) -> Plan:
    mode = random.choice((1, 2))
    return Plan(
        [(1, 3, 3, 2), (4,), (2,), (2,)], [(1, 5, 5, 2)], {1: [2, 1, 2, 1], 2: [0, 0], 3: [0, 0]}, {"mode": mode}
    )


def _rescale(random: Random) -> Plan:
    shape = _dims(random)
    count = shape[-1] if random.random() < 0.5 else 1
    attributes: dict[str, Attribute] = {"scale32": True, "rounding_mode": 1, "per_channel": count > 1}
    return Plan([shape, (count,), (count,), (1,), (1,)], [shape], {1: [1 << 30] * count, 2: [31] * count}, attributes)


def _mul(random: Random) -> Plan:
    made = _binary(random)
    return made._replace(operands=[*made.operands, (1,)])


_PLANE: Final = (1, 4, 8)  # rows and columns that are powers of two, as transforms need them
_NAN: Final[dict[str, Any]] = {"nan_mode": 1}
_PLANNERS: Final[dict[Op, _Planner]] = {
    Op.ARGMAX: _argmax, Op.AVG_POOL2D: _pool(True), Op.CONV2D: _convolution, Op.DEPTHWISE_CONV2D: _depthwise,
    Op.MATMUL: _matmul, Op.MAX_POOL2D: _with(_pool(False), **_NAN), Op.TRANSPOSE_CONV2D: _transpose_conv,
    Op.CONV3D: _fixed([(1, 3, 4, 5, 2), (3, 2, 2, 2, 2), (3,), (1,), (1,)], [(1, 2, 3, 4, 3)],
                      pad=(0,) * 6, stride=(1,) * 3, dilation=(1,) * 3),
    Op.FFT2D: _fixed([_PLANE] * 2, [_PLANE] * 2), Op.RFFT2D: _fixed([_PLANE], [(1, 4, 5)] * 2),
    Op.GATHER: _fixed([(2, 4, 3), (2, 5)], [(2, 5, 3)]),
    Op.SCATTER: _fixed([(2, 4, 3), (2, 3), (2, 3, 3)], [(2, 4, 3)]),
    Op.TABLE: _like_first((0,)), Op.NEGATE: _like_first((1,), (1,)), Op.SELECT: _like_first(None, None),
    Op.MUL: _mul, Op.CONCAT: _concat, Op.PAD: _pad, Op.RESHAPE: _reshape, Op.REVERSE: _reverse, Op.SLICE: _slice,
    Op.TILE: _tile, Op.TRANSPOSE: _transpose, Op.RESIZE: _resize, Op.RESCALE: _rescale,
    Op.MAXIMUM: _with(_binary, **_NAN), Op.MINIMUM: _with(_binary, **_NAN),
    **dict.fromkeys((Op.REDUCE_ALL, Op.REDUCE_ANY, Op.REDUCE_PRODUCT, Op.REDUCE_SUM), _reduce),
    **{op: _with(_reduce, **_NAN) for op in (Op.REDUCE_MAX, Op.REDUCE_MIN)},
}  # fmt: skip
_SPECIAL: Final = frozenset({
    Op.CONST, Op.CONST_SHAPE, Op.CUSTOM, Op.COND_IF, Op.WHILE_LOOP, Op.VARIABLE, Op.VARIABLE_READ, Op.VARIABLE_WRITE,
})  # fmt: skip
OPERATORS: Final = tuple(op for op in Op if op not in _SPECIAL)


def single(op: Op, random: Random) -> bytes:
    """A graph of one operator, of one of the type combinations the standard lists for it."""
    writer = GraphWriter()
    _emit(writer, op, random)
    return writer.to_bytes()


def _emit(writer: RegionWriter, op: Op, random: Random) -> None:
    signature = SIGNATURES[op]
    types = random.choice(list(signature.rows)) if signature.rows else ()
    bound = {**FIXED_TYPES, **dict(zip(signature.variables, types, strict=False))}
    arity = len(signature.operands)
    planner = _PLANNERS.get(op) or (_binary if arity == 2 else _unary)
    plan = planner(random)
    attributes = dict(plan.attributes)
    if "acc_t" in bound:
        attributes["acc_type"] = bound["acc_t"]
    if op is Op.CLAMP:
        attributes |= {"nan_mode": 1, **_clamp_bounds(bound["in_out_t"])}
    for name, value in attributes.items():
        if isinstance(value, tuple):
            attributes[name] = tuple(_perhaps([int(number) for number in value], random))
    names = []
    for position, shape in enumerate(plan.operands):
        operand = signature.operands[min(position, arity - 1)]
        if operand.type == "shape_t":
            values = [int(value) for value in plan.values.get(position, [0] * shape[0])]
            names.append(writer.const_shape(_perhaps(values, random)))
            continue
        dtype = bound.get(operand.type, DType.INT32)
        if op is Op.TABLE and position == 1:
            shape = (256,) if bound["in_t"] is DType.INT8 else (513,)
        if operand.constant or (random.random() < 0.2 and 0 not in shape):
            names.append(_constant(writer, shape, dtype, plan.values.get(position)))
        else:
            names.append(writer.input(f"in{position}", shape, dtype))
    kinds = [bound.get(result.type, DType.INT32) for result in signature.results]
    specs: list[Spec] = [(shape, kinds[min(i, len(kinds) - 1)]) for i, shape in enumerate(plan.results)]
    writer.output(*writer.operator(op, names, specs, attributes))


def _perhaps(values: list[int], random: Random) -> list[int]:
    """Now and then one value that nobody should ask for."""
    if values and random.random() < 0.1:
        values[random.randrange(len(values))] = random.choice(EDGES) if random.random() < 0.6 else 0
    return values


def _constant(writer: RegionWriter, shape: Shape, dtype: DType, values: Sequence[float] | None) -> str:
    count = int(np.prod(shape))
    array = np.resize(np.asarray(values if values else [0]), count).reshape(shape)
    natural = {kind: name for name, kind in NATURAL.items()}
    return writer.constant(array.astype(natural.get(dtype, "float32" if dtype.name[0] in "FB" else "int64")), dtype)


def _clamp_bounds(dtype: DType) -> dict[str, Attribute]:
    one = {
        DType.INT8: (b"\xf6", b"\x0a"), DType.INT16: (b"\xf6\xff", b"\x0a\x00"),
        DType.FP32: (b"\0\0\0\xc0", b"\0\0\0\x40"),
        DType.FP16: (b"\x00\xc0", b"\x00\x40"), DType.BF16: (b"\x00\xc0", b"\x00\x40"),
    }[dtype]  # fmt: skip
    return {"min_val": one[0], "max_val": one[1]}


def chain(random: Random) -> bytes:
    """Several elementwise operators, each on the results before it, over one type."""
    dtype, ops = random.choice((
        (DType.FP32, (Op.ADD, Op.SUB, Op.EXP, Op.ABS, Op.TANH, Op.IDENTITY, Op.POW)),
        (DType.INT32, (Op.ADD, Op.SUB, Op.ABS, Op.BITWISE_XOR, Op.INTDIV, Op.CLZ, Op.IDENTITY)),
        (DType.BOOL, (Op.LOGICAL_AND, Op.LOGICAL_NOT, Op.LOGICAL_XOR, Op.IDENTITY)),
    ))  # fmt: skip
    writer = GraphWriter()
    shape = _dims(random)
    names = [writer.input("x", shape, dtype)]
    for _ in range(random.randrange(2, 7)):
        op = random.choice(ops)
        arity = len(SIGNATURES[op].operands)
        names.append(writer.operator(op, [random.choice(names) for _ in range(arity)], (shape, dtype)))
    writer.output(*random.sample(names, random.randrange(1, len(names) + 1)))
    return writer.to_bytes()


def control_flow(random: Random) -> bytes:
    """COND_IF over two regions, or a variable that is read and written."""
    writer = GraphWriter()
    if random.random() < 0.5:
        x, go = writer.input("x", (2, 3), DType.FP32), writer.input("go", (1,), DType.BOOL)
        branches: dict[str, Attribute] = {"then_graph": "t", "else_graph": "e"}
        writer.output(*writer.operator(Op.COND_IF, [go, x], [((2, 3), DType.FP32)], branches))
        for name in ("t", "e"):
            region = writer.region(name)
            region.output(region.operator(Op.ABS, [region.input("a", (2, 3), DType.FP32)], ((2, 3), DType.FP32)))
        return writer.to_bytes()
    state = writer.variable(np.zeros((2, 2), np.float32))
    x = writer.input("x", (2, 2), DType.FP32)
    old = writer.operator(Op.VARIABLE_READ, [state], ((2, 2), DType.FP32))
    new = writer.operator(Op.ADD, [old, x], ((2, 2), DType.FP32))
    writer.place(Op.VARIABLE_WRITE, [new], [state])
    writer.output(new)
    return writer.to_bytes()


def dynamic(random: Random) -> bytes:
    """A dimension that is not known yet."""
    writer = GraphWriter()
    x = writer.input("x", (-1, 3), DType.FP32)
    if random.random() < 0.5:
        writer.output(writer.operator(Op.RESHAPE, [x, writer.const_shape((-1, 3, 1))], ((-1, 3, 1), DType.FP32)))
    else:
        writer.output(writer.operator(Op.ABS, [x], ((-1, 3), DType.FP32)))
    return writer.to_bytes()


def fresh(random: Random) -> bytes:
    """Any of the above."""
    kind = random.random()
    if kind < 0.75:
        return single(random.choice(OPERATORS), random)
    return random.choice((chain, control_flow, dynamic))(random)
