"""Target `ring`: descriptor tables and index games against the device's queue (virtio 1.3, 2.7; virtqueue.md, 3).

An input is a header, a descriptor table and a list of moves: offer a head, pop, push, lie about the available index,
reset, find the memory again. Beside the queue runs a plain model of what the standard says: which chains are valid and
where their bytes lie, which elements come back, when the ring must stop. The model reads nothing that the queue wrote
and calls nothing of the queue's package.
"""

from __future__ import annotations

from mmap import mmap
from random import Random
from struct import Struct
from typing import Final, NamedTuple

from virtaccel.harness.fuzz.target import Finding, TargetBase
from virtaccel.virtqueue.errors import RingError
from virtaccel.virtqueue.memory import GuestMemory, Region
from virtaccel.virtqueue.segments import Chain
from virtaccel.virtqueue.split import DeviceQueue

_DESCRIPTOR: Final = Struct("<QIHH")
_U16: Final = Struct("<H")
_ELEMENT: Final = Struct("<II")
NEXT, WRITE, INDIRECT = 1, 2, 4

PAGE: Final = 4096
LOW: Final = 0x1000
TABLE: Final = LOW
AVAILABLE: Final = LOW + 0x800
USED: Final = LOW + 0x1000
DATA: Final = LOW + 0x2000
TOP: Final = (1 << 64) - PAGE  # the last page: ends of ranges there do not fit into 64 bits
HEADER: Final = 6
ENTRY: Final = 4
MOVE: Final = 2
SIZES: Final = (1, 2, 4, 8, 16)  # small rings are soon full, and wrap
LIMITS: Final = (2, 3, 5, 8, 16, 256)  # below, at and above those sizes

# What memory there is, as the model knows it: first address, bytes. The first two regions touch.
MAPPED: Final = ((LOW, 4 * PAGE), (0x10000, PAGE), (TOP, PAGE))
_GOOD = (DATA, DATA + 8, DATA + 0x100, DATA + 0xFF8, DATA + PAGE, DATA + PAGE + 0x100, 0x10000, 0x10100)
_EDGES = (
    DATA + 2 * PAGE, DATA + 2 * PAGE - 16, 0x10000 + PAGE - 8, 0xFFF, 0, TOP, TOP + PAGE - 8, (1 << 64) - 1,
    TOP - 1, 0x10000 - 1,
)  # fmt: skip


