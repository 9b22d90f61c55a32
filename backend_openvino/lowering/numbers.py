"""TOSA element types as numpy arrays and OpenVINO constants, and the folding of what is known while lowering.

Array type of a constant by TOSA type: BOOL bool, INT4 and INT8 int8, INT16 int16, INT32 int32, INT48 and SHAPE int64,
FP32 float32, FP16 float16, BF16 and both FP8 float32 holding the exact values. TOSA 1.0, section 1.10 (number formats).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from virtaccel.backend_openvino.lowering.registry import Array, Site
from virtaccel.tosa_graph.graph import DType, Op, TosaError

ELEMENT_TYPES: dict[DType, ov.Type] = {
    DType.BOOL: ov.Type.boolean,
    DType.INT4: ov.Type.i4,
    DType.INT8: ov.Type.i8,
    DType.INT16: ov.Type.i16,
    DType.INT32: ov.Type.i32,
    DType.INT48: ov.Type.i64,
    DType.SHAPE: ov.Type.i64,
    DType.FP32: ov.Type.f32,
    DType.FP16: ov.Type.f16,
    DType.BF16: ov.Type.bf16,
    DType.FP8E4M3: ov.Type.f8e4m3,
    DType.FP8E5M2: ov.Type.f8e5m2,
}

_PLAIN: dict[DType, str] = {
    DType.BOOL: "?", DType.INT8: "<i1", DType.INT16: "<i2", DType.INT32: "<i4", DType.SHAPE: "<i8",
    DType.FP32: "<f4", DType.FP16: "<f2",
}  # fmt: skip


def _fp8_values(exponent_bits: int, has_infinity: bool) -> Array:
    """All 256 values of an OCP FP8 format as float32: E5M2 keeps infinities, E4M3 has only NaN at the top."""
    mantissa_bits = 7 - exponent_bits
    bias = (1 << (exponent_bits - 1)) - 1
    values = np.zeros(256, np.float32)
    for code in range(128):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        scale = 2.0 ** (max(exponent, 1) - bias - mantissa_bits)
        value = scale * (mantissa + ((1 << mantissa_bits) if exponent else 0))
        if has_infinity and exponent == (1 << exponent_bits) - 1:
            value = math.nan if mantissa else math.inf
        elif not has_infinity and code == 127:
            value = math.nan
        values[code], values[code | 128] = value, -value
    return values


_FP8: dict[DType, Array] = {
    DType.FP8E4M3: _fp8_values(4, has_infinity=False),
    DType.FP8E5M2: _fp8_values(5, has_infinity=True),
}


def packed_bytes(shape: tuple[int, ...], dtype: DType) -> int:
    """Bytes of a tensor in TOSA's packed form."""
    count = math.prod(shape)
    if dtype is DType.INT4:
        return (count + 1) // 2
    if dtype is DType.INT48:
        return count * 6
    if dtype in (DType.BF16, DType.FP8E4M3, DType.FP8E5M2):
        return count * (2 if dtype is DType.BF16 else 1)
    return count * np.dtype(_PLAIN[dtype]).itemsize


def unpack(data: bytes, shape: tuple[int, ...], dtype: DType) -> Array:
    """Packed little-endian bytes as an array of `shape`. Raises TosaError if they do not fit."""
    if dtype not in ELEMENT_TYPES:
        raise TosaError(f"a constant cannot have type {dtype.name}")
    if len(data) < packed_bytes(shape, dtype):
        raise TosaError(f"constant of shape {shape} and type {dtype.name} has {len(data)} bytes")
    raw = np.frombuffer(data, np.uint8, packed_bytes(shape, dtype))
    count = math.prod(shape)
    flat: Array
    if dtype is DType.INT4:
        nibbles = np.stack([raw & 15, raw >> 4], axis=1).reshape(-1)[:count]
        flat = ((nibbles ^ 8).astype(np.int8) - np.int8(8)).astype(np.int8)
    elif dtype is DType.INT48:
        wide = np.zeros((count, 8), np.uint8)
        wide[:, :6] = raw.reshape(count, 6)
        flat = (wide.view("<i8").reshape(count) << 16) >> 16
    elif dtype is DType.BF16:
        flat = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    elif dtype in _FP8:
        flat = _FP8[dtype][raw]
    elif dtype is DType.BOOL:
        flat = raw != 0
    else:
        flat = raw.view(_PLAIN[dtype])
    return flat.reshape(shape)


