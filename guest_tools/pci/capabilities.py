"""The modern virtio windows of a PCI function, read from its configuration space (virtio 1.3, section 4.1.4).

Sans-IO: bytes in, windows out. The function is not trusted: the capability list may loop or point anywhere, a window
may lie outside its BAR; every offset is checked before it is used, and whoever maps the windows never looks at the
bytes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

STATUS = 0x06
STATUS_CAPABILITIES = 0x10
CAPABILITIES_POINTER = 0x34
INTERRUPT_PIN = 0x3D
VENDOR_SPECIFIC = 0x09
STANDARD_SPACE_BYTES = 256
FIRST_CAPABILITY = 0x40
BARS = 6

COMMON, NOTIFY, ISR, DEVICE, PCI_ACCESS = 1, 2, 3, 4, 5
NAMES = {COMMON: "common configuration", NOTIFY: "notification", ISR: "ISR status", DEVICE: "device configuration"}
# What this driver touches of each: a smaller window would end in the middle of a field.
SMALLEST = {COMMON: 0x38, NOTIFY: 2, ISR: 1, DEVICE: 16}
ALIGNMENT = {COMMON: 4, NOTIFY: 2, ISR: 1, DEVICE: 4}

# struct virtio_pci_cap: vendor, next, length, type, bar, id, 2 bytes of padding, offset, length.
CAPABILITY = Struct("<BBBBBB2xII")
MULTIPLIER = Struct("<I")


class CapabilityError(ValueError):
    """The configuration space describes no usable modern virtio function; the text says what is wrong."""


class Bar(NamedTuple):
    """One base address register: its size in bytes (0 where absent), and whether it is memory that can be mapped."""

    size: int
    is_memory: bool


class Window(NamedTuple):
    """A range of a BAR, in bytes; it lies inside the BAR and is aligned as its structure needs."""

    bar: int
    offset: int
    length: int


class Windows(NamedTuple):
    """The four structures of a modern function. Notifications of queue q go to `queue_notify_off * multiplier`."""

    common: Window
    notify: Window
    isr: Window
    device: Window
    notify_multiplier: int


def parse(space: bytes, bars: Sequence[Bar]) -> Windows:
    """Read the capability list of `space` (256 bytes at least) against the BARs of the function.

    Of several capabilities of one type the first that this driver can map is taken, as 4.1.4.1 asks. Raises
    CapabilityError.
    """
    found: dict[int, Window] = {}
    refused: dict[int, str] = {}
    multiplier = 0
    for position in _positions(space):
        if position + CAPABILITY.size > STANDARD_SPACE_BYTES:
            raise CapabilityError(f"the capability at {position:#x} runs out of the configuration space")
        _, _, length, kind, bar, _, offset, size = CAPABILITY.unpack_from(space, position)
        needed = CAPABILITY.size + (MULTIPLIER.size if kind == NOTIFY else 0)
        # A list may offer a kind several times; the first that fits is the one to use (4.1.4.1).
        if kind not in SMALLEST or kind in found:
            continue
        if length < needed or position + needed > STANDARD_SPACE_BYTES:
            refused[kind] = f"its capability has {length} bytes, {needed} are needed"
            continue
        reason = _unusable(kind, bar, offset, size, bars)
        if reason:
            refused[kind] = reason
            continue
        found[kind] = Window(bar, offset, size)
        if kind == NOTIFY:
            multiplier = MULTIPLIER.unpack_from(space, position + CAPABILITY.size)[0]
    for kind, name in NAMES.items():
        if kind not in found:
            raise CapabilityError(
                f"no usable {name} window: {refused.get(kind, 'the function has no such capability')}"
            )
    # 4.1.4.4.1: the multiplier is zero or an even power of two; an odd one would misalign the notification.
    if multiplier & (multiplier - 1) or multiplier == 1:
        raise CapabilityError(f"notify_off_multiplier is {multiplier}, neither 0 nor an even power of two")
    return Windows(found[COMMON], found[NOTIFY], found[ISR], found[DEVICE], multiplier)


def _positions(space: bytes) -> list[int]:
    """Where the vendor-specific capabilities are. A list that loops or leaves its area ends in CapabilityError."""
    if len(space) < STANDARD_SPACE_BYTES:
        raise CapabilityError(f"only {len(space)} bytes of configuration space can be read: root is needed")
    if not space[STATUS] & STATUS_CAPABILITIES:
        raise CapabilityError("the function has no capability list")
    positions: list[int] = []
    seen: set[int] = set()
    position = space[CAPABILITIES_POINTER] & 0xFC
    while position:
        if position < FIRST_CAPABILITY:
            raise CapabilityError(f"a capability points to {position:#x}, into the header")
        # A list that loops would hold the driver for ever.
        if position in seen:
            raise CapabilityError(f"the capability list loops at {position:#x}")
        seen.add(position)
        if space[position] == VENDOR_SPECIFIC:
            positions.append(position)
        # The two lowest bits are reserved and must be masked (PCI Local Bus 3.0, 6.7).
        position = space[position + 1] & 0xFC
    return positions


def _unusable(kind: int, bar: int, offset: int, size: int, bars: Sequence[Bar]) -> str:
    """Why a window cannot be used, or an empty string."""
    if bar >= min(BARS, len(bars)):
        return f"it names BAR {bar}"
    if not bars[bar].is_memory:
        return f"BAR {bar} is not memory"
    if size < SMALLEST[kind]:
        return f"it has {size} bytes, {SMALLEST[kind]} are needed"
    if offset % ALIGNMENT[kind]:
        return f"its offset {offset:#x} is not aligned to {ALIGNMENT[kind]}"
    if offset + size > bars[bar].size:
        return f"it ends at {offset + size:#x}, BAR {bar} has {bars[bar].size:#x} bytes"
    return ""


def notify_offset(windows: Windows, queue_notify_off: int) -> int:
    """Byte offset in the notify window's BAR for a queue; `queue_notify_off` comes from the device and is checked."""
    offset = queue_notify_off * windows.notify_multiplier
    if offset + 2 > windows.notify.length:
        raise CapabilityError(f"queue_notify_off {queue_notify_off} lies outside the notification window")
    return windows.notify.offset + offset
