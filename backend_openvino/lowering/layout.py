"""Axis orders, as pure arithmetic on tuples: no nodes, no openvino.

A layout tells which TOSA axis lies at each stored axis: `layout[i]` is the TOSA axis stored at position i. NHWC data
kept as NCHW has layout (0, 3, 1, 2). A TOSA TRANSPOSE is therefore a change of layout and moves no data by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from virtaccel.backend_openvino.lowering.registry import Layout

NCHW: Layout = (0, 3, 1, 2)
NCDHW: Layout = (0, 4, 1, 2, 3)


def identity(rank: int) -> Layout:
    """TOSA's own order."""
    return tuple(range(rank))


def stored(shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """Shape in memory of a tensor of TOSA shape `shape`."""
    return tuple(shape[axis] for axis in layout)


def permutation(source: Layout, target: Layout) -> tuple[int, ...]:
    """Order for a Transpose node that turns data stored as `source` into data stored as `target`."""
    position = {axis: index for index, axis in enumerate(source)}
    return tuple(position[axis] for axis in target)


def same_memory(shape: Sequence[int], source: Layout, target: Layout) -> bool:
    """True if going from one layout to the other moves no element: only axes of size 1 change places."""
    return [axis for axis in source if shape[axis] != 1] == [axis for axis in target if shape[axis] != 1]


def transposed(layout: Layout, perms: Sequence[int]) -> Layout:
    """Layout of the result of TOSA TRANSPOSE, whose axis i is the operand's axis perms[i], over the same memory."""
    result_axis = {axis: index for index, axis in enumerate(perms)}
    return tuple(result_axis[axis] for axis in layout)


def stored_axis(layout: Layout, axis: int) -> int:
    """Where TOSA axis `axis` is stored."""
    return layout.index(axis)
