#!/usr/bin/env python3
"""Trains the example network on scikit-learn's bundled 8x8 digits and writes it as a TOSA graph.

Run by hand from anywhere (development dependencies needed); takes some seconds and gives the same network each time on
the same machine. Training is plain numpy: two 3x3 convolutions with rectifier and 2x2 maximum, then one dense layer.
Writes beside this file:

    digits.tosa       the graph: image (1, 8, 8, 1) FP32 of 0..16 -> probabilities (1, 10) FP32, label (1,) INT32
    digits.io.npz     the 360 held-back images, one step each, with the answers of Arm's TOSA reference model
    held_back.npz     the same images (uint8) and their true labels, for the demonstration
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.write import GraphWriter

HERE = Path(__file__).resolve().parent
HELD_BACK = 360
SEED = 1797
EPOCHS = 60
BATCH = 32
LEARNING_RATE = 2e-3
NOISE = 0.08
BRIGHTEST = 16.0
CHANNELS = (24, 48)
CLASSES = 10

Array = NDArray[np.float32]


class Weights(NamedTuple):
    """Convolutions as (3, 3, in, out), the dense layer as (in, out), biases as (out,)."""

    conv1: Array
    bias1: Array
    conv2: Array
    bias2: Array
    dense: Array
    bias3: Array


def initial(rng: np.random.Generator) -> Weights:
    """He's initialisation."""

    def normal(*shape: int) -> Array:
        scale = float(np.sqrt(2 / np.prod(shape[:-1])))
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    first, second = CHANNELS
    zeros = [np.zeros(n, np.float32) for n in (first, second, CLASSES)]
    return Weights(
        normal(3, 3, 1, first), zeros[0], normal(3, 3, first, second), zeros[1], normal(4 * second, CLASSES), zeros[2]
    )


def patches(x: Array) -> Array:
    """(n, h, w, c) -> (n, h, w, 3, 3, c): each pixel's neighbourhood, zeros outside."""
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    n, h, w, c = x.shape
    strides = padded.strides
    return np.lib.stride_tricks.as_strided(
        padded, (n, h, w, 3, 3, c), (*strides[:3], *strides[1:3], strides[3]), writeable=False
    )


