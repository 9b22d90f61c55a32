"""The front end transport and the client over it, against a daemon in another process: work, reset, loss, restart."""

from __future__ import annotations

import os
import signal
import time

import pytest
from daemons import PATIENCE, Daemon

from virtaccel.device.reference import FORMAT, Operation, Program
from virtaccel.device.wire import Status, Usage
from virtaccel.guest_tools.client import Binding, Context, DeviceError
from virtaccel.guest_tools.errors import Unavailable
from virtaccel.guest_tools.session import NoAnswer, Session
from virtaccel.guest_tools.transport.base import TransportError
from virtaccel.guest_tools.transport.vhost_user import VhostUserTransport
from virtaccel.guest_tools.via import open_transport

EVERY_USE = Usage.TRANSFER_SOURCE | Usage.TRANSFER_DESTINATION | Usage.PROGRAM_INPUT | Usage.PROGRAM_OUTPUT


def opened(daemon: Daemon) -> Session:
    return Session(open_transport(f"vhost-user:{daemon.path}"), patience=20.0)


def run_program(session: Session, data: bytes) -> bytes:
    """Everything once: context, buffers, program, queue, submission and back; the data with 3 added to each byte."""
    client, call = session.client, session.call
    info = call(client.get_device_info())
    context = call(client.create_context())
    source, sink = (
        call(client.allocate_buffer(context, len(data), EVERY_USE, domain=info.domain)) for _ in range(2)
    )
    program = call(client.load_program(context, FORMAT, (0,) * 12, Program(Operation.ADD, 3, 1, 1, 0).pack(), 4096))
    queue = call(client.create_queue(context))
    session.write(source, memoryview(data))
    bindings = [Binding(source, 0, len(data), 0, 1), Binding(sink, 0, len(data), 1, 2)]
    event = call(client.submit(queue, program, bindings))
    assert session.wait(event, 10.0).state == 1
    result = bytearray(len(data))
    session.read(sink, memoryview(result))
    for request in (
        client.destroy_event(event), client.destroy_queue(queue), client.unload_program(program),
        client.free_buffer(source), client.free_buffer(sink), client.destroy_context(context),
    ):  # fmt: skip
        call(request)
    return bytes(result)


def test_a_whole_program(daemon: Daemon) -> None:
    session = opened(daemon)
    data = os.urandom(5000)
    assert run_program(session, data) == bytes((byte + 3) & 0xFF for byte in data)
    session.close()
    session.close()


def test_transfers_of_many_sizes(daemon: Daemon) -> None:
    """Frames in slots, frames in pages, and more than one frame: up to beyond the largest."""
    session = opened(daemon)
    client, call = session.client, session.call
    context = call(client.create_context())
    domain = call(client.get_device_info()).domain
    for size in (1, 100, 741, 5000, 1 << 20, (16 << 20) - 40, 40 << 20):
        buffer = call(client.allocate_buffer(context, size, EVERY_USE, domain=domain))
        data = os.urandom(size)
        session.write(buffer, memoryview(data))
        back = bytearray(size)
        session.read(buffer, memoryview(back))
        assert back == data
        call(client.free_buffer(buffer))
    session.close()


def test_many_commands_outstanding(daemon: Daemon) -> None:
    session = opened(daemon)
    tokens = [session.start(session.client.get_device_info()) for _ in range(100)]
    uuids = {session.result(token).uuid for token in reversed(tokens)}
    assert len(uuids) == 1
    session.close()


def test_reset_ends_every_object_and_goes_on(daemon: Daemon) -> None:
    session = opened(daemon)
    context = session.call(session.client.create_context())
    for _ in range(20):
        session.reset()
        with pytest.raises(DeviceError) as stale:
            session.call(session.client.destroy_context(Context(context)))
        assert stale.value.status == Status.STALE_OBJECT
        context = session.call(session.client.create_context())
    session.close()


def test_opening_and_closing_leaves_nothing_in_this_process(daemon: Daemon) -> None:
    opened(daemon).close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        session = opened(daemon)
        session.call(session.client.get_device_info())
        session.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_nobody_there(tmp_path: object) -> None:
    for via in (f"vhost-user:{tmp_path}/nothing", "vhost-user:"):
        with pytest.raises(Unavailable):
            open_transport(via)
    with pytest.raises(Unavailable):
        open_transport("vhost-user:/some/path", "CPU")


def test_closed_transport_says_so(daemon: Daemon) -> None:
    transport = VhostUserTransport(daemon.path, bulk_bytes=1 << 20)
    transport.close()
    for act in (lambda: transport.publish([bytes(16)], 16), lambda: transport.collect(1.0), transport.reset):
        with pytest.raises(TransportError, match="closed"):
            act()


def test_nothing_to_collect_returns_in_time(daemon: Daemon) -> None:
    transport = VhostUserTransport(daemon.path, bulk_bytes=1 << 20)
    began = time.monotonic()
    assert transport.collect(0) is None
    assert transport.collect(0.1) is None
    assert 0.1 <= time.monotonic() - began < PATIENCE
    transport.close()


def test_daemon_killed_mid_traffic_is_noticed_and_a_restarted_one_serves_on(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with Daemon(tmp_path_factory.mktemp("killed")) as daemon:
        session = opened(daemon)
        context = session.call(session.client.create_context())
        daemon.process.send_signal(signal.SIGSTOP)
        token = session.start(session.client.get_device_info())
        daemon.kill()
        with pytest.raises(TransportError) as noticed:
            session.result(token)
        assert not isinstance(noticed.value, NoAnswer), "noticed, not waited for"
        with pytest.raises(TransportError):
            session.call(session.client.get_device_info())
        with pytest.raises(TransportError):
            session.reset()
        daemon.start()
        session.reset()
        with pytest.raises(DeviceError):
            session.call(session.client.destroy_context(Context(context)))
        data = os.urandom(100)
        assert run_program(session, data) == bytes((byte + 3) & 0xFF for byte in data)
        session.close()


def test_daemon_that_ends_politely_is_noticed_as_well(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Daemon(tmp_path_factory.mktemp("ended")) as daemon:
        session = opened(daemon)
        session.call(session.client.create_context())
        assert daemon.stop() == 0
        with pytest.raises(TransportError):
            session.call(session.client.get_device_info())
        daemon.start()
        session.reset()
        session.call(session.client.create_context())
        session.close()


@pytest.mark.parametrize("spin", [0.0, 0.0002])
@pytest.mark.parametrize("poll", ["0", "100"])
def test_looking_before_sleeping_changes_no_answer(
    tmp_path_factory: pytest.TempPathFactory, spin: float, poll: str
) -> None:
    with Daemon(tmp_path_factory.mktemp("poll"), "--poll-us", poll) as daemon:
        transport = VhostUserTransport(daemon.path, bulk_bytes=1 << 20, spin=spin)
        session = Session(transport, patience=20.0)
        uuid = session.call(session.client.get_device_info()).uuid
        for number in range(3000):
            if number % 500 == 0:
                time.sleep(0.002)
            assert session.call(session.client.get_device_info()).uuid == uuid
        session.close()
