"""Daemons as real processes, and a front end whose every message, descriptor and ring byte a test decides.

Only the front end's socket code is the project's own (FrontEnd); messages in hostile tests are packed by hand.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from virtaccel.device import launcher
from virtaccel.device.front_end import MemoryRegion
from virtaccel.device.vhost_user import message as m
from virtaccel.device.vhost_user.message import Request
from virtaccel.guest_tools.transport.vhost_user import WANTED_FEATURES, WANTED_PROTOCOL_FEATURES, FrontEnd
from virtaccel.virtqueue.driver import DriverQueue, Used
from virtaccel.virtqueue.layout import ring_bytes

PATIENCE = 20.0
GUEST = 0x1000_0000
USER = 0x7000_0000_0000
FRAMES_AT = 0x10000
MEMORY_BYTES = 0x40000


class Daemon:
    """`vhost-user-accel` (or another program of this project) as a child process, with the looks at it that tests need.
    """

    def __init__(self, folder: Path, *options: str, backend: str = "reference", program: Sequence[str] = ()) -> None:
        self.path = str(folder / "accel.sock")
        self.log_file = folder / "daemon.log"
        self._options = options
        self._backend = backend
        self._program = program
        self.start()

    def start(self) -> None:
        """Once more, after its end."""
        sockets, options = [self.path], self._options
        if options[:1] == ("--sockets",):
            count = next((n for n, word in enumerate(options[1:]) if word.startswith("--")), len(options) - 1)
            sockets, options = list(options[1 : count + 1]), options[count + 1 :]
        words = ["--log-level", "debug", *options]
        if self._program:
            self._child = launcher.Daemon(sockets, self.log_file, *words, program=self._program)
        else:
            self._child = launcher.Daemon(sockets, self.log_file, "--backend", self._backend, *words)
        self.process = self._child.process

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def fds(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def idle_fds(self) -> int:
        """The same number several times over: what it has just opened or closes for one that left counts no more."""
        seen: list[int] = []
        while len(seen) < 5 or len(set(seen[-5:])) > 1:
            assert len(seen) < 200
            seen.append(self.fds())
            time.sleep(0.02)
        return seen[-1]

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def status(self, name: str) -> int:
        """A number out of /proc/PID/status, in the unit given there."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1])
        raise KeyError(name)

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def stop(self, number: int = signal.SIGTERM, timeout: float = 5.0) -> int:
        """End it the polite way; its exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout)

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        alive = self.alive()
        obeyed = self._child.stop() != -signal.SIGKILL or not alive or kind is not None
        if error is not None:
            print(self.log()[-4000:], file=sys.stderr)
        assert obeyed, "SIGTERM does not end the daemon"


def wait_until(condition: object, what: str, daemon: Daemon | None = None, timeout: float = PATIENCE) -> None:
    assert callable(condition)
    until = time.monotonic() + timeout
    while not condition():
        if daemon is not None and not daemon.alive():
            raise AssertionError(f"the daemon ended before: {what}\n{daemon.log()[-2000:]}")
        if time.monotonic() > until:
            raise AssertionError(f"not in {timeout} s: {what}\n{'' if daemon is None else daemon.log()[-2000:]}")
        time.sleep(0.005)


def readable(fd: int, timeout: float = 0.0) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


class Memory:
    """A memfd mapped here, to be shown to the device as one region."""

    def __init__(
        self, size: int = MEMORY_BYTES, guest: int = GUEST, user: int = USER, offset: int = 0, sealed: bool = False
    ) -> None:
        self.fd = os.memfd_create("guest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, offset + size)
        if sealed:  # as QEMU's memfd backend does
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        self.map = mmap.mmap(self.fd, offset + size)
        self.view = memoryview(self.map)[offset:]
        self.region = MemoryRegion(guest, size, user, offset)

    def close(self) -> None:
        os.close(self.fd)


class Vm:
    """A connection with memory, three event descriptors and one ring, set up step by step or by `start`."""

    def __init__(self, path: str, size: int = 16, memory: Memory | None = None, base: int = 0) -> None:
        self.front = FrontEnd(path, PATIENCE)
        self.memory = memory or Memory()
        self.size = size
        self.queue = DriverQueue.in_memory(
            self.memory.view[: ring_bytes(size)], self.memory.region.guest_address, size, first_index=base
        )
        self.kick, self.call, self.error = (os.eventfd(0, os.EFD_NONBLOCK) for _ in range(3))
        self.next_id = 1

    # -- the monitor

    def negotiate(self, features: int = WANTED_FEATURES, protocol: int = WANTED_PROTOCOL_FEATURES) -> None:
        self.front.negotiate(features, protocol)

    def share(self, *memories: Memory) -> None:
        chosen = memories or (self.memory,)
        table = m.encode_table([memory.region for memory in chosen])
        self.front.tell(Request.SET_MEM_TABLE, table, [memory.fd for memory in chosen])

    def addresses(self) -> bytes:
        at = self.queue.addresses
        assert at is not None
        shift = self.memory.region.user_address - self.memory.region.guest_address
        return m.VRING_ADDRESS.pack(0, 0, at.descriptors + shift, at.used + shift, at.available + shift, 0)

    def set_up(self, base: int = 0, *, kick: bool = True, call: bool = True) -> None:
        """Everything but SET_VRING_ENABLE."""
        tell = self.front.tell
        tell(Request.SET_VRING_NUM, m.encode_vring_state(0, self.size))
        tell(Request.SET_VRING_BASE, m.encode_vring_state(0, base))
        tell(Request.SET_VRING_ADDR, self.addresses())
        if call:
            tell(Request.SET_VRING_CALL, m.U64.pack(0), [self.call])
        tell(Request.SET_VRING_ERR, m.U64.pack(0), [self.error])
        if kick:
            tell(Request.SET_VRING_KICK, m.U64.pack(0), [self.kick])

    def enable(self, on: bool = True) -> None:
        self.front.tell(Request.SET_VRING_ENABLE, m.encode_vring_state(0, int(on)))

    def start(self, *memories: Memory, kick: bool = True, call: bool = True) -> Vm:
        self.negotiate()
        self.share(*memories)
        self.set_up(kick=kick, call=call)
        self.enable()
        return self

    def begin_anew(self) -> None:
        """The stopped ring from 0, as after a reboot."""
        self.queue.reset()
        self.set_up()
        self.enable()

    def stop(self) -> int:
        return self.front.stop_ring()

    # -- the driver

    def place(self, frame: bytes, slot: int = 0, capacity: int = 256) -> tuple[tuple[int, int], tuple[int, int]]:
        """Put a frame into memory; the (address, length) of request and response."""
        at = FRAMES_AT + slot * 1024
        self.memory.view[at : at + len(frame)] = frame
        self.memory.view[at + 512 : at + 512 + capacity] = bytes([0xC5]) * capacity
        base = self.memory.region.guest_address + at
        return (base, len(frame)), (base + 512, capacity)

    def publish(self, frame: bytes, slot: int = 0, capacity: int = 256) -> int:
        request, response = self.place(frame, slot, capacity)
        return self.queue.publish([request], [response])

    def response(self, slot: int = 0, size: int = 256) -> bytes:
        at = FRAMES_AT + slot * 1024 + 512
        return bytes(self.memory.view[at : at + size])

    def ring_bell(self) -> None:
        os.eventfd_write(self.kick, 1)

    def collect(self, timeout: float = PATIENCE) -> Used | None:
        until = time.monotonic() + timeout
        looks = 0
        while (used := self.queue.collect()) is None:
            looks += 1
            if time.monotonic() > until:
                return None
            time.sleep(0 if looks < 500 else 0.0002)
        return used

    def call_device(self, frame: bytes, capacity: int = 256) -> bytes:
        """One command through the ring with a kick; the bytes that the device says it wrote."""
        head = self.publish(frame, 0, capacity)
        self.ring_bell()
        used = self.collect()
        assert used is not None, "no answer"
        assert used.head == head
        return self.response()[: used.written]

    def close(self) -> None:
        self.front.close()
        self.memory.close()
        for fd in (self.kick, self.call, self.error):
            os.close(fd)

    def __enter__(self) -> Vm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def moved(memory: Memory, user: int) -> MemoryRegion:
    """The same memory at another user address."""
    return memory.region._replace(user_address=user)
