"""Before a submission runs on a model that was compiled for inputs within a limit, the inputs are looked through."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtaccel.backend_openvino.programs import guards_for, within
from virtaccel.backend_openvino.requests import Executable, Range, Slot
from virtaccel.tosa_graph.graph import DType

TYPES: dict[DType, Any] = {
    DType.FP32: np.float32,
    DType.FP16: np.float16,
    DType.BF16: ml_dtypes.bfloat16,
}
AROUND = [0.0, -0.0, 1.0, -1.0, 3.5, -3.5, 4.0, -4.0, 4.03125, -4.03125, 1e30, -1e30, np.inf, -np.inf, np.nan, -np.nan]
LIMIT = 4.0


def looked_through(values: list[float], dtype: DType, offset: int) -> bool:
    data = np.array(values, np.float32).astype(TYPES[dtype]).view(np.uint8)
    memory = np.concatenate([np.full(offset, 0xFF, np.uint8), data])
    slot = Slot(dtype, data.nbytes, 0, None, cast(Any, None), cast(Any, None))
    executable = cast(Executable, SimpleNamespace(guards=guards_for([slot], LIMIT)))
    return within(executable, (Range(cast(Any, SimpleNamespace(array=memory)), offset),))


@pytest.mark.parametrize("dtype", list(TYPES))
@given(values=st.lists(st.sampled_from(AROUND), min_size=1, max_size=40))
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_numbers_within_the_limit_pass_and_nothing_else(dtype: DType, values: list[float]) -> None:
    right = all(abs(value) <= LIMIT for value in values)  # a NaN is not
    assert looked_through(values, dtype, 0) == right
    assert looked_through(values, dtype, 64) == right


def test_what_is_no_number_with_a_limit_is_not_looked_at() -> None:
    assert guards_for([Slot(DType.INT32, 4, 0, None, cast(Any, None), cast(Any, None))], LIMIT) == []
