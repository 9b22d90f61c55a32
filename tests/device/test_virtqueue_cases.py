"""Of the standard's cases VQ-001 to VQ-020 (virtqueue.md, section 13), what no driver can show: completions that come
late, bounded turns, and memory that went away.

The cases themselves are the protocol suite's (harness/conformance/protocol_queue.py). For VQ-009, VQ-010 and VQ-012,
test_verdicts.py has a row for every command: a refusal changes nothing and never reaches the backend.
"""

from __future__ import annotations

import pytest
from command_ring import CommandRing
from frames import (
    CANARY,
    CODES,
    DEVICE_LOST,
    OK,
    RESOURCE_LIMIT,
    XOR,
    Bench,
    allocate,
    load,
    request,
    split,
    u64,
    world,
)

from virtaccel.device.engine import Health
from virtaccel.device.reference import Reference, Script
from virtaccel.virtqueue.segments import Chain

INFO_FRAME = request(CODES["GET_DEVICE_INFO"], request_id=5)


def ring(script: Script | None = None, size: int = 16) -> CommandRing:
    return CommandRing(lambda: Reference(script=script), size=size)


CHANGES = {
    "CREATE_CONTEXT": lambda bench, w: bytes(8),
    "ALLOCATE_BUFFER": lambda bench, w: allocate(w.context),
    "LOAD_PROGRAM": lambda bench, w: load(w.context, XOR.pack()),
    "SUBMIT": lambda bench, w: w.submission(),
    "FREE_BUFFER": lambda bench, w: u64(bench.buffer(w.context)),
}


def test_vq_014_responses_out_of_publication_order() -> None:
    """A LOAD_PROGRAM that takes its time is overtaken by everything published after it."""
    script = Script(deferred_loads=True)
    made = ring(script)
    context = int.from_bytes(made.exchange(request(CODES["CREATE_CONTEXT"], bytes(8), 1)).payload, "little")
    slow = made.publish(request(CODES["LOAD_PROGRAM"], load(context, XOR.pack()), 2))
    for number in (3, 4):
        made.publish(request(CODES["GET_DEVICE_INFO"], request_id=number))
    made.service.service()
    assert [made.collect().raw[8] for _ in range(2)] == [3, 4]  # type: ignore[union-attr]
    assert made.collect() is None
    assert made.untouched(slow)
    assert made.service.completions() == 0, "still loading"
    backend = made.device.backend
    assert isinstance(backend, Reference)
    backend.finish_load()
    assert made.service.completions() == 1
    response = made.collect()
    assert response is not None
    assert (response.status, response.raw[8]) == (OK, 2)


def test_vq_017_one_interrupt_for_a_batch_and_bounded_turns() -> None:
    made = ring(size=64)
    for _ in range(20):
        made.publish(INFO_FRAME, writable=(92,))
    assert made.service.service(8), "more is waiting"
    assert made.notified == 1
    assert made.service.service(8)
    assert not made.service.service(8)
    assert made.notified == 3
    assert sum(made.collect() is not None for _ in range(21)) == 20


def test_vq_018_no_late_writes_after_a_reset() -> None:
    """A load and a poll outstanding at the reset: the load ends afterwards, and nothing of it reaches the guest."""
    script = Script(deferred_loads=True)
    made = ring(script)
    context = int.from_bytes(made.exchange(request(CODES["CREATE_CONTEXT"], bytes(8), 1)).payload, "little")
    parked = made.publish(request(CODES["LOAD_PROGRAM"], load(context, XOR.pack()), 2))
    made.service.service()
    unserved = made.publish(INFO_FRAME)
    old_service, old_backend = made.service, made.device.backend
    assert isinstance(old_backend, Reference)
    report = made.reset()
    assert report.abandoned_loads == 1
    assert not report.discard
    old_backend.finish_load()
    assert old_service.completions() == made.service.completions() == 0
    assert made.collect() is None
    assert made.untouched(parked)
    assert made.untouched(unserved)
    assert made.exchange(INFO_FRAME).status == OK


class Unwritable(Chain):
    """A chain whose response memory cannot be written: what a mapping that went away looks like from here."""

    def __init__(self, frame: bytes, capacity: int = 4096) -> None:
        request_view = memoryview(frame)
        super().__init__(0, (request_view,), (memoryview(bytes(capacity)),), len(frame), capacity)


@pytest.mark.parametrize("opcode", CHANGES)
def test_vq_020_response_lost_after_mutation(opcode: str) -> None:
    """The head is withheld (an empty one would say that nothing happened), and a reset makes the device whole."""
    bench = Bench()
    here = world(bench)
    frame = request(CODES[opcode], CHANGES[opcode](bench, here), 9)
    assert bench.engine.process(Unwritable(frame)) is None
    assert bench.engine.health is Health.NEEDS_RESET
    assert bench.status("GET_DEVICE_INFO") == DEVICE_LOST
    assert not bench.engine.reset().discard
    assert bench.engine.health is Health.RUNNING
    assert bench.backend.live == 0
    assert bench.status("GET_DEVICE_INFO") == OK


@pytest.mark.parametrize("opcode", ["GET_DEVICE_INFO", "POLL_EVENT"])
def test_vq_020_response_lost_without_mutation(opcode: str) -> None:
    bench = Bench()
    event = bench.made("SUBMIT", world(bench).submission())
    payload = u64(event) if opcode == "POLL_EVENT" else b""
    assert bench.engine.process(Unwritable(request(CODES[opcode], payload, 9))) == 0
    assert bench.engine.health is Health.RUNNING


def test_vq_020_a_refusal_that_cannot_be_written_changes_nothing() -> None:
    bench = Bench()
    assert bench.engine.process(Unwritable(request(0xDEAD, b"", 9))) == 0
    assert bench.engine.health is Health.RUNNING


def test_vq_020_parked_load_whose_response_is_lost() -> None:
    bench = Bench(Script(deferred_loads=True))
    frame = request(CODES["LOAD_PROGRAM"], load(bench.context(), XOR.pack()), 9)
    assert bench.engine.process(Unwritable(frame)) is None
    assert bench.engine.parked == 1
    bench.backend.finish_load()
    assert bench.engine.finished() == []
    assert bench.engine.health is Health.NEEDS_RESET


def test_a_chain_that_cannot_be_read_goes_back_empty() -> None:
    view = memoryview(bytearray(INFO_FRAME))
    chain = Chain(0, (view,), (memoryview(bytearray(92)),), len(INFO_FRAME), 92)
    view.release()
    bench = Bench()
    assert bench.engine.process(chain) == 0
    assert bench.engine.health is Health.RUNNING


def test_request_above_the_hard_limit_is_refused_without_a_copy() -> None:
    bench = Bench()
    big = memoryview(bytearray((16 << 20) + 1))
    big[:16] = request(CODES["GET_DEVICE_INFO"], b"", 9, length=len(big) - 16)
    room = bytearray([CANARY]) * 92
    assert bench.engine.process(Chain.over(0, (big,), split(room, ()))) == 16
    assert int.from_bytes(room[:2], "little") == RESOURCE_LIMIT
