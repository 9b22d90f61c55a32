"""Memory that the device reaches: transfers from and to it, over a device in process and over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from daemons import Daemon

from virtaccel.device import wire
from virtaccel.device.wire import Opcode, Status
from virtaccel.guest_tools.arrays.accelerator import Accelerator
from virtaccel.guest_tools.client import Buffer, Client, DeviceError, ProtocolViolation
from virtaccel.guest_tools.errors import Unavailable
from virtaccel.guest_tools.session import Session
from virtaccel.guest_tools.transport.base import Backpressure, Config, Shared, Transport
from virtaccel.guest_tools.transport.vhost_user import VhostUserTransport
from virtaccel.guest_tools.via import open_transport

MIB = 1 << 20


@pytest.fixture(params=["in process", "socket"])
def accelerator(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Accelerator]:
    if request.param == "in process":
        with Accelerator(Session(open_transport("in-process:reference"))) as opened:
            yield opened
        return
    daemon = Daemon(tmp_path)
    try:
        with Accelerator(Session(VhostUserTransport(daemon.path))) as opened:
            yield opened
    finally:
        daemon.kill()


def noise(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


@pytest.mark.parametrize("size", [1, 100, 5000, MIB, 3 * MIB + 77])
def test_what_is_written_from_shared_memory_is_read_into_it(accelerator: Accelerator, size: int) -> None:
    source, sink, buffer = accelerator.share(size), accelerator.share(size), accelerator.buffer(size)
    data = noise(size)
    source.view[:] = data
    sink.view[:] = bytes(size)
    buffer.write(source)
    plain = memoryview(bytearray(size))
    buffer.read(plain)
    assert plain == data
    buffer.read(sink)
    assert sink.view == data
    accelerator.unshare(source)
    accelerator.unshare(sink)


def test_a_part_of_shared_memory_and_of_a_buffer(accelerator: Accelerator) -> None:
    shared, buffer = accelerator.share(4096), accelerator.buffer(4096)
    shared.view[:] = noise(4096)
    buffer.write(shared[100:300], 50)
    before = bytes(shared.view)
    buffer.read(shared[1000:1200], 50)
    assert bytes(shared.view) == before[:1000] + before[100:300] + before[1200:]
    assert len(shared[5000:]) == 0
    with pytest.raises(ValueError, match="contiguous"):
        shared[::2]


def test_a_refused_transfer_leaves_shared_memory_and_the_way_in_order(accelerator: Accelerator) -> None:
    shared, buffer = accelerator.share(4096), accelerator.buffer(64)
    shared.view[:] = noise(4096)
    before = bytes(shared.view)
    for transfer in (buffer.write, buffer.read):
        for memory, status in ((shared, Status.OUT_OF_BOUNDS), (shared[:0], Status.INVALID_ARGUMENT)):
            with pytest.raises(DeviceError) as refused:
                transfer(memory)
            assert refused.value.status == status
    assert bytes(shared.view) == before
    buffer.write(shared[:64])
    buffer.read(shared[64:128])
    assert bytes(shared.view[64:128]) == before[:64]


def test_shared_memory_is_bounded_and_comes_back(accelerator: Accelerator) -> None:
    taken = [accelerator.share(4 * MIB)]

    def take_all() -> None:
        while len(taken) < 100:
            taken.append(accelerator.share(4 * MIB))

    with pytest.raises(Backpressure):
        take_all()
    for shared in taken:
        accelerator.unshare(shared)
    assert len(accelerator.share(4 * MIB)) == 4 * MIB
    with pytest.raises(Backpressure):
        accelerator.share(0)


def test_a_reset_with_reads_under_way_gives_whole_slots_back() -> None:
    transport = open_transport("in-process:reference")
    session = Session(transport)
    with Accelerator(session) as accelerator:
        shared, buffer = accelerator.share(4096), accelerator.buffer(4096)
        for _ in range(5):
            session.start(session.client.read_buffer(buffer.id, 0, shared))
        session.reset()
        context = session.call(session.client.create_context())
        for _ in range(200):  # each slot once more, for responses longer than a header
            assert session.call(session.client.get_device_info()).max_contexts
        assert context


def test_a_transport_without_such_memory_says_so() -> None:
    class Plain(Transport):
        """A transport with nothing to share: the one seam that is cut here."""

        def __init__(self) -> None:
            self._inner = open_transport("in-process:reference")
            self.config, self.publish = self._inner.config, self._inner.publish
            self.collect, self.reset, self.close = self._inner.collect, self._inner.reset, self._inner.close

    with Accelerator(Session(Plain())) as accelerator, pytest.raises(Unavailable, match="no memory to share"):
        accelerator.share(64)


CONFIG = Config(1, 0, 1, 256, 1 << 20, 1 << 20)


@pytest.mark.parametrize(
    ("status", "payload_bytes", "beyond"),
    [(0, 64, 63), (0, 63, 63), (0, 64, 65), (0, 0, 0), (int(Status.BUSY), 0, 1), (int(Status.BUSY), 64, 64)],
)
def test_a_response_that_does_not_fill_the_sink_is_a_violation(status: int, payload_bytes: int, beyond: int) -> None:
    client = Client(CONFIG)
    request = client.read_buffer(Buffer(1), 0, Shared(0, memoryview(bytearray(64))))
    header = wire.RESPONSE_HEADER.pack(status, 0, payload_bytes, request.request_id)
    with pytest.raises(ProtocolViolation):
        client.receive(request, memoryview(header), beyond)
    assert client.recovery is not None


def test_a_response_that_fills_the_sink_is_right() -> None:
    client = Client(CONFIG)
    request = client.read_buffer(Buffer(1), 0, Shared(0, memoryview(bytearray(64))))
    assert (request.opcode, request.capacity) == (Opcode.READ_BUFFER, 16)
    header = wire.RESPONSE_HEADER.pack(0, 0, 64, request.request_id)
    client.receive(request, memoryview(header), 64)
