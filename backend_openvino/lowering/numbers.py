"""TOSA element types as numpy arrays and OpenVINO constants, and the folding of what is known while lowering.

The array type of a constant is `tosa_graph.elements.CARRIER`'s: BF16 and FP8 as float32, INT4 as int8, INT48 as int64.
TOSA 1.0, section 1.8 (number formats).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from virtaccel.backend_openvino.lowering import nodes as ops
from virtaccel.backend_openvino.lowering.registry import Array
from virtaccel.tosa_graph.elements import CARRIER, pack, unpack
from virtaccel.tosa_graph.graph import DType, Op, Operator, Tensor, packed_bytes

ELEMENT_TYPES: dict[DType, ov.Type] = {
    DType.BOOL: ov.Type.boolean,
    DType.INT4: ov.Type.i4,
    DType.INT8: ov.Type.i8,
    DType.INT16: ov.Type.i16,
    DType.INT32: ov.Type.i32,
    DType.INT48: ov.Type.i16,  # three words, see int48.py
    DType.SHAPE: ov.Type.i64,
    DType.FP32: ov.Type.f32,
    DType.FP16: ov.Type.f16,
    DType.BF16: ov.Type.bf16,
    DType.FP8E4M3: ov.Type.f8e4m3,
    DType.FP8E5M2: ov.Type.f8e5m2,
}

_PACKED_ONLY = frozenset({DType.INT4, DType.BF16, DType.FP8E4M3, DType.FP8E5M2})
"""Types that numpy does not have."""


def node_shape(shape: Sequence[int], dtype: DType) -> list[int]:
    """Shape of the node that holds a tensor of this shape."""
    return [*shape, 3] if dtype is DType.INT48 else list(shape)


def constant_node(array: Array, dtype: DType) -> ov.Output:
    """A Constant that holds `array` (in its own axis order) in the element type of `dtype`."""
    if dtype is DType.INT48:
        words = np.frombuffer(pack(array, dtype), np.int16).reshape(node_shape(array.shape, dtype))
        return ops.constant(words).output(0)
    if dtype in _PACKED_ONLY:
        return packed_node(pack(array, dtype), array.shape, dtype)
    array = array.astype(CARRIER[dtype], copy=False)
    if dtype is DType.FP32:
        array = _without_subnormals(array)
    return ops.constant(array).output(0)


def packed_node(data: bytes, shape: tuple[int, ...], dtype: DType) -> ov.Output:
    """A Constant over TOSA's packed bytes: NaN payloads, too, stay what they were."""
    packed = np.frombuffer(data, np.uint8, packed_bytes(dtype, math.prod(shape)))
    if dtype in _SUBNORMAL:
        fields = _SUBNORMAL[dtype]
        packed = _with_signed_zeros(packed.view(fields.word), fields).view(np.uint8)
    tensor = ov.Tensor(packed, ov.Shape(list(shape)), ELEMENT_TYPES[dtype])
    return ov.op.Constant(tensor, shared_memory=False).output(0)


_CONVERTED_BY_NUMPY = 4096
"""Elements; beyond these the runtime's conversion is many times faster."""
_from_half = ops.convert(ops.parameter([-1], ov.Type.f16), ov.Type.f32)


def as_f32(array: Array) -> NDArray[np.float32]:
    """The array as FP32; itself if it is."""
    if array.dtype != np.float16 or array.size < _CONVERTED_BY_NUMPY:
        return array.astype(np.float32, copy=False)
    wide = np.empty(array.size, np.float32)
    half = ov.Tensor(np.ascontiguousarray(array).reshape(-1).view(np.uint8), ov.Shape([array.size]), ov.Type.f16)
    done = _from_half.evaluate([ov.Tensor(wide, shared_memory=True)], [half])
    if not done or not np.isfinite(wide).all():  # it makes signalling NaNs quiet
        return array.astype(np.float32)
    return wide.reshape(array.shape)


class _Fields(NamedTuple):
    """Bits of a number: all of it, those of the smallest normal one, its sign."""

    word: np.dtype[Any]
    smallest_normal: int
    sign: int


_SUBNORMAL = {
    DType.FP32: _Fields(np.dtype("<u4"), 0x0080_0000, 0x8000_0000),
    DType.BF16: _Fields(np.dtype("<u2"), 0x0080, 0x8000),
}


def _with_signed_zeros(words: NDArray[Any], fields: _Fields) -> NDArray[Any]:
    """Subnormal numbers as zeros of their sign, which the standard's own checks allow. The runtime flushes them anyway,
    but makes every -0 of such a constant a 0."""
    # Less one, subnormal numbers are below the smallest normal one's bits, and zeros are above all.
    sizes = words & (fields.sign - 1)
    sizes -= 1
    if not (sizes < fields.smallest_normal - 1).any():
        return words
    return np.where(sizes + 1 < fields.smallest_normal, words & fields.sign, words).astype(fields.word)


def _without_subnormals(array: NDArray[np.float32]) -> NDArray[np.float32]:
    fields = _SUBNORMAL[DType.FP32]
    words = np.ascontiguousarray(array).reshape(-1).view(fields.word)
    return _with_signed_zeros(words, fields).view(np.float32).reshape(array.shape)


# ---- folding

_FLOATS = frozenset({DType.FP32, DType.FP16, DType.BF16, DType.FP8E4M3, DType.FP8E5M2})
_WIDER: dict[DType, int] = {DType.INT4: 4, DType.INT8: 8, DType.INT16: 16, DType.INT32: 32, DType.INT48: 48}


def _fold_cast(operator: Operator, array: Array, source: DType, result: Tensor) -> Array | None:
    """Casts that take no room: an integer to a wider one, floating point to any other."""
    target = result.dtype
    if target is DType.FP32 and source in _FLOATS:
        return as_f32(array)
    if target in _WIDER and source in _WIDER and _WIDER[target] >= _WIDER[source]:
        return array.astype(CARRIER[target])
    if source in _FLOATS and target in _FLOATS:
        with np.errstate(over="ignore", invalid="ignore"):
            return unpack(pack(array, target), target, array.shape)
    return None


def _fold_reshape(operator: Operator, array: Array, source: DType, result: Tensor) -> Array | None:
    return array.reshape(result.shape) if math.prod(result.shape) == array.size else None


def _fold_transpose(operator: Operator, array: Array, source: DType, result: Tensor) -> Array | None:
    perms = operator.attributes.get("perms")
    return np.transpose(array, perms) if isinstance(perms, tuple) else None


FOLDS: dict[Op, Callable[[Operator, Array, DType, Tensor], Array | None]] = {
    Op.CAST: _fold_cast,
    Op.RESHAPE: _fold_reshape,
    Op.TRANSPOSE: _fold_transpose,
}
"""An operator's result, from a constant and its type, if it is known now, exactly and at no cost in size."""
