"""A command queue in one process: a real split ring in mapped memory, a service and an engine behind it.

For tests of what engine and ring do together. Frames come from frames.py; nothing is simulated but the driver's timing.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import NamedTuple

from frames import CANARY, Response, read_response

from virtaccel.device.backend import Backend
from virtaccel.device.config import DeviceConfig, ResourcePolicy
from virtaccel.device.reset import ResetReport
from virtaccel.device.ring_service import Device, RingService
from virtaccel.virtqueue.driver import DriverQueue
from virtaccel.virtqueue.layout import ring_bytes
from virtaccel.virtqueue.memory import GuestMemory, Region
from virtaccel.virtqueue.segments import Chain
from virtaccel.virtqueue.split import DeviceQueue

BASE = 0x8000_0000


class _Published(NamedTuple):
    request_id: int
    writable: list[memoryview]


class CommandRing:
    """`publish` and `collect` are the driver's hands, `service` the device's. Each chain has memory of its own, which
    is kept until `forget`, so that late writes can be looked for."""

    def __init__(
        self,
        open_backend: Callable[[], Backend],
        *,
        size: int = 16,
        config: DeviceConfig | None = None,
        policy: ResourcePolicy | None = None,
        bytes_: int = 1 << 20,
    ) -> None:
        self.memory = memoryview(mmap.mmap(-1, bytes_))
        self.guest = GuestMemory([Region(BASE, self.memory)])
        self.driver = DriverQueue.in_memory(self.memory, BASE, size)
        self._ring_bytes = ring_bytes(size)
        self._next = self._ring_bytes
        self.published: dict[int, _Published] = {}
        self.notified = 0
        self.device = Device(open_backend, config, policy)
        self.limit = self.device.config.wire.max_chain_descriptors
        self.attach()

    def attach(self) -> None:
        """A fresh device side over the same ring, as after a reset."""
        places = self.driver.addresses
        assert places is not None
        self.queue = DeviceQueue(self.guest, self.driver.size, *places, self.limit)
        self.service = RingService(self.device.engine, self.queue, self._notify)

    def _notify(self) -> None:
        self.notified += 1

    def _place(self, sizes: Sequence[int], data: bytes | None) -> list[tuple[int, int]]:
        ranges, at = [], 0
        for size in sizes:
            start = self._next
            self._next += size + 1  # a byte between pieces, so that none touch
            self.memory[start : start + size] = bytes([CANARY]) * size if data is None else data[at : at + size]
            ranges.append((BASE + start, size))
            at += size
        return ranges

    def publish(self, frame: bytes, readable: Sequence[int] | None = None, writable: Sequence[int] = (4096,)) -> int:
        """Publish a frame in pieces of `readable` bytes with `writable` pieces of room; the head. Or Backpressure."""
        place = self._next
        request = self._place(readable or (len(frame),), frame)
        room = self._place(writable, None)
        try:
            head = self.driver.publish(request, room)
        except Exception:
            self._next = place
            raise
        views = [self.memory[at - BASE : at - BASE + size] for at, size in room]
        self.published[head] = _Published(int.from_bytes(frame[8:16], "little"), views)
        return head

    def collect(self) -> Response | None:
        """The next used chain, checked as every response must be."""
        used = self.driver.collect()
        if used is None:
            return None
        published = self.published.pop(used.head)
        return read_response(Chain.over(used.head, (), published.writable), used.written, published.request_id)

    def exchange(
        self, frame: bytes, readable: Sequence[int] | None = None, writable: Sequence[int] = (4096,)
    ) -> Response:
        """Publish, serve, collect."""
        self.publish(frame, readable, writable)
        self.service.service()
        response = self.collect()
        assert response is not None
        return response

    def reset(self) -> ResetReport:
        """A whole-device reset as a transport does it: queue access ends, then the engine, then both rings anew."""
        report = self.device.reset()
        self.driver.reset()
        self.attach()
        return report

    def untouched(self, head: int) -> bool:
        """Whether the device wrote nothing into the chain published as `head`."""
        return all(bytes(view) == bytes([CANARY]) * len(view) for view in self.published[head].writable)

    @property
    def spare(self) -> int:
        """Offset of memory that no chain uses, for tests that place their frames themselves."""
        return self._next

    def forget(self) -> None:
        """Drop what was outstanding and use its memory again."""
        self.published.clear()
        self._next = self._ring_bytes
