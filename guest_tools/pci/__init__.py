"""A user-space driver for the PCI function inside a guest: `PciTransport`, for a kernel that has never heard of the
device.

    capabilities   config space bytes -> windows (sans-IO)
    function       sysfs: find, unbind, enable, map
    registers      the virtio common configuration, one access of the right width for each field
    dma            memory whose physical address cannot change under the device
    interrupt      uio_pci_generic, or polling that goes to sleep
    transport      the ring and the frames

Standard library only: this runs on a bare python3. It needs root, because mapping PCI resources, reading physical
addresses and locking memory do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from virtaccel.guest_tools.pci.transport import PciTransport


def open_transport(argument: str = "", device: str | None = None) -> PciTransport:
    """The way `pci[:ADDRESS]`: `argument` is the function's address or empty. Raises TransportError.

    `device` has to be None: which of the host's devices runs the programs is decided where the daemon is started.
    """
    from virtaccel.guest_tools.pci.transport import open_pci
    from virtaccel.guest_tools.transport.base import TransportError

    if device is not None:
        raise TransportError("a guest cannot choose the host's device; it is chosen where the daemon is started")
    return open_pci(argument or None)
