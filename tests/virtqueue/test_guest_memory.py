"""Translation of hostile addresses: every byte asked for is the byte meant, or there is a Fault."""

import mmap
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtaccel.virtqueue.errors import RegionError
from virtaccel.virtqueue.memory import Buffer, GuestMemory, Region
from virtaccel.virtqueue.segments import Fault


def joined(views: list[memoryview]) -> bytes:
    return b"".join(views)


@pytest.mark.parametrize("kind", ["bytearray", "memoryview", "mmap", "memfd"])
def test_any_writable_backing_serves_and_is_written_in_place(kind: str) -> None:
    file = os.memfd_create("region") if kind == "memfd" else -1
    if file >= 0:
        os.ftruncate(file, 4096)
    backings: dict[str, Buffer] = {"bytearray": bytearray(4096), "memoryview": memoryview(bytearray(4096))}
    backing = backings.get(kind) or mmap.mmap(file, 4096)
    memory = GuestMemory([Region(0x1000, backing)])
    memory.translate(0x1010, 4)[0][:] = b"abcd"
    assert bytes(backing[16:20]) == b"abcd"
    if file >= 0:
        assert os.pread(file, 4, 16) == b"abcd"
        os.close(file)


def test_buffer_spans_adjacent_regions_but_no_gap() -> None:
    memory = GuestMemory(
        [Region(0x2000, bytearray(b"B" * 16)), Region(0x1FF0, bytearray(b"A" * 16)), Region(0x2011, bytearray(9))]
    )
    assert [bytes(view) for view in memory.translate(0x1FFE, 5)] == [b"AA", b"BBB"]
    assert joined(memory.translate(0x1FF0, 32)) == b"A" * 16 + b"B" * 16
    for address, length in ((0x1FF0, 33), (0x200F, 2), (0x2010, 1), (0x1FEF, 2), (0x201A, 1)):
        with pytest.raises(Fault):
            memory.translate(address, length)
    assert joined(memory.translate(0x2011, 9)) == bytes(9)


@pytest.mark.parametrize(
    ("address", "length"),
    [
        (2**64 - 8, 9), (2**64 - 8, 2**32 - 1), (2**64 - 1, 2), (2**64, 1), (2**64 + 0x1000, 4), (-1, 4),
        (-0x1000, 0x2004),
        (0x1000, 0), (0x1000, -1), (0x1000, 2**64), (0x1000, 4097), (0xFFF, 1), (0xFFF, 2), (0x2000, 1), (0, 0x1001),
    ],
)  # fmt: skip
@pytest.mark.parametrize("warm", [False, True])
def test_range_outside_or_wrapping_is_a_fault(address: int, length: int, warm: bool) -> None:
    memory = GuestMemory([Region(0x1000, bytearray(4096)), Region(2**64 - 8, bytearray(8))])
    if warm:  # the region hit last must not widen what is allowed
        memory.translate(0x1000, 4096)
    with pytest.raises(Fault):
        memory.translate(address, length)
    assert len(memory.translate(2**64 - 8, 8)[0]) == 8


def test_overlap_is_rejected_and_touching_is_not() -> None:
    GuestMemory([Region(0, bytearray(16)), Region(16, bytearray(16))])
    for start in (0, 1, 15, -0):
        with pytest.raises(RegionError, match="guest"):
            GuestMemory([Region(0, bytearray(16)), Region(start, bytearray(16))])
    with pytest.raises(RegionError, match="user"):
        GuestMemory([Region(0, bytearray(16), 0x7000), Region(64, bytearray(16), 0x700F)])


@pytest.mark.parametrize(
    ("address", "buffer", "user"),
    [
        (0, b"read only", None), (0, bytearray(), None), (-1, bytearray(1), None), (2**64, bytearray(1), None),
        (2**64 - 1, bytearray(2), None), (0, bytearray(2), 2**64 - 1), (0, memoryview(bytearray(8))[::2], None),
    ],
)  # fmt: skip
def test_impossible_region_is_rejected(address: int, buffer: bytearray, user: int | None) -> None:
    with pytest.raises(RegionError):
        Region(address, buffer, user)


def test_user_addresses_reach_ring_parts_of_one_region() -> None:
    first, second = bytearray(64), bytearray(64)
    memory = GuestMemory([Region(0x100, first, 0x7F00), Region(0x140, second, 0x7F40), Region(0x9000, bytearray(16))])
    memory.translate_user(0x7F42, 2)[:] = b"xy"
    assert second[2:4] == b"xy"
    assert memory.guest_address(0x7F42, 2) == 0x142
    for address, length in (
        (0x7F3F, 2),
        (0x7EFF, 1),
        (0x7F80, 1),
        (0x7F00, 0),
        (0x7F00, -1),
        (0x9000, 1),
        (2**64 - 1, 4),
    ):
        with pytest.raises(Fault):
            memory.translate_user(address, length)
        with pytest.raises(Fault):
            memory.guest_address(address, length)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), min_size=1, max_size=6),
    asks=st.lists(st.tuples(st.integers(0, 90), st.integers(-1, 90)), min_size=1, max_size=20),
)
def test_translation_agrees_with_a_map_of_single_bytes(
    sizes: list[tuple[int, int]], asks: list[tuple[int, int]]
) -> None:
    regions, byte_at, address = [], {}, 0
    for number, (gap, size) in enumerate(sizes):
        address += gap
        content = bytes((number * 20 + position) % 251 for position in range(size))
        regions.append(Region(address, bytearray(content)))
        byte_at.update({address + position: value for position, value in enumerate(content)})
        address += size
    memory = GuestMemory(reversed(regions))
    for start, length in asks:
        wanted = [byte_at.get(start + position) for position in range(length)]
        if length < 1 or None in wanted:
            with pytest.raises(Fault):
                memory.translate(start, length)
        else:
            assert list(joined(memory.translate(start, length))) == wanted
