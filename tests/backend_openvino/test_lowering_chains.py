"""Random chains of operators against the reference model: nodes fuse in the CPU plugin, answers must not change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lowered import run
from numpy.typing import NDArray
from oracle import reference

from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.write import GraphWriter

Array = NDArray[Any]

KINDS: dict[DType, type[np.generic]] = {DType.INT32: np.int32, DType.FP32: np.float32, DType.FP16: np.float16}
SHAPES = [(3, 5, 7), (2, 4, 4, 16), (33,), (1, 8, 8, 3)]
UNARY = {
    DType.INT32: [Op.BITWISE_NOT, Op.CLZ],
    DType.FP32: [Op.ABS, Op.FLOOR, Op.CEIL, Op.RECIPROCAL],
    DType.FP16: [Op.ABS, Op.FLOOR, Op.CEIL, Op.RECIPROCAL],
}
BINARY = {
    DType.INT32: [Op.BITWISE_AND, Op.BITWISE_OR, Op.BITWISE_XOR, Op.MUL, Op.MAXIMUM, Op.MINIMUM],
    DType.FP32: [Op.ADD, Op.SUB, Op.MUL, Op.MAXIMUM, Op.MINIMUM],
    DType.FP16: [Op.ADD, Op.SUB, Op.MUL, Op.MAXIMUM, Op.MINIMUM],
}
SHIFTS = [Op.ARITHMETIC_RIGHT_SHIFT, Op.LOGICAL_RIGHT_SHIFT, Op.LOGICAL_LEFT_SHIFT]
COMPARISONS = [Op.EQUAL, Op.GREATER, Op.GREATER_EQUAL]


class Chain:
    """A graph of one element type and shape, grown at random; each step mostly reads the one before."""

    def __init__(self, seed: int, dtype: DType) -> None:
        self.rng = np.random.default_rng(seed)
        self.dtype = dtype
        self.shape = SHAPES[int(self.rng.integers(len(SHAPES)))]
        self.writer = GraphWriter()
        self.spec = (self.shape, dtype)
        self.inputs = [self.numbers(self.shape), self.numbers(self.shape)]
        self.values = [self.writer.input(f"in{index}", self.shape, dtype) for index in range(2)]
        self.condition: str | None = None
        self.no_shift = self.writer.constant(np.zeros(1, np.int8))

    def numbers(self, shape: tuple[int, ...]) -> Array:
        if self.dtype is DType.INT32:
            limit = 2**31 if self.rng.random() < 0.5 else 70000
            return self.rng.integers(-limit, limit, shape).astype(np.int32)
        x = (self.rng.standard_normal(shape) * np.exp(self.rng.uniform(-3, 3, shape))).astype(KINDS[self.dtype])
        if x.size > 8:
            x.reshape(-1)[:4] = [np.nan, np.inf, -np.inf, 0]
        return x

    def recent(self) -> str:
        return self.values[-1 - int(self.rng.integers(min(2, len(self.values))))]

    def other(self) -> str:
        if self.rng.random() < 0.7:
            return self.values[int(self.rng.integers(len(self.values)))]
        rank = len(self.shape)
        shapes = [self.shape, (1,) * rank, (1,) * (rank - 1) + self.shape[-1:]]
        return self.writer.constant(self.numbers(shapes[int(self.rng.integers(3))]))

    def choice(self, ops: list[Op]) -> Op:
        return ops[int(self.rng.integers(len(ops)))]

    def grow(self) -> None:
        steps = [self.unary, self.binary, self.binary, self.compare, self.select, self.reduce, self.turn, self.clamp]
        step = steps[int(self.rng.integers(len(steps)))]
        step()

    def add(self, op: Op, operands: list[str], attributes: dict[str, Any] | None = None) -> None:
        self.values.append(self.writer.operator(op, operands, self.spec, attributes))

    def nan_mode(self) -> dict[str, Any]:
        return {"nan_mode": int(self.rng.integers(1, 3))}

    def unary(self) -> None:
        self.add(self.choice(UNARY[self.dtype]), [self.recent()])

    def binary(self) -> None:
        op = self.choice(BINARY[self.dtype])
        operands = [self.recent(), self.other()]
        if self.rng.random() < 0.5:
            operands.reverse()
        attributes = self.nan_mode() if op in (Op.MAXIMUM, Op.MINIMUM) else None
        self.add(op, [*operands, self.no_shift] if op is Op.MUL else operands, attributes)

    def compare(self) -> None:
        op = self.choice(COMPARISONS)
        self.condition = self.writer.operator(op, [self.recent(), self.other()], (self.shape, DType.BOOL))

    def select(self) -> None:
        if self.condition is not None:
            self.add(Op.SELECT, [self.condition, self.recent(), self.other()])

    def reduce(self) -> None:
        axis = int(self.rng.integers(len(self.shape)))
        kept = tuple(1 if i == axis else n for i, n in enumerate(self.shape))
        op = self.choice([Op.REDUCE_MAX, Op.REDUCE_MIN])
        operand = self.recent()
        reduced = self.writer.operator(op, [operand], (kept, self.dtype), {"axis": axis, **self.nan_mode()})
        self.add(Op.MAXIMUM, [reduced, operand], self.nan_mode())

    def turn(self) -> None:
        """Transposed, worked on, transposed back."""
        perms = tuple(int(axis) for axis in self.rng.permutation(len(self.shape)))
        spec = (tuple(self.shape[axis] for axis in perms), self.dtype)
        turned = self.writer.operator(Op.TRANSPOSE, [self.recent()], spec, {"perms": perms})
        worked = self.writer.operator(UNARY[self.dtype][0], [turned], spec)
        self.add(Op.TRANSPOSE, [worked], {"perms": tuple(int(axis) for axis in np.argsort(perms))})

    def clamp(self) -> None:
        if self.dtype is DType.INT32:
            amounts = self.writer.constant(self.rng.integers(0, 32, self.shape).astype(np.int32))
            op = self.choice(SHIFTS)
            self.add(op, [self.recent(), amounts], {"round": True} if op is Op.ARITHMETIC_RIGHT_SHIFT else None)
            return
        low, high = (np.array(bound, KINDS[self.dtype]).tobytes() for bound in (-1.5, 2.25))
        self.add(Op.CLAMP, [self.recent()], {"min_val": low, "max_val": high, **self.nan_mode()})

    def finish(self) -> bytes:
        self.writer.output(self.values[-1], *([self.condition] if self.condition else []))
        return self.writer.to_bytes()


@pytest.mark.parametrize("dtype", KINDS, ids=lambda dtype: dtype.name)
def test_chains_answer_what_their_operators_answer(dtype: DType) -> None:
    for seed in range(25):
        chain = Chain(seed, dtype)
        for _ in range(int(chain.rng.integers(3, 9))):
            chain.grow()
        tosa = chain.finish()
        for got, expected in zip(run(tosa, chain.inputs), reference(tosa, chain.inputs), strict=True):
            if got.dtype == np.float32:  # a product and a sum may be fused, which rounds once instead of twice
                assert np.allclose(got, expected, rtol=3e-6, atol=1e-5, equal_nan=True), seed
            else:
                assert np.array_equal(got, expected, equal_nan=got.dtype.kind == "f"), seed
