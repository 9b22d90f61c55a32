"""Client, ring, engine and the reference backend in one process: the whole path, every outcome scripted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest

from virtaccel.device import reference
from virtaccel.device.backend import BackendUnavailable
from virtaccel.device.config import DeviceConfig, WireConfig
from virtaccel.device.reference import Reference
from virtaccel.device.wire import EventState, Status, Usage
from virtaccel.guest_tools.client import (
    Binding,
    Buffer,
    Client,
    Context,
    DeviceError,
    Event,
    Program,
    Queue,
    Request,
)
from virtaccel.guest_tools.session import NoAnswer, Session
from virtaccel.guest_tools.transport.base import Backpressure, TransportError
from virtaccel.guest_tools.transport.in_process import InProcessTransport

ANY_USE = Usage.TRANSFER_SOURCE | Usage.TRANSFER_DESTINATION | Usage.PROGRAM_INPUT | Usage.PROGRAM_OUTPUT
Open = Callable[..., "Rig"]


class Rig(NamedTuple):
    """An open session and what lies behind it."""

    backend: Reference
    transport: InProcessTransport
    session: Session
    client: Client
    context: Context
    queue: Queue

    def buffer(self, size: int) -> Buffer:
        return self.session.call(self.client.allocate_buffer(self.context, size, ANY_USE, domain=1))

    def load_request(self, operation: int = reference.Operation.XOR, operand: int = 0x5A) -> Request[Program]:
        artifact = reference.Program(operation, operand, 1, 1, 0).pack()
        return self.client.load_program(self.context, reference.FORMAT, [0] * 12, artifact, 4096)

    def submit_request(self, program: Program, source: Buffer, target: Buffer, size: int) -> Request[Event]:
        bindings = [Binding(source, 0, size, 0, 1), Binding(target, 0, size, 1, 2)]
        return self.client.submit(self.queue, program, bindings)


def start_until_full(session: Session, requests: Iterable[Request[Any]]) -> list[int]:
    """Start requests until one meets back-pressure; the tokens of those that did not."""
    tokens: list[int] = []
    for request in requests:
        try:
            tokens.append(session.start(request))
        except Backpressure:
            return tokens
    pytest.fail("never any back-pressure")


@pytest.fixture
def rig() -> Iterator[Open]:
    opened: list[InProcessTransport] = []

    def open_rig(queue_size: int = 16, patience: float | None = 5.0, **wire: int) -> Rig:
        backend = Reference()
        config = DeviceConfig(WireConfig(**{"max_chain_descriptors": queue_size, **wire}))
        transport = InProcessTransport(lambda: backend, config, queue_size=queue_size)
        opened.append(transport)
        session = Session(transport, patience)
        context = session.call(session.client.create_context())
        queue = session.call(session.client.create_queue(context))
        return Rig(backend, transport, session, session.client, context, queue)

    yield open_rig
    for transport in opened:
        transport.close()


def test_a_program_runs_on_written_bytes_and_is_read_back(rig: Open) -> None:
    one = rig()
    source, target = one.buffer(64), one.buffer(64)
    data = bytes(range(64))
    one.session.write(source, memoryview(data))
    program = one.session.call(one.load_request())
    event = one.session.call(one.submit_request(program, source, target, 64))
    assert one.session.wait(event).state == EventState.COMPLETE
    one.session.call(one.client.destroy_event(event))
    result = bytearray(64)
    one.session.read(target, memoryview(result))
    assert result == bytes(byte ^ 0x5A for byte in data)


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 300_000])
def test_transfers_larger_than_a_frame_are_split(size: int, rig: Open) -> None:
    one = rig(max_request_bytes=4096, max_response_bytes=3000)
    data = random.Random(size).randbytes(size)
    buffer = one.buffer(size + 7)
    one.session.write(buffer, memoryview(data), 7)
    result = bytearray(size)
    one.session.read(buffer, memoryview(result), 7)
    assert result == data
    assert one.session.outstanding == 0


def test_largest_frames_pass_in_one_piece(rig: Open) -> None:
    one = rig()
    size = (16 << 20) - 40
    data = random.Random(1).randbytes(size)
    buffer = one.buffer(size)
    one.session.call(one.client.write_buffer(buffer, 0, data))
    result = bytearray(size)
    one.session.call(one.client.read_buffer(buffer, 0, memoryview(result)))
    assert result == data


def test_a_call_keeps_what_comes_back_before_its_own_answer(rig: Open) -> None:
    one = rig()
    tokens = [one.session.start(one.client.create_context()) for _ in range(3)]
    assert one.session.call(one.client.get_device_info()).max_contexts > 0
    assert one.session.outstanding == 3
    contexts = {one.session.result(token) for token in reversed(tokens)}
    assert len(contexts) == 3
    assert one.session.outstanding == 0
    with pytest.raises(KeyError):
        one.session.result(tokens[0])


def test_vq_016_full_ring_is_backpressure_and_nothing_is_lost(rig: Open) -> None:
    one = rig(queue_size=8)
    started = start_until_full(one.session, (one.client.create_context() for _ in range(100)))
    assert len(started) == 4  # two descriptors each
    assert one.session.call(one.client.get_device_info())  # makes room for itself
    contexts = [one.session.result(token) for token in started]
    assert len(set(contexts)) == 4


def test_large_frames_beyond_the_memory_are_backpressure_until_some_come_back(rig: Open) -> None:
    one = rig(queue_size=16)
    size = 15 << 20
    buffers = [one.buffer(size) for _ in range(2)]
    for fill, buffer in enumerate(buffers, 1):
        one.session.call(one.client.write_buffer(buffer, 0, bytes([fill]) * size))
    sinks = [bytearray(size) for _ in range(6)]
    reads = (one.client.read_buffer(buffers[index % 2], 0, memoryview(sink)) for index, sink in enumerate(sinks))
    tokens = start_until_full(one.session, reads)
    assert tokens
    for index, token in enumerate(tokens):
        one.session.result(token)
        assert sinks[index] == bytes([index % 2 + 1]) * size


def test_errors_of_started_commands_reach_whoever_asks(rig: Open) -> None:
    one = rig()
    bad, good = one.session.start(one.client.free_buffer(Buffer(12345))), one.session.start(one.client.create_context())
    assert one.session.result(good)
    with pytest.raises(DeviceError) as caught:
        one.session.result(bad)
    assert caught.value.status == Status.STALE_OBJECT


def test_the_first_error_of_a_transfer_is_raised_and_nothing_stays_outstanding(rig: Open) -> None:
    one = rig(max_request_bytes=4096)
    buffer = one.buffer(10_000)
    with pytest.raises(DeviceError) as caught:
        one.session.write(buffer, memoryview(bytes(30_000)))
    assert caught.value.status == Status.OUT_OF_BOUNDS
    assert one.session.outstanding == 0
    one.session.write(buffer, memoryview(bytes(10_000)))


def test_waiting_for_an_event_ends_with_it_or_with_the_time(rig: Open) -> None:
    one = rig()
    one.backend.script.immediate = False
    program, source, target = one.session.call(one.load_request()), one.buffer(8), one.buffer(8)
    event = one.session.call(one.submit_request(program, source, target, 8))
    assert one.session.wait(event, 0.01).state == EventState.PENDING
    one.backend.complete(error=Status.DEADLINE_EXPIRED)
    assert one.session.wait(event) == (EventState.FAILED, Status.DEADLINE_EXPIRED)


def test_refusal_reasons_are_kept_for_whoever_runs_the_device(rig: Open) -> None:
    one = rig()
    one.transport.take_reasons()
    with pytest.raises(DeviceError):
        one.session.call(one.client.load_program(one.context, 77, [0] * 12, b"something", 1))
    (reason,) = one.transport.take_reasons()
    assert "0x4d" in reason or "77" in reason
    assert one.transport.take_reasons() == ()


def test_no_answer_within_patience(rig: Open) -> None:
    one = rig(patience=0.05)
    one.backend.script.deferred_loads = True
    with pytest.raises(NoAnswer):
        one.session.call(one.load_request())
    one.session.reset()
    one.backend.script.deferred_loads = False
    assert one.session.call(one.client.create_context())


def test_vq_019_reset_makes_every_id_stale_and_starts_request_ids_anew(rig: Open) -> None:
    one = rig()
    buffer = one.buffer(8)
    one.session.start(one.client.create_context())
    one.session.reset()
    assert one.session.outstanding == 0
    with pytest.raises(DeviceError) as caught:
        one.session.call(one.client.free_buffer(buffer))
    assert caught.value.status == Status.STALE_OBJECT
    assert one.client.get_device_info().request_id == 2
    assert one.backend.live == 0


def test_commands_after_close_fail(rig: Open) -> None:
    one = rig()
    one.transport.close()
    one.transport.close()
    with pytest.raises(TransportError):
        one.session.call(one.client.get_device_info())


def test_device_that_breaks_the_ring_is_noticed(rig: Open) -> None:
    one = rig()
    one.session.start(one.client.create_context())
    one.transport.service.service()
    used = one.transport.ring.placement.used - one.transport.ring.placement.descriptors
    block = one.transport._memory.regions[0].view
    last = int.from_bytes(block[used + 2 : used + 4], "little")
    block[used + 2 : used + 4] = (last + 2).to_bytes(2, "little")
    with pytest.raises(TransportError, match="broke the ring"):
        one.session.finish(0)
    one.session.reset()
    assert one.session.call(one.client.create_context())


def test_backend_that_cannot_be_opened_is_said_so() -> None:
    def fail() -> Reference:
        raise BackendUnavailable("no such device")

    with pytest.raises(BackendUnavailable, match="no such device"):
        InProcessTransport(fail)
