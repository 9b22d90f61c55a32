"""Mutated files: never anything but a graph or TosaError, from reader, validation and specialisation."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import numpy as np
import pytest
from graphs import Const, Dims, single
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import DType, Op, TosaError
from virtaccel.tosa_graph.specialise import specialise
from virtaccel.tosa_graph.validate import required, validate
from virtaccel.tosa_graph.write import GraphWriter

ZERO8 = Const(np.zeros(1, np.int8))


def loop() -> bytes:
    writer = GraphWriter()
    x = writer.input("x", (2, 3), DType.FP32)
    go = writer.input("go", (1,), DType.BOOL)
    writer.output(*writer.operator(Op.COND_IF, [go, x], [((2, 3), DType.FP32)], {"then_graph": "t", "else_graph": "e"}))
    for name in ("t", "e"):
        region = writer.region(name)
        inner = region.input("a", (2, 3), DType.FP32)
        region.output(region.operator(Op.ABS, [inner], ((2, 3), DType.FP32)))
    return writer.to_bytes()


SEEDS = [
    single(
        Op.CONV2D,
        [
            ((1, 8, 8, 4), DType.INT8),
            Const(np.ones((2, 3, 3, 4), np.int8)),
            Const(np.zeros(2, np.int32)),
            ZERO8,
            ZERO8,
        ],
        ((1, 8, 8, 2), DType.INT32),
        {"pad": (1, 1, 1, 1), "stride": (1, 1), "dilation": (1, 1), "acc_type": DType.INT32},
    ),
    single(Op.RESHAPE, [((-1, 3), DType.FP32), Dims((-1, 3, 1))], ((-1, 3, 1), DType.FP32)),
    single(
        Op.SLICE, [((4, 5), DType.FP16), Dims((1, 0)), Dims((2, 5))], ((2, 5), DType.FP16)
    ),
    loop(),
]

VALUES = st.one_of(
    st.sampled_from([0, 1, 4, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 4]),
    st.integers(0, 2**32 - 1),
)


def survives(data: bytes) -> None:
    try:
        graph = read(data)
    except TosaError:
        return
    for act in (
        lambda: validate(graph),
        lambda: required(graph),
        lambda: specialise(graph, [tuple(abs(extent) for extent in tensor.shape) for tensor in graph.inputs]),
        lambda: graph.outputs,
    ):
        with contextlib.suppress(TosaError):
            act()


@settings(max_examples=1500, deadline=2000, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(SEEDS), st.lists(st.tuples(st.integers(0, 4095), VALUES), min_size=1, max_size=4))
def test_words_replaced(seed: bytes, edits: list[tuple[int, int]]) -> None:
    data = bytearray(seed)
    for position, value in edits:
        struct.pack_into("<I", data, position % (len(data) - 4), value)
    survives(bytes(data))


@settings(max_examples=500, deadline=2000)
@given(st.sampled_from(SEEDS), st.integers(0, 4095), st.integers(0, 64), st.binary(max_size=64))
def test_pieces_cut_and_pasted(seed: bytes, position: int, cut: int, paste: bytes) -> None:
    position %= len(seed)
    survives(seed[:position] + paste + seed[position + cut :])


@settings(max_examples=200, deadline=2000)
@given(st.binary(max_size=512))
def test_noise_after_the_identifier(noise: bytes) -> None:
    survives(struct.pack("<I", 8) + b"TOSA" + noise)


def test_every_word_of_a_real_model(shared: Path) -> None:
    """The smallest model, each of its words made wild in turn."""
    data = (shared / "models" / "sine_float.tosa").read_bytes()
    for position in range(0, len(data) - 4, 4):
        changed = bytearray(data)
        struct.pack_into("<I", changed, position, (0xFFFFFFFF, 0, 4, 0x10000)[position // 4 % 4])
        survives(bytes(changed))


@pytest.mark.parametrize("seed", SEEDS)
def test_seeds_are_good(seed: bytes) -> None:
    validate(read(seed))
