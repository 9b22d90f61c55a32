"""Guest memory out of file descriptors: check, map, and put together a table (Vhost-user Protocol, "Memory access").

The one place that maps. A mapping is never unmapped by hand: it goes when the last view of it does, so a chain that is
still being answered cannot lose its bytes. A file is measured before it is mapped, because touching a page past its
end is a SIGBUS that nobody can handle. A front end may still shrink the file afterwards; it can be kept from that only
by a seal (F_SEAL_SHRINK, which QEMU's memfd backend sets), so `require_sealed` refuses files without it.
"""

from __future__ import annotations

import mmap
import os
import stat
from typing import NamedTuple

from virtaccel.device.front_end import MemoryRegion, RequestRefused
from virtaccel.processes.sealed import is_sealed
from virtaccel.virtqueue.errors import RegionError
from virtaccel.virtqueue.memory import GuestMemory, Region

_ADVICE = tuple(
    getattr(mmap, name) for name in ("MADV_DONTDUMP", "MADV_DONTFORK") if hasattr(mmap, name)
)  # a guest's bytes belong neither in our core file nor in a child process
NOT_SHARED = "guest memory must be shared with this process (QEMU: -object memory-backend-memfd,share=on)"


class Mapped(NamedTuple):
    """A mapped region. `identity` names the bytes themselves: device, inode, offset and size of the file's piece."""

    region: MemoryRegion
    identity: tuple[int, int, int, int]
    view: memoryview

    def named(self, region: MemoryRegion) -> bool:
        """Whether REM_MEM_REG means this one: "identified by its guest address, user address and size"."""
        return self.region[:3] == region[:3]

    def holds(self, segment: memoryview) -> bool:
        return segment.obj is self.view.obj


def map_region(region: MemoryRegion, fd: int, known: tuple[Mapped, ...], require_sealed: bool) -> Mapped:
    """Map a region from `fd`, which stays the caller's. Bytes that are mapped already (in `known`) are not mapped
    again: a chain popped under the old table stays a chain over the new one. Raises RequestRefused."""
    status = os.fstat(fd)
    # A device node or a pipe has no size that could be trusted.
    if not stat.S_ISREG(status.st_mode):
        raise RequestRefused(f"the descriptor of a memory region is not a file: {NOT_SHARED}")
    if region.size == 0 or region.offset + region.size > status.st_size:
        raise RequestRefused(f"{region.size} bytes at {region.offset} of a file of {status.st_size} bytes")
    if require_sealed and not is_sealed(fd):
        raise RequestRefused("memory that its owner may shrink, and sealed memory is required (F_SEAL_SHRINK)")
    identity = (status.st_dev, status.st_ino, region.offset, region.size)
    for mapped in known:
        if mapped.identity == identity:
            # The same bytes under new addresses: views of popped chains stay views of the table's memory.
            return Mapped(region, identity, mapped.view)
    return Mapped(region, identity, _map(region, fd, max(status.st_blksize, mmap.ALLOCATIONGRANULARITY)))


def _map(region: MemoryRegion, fd: int, granule: int) -> memoryview:
    """Offsets need only be aligned for mmap, not for the protocol; huge pages want both ends on their own size."""
    # A file system may say anything as its block size; only a power of two can be an alignment.
    if granule & (granule - 1):
        granule = mmap.ALLOCATIONGRANULARITY
    start = region.offset & -granule
    length = region.offset - start + region.size
    try:
        whole = mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=start)
    except (OSError, ValueError, OverflowError) as error:
        raise RequestRefused(f"cannot map {length} bytes: {error}") from error
    for advice in _ADVICE:
        whole.madvise(advice)
    return memoryview(whole)[region.offset - start :]


def table(mapped: tuple[Mapped, ...]) -> GuestMemory:
    """Raises RequestRefused where regions overlap or leave the address space."""
    try:
        return GuestMemory([Region(item.region.guest_address, item.view, item.region.user_address) for item in mapped])
    except RegionError as error:
        raise RequestRefused(str(error)) from error
