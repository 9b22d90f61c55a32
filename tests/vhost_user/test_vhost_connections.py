"""Connections to a real daemon: cases V1 to V5 of the field, descriptors counted in the daemon's process."""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Callable

import pytest
from daemons import Daemon, Memory, Vm, readable, wait_until
from frames import request

from virtaccel.device.vhost_user import message as m
from virtaccel.device.vhost_user.message import Request
from virtaccel.guest_tools.transport.base import TransportError
from virtaccel.guest_tools.transport.vhost_user import FrontEnd

PF, V1 = 1 << 30, 1 << 32


def assert_served(daemon: Daemon) -> None:
    """The next front end is served."""
    with Vm(daemon.path).start() as vm:
        assert len(vm.call_device(request(1))) == 92


class Raw:
    """A socket on which a test writes bytes and descriptors as it likes."""

    def __init__(self, daemon: Daemon) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(10)
        self.socket.connect(daemon.path)

    def send(self, data: bytes, fds: list[int] | None = None) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([data], rights)

    def ended(self) -> bool:
        """The daemon has closed this connection (and sent nothing more than replies before that)."""
        try:
            while self.socket.recv(4096):
                pass
        except ConnectionResetError:
            pass
        return True

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def wait_until_fds(daemon: Daemon, fds: int) -> None:
    wait_until(lambda: daemon.fds() == fds, f"{fds} descriptors, not {daemon.fds()}")


# -- V1


def test_v1_a_thousand_sessions_leave_nothing_behind(daemon: Daemon) -> None:
    assert_served(daemon)
    memory = Memory()
    before, threads = daemon.idle_fds(), daemon.threads()
    resident = 0
    for number in range(1000):
        with Vm(daemon.path, memory=Kept(memory)).start() as vm:
            assert len(vm.call_device(request(1, request_id=number + 1))) == 92
        if number == 200:
            resident = daemon.status("VmRSS")
    wait_until_fds(daemon, before)
    assert daemon.threads() == threads
    assert daemon.status("VmRSS") - resident < 2048
    memory.close()


class Kept(Memory):
    """Memory that many connections share one after another."""

    def __init__(self, memory: Memory) -> None:
        self.fd, self.map, self.view, self.region = memory.fd, memory.map, memory.view, memory.region

    def close(self) -> None:
        pass


def test_v1_a_thousand_replacements_of_kick_call_and_error(daemon: Daemon) -> None:
    with Vm(daemon.path).start() as vm:
        before = daemon.fds()
        for _ in range(1000):
            for request_number, fd in (
                (Request.SET_VRING_KICK, vm.kick), (Request.SET_VRING_CALL, vm.call), (Request.SET_VRING_ERR, vm.error),
            ):  # fmt: skip
                vm.front.tell(request_number, m.U64.pack(0), [fd])
        assert daemon.fds() == before
        assert len(vm.call_device(request(1))) == 92


def test_v1_backend_channel_is_held_and_given_back(daemon: Daemon) -> None:
    settle = daemon.idle_fds()
    with Vm(daemon.path).start() as vm:
        before = daemon.fds()
        for _ in range(10):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                vm.front.tell(Request.SET_BACKEND_REQ_FD, b"", [theirs.fileno()])
        assert daemon.fds() == before + 1
    wait_until_fds(daemon, settle)


def header(number: int, size: int, flags: int = 1) -> bytes:
    return struct.pack("=III", number, flags, size)


WRONG_COUNTS = [(5, 40, 0), (5, 40, 2), (12, 8, 2), (13, 8, 2), (14, 8, 2), (21, 0, 2), (37, 40, 2), (38, 40, 2),
                (1, 0, 1), (2, 8, 1), (18, 8, 1), (24, 12, 3)]  # fmt: skip


@pytest.mark.parametrize(("number", "size", "count"), WRONG_COUNTS)
def test_v1_wrong_number_of_descriptors_closes_them_all(daemon: Daemon, number: int, size: int, count: int) -> None:
    assert_served(daemon)
    with Vm(daemon.path) as vm:
        vm.negotiate()
        before = daemon.fds()
        fds = [os.eventfd(0) for _ in range(count)]
        payload = (1).to_bytes(8, "little") + bytes(size - 8) if number == 5 else bytes(size)
        vm.front.send(number, payload, fds, m.FLAG_NEED_REPLY)
        if number == 1:
            with pytest.raises(TransportError):
                vm.front.receive()
        else:
            reply = vm.front.receive()
            assert reply.request == number
            assert reply.payload == b"" if number == 24 else m.decode_u64(reply.payload) != 0
            assert daemon.fds() == before
        for fd in fds:
            os.close(fd)
    assert_served(daemon)


