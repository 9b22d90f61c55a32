"""The guarded walk and copies over segments (virtqueue.md, sections 2, 3 and 5)."""

import itertools
import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rings import BASE, BYTES, DATA, INDIRECT, NEXT, WRITE, RawRing

from virtaccel.virtqueue import chain as walking
from virtaccel.virtqueue.layout import DESCRIPTOR
from virtaccel.virtqueue.memory import GuestMemory, Region
from virtaccel.virtqueue.segments import Chain, Fault, gather, scatter, window
from virtaccel.virtqueue.split import DeviceQueue

OUTSIDE = BASE + BYTES


def popped(ring: RawRing, head: int, limit: int = 256) -> Chain:
    queue = ring.device(limit, last_available=ring.index)
    ring.offer(head)
    chain = queue.pop()
    assert chain is not None
    return chain


def test_vq_003_segments_concatenate_without_padding() -> None:
    ring = RawRing()
    ring.buffer[DATA - BASE : DATA - BASE + 12] = b"abcdefghijkl"
    for index, (offset, length) in enumerate(((8, 1), (0, 3), (4, 2))):
        ring.descriptor(index, DATA + offset, length, NEXT, index + 1)
    ring.descriptor(3, DATA + 100, 2, NEXT | WRITE, 4)
    ring.descriptor(4, DATA + 90, 3, WRITE)
    chain = popped(ring, 0)
    assert gather(chain.readable, 0, 6) == b"iabcef"
    assert gather(chain.readable, 1, 4) == b"abce"
    scatter(chain.writable, 1, b"wxyz")
    assert ring.buffer[DATA + 100 - BASE : DATA + 102 - BASE] == b"\0w"
    assert ring.buffer[DATA + 90 - BASE : DATA + 94 - BASE] == b"xyz\0"


def test_vq_003_a_descriptor_may_span_adjacent_regions() -> None:
    ring = RawRing()
    ring.memory = GuestMemory([*ring.memory.regions, Region(OUTSIDE, bytearray(b"next") * 8)])
    ring.descriptor(0, OUTSIDE - 2, 5, NEXT, 1)
    ring.descriptor(1, DATA, 4, WRITE)
    ring.buffer[-2:] = b"->"
    chain = popped(ring, 0)
    assert chain.readable_bytes == 5
    assert [bytes(view) for view in chain.readable] == [b"->", b"nex"]


BAD = {
    "vq_004 read only": ([(DATA, 24, NEXT, 1), (DATA, 24, 0, 0)], "no writable"),
    "vq_004 write only": ([(DATA, 24, NEXT | WRITE, 1), (DATA, 24, WRITE, 0)], "no readable"),
    "vq_004 one readable": ([(DATA, 24, 0, 0)], "no writable"),
    "vq_005 writable first": ([(DATA, 24, NEXT | WRITE, 1), (DATA, 24, 0, 0)], "readable descriptor after"),
    "vq_005 interleaved": (
        [(DATA, 9, NEXT, 1), (DATA, 9, NEXT | WRITE, 2), (DATA, 9, NEXT, 3), (DATA, 9, WRITE, 0)],
        "after",
    ),
    "vq_006 zero length readable": ([(DATA, 0, NEXT, 1), (DATA, 24, WRITE, 0)], "no bytes"),
    "vq_006 zero length writable": ([(DATA, 24, NEXT, 1), (DATA, 0, WRITE, 0)], "no bytes"),
    "vq_006 self loop": ([(DATA, 24, NEXT, 0)], "loop"),
    "vq_006 long loop": ([(DATA, 24, NEXT, 1), (DATA, 24, NEXT | WRITE, 2), (DATA, 24, NEXT | WRITE, 1)], "loop"),
    "vq_006 next outside": ([(DATA, 24, NEXT, 8), (DATA, 24, WRITE, 0)], "outside a table"),
    "vq_006 next far outside": ([(DATA, 24, NEXT, 65535), (DATA, 24, WRITE, 0)], "outside a table"),
    "vq_006 indirect": ([(DATA, 32, INDIRECT, 0)], "indirect"),
    "vq_006 indirect second": ([(DATA, 24, NEXT, 1), (DATA, 32, INDIRECT | WRITE, 0)], "indirect"),
    "vq_006 unknown flag 8": ([(DATA, 24, NEXT | 8, 1), (DATA, 24, WRITE, 0)], "unknown"),
    "vq_006 unknown flag 0x8000": ([(DATA, 24, NEXT, 1), (DATA, 24, WRITE | 0x8000, 0)], "unknown"),
    "unmapped readable": ([(OUTSIDE - 23, 24, NEXT, 1), (DATA, 24, WRITE, 0)], "not all mapped"),
    "unmapped writable": ([(DATA, 24, NEXT, 1), (BASE - 1, 24, WRITE, 0)], "not all mapped"),
    "wrapping address": ([(2**64 - 8, 24, NEXT, 1), (DATA, 24, WRITE, 0)], "address space"),
    "length of 4 GiB": ([(DATA, 24, NEXT, 1), (DATA, 2**32 - 1, WRITE, 0)], "not all mapped"),
}


