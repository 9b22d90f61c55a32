"""A vhost-user front end: plays virtual machine monitor and guest driver against a running `vhost-user-accel`.

`FrontEnd` is the monitor's half: the socket, messages and descriptors (Vhost-user Protocol). `VhostUserTransport` adds
the driver's half: memory in a sealed memfd, one command ring over it, and event descriptors for kick, call and error.
Knows no command. Standard library only.

A daemon that goes away is noticed at once, since its end of the socket closes: `publish` and `collect` then raise
TransportError, and `reset` connects anew, so that a restarted daemon serves on after a reset. Nothing outlives the
daemon: what was outstanding is lost, as a guest's commands are in a device reset.
"""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from virtaccel.device.pacing import BARE_RING_REST
from virtaccel.device.vhost_user import message as m
from virtaccel.device.vhost_user.message import ProtocolFeature, Request
from virtaccel.guest_tools.errors import Unavailable
from virtaccel.guest_tools.transport.base import Completion, Config, Part, Shared, TransportError, decode_config
from virtaccel.guest_tools.transport.raw import HasRawRing, RawRing
from virtaccel.guest_tools.transport.ring import CommandRing, block_bytes
from virtaccel.virtqueue.layout import Placement

# The prefix of wire-abi.md, section 2. A device of a later minor version may have more behind it, which a 1.0 driver
# leaves alone.
CONFIG_BYTES: Final = 16
# What /proc calls the memory shared with the device, here and there.
MEMORY_NAME: Final = "virtaccel"
GUEST_ADDRESS: Final = 1 << 32
# Where the block of memory is, for descriptors and for the ring's parts: two address spaces, so two numbers.
USER_ADDRESS: Final = 0x5600_0000_0000

# VERSION_1 is a must (virtio 1.3, 6.1); without protocol features there is no config space to read.
WANTED_FEATURES = m.VIRTIO_F_VERSION_1 | m.VHOST_USER_F_PROTOCOL_FEATURES
WANTED_PROTOCOL_FEATURES = sum(ProtocolFeature) & ~ProtocolFeature.BACKEND_REQ  # nobody here listens to requests
STATUS_RUNNING: Final = 0xF  # ACKNOWLEDGE, DRIVER, DRIVER_OK, FEATURES_OK (virtio 2.1)
# Answers that were under way when the device reported its error are still taken; a second later none will come.
_ERROR_GRACE_S: Final = 1.0


