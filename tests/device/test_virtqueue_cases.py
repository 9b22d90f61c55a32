"""The standard's cases VQ-001 to VQ-020 (virtqueue.md, section 13), through a real ring wherever a ring has a part.

VQ-009, VQ-010 and VQ-012 have a row for every command in test_verdicts.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from command_ring import CommandRing
from frames import (
    CANARY,
    CODES,
    COMPLETE,
    DEVICE_LOST,
    FAILED,
    INVALID_ARGUMENT,
    OK,
    PENDING,
    RESOURCE_LIMIT,
    STALE_OBJECT,
    UNSUPPORTED,
    XOR,
    Bench,
    allocate,
    load,
    request,
    split,
    transfer,
    u64,
    world,
)
from rings import DATA, INDIRECT, NEXT, WRITE, RawRing

from virtaccel.device.engine import Health
from virtaccel.device.reference import INFO, Doubt, Reference, Script
from virtaccel.device.ring_service import Device, RingService
from virtaccel.device.wire import Status
from virtaccel.virtqueue.chain import Chain
from virtaccel.virtqueue.driver import Backpressure

INFO_FRAME = request(CODES["GET_DEVICE_INFO"], request_id=5)


def ring(script: Script | None = None, size: int = 16) -> CommandRing:
    return CommandRing(lambda: Reference(script=script), size=size)


def test_vq_001_one_readable_and_one_writable_descriptor() -> None:
    response = ring().exchange(INFO_FRAME, writable=(92,))
    assert (response.used, response.status) == (92, OK)


FIXED = {
    "CREATE_CONTEXT": lambda bench, w: bytes(8),
    "ALLOCATE_BUFFER": lambda bench, w: allocate(w.context),
    "WRITE_BUFFER": lambda bench, w: transfer(w.source, 3, 5) + b"hello",
    "READ_BUFFER": lambda bench, w: transfer(w.source, 0, 16),
    "LOAD_PROGRAM": lambda bench, w: load(w.context, XOR.pack()),
    "CREATE_QUEUE": lambda bench, w: u64(w.context) + u64(0),
    "SUBMIT": lambda bench, w: w.submission(),
    "FREE_BUFFER": lambda bench, w: u64(bench.buffer(w.context)),
    "POLL_EVENT": lambda bench, w: u64(bench.made("SUBMIT", w.submission())),
}


@pytest.mark.parametrize("opcode", FIXED)
def test_vq_002_every_byte_split_of_every_fixed_part(opcode: str) -> None:
    """Also the response split at every byte: same status, same bytes as in one piece."""
    bench = Bench(info=replace(INFO, limits=replace(INFO.limits, max_queues_per_context=64)))
    here = world(bench)
    size = 16 + len(FIXED[opcode](bench, here))
    for cut in range(1, size):
        frame = request(CODES[opcode], FIXED[opcode](bench, here), 9)
        response = bench.send(frame, 40, cuts=(cut,), out=(1 + cut % 39,))
        assert response.status == OK, (opcode, cut)
    assert bench.read(here.source, 8)[3:8] == (b"hello" if opcode == "WRITE_BUFFER" else bytes(5))


def test_vq_003_many_segments_concatenate_without_padding() -> None:
    bench = Bench()
    here = world(bench)
    data = bytes(range(60))
    frame = request(CODES["WRITE_BUFFER"], transfer(here.source, 4, 60) + data, 3)
    assert bench.send(frame, 16, cuts=[1] * (len(frame) - 1), out=[1] * 15).status == OK
    frame = request(CODES["READ_BUFFER"], transfer(here.source, 4, 60), 4)
    for pieces in ([1] * 75, [7] * 10, [16], [15, 2], [17, 3, 1]):
        assert bench.send(frame, 80, cuts=(3, 5, 8, 13), out=pieces).payload == data


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("vq_004_no_writable", lambda r: r.descriptor(0, DATA, 16)),
        ("vq_004_no_readable", lambda r: r.descriptor(0, DATA, 92, WRITE)),
        ("vq_005_readable_after_writable", lambda r: (
            r.descriptor(0, DATA, 92, WRITE | NEXT, 1), r.descriptor(1, DATA + 4096, 16))),
        ("vq_006_zero_length", lambda r: (r.descriptor(0, DATA, 0, NEXT, 1), r.descriptor(1, DATA, 92, WRITE))),
        ("vq_006_loop", lambda r: (r.descriptor(0, DATA, 16, NEXT, 1), r.descriptor(1, DATA, 16, NEXT, 0))),
        ("vq_006_indirect", lambda r: r.descriptor(0, DATA, 32, INDIRECT)),
        ("vq_006_next_outside", lambda r: r.descriptor(0, DATA, 16, NEXT, 500)),
    ],
)  # fmt: skip
def test_vq_004_005_006_broken_topology_and_the_next_chain(name: str, place: object) -> None:
    """The bad head comes back with nothing written and no backend call; the good one behind it completes."""
    raw = RawRing(8)
    raw.buffer[DATA - 0x4000_0000 :] = bytes([CANARY]) * (len(raw.buffer) - (DATA - 0x4000_0000))
    script = Script()
    device = Device(lambda: Reference(script=script))
    service = RingService(device.engine, raw.device(), lambda: None)
    place(raw)  # type: ignore[operator]
    raw.good(4, 24, 24)
    offset = DATA - 0x4000_0000
    raw.buffer[offset : offset + 24] = request(CODES["CREATE_CONTEXT"], bytes(8), 1)
    raw.offer(0, 4)
    service.service()
    assert raw.used() == [(0, 0), (4, 24)]
    assert list(script.calls) == ["create_context"]


@pytest.mark.parametrize("size", range(1, 16))
def test_vq_007_truncated_header(size: int) -> None:
    made = ring()
    assert made.exchange(INFO_FRAME[:size]).used == 0


def test_vq_007_less_than_a_response_header_of_room() -> None:
    for room in range(1, 16):
        assert ring().exchange(INFO_FRAME, writable=(room,)).used == 0


@pytest.mark.parametrize(
    "frame",
    [
        request(CODES["CREATE_CONTEXT"], bytes(7), 5),
        request(CODES["POLL_EVENT"], bytes(8), 5),
        request(CODES["SUBMIT"], bytes(8), 5),
        request(CODES["GET_DEVICE_INFO"], b"", 5, length=1),
    ],
)
def test_vq_008_malformed_payload_writes_exactly_a_header(frame: bytes) -> None:
    assert ring().exchange(frame)[:2] == (16, INVALID_ARGUMENT)


def test_vq_009_unknown_opcode_changes_nothing() -> None:
    script = Script()
    made = ring(script)
    assert made.exchange(request(0xDEAD, request_id=5))[:2] == (16, UNSUPPORTED)
    assert not script.calls


def test_vq_010_nonzero_flags_are_refused() -> None:
    made = ring()
    assert made.exchange(request(CODES["GET_DEVICE_INFO"], request_id=5, flags=1))[:2] == (16, UNSUPPORTED)


def test_vq_011_trailing_readable_bytes() -> None:
    made = ring()
    assert made.exchange(INFO_FRAME + b"\0")[:2] == (16, INVALID_ARGUMENT)
    whole = request(CODES["GET_DEVICE_INFO"], b"\0", 5)
    assert made.exchange(whole)[:2] == (16, INVALID_ARGUMENT), "counted in payload_bytes, and still too long"


def test_vq_012_short_capacity_changes_nothing() -> None:
    script = Script()
    made = ring(script)
    assert made.exchange(request(CODES["CREATE_CONTEXT"], bytes(8), 5), writable=(23,)).used == 0
    assert not script.calls
    assert not any(made.device.engine.state.counts)


def test_vq_013_used_lengths_are_the_bytes_written() -> None:
    """`read_response` looks behind the used length in every test; here for one success and one failure of each size."""
    made = ring()
    assert made.exchange(INFO_FRAME, writable=(500,)).used == 92
    assert made.exchange(request(CODES["POLL_EVENT"], u64(9), 5), writable=(500,)).used == 16


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


def test_vq_015_submit_completes_before_its_event() -> None:
    bench = Bench(Script(immediate=False))
    here = world(bench)
    first = bench.made("SUBMIT", here.submission())
    assert bench.poll(first) == (PENDING, OK)
    bench.backend.complete()
    assert bench.poll(first) == (COMPLETE, OK)
    second = bench.made("SUBMIT", here.submission())
    bench.backend.complete(error=Status.DEADLINE_EXPIRED)
    assert bench.poll(second) == (FAILED, int(Status.DEADLINE_EXPIRED))
    assert bench.poll(first) == (COMPLETE, OK)


def test_vq_016_a_full_queue_is_backpressure_and_no_status() -> None:
    made = ring(size=4)
    made.publish(INFO_FRAME)
    made.publish(INFO_FRAME)
    with pytest.raises(Backpressure):
        made.publish(INFO_FRAME)
    made.service.service()
    for _ in range(2):
        response = made.collect()
        assert response is not None
        assert response.status == OK
    assert made.exchange(INFO_FRAME).status == OK


def test_vq_017_suppression_loses_no_work() -> None:
    made = ring()
    made.driver.disable_interrupts()
    made.queue.disable_kicks()
    made.publish(INFO_FRAME)
    assert not made.driver.should_kick()
    assert made.queue.enable_kicks()
    made.service.service()
    assert made.notified == 0
    assert made.driver.enable_interrupts()
    assert made.collect() is not None


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


def test_vq_019_reset_kills_every_id_and_frees_request_ids() -> None:
    script = Script(immediate=False)
    bench = Bench(script)
    here = world(bench)
    event = bench.made("SUBMIT", here.submission())
    old = {
        "DESTROY_CONTEXT": here.context, "FREE_BUFFER": here.source, "UNLOAD_PROGRAM": here.program,
        "DESTROY_QUEUE": here.queue, "POLL_EVENT": event, "CANCEL_EVENT": event, "DESTROY_EVENT": event,
    }  # fmt: skip
    assert not bench.engine.reset().discard
    bench.request_id = 0  # the same request IDs again
    again = world(bench)
    new_event = bench.made("SUBMIT", again.submission())
    for name, object_id in old.items():
        assert bench.status(name, u64(object_id)) == STALE_OBJECT, name
    assert not {here.context, here.source, here.program, here.queue, event} & {*again, new_event}


class Unwritable(Chain):
    """A chain whose response memory cannot be written: what a mapping that went away looks like from here."""

    def __init__(self, frame: bytes, capacity: int = 4096) -> None:
        request_view = memoryview(frame)
        super().__init__(0, (request_view,), (memoryview(bytes(capacity)),), len(frame), capacity)


@pytest.mark.parametrize("opcode", ["CREATE_CONTEXT", "ALLOCATE_BUFFER", "LOAD_PROGRAM", "SUBMIT", "FREE_BUFFER"])
def test_vq_020_response_lost_after_mutation(opcode: str) -> None:
    """The head is withheld (an empty one would say that nothing happened), and a reset makes the device whole."""
    bench = Bench()
    here = world(bench)
    frame = request(CODES[opcode], FIXED[opcode](bench, here), 9)
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


@pytest.mark.parametrize("opcode", ["DESTROY_EVENT", "FREE_BUFFER", "UNLOAD_PROGRAM", "DESTROY_QUEUE"])
def test_vq_020_indeterminate_release(opcode: str) -> None:
    bench = Bench()
    here = world(bench)
    objects = {"FREE_BUFFER": here.source, "UNLOAD_PROGRAM": here.program, "DESTROY_QUEUE": here.queue}
    target = objects.get(opcode) or bench.made("SUBMIT", here.submission())
    bench.script.next(opcode.lower(), Doubt(Status.BUSY))
    assert bench.call(opcode, u64(target))[:2] == (16, DEVICE_LOST)
    assert bench.engine.health is Health.DISCARD_REQUIRED
    assert bench.status("GET_DEVICE_INFO") == DEVICE_LOST


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
