"""What becomes of a submission, as the API tells it: every outcome of the contract, scripted in the reference backend.

Behind the TOSA format stands a program of the reference backend (out = in XOR 0), so that each outcome can be had on
demand; frames, ring and engine are the real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from graphs import single

from virtaccel.device import reference
from virtaccel.device.reference import Doubt, Reference, Refuse
from virtaccel.device.wire import Status
from virtaccel.guest_tools import context
from virtaccel.guest_tools.arrays.accelerator import Accelerator
from virtaccel.guest_tools.arrays.program import MOST_SHAPES_KEPT, Program
from virtaccel.guest_tools.artifact import TOSA_FORMAT
from virtaccel.guest_tools.errors import ExecutionFailed, Refused
from virtaccel.guest_tools.session import Session
from virtaccel.guest_tools.transport.in_process import InProcessTransport
from virtaccel.tosa_graph.graph import DType, Op

X = np.arange(4, dtype=np.int8)


class Rig(NamedTuple):
    backend: Reference
    accelerator: Accelerator
    program: Program


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(context, "CLOSING_SECONDS", 0.05)
    behind = reference.Program(reference.Operation.XOR, 0, inputs=1, outputs=1, states=0)
    backend = Reference(readers={TOSA_FORMAT: lambda payload: behind})
    with Accelerator(Session(InProcessTransport(lambda: backend))) as accelerator:
        model = single(Op.IDENTITY, [((-1,), DType.INT8)], ((-1,), DType.INT8))
        yield Rig(backend, accelerator, accelerator.load(model, "identity.tosa"))


def test_failed_execution_says_the_device_s_status(rig: Rig) -> None:
    rig.backend.script.immediate = False
    pending = rig.program.invocation((X.shape,)).submit()
    assert not pending.done()
    rig.backend.complete(error=Status.OUT_OF_MEMORY)
    assert pending.done()
    with pytest.raises(ExecutionFailed, match="OUT_OF_MEMORY") as caught:
        pending.wait()
    assert caught.value.status == Status.OUT_OF_MEMORY
    pending.wait()  # it has ended; nothing more is asked
    assert pending.done()


def test_cancelled_submission(rig: Rig) -> None:
    rig.backend.script.immediate = False
    pending = rig.program.invocation((X.shape,)).submit()
    assert pending.cancel()
    with pytest.raises(ExecutionFailed, match="cancelled"):
        pending.wait()
    assert not pending.cancel()


def test_cancel_comes_too_late(rig: Rig) -> None:
    pending = rig.program.invocation((X.shape,)).submit()
    assert not pending.cancel()
    pending.wait()


def test_waiting_may_be_given_up_and_taken_up_again(rig: Rig) -> None:
    rig.backend.script.immediate = False
    invocation = rig.program.invocation((X.shape,))
    invocation.write([X])
    pending = invocation.submit()
    with pytest.raises(TimeoutError):
        pending.wait(0.01)
    rig.backend.complete()
    pending.wait()
    np.testing.assert_array_equal(invocation.read()[0], X)


def test_rejected_submission_leaves_nothing_behind(rig: Rig) -> None:
    rig.backend.script.next("submit", Refuse(Status.RESOURCE_LIMIT))
    with pytest.raises(ExecutionFailed, match="RESOURCE_LIMIT"):
        rig.program(X)
    np.testing.assert_array_equal(rig.program(X)[0], X)


def test_indeterminate_submission_is_told_and_its_event_kept(rig: Rig) -> None:
    rig.backend.script.next("submit", Doubt(Status.INTERNAL_ERROR))
    with pytest.raises(ExecutionFailed, match="nobody knows"):
        rig.program(X)
    (kept,) = rig.accelerator.pending
    assert not kept.done()


def test_closing_cancels_what_still_runs(rig: Rig) -> None:
    rig.backend.script.immediate = False
    rig.program.invocation((X.shape,)).submit()
    rig.accelerator.close()
    assert rig.backend.live == 0


def test_buffers_are_kept_for_a_bounded_number_of_shapes(rig: Rig) -> None:
    for size in range(1, 3 * MOST_SHAPES_KEPT):
        data = np.arange(size, dtype=np.int8)
        np.testing.assert_array_equal(rig.program(data)[0], data)
    assert len(rig.accelerator.buffers) == 2 * MOST_SHAPES_KEPT


def test_refusal_without_a_reason_in_the_log_says_what_the_status_means(rig: Rig) -> None:
    rig.backend.script.next("load_program", Refuse(Status.RESOURCE_LIMIT))
    model = single(Op.IDENTITY, [((2,), DType.INT8)], ((2,), DType.INT8))
    with pytest.raises(Refused, match="RESOURCE_LIMIT") as caught:
        rig.accelerator.load(model, "identity.tosa")
    assert caught.value.status == Status.RESOURCE_LIMIT
