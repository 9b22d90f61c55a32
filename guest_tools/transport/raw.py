"""A transport's ring laid bare: descriptors, heads and indices written as told, right or wrong.

For suites that have to show a device chains no sound driver would publish. It takes a transport's ring memory over, so
the transport itself must not be used meanwhile; `restart` resets the device and gives a clean ring. Knows the split
ring (virtio 1.3, 2.7) and no command. Standard library only: this also runs inside a guest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

from virtaccel.guest_tools.transport.base import Transport, TransportError
from virtaccel.virtqueue.driver import Used
from virtaccel.virtqueue.layout import DESCRIPTOR, USED_ELEMENT, place, ring_bytes

NEXT, WRITE, INDIRECT = 1, 2, 4
PAGE: Final = 4096
# A suite looks by itself; interrupts would only cost.
NO_INTERRUPT: Final = 1
# For entries behind the index: nobody reads them before it covers them.
_U16: Final = Struct("<H")

Locate: TypeAlias = Callable[[int, int], Sequence[tuple[int, int]]]


class Piece(NamedTuple):
    """Scratch memory: where the device sees it, and our view of it."""

    address: int
    view: memoryview


@runtime_checkable
class HasRawRing(Transport, Protocol):
    """A transport that can lay its ring bare."""

    def raw_ring(self) -> RawRing: ...


class RawRing:
    """The ring at the start of `block`, which the device sees as `locate` says; the rest of it is scratch memory.

    `notify` kicks the device, `rest` waits up to so many seconds for it (and runs it, where it is in this process) and
    raises TransportError when it is gone, `reset` resets it and clears the ring.
    """

    def __init__(
        self, block: memoryview, locate: Locate, size: int, notify: Callable[[], None],
        rest: Callable[[float], None], reset: Callable[[], None],
    ) -> None:
        self.size = size
        self._block = block
        self._locate = locate
        self._at = place(size)
        self._first = -(-ring_bytes(size) // PAGE) * PAGE
        self._notify = notify
        self._rest = rest
        self._reset = reset
        self._forget()

    def _forget(self) -> None:
        self.available = 0
        self._seen = 0
        self._next = self._first

    def restart(self) -> None:
        """Reset the device: the ring is empty and begins at index 0, all scratch memory is free."""
        self._reset()
        self._forget()
        self.set_flags(NO_INTERRUPT)

    def scratch_again(self) -> None:
        """All scratch memory is free again; nothing may be outstanding."""
        self._next = self._first

    def piece(self, content: bytes, apart: bool = True) -> Piece:
        """Scratch memory that holds `content`, at most a page; with a byte between it and the next one unless not
        `apart`. Raises TransportError when there is none left."""
        size = len(content)
        if self._next % PAGE + size > PAGE:
            self._next = -(-self._next // PAGE) * PAGE
        start = self._next
        if size > PAGE or start + size > len(self._block):
            raise TransportError(f"no scratch memory for {size} bytes")
        ((address, _),) = self._locate(start, size) if size else ((self._locate(start, 1)[0][0], 0),)
        self._next = start + size + apart
        view = self._block[start : start + size]
        view[:] = content
        return Piece(address, view)

    def describe(self, index: int, address: int, length: int, flags: int = 0, following: int = 0) -> None:
        """Write descriptor `index`."""
        DESCRIPTOR.pack_into(
            self._block, self._at.descriptors + DESCRIPTOR.size * index, address, length, flags, following
        )

    def chain(self, first: int, readable: Sequence[Piece], writable: Sequence[Piece]) -> int:
        """A chain in descriptors from `first` on; its head."""
        parts = [(piece, 0) for piece in readable] + [(piece, WRITE) for piece in writable]
        for position, (piece, flags) in enumerate(parts):
            last = position == len(parts) - 1
            index = first + position
            self.describe(
                index, piece.address, len(piece.view), flags | (0 if last else NEXT), 0 if last else index + 1
            )
        return first

    def offer(self, *heads: int) -> None:
        """Make heads available, in one step, and kick."""
        for head in heads:
            _U16.pack_into(self._block, self._at.available + 4 + 2 * (self.available % self.size), head)
            self.available = (self.available + 1) & 0xFFFF
        self.announce(self.available)

    def announce(self, index: int) -> None:
        """Write the available index, whatever lies behind it, and kick."""
        # One native access, as for every ring index (split.py says why).
        words = self._block[self._at.available : self._at.available + 4].cast("H")
        words[1] = index
        self._notify()

    def set_flags(self, flags: int) -> None:
        """The driver's flags: 1 asks for no interrupts."""
        self._block[self._at.available : self._at.available + 2].cast("H")[0] = flags

    @property
    def used_index(self) -> int:
        return int(self._block[self._at.used : self._at.used + 4].cast("H")[1])

    def collect(self, timeout: float) -> Used | None:
        """The next used element, None if none comes in `timeout` seconds."""
        until = time.monotonic() + timeout
        while True:
            if self.used_index != self._seen:
                offset = self._at.used + 4 + USED_ELEMENT.size * (self._seen % self.size)
                # Ring indices are 16 bits wide and run over (virtio 1.3, 2.7.6).
                self._seen = (self._seen + 1) & 0xFFFF
                return Used(*USED_ELEMENT.unpack_from(self._block, offset))
            left = until - time.monotonic()
            if left <= 0:
                return None
            # In process nothing happens unless the device is run here; elsewhere this notices that it has gone.
            self._rest(left)