def convolve(x: Array, weights: Array, bias: Array) -> tuple[Array, Array]:
    columns = patches(x).reshape(-1, weights.size // weights.shape[-1])
    return (columns @ weights.reshape(-1, weights.shape[-1]) + bias).reshape(*x.shape[:3], -1), columns


def convolve_back(grad: Array, columns: Array, weights: Array) -> tuple[Array, Array, Array]:
    """Gradients of weights, bias and input: the last is a convolution with the kernel turned around."""
    flat = grad.reshape(-1, grad.shape[-1])
    turned = weights[::-1, ::-1].transpose(0, 1, 3, 2)
    back, _ = convolve(grad, np.ascontiguousarray(turned), np.zeros(turned.shape[-1], np.float32))
    return (columns.T @ flat).reshape(weights.shape), flat.sum(0), back


def pool(x: Array) -> tuple[Array, NDArray[np.bool_]]:
    """2x2 maximum, and where each maximum came from."""
    n, h, w, c = x.shape
    windows = x.reshape(n, h // 2, 2, w // 2, 2, c)
    top = windows.max((2, 4), keepdims=True)
    return top[:, :, 0, :, 0], windows == top


def pool_back(grad: Array, chosen: NDArray[np.bool_]) -> Array:
    n, h, _, w, _, c = chosen.shape
    return (grad[:, :, None, :, None] * chosen).reshape(n, 2 * h, 2 * w, c).astype(np.float32)


def gradients(weights: Weights, x: Array, labels: NDArray[np.intp]) -> Weights:
    """Gradient of the mean cross entropy over one batch."""
    y1, columns1 = convolve(x, weights.conv1, weights.bias1)
    p1, chosen1 = pool(np.maximum(y1, 0))
    y2, columns2 = convolve(p1, weights.conv2, weights.bias2)
    p2, chosen2 = pool(np.maximum(y2, 0))
    flat = p2.reshape(len(x), -1)
    logits = flat @ weights.dense + weights.bias3
    odds = np.exp(logits - logits.max(1, keepdims=True))
    d_logits = odds / odds.sum(1, keepdims=True)
    d_logits[np.arange(len(x)), labels] -= 1
    d_logits /= len(x)
    d_p2 = (d_logits @ weights.dense.T).reshape(p2.shape)
    d_conv2, d_bias2, d_p1 = convolve_back(pool_back(d_p2, chosen2) * (y2 > 0), columns2, weights.conv2)
    d_conv1, d_bias1, _ = convolve_back(pool_back(d_p1, chosen1) * (y1 > 0), columns1, weights.conv1)
    return Weights(d_conv1, d_bias1, d_conv2, d_bias2, flat.T @ d_logits, d_logits.sum(0))


def batches(rng: np.random.Generator, x: Array, y: NDArray[np.intp]) -> Iterator[tuple[Array, NDArray[np.intp]]]:
    """Shuffled batches; half of the images are moved by up to a pixel, all get a little noise. (Settings were chosen by
    four-fold cross-validation on the training images alone.)"""
    order = rng.permutation(len(x))
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    for start in range(0, len(x), BATCH):
        chosen = order[start : start + BATCH]
        moves = np.where(rng.random((len(chosen), 1)) < 0.5, 1, rng.integers(0, 3, (len(chosen), 2)))
        images = np.stack([padded[i, r : r + 8, c : c + 8] for i, (r, c) in zip(chosen, moves, strict=True)])
        noisy = np.clip(images + rng.normal(0, NOISE, images.shape), 0, 1)
        yield noisy.astype(np.float32), y[chosen]


def train(x: Array, labels: NDArray[np.intp], rng: np.random.Generator) -> Weights:
    """Adam with a cosine schedule."""
    weights = initial(rng)
    mean = [np.zeros_like(w) for w in weights]
    square = [np.zeros_like(w) for w in weights]
    step, total = 0, EPOCHS * -(-len(x) // BATCH)
    for _ in range(EPOCHS):
        for images, wanted in batches(rng, x, labels):
            step += 1
            rate = LEARNING_RATE * 0.5 * (1 + np.cos(np.pi * step / total))
            rate *= np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            for w, g, m, v in zip(weights, gradients(weights, images, wanted), mean, square, strict=True):
                m += 0.1 * (g - m)
                v += 0.001 * (g * g - v)
                w -= (rate * m / (np.sqrt(v) + 1e-8)).astype(np.float32)
    return weights


def graph(weights: Weights) -> bytes:
    """The network in TOSA: NHWC convolutions, softmax spelled out, and the label by ARGMAX."""
    writer = GraphWriter()
    f32 = DType.FP32
    zero = writer.constant(np.zeros(1, np.float32), name="zero")
    x = writer.input("image", (1, 8, 8, 1), f32)
    size = 8
    # Pixels arrive as 0..16; the first kernel takes the division by 16 with it.
    for kernel, bias in ((weights.conv1 / np.float32(BRIGHTEST), weights.bias1), (weights.conv2, weights.bias2)):
        channels = kernel.shape[-1]
        operands = [x, writer.constant(kernel.transpose(3, 0, 1, 2)), writer.constant(bias), zero, zero]
        x = writer.operator(
            Op.CONV2D,
            operands,
            ((1, size, size, channels), f32),
            {"pad": (1, 1, 1, 1), "stride": (1, 1), "dilation": (1, 1), "acc_type": int(f32)},
        )
        bounds = {"min_val": np.float32(0), "max_val": np.float32(np.finfo(np.float32).max)}
        x = writer.operator(Op.CLAMP, [x], ((1, size, size, channels), f32), bounds)
        size //= 2
        x = writer.operator(
            Op.MAX_POOL2D,
            [x],
            ((1, size, size, channels), f32),
            {"kernel": (2, 2), "stride": (2, 2), "pad": (0, 0, 0, 0)},
        )
    flat = (1, 1, weights.dense.shape[0])
    x = writer.operator(Op.RESHAPE, [x, writer.const_shape(flat)], (flat, f32))
    x = writer.operator(
        Op.MATMUL, [x, writer.constant(weights.dense[None]), zero, zero], ((1, 1, CLASSES), f32)
    )
    x = writer.operator(Op.ADD, [x, writer.constant(weights.bias3[None, None])], ((1, 1, CLASSES), f32))
    logits = writer.operator(Op.RESHAPE, [x, writer.const_shape((1, CLASSES))], ((1, CLASSES), f32))
    top = writer.operator(Op.REDUCE_MAX, [logits], ((1, 1), f32), {"axis": 1})
    odds = writer.operator(Op.EXP, [writer.operator(Op.SUB, [logits, top], ((1, CLASSES), f32))], ((1, CLASSES), f32))
    total = writer.operator(Op.REDUCE_SUM, [odds], ((1, 1), f32), {"axis": 1})
    share = writer.operator(Op.RECIPROCAL, [total], ((1, 1), f32))
    shift = writer.constant(np.zeros(1, np.int8))
    writer.tensor("probabilities", (1, CLASSES), f32)
    writer.place(Op.MUL, [odds, share, shift], ["probabilities"])
    writer.tensor("label", (1,), DType.INT32)
    writer.place(Op.ARGMAX, [logits], ["label"], {"axis": 1})
    writer.output("probabilities", "label")
    return writer.to_bytes()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The reference model warns about the file's version on every run, from native code and its own buffers."""
    native = ctypes.CDLL(None)
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    with open(os.devnull, "wb") as nowhere:
        for descriptor in (1, 2):
            os.dup2(nowhere.fileno(), descriptor)
    try:
        yield
    finally:
        native.fflush(None)
        for descriptor, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)


def reference_answers(tosa: bytes, images: Array) -> tuple[Array, NDArray[np.int32]]:
    """What Arm's reference model says of each image: probabilities (n, 1, 10) and labels (n, 1)."""
    import tosa_reference_model

    probabilities, labels = [], []
    for image in images:
        with quiet():
            outputs, status = tosa_reference_model.run(tosa, [image])
        if status != tosa_reference_model.GraphStatus.TOSA_VALID:
            raise SystemExit(f"the reference model says {status}")
        probabilities.append(np.asarray(outputs[0]).view(np.float32).reshape(1, CLASSES))
        labels.append(np.asarray(outputs[1]).view(np.int32).reshape(1))
    return np.stack(probabilities), np.stack(labels)


def main() -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    rng = np.random.default_rng(SEED)
    order = rng.permutation(len(digits.images))
    held, rest = order[:HELD_BACK], order[HELD_BACK:]
    images = digits.images.astype(np.float32)[..., None]
    weights = train(images[rest] / np.float32(BRIGHTEST), digits.target[rest], rng)
    tosa = graph(weights)
    inputs = images[held][:, None]
    probabilities, labels = reference_answers(tosa, inputs)
    right = int((labels[:, 0] == digits.target[held]).sum())
    (HERE / "digits.tosa").write_bytes(tosa)
    np.savez_compressed(HERE / "digits.io.npz", in_0=inputs, out_0=probabilities, out_1=labels)
    np.savez_compressed(
        HERE / "held_back.npz", images=digits.images[held].astype(np.uint8), labels=digits.target[held].astype(np.uint8)
    )
    print(f"{right} of {HELD_BACK} held-back images right ({right / HELD_BACK:.1%}); graph of {len(tosa)} bytes")


if __name__ == "__main__":
    main()
