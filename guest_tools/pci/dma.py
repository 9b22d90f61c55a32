"""Memory that a device may write to: locked pages whose physical addresses stay true for as long as they are mapped.

Knows mmap flags, /proc/self/pagemap, hugetlb and page pinning. Does not know rings or frames.

A locked page stays in memory, but that is not enough: the kernel may still *move* it (compaction, NUMA balancing,
memory hot-unplug), and then the device would write into somebody else's page. Two things stop that. Huge pages from
the hugetlb pool are left alone by compaction and balancing, and they are contiguous over 2 MiB. A long-term pin, as
an io_uring takes on registered buffers, forbids moving any page. Huge pages are used where they can be had, and
pinned too where possible; ordinary pages are used only when they can be pinned, and refused otherwise.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path
from struct import Struct

from virtaccel.guest_tools.transport.base import TransportError

# Linux, include/uapi/asm-generic/mman.h and mman-common.h: not every Python's mmap module has all of them.
MAP_HUGETLB = 0x40000
MAP_LOCKED = 0x2000
MAP_POPULATE = 0x8000
SMALL_PAGE = mmap.PAGESIZE
PAGEMAP_ENTRY = Struct("<Q")
# Documentation/admin-guide/mm/pagemap.rst: bit 63 present, bits 0 to 54 the frame.
PAGEMAP_PRESENT = 1 << 63
PAGEMAP_FRAME = (1 << 55) - 1

# The same on x86-64 and aarch64; libc has no wrappers for them.
SYS_IO_URING_SETUP, SYS_IO_URING_REGISTER = 425, 427
IORING_REGISTER_BUFFERS = 0
IORING_PARAMS_BYTES = 120
# io_uring takes buffers of at most 1 GiB each; half of that leaves no doubt about the edge.
PIN_CHUNK = 1 << 29

RESERVED_HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
COMPACT_NOW = Path("/proc/sys/vm/compact_memory")


class DmaError(TransportError):
    """No memory can be had whose physical address is known and stable; the text says what would help."""


class DmaMemory:
    """`size` bytes, zeroed. `view` is this process's side; `segments` gives the device's. `kind` says how it is held;
    `page` bytes are certainly contiguous for the device, and a run may end at any multiple of them."""

    def __init__(self, mapped: mmap.mmap, page: int, kind: str, pin: int, give_back: Callable[[], None]) -> None:
        self._map = mapped
        self.page = page
        self._pin = pin
        self._give_back = give_back
        self.kind = kind
        self.size = len(mapped)
        self.view = memoryview(mapped)
        self._frames = _physical_pages(_address_of(mapped), self.size, page)

    def segments(self, offset: int, length: int) -> list[tuple[int, int]]:
        """(physical address, bytes) of a range, neighbours joined. `offset` and `length` are ours, never the
        device's."""
        page, frames = self.page, self._frames
        runs: list[tuple[int, int]] = []
        end = offset + length
        while offset < end:
            index, inside = divmod(offset, page)
            size = min(page - inside, end - offset)
            address = frames[index] + inside
            # Fewer descriptors for the same bytes: neighbours in memory are often neighbours for the device.
            if runs and runs[-1][0] + runs[-1][1] == address:
                runs[-1] = (runs[-1][0], runs[-1][1] + size)
            else:
                runs.append((address, size))
            offset += size
        return runs

    def close(self) -> None:
        """Unpin and unmap. Only after the device has confirmed its reset: until then it may still write."""
        if self._pin >= 0:
            os.close(self._pin)
            self._pin = -1
        self.view.release()
        try:
            self._map.close()
        except BufferError:
            return  # somebody still looks at a response: the pages go when that view does
        self._give_back()


