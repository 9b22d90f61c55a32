"""FFT2D and RFFT2D against float64 (numpy), within the bound of a dot product, and against Arm's reference model."""

from __future__ import annotations

import graphs
import lowered
import numpy as np
import oracle
import pytest

from virtaccel.tosa_graph.graph import DType, Op

SHAPES = [(1, 1, 1), (2, 1, 2), (2, 4, 8), (1, 32, 16), (1, 1, 256), (3, 512, 2), (1, 256, 512)]


def bound(shape: tuple[int, ...], magnitudes: np.ndarray) -> float:
    """An eighth of what TOSA allows a dot product over all elements, if every cosine and sine were 1."""
    size = shape[1] * shape[2]
    return 2 * size * float(magnitudes.sum(axis=(1, 2)).max()) * 2.0**-24 / 8


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_fft2d(shape: tuple[int, ...], inverse: bool) -> None:
    rng = np.random.default_rng(1)
    real, imaginary = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    spec = (shape, DType.FP32)
    tosa = graphs.single(Op.FFT2D, [spec, spec], [spec, spec], {"inverse": inverse})
    got = lowered.run(tosa, [real, imaginary])
    x = real.astype(np.float64) + 1j * imaginary.astype(np.float64)
    want = np.fft.ifft2(x) * (shape[1] * shape[2]) if inverse else np.fft.fft2(x)
    error = np.abs(got[0] + 1j * got[1].astype(np.float64) - want).max()
    assert error <= max(bound(shape, np.abs(real) + np.abs(imaginary)), 1e-30) or error < 1e-6
    if real.size < 1000:
        for mine, theirs in zip(got, oracle.reference(tosa, [real, imaginary]), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_rfft2d(shape: tuple[int, ...]) -> None:
    real = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    result = ((shape[0], shape[1], shape[2] // 2 + 1), DType.FP32)
    tosa = graphs.single(Op.RFFT2D, [(shape, DType.FP32)], [result, result])
    got = lowered.run(tosa, [real])
    want = np.fft.fft2(real.astype(np.float64))[:, :, : shape[2] // 2 + 1]
    error = np.abs(got[0] + 1j * got[1].astype(np.float64) - want).max()
    assert error <= bound(shape, np.abs(real)) or error < 1e-6
    mirrored = got[1][:, :: max(shape[1] // 2, 1), :: max(shape[2] // 2, 1)]
    assert not mirrored.any()
    if real.size < 1000:
        for mine, theirs in zip(got, oracle.reference(tosa, [real]), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-3)


def test_a_single_number_turns_exactly_by_quarters() -> None:
    """exp(-i pi/2 n) of one element: only 1, -1, i and -i, and zeros that are zeros."""
    spec = ((1, 4, 4), DType.FP32)
    real, imaginary = np.zeros((1, 4, 4), np.float32), np.zeros((1, 4, 4), np.float32)
    real[0, 1, 1] = 3.0
    got = lowered.run(graphs.single(Op.FFT2D, [spec, spec], [spec, spec], {"inverse": False}), [real, imaginary])
    turns = np.add.outer(np.arange(4), np.arange(4)) % 4
    np.testing.assert_array_equal(got[0][0], 3 * np.array([1, 0, -1, 0])[turns])
    np.testing.assert_array_equal(got[1][0], 3 * np.array([0, -1, 0, 1])[turns])
