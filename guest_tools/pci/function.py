"""One PCI function through sysfs: find it, take it from the kernel's driver, enable it, map its memory.

Knows /sys/bus/pci (Linux: Documentation/ABI/testing/sysfs-bus-pci). Does not know virtio beyond the IDs that name a
function.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from struct import Struct

from virtaccel.guest_tools.pci.capabilities import BARS, Bar
from virtaccel.guest_tools.transport.base import TransportError

DEVICES = Path("/sys/bus/pci/devices")
DRIVERS = Path("/sys/bus/pci/drivers")
UIO_DRIVER = "uio_pci_generic"
VIRTIO_VENDOR = 0x1AF4
MODERN_BASE = 0x1040
# QEMU accepts only numbers it has a name for, and no Linux driver binds this one (docs/pairing.md).
DEFAULT_VIRTIO_ID = 21

COMMAND = 0x04
COMMAND_MEMORY = 0x0002
COMMAND_MASTER = 0x0004
COMMAND_INTX_DISABLE = 0x0400
RESOURCE_MEMORY = 0x00000200
WORD = Struct("<H")
# The device node appears some time after the driver has bound, on a busy guest within a second.
BIND_TIMEOUT_S = 5.0


class PciError(TransportError):
    """The function cannot be found or taken over; the text says why and what would help."""


def find(virtio_id: int = DEFAULT_VIRTIO_ID, devices: Path = DEVICES) -> list[str]:
    """Addresses (`0000:00:02.0`) of all functions with this virtio device ID, in bus order."""
    found = []
    for entry in sorted(devices.iterdir()) if devices.is_dir() else ():
        if (_number(entry / "vendor"), _number(entry / "device")) == (VIRTIO_VENDOR, MODERN_BASE + virtio_id):
            found.append(entry.name)
    return found


def choose(address: str | None, virtio_id: int = DEFAULT_VIRTIO_ID) -> str:
    """The function to drive: the one named, with or without its domain, or the only one there is."""
    found = find(virtio_id)
    if address:
        full = address if address.count(":") == 2 else f"0000:{address}"
        if full not in found:
            raise PciError(
                f"{full} is no virtio function with device ID {virtio_id}; there is: {', '.join(found) or 'none'}"
            )
        return full
    if not found:
        raise PciError(
            f"no PCI function {VIRTIO_VENDOR:04x}:{MODERN_BASE + virtio_id:04x} here; if the VMM gives the device "
            "another virtio ID, say which"
        )
    if len(found) > 1:
        raise PciError(f"several functions: {', '.join(found)}; say which one")
    return found[0]


def _number(path: Path) -> int:
    try:
        return int(path.read_text(), 16)
    except (OSError, ValueError):
        return -1


class Function:
    """A function that this process drives. `close` gives it back unbound, with bus mastering off."""

    def __init__(self, address: str, devices: Path = DEVICES) -> None:
        self.address = address
        self.path = devices / address
        try:
            self._config = os.open(self.path / "config", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise PciError(f"{address}: cannot open its configuration space ({error.strerror}); run as root") from error
        self._maps: dict[int, mmap.mmap] = {}

    @property
    def driver(self) -> str | None:
        """The kernel driver that holds the function, if any."""
        link = self.path / "driver"
        return os.readlink(link).rpartition("/")[2] if link.is_symlink() else None

    @property
    def translated(self) -> bool:
        """Whether the platform puts an IOMMU with its own addresses before the function."""
        try:
            # An identity domain leaves addresses as they are; any other needs a mapping that we cannot make.
            return (self.path / "iommu_group" / "type").read_text().strip() not in ("identity",)
        except OSError:
            return False

    def take(self, *, interrupts: bool) -> Path | None:
        """Unbind whatever driver holds the function; with `interrupts`, bind uio_pci_generic and return its device
        node.

        Returns None where there is no such driver or it does not take the function: then polling has to do.
        """
        held = self.driver
        # A driver that an earlier run of this program bound may stay.
        if held is not None and not (interrupts and held == UIO_DRIVER):
            self._write(self.path / "driver" / "unbind", self.address)
        if not interrupts or not (DRIVERS / UIO_DRIVER).is_dir():
            return None
        # The kernel enables a function for its driver; without one nobody has.
        if self.driver is None:
            try:
                self._write(self.path / "driver_override", UIO_DRIVER)
                self._write(DRIVERS / UIO_DRIVER / "bind", self.address)
            except PciError:
                return None
        return self._uio_node()

    def _uio_node(self) -> Path | None:
        limit = time.monotonic() + BIND_TIMEOUT_S
        while time.monotonic() < limit:
            for entry in self.path.glob("uio/uio*"):
                node = Path("/dev") / entry.name
                if node.exists():
                    return node
            time.sleep(0.01)
        return None

    def enable(self) -> None:
        """Memory decoding and bus mastering on, INTx as it is."""
        if self.driver is None:
            self._write(self.path / "enable", "1")
        self.set_command(COMMAND_MEMORY | COMMAND_MASTER, 0)

    def set_command(self, on: int, off: int) -> None:
        """Set and clear bits of the PCI command register."""
        value = WORD.unpack(os.pread(self._config, 2, COMMAND))[0]
        os.pwrite(self._config, WORD.pack((value | on) & ~off), COMMAND)

    def read_config(self) -> bytes:
        """The first 256 bytes of configuration space (64 without root)."""
        return os.pread(self._config, 256, 0)

    def bars(self) -> list[Bar]:
        """Sizes and kinds of the six BARs, as the kernel assigned them."""
        bars = []
        for line in (self.path / "resource").read_text().splitlines()[:BARS]:
            start, end, flags = (int(word, 16) for word in line.split())
            bars.append(Bar(end - start + 1 if end > start else 0, bool(flags & RESOURCE_MEMORY)))
        return bars

    def map(self, bar: int) -> mmap.mmap:
        """A whole memory BAR, mapped once. The size is the kernel's, not the device's word."""
        if bar not in self._maps:
            resource = self.path / f"resource{bar}"
            try:
                # O_SYNC asks for an uncached mapping: registers must not be answered by a cache.
                fd = os.open(resource, os.O_RDWR | os.O_SYNC | os.O_CLOEXEC)
            except OSError as error:
                raise PciError(f"{self.address}: cannot open BAR {bar}: {error.strerror}") from error
            try:
                self._maps[bar] = mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            except OSError as error:
                raise PciError(f"{self.address}: cannot map BAR {bar}: {error.strerror}") from error
            finally:
                os.close(fd)
        return self._maps[bar]

    def close(self) -> None:
        """Bus mastering off, maps closed, a driver of ours let go. May be called twice."""
        if self._config < 0:
            return
        try:
            # First of all: from here on the device writes to no memory of this machine.
            self.set_command(0, COMMAND_MASTER)
            if self.driver == UIO_DRIVER:
                self._write(self.path / "driver" / "unbind", self.address)
                self._write(self.path / "driver_override", "\n")
        except (OSError, PciError):
            pass  # the function is gone, or taken by someone else: nothing of ours is left on it
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()
        os.close(self._config)
        self._config = -1

    def _write(self, path: Path, text: str) -> None:
        try:
            path.write_text(text)
        except OSError as error:
            raise PciError(
                f"{self.address}: writing {path.parent.name}/{path.name} failed: {error.strerror}"
            ) from error