def allocate(size: int, smallest: int, *, huge_pages: bool = True) -> DmaMemory:
    """`size` bytes if there are so many huge pages, down to `smallest`; else ordinary pinned pages. Raises DmaError."""
    huge = huge_page_bytes() if huge_pages else 0
    wanted = size
    while huge and wanted >= smallest:
        rounded = -(-wanted // huge) * huge
        memory = _huge(rounded, huge)
        if memory is not None:
            return memory
        # A host short of huge pages may still have half as many: smaller transfers beat unpinned memory.
        wanted //= 2
    return _ordinary(-(-min(size, max(smallest, 4 << 20)) // SMALL_PAGE) * SMALL_PAGE)


def huge_page_bytes() -> int:
    """The default huge page size, 0 where the kernel has none."""
    try:
        found = re.search(r"^Hugepagesize:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def _huge(size: int, page: int) -> DmaMemory | None:
    give_back: Callable[[], None] = _nothing
    mapped = _map(size, MAP_HUGETLB)
    if mapped is None:
        give_back = _reserve(size // page)
        mapped = _map(size, MAP_HUGETLB)
        if mapped is None:
            give_back()
            return None
    pin = _pin(_address_of(mapped), size)
    kind = f"huge pages of {page >> 20} MiB" + (", pinned" if pin >= 0 else "")
    return DmaMemory(mapped, page, kind, pin, give_back)


def _ordinary(size: int) -> DmaMemory:
    mapped = _map(size, 0)
    if mapped is None:
        raise DmaError(f"cannot lock {size} bytes of memory: run as root, or raise the limit on locked memory")
    pin = _pin(_address_of(mapped), size)
    if pin < 0:
        mapped.close()
        raise DmaError(
            "no huge pages (write to /proc/sys/vm/nr_hugepages), and this kernel cannot pin ordinary ones (io_uring is "
            "off), so the device's memory could be moved under it"
        )
    return DmaMemory(mapped, SMALL_PAGE, "ordinary pages, locked and pinned", pin, _nothing)


def _map(size: int, more: int) -> mmap.mmap | None:
    """Shared, so that a fork does not make the parent's pages copy-on-write."""
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | MAP_LOCKED | MAP_POPULATE | more
    try:
        return mmap.mmap(-1, size, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError:
        return None


def _nothing() -> None:
    """There is nothing to give back."""


def _reserve(pages: int) -> Callable[[], None]:
    """Ask the kernel for so many huge pages more; returns what undoes it."""
    try:
        before = int(RESERVED_HUGE_PAGES.read_text())
        RESERVED_HUGE_PAGES.write_text(str(before + pages))
        if int(RESERVED_HUGE_PAGES.read_text()) < before + pages:
            COMPACT_NOW.write_text("1")
            RESERVED_HUGE_PAGES.write_text(str(before + pages))
        gained = int(RESERVED_HUGE_PAGES.read_text()) - before
    except (OSError, ValueError):
        return _nothing

    def give_back() -> None:
        try:
            RESERVED_HUGE_PAGES.write_text(str(max(0, int(RESERVED_HUGE_PAGES.read_text()) - gained)))
        except (OSError, ValueError):
            return

    return give_back


def _address_of(mapped: mmap.mmap) -> int:
    anchor = ctypes.c_char.from_buffer(mapped)
    return ctypes.addressof(anchor)


def _pin(address: int, size: int) -> int:
    """A file descriptor that holds a long-term pin on the range, or -1 where the kernel gives none."""
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(IORING_PARAMS_BYTES)
    ring = libc.syscall(SYS_IO_URING_SETUP, 1, parameters)
    if ring < 0:
        return -1
    chunks = [(address + start, min(PIN_CHUNK, size - start)) for start in range(0, size, PIN_CHUNK)]
    vectors = (ctypes.c_size_t * (2 * len(chunks)))(*(word for chunk in chunks for word in chunk))
    if libc.syscall(SYS_IO_URING_REGISTER, ring, IORING_REGISTER_BUFFERS, vectors, len(chunks)) < 0:
        os.close(ring)
        return -1
    # A child must not hold the pin after this process has let go.
    os.set_inheritable(ring, False)
    return int(ring)


def _physical_pages(address: int, size: int, page: int) -> list[int]:
    """Physical address of every page of the range (Linux: Documentation/admin-guide/mm/pagemap.rst)."""
    frames = []
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for start in range(address, address + size, page):
            entry = PAGEMAP_ENTRY.unpack(os.pread(pagemap.fileno(), PAGEMAP_ENTRY.size, start // SMALL_PAGE * 8))[0]
            # Without the right to see them the kernel shows frames of zero, which are no addresses.
            if not entry & PAGEMAP_PRESENT or not entry & PAGEMAP_FRAME:
                raise DmaError("the kernel does not tell physical addresses: run as root (CAP_SYS_ADMIN)")
            frames.append((entry & PAGEMAP_FRAME) * SMALL_PAGE)
    return frames
