"""Programs of a soak and what they must answer, known without the device: by numpy, by moving columns about, or kept
beside the model.

Knows TOSA graphs and arrays; knows no device. Sums and products are of small whole numbers, so floats answer exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from virtaccel.device.wire import Status
from virtaccel.guest_tools.bare.arrays import ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.write import GraphWriter

Array: TypeAlias = NDArray[Any]
Arrays: TypeAlias = tuple[Array, ...]

ELEMENTS: Final = 8
SIZE: Final = 32
SLOW: Final = "rotation"
# Tens of milliseconds: long enough to be cancelled in the middle, short enough to be run often.
SLOW_SIZE, SLOW_STEPS = 256, 40
_DIGITS: Final = Path(__file__).resolve().parents[2] / "examples" / "digits"


class Work(NamedTuple):
    """One question to a program, with its answer. `exact` is false where floats may be rounded otherwise."""

    inputs: Arrays
    outputs: Arrays
    exact: bool = True


class Program(NamedTuple):
    """An artifact that loads, and questions to it. `stream`: a question's answer depends on those before it, and
    `make` takes the sum so far."""

    name: str
    artifact: bytes
    make: Callable[[Random], Work]
    stream: bool = False


class Bad(NamedTuple):
    """An artifact that must not load, and what the device has to say."""

    name: str
    artifact: bytes
    status: Status


def difference(work: Work, found: Arrays) -> str | None:
    """What is wrong with `found`; None if nothing is."""
    for number, (want, got) in enumerate(zip(work.outputs, found, strict=True)):
        if want.shape != got.shape or want.dtype != got.dtype:
            return f"output {number} is {got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}"
        if want.dtype.kind == "f" and not work.exact:
            # Only the trained network may be rounded otherwise; every other answer is exact.
            off = np.abs(got - want) > RELATIVE_TOLERANCE * np.abs(want).max() + ABSOLUTE_TOLERANCE
        else:
            off = want != got
        if off.any():
            at = tuple(int(axis[0]) for axis in np.nonzero(off))
            return f"output {number}: {int(off.sum())} elements are wrong, first {at}: {got[at]}, not {want[at]}"
    return None


def _whole(rng: Random, shape: tuple[int, ...], most: int = 100) -> Array:
    """Whole numbers from -most to most."""
    # Seeded from the guest's own numbers: a life can be repeated.
    return np.random.default_rng(rng.getrandbits(64)).integers(-most, most + 1, shape).astype(np.float32)


def _made(writer: GraphWriter, name: str, shape: tuple[int, ...], answer: Callable[..., Array], inputs: int) -> Program:
    """The graph written so far, whose `inputs` of one shape have one `answer`."""

    def make(rng: Random) -> Work:
        given = tuple(_whole(rng, shape) for _ in range(inputs))
        return Work(given, (answer(*given),))

    return Program(name, writer.to_bytes(), make)


def _inputs(writer: GraphWriter, shape: tuple[int, ...]) -> list[str]:
    return [writer.input(name, shape, DType.FP32) for name in ("left", "right")]


@cache
def addition() -> Program:
    """Sum of two tensors."""
    shape, writer = (ELEMENTS,), GraphWriter()
    writer.output(writer.operator(Op.ADD, _inputs(writer, shape), (shape, DType.FP32)))
    return _made(writer, "addition", shape, np.add, 2)


def salted(rng: Random) -> Program:
    """x plus a number that hardly anybody has had before: nothing compiled earlier is of use."""
    # 20 bits are whole numbers of FP32, so that sums stay exact.
    salt = np.float32(rng.getrandbits(20))
    shape, writer = (ELEMENTS,), GraphWriter()
    x = writer.input("x", shape, DType.FP32)
    constant = writer.constant(np.full(ELEMENTS, salt, np.float32))
    writer.output(writer.operator(Op.ADD, [x, constant], (shape, DType.FP32)))
    return _made(writer, "salted", shape, lambda x: x + salt, 1)


def product() -> Program:
    """Product of two matrices."""
    shape, writer = (1, SIZE, SIZE), GraphWriter()
    names = _inputs(writer, shape)
    zero = writer.constant(np.zeros(1, np.float32))
    writer.output(writer.operator(Op.MATMUL, [*names, zero, zero], (shape, DType.FP32)))
    return _made(writer, "product", shape, np.matmul, 2)


@cache
def rotation() -> Program:
    """Columns moved round, one place with each of many matrix products: takes a while, and the answer needs none."""
    shape = (1, SLOW_SIZE, SLOW_SIZE)
    writer = GraphWriter()
    value = writer.input("x", shape, DType.FP32)
    # A permutation moves numbers without rounding them, however often it is applied.
    permutation = writer.constant(np.roll(np.eye(SLOW_SIZE, dtype=np.float32), 1, axis=1)[np.newaxis])
    zero = writer.constant(np.zeros(1, np.float32))
    for _ in range(SLOW_STEPS):
        value = writer.operator(Op.MATMUL, [value, permutation, zero, zero], (shape, DType.FP32))
    writer.output(value)

    return Program(SLOW, writer.to_bytes(), rotation_work)


def rotation_work(rng: Random) -> Work:
    """A question to `rotation`."""
    x = _whole(rng, (1, SLOW_SIZE, SLOW_SIZE))
    return Work((x,), (np.roll(x, SLOW_STEPS, axis=2),))


def dynamic() -> Program:
    """x + x for any number of elements."""
    writer = GraphWriter()
    x = writer.input("x", (-1,), DType.FP32)
    writer.output(writer.operator(Op.ADD, [x, x], ((-1,), DType.FP32)))

    def make(rng: Random) -> Work:
        # More sizes than one, fewer than a program keeps buffers for.
        x = _whole(rng, (rng.choice((1, 7, 64, 1000)),))
        return Work((x,), (x + x,))

    return Program("dynamic", writer.to_bytes(), make)


def running_sum() -> Program:
    """A VARIABLE that every question is added to."""
    kind = ((ELEMENTS,), DType.FP32)
    writer = GraphWriter()
    x = writer.input("x", *kind)
    state = writer.variable(np.zeros(ELEMENTS, np.float32), name="sum")
    writer.place(Op.VARIABLE, [], [state])
    before = writer.tensor("before", *kind)
    writer.place(Op.VARIABLE_READ, [state], [before])
    after = writer.operator(Op.ADD, [x, before], kind)
    writer.place(Op.VARIABLE_WRITE, [after], [state])
    writer.output(after)

    def make(rng: Random) -> Work:
        x = _whole(rng, (ELEMENTS,))
        return Work((x,), (x,))  # to which whoever keeps the stream adds the sum so far

    return Program("running sum", writer.to_bytes(), make, stream=True)


def digits() -> Program | None:
    """The network of the example, with the answers kept beside it; None where the examples are not installed."""
    try:
        artifact = (_DIGITS / "digits.tosa").read_bytes()
        with np.load(_DIGITS / "digits.io.npz") as kept:
            images, probabilities, labels = (kept[name] for name in ("in_0", "out_0", "out_1"))
    except OSError:
        return None

    def make(rng: Random) -> Work:
        which = rng.randrange(len(images))
        return Work((images[which],), (probabilities[which], labels[which]), exact=False)

    return Program("digits", artifact, make)


@cache
def catalogue() -> tuple[Program, ...]:
    """Every program that is the same each time."""
    made = (addition(), product(), rotation(), dynamic(), running_sum(), digits())
    return tuple(program for program in made if program is not None)


def refused() -> Bad:
    """Well formed, and no program: its operands do not fit each other."""
    writer = GraphWriter()
    names = [writer.input(name, (size,), DType.FP32) for name, size in (("left", 8), ("right", 5))]
    writer.output(writer.operator(Op.ADD, names, ((8,), DType.FP32)))
    return Bad("operands that do not fit", writer.to_bytes(), Status.INCOMPATIBLE)


def malformed(rng: Random) -> Bad:
    """No TOSA file: noise, or the first half of one."""
    if rng.random() < 0.5:
        return Bad("noise", rng.randbytes(rng.randrange(1, 4096)), Status.INVALID_ARGUMENT)
    artifact = catalogue()[0].artifact
    return Bad("half a file", artifact[: len(artifact) // 2], Status.INVALID_ARGUMENT)
