"""A whole device in this process: guest memory, a real split ring, the protocol engine and a backend, driven by hand.

Nothing here is a stand-in: frames go through descriptor chains in memory exactly as they would from a guest; only the
notifications are left out, since whoever waits for an answer is the one to run the device. Composes the device through
its public face (Device, RingService, backend entry points) and knows no command. Waiting blocks in the backend's own
`wait`, so nothing spins.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from virtaccel.device import installed
from virtaccel.device.backend import NO_OPTIONS, Backend, BackendUnavailable
from virtaccel.device.config import DeviceConfig, ResourcePolicy
from virtaccel.device.errors import ConfigError
from virtaccel.device.pacing import TOLD_OF_CHANGES
from virtaccel.device.ring_service import Device, RingService
from virtaccel.guest_tools.errors import Unavailable
from virtaccel.guest_tools.transport.base import Completion, Config, Part, Shared, TransportError, decode_config
from virtaccel.guest_tools.transport.raw import HasRawRing, RawRing
from virtaccel.guest_tools.transport.ring import CommandRing, block_bytes
from virtaccel.virtqueue.errors import RingError
from virtaccel.virtqueue.memory import GuestMemory, Region
from virtaccel.virtqueue.split import DeviceQueue

# Enough for every window that callers keep, and the ring's memory stays within a page.
QUEUE_SIZE = 128
# Above 4 GiB, as most of a real guest's memory is: an address cut to 32 bits is noticed at once.
GUEST_ADDRESS = 0x1_0000_0000
LONGEST_WAIT_SECONDS = TOLD_OF_CHANGES.longest
REASONS_KEPT = 32
_REFUSED = "backend refused: "


class _Reasons(logging.Handler):
    """Keeps what the device says about refusals, which a guest never sees but whoever runs the device may."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.kept: deque[str] = deque(maxlen=REASONS_KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record.getMessage().removeprefix(_REFUSED))


def open_transport(
    backend: str = "", device: str | None = None, options: Mapping[str, str] = NO_OPTIONS
) -> InProcessTransport:
    """A device of one's own with the named backend (empty: the default one). Raises Unavailable."""
    try:
        opener = installed.find(backend or installed.DEFAULT)
        return InProcessTransport(lambda: opener(device, options))
    except (BackendUnavailable, ConfigError) as error:
        raise Unavailable(str(error)) from error


