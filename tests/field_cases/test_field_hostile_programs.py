"""Cases H1 to H3 through the whole device: files that lie, explode or come from another version end as a status, soon,
and the device goes on. The bytes go to the device as they are; no library looks at them first."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import numpy as np
import pytest
from graphs import Const, single

from virtaccel.device.wire import Status
from virtaccel.guest_tools.arrays.accelerator import Accelerator
from virtaccel.guest_tools.artifact import TOSA_FORMAT
from virtaccel.guest_tools.client import DeviceError
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.target import NO_LEVEL, Extension, Level, Profile, Target, to_words
from virtaccel.tosa_graph.write import GraphWriter

FLOAT = Target(Profile.FLOATING_POINT)
INTEGER = Target(Profile.INTEGER)
GOOD = single(Op.ADD, [((2, 3), DType.FP32), Const(np.ones((2, 3), np.float32))], ((2, 3), DType.FP32))
REFUSALS = (Status.INVALID_ARGUMENT, Status.INCOMPATIBLE, Status.RESOURCE_LIMIT, Status.UNSUPPORTED)
LONG = 600
"""Operators of a good program that takes about a second to load on an idle machine, which is what the cases ask for."""


def chain(count: int) -> bytes:
    writer = GraphWriter()
    value = writer.input("x", (4,), DType.FP32)
    for _ in range(count):
        value = writer.operator(Op.ABS, [value], ((4,), DType.FP32))
    writer.output(value)
    return writer.to_bytes()


@pytest.fixture(scope="module", autouse=True)
def soon(accelerator: Accelerator) -> Iterator[None]:
    """No refusal takes longer than a long good program takes to load here."""
    taken.clear()
    yield
    slowest, began = max(taken), time.monotonic()
    accelerator.load(chain(LONG), "long").close()
    assert slowest < time.monotonic() - began


taken: list[float] = []


def offered(accelerator: Accelerator, data: bytes, target: Target = FLOAT) -> int:
    """The status that the device answers a LOAD_PROGRAM of these bytes with; what is admitted is unloaded."""
    session, client = accelerator.session, accelerator.session.client
    started, status = time.monotonic(), Status.OK
    try:
        program = session.call(client.load_program(accelerator.context, TOSA_FORMAT, to_words(target), data))
        session.call(client.unload_program(program))
    except DeviceError as error:
        status = Status(error.status)
    assert status == Status.OK or status in REFUSALS
    if status != Status.OK:
        taken.append(time.monotonic() - started)
    return status


def assert_goes_on(accelerator: Accelerator) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    program = accelerator.load(GOOD, "good")
    np.testing.assert_array_equal(program(x)[0], x + 1)
    program.close()


# ---- H1


def test_h1_truncated_at_every_length(accelerator: Accelerator) -> None:
    kept = accelerator.load(GOOD, "kept")  # so that the good one is not compiled again and again
    for length in range(1, len(GOOD)):
        status = offered(accelerator, GOOD[:length])
        assert status != Status.OK or length > len(GOOD) // 2
    assert offered(accelerator, GOOD[:200]) == Status.INVALID_ARGUMENT
    kept.close()
    assert_goes_on(accelerator)


def test_h1_every_byte_flipped(accelerator: Accelerator) -> None:
    refusals = 0
    for position in range(len(GOOD)):
        flipped = bytearray(GOOD)
        flipped[position] ^= 0xFF
        refusals += offered(accelerator, bytes(flipped)) != Status.OK
    assert refusals > len(GOOD) // 4
    assert_goes_on(accelerator)


def test_h1_offsets_and_counts_that_lead_outside(accelerator: Accelerator) -> None:
    for value in (2**31, 2**31 - 1, 2**32 - 1, len(GOOD), len(GOOD) - 1):
        for position in range(0, len(GOOD) - 3, 4):
            changed = bytearray(GOOD)
            struct.pack_into("<I", changed, position, value)
            offered(accelerator, bytes(changed))
        assert_goes_on(accelerator)


def test_h1_a_mebibyte_of_zeros_and_data_longer_than_their_shape(accelerator: Accelerator) -> None:
    assert offered(accelerator, bytes(1 << 20)) == Status.INVALID_ARGUMENT
    writer = GraphWriter()
    writer.tensor("c", (2,), DType.FP32, np.zeros(100, np.float32).tobytes())
    writer.place(Op.CONST, [], ["c"])
    writer.output("c")
    assert offered(accelerator, writer.to_bytes()) in REFUSALS
    assert_goes_on(accelerator)


# ---- H2


@pytest.mark.parametrize("level", [FLOAT.level, NO_LEVEL], ids=lambda level: level.name)
def test_h2_a_few_bytes_that_ask_for_gigabytes(accelerator: Accelerator, level: Level) -> None:
    big = (1 << 16, 1 << 15)
    writer = GraphWriter()
    tiled = writer.operator(
        Op.TILE, [writer.constant(np.zeros((1, 1), np.int8)), writer.const_shape(big)], (big, DType.INT8)
    )
    attributes = {"axis": 0, "nan_mode": 1}
    writer.output(writer.operator(Op.REDUCE_MAX, [tiled], ((1, 1 << 15), DType.INT8), attributes))
    data = writer.to_bytes()
    assert len(data) < 1000
    assert offered(accelerator, data, Target(Profile.INTEGER, level=level)) in REFUSALS
    assert_goes_on(accelerator)


def test_h2_20000_operators_and_others_answered_meanwhile(accelerator: Accelerator) -> None:
    session, client, data = accelerator.session, accelerator.session.client, chain(20_000)
    token = session.start(client.load_program(accelerator.context, TOSA_FORMAT, to_words(FLOAT), data))
    for _ in range(20):
        session.call(client.destroy_context(session.call(client.create_context())))
    with pytest.raises(DeviceError) as caught:
        session.result(token)
    assert caught.value.status in REFUSALS
    assert_goes_on(accelerator)


# ---- H3


@pytest.mark.parametrize("version", [(0, 80, 0), (0, 80, 11), (1, 2, 0), (2, 0, 0)])
def test_h3_other_versions(accelerator: Accelerator, version: tuple[int, int, int]) -> None:
    writer = GraphWriter(version)
    x = writer.input("x", (4,), DType.FP32)
    writer.output(writer.operator(Op.ABS, [x], ((4,), DType.FP32)))
    assert offered(accelerator, writer.to_bytes()) in REFUSALS


def test_h3_target_words_of_other_versions(accelerator: Accelerator) -> None:
    session, client = accelerator.session, accelerator.session.client
    for version in ((0, 80, 0), (1, 2, 0), (2, 0, 0)):
        words = to_words(FLOAT, version)
        with pytest.raises(DeviceError) as caught:
            session.call(client.load_program(accelerator.context, TOSA_FORMAT, words, GOOD))
        assert caught.value.status == Status.INCOMPATIBLE


@pytest.mark.parametrize("number", [77, 80, 101])
def test_h3_operators_of_a_later_draft(accelerator: Accelerator, number: int) -> None:
    writer = GraphWriter((1, 1, 0), draft=True)
    x = writer.input("x", (4,), DType.FP32)
    writer.place(number, [x], [writer.tensor("y", (4,), DType.FP32)], attribute_type=number)
    writer.output("y")
    assert offered(accelerator, writer.to_bytes()) in REFUSALS


@pytest.mark.parametrize("count", [1, 3, 5])
def test_h3_odd_counts_of_int4_low_nibble_first(accelerator: Accelerator, count: int) -> None:
    values = np.array([(3 * index) % 15 - 7 for index in range(count)], np.int8)
    program = accelerator.load(single(Op.IDENTITY, [((count,), DType.INT4)], ((count,), DType.INT4)))
    np.testing.assert_array_equal(program(values)[0], values)
    program.close()
    writer = GraphWriter()
    writer.output(writer.constant(values, DType.INT4))
    program = accelerator.load(writer.to_bytes())
    assert program.outputs[0].bytes == (count + 1) // 2
    run = program.invocation()
    run.submit().wait()
    raw = memoryview(bytearray(run.buffers[0].bytes))
    run.buffers[0].read(raw)
    nibbles = [nibble for byte in raw for nibble in (byte & 15, byte >> 4)]
    assert nibbles[:count] == [value & 15 for value in values.tolist()]
    program.close()


def test_h3_everything_outside_the_declared_target_is_incompatible(accelerator: Accelerator) -> None:
    wide = single(Op.CLZ, [((4,), DType.INT32)], ((4,), DType.INT32))
    assert offered(accelerator, wide, FLOAT) == Status.INCOMPATIBLE
    assert offered(accelerator, wide, INTEGER) == Status.OK
    narrow = single(Op.IDENTITY, [((4,), DType.INT4)], ((4,), DType.INT4))
    assert offered(accelerator, narrow, INTEGER) == Status.INCOMPATIBLE
    assert offered(accelerator, narrow, Target(Profile.INTEGER, Extension.INT4)) == Status.OK
