"""Element types between numpy arrays and TOSA's packed bytes (section 1.8 of the TOSA specification, number formats).

Packed form, little-endian: BOOL one byte, INT4 two elements a byte with the low nibble first, INT48 six bytes, SHAPE
eight, the rest as wide as their name. numpy has no INT4, INT48, BF16 or FP8: here they are int8, int64 and float32,
which hold every value of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from virtaccel.tosa_graph.graph import DType, packed_bytes

Array: TypeAlias = NDArray[Any]

CARRIER: Final[dict[DType, np.dtype[Any]]] = {
    DType.BOOL: np.dtype(np.bool_),
    DType.INT4: np.dtype(np.int8),
    DType.INT8: np.dtype(np.int8),
    DType.INT16: np.dtype("<i2"),
    DType.INT32: np.dtype("<i4"),
    DType.INT48: np.dtype("<i8"),
    DType.FP32: np.dtype("<f4"),
    DType.FP16: np.dtype("<f2"),
    DType.BF16: np.dtype("<f4"),
    DType.SHAPE: np.dtype("<i8"),
    DType.FP8E4M3: np.dtype("<f4"),
    DType.FP8E5M2: np.dtype("<f4"),
}
"""The numpy type that holds an element type's values."""

NATURAL: Final[dict[str, DType]] = {
    "bool": DType.BOOL,
    "int8": DType.INT8,
    "int16": DType.INT16,
    "int32": DType.INT32,
    "float32": DType.FP32,
    "float16": DType.FP16,
}
"""The element type that a numpy type stands for when nothing else is said."""


def _decode_table(exponent_bits: int, mantissa_bits: int) -> Array:
    """Values of the 128 nonnegative codes, the codes above the largest number continuing the same spacing."""
    codes = np.arange(128)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    fraction = mantissa / (1 << mantissa_bits)
    return np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))


_MAGNITUDES: Final = {
    DType.FP8E4M3: _decode_table(4, 3),
    DType.FP8E5M2: _decode_table(5, 2),
}
_OVERFLOW: Final = {DType.FP8E4M3: 0x7F, DType.FP8E5M2: 0x7C}
"""First code past the largest number: NaN for E4M3, which has no infinity, infinity for E5M2."""


def _fp8_encode(values: Array, dtype: DType) -> NDArray[np.uint8]:
    """Round to nearest, ties to even; past the largest number NaN (E4M3) or infinity (E5M2)."""
    overflow = _OVERFLOW[dtype]
    magnitudes = _MAGNITUDES[dtype][: overflow + 1]
    middles = (magnitudes[:-1] + magnitudes[1:]) / 2
    wide = np.abs(values.astype(np.float64))
    nan = np.isnan(wide)
    wide[nan] = 0
    codes = np.searchsorted(middles, wide, side="left")
    tie = middles[np.minimum(codes, overflow - 1)] == wide
    codes = codes + (tie & (codes % 2 == 1))
    codes[nan] = 0x7F
    signed: NDArray[np.uint8] = (codes | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)
    return signed


def _fp8_decode(codes: NDArray[np.uint8], dtype: DType) -> NDArray[np.float32]:
    table = _MAGNITUDES[dtype].astype(np.float32)
    table[_OVERFLOW[dtype] :] = np.nan
    if dtype == DType.FP8E5M2:
        table[0x7C] = np.inf
    magnitudes = table[codes & 0x7F]
    return np.where(codes & 0x80, -magnitudes, magnitudes).astype(np.float32)


def _bf16_encode(values: Array) -> NDArray[np.uint16]:
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype("<u2")


def _nibbles(values: Array) -> bytes:
    flat = values.astype(np.int8).reshape(-1).view(np.uint8) & 0x0F
    padded = np.zeros((flat.size + 1) // 2 * 2, np.uint8)
    padded[: flat.size] = flat
    return (padded[0::2] | (padded[1::2] << 4)).tobytes()


def pack(array: Array, dtype: DType) -> bytes:
    """An array's elements in packed form.

    Floating values for BF16 and FP8 are rounded to nearest even; unsigned arrays for BF16 (uint16) and FP8 (uint8) are
    taken as bit patterns. Integers must be in range: out of range ones wrap.
    """
    array = np.ascontiguousarray(array)
    if dtype == DType.INT4:
        return _nibbles(array)
    if dtype == DType.INT48:
        return array.astype("<i8").reshape(-1, 1).view(np.uint8)[:, :6].tobytes()
    if array.dtype.kind == "u" and dtype in (DType.BF16, DType.FP8E4M3, DType.FP8E5M2):
        return array.astype("<u2" if dtype == DType.BF16 else np.uint8).tobytes()
    if dtype == DType.BF16:
        return _bf16_encode(array).tobytes()
    if dtype in _MAGNITUDES:
        return _fp8_encode(array, dtype).tobytes()
    return array.astype(CARRIER[dtype], copy=False).tobytes()


def unpack(data: bytes | memoryview, dtype: DType, shape: Sequence[int]) -> Array:
    """The array (`CARRIER[dtype]`) of `shape` held by packed bytes; shares memory with `data` where it can.

    Raises ValueError if the byte count is not the shape's.
    """
    count = math.prod(shape)
    if len(data) != packed_bytes(dtype, count):
        raise ValueError(f"{len(data)} bytes for {count} elements of {dtype.name}")
    if dtype == DType.INT4:
        pairs = np.frombuffer(data, np.int8)
        low, high = (pairs << 4) >> 4, pairs >> 4
        return np.asarray(np.stack([low, high], axis=-1).reshape(-1)[:count].reshape(shape), np.int8)
    if dtype == DType.INT48:
        wide = np.zeros((count, 8), np.uint8)
        wide[:, :6] = np.frombuffer(data, np.uint8).reshape(count, 6)
        wide[:, 6:] = np.where(wide[:, 5:6] & 0x80, 0xFF, 0)
        return np.frombuffer(wide.tobytes(), "<i8").reshape(shape)
    if dtype == DType.BF16:
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    if dtype in _MAGNITUDES:
        return _fp8_decode(np.frombuffer(data, np.uint8), dtype).reshape(shape)
    if dtype == DType.BOOL:
        return np.asarray(np.frombuffer(data, np.uint8).reshape(shape) != 0, np.bool_)
    return np.frombuffer(data, CARRIER[dtype]).reshape(shape)
