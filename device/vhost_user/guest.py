"""One connected guest: its memory, its ring and its event descriptors, on top of a device.

Carries out what the session decides (session.Guest) and serves the ring when the loop says that something may be
there. Knows descriptors and guest memory; knows no message and does not wait for anything.

A ring comes with user addresses and is remembered by guest-physical ones (`Placement`): the next memory table may show
the same memory at other user addresses. While the table has no place for it the ring stands still, and goes on at the
same index when a later table has.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from virtaccel.device.engine import Health
from virtaccel.device.front_end import MemoryRegion, RequestRefused, RingSetup
from virtaccel.device.loop import mapping
from virtaccel.device.loop.event_loop import Scope
from virtaccel.device.loop.events import Kick, Signal
from virtaccel.device.loop.mapping import Mapped
from virtaccel.device.pacing import Spin
from virtaccel.device.ring_service import BATCH, Device, RingService
from virtaccel.device.vhost_user.message import MAX_MEMORY_SLOTS
from virtaccel.device.vhost_user.session import Descriptors
from virtaccel.virtqueue.errors import RingError
from virtaccel.virtqueue.layout import Placement, available_bytes, descriptor_bytes, used_bytes
from virtaccel.virtqueue.memory import GuestMemory
from virtaccel.virtqueue.segments import Chain, Fault
from virtaccel.virtqueue.split import DeviceQueue

# One or two empty kicks are a race with polling; eight from the very first on are memory that is not shared.
_SILENT_KICKS = 8
# So many turns may one busy guest take before the others get theirs.
_BATCHES_A_SPIN = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """How guests are served. `max_ring_size` in descriptors; `require_sealed` refuses memory that the front end may
    shrink under us; `turn` is how many chains are served before everything else gets its turn; `poll` seconds are
    spent looking for the next chain before waiting for its kick; `wary`: other front ends are served too, so none may
    make us wait (events.Signal)."""

    max_ring_size: int = 1024
    require_sealed: bool = False
    turn: int = BATCH
    poll: float = 0.0
    wary: bool = True


class ConnectedGuest:
    """The world of one session. `started` is called for a kick while the ring does not run, `after_reset` when the
    device has been reset and may have another backend."""

    def __init__(
        self, device: Device, settings: Settings, loop: Scope, log: logging.Logger, after_reset: Callable[[], None]
    ) -> None:
        self.started: Callable[[], None] = lambda: None
        self._after_reset = after_reset
        self._device = device
        self._settings = settings
        self._loop = loop
        self._log = log
        self._mapped: tuple[Mapped, ...] = ()
        self._memory = GuestMemory()
        self._setup: RingSetup | None = None
        self._placement: Placement | None = None
        self._base = 0
        self._service: RingService | None = None
        self._queue: DeviceQueue | None = None
        self._before: DeviceQueue | None = None
        self._kick: Kick | None = None
        self._call: Signal | None = None
        self._error: Signal | None = None
        self._backend_channel: int | None = None
        self._told_lost = False
        self._silent_kicks = 0
        self._again = False
        self._spinning = Spin()

    # -- what a session may ask

    @property
    def config_space(self) -> bytes:
        return self._device.config.wire.pack()

    @property
    def max_ring_size(self) -> int:
        return self._settings.max_ring_size

    @property
    def needs_reset(self) -> bool:
        return self._device.health is not Health.RUNNING

    # -- memory

    def replace_memory(self, regions: tuple[MemoryRegion, ...], fds: Descriptors) -> None:
        if not regions:
            self._log.warning("the front end shares no memory at all: %s", mapping.NOT_SHARED)
        self._install(tuple(self._map(region, fds) for region in regions))

    def add_memory(self, region: MemoryRegion, fds: Descriptors) -> None:
        if len(self._mapped) >= MAX_MEMORY_SLOTS:
            raise RequestRefused(f"all {MAX_MEMORY_SLOTS} memory slots are taken")
        self._install((*self._mapped, self._map(region, fds)))

    def remove_memory(self, region: MemoryRegion) -> None:
        left = tuple(mapped for mapped in self._mapped if not mapped.named(region))
        if len(left) == len(self._mapped):
            raise RequestRefused("no such region")
        self._install(left)

    def _map(self, region: MemoryRegion, fds: Descriptors) -> Mapped:
        fd = fds.take()
        try:
            return mapping.map_region(region, fd, self._mapped, self._settings.require_sealed)
        finally:
            os.close(fd)

    def _install(self, mapped: tuple[Mapped, ...]) -> None:
        memory = mapping.table(mapped)
        gone = [old for old in self._mapped if not any(old.view is new.view for new in mapped)]
        self._mapped, self._memory = mapped, memory
        # The ring first: chains over memory that is going away are given back through it, if it is still there.
        running = self._setup is not None
        self._unmount()
        if running:
            self._mount_or_log()
        if gone:
            self._abandon(gone)

    def _abandon(self, gone: list[Mapped]) -> None:
        def lost(chain: Chain) -> bool:
            return any(old.holds(part) for old in gone for part in (*chain.readable, *chain.writable))

        chains = self._device.engine.abandon(lost)
        if not chains:
            return
        self._log.warning("%d loads abandoned: the memory for their response is gone", len(chains))
        if self._service is not None:
            self._service.give_back(chains)

    # -- the ring

    def check_ring(self, setup: RingSetup) -> None:
        # Before there is memory nothing can be judged; the ring is checked again when it runs.
        if self._mapped:
            self._place(setup)

    def _place(self, setup: RingSetup) -> Placement:
        """Guest-physical addresses of the parts. Raises RequestRefused unless each lies in one region."""
        find = self._memory.guest_address
        try:
            return Placement(
                find(setup.descriptors, descriptor_bytes(setup.size)),
                find(setup.available, available_bytes(setup.size)),
                find(setup.used, used_bytes(setup.size)),
            )
        except Fault as fault:
            raise RequestRefused(f"ring outside guest memory: {fault}") from fault

    def run_ring(self, setup: RingSetup) -> None:
        self._setup, self._base = setup, setup.base
        self._placement = None
        self._silent_kicks = 0
        try:
            self._mount()
        except RequestRefused:
            self._setup = None
            raise

    def stop_ring(self) -> int:
        self._unmount()
        self._setup = None
        return self._base

    def _mount(self) -> None:
        """Serve the ring where the present memory has it. Raises RequestRefused if it has it nowhere."""
        setup = self._setup
        if setup is None:
            return
        # Guest-physical addresses once found are kept: a new table may show the same memory at other user addresses.
        at = self._placement or self._place(setup)
        limit = self._device.config.wire.max_chain_descriptors
        try:
            self._queue = DeviceQueue(self._memory, setup.size, *at, limit, last_available=self._base)
        except RingError as error:
            raise RequestRefused(str(error)) from error
        if self._before is not None and self._device.engine.parked:
            # Loads that began before the pause end after it. A reset leaves none parked, so the epoch is then new.
            self._queue.resume(self._before)
        self._before = None
        self._placement = at
        self._service = RingService(self._device.engine, self._queue, self._notify)
        self._want(True)

    def _mount_or_log(self) -> None:
        try:
            self._mount()
        except RequestRefused as error:
            self._log.warning("ring stands still: %s", error)

    def _unmount(self) -> None:
        """Let go of the ring and of the memory under it; where it stood is kept."""
        if self._queue is not None:
            # The front end asks for this number at a pause, and starts there again.
            self._base = self._queue.last_available
            self._before = self._queue if self._device.engine.parked else None
        self._service = self._queue = None
        self._want(False)

    # -- serving

    def service(self) -> None:
        """One bounded turn: give back loads that have ended, then serve what is available."""
        service = self._service
        if service is None:
            return
        try:
            if self._device.engine.parked:
                service.completions()  # also those that ended while the ring stood still
            more = service.service(self._settings.turn)
            if self._settings.poll and not more:
                more = self._spin(service)
        except RingError as error:
            self._ring_failed(error)
            return
        self._want(more)
        if not self._told_lost and self._device.health is not Health.RUNNING:
            self._told_lost = True
            self._signal_error()

    def _want(self, again: bool) -> None:
        """Whether `service` is to be called in the next turn without anything being readable."""
        if again is not self._again:
            self._again = again
            self._loop.again(self.service, again)

    def _spin(self, service: RingService) -> bool:
        """Look for more chains for a while instead of waiting for a kick; whether to come back at once."""
        if not self._spinning.worthwhile():
            return False
        queue, turn, clock = service.queue, self._settings.turn, time.perf_counter
        found = False
        queue.disable_kicks()
        until = clock() + self._settings.poll
        for _ in range(_BATCHES_A_SPIN):
            while not queue.waiting():
                if clock() > until:
                    self._spinning.ended(found)
                    return queue.enable_kicks()
            found = True
            service.service(turn)
            queue.disable_kicks()
            until = clock() + self._settings.poll
        self._spinning.kept_busy()
        return True

    def loads_ended(self) -> None:
        """The backend has news. A ring that stands still gets its completions when it runs again."""
        if self._service is not None:
            try:
                self._service.completions()
            except RingError as error:
                self._ring_failed(error)

    def _ring_failed(self, error: RingError) -> None:
        """The driver broke its ring: it stays unserved until the front end stops it and starts it again."""
        self._log.error("ring stopped: %s", error)
        self._unmount()
        self._signal_error()

    def _notify(self) -> None:
        if self._call is not None:
            self._call.send()

    def _signal_error(self) -> None:
        """DEVICE_NEEDS_RESET has no way to the guest; this descriptor and DEVICE_LOST are the signs."""
        if self._error is not None:
            self._error.send()

    def _kicked(self) -> None:
        kick = self._kick
        if kick is None:
            return
        if not kick.drain():
            self._loop.forget(kick.fd)
        if self._setup is None:
            self.started()
            return
        queue = self._queue
        before = -1 if queue is None else queue.last_available
        self.service()
        if queue is not None and self._silent_kicks < _SILENT_KICKS:
            self._count_silent(before == queue.last_available)

    def _count_silent(self, silent: bool) -> None:
        """Kicks that announce nothing, from the very first on, are how private memory looks from here."""
        if not silent:
            self._silent_kicks = _SILENT_KICKS
            return
        self._silent_kicks += 1
        if self._silent_kicks == _SILENT_KICKS:
            self._log.warning("kicks come and the ring stays empty; %s", mapping.NOT_SHARED)

    # -- descriptors

    def set_kick(self, fd: int | None, *, poll: bool = False) -> None:
        if self._kick is not None:
            # Closing alone would not do: the front end's copy keeps the file open, and epoll watches files.
            self._loop.forget(self._kick.fd)
            self._kick.close()
            self._kick = None
        self._loop.poll(self.service, poll)
        if fd is not None:
            try:
                kick = Kick(fd)
                self._loop.watch(fd, self._kicked)
            except OSError as error:
                os.close(fd)
                raise RequestRefused(f"kick descriptor: {error.strerror}") from error
            self._kick = kick
        if self._service is not None:
            self._want(True)  # a kick on the old descriptor may have been lost

    def set_call(self, fd: int | None) -> None:
        if self._call is not None:
            self._call.close()
        self._call = None
        if fd is not None:
            self._call = self._signal(fd, "call")
        if self._queue is not None and self._queue.should_notify():
            self._notify()  # what was published meanwhile had nobody to tell

    def set_error(self, fd: int | None) -> None:
        if self._error is not None:
            self._error.close()
        self._error = None
        if fd is not None:
            self._error = self._signal(fd, "error")

    def _signal(self, fd: int, name: str) -> Signal:
        try:
            return Signal(fd, self._settings.wary)
        except OSError as error:
            os.close(fd)
            raise RequestRefused(f"{name} descriptor: {error.strerror}") from error

    def set_backend_channel(self, fd: int) -> None:
        """Kept open, as the front end expects; this device has nothing to ask of a front end."""
        if self._backend_channel is not None:
            os.close(self._backend_channel)
        self._backend_channel = fd

    # -- endings

    def reset(self, why: str) -> None:
        self._log.info("reset: %s", why)
        self._told_lost = False
        self._before = None  # no load is left that could end on it, and it holds the memory it was in
        try:
            self._device.reset()
        finally:
            self._after_reset()

    def close(self) -> None:
        """After the session's reset: no chain is left, so the memory goes with the last reference."""
        self._unmount()
        self._setup = None
        self.set_kick(None)
        self.set_call(None)
        self.set_error(None)
        if self._backend_channel is not None:
            os.close(self._backend_channel)
            self._backend_channel = None
        self._mapped, self._memory = (), GuestMemory()