def test_v1_truncated_control_data_ends_the_session_and_closes_everything(daemon: Daemon) -> None:
    assert_served(daemon)
    before = daemon.idle_fds()
    fds = [os.eventfd(0) for _ in range(200)]
    with Raw(daemon) as raw:
        raw.send(header(5, 8) + bytes(8), fds)
        assert raw.ended()
    wait_until_fds(daemon, before)
    for fd in fds:
        os.close(fd)
    assert_served(daemon)


def test_v1_descriptors_without_a_message_are_bounded(daemon: Daemon) -> None:
    before = daemon.idle_fds()
    fds = [os.eventfd(0) for _ in range(64)]
    with Raw(daemon) as raw:
        for byte in header(5, 8)[:3]:
            try:
                raw.send(bytes([byte]), fds)
            except (BrokenPipeError, ConnectionResetError):
                break
        assert raw.ended()
    wait_until_fds(daemon, before)
    for fd in fds:
        os.close(fd)


def test_descriptors_of_a_message_cut_short_are_closed(daemon: Daemon) -> None:
    before = daemon.idle_fds()
    memory = Memory()
    for cut in (1, 11, 12, 20):
        with Raw(daemon) as raw:
            raw.send((header(5, 40) + m.encode_table([memory.region]))[:cut], [memory.fd])
    wait_until_fds(daemon, before)
    memory.close()


@pytest.mark.parametrize("piece", [1, 5, 12, 13])
def test_messages_in_pieces_and_together(daemon: Daemon, piece: int) -> None:
    """Framing does not depend on how the stream is cut; descriptors come with any byte of their message."""
    memory = Memory()
    stream = m.encode(1) + m.encode(17) + m.encode(36)
    with Raw(daemon) as raw:
        for at in range(0, len(stream), piece):
            raw.send(stream[at : at + piece])
        answers = b""
        while len(answers) < 60:
            answers += raw.socket.recv(4096)
        assert [answers[at : at + 4] for at in (0, 20, 40)] == [header(n, 0)[:4] for n in (1, 17, 36)]
        raw.send(m.encode(16, m.U64.pack(8)))
        table = m.encode(5, m.encode_table([memory.region]), m.FLAG_NEED_REPLY)
        raw.send(table[:14])
        raw.send(table[14:], [memory.fd])
        assert raw.socket.recv(20) == m.encode_ack(5, failed=False)
    memory.close()


# -- V2


def test_v2_acknowledgements_over_the_socket(daemon: Daemon) -> None:
    """Never asked for GET_PROTOCOL_FEATURES; every SET is acknowledged when asked and silent when not."""
    with Vm(daemon.path) as vm:
        front = vm.front
        front.send(Request.SET_PROTOCOL_FEATURES, m.U64.pack(8), flags=m.FLAG_NEED_REPLY)
        assert front.receive().payload == m.U64.pack(0)
        front.acks = True
        front.tell(Request.SET_FEATURES, m.U64.pack(PF | V1))
        vm.share()
        vm.set_up()
        vm.enable()
        front.send(Request.SET_OWNER)
        front.send(Request.GET_QUEUE_NUM, flags=m.FLAG_NEED_REPLY)
        assert front.receive() == (Request.GET_QUEUE_NUM, 5, m.U64.pack(1))
        front.send(Request.GET_STATUS)
        assert front.receive().request == Request.GET_STATUS
        assert len(vm.call_device(request(1))) == 92


# -- V3


def test_v3_config_over_the_socket(daemon: Daemon) -> None:
    with Vm(daemon.path) as vm:
        vm.negotiate()
        whole = vm.front.read_config(0, 16)
        assert struct.unpack("<HHHHII", whole) == (1, 0, 1, 128, 16 << 20, 16 << 20)
        for offset, size in ((6, 2), (1, 3), (15, 1)):
            assert vm.front.read_config(offset, size) == whole[offset : offset + size]
        for offset, size in ((16, 4), (0xFFFFFFFF, 4)):
            assert vm.front.ask(Request.GET_CONFIG, m.CONFIG_HEAD.pack(offset, size, 0) + bytes(size)) == b""
        with pytest.raises(TransportError, match="refuses"):
            vm.front.tell(Request.SET_CONFIG, m.encode_config(0, b"\0"))
        assert vm.front.read_config(0, 16) == whole


