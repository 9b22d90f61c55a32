"""Operators that move data: TOSA 1.0, sections 2.9 (data layout) and 2.10 (scatter and gather).

Axes are mapped through the operand's layout, so nothing is transposed on the way; TRANSPOSE itself only renames axes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino as ov

from virtaccel.backend_openvino.lowering import layout as axes
from virtaccel.backend_openvino.lowering import nodes as ops
from virtaccel.backend_openvino.lowering.exact import clipped_i32, i32
from virtaccel.backend_openvino.lowering.numbers import constant_node
from virtaccel.backend_openvino.lowering.operands import FLOATS, FP8, axis_of, operand, types
from virtaccel.backend_openvino.lowering.registry import Array, Layout, Record, Site, Value, register
from virtaccel.tosa_graph.graph import DType, Op


def _dims(values: Sequence[int]) -> Array:
    return np.array(values, np.int64)


def _shape_operand(site: Site, index: int, length: int) -> tuple[int, ...]:
    values = site.shapes.get(index)
    if values is None or len(values) != length:
        raise site.refuse(f"operand {index} is not a shape of {length} values")
    return values


def _same_layout(site: Site, node: ov.Node, value: Value) -> tuple[Value, ...]:
    return (site.builder.value(node, value.dtype, site.out_shapes[0], value.layout),)


def _concat(site: Site) -> tuple[Value, ...]:
    values = [operand(site, index) for index in range(len(site.inputs))]
    if not values:
        raise site.refuse("no operands")
    axis = axis_of(site, len(values[0].shape))
    nodes, layout = site.builder.align(*values)
    node = ops.concat(nodes, axes.stored_axis(layout, axis))
    return (site.builder.value(node, values[0].dtype, site.out_shapes[0], layout),)


def _pad(site: Site) -> tuple[Value, ...]:
    value, filler = operand(site, 0), operand(site, 1)
    pads = _shape_operand(site, 1, 2 * len(value.shape))
    if min(pads, default=0) < 0:
        raise site.refuse("a pad is negative")
    begin = _dims([pads[2 * axis] for axis in value.layout])
    end = _dims([pads[2 * axis + 1] for axis in value.layout])
    if not pads or max(pads) == 0:
        return (value,)
    if filler.constant is None:
        raise site.refuse("the filler is not a constant")
    number = filler.constant.reshape(())
    if value.dtype is not DType.INT32 or abs(int(number)) <= 1 << 24:
        node = ops.pad(value.output, begin, end, "constant", constant_node(number, filler.dtype))
        return _same_layout(site, node, value)
    # The kernel takes its filler through FP32: pad with 0 what was combined with the filler by XOR, and combine again.
    padded = ops.pad(ops.bitwise_xor(value.output, i32(number)), begin, end, "constant", i32(0))
    return _same_layout(site, ops.bitwise_xor(padded, i32(number)), value)


def _reshape(site: Site) -> tuple[Value, ...]:
    value, shape = operand(site, 0), site.out_shapes[0]
    layout = _unit_axes_layout(value, shape)
    source = value.output if layout is not None else site.builder.tosa(value)
    layout = layout or axes.identity(len(shape))
    node = ops.reshape(source, _dims(axes.stored(shape, layout)), special_zero=False)
    return (site.builder.value(node, value.dtype, shape, layout),)


def _unit_axes_layout(value: Value, shape: tuple[int, ...]) -> Layout | None:
    """If only axes of size 1 come or go: a layout that holds the result in the operand's memory as it is."""
    old = [axis for axis, size in enumerate(value.shape) if size != 1]
    new = [axis for axis, size in enumerate(shape) if size != 1]
    if [value.shape[axis] for axis in old] != [shape[axis] for axis in new]:
        return None
    renamed = dict(zip(old, new, strict=True))
    units = [axis for axis in range(len(shape)) if shape[axis] == 1]
    leading = [axis for axis in units if not new or axis < new[0]]
    return (*leading, *(renamed[axis] for axis in value.layout if axis in renamed), *units[len(leading) :])


def _sliced(x: ov.Output, axis: int, start: int, stop: int, step: int) -> ov.Node:
    return ops.slice(x, _dims([start]), _dims([stop]), _dims([step]), _dims([axis]))


def _reverse(site: Site) -> tuple[Value, ...]:
    value = operand(site, 0)
    axis = axis_of(site, len(value.shape))
    past = -value.shape[axis] - 1
    return _same_layout(site, _sliced(value.output, axes.stored_axis(value.layout, axis), -1, past, -1), value)