@pytest.mark.parametrize("case", BAD)
def test_r3_vq_004_005_006_bad_chain_goes_back_empty_and_the_good_one_behind_it_completes(case: str) -> None:
    descriptors, reason = BAD[case]
    ring = RawRing()
    for index, fields in enumerate(descriptors):
        ring.descriptor(index, *fields)
    ring.good(6)
    ring.offer(0, 6)
    before = ring.buffer[DATA - BASE :]
    queue = ring.device()
    bad, good = queue.pop(), queue.pop()
    assert bad is not None
    assert good is not None
    assert reason in (bad.broken or "")
    assert (bad.readable, bad.writable, bad.readable_bytes, bad.writable_bytes) == ((), (), 0, 0)
    assert good.broken is None
    assert queue.push(bad, 0)
    assert queue.push(good, 24)
    assert ring.used() == [(0, 0), (6, 24)]
    assert queue.pop() is None
    assert ring.buffer[DATA - BASE :] == before


@pytest.mark.parametrize("head", [8, 9, 4096, 65535])
def test_r3_head_outside_the_table_goes_back_as_it_came(head: int) -> None:
    ring = RawRing()
    ring.good(0)
    ring.offer(head, 0)
    queue = ring.device()
    bad, good = queue.pop(), queue.pop()
    assert bad is not None
    assert good is not None
    assert "outside" in (bad.broken or "")
    assert good.broken is None
    assert queue.push(bad, 0)
    assert ring.used() == [(head, 0)]


def long_chain(ring: RawRing, count: int) -> None:
    for index in range(count - 1):
        ring.descriptor(index, DATA + 16 * index, 16, NEXT, index + 1)
    ring.descriptor(count - 1, DATA, 16, WRITE)


@pytest.mark.parametrize(
    ("count", "limit", "sound"), [(256, 256, True), (257, 256, False), (5, 5, True), (6, 5, False)]
)
def test_r3_vq_006_descriptor_limit_is_exact(count: int, limit: int, sound: bool) -> None:
    ring = RawRing(512)
    long_chain(ring, count)
    chain = popped(ring, 0, limit)
    assert (chain.broken is None) is sound
    assert sound or "more than" in (chain.broken or "")


def test_totals_beyond_four_gibibytes_are_refused() -> None:
    # Many descriptors over the same 64 MiB, which nobody touches.
    piece, many = 1 << 26, 64
    ring = RawRing(256)
    ring.memory = GuestMemory([*ring.memory.regions, Region(1 << 40, mmap.mmap(-1, piece))])
    for index in range(1, many):
        ring.descriptor(index, 1 << 40, piece, NEXT | WRITE, index + 1)
    ring.descriptor(0, DATA, 64, NEXT, 1)
    ring.descriptor(many, 1 << 40, piece - 64, WRITE)
    chain = popped(ring, 0)
    assert chain.broken is None
    assert chain.readable_bytes + chain.writable_bytes == 2**32
    ring.descriptor(0, DATA, 65, NEXT, 1)
    assert "2**32" in (popped(ring, 0).broken or "")


ADDRESSES = st.one_of(
    st.integers(DATA, DATA + 64), st.integers(OUTSIDE - 12, OUTSIDE + 2), st.integers(BASE - 2, BASE + 1),
    st.integers(2**64 - 9, 2**64 - 1),
)  # fmt: skip
LENGTHS = st.one_of(st.integers(1, 8), st.sampled_from([0, 2**31, 2**32 - 1]))
FLAGS = st.one_of(
    st.sampled_from([0, NEXT, WRITE, NEXT | WRITE]),
    st.sampled_from([NEXT, NEXT | WRITE]),
    st.integers(0, 7),
    st.just(0x8003),
)
TABLES = st.lists(st.tuples(ADDRESSES, LENGTHS, FLAGS, st.integers(0, 8)), min_size=8, max_size=8)


def model(table: list[tuple[int, int, int, int]], head: int, limit: int) -> tuple[bytes, int] | None:
    """The chain's meaning, by the rules read one by one: (low bytes of readable addresses, writable total), or None."""
    order, index = [], head
    while True:
        if index >= len(table) or index in order:
            return None
        order.append(index)
        if not table[index][2] & NEXT:
            break
        index = table[index][3]
    chain = [table[index] for index in order]
    directions = [bool(flags & WRITE) for _, _, flags, _ in chain]
    mapped = all(address >= BASE and address + length <= OUTSIDE for address, length, _, _ in chain)
    if len(chain) > limit or sorted(directions) != directions or len(set(directions)) != 2 or not mapped:
        return None
    if any(length == 0 or flags not in (0, 1, 2, 3) for _, length, flags, _ in chain):
        return None
    readable = b"".join(
        bytes(at & 0xFF for at in range(address, address + length))
        for address, length, flags, _ in chain
        if not flags & WRITE
    )
    return readable, sum(length for _, length, flags, _ in chain if flags & WRITE)