# -- V4


def test_v4_without_protocol_features(daemon: Daemon) -> None:
    with Vm(daemon.path) as vm:
        vm.negotiate(features=V1)
        vm.share()
        vm.set_up()
        vm.publish(request(1))
        vm.ring_bell()
        assert vm.collect() == (0, 92)
        vm.front.send(Request.SET_FEATURES, m.U64.pack(V1))
        vm.front.send(Request.SET_FEATURES, m.U64.pack(V1 | PF | 1 << 28 | 1 << 29 | 1 << 34))
        assert len(vm.call_device(request(1, request_id=2))) == 92


def test_v4_unoffered_ring_features_are_never_acted_on(daemon: Daemon) -> None:
    """EVENT_IDX acknowledged all the same: the plain flags still decide about notifications."""
    with Vm(daemon.path).start() as vm:
        vm.front.tell(Request.SET_FEATURES, m.U64.pack((1 << 64) - 1))
        vm.queue.disable_interrupts()
        assert len(vm.call_device(request(1))) == 92
        assert not readable(vm.call, 0.05)


# -- V5


def test_v5_the_second_front_end_waits_for_the_first(daemon: Daemon) -> None:
    with Vm(daemon.path).start() as first:
        second = FrontEnd(daemon.path, 10.0)
        second.send(Request.GET_QUEUE_NUM)
        assert not readable(second.fileno(), 0.1)
        assert len(first.call_device(request(1))) == 92
    assert second.receive().payload == m.U64.pack(1)
    second.close()


GARBAGE: dict[str, bytes] = {
    "zeros": bytes(64),
    "ones": b"\xff" * 64,
    "text": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(16),
    "version 2": header(1, 0, flags=2),
    "huge size": header(5, 0xFFFFFFFF),
    "4097 bytes": header(5, 4097),
    "request that waits": header(31, 0),
    "short table": header(5, 4) + bytes(4),
}


@pytest.mark.parametrize("name", sorted(GARBAGE))
def test_v5_garbage_ends_only_its_session(daemon: Daemon, name: str) -> None:
    before = daemon.idle_fds()
    with Raw(daemon) as raw:
        raw.send(GARBAGE[name])
        assert raw.ended()
    assert_served(daemon)
    wait_until_fds(daemon, before)


def test_v5_memory_that_is_not_shared_is_named(daemon: Daemon) -> None:
    with Vm(daemon.path) as vm:
        vm.negotiate()
        with pytest.raises(TransportError, match="refuses"):
            vm.front.tell(Request.SET_MEM_TABLE, m.encode_table([vm.memory.region]))
    assert "share=on" in daemon.log()


def test_private_memory_shows_as_kicks_without_work(
    folder: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """By a daemon of its own: what earlier front ends have done may still be told by a shared one."""
    with Daemon(tmp_path_factory.mktemp("private")) as daemon:
        with Vm(daemon.path).start() as vm:
            for _ in range(200):
                vm.ring_bell()
                vm.front.ask(Request.GET_QUEUE_NUM)
        wait_until(lambda: "kicks come and the ring stays empty" in daemon.log(), "a message", daemon)
        assert_served(daemon)
        assert daemon.log().count("kicks come and the ring stays empty") == 1


def test_a_front_end_that_never_reads_its_replies_is_contained(daemon: Daemon) -> None:
    with Raw(daemon) as raw:
        raw.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            raw.socket.sendall(m.encode(1) * (4 << 20))
        assert daemon.status("VmRSS") < 250 * 1024
    assert_served(daemon)


def test_v5_restart_after_a_kill_on_the_same_path(folder: object, tmp_path_factory: pytest.TempPathFactory) -> None:
    with Daemon(tmp_path_factory.mktemp("restart")) as daemon:
        with Vm(daemon.path).start() as vm:
            assert len(vm.call_device(request(1))) == 92
            daemon.kill()
            with pytest.raises(TransportError):
                vm.front.ask(Request.GET_QUEUE_NUM)
        assert os.path.exists(daemon.path), "a killed process leaves its socket file"
        daemon.start()
        wait_until(refuses_nothing(daemon), "listens", daemon)
        assert_served(daemon)


def refuses_nothing(daemon: Daemon) -> Callable[[], bool]:
    def check() -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(daemon.path) == 0

    return check
