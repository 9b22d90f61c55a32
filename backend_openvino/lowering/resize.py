"""RESIZE: TOSA 1.0, section 2.12 (image operators).

Sampling grids that Interpolate knows become that one node; any other is two gathers along each axis and a weighted
sum. Which rows and columns are read, and with which weights, is worked out while lowering.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import openvino as ov

from virtaccel.backend_openvino.lowering import int48
from virtaccel.backend_openvino.lowering import layout as axes
from virtaccel.backend_openvino.lowering import nodes as ops
from virtaccel.backend_openvino.lowering.exact import as_i32, f32, i32, low_bits, shifted_right
from virtaccel.backend_openvino.lowering.half import narrowed, widened
from virtaccel.backend_openvino.lowering.operands import FLOATS, operand
from virtaccel.backend_openvino.lowering.registry import Array, Layout, Record, Site, Value, register
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.schema import ResizeMode

_LARGEST = 16384


class Grid(NamedTuple):
    """Sampling along one axis: point o lies at (o * denominator + offset) / numerator, in elements of the operand."""

    numerator: int
    denominator: int
    offset: int
    size: int
    out_size: int

    def neighbours(self) -> tuple[Array, Array, Array]:
        """For each point: the element before it, the one after it, and how many numerators past the former it is."""
        position = np.arange(self.out_size, dtype=np.int64) * self.denominator + self.offset
        before = position // self.numerator
        rest = position - before * self.numerator
        return np.clip(before, 0, self.size - 1), np.clip(before + 1, 0, self.size - 1), rest

    def nearest(self) -> Array:
        before, after, rest = self.neighbours()
        return np.where(2 * rest >= self.numerator, after, before)


def _grid(site: Site, axis: int) -> Grid:
    """Grid of height (axis 0) or width (axis 1); refused if it is not one that TOSA allows."""
    scale, offset, border = site.shapes.get(1), site.shapes.get(2), site.shapes.get(3)
    if scale is None or offset is None or border is None or (len(scale), len(offset), len(border)) != (4, 2, 2):
        raise site.refuse("scale, offset and border are not shapes of 4, 2 and 2 values")
    numerator, denominator = scale[2 * axis], scale[2 * axis + 1]
    size, out_size = operand(site, 0).shape[1 + axis], site.out_shapes[0][1 + axis]
    if not (0 < numerator <= 1 << 11 and 0 < denominator < 16 * numerator and max(size, out_size) < _LARGEST):
        raise site.refuse(f"scale {numerator}/{denominator} of {size} elements to {out_size}")
    if not -numerator <= offset[axis] < 16 * numerator or not -16 * numerator <= border[axis] < numerator:
        raise site.refuse(f"offset {offset[axis]} or border {border[axis]} outside its range")
    if (size - 1) * numerator - offset[axis] + border[axis] != (out_size - 1) * denominator:
        raise site.refuse(f"{out_size} is not the size that scale, offset and border give")
    return Grid(numerator, denominator, offset[axis], size, out_size)


def _interpolated(site: Site, value: Value, grids: tuple[Grid, Grid]) -> Value | None:
    """Bilinear FP32 by one Interpolate node, on channels-first data, if it samples this grid; else None."""
    if all(grid.offset == 0 for grid in grids):
        mode = "asymmetric"
    elif all(2 * grid.offset == grid.denominator - grid.numerator for grid in grids):
        mode = "half_pixel"
    else:
        return None
    if any(grid.size * grid.numerator // grid.denominator != grid.out_size for grid in grids):
        return None
    # The node leaves out neighbours of weight 0, which in TOSA still spoil the result if they are NaN or infinite.
    if site.builder.may_be_nan(value) and any(np.any(grid.neighbours()[2] == 0) for grid in grids):
        return None
    scales = f32([grid.numerator / grid.denominator for grid in grids])
    layout = (0, 3, 1, 2)
    node = ops.interpolate(
        widened(site.builder.to_layout(value, layout), value.dtype), scales, "linear_onnx", "scales",
        coordinate_transformation_mode=mode, axes=np.array([2, 3], np.int64),
    )  # fmt: skip
    return site.builder.value(narrowed(site, node.output(0)), value.dtype, site.out_shapes[0], layout)


def _rows(x: ov.Output, places: Array, axis: int) -> ov.Output:
    return ops.gather(x, i32(places), np.array(axis, np.int64)).output(0)


def _blended(x: ov.Output, grid: Grid, axis: int, rank: int, integer: bool) -> ov.Output:
    """Linear interpolation along one stored axis; integers times the numerator, as TOSA defines it."""
    before, after, rest = grid.neighbours()
    unit = grid.numerator
    shape = [-1 if position == axis else 1 for position in range(rank)]
    constant = i32 if integer else f32
    divisor = 1 if integer else unit
    near = ops.multiply(_rows(x, before, axis), constant(((unit - rest) / divisor).reshape(shape)))
    far = ops.multiply(_rows(x, after, axis), constant((rest / divisor).reshape(shape)))
    return ops.add(near, far).output(0)


def _blended_48(site: Site, x: ov.Output, grids: tuple[Grid, Grid], where: list[int], layout: Layout) -> Value:
    """INT16 in both directions: INT32 holds the first, the second takes its halves and makes INT48."""
    rows = _blended(x, grids[0], where[0], 4, True)
    low, high = low_bits(rows, 16), shifted_right(rows, 16)
    terms = [int48.Term(_blended(half, grids[1], where[1], 4, True), shift) for half, shift in ((low, 0), (high, 16))]
    return int48.value(site, int48.total(terms), layout)


def _resize(site: Site) -> tuple[Value, ...]:
    value = operand(site, 0)
    if len(value.shape) != 4:
        raise site.refuse("the operand does not have 4 axes")
    grids = _grid(site, 0), _grid(site, 1)
    where = [axes.stored_axis(value.layout, axis) for axis in (1, 2)]
    mode = site.attributes.get("mode")
    if mode == ResizeMode.NEAREST:
        node = value.output
        for grid, axis in zip(grids, where, strict=True):
            node = _rows(node, grid.nearest(), axis)
        return (site.builder.value(node, value.dtype, site.out_shapes[0], value.layout),)
    if mode != ResizeMode.BILINEAR:
        raise site.refuse("mode is neither NEAREST nor BILINEAR")
    if value.dtype in FLOATS:
        found = _interpolated(site, value, grids)
        if found is not None:
            return (found,)
        node = widened(value.output, value.dtype)
    else:
        node = as_i32(value.output)
    if value.dtype is DType.INT16:
        return (_blended_48(site, node, grids, where, value.layout),)
    for grid, axis in zip(grids, where, strict=True):
        node = _blended(node, grid, axis, 4, value.dtype not in FLOATS)
    output = narrowed(site, node) if value.dtype in FLOATS else node
    return (site.builder.value(output, site.out_dtypes[0], site.out_shapes[0], value.layout),)


def _checked_resize(site: Site) -> tuple[Value, ...]:
    """Integers keep their type in NEAREST and widen in BILINEAR."""
    same = site.out_dtypes[0] is operand(site, 0).dtype
    if operand(site, 0).dtype not in FLOATS and same != (site.attributes.get("mode") == ResizeMode.NEAREST):
        raise site.refuse("result type does not go with the mode")
    return _resize(site)


_TYPES = frozenset((dtype, dtype) for dtype in (*FLOATS, DType.INT8, DType.INT16))
_WIDENED = frozenset({(DType.INT8, DType.INT32), (DType.INT16, DType.INT48)})

register(
    Record(
        Op.RESIZE, _TYPES | _WIDENED, _checked_resize,
        "Interpolate, or gathers and weights worked out while lowering", False,
    ),
)  # fmt: skip