def _slice(site: Site) -> tuple[Value, ...]:
    value = operand(site, 0)
    rank = len(value.shape)
    start, size = _shape_operand(site, 1, rank), _shape_operand(site, 2, rank)
    if any(s < 0 or n <= 0 or s + n > d for s, n, d in zip(start, size, value.shape, strict=True)):
        raise site.refuse("the slice is not inside the operand")
    cut = [axis for axis in range(rank) if size[axis] != value.shape[axis]]
    if not cut:
        return (value,)
    begin = _dims([start[axis] for axis in cut])
    end = _dims([start[axis] + size[axis] for axis in cut])
    where = _dims([axes.stored_axis(value.layout, axis) for axis in cut])
    return _same_layout(site, ops.slice(value.output, begin, end, _dims([1] * len(cut)), where), value)


def _tile(site: Site) -> tuple[Value, ...]:
    value = operand(site, 0)
    multiples = _shape_operand(site, 1, len(value.shape))
    if min(multiples, default=1) < 1:
        raise site.refuse("a multiple is below 1")
    node = ops.tile(value.output, _dims([multiples[axis] for axis in value.layout]))
    return _same_layout(site, node, value)


def _transpose(site: Site) -> tuple[Value, ...]:
    value = operand(site, 0)
    perms = site.attributes.get("perms")
    if not isinstance(perms, tuple) or sorted(perms) != list(range(len(value.shape))):
        raise site.refuse("perms is not a permutation of the axes")
    layout = axes.transposed(value.layout, perms)
    return (site.builder.value(value.output, value.dtype, site.out_shapes[0], layout),)


# ---- gather, scatter


def _indices(site: Site, index: int, count: int) -> ov.Output:
    """Row numbers, kept inside the tensor: for others TOSA promises nothing, and no byte from elsewhere may appear."""
    indices = operand(site, index)
    if count < 1:
        raise site.refuse("there are no rows")
    return clipped_i32(site.builder.tosa(indices), 0, count - 1)


def _gather(site: Site) -> tuple[Value, ...]:
    """Rows of all batches as one table: the kernel reads outside the tensor for a single batch of `batch_dims` 1."""
    values = operand(site, 0)
    batches, count, width = values.shape
    rows = _indices(site, 1, count)
    if batches > 1:
        rows = ops.add(rows, i32(np.arange(batches)[:, None] * count)).output(0)
    table = ops.reshape(site.builder.tosa(values), _dims([batches * count, width]), special_zero=False)
    node = ops.gather(table, rows, np.array(0, np.int64))
    return (site.builder.value(node, values.dtype, site.out_shapes[0]),)


def _scatter(site: Site) -> tuple[Value, ...]:
    values, update = operand(site, 0), operand(site, 2)
    batches, count = operand(site, 1).shape
    rows = ops.reshape(_indices(site, 1, values.shape[1]), _dims([batches, count, 1]), special_zero=False)
    batch = ops.constant(np.broadcast_to(np.arange(batches, dtype=np.int32)[:, None, None], (batches, count, 1)).copy())
    places = ops.concat([batch, rows], 2)
    node = ops.scatter_nd_update(site.builder.tosa(values), places, site.builder.tosa(update))
    return (site.builder.value(node, values.dtype, site.out_shapes[0]),)


# ---- rows

_ROWS = types(DType.INT8, DType.INT16, DType.INT32, *FLOATS, *FP8)
_MOVED = _ROWS | types(DType.BOOL)

register(
    Record(Op.CONCAT, _MOVED, _concat, "Concat", True),
    Record(Op.PAD, _MOVED, _pad, "Pad", True),
    Record(Op.RESHAPE, _MOVED, _reshape, "Reshape", True),
    Record(Op.REVERSE, _MOVED, _reverse, "Slice with step -1", True),
    Record(Op.SLICE, _MOVED, _slice, "Slice", True),
    Record(Op.TILE, _MOVED, _tile, "Tile", True),
    Record(Op.TRANSPOSE, _MOVED, _transpose, "no node: a change of layout", True),
    Record(Op.GATHER, _ROWS, _gather, "Gather, indices kept inside", True),
    Record(Op.SCATTER, _ROWS, _scatter, "ScatterNDUpdate, indices kept inside", True),
)
