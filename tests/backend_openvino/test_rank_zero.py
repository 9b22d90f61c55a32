"""Constants of rank 0: numpy makes scalars of them where it can, and a node is to be made of every one."""

from __future__ import annotations

import graphs
import numpy as np
import pytest
from engine_room import EngineRoom

from virtaccel.backend_openvino import open_backend
from virtaccel.tosa_graph.elements import pack
from virtaccel.tosa_graph.graph import DType, Op

TYPES = [
    DType.FP32, DType.FP16, DType.BF16, DType.FP8E4M3, DType.FP8E5M2, DType.INT32, DType.INT16, DType.INT8,
    DType.BOOL,
]  # fmt: skip
MOVES = {
    "RESHAPE": (Op.RESHAPE, [graphs.Dims(())], ()),
    "RESHAPE to (1, 1)": (Op.RESHAPE, [graphs.Dims((1, 1))], (1, 1)),
    "IDENTITY": (Op.IDENTITY, [], ()),
}


@pytest.mark.parametrize("move", list(MOVES))
@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.name)
def test_a_constant_of_rank_zero_moves_exactly(dtype: DType, move: str) -> None:
    op, more, shape = MOVES[move]
    value = np.array(1 if dtype is DType.BOOL else -3)
    if dtype is DType.BOOL:
        value = value.astype(bool)
    backend = open_backend("CPU")
    room = EngineRoom(backend)
    tosa = graphs.single(op, [graphs.Const(value, dtype), *more], (shape, dtype))
    (answer,) = room.call(room.load(tosa), tosa, [])
    assert answer.shape == shape
    assert bytes(pack(answer, dtype)) == bytes(pack(value.reshape(shape), dtype))
    backend.close()


@pytest.mark.parametrize("op", [Op.ADD, Op.MUL, Op.MAXIMUM])
@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16, DType.BF16])
def test_a_constant_of_rank_zero_is_an_operand(dtype: DType, op: Op) -> None:
    backend = open_backend("CPU")
    room = EngineRoom(backend)
    two = graphs.Const(np.array(2.0), dtype)
    more = [graphs.Const(np.zeros(1, np.int8))] if op is Op.MUL else []
    tosa = graphs.single(op, [two, ((), dtype), *more], ((), dtype), {"nan_mode": 1} if op is Op.MAXIMUM else {})
    (answer,) = room.call(room.load(tosa), tosa, [np.array(4.0)])
    assert float(np.asarray(answer, np.float32)) == {Op.ADD: 6.0, Op.MUL: 8.0, Op.MAXIMUM: 4.0}[op]
    backend.close()
