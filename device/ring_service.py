"""Where ring and engine meet: `Device` is one guest's device with its backend, `RingService` serves its command queue.

The only file of the engine's side that knows rings (virtqueue.md, sections 7 and 9). Neither class owns a thread or a
descriptor: whoever runs the event loop calls `service` when the driver kicked and `completions` when the backend's
`fileno` became readable, and is told through `notify` that the driver wants to hear.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable
from typing import Final

from virtaccel.device.backend import Backend, BackendError, BackendUnavailable
from virtaccel.device.config import DeviceConfig, ResourcePolicy
from virtaccel.device.engine import Engine, Health
from virtaccel.device.errors import ConfigError
from virtaccel.device.objects import Namespaces
from virtaccel.device.reset import ResetReport
from virtaccel.virtqueue.segments import Chain
from virtaccel.virtqueue.split import DeviceQueue

# Chains served per wake-up before the event loop gets another look at everything else.
BATCH: Final = 64


class Device:
    """One guest's device: an engine, and a backend that is opened again whenever a reset had to discard it.

    `open_backend` opens a fresh instance. Raises BackendUnavailable, and ConfigError if what the backend reports cannot
    be carried by the protocol.
    """

    def __init__(
        self, open_backend: Callable[[], Backend], config: DeviceConfig | None = None,
        policy: ResourcePolicy | None = None, log: logging.Logger | None = None,
    ) -> None:
        self.config = config if config is not None else DeviceConfig()
        self.policy = policy if policy is not None else ResourcePolicy()
        self._open_backend = open_backend
        self._log = log if log is not None else logging.getLogger(__name__)
        # One source for all engines of this device, so that no namespace comes back with a new backend.
        self._namespaces = Namespaces(secrets.token_bytes(16))
        self.backend, self.engine = self._open()
        self._closed = False

    @property
    def health(self) -> Health:
        return self.engine.health

    def fileno(self) -> int | None:
        """What to watch for news of the backend, until the next reset; None if there is nothing: a backend without a
        descriptor, or none that could be opened."""
        return None if self._closed else self.backend.fileno()

    def reset(self) -> ResetReport:
        """Whole-device reset (specification.md 4.11). A discarded backend is closed and another one opened; if that
        fails the device answers DEVICE_LOST to everything, and the next reset tries again."""
        report = self.engine.reset()
        if self.engine.health is not Health.DISCARD_REQUIRED:
            self._log.info("reset: %s released", report.released)
            return report
        self._log.warning("reset: backend discarded (%s), %s quarantined", report.reason, report.quarantined)
        self._close_backend()
        try:
            self.backend, self.engine = self._open()
            self._closed = False
        except (BackendUnavailable, BackendError, ConfigError) as error:
            self._log.error("no backend after the reset: %s", error)
        return report

    def close(self) -> None:
        """Give everything back without waiting; nothing may be called afterwards."""
        self.engine.reset()
        self._close_backend()

    def _open(self) -> tuple[Backend, Engine]:
        backend = self._open_backend()
        try:
            return backend, Engine(backend, self.config, self.policy, self._namespaces, self._log)
        except Exception:
            backend.close()
            raise

    def _close_backend(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self.backend.close()
        except Exception:  # it is being thrown away because it is not in order
            self._log.exception("the discarded backend could not be closed")


class RingService:
    """Serves one command queue with one engine; a new engine or a new queue gets a new service.

    `notify` interrupts the driver. RingError leaves every method after what was pushed so far has been notified: the
    ring is then stopped and the device lives on. A chain that a reset has overtaken is never given back: the engine has
    forgotten it, and the queue refuses chains of another epoch.
    """

    def __init__(self, engine: Engine, queue: DeviceQueue, notify: Callable[[], None]) -> None:
        self.engine = engine
        self.queue = queue
        self.notify = notify
        self._straight = queue.pop, engine.process, queue.push

    def service(self, budget: int = BATCH) -> bool:
        """Serve up to `budget` chains. True says that more work is waiting and no kick will announce it."""
        queue = self.queue
        # While it is served a kick would only wake the loop for what it sees anyway.
        queue.disable_kicks()
        # One notification for a batch, however many chains were in it.
        pushed = queue.used_index
        try:
            if self.serve(budget):
                return True
        finally:
            if queue.used_index != pushed and queue.should_notify():
                self.notify()
        return queue.enable_kicks()

    def serve(self, budget: int = BATCH) -> bool:
        """The same for a driver that looks for itself: no kick is held back and nobody is told. True says that the
        budget is used up and more may be there."""
        pop, process, push = self._straight
        # Bounded: a driver that publishes as fast as it is served must not starve the others.
        for _ in range(budget):
            chain = pop()
            if chain is None:
                return False
            written = process(chain)
            if written is not None:
                push(chain, written)
        return True

    def completions(self) -> int:
        """Give back the chains whose program has loaded by now. Returns how many."""
        return self.give_back(self.engine.finished())

    def give_back(self, chains: Iterable[tuple[Chain, int]]) -> int:
        """Give chains back out of order, with the bytes written into each. Returns how many the driver gets."""
        queue = self.queue
        pushed = 0
        try:
            for chain, written in chains:
                pushed += queue.push(chain, written)
        finally:
            if pushed and queue.should_notify():
                self.notify()
        return pushed
