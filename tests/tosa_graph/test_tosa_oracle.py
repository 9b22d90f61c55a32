"""The oracle itself: the reference model answers for every element type, and says when it cannot."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import Const, Dims, single
from oracle import ReferenceRefused, reference

from virtaccel.tosa_graph.elements import CARRIER
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.write import GraphWriter


@pytest.mark.parametrize("dtype", [d for d in DType if d not in (DType.UNKNOWN, DType.SHAPE)], ids=lambda d: d.name)
def test_identity_of_every_type(dtype: DType) -> None:
    values = np.array([[0, 1, 3], [2, 1, 0]]).astype(CARRIER[dtype])
    writer = GraphWriter()
    x, c = writer.input("x", (2, 3), dtype), writer.constant(values[::-1], dtype)
    for name in (x, c):
        writer.output(writer.operator(Op.IDENTITY, [name], ((2, 3), dtype)))
    outputs = reference(writer.to_bytes(), [values])
    assert [output.dtype for output in outputs] == [CARRIER[dtype]] * 2
    assert np.array_equal(outputs[0], values)
    assert np.array_equal(outputs[1], values[::-1])


def test_wide_products() -> None:
    zero = Const(np.zeros(1, np.int16))
    data = single(
        Op.MATMUL, [((1, 1, 4), DType.INT16), ((1, 4, 1), DType.INT16), zero, zero], ((1, 1, 1), DType.INT48)
    )
    (output,) = reference(data, [np.full((1, 1, 4), 32767), np.full((1, 4, 1), -32768)])
    assert output.item() == -4 * 32767 * 32768


def test_wrong_graph_is_refused() -> None:
    with pytest.raises(ReferenceRefused):
        reference(single(Op.RESHAPE, [((2, 3), DType.FP32), Dims((7,))], ((7,), DType.FP32)), [np.zeros((2, 3))])