class InProcessTransport(HasRawRing):
    """A device and the driver's side of its ring. `open_backend` opens a backend, and another one after a reset that
    had to discard the first. Raises BackendUnavailable and device.errors.ConfigError."""

    together = True

    def __init__(
        self, open_backend: Callable[[], Backend], config: DeviceConfig | None = None,
        policy: ResourcePolicy | None = None, queue_size: int = QUEUE_SIZE,
    ) -> None:
        self._reasons = _Reasons()
        # A logger of its own below the project's: it is heard where the project is, and goes with the device.
        log = logging.Logger("virtaccel.device.in_process", logging.INFO)
        log.parent = logging.getLogger("virtaccel.device")
        log.addHandler(self._reasons)
        self.device = Device(open_backend, config, policy, log)
        self.config: Config = decode_config(self.device.config.wire.pack(), queue_size)
        # Two of the largest frames each way: one is answered while the next is written.
        bulk = 2 * (self.config.max_request_bytes + self.config.max_response_bytes)
        # Anonymous memory: pages exist once a command is large enough to touch them. It is left to the collector, as
        # views of it may outlive `close`.
        block = memoryview(mmap.mmap(-1, block_bytes(queue_size, bulk)))
        self._memory = GuestMemory([Region(GUEST_ADDRESS, block)])
        limit = self.config.max_chain_descriptors
        self.ring = CommandRing(block, lambda offset, length: ((GUEST_ADDRESS + offset, length),), queue_size, limit)
        self._queue = DeviceQueue(self._memory, queue_size, *self.ring.placement, limit)
        # The hot path goes straight to the ring. The device looks at it when something is collected.
        self.publish = self.ring.publish  # type: ignore[method-assign]
        self.publish_shared = self.ring.publish_shared  # type: ignore[method-assign]
        self._collect = self.ring.collect
        self._served = 0
        self._closed = False
        self._start()

    def _start(self) -> None:
        self.service = RingService(self.device.engine, self._queue, _nobody_to_notify)
        backend = self.device.backend
        # As in device.backend.RunsForItsCaller.
        patience: Callable[[], None] = getattr(backend, "expect_patience", _nobody_to_notify)
        self.expect_patience = patience  # type: ignore[method-assign]
        name = getattr(backend, "device", None)  # if it says so: the contract does not ask it to
        self.device_name = name if isinstance(name, str) else None

    def publish(self, request: Sequence[Part], capacity: int) -> int:
        return self.ring.publish(request, capacity)

    def share(self, size: int) -> Shared:
        return self.ring.share(size)

    def unshare(self, shared: Shared) -> None:
        self.ring.unshare(shared)

    def take_reasons(self) -> tuple[str, ...]:
        """What the device logged since the last time, oldest first: why something was refused."""
        reasons = tuple(self._reasons.kept)
        self._reasons.kept.clear()
        return reasons

    def collect(self, timeout: float | None) -> Completion | None:
        """As in Transport: runs the device as far as it gets without waiting, then waits for loads under way."""
        published = self.ring.published
        if published != self._served:
            self._served = published
            try:
                while self.service.serve():
                    pass  # at most as often as the ring has room for a batch: nobody publishes meanwhile
            except RingError as error:
                raise TransportError(f"the device stopped the ring: {error}") from error
        completion = self._collect()
        if completion is not None or timeout == 0:
            return completion
        return self._wait(timeout)

    def pause(self, seconds: float) -> None:
        """Rest up to `seconds`, or until the backend says that something may have changed."""
        backend = self.device.backend
        backend.wait(seconds)
        backend.acknowledge()
        # Finished loads are answered here: no event loop is there to hear of them.
        self.service.completions()

    def raw_ring(self) -> RawRing:
        """The ring laid bare, see transport/raw.py."""
        return self.ring.lay_bare(_nobody_to_notify, self._rest, self.reset)

    def _rest(self, seconds: float) -> None:
        """Run the device on a ring that somebody else writes."""
        try:
            if not self.service.service() and self.device.engine.parked:
                self.pause(min(seconds, LONGEST_WAIT_SECONDS))
        except RingError as error:
            raise TransportError(f"the device stopped the ring: {error}") from error

    def reset(self) -> None:
        """Reset the device and the ring. Raises TransportError if no backend could be opened again."""
        self.device.reset()
        self.ring.reset()
        self._queue.reset(self._memory)
        self._start()

    def close(self) -> None:
        """Close the device and its backend. May be called twice."""
        if not self._closed:
            self._closed = True
            self.publish = _publish_closed  # type: ignore[method-assign]
            self.publish_shared = _publish_closed  # type: ignore[method-assign]
            self.device.close()

    def _wait(self, timeout: float | None) -> Completion | None:
        """Nothing is ready. What may still come are loads under way; anything else the device has withheld."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = LONGEST_WAIT_SECONDS if deadline is None else deadline - time.monotonic()
            if not self.device.engine.parked:
                if not self.ring.queue.outstanding:
                    return None
                # Nothing runs but what this thread runs, so an answer that is not there now will never be.
                raise TransportError(f"the device withholds its answer ({self.device.health.value}); reset it")
            if left <= 0:
                return None
            self.pause(min(left, LONGEST_WAIT_SECONDS))
            completion = self._collect()
            if completion is not None:
                return completion


def _publish_closed(request: Sequence[Part], capacity: int, *shared: Shared | None, **named: Shared | None) -> int:
    raise TransportError("the device is closed")


def _nobody_to_notify() -> None:
    """The driver is this very thread; it looks for itself."""