def _spread(common: tuple[int, ...], rare: tuple[int, ...]) -> tuple[int, ...]:
    """256 values for a byte to choose from: mostly common ones."""
    return tuple((rare[i // 8 % len(rare)] if i % 8 == 7 else common[i % len(common)]) for i in range(256))


ADDRESSES: Final = _spread(_GOOD, _EDGES)
LENGTHS: Final = _spread((16, 24, 92, 1, 8, 40), (0, PAGE, PAGE + 1, 2 * PAGE, 1 << 31, (1 << 32) - 1, 2))
FLAGS: Final = _spread(
    (NEXT, NEXT, WRITE, NEXT | WRITE, WRITE, 0), (INDIRECT, 8, 0x8000, NEXT | INDIRECT, 0xFFFF, NEXT)
)


class _Segment(NamedTuple):
    address: int
    length: int


class _Expected(NamedTuple):
    """A valid chain, as the model sees it."""

    readable: list[_Segment]
    writable: list[_Segment]


def _is_mapped(address: int, length: int) -> bool:
    return any(start <= address and address + length <= start + size for start, size in MAPPED)


class RingTarget(TargetBase):
    """See the module."""

    name = "ring"
    stride = MOVE

    def __init__(self) -> None:
        super().__init__()
        self._low = mmap(-1, 3 * PAGE)
        fill = Random(1)
        self._images: list[bytes] = []
        regions = []
        for start, block in ((LOW, self._low), (LOW + 3 * PAGE, mmap(-1, PAGE)), (0x10000, mmap(-1, PAGE))):
            block[:] = fill.randbytes(len(block))
            regions.append(Region(start, block))
        top = bytearray(fill.randbytes(PAGE))
        regions.append(Region(TOP, top))
        self._memory = GuestMemory(regions)
        views = [bytes(region.view) for region in self._memory.regions]
        self._images = [views[0] + views[1], views[2], views[3]]
        self._view = memoryview(self._low)
        self._queues: dict[tuple[int, int], DeviceQueue] = {}

    def generate(self, random: Random) -> bytes:
        return random.randbytes(HEADER + ENTRY * 16 + MOVE * random.randrange(4, 14))

    def close(self) -> None:
        self._queues.clear()

    def execute(self, data: bytes) -> int:
        header = data[:HEADER].ljust(HEADER, b"\0")
        size = SIZES[header[0] % len(SIZES)]
        limit = LIMITS[header[1] % len(LIMITS)]
        start = header[2] | header[3] << 8
        if header[3] > 0xC0:
            start = 0x10000 - 1 - header[2] % 4  # just before the indices wrap
        _Game(self, size, limit, start).play(data[HEADER : HEADER + ENTRY * size], data[HEADER + ENTRY * 16 :])
        return 1

    def queue(self, size: int, limit: int, start: int) -> DeviceQueue:
        """A queue as new at index `start`; made once for each shape, since only a reset queue is as good as a new
        one."""
        queue = self._queues.get((size, limit))
        if queue is None:
            queue = DeviceQueue(self._memory, size, TABLE, AVAILABLE, USED, limit, last_available=start)
            self._queues[size, limit] = queue
        else:
            queue.reset(self._memory, start)
        return queue

    def bytes_at(self, segment: _Segment) -> bytes:
        for (start, size), image in zip(MAPPED, self._images, strict=True):
            if start <= segment.address < start + size:
                offset = segment.address - start
                return image[offset : offset + segment.length]
        raise Finding("the model holds a segment outside its memory")


class _Game:
    """One input: the driver's hand, the model, and the queue between them."""

    def __init__(self, target: RingTarget, size: int, limit: int, start: int) -> None:
        self.target = target
        self.size, self.limit = size, min(limit, size)
        self.view = target._view
        self.table: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)] * size
        self.view[TABLE - LOW : TABLE - LOW + 16 * size] = bytes(16 * size)
        self.available = bytearray(4 + 2 * size)
        self.used = bytearray(4 + 8 * size)
        self.index = self.last = self.used_index = start
        _U16.pack_into(self.available, 2, start)
        _U16.pack_into(self.used, 2, start)
        self.view[AVAILABLE - LOW : AVAILABLE - LOW + len(self.available)] = self.available
        self.view[USED - LOW : USED - LOW + len(self.used)] = self.used
        self.queue = target.queue(size, limit, start)
        self.held: list[tuple[Chain, int, _Expected | None]] = []
        self.gone: list[Chain] = []
        self.stopped = False

    def play(self, table: bytes, moves: bytes) -> None:
        for index in range(len(table) // ENTRY):
            self.describe(index, *table[ENTRY * index : ENTRY * index + ENTRY])
        for at in range(0, min(len(moves) - 1, 64), MOVE):
            kind, argument = moves[at], moves[at + 1]
            _MOVES[kind % len(_MOVES)](self, argument)
        while self.held and not self.stopped:
            self.push(0)

    # -- the driver's hand

    def describe(self, index: int, address: int, length: int, flags: int, following: int) -> None:
        if following >= 0xC0:
            next_index = (following - 0xC0) % (self.size + 2) if following < 0xFF else 0xFFFF
        else:
            next_index = (index + 1) % self.size
        entry = (ADDRESSES[address], LENGTHS[length], FLAGS[flags], next_index)
        self.table[index] = entry
        _DESCRIPTOR.pack_into(self.view, TABLE - LOW + 16 * index, *entry)

    def offer(self, argument: int) -> None:
        """Make a head available; nearly always one that is a descriptor."""
        head = argument % self.size if argument < 0xF0 else (self.size, self.size + 1, 0xFFFF)[argument % 3]
        slot = 4 + 2 * (self.index % self.size)
        _U16.pack_into(self.available, slot, head)
        self.view[AVAILABLE - LOW + slot : AVAILABLE - LOW + slot + 2] = self.available[slot : slot + 2]
        self.announce(self.index + 1)

    def announce(self, index: int) -> None:
        self.index = index & 0xFFFF
        _U16.pack_into(self.available, 2, self.index)
        self.view[AVAILABLE - LOW + 2 : AVAILABLE - LOW + 4] = self.available[2:4]

    def jump(self, argument: int) -> None:
        """Lie about the index: a little ahead, far ahead, or back."""
        self.announce(
            self.index + (argument if argument < 0x40 else -(argument & 7) if argument < 0x80 else argument << 8)
        )

    def rewrite(self, argument: int) -> None:
        """Change a descriptor that the device may be looking at."""
        self.describe(argument % self.size, argument * 7 & 0xFF, argument * 3 & 0xFF, argument * 5 & 0xFF, argument)

    def suppress(self, argument: int) -> None:
        flag = argument & 1
        self.view[AVAILABLE - LOW] = flag
        self.available[0] = flag
        if not self.stopped and self.queue.should_notify() is bool(flag):
            raise Finding("an interrupt is wanted although the driver suppresses it, or the other way round")

    # -- the device's side, against the model

    def pop(self, argument: int) -> None:
        pending = (self.index - self.last) & 0xFFFF
        try:
            chain = self.queue.pop()
        except RingError as error:
            if not self.stopped and pending + len(self.held) <= self.size:
                raise Finding(f"a sound ring was stopped: {error}") from error
            self.stopped = True
            self.target.features.add("stopped")
            return
        if self.stopped:
            raise Finding("a stopped ring was served")
        if pending > self.size:
            raise Finding(f"an available index {pending} ahead was believed in a ring of {self.size}")
        if chain is None:
            if pending:
                raise Finding("available work was not seen")
            return
        if not pending:
            raise Finding("a chain came out of an empty ring")
        head = _U16.unpack_from(self.available, 4 + 2 * (self.last % self.size))[0]
        self.last = (self.last + 1) & 0xFFFF
        if self.queue.last_available != self.last:
            raise Finding(f"last available index {self.queue.last_available}, should be {self.last}")
        expected = self.walk(head)
        self.compare(chain, head, expected)
        self.held.append((chain, head, expected))

    def walk(self, head: int) -> _Expected | None:
        """The chain at `head` by the standard, None if it is not valid."""
        readable: list[_Segment] = []
        writable: list[_Segment] = []
        index = head
        for count in range(1, 1 << 16):
            if index >= self.size or count > self.limit:
                return None
            address, length, flags, following = self.table[index]
            if flags not in (0, NEXT, WRITE, NEXT | WRITE) or length == 0 or not _is_mapped(address, length):
                return None
            if flags & WRITE:
                writable.append(_Segment(address, length))
            elif writable:
                return None
            else:
                readable.append(_Segment(address, length))
            if not flags & NEXT:
                return _Expected(readable, writable) if readable and writable else None
            index = following
        return None

    def compare(self, chain: Chain, head: int, expected: _Expected | None) -> None:
        self.target.features.add((self.size, chain.broken.split(" ")[0] if chain.broken else len(chain.readable)))
        if chain.head != head:
            raise Finding(f"head {chain.head} came for head {head}")
        if expected is None:
            if chain.broken is None or chain.readable or chain.writable:
                raise Finding("an invalid chain was taken for a valid one")
            return
        if chain.broken is not None:
            raise Finding(f"a valid chain was refused: {chain.broken}")
        for what, views, segments, total in (
            ("readable", chain.readable, expected.readable, chain.readable_bytes),
            ("writable", chain.writable, expected.writable, chain.writable_bytes),
        ):
            if total != sum(segment.length for segment in segments) or total != sum(map(len, views)):
                raise Finding(f"{what} bytes do not add up")
            wanted = [self.target.bytes_at(segment) for segment in segments]
            if b"".join(views) != b"".join(wanted):
                raise Finding(f"{what} bytes lie elsewhere than the descriptors say")

    def push(self, argument: int) -> None:
        if not self.held:
            return self.push_again(argument)
        chain, head, expected = self.held.pop(argument % len(self.held))
        room = sum(segment.length for segment in expected.writable) if expected else 0
        written = room if argument & 1 else 0
        if self.stopped:
            try:
                self.queue.push(chain, written)
            except RingError:
                return None
            raise Finding("a stopped ring was written")
        if argument & 0x40:
            try:
                self.queue.push(chain, room + 1)
                raise Finding("more bytes were reported than the chain holds")
            except ValueError:
                pass
        if not self.queue.push(chain, written):
            raise Finding("a chain was not taken back")
        _ELEMENT.pack_into(self.used, 4 + 8 * (self.used_index % self.size), head, written)
        self.used_index = (self.used_index + 1) & 0xFFFF
        _U16.pack_into(self.used, 2, self.used_index)
        self.gone.append(chain)
        self.same_used_ring()
        return None

    def push_again(self, argument: int) -> None:
        """A chain given back already, or from before a reset, must not come back once more."""
        if not self.gone:
            return
        try:
            if self.queue.push(self.gone[argument % len(self.gone)], 0):
                raise Finding("a chain was given back twice")
        except RingError:
            if not self.stopped:
                raise
        if not self.stopped:
            self.same_used_ring()

    def same_used_ring(self) -> None:
        seen = bytes(self.view[USED - LOW + 2 : USED - LOW + len(self.used)])
        if seen != self.used[2:]:
            raise Finding("the used ring is not what was given back")

    def reset(self, argument: int) -> None:
        """A driver's reset: seldom, since it ends everything that is under way."""
        if argument & 3:
            return
        self.gone += [chain for chain, *_ in self.held]
        self.held.clear()
        self.queue.reset(self.target._memory, self.index)
        self.last, self.stopped = self.index, False

    def find_again(self, argument: int) -> None:
        """A new memory table with the same bytes in the same places changes nothing."""
        if not self.stopped:
            self.queue.rebind(GuestMemory(self.target._memory.regions))

    def kicks(self, argument: int) -> None:
        if self.stopped:
            return
        self.queue.disable_kicks()
        if self.view[USED - LOW] != 1:
            raise Finding("kicks were not suppressed")
        if self.queue.enable_kicks() is not (self.index != self.last) or self.view[USED - LOW] != 0:
            raise Finding("work that arrived while kicks were off was not seen")


_MOVES = (
    _Game.offer, _Game.pop, _Game.push, _Game.offer, _Game.pop, _Game.offer, _Game.pop, _Game.push,
    _Game.rewrite, _Game.push_again, _Game.kicks, _Game.suppress, _Game.reset, _Game.jump, _Game.find_again, _Game.pop,
)  # fmt: skip
