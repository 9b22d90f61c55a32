"""Where asking takes processors from the work, a program that was run before is left alone until it may have ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from slow_graphs import rotated, rotations

from virtaccel.device.pacing import LONGEST_PACE, Pace
from virtaccel.guest_tools.arrays.accelerator import Accelerator
from virtaccel.guest_tools.session import Session
from virtaccel.guest_tools.transport.base import Completion, Config, Part, Transport
from virtaccel.guest_tools.via import open_transport

SIDE, STEPS = 256, 12


class FarAway(Transport):
    """A device in this process as one behind a ring is seen: nothing tells of changes, and nothing runs at a wish."""

    def __init__(self) -> None:
        self._inner = open_transport("in-process:openvino", "CPU")
        self.config: Config = self._inner.config
        self.published = 0

    def publish(self, request: Sequence[Part], capacity: int) -> int:
        self.published += 1
        return self._inner.publish(request, capacity)

    def collect(self, timeout: float | None) -> Completion | None:
        return self._inner.collect(timeout)

    def reset(self) -> None:
        self._inner.reset()

    def close(self) -> None:
        self._inner.close()


@pytest.fixture
def transport() -> Iterator[FarAway]:
    made = FarAway()
    yield made
    made.close()


def test_a_pace_is_when_the_work_was_last_known_to_go_on() -> None:
    pace = Pace()
    pace.learn(0.0, 0.002)
    assert pace.seconds == 0.002
    pace.learn(0.002, 0.0025)
    assert pace.seconds == 0.0025
    for _ in range(20):
        pace.learn(pace.seconds, 0.0)  # it had ended whenever it was asked for
    assert pace.seconds < 0.0004
    pace.learn(0.0, 3600.0)
    assert pace.seconds == LONGEST_PACE, "a short run after a long one is noticed"


@pytest.mark.alone
def test_fewer_questions_from_run_to_run_and_the_same_answers(transport: FarAway) -> None:
    x = np.random.default_rng(1).standard_normal((1, SIDE, SIDE)).astype(np.float32)
    with Accelerator(Session(transport)) as accelerator:
        program = accelerator.load(rotations(SIDE, STEPS), "rotations")
        commands = []
        for _ in range(12):
            before = transport.published
            (answer,) = program(x)
            np.testing.assert_array_equal(answer, rotated(x, STEPS))
            commands.append(transport.published - before)
        assert program.pace.seconds > 0
        assert np.median(commands[1:]) < commands[0], commands