@given(table=TABLES, head=st.integers(0, 8), limit=st.integers(2, 8))
def test_random_tables_agree_with_a_plain_reading_of_the_rules(
    table: list[tuple[int, int, int, int]], head: int, limit: int
) -> None:
    ring = SHARED_RING
    device = DeviceQueue(
        ring.memory, 8, BASE, BASE + ring.available_offset, BASE + ring.used_offset, limit, last_available=ring.index
    )
    for index, fields in enumerate(table):
        ring.descriptor(index, *fields)
    ring.offer(head)
    chain = device.pop()
    assert chain is not None
    expected = model(table, head, limit)
    if expected is None:
        assert chain.broken
        assert chain.readable == chain.writable == ()
    else:
        assert chain.broken is None
        content, writable = expected
        assert [len(b"".join(chain.readable)), sum(map(len, chain.writable))] == [len(content), writable]
        if not any(
            BASE <= address < DATA for address, _, _, _ in table
        ):  # bytes of the ring itself are not the pattern
            assert gather(chain.readable, 0, chain.readable_bytes) == content


SHARED_RING = RawRing(8)
SHARED_RING.buffer[BYTES >> 1 :] = bytes(range(256)) * (BYTES >> 9)


SPLITS = st.lists(st.binary(min_size=1, max_size=9), max_size=8)


@given(parts=SPLITS, offset=st.integers(-1, 80), length=st.integers(-1, 80))
def test_gather_and_window_read_the_concatenation(parts: list[bytes], offset: int, length: int) -> None:
    segments = [memoryview(bytearray(part)) for part in parts]
    whole = b"".join(parts)
    if length > 0 and offset >= 0 and offset + length <= len(whole):
        assert gather(segments, offset, length) == whole[offset : offset + length]
        assert b"".join(window(segments, offset, length)) == whole[offset : offset + length]
    elif length == 0 and offset >= 0:
        assert gather(segments, offset, 0) == b""
    else:
        with pytest.raises(Fault):
            gather(segments, offset, length)


@given(
    parts=SPLITS,
    offset=st.integers(-1, 80),
    data=st.binary(min_size=1, max_size=80),
    kind=st.sampled_from([bytes, bytearray, memoryview]),
)
def test_scatter_writes_the_concatenation_or_nothing(parts: list[bytes], offset: int, data: bytes, kind: type) -> None:
    segments = [memoryview(bytearray(part)) for part in parts]
    whole = bytearray().join(parts)
    if offset >= 0 and offset + len(data) <= len(whole):
        scatter(segments, offset, kind(data))
        whole[offset : offset + len(data)] = data
    else:
        with pytest.raises(Fault):
            scatter(segments, offset, kind(data))
    assert b"".join(segments) == whole


@pytest.mark.parametrize("reads", range(1, 7))
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([(DATA, 15, NEXT, 0)], [(DATA, 40, NEXT, 1), (DATA, 64, WRITE, 0)]),
        ([(DATA, 24, NEXT, 0)], [(DATA, 64, WRITE, 0)]),
        ([(DATA, 24, NEXT, 1), (DATA, 24, NEXT, 0)], [(DATA, 24, NEXT, 1), (DATA, 64, WRITE, 0)]),
    ],
)
def test_r7_a_loop_rewritten_once_it_was_followed_is_still_a_loop(
    monkeypatch: pytest.MonkeyPatch, before: list[tuple[int, ...]], after: list[tuple[int, ...]], reads: int
) -> None:
    """A loop that another processor opens after so many descriptors have been read must not become a chain with one
    descriptor in it twice, once as it was and once as it is."""
    ring = RawRing()
    queue = ring.device()
    for index, row in enumerate(before):
        ring.descriptor(index, *row)
    read = itertools.count(1)

    def decode(table: memoryview, offset: int) -> tuple[int, ...]:
        row: tuple[int, ...] = DESCRIPTOR.unpack_from(table, offset)
        if next(read) == reads:
            for index, other in enumerate(after):
                ring.descriptor(index, *other)
        return row

    monkeypatch.setattr(walking, "_decode", decode)
    ring.offer(0)
    chain = queue.pop()
    assert chain is not None
    if chain.broken is None:  # then it is the one that there is now
        assert [len(view) for view in (*chain.readable, *chain.writable)] == [row[1] for row in after]