class FrontEnd:
    """One connection to a back end. Raises TransportError when the back end is gone or breaks the protocol."""

    def __init__(self, path: str, timeout: float = 10.0) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        self.acks = False
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise TransportError(f"{path}: {error.strerror or error}") from error

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, request: int, payload: bytes = b"", fds: Sequence[int] = (), flags: int = 0) -> None:
        """One message, no answer awaited. The descriptors stay the caller's."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        data = m.encode(request, payload, flags)
        try:
            # Descriptors travel with the first byte, so what did not fit at once goes without them.
            sent = self._socket.sendmsg([data], rights, socket.MSG_NOSIGNAL)
            if sent < len(data):
                self._socket.sendall(data[sent:], socket.MSG_NOSIGNAL)
        except OSError as error:
            raise TransportError(f"the back end is gone: {error.strerror or error}") from error

    def receive(self) -> m.Message:
        """The next reply."""
        header = m.decode_header(self._read(m.HEADER.size))
        if not header.flags & m.FLAG_REPLY:
            raise TransportError("the back end sent something that is no reply")
        return m.Message(header.request, header.flags, self._read(header.size))

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                piece = self._socket.recv(size - len(data))
            except OSError as error:
                raise TransportError(f"no reply from the back end: {error}") from error
            if not piece:
                raise TransportError("the back end closed the connection")
            data += piece
        return data

    def ask(self, request: int, payload: bytes = b"") -> bytes:
        """A request that has a reply of its own; that reply's payload."""
        self.send(request, payload)
        return self._answer(request)

    def _answer(self, request: int) -> bytes:
        reply = self.receive()
        if reply.request != request:
            raise TransportError(f"the back end answered {m.NAMES.get(request, request)} with {reply.name}")
        return reply.payload

    def tell(self, request: int, payload: bytes = b"", fds: Sequence[int] = ()) -> None:
        """A request without a reply, acknowledged where that was negotiated. Raises TransportError if refused."""
        self.send(request, payload, fds, m.FLAG_NEED_REPLY if self.acks else 0)
        if self.acks and m.decode_u64(self._answer(request)):
            raise TransportError(f"the back end refuses {m.NAMES.get(request, request)}; its log says why")

    def ask_u64(self, request: int) -> int:
        return m.decode_u64(self.ask(request))

    def negotiate(self, features: int, protocol_features: int) -> int:
        """Agree on what both sides have. Returns the protocol features in force."""
        offered = self.ask_u64(Request.GET_FEATURES)
        agreed = 0
        if offered & features & m.VHOST_USER_F_PROTOCOL_FEATURES:
            agreed = self.ask_u64(Request.GET_PROTOCOL_FEATURES) & protocol_features
            self.tell(Request.SET_PROTOCOL_FEATURES, m.U64.pack(agreed))
            self.acks = bool(agreed & ProtocolFeature.REPLY_ACK)
        self.tell(Request.SET_OWNER)
        self.tell(Request.SET_FEATURES, m.U64.pack(offered & features))
        return agreed

    def read_config(self, offset: int, size: int) -> bytes:
        payload = self.ask(Request.GET_CONFIG, m.encode_config(offset, bytes(size)))
        if len(payload) != m.CONFIG_HEAD.size + size:
            raise TransportError(f"the back end has no {size} bytes of config space at {offset}")
        return payload[m.CONFIG_HEAD.size :]

    def start_ring(self, size: int, at: Placement, kick: int, call: int, error: int) -> None:
        """Set up and enable vring 0 from index 0; `at` in user addresses."""
        # Size and place first, descriptors next, and last what lets it run: a kick may start a ring ("Ring states").
        self.tell(Request.SET_VRING_NUM, m.encode_vring_state(0, size))
        self.tell(Request.SET_VRING_BASE, m.encode_vring_state(0, 0))
        self.tell(Request.SET_VRING_ADDR, m.VRING_ADDRESS.pack(0, 0, at.descriptors, at.used, at.available, 0))
        self.tell(Request.SET_VRING_CALL, m.U64.pack(0), [call])
        self.tell(Request.SET_VRING_ERR, m.U64.pack(0), [error])
        self.tell(Request.SET_VRING_KICK, m.U64.pack(0), [kick])
        self.tell(Request.SET_VRING_ENABLE, m.encode_vring_state(0, 1))

    def stop_ring(self) -> int:
        """Disable and stop vring 0; the index where it stood."""
        self.tell(Request.SET_VRING_ENABLE, m.encode_vring_state(0, 0))
        return m.decode_vring_state(self.ask(Request.GET_VRING_BASE, m.encode_vring_state(0, 0))).num

    def close(self) -> None:
        self._socket.close()


