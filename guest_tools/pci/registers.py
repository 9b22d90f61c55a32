"""The common configuration structure of a modern virtio function (virtio 1.3, sections 4.1.3 and 4.1.4.3).

Knows offsets and widths. Each field is read and written by one access of its own width, as 4.1.3.1 demands. That is
why fields go through `memoryview.cast` with a native format: its item access is one load or store of exactly that
size, while `struct` with an explicit byte order ("<I") assembles values byte by byte. 64-bit fields are two 32-bit
accesses, which the standard allows.
"""

from __future__ import annotations

import mmap
import time

from virtaccel.guest_tools.pci.capabilities import Window
from virtaccel.guest_tools.transport.base import TransportError

ACKNOWLEDGE, DRIVER, DRIVER_OK, FEATURES_OK, NEEDS_RESET, FAILED = 1, 2, 4, 8, 64, 128

FEATURE_VERSION_1 = 1 << 32
FEATURE_ACCESS_PLATFORM = 1 << 33
NO_VECTOR = 0xFFFF

DEVICE_FEATURE_SELECT = 0x00
DEVICE_FEATURE = 0x04
DRIVER_FEATURE_SELECT = 0x08
DRIVER_FEATURE = 0x0C
MSIX_CONFIG = 0x10
NUM_QUEUES = 0x12
DEVICE_STATUS = 0x14
CONFIG_GENERATION = 0x15
QUEUE_SELECT = 0x16
QUEUE_SIZE = 0x18
QUEUE_VECTOR = 0x1A
QUEUE_ENABLE = 0x1C
QUEUE_NOTIFY_OFF = 0x1E
QUEUE_DESC = 0x20
QUEUE_DRIVER = 0x28
QUEUE_DEVICE = 0x30

# A device may have work to stop first; the standard sets no limit (4.1.4.3.2).
RESET_TIMEOUT_S = 10.0
# A configuration that changes on every read is not one that a driver can use (2.5.1).
GENERATION_TRIES = 16


class Words:
    """A mapped window seen as native 8, 16 and 32-bit words. Offsets are bytes from the window's beginning."""

    __slots__ = ("_view", "u8", "u16", "u32")

    def __init__(self, mapped: mmap.mmap, window: Window) -> None:
        view = memoryview(mapped)[window.offset : window.offset + window.length]
        self._view = view
        self.u8 = view
        self.u16 = view[: len(view) & ~1].cast("H") if window.offset % 2 == 0 else view[:0].cast("H")
        self.u32 = view[: len(view) & ~3].cast("I") if window.offset % 4 == 0 else view[:0].cast("I")

    def release(self) -> None:
        self.u32.release()
        self.u16.release()
        self._view.release()


class CommonConfig:
    """The registers by name. Raises TransportError where the device does not follow the standard's handshake."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._u8, self._u16, self._u32 = words.u8, words.u16, words.u32

    @property
    def status(self) -> int:
        return self._u8[DEVICE_STATUS]

    def add_status(self, bits: int) -> None:
        self._u8[DEVICE_STATUS] = self._u8[DEVICE_STATUS] | bits

    @property
    def generation(self) -> int:
        return self._u8[CONFIG_GENERATION]

    @property
    def queues(self) -> int:
        return self._u16[NUM_QUEUES // 2]

    def reset(self) -> None:
        """Write 0 and wait until the device says 0 (4.1.4.3.2), for ten seconds at most."""
        self._u8[DEVICE_STATUS] = 0
        limit = time.monotonic() + RESET_TIMEOUT_S
        while self._u8[DEVICE_STATUS]:
            if time.monotonic() > limit:
                raise TransportError(f"the device did not finish its reset in {RESET_TIMEOUT_S:.0f} s")
            # Every read leaves the guest: a millisecond between them costs nothing that a reset does not.
            time.sleep(0.001)

    def negotiate(self, wanted: int) -> int:
        """Reset, acknowledge, accept `wanted` of what is offered; returns the accepted bits. VERSION_1 is a must
        (6.1)."""
        self.reset()
        self.add_status(ACKNOWLEDGE)
        self.add_status(DRIVER)
        offered = self.offered()
        if not offered & FEATURE_VERSION_1:
            self.add_status(FAILED)
            raise TransportError("the device does not offer VIRTIO_F_VERSION_1")
        accepted = offered & wanted
        # Features are seen through a 32-bit window, the low half first.
        for half in (0, 1):
            self._u32[DRIVER_FEATURE_SELECT // 4] = half
            self._u32[DRIVER_FEATURE // 4] = accepted >> (32 * half) & 0xFFFFFFFF
        self.add_status(FEATURES_OK)
        # The device's own veto: to go on without it is undefined (3.1.1, step 6).
        if not self.status & FEATURES_OK:
            self.add_status(FAILED)
            raise TransportError(f"the device refuses the features {accepted:#x}")
        return accepted

    def offered(self) -> int:
        """The device's 64 feature bits."""
        bits = 0
        for half in (0, 1):
            self._u32[DEVICE_FEATURE_SELECT // 4] = half
            bits |= self._u32[DEVICE_FEATURE // 4] << (32 * half)
        return bits

    def select_queue(self, index: int) -> int:
        """Choose a queue; returns the size the device offers for it, 0 where there is none."""
        self._u16[QUEUE_SELECT // 2] = index
        return self._u16[QUEUE_SIZE // 2]

    def place_queue(self, size: int, descriptors: int, available: int, used: int) -> int:
        """Size and physical addresses of the selected queue, no vector; enables it and returns queue_notify_off."""
        self._u16[QUEUE_SIZE // 2] = size
        self._u16[QUEUE_VECTOR // 2] = NO_VECTOR
        for register, address in ((QUEUE_DESC, descriptors), (QUEUE_DRIVER, available), (QUEUE_DEVICE, used)):
            self._u32[register // 4] = address & 0xFFFFFFFF
            self._u32[register // 4 + 1] = address >> 32
        self._u16[QUEUE_ENABLE // 2] = 1
        # Read back: a device that ignores the write would leave the driver waiting for ever.
        if self._u16[QUEUE_ENABLE // 2] != 1:
            raise TransportError("the device did not enable its queue")
        return self._u16[QUEUE_NOTIFY_OFF // 2]

    def read_device_config(self, device: Words, length: int) -> bytes:
        """`length` bytes (a multiple of 4) of device configuration, all of one generation (2.5.1)."""
        for _ in range(GENERATION_TRIES):
            before = self.generation
            words = [device.u16[index] for index in range(4)]
            wide = [device.u32[index] for index in range(2, length // 4)]
            if self.generation == before:
                return b"".join(
                    [word.to_bytes(2, "little") for word in words] + [word.to_bytes(4, "little") for word in wide]
                )
        raise TransportError("the device's configuration keeps changing")
