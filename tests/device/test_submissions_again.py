"""The same SUBMIT bytes again and again: what they mean is remembered, and only while all they name lives."""

from __future__ import annotations

import pytest
from frames import COMPLETE, OK, READ, RESOURCE_LIMIT, STALE_OBJECT, WRITE, Bench, binding, submit, u64

from virtaccel.device.state import MOST_SUBMISSIONS


class Ready:
    """A program with an input and an output, and the SUBMIT payload that runs it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.context = bench.context()
        self.queue = bench.queue(self.context)
        self.program = bench.program(self.context)
        self.source, self.target = bench.buffer(self.context), bench.buffer(self.context)
        self.payload = self.submission(8)

    def submission(self, size: int) -> bytes:
        source, target = binding(self.source, 0, READ, 0, size), binding(self.target, 1, WRITE, 0, size)
        return submit(self.queue, self.program, source, target)

    def run(self, payload: bytes | None = None) -> None:
        event = self.bench.made("SUBMIT", payload or self.payload)
        while self.bench.poll(event)[0] != COMPLETE:
            pass
        self.bench.ok("DESTROY_EVENT", u64(event))


@pytest.fixture
def ready() -> Ready:
    return Ready(Bench())


def test_every_run_sees_what_the_buffer_holds_then(ready: Ready) -> None:
    for number in range(4):
        data = bytes([number] * 8)
        ready.bench.write(ready.source, data)
        ready.run()
        assert ready.bench.read(ready.target, 8) == bytes(value ^ 0x5A for value in data)


@pytest.mark.parametrize(
    ("command", "of"),
    [("FREE_BUFFER", "source"), ("FREE_BUFFER", "target"), ("UNLOAD_PROGRAM", "program"), ("DESTROY_QUEUE", "queue")],
)
def test_known_bytes_are_stale_once_something_they_name_is_gone(ready: Ready, command: str, of: str) -> None:
    ready.run()
    ready.bench.ok(command, u64(getattr(ready, of)))
    assert ready.bench.status("SUBMIT", ready.payload) == STALE_OBJECT


def test_known_bytes_are_stale_after_a_reset(ready: Ready) -> None:
    ready.run()
    ready.bench.engine.reset()
    assert ready.bench.status("SUBMIT", ready.payload) == STALE_OBJECT


def test_a_neighbour_of_known_bytes_is_judged_for_itself(ready: Ready) -> None:
    ready.run()
    for at in range(len(ready.payload)):
        changed = bytearray(ready.payload)
        changed[at] ^= 0x80
        if 24 <= at < 32:
            continue  # the timeout, which may be anything
        assert ready.bench.status("SUBMIT", bytes(changed)) != OK, f"byte {at}"
    ready.run()


def test_the_quota_of_events_holds_for_known_bytes(ready: Ready) -> None:
    limit = ready.bench.engine.state.limits.max_events_per_context
    other = [Ready.submission(ready, 8)] * limit
    held = []
    for payload in other:
        event = ready.bench.made("SUBMIT", payload)
        while ready.bench.poll(event)[0] != COMPLETE:
            pass
        held.append(event)
    assert ready.bench.status("SUBMIT", ready.payload) == RESOURCE_LIMIT
    ready.bench.ok("DESTROY_EVENT", u64(held.pop()))
    ready.run()


def test_what_is_remembered_is_bounded(ready: Ready) -> None:
    for timeout in range(1, MOST_SUBMISSIONS + 10):
        source, target = binding(ready.source, 0, READ, 0, 8), binding(ready.target, 1, WRITE, 0, 8)
        ready.run(submit(ready.queue, ready.program, source, target, timeout_ns=10**12 + timeout))
        assert len(ready.bench.engine.state.submissions) <= MOST_SUBMISSIONS
