"""Tensors of one axis, which the runtime takes for shapes under computation, and constants, which it folds with other
code than its kernels: both have to give what TOSA says. The reference model answers.
"""

from __future__ import annotations

import lowered
import numpy as np
import oracle
import pytest
from graphs import Const, single

from virtaccel.tosa_graph.elements import CARRIER
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.schema import NanMode
from virtaccel.tosa_graph.write import GraphWriter

LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize(("op", "dtype"), [(Op.ABS, DType.FP32), (Op.ABS, DType.INT32), (Op.ERF, DType.FP32)])
def test_concatenation_is_unharmed_by_a_reader_that_takes_magnitudes(op: Op, dtype: DType) -> None:
    writer = GraphWriter()
    both = writer.operator(Op.CONCAT, [writer.input(n, (2,), dtype) for n in "ab"], ((4,), dtype), {"axis": 0})
    result = writer.operator(op, [both], ((4,), dtype))
    writer.output(result, both)
    tosa = writer.to_bytes()
    inputs = [np.array(values, CARRIER[dtype]) for values in ([-1, 2], [-3, 4])]
    got, want = lowered.run(tosa, inputs), oracle.reference(tosa, inputs)
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=1e-6)
    np.testing.assert_array_equal(got[1], want[1])


@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16, DType.BF16])
@pytest.mark.parametrize("op", [Op.ABS, Op.ERF])
def test_magnitudes_of_a_constant(op: Op, dtype: DType) -> None:
    values = np.array([-3, 2, -1, 0.5, -np.inf, -0.25], np.float32)
    tosa = single(op, [Const(values.astype(CARRIER[dtype]), dtype)], ((6,), dtype))
    np.testing.assert_allclose(lowered.run(tosa, [])[0], oracle.reference(tosa, [])[0], rtol=2**-8, atol=0)


@pytest.mark.parametrize("mode", [NanMode.PROPAGATE, NanMode.IGNORE])
@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-3e38, -2.5e38), (0.0, float("inf"))])
def test_clamp_of_constant_nan(mode: NanMode, low: float, high: float) -> None:
    values = np.array([np.nan, -np.inf, np.inf, 0.5, -0.0, LARGEST], np.float32)
    attributes = {"min_val": np.float32(low), "max_val": np.float32(high), "nan_mode": mode}
    for operand, inputs in ((Const(values), []), (((6,), DType.FP32), [values])):
        tosa = single(Op.CLAMP, [operand], ((6,), DType.FP32), attributes)
        np.testing.assert_array_equal(lowered.run(tosa, inputs)[0], oracle.reference(tosa, inputs)[0])