def pack(array: Array, dtype: DType) -> bytes:
    """Packed little-endian bytes of a constant: the inverse of `unpack`."""
    if dtype is DType.INT4:
        nibbles = array.reshape(-1).view(np.uint8) & 15
        nibbles = np.append(nibbles, np.zeros(nibbles.size % 2, np.uint8)).reshape(-1, 2)
        return (nibbles[:, 0] | (nibbles[:, 1] << 4)).astype(np.uint8).tobytes()
    if dtype is DType.INT48:
        wide = np.ascontiguousarray(array.reshape(-1).astype("<i8"))
        return wide.view(np.uint8).reshape(-1, 8)[:, :6].tobytes()
    if dtype is DType.BF16:
        bits = np.ascontiguousarray(array.reshape(-1), np.float32).view(np.uint32)
        return (bits >> 16).astype("<u2").tobytes()
    if dtype in _FP8:
        return _pack_fp8(array, dtype)
    return array.astype(_PLAIN[dtype], copy=False).tobytes()


def _pack_fp8(array: Array, dtype: DType) -> bytes:
    flat = np.ascontiguousarray(array.reshape(-1), np.float32)
    magnitudes = _FP8[dtype][:128]
    ordered = np.where(np.isnan(magnitudes), np.inf, magnitudes)
    codes = np.searchsorted(ordered, np.abs(flat)).astype(np.uint8)
    codes[np.isnan(flat)] = 127
    codes |= np.where(np.signbit(flat), 128, 0).astype(np.uint8)
    return codes.tobytes()


def constant_node(array: Array, dtype: DType) -> ov.Output:
    """A Constant that holds `array` (in its own axis order) in the element type of `dtype`."""
    element = ELEMENT_TYPES[dtype]
    if dtype in _PLAIN or dtype is DType.INT48:
        return ops.constant(np.ascontiguousarray(array).reshape(array.shape), element).output(0)
    return packed_node(pack(array, dtype), array.shape, dtype)


def packed_node(data: bytes, shape: tuple[int, ...], dtype: DType) -> ov.Output:
    """A Constant over TOSA's packed bytes: NaN payloads, too, stay what they were."""
    packed = np.frombuffer(data, np.uint8, packed_bytes(shape, dtype))
    tensor = ov.Tensor(packed, ov.Shape(list(shape)), ELEMENT_TYPES[dtype])
    return ov.op.Constant(tensor, shared_memory=False).output(0)


# ---- folding

_FLOATS = frozenset({DType.FP32, DType.FP16, DType.BF16, DType.FP8E4M3, DType.FP8E5M2})
_WIDER: dict[DType, int] = {DType.INT4: 4, DType.INT8: 8, DType.INT16: 16, DType.INT32: 32, DType.INT48: 48}
_ARRAY_TYPES: dict[DType, str] = {
    DType.INT8: "i1", DType.INT16: "i2", DType.INT32: "i4", DType.FP32: "f4",
}  # fmt: skip


def _fold_cast(site: Site, array: Array) -> Array | None:
    """Only casts that lose nothing: any float to FP32, an integer to a wider one."""
    source, target = site.inputs[0].dtype if site.inputs[0] else DType.UNKNOWN, site.out_dtypes[0]
    widens = target in _WIDER and source in _WIDER and _WIDER[target] >= _WIDER[source]
    if target in _ARRAY_TYPES and ((source in _FLOATS and target is DType.FP32) or widens):
        return array.astype(_ARRAY_TYPES[target])
    return None


def _fold_reshape(site: Site, array: Array) -> Array | None:
    return array.reshape(site.out_shapes[0]) if math.prod(site.out_shapes[0]) == array.size else None


def _fold_transpose(site: Site, array: Array) -> Array | None:
    perms = site.attributes.get("perms")
    return np.transpose(array, perms) if isinstance(perms, tuple) else None


_FOLDS: dict[Op, Callable[[Site, Array], Array | None]] = {
    Op.CAST: _fold_cast,
    Op.RESHAPE: _fold_reshape,
    Op.TRANSPOSE: _fold_transpose,
}


def fold(site: Site) -> Array | None:
    """The operator's result if it is known now, exactly and at no cost in size; None otherwise."""
    rule = _FOLDS.get(site.operator.op)
    operand = site.inputs[0] if site.inputs else None
    if rule is None or operand is None or operand.constant is None:
        return None
    return rule(site, operand.constant)
