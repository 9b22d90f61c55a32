"""The transport over a PCI function: handshake, one ring, frames in DMA memory, and a limit on silence.

Knows virtio's initialisation order (virtio 1.3, section 3.1) and how long a device may be silent. Of the protocol it
knows only the configuration prefix and one harmless command, GET_DEVICE_INFO, with which it asks a silent device
whether it still lives: a program may take minutes to load, but a living device answers other commands meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from virtaccel.device import wire
from virtaccel.device.pacing import ACROSS_A_RING, BARE_RING_REST
from virtaccel.guest_tools.pci import capabilities, registers
from virtaccel.guest_tools.pci.dma import SMALL_PAGE, DmaMemory, allocate
from virtaccel.guest_tools.pci.function import DEFAULT_VIRTIO_ID, Function, PciError, choose
from virtaccel.guest_tools.pci.interrupt import Polling, UioInterrupt
from virtaccel.guest_tools.transport.base import Backpressure, Completion, Config, Part, TransportError, decode_config
from virtaccel.guest_tools.transport.raw import HasRawRing, RawRing
from virtaccel.guest_tools.transport.ring import CommandRing, block_bytes
from virtaccel.virtqueue import layout
from virtaccel.virtqueue.errors import DeviceMisbehaved

# What the protocol's longest chain takes (wire-abi.md 2); more would only cost contiguous memory.
LARGEST_QUEUE = 256
# A ring must be contiguous for the device; of this size it fits one ordinary page.
SMALL_PAGE_QUEUE = 128
# One request and one response of the largest size that the protocol allows, 16 MiB each, and 2 MiB to spare.
LARGEST_BULK = 34 << 20
# Below this a transfer of one chunk would not fit, and every larger one would crawl.
SMALLEST_BULK = 1 << 20
# A host that swaps or stops its guests for a snapshot takes seconds; a device silent for ten is gone.
LOST_AFTER_S = 10.0
QUESTION = wire.REQUEST_HEADER.pack(wire.Opcode.GET_DEVICE_INFO, 0, 0, (1 << 64) - 1)
# GET_DEVICE_INFO changes nothing and every living device answers it at once, even while it loads.
QUESTION_CAPACITY = 92
CONFIG_BYTES = 16
NO_QUESTION = -1


class DeviceLost(TransportError):
    """The device was silent for longer than the limit, even when asked, or says that it needs a reset."""


def open_pci(
    address: str | None = None, *, virtio_id: int = DEFAULT_VIRTIO_ID, interrupts: bool = True,
    huge_pages: bool = True, lost_after: float = LOST_AFTER_S,
) -> PciTransport:
    """Take over the function at `address` (`0000:00:02.0`; None: the only one) and bring its queue up.

    `lost_after` is how many seconds of silence, with commands outstanding, make a device lost; without `huge_pages`
    that pool is left alone. Raises TransportError.
    """
    function = Function(choose(address, virtio_id))
    return PciTransport(function, interrupts=interrupts, huge_pages=huge_pages, lost_after=lost_after)


def open_transport(argument: str = "", device: str | None = None) -> PciTransport:
    """The way `pci[:ADDRESS]`: `argument` is the function's address or empty. Raises TransportError.

    `device` has to be None: which of the host's devices runs the programs is decided where the daemon is started.
    """
    if device is not None:
        raise TransportError("a guest cannot choose the host's device; it is chosen where the daemon is started")
    return open_pci(argument or None)


class PciTransport(HasRawRing):
    """See transport.base.Transport; owns `function` from the first moment on. Frame limits in `config` are lowered to
    what one chain of this memory carries."""

    def __init__(
        self, function: Function, *, interrupts: bool = True, huge_pages: bool = True,
        lost_after: float = LOST_AFTER_S,
    ) -> None:
        self.function = function
        self._lost_after = lost_after
        self._lost: str | None = None
        self._silent = False
        self._closed = False
        self._words: list[registers.Words] = []
        self._wait = Polling()
        self._memory: DmaMemory | None = None
        self._bell = memoryview(bytearray(2)).cast("H")
        try:
            self._take(interrupts, huge_pages)
        except BaseException:
            self.close()
            raise

    # -- bringing the device up ---------------------------------------------------------------------------------------

    def _take(self, interrupts: bool, huge_pages: bool) -> None:
        function = self.function
        node = function.take(interrupts=interrupts)
        function.enable()
        try:
            self._windows = capabilities.parse(function.read_config(), function.bars())
        except capabilities.CapabilityError as error:
            raise PciError(f"{function.address}: {error}") from error
        self._words = [registers.Words(function.map(window.bar), window) for window in self._windows[:4]]
        self._common = registers.CommonConfig(self._words[0])
        self._negotiate()
        raw = decode_config(self._common.read_device_config(self._words[3], CONFIG_BYTES))
        self._queue_size = self._offered_queue(raw)
        wanted = min(LARGEST_BULK, raw.max_request_bytes + raw.max_response_bytes)
        smallest = block_bytes(self._queue_size, SMALLEST_BULK)
        # The order of these two is the order in which their descriptors are closed if this process is killed: letting
        # go of the function turns its bus mastering off, and only then may the memory's pin go.
        if node is not None:
            self._wait = UioInterrupt(node, function, self._words[2].u8)
        self._memory = allocate(block_bytes(self._queue_size, wanted), smallest, huge_pages=huge_pages)
        self._ring = self._place_ring(self._memory, raw)
        self.config: Config = self._within(self._memory, raw)
        self._start()

    def _negotiate(self) -> None:
        accepted = self._common.negotiate(registers.FEATURE_VERSION_1 | registers.FEATURE_ACCESS_PLATFORM)
        if accepted & registers.FEATURE_ACCESS_PLATFORM and self.function.translated:
            self._common.reset()
            raise PciError(
                f"{self.function.address} sits behind an IOMMU that translates its addresses, and this driver knows "
                "physical ones only: boot the guest with iommu=pt, or start the VMM without iommu_platform"
            )

    def _offered_queue(self, raw: Config) -> int:
        if self._common.queues < 1:
            raise PciError(f"{self.function.address}: the device has no queue")
        offered = self._common.select_queue(wire.COMMAND_QUEUE)
        if not layout.is_queue_size(offered) or offered < raw.max_chain_descriptors:
            raise PciError(
                f"{self.function.address}: a command queue of {offered} descriptors, with chains of "
                f"{raw.max_chain_descriptors}"
            )
        return min(offered, LARGEST_QUEUE)

    def _place_ring(self, memory: DmaMemory, raw: Config) -> CommandRing:
        if memory.page == SMALL_PAGE:
            self._queue_size = min(self._queue_size, SMALL_PAGE_QUEUE)
        return CommandRing(memory.view, memory.segments, self._queue_size, raw.max_chain_descriptors)

    def _within(self, memory: DmaMemory, raw: Config) -> Config:
        """The device's limits, lowered to one chain of our pages: a part that begins inside a page takes one more."""
        descriptors = min(raw.max_chain_descriptors, self._queue_size) - 3
        room = min(descriptors * memory.page, memory.size - block_bytes(self._queue_size, 0) - layout.MAX_QUEUE_SIZE)
        return raw._replace(
            max_request_bytes=min(raw.max_request_bytes, room), max_response_bytes=min(raw.max_response_bytes, room)
        )

    def _start(self) -> None:
        self._question = NO_QUESTION
        self._outstanding = 0
        # Silence is counted from the first command that is out: an idle device has nothing to say.
        self._heard = time.monotonic()
        self._lost = None
        self._ring.queue.disable_interrupts()
        self._common.select_queue(wire.COMMAND_QUEUE)
        offset = self._common.place_queue(self._queue_size, *self._ring.placement)
        try:
            at = capabilities.notify_offset(self._windows, offset)
        except capabilities.CapabilityError as error:
            raise PciError(f"{self.function.address}: {error}") from error
        # Views of a BAR must go before the mapping under them can.
        self._bell.release()
        self._bell = memoryview(self.function.map(self._windows.notify.bar))[at : at + 2].cast("H")
        self._common.add_status(registers.DRIVER_OK)

    # -- Transport ----------------------------------------------------------------------------------------------------

    @property
    def how(self) -> str:
        """One line for people: interrupts or polling, and how the memory is held."""
        held = self._memory.kind if self._memory is not None else "no memory"
        return f"{'interrupts' if self._wait.uses_interrupts else 'polling'}; {held}"

    @property
    def interrupts(self) -> int:  # type: ignore[override]  # counted where they come
        return self._wait.count

    def publish(self, request: Sequence[Part], capacity: int) -> int:
        """See Transport. Two descriptors stay free, so that a silent device can be asked whether it lives."""
        if self._lost is not None or self._closed:
            raise self._unusable()
        queue = self._ring.queue
        # The question takes two, this command at least two.
        if queue.free_descriptors < 4:
            raise Backpressure("the queue is full")
        if not self._outstanding:
            self._heard = time.monotonic()
        try:
            head = self._ring.publish(request, capacity)
        except TransportError as error:
            raise self._checked(error) from error
        self._outstanding += 1
        if queue.should_kick():
            self._bell[0] = wire.COMMAND_QUEUE
        return head

    def collect(self, timeout: float | None) -> Completion | None:
        """See Transport; with nothing outstanding nothing can come, and it returns at once. Raises DeviceLost."""
        if self._lost is not None or self._closed:
            raise self._unusable()
        completion = self._next()
        if completion is not None or not self._outstanding:
            return completion
        return self._await(timeout)

    def _next(self) -> Completion | None:
        """The next completion that is not the answer to our own question."""
        while True:
            try:
                completion = self._ring.collect()
            except TransportError as error:
                raise self._checked(error) from error
            if completion is None:
                return None
            self._heard = time.monotonic()
            if completion.token == self._question:
                self._question = NO_QUESTION
                continue
            self._outstanding -= 1
            return completion

    def _await(self, timeout: float | None) -> Completion | None:
        """Look again and again: at once for 100 us, then with interrupts or sleep in between."""
        start = time.monotonic()
        deadline = None if timeout is None else start + timeout
        self._wait.restart()
        queue = self._ring.queue
        while True:
            completion = self._next()
            if completion is not None:
                return completion
            now = time.monotonic()
            # Asked at half the limit, so that the other half is left for the answer.
            if now - self._heard >= self._lost_after / 2:
                self._suspect(now - self._heard)
            if deadline is not None and now >= deadline:
                return None
            if now - start < ACROSS_A_RING.eager:
                continue
            # A quarter of the limit: an interrupt that was lost delays the question, never past the limit.
            limit = self._lost_after / 4 if deadline is None else min(deadline - now, self._lost_after / 4)
            if not self._wait.uses_interrupts:
                self._wait.wait(limit)
                continue
            if not queue.enable_interrupts():
                self._wait.wait(limit)
            queue.disable_interrupts()

    def _suspect(self, silence: float) -> None:
        """After half the limit of silence ask; after all of it, or when the status says so, the device is lost."""
        status = self._common.status
        if status & registers.NEEDS_RESET or not status & registers.DRIVER_OK:
            raise self._fail(f"device lost: its status is {status:#x}, it needs a reset")
        if silence >= self._lost_after:
            self._silent = True
            raise self._fail(f"device lost: no answer for {silence:.1f} s, {self._outstanding} commands outstanding")
        if self._question == NO_QUESTION:
            try:
                self._question = self._ring.publish((QUESTION,), QUESTION_CAPACITY)
            except Backpressure:
                return
            except TransportError as error:
                raise self._checked(error) from error
            self._bell[0] = wire.COMMAND_QUEUE

    def raw_ring(self) -> RawRing:
        """The ring laid bare, see transport/raw.py. Silence is then for its user to judge."""
        return self._ring.lay_bare(self._kick, lambda seconds: time.sleep(min(seconds, BARE_RING_REST)), self.reset)

    def _kick(self) -> None:
        self._bell[0] = wire.COMMAND_QUEUE

    def reset(self) -> None:
        """See Transport. A device that was lost by its silence stays lost: where the back end is gone, QEMU's generic
        device aborts the whole machine when it is started again (docs/pairing.md), and a guest cannot tell. The
        configuration, which does not change, is not read again."""
        if self._silent:
            raise self._unusable()
        if self._closed or self._memory is None:
            raise TransportError("the transport is closed")
        self._lost = "device lost: it did not come back from a reset"
        self._negotiate()
        self._ring.reset()
        self._start()

    def close(self) -> None:
        """See Transport. Memory that the device may still write to, as it did not confirm its reset, is not freed."""
        if self._closed:
            return
        self._closed = True
        stopped = True
        try:
            if self._words:
                self._common.reset()
        except TransportError:
            stopped = False
        self._wait.close()
        self._bell.release()
        for words in self._words:
            words.release()
        self.function.close()
        if self._memory is None:
            return
        if stopped:
            self._memory.close()
        else:
            # A device that did not confirm its reset may write at any time: its pages must not become somebody else's.
            _NOT_GIVEN_BACK.append(self._memory)

    def _checked(self, error: TransportError) -> TransportError:
        """A frame that can never fit leaves the ring sound; anything else a broken ring says is the device's end."""
        return self._fail(f"device lost: {error}") if isinstance(error.__cause__, DeviceMisbehaved) else error

    def _unusable(self) -> TransportError:
        return DeviceLost(self._lost) if self._lost is not None else TransportError("the transport is closed")

    def _fail(self, reason: str) -> DeviceLost:
        self._lost = reason
        return DeviceLost(reason)


_NOT_GIVEN_BACK: list[DmaMemory] = []
