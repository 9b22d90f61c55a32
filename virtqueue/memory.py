"""Guest memory: regions of any backing at guest-physical addresses, and the way from an address to bytes.

Knows addresses and bounds. It must not know rings, frames or how a region came to be mapped. Addresses and
lengths come from a hostile guest or front end: every one is checked before a view is made. Guest-physical addresses are
those of descriptors (virtio 1.3, 2.7.5); user addresses are the front end's own, which vhost-user uses for the parts of
a ring ("Memory access", vhost-user protocol).

A view given out keeps its region's backing alive: memory that a new table no longer names stays mapped until the last
chain over it is gone. An `mmap` under a region must therefore be left to the collector and not be closed by hand.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from mmap import mmap
from typing import Final

from virtaccel.virtqueue.errors import RegionError
from virtaccel.virtqueue.segments import Fault

ADDRESS_SPACE: Final = 1 << 64

Buffer = bytearray | memoryview | mmap


class Region:
    """Contiguous guest memory: `buffer` appears at `guest_address`, and at `user_address` in the front end if given.

    `buffer` is any writable contiguous buffer: bytearray, mmap, memoryview. Raises RegionError if it is empty or
    read-only, or if either address range leaves the 64-bit address space.
    """

    __slots__ = ("guest_address", "guest_end", "user_address", "user_end", "view")

    def __init__(self, guest_address: int, buffer: Buffer, user_address: int | None = None) -> None:
        view = memoryview(buffer)
        if view.readonly or not view.contiguous:
            raise RegionError("guest memory must be writable and contiguous")
        if view.nbytes == 0:
            raise RegionError("a region of no bytes")
        self.view: Final = view.cast("B")
        self.guest_address: Final = guest_address
        self.guest_end: Final = _end("guest", guest_address, view.nbytes)
        self.user_address: Final = user_address
        self.user_end: Final = None if user_address is None else _end("user", user_address, view.nbytes)

    def __len__(self) -> int:
        return len(self.view)

    def __repr__(self) -> str:
        user = "" if self.user_address is None else f", user {self.user_address:#x}"
        return f"Region({self.guest_address:#x}..{self.guest_end:#x}{user})"


def _end(kind: str, address: int, length: int) -> int:
    if not 0 <= address < ADDRESS_SPACE or address + length > ADDRESS_SPACE:
        raise RegionError(f"a region of {length} bytes at {kind} address {address:#x} leaves the address space")
    return address + length


class GuestMemory:
    """One memory table, never changed: a new table is a new object over old and new regions (`regions`).

    Raises RegionError where two regions overlap in guest-physical or in user addresses. Regions that touch are
    adjacent: a buffer may run from one into the next.
    """

    __slots__ = ("_starts", "_users", "last_hit", "regions")

    def __init__(self, regions: Iterable[Region] = ()) -> None:
        self.regions: Final = tuple(sorted(regions, key=lambda region: region.guest_address))
        self._starts: Final = [region.guest_address for region in self.regions]
        self._users: Final = [
            (region.user_address, region.user_end, region)
            for region in self.regions
            if region.user_address is not None and region.user_end is not None
        ]
        _reject_overlap("guest", [(region.guest_address, region.guest_end) for region in self.regions])
        _reject_overlap("user", sorted((start, end) for start, end, _ in self._users))
        # The region hit last, (start, end, view) in one tuple so that it is replaced as a whole. Nearly every
        # descriptor of a guest lies where the one before it lay. Nothing fits into the first one.
        self.last_hit = (1, 0, memoryview(b""))

    def translate(self, address: int, length: int) -> list[memoryview]:
        """Views of the `length` bytes at guest-physical `address`, in order, one per region touched.

        Raises Fault if `length` is below 1, if any byte is unmapped, or if the range would wrap at 2**64, which an
        implementation in machine arithmetic would have to test for and integers without a width cannot miss.
        """
        start, end, view = self.last_hit
        offset = address - start
        if offset >= 0 and address + length <= end and length > 0:
            return [view[offset : offset + length]]
        return self._search(address, length)

    def _search(self, address: int, length: int) -> list[memoryview]:
        if length < 1 or not 0 <= address < ADDRESS_SPACE or address + length > ADDRESS_SPACE:
            raise Fault(f"{length} bytes at {address:#x} are no range of a 64-bit address space")
        views = []
        index = bisect_right(self._starts, address) - 1
        position, left = address, length
        while left:
            if not 0 <= index < len(self.regions):
                raise Fault(f"{length} bytes at {address:#x} are not all mapped")
            region = self.regions[index]
            if not region.guest_address <= position < region.guest_end:
                raise Fault(f"{length} bytes at {address:#x} are not all mapped")
            offset = position - region.guest_address
            views.append(region.view[offset : offset + left])
            position += len(views[-1])
            left -= len(views[-1])
            self.last_hit = (region.guest_address, region.guest_end, region.view)
            index += 1
        return views

    def translate_user(self, address: int, length: int) -> memoryview:
        """The `length` bytes at the front end's user address `address`; they must lie in one region, else Fault."""
        region, offset = self._find_user(address, length)
        return region.view[offset : offset + length]

    def guest_address(self, user_address: int, length: int) -> int:
        """The guest-physical address of `length` bytes that the front end knows by `user_address`.

        A ring is remembered by this one: the next memory table may map the same memory at other user addresses.
        Raises Fault unless one region holds them all.
        """
        region, offset = self._find_user(user_address, length)
        return region.guest_address + offset

    def _find_user(self, address: int, length: int) -> tuple[Region, int]:
        if length > 0:
            for start, end, region in self._users:
                if start <= address and address + length <= end:
                    return region, address - start
        raise Fault(f"{length} bytes at user address {address:#x} lie in no region")


def _reject_overlap(kind: str, ranges: Sequence[tuple[int, int]]) -> None:
    for (_, end), (start, _) in pairwise(ranges):
        if start < end:
            raise RegionError(f"two regions overlap at {kind} address {start:#x}")
