"""The codec against bytes written by hand from the standard's tables (Vhost-user Protocol, "Message Specification")."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtaccel.device.vhost_user import message as m
from virtaccel.device.vhost_user.message import Message, MessageError, PayloadError, Request


def le(*values: tuple[int, int]) -> bytes:
    return b"".join(value.to_bytes(size, "little") for value, size in values)


def test_header_fields() -> None:
    assert m.decode_header(le((11, 4), (0x9, 4), (8, 4))) == (11, 9, 8)
    assert m.encode(11, le((0, 4), (7, 4))) == le((11, 4), (1, 4), (8, 4), (0, 4), (7, 4))
    assert m.encode_reply(1, le((1 << 32, 8))) == le((1, 4), (5, 4), (8, 4), (1 << 32, 8))
    assert m.encode_ack(5, failed=True) == le((5, 4), (5, 4), (8, 4), (1, 8))
    assert m.encode_ack(5, failed=False) == le((5, 4), (5, 4), (8, 4), (0, 8))


@pytest.mark.parametrize("flags", [0, 2, 3, 0xFFFFFFFE])
def test_another_version_is_no_message(flags: int) -> None:
    with pytest.raises(MessageError):
        m.decode_header(le((1, 4), (flags, 4), (0, 4)))


@pytest.mark.parametrize("size", [4097, 0xFFFFFFFF])
def test_a_payload_beyond_the_protocol_is_no_message(size: int) -> None:
    with pytest.raises(MessageError):
        m.decode_header(le((5, 4), (1, 4), (size, 4)))


@given(st.binary(min_size=12, max_size=12))
def test_any_header_is_read_or_refused(data: bytes) -> None:
    try:
        header = m.decode_header(data)
    except MessageError:
        return
    assert header.size <= 4096
    assert header.flags & 3 == 1


def test_memory_table() -> None:
    regions = le((2, 4), (0, 4)) + le((0, 8), (4096, 8), (1 << 40, 8), (0, 8)) + le(*((n, 8) for n in (1, 2, 3, 4)))
    assert m.decode_table(regions, 2) == ((0, 4096, 1 << 40, 0), (1, 2, 3, 4))
    assert m.encode_table(m.decode_table(regions, 2)) == regions
    # Old front ends send all eight regions whatever the count says.
    assert m.decode_table(regions + bytes(6 * 32), 2) == m.decode_table(regions, 2)


@pytest.mark.parametrize(("count", "size", "fds"), [(2, 32, 2), (65, 64 * 32, 65), (0xFFFFFFFF, 32, 1), (1, 0, 1)])
def test_memory_table_that_lies_about_its_length(count: int, size: int, fds: int) -> None:
    with pytest.raises(PayloadError):
        m.decode_table(le((count, 4), (0, 4)) + bytes(size), fds)


def test_memory_table_without_descriptors_says_what_is_missing() -> None:
    with pytest.raises(PayloadError, match="share=on"):
        m.decode_table(le((1, 4), (0, 4)) + bytes(32), 0)


def test_single_region() -> None:
    payload = le((0xDEAD, 8), *((n, 8) for n in (1, 2, 3, 4)))
    assert m.decode_single_region(payload) == (1, 2, 3, 4)


def test_vring_address_order() -> None:
    payload = le((0, 4), (1, 4), (0x10, 8), (0x20, 8), (0x30, 8), (0x40, 8))
    expected = m.VringAddress(0, 1, descriptors=0x10, used=0x20, available=0x30, log=0x40)
    assert m.decode_vring_address(payload) == expected


@pytest.mark.parametrize(
    ("word", "fds", "good"),
    [
        (0, 1, True),
        (0x100, 0, True),
        (5, 1, True),
        (0, 0, False),
        (0x100, 1, False),
        (0x200, 1, False),
        (1 << 63, 1, False),
    ],
)
def test_vring_descriptor_word(word: int, fds: int, good: bool) -> None:
    if good:
        assert m.decode_vring_fd(le((word, 8)), fds) == (word & 0xFF, fds == 1)
    else:
        with pytest.raises(PayloadError):
            m.decode_vring_fd(le((word, 8)), fds)


def test_config_access() -> None:
    assert m.decode_config(le((6, 4), (2, 4), (1, 4)) + b"xy") == (6, 2, 1, b"xy")
    assert m.encode_config(6, b"xy", 1) == le((6, 4), (2, 4), (1, 4)) + b"xy"


# Payload bytes of each request as the standard has them, (fewest, most).
SIZES = {
    1: (0, 0), 2: (8, 8), 3: (0, 0), 4: (0, 0), 5: (8, 8 + 64 * 32), 8: (8, 8), 9: (40, 40), 10: (8, 8), 11: (8, 8),
    12: (8, 8), 13: (8, 8), 14: (8, 8), 15: (0, 0), 16: (8, 8), 17: (0, 0), 18: (8, 8), 21: (0, 0), 24: (12, 268),
    25: (12, 268), 34: (0, 0), 36: (0, 0), 37: (40, 40), 38: (40, 40), 39: (8, 8), 40: (0, 0),
}  # fmt: skip
FDS = {5: (0, 64), 12: (0, 1), 13: (0, 1), 14: (0, 1), 21: (1, 1), 37: (1, 1), 38: (0, 1)}


def test_every_served_request_has_a_rule() -> None:
    assert set(m.RULES) == set(SIZES)


@pytest.mark.parametrize("request_number", sorted(SIZES))
def test_payload_and_descriptor_bounds(request_number: int) -> None:
    (least, most), (least_fds, most_fds) = SIZES[request_number], FDS.get(request_number, (0, 0))
    for size, fds in ((least, least_fds), (most, most_fds)):
        m.check(Message(request_number, 1, bytes(size)), fds)
    wrong = [(most + 1, least_fds), (least, most_fds + 1)]
    wrong += [(least - 1, least_fds)] if least else []
    wrong += [(least, least_fds - 1)] if least_fds else []
    for size, fds in wrong:
        with pytest.raises(PayloadError):
            m.check(Message(request_number, 1, bytes(size)), fds)


def test_names_are_the_numbers_of_the_standard() -> None:
    assert (Request.SET_MEM_TABLE, Request.GET_VRING_BASE, Request.GET_CONFIG) == (5, 11, 24)
    assert (Request.RESET_DEVICE, Request.ADD_MEM_REG, Request.SET_STATUS) == (34, 37, 39)