class VhostUserTransport(HasRawRing):
    """A device behind the vhost-user socket at `path`, as a `Transport`.

    `queue_size` descriptors; `bulk_bytes` of memory for frames that are not small (default: two of the device's
    largest). `spin` seconds are spent looking for a completion before sleeping. Raises TransportError.
    """

    def __init__(
        self, path: str, *, queue_size: int = 256, bulk_bytes: int | None = None, spin: float = 0.0,
        timeout: float = 10.0,
    ) -> None:
        self._path = path
        self._queue_size = queue_size
        self._spin = spin
        self._timeout = timeout
        self._front: FrontEnd | None = None
        self._memory: mmap.mmap | None = None
        self._commands: CommandRing | None = None
        self._fd = self._kick = self._call = self._error = -1
        self._failed_at: float | None = None
        self._closed = False
        try:
            self.config: Config = self._connect()
            room = 2 * (self.config.max_request_bytes + self.config.max_response_bytes)
            size = block_bytes(queue_size, room if bulk_bytes is None else bulk_bytes)
            # One block for ring and frames: the back end maps it once, and no command needs a new region.
            self._fd, self._memory = _sealed_memory(size)
            self._region = m.MemoryRegion(GUEST_ADDRESS, size, USER_ADDRESS, 0)
            block = memoryview(self._memory)
            self._commands = CommandRing(block, _locate, queue_size, self.config.max_chain_descriptors)
            self._kick, self._call, self._error = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(3))
            self._start()
        except BaseException:
            self.close()
            raise

    # -- the monitor's half

    def _connect(self) -> Config:
        """A new connection, negotiated up to the config space."""
        if self._front is not None:
            self._front.close()
        self._front = FrontEnd(self._path, self._timeout)
        self._agreed = self._front.negotiate(WANTED_FEATURES, WANTED_PROTOCOL_FEATURES)
        return decode_config(self._front.read_config(0, CONFIG_BYTES), self._queue_size)

    def _start(self) -> None:
        """Memory, ring and status: from here on the device may run."""
        front = self._live()
        # One region more costs less than a whole new table, so it is preferred, as QEMU does.
        if self._agreed & ProtocolFeature.CONFIGURE_MEM_SLOTS:
            front.tell(Request.ADD_MEM_REG, m.encode_single_region(self._region), [self._fd])
        else:
            front.tell(Request.SET_MEM_TABLE, m.encode_table([self._region]), [self._fd])
        self._start_ring()
        self._failed_at = None
        self._poll = select.poll()
        for fd in (self._call, self._error, front.fileno()):
            self._poll.register(fd, select.POLLIN)

    def _start_ring(self) -> None:
        front = self._live()
        offset = USER_ADDRESS - GUEST_ADDRESS
        at = Placement(*(part + offset for part in self._ring.placement))
        front.start_ring(self._queue_size, at, self._kick, self._call, self._error)
        if self._agreed & ProtocolFeature.STATUS:
            front.tell(Request.SET_STATUS, m.U64.pack(STATUS_RUNNING))
        # Interrupts are asked for only while this side sleeps: looking finds most answers sooner than an event would.
        self._ring.queue.disable_interrupts()

    def _live(self) -> FrontEnd:
        if self._front is None:
            raise TransportError("the transport is closed" if self._closed else "the back end is gone; reset first")
        return self._front

    @property
    def _ring(self) -> CommandRing:
        if self._commands is None:
            raise TransportError("the transport is closed")
        return self._commands

    def _lose(self, why: str) -> TransportError:
        if self._front is not None:
            self._front.close()
            self._front = None
        return TransportError(why)

    # -- the driver's half

    def publish(self, request: Sequence[Part], capacity: int) -> int:
        if self._front is None:
            self._live()
        token = self._ring.publish(request, capacity)
        if self._ring.queue.should_kick():
            os.eventfd_write(self._kick, 1)
        return token

    def share(self, size: int) -> Shared:
        return self._ring.share(size)

    def unshare(self, shared: Shared) -> None:
        self._ring.unshare(shared)

    def publish_shared(
        self, request: Sequence[Part], capacity: int, source: Shared | None, sink: Shared | None
    ) -> int:
        if self._front is None:
            self._live()
        token = self._ring.publish_shared(request, capacity, source, sink)
        if self._ring.queue.should_kick():
            os.eventfd_write(self._kick, 1)
        return token

    def collect(self, timeout: float | None) -> Completion | None:
        ring = self._ring
        found = ring.collect()
        if found is not None or timeout == 0:
            return found
        if self._front is None:
            self._live()
        if self._spin:
            until = time.perf_counter() + self._spin
            while time.perf_counter() < until:
                found = ring.collect()
                if found is not None:
                    return found
        return self._sleep(timeout)

    def _sleep(self, timeout: float | None) -> Completion | None:
        ring = self._ring
        until = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                # To ask for interrupts and then look once more is the only order that loses none (virtio 1.3, 2.7.7).
                if not ring.queue.enable_interrupts():
                    left = self._left(until)
                    # The socket is watched too: a daemon that dies closes it, and nobody waits for an answer that
                    # cannot come.
                    events = self._poll.poll(None if left is None else max(0.0, left * 1000))
                else:
                    events = []
                found = ring.collect()
                if found is not None:
                    return found
                self._look(events)
                if until is not None and time.monotonic() >= until:
                    return None
        finally:
            ring.queue.disable_interrupts()

    def _left(self, until: float | None) -> float | None:
        now = time.monotonic()
        left = None if until is None else until - now
        if self._failed_at is not None:
            grace = self._failed_at + _ERROR_GRACE_S - now
            left = grace if left is None else min(left, grace)
        return left

    def _look(self, events: Sequence[tuple[int, int]]) -> None:
        """What woke us, when it was no completion."""
        for fd, _ in events:
            if fd == self._call:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._call)
            elif fd == self._error:
                # The error counter stays readable; watching it on would turn the wait into a busy loop.
                self._poll.unregister(fd)
                self._failed_at = time.monotonic()
            else:
                raise self._lose("the back end closed the connection")
        if self._failed_at is not None and time.monotonic() - self._failed_at > _ERROR_GRACE_S:
            raise TransportError("the device reports an error on its ring and answers no more; reset it")

    def raw_ring(self) -> RawRing:
        """The ring laid bare, see transport/raw.py."""
        return self._ring.lay_bare(lambda: os.eventfd_write(self._kick, 1), self._rest, self.reset)

    def _rest(self, seconds: float) -> None:
        """Wait a little for a device that was not asked to interrupt; notice when it is gone."""
        # A back end never speaks unasked here, so a readable socket can only mean that it has gone.
        if select.select([self._live()], [], [], min(seconds, BARE_RING_REST))[0]:
            raise self._lose("the back end closed the connection")

    def reset(self) -> None:
        if self._closed:
            raise TransportError("the transport is closed")
        front = self._front
        if front is not None:
            try:
                # A living back end is reset over its connection; a dead one only by connecting to the next.
                self._reset_connected(front)
                return
            except TransportError:
                self._lose("gone")
        self.config = self._connect()
        self._clear()
        self._start()

    def _reset_connected(self, front: FrontEnd) -> None:
        # The ring first: once it stands still, nothing is written into the answers that the reset takes back.
        front.stop_ring()
        if self._agreed & ProtocolFeature.RESET_DEVICE:
            front.tell(Request.RESET_DEVICE)
        elif self._agreed & ProtocolFeature.STATUS:
            front.tell(Request.SET_STATUS, m.U64.pack(0))
        self._clear()
        self._start_ring()
        if self._failed_at is not None:
            self._poll.register(self._error, select.POLLIN)
            self._failed_at = None

    def _clear(self) -> None:
        self._ring.reset()
        for fd in (self._kick, self._call, self._error):
            with suppress(BlockingIOError):
                os.eventfd_read(fd)

    def close(self) -> None:
        self._closed = True
        if self._front is not None:
            self._front.close()
            self._front = None
        for fd in (self._fd, self._kick, self._call, self._error):
            if fd >= 0:
                os.close(fd)
        self._fd = self._kick = self._call = self._error = -1
        # The mapping goes with the last view of it: a response that the caller still holds stays readable.
        self._memory = self._commands = None

    def __enter__(self) -> VhostUserTransport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_transport(path: str, device: str | None = None) -> VhostUserTransport:
    """`--via vhost-user:PATH`. Raises Unavailable."""
    if not path:
        raise Unavailable("say which socket: vhost-user:PATH")
    if device is not None:
        raise Unavailable("the daemon has chosen its device already: give --device to vhost-user-accel")
    try:
        return VhostUserTransport(path)
    except TransportError as error:
        raise Unavailable(f"{error}; is vhost-user-accel running there?") from error


def _locate(offset: int, length: int) -> tuple[tuple[int, int]]:
    return ((GUEST_ADDRESS + offset, length),)


def _sealed_memory(size: int) -> tuple[int, mmap.mmap]:
    """Memory to share, which we promise never to shrink."""
    fd = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        # A file that could shrink is a SIGBUS for whoever maps it: a careful back end takes no other.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return fd, mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except BaseException:
        os.close(fd)
        raise
