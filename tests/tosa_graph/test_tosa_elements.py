"""Element types between numpy and packed bytes; ml_dtypes decides what BF16 and FP8 values are."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from virtaccel.tosa_graph.elements import CARRIER, pack, unpack
from virtaccel.tosa_graph.graph import DType, packed_bytes

NARROW = {
    DType.FP8E4M3: (ml_dtypes.float8_e4m3fn, np.uint8),
    DType.FP8E5M2: (ml_dtypes.float8_e5m2, np.uint8),
    DType.BF16: (ml_dtypes.bfloat16, np.uint16),
}


@pytest.mark.parametrize("dtype", NARROW, ids=lambda dtype: dtype.name)
def test_every_code_decodes(dtype: DType) -> None:
    narrow, bits = NARROW[dtype]
    codes = np.arange(np.iinfo(bits).max + 1).astype(bits)
    expected = codes.view(narrow).astype(np.float32)
    assert np.array_equal(unpack(codes.tobytes(), dtype, codes.shape), expected, equal_nan=True)
    assert pack(codes, dtype) == codes.tobytes()  # unsigned arrays are bit patterns


@pytest.mark.parametrize("dtype", NARROW, ids=lambda dtype: dtype.name)
def test_values_round_to_nearest_even(dtype: DType) -> None:
    narrow, bits = NARROW[dtype]
    random = np.random.default_rng(1)
    spread = np.concatenate([random.standard_normal(5000) * 10.0**power for power in range(-8, 8)])
    edges = [0.0, -0.0, np.inf, -np.inf, 448, 464, 465, 57344, 61439, 61440, -61440, 2**-9, 2**-10, 3 * 2**-11]
    values = np.concatenate([spread, edges]).astype(np.float32)
    expected = values.astype(narrow).view(bits)
    packed = np.frombuffer(pack(values, dtype), bits)
    nan = np.isnan(values.astype(narrow).astype(np.float32))
    assert np.array_equal(packed[~nan], expected[~nan])
    assert np.isnan(unpack(packed[nan].tobytes(), dtype, packed[nan].shape)).all()
    assert np.isnan(unpack(pack(np.array([np.nan, -np.nan], np.float32), dtype), dtype, (2,))).all()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8])
def test_int4_low_nibble_first(count: int) -> None:
    values = np.array([index % 15 - 7 for index in range(count)], np.int8)
    data = pack(values, DType.INT4)
    assert len(data) == packed_bytes(DType.INT4, count) == (count + 1) // 2
    assert [byte & 15 for byte in data] == [int(value) & 15 for value in values[0::2]]
    assert unpack(data, DType.INT4, (count,)).tolist() == values.tolist()


def test_int48_is_six_bytes() -> None:
    values = np.array([0, 1, -1, 2**47 - 1, -(2**47), 2**40 + 5])
    data = pack(values, DType.INT48)
    assert data == b"".join(int(value).to_bytes(6, "little", signed=True) for value in values)
    assert unpack(data, DType.INT48, (2, 3)).tolist() == values.reshape(2, 3).tolist()


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype not in (DType.UNKNOWN,)], ids=lambda d: d.name)
def test_small_integers_survive(dtype: DType) -> None:
    values = np.array([[0, 1, 1], [1, 0, 1]]).astype(CARRIER[dtype])
    data = pack(values, dtype)
    assert len(data) == packed_bytes(dtype, 6)
    back = unpack(data, dtype, (2, 3))
    assert back.dtype == CARRIER[dtype]
    assert np.array_equal(back, values)
    with pytest.raises(ValueError, match="elements"):
        unpack(data, dtype, (2, 4))


def test_rank_0() -> None:
    assert unpack(pack(np.float32(3), DType.FP32), DType.FP32, ()).shape == ()
