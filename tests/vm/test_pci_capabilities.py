"""Capability parsing against a mock configuration space: bytes laid out by hand from virtio 1.3, section 4.1.4.

No function is behind them. The real one is met by test_vm_session.py, in a guest; hostile ones can only be had as
bytes.
"""

from __future__ import annotations

import struct

import pytest

from virtaccel.guest_tools.pci.capabilities import Bar, CapabilityError, Window, notify_offset, parse

BARS = [Bar(0, False), Bar(0x1000, True), Bar(0x20, False), Bar(0, False), Bar(0x4000, True), Bar(0, False)]
COMMON = (0x40, 1, 4, 0x0000, 0x38)
ISR = (0x50, 3, 4, 0x1000, 0x1000)
DEVICE = (0x60, 4, 4, 0x2000, 0x1000)
NOTIFY = (0x70, 2, 4, 0x3000, 0x1000)
GOOD = [COMMON, ISR, DEVICE, NOTIFY]


def mock_space(
    capabilities: list[tuple[int, int, int, int, int]], multiplier: int = 4, length: int | None = None
) -> bytearray:
    """(position, type, bar, offset, size) each, linked in the given order."""
    space = bytearray(256)
    space[0x06] = 0x10
    space[0x34] = capabilities[0][0] if capabilities else 0
    for index, (position, kind, bar, offset, size) in enumerate(capabilities):
        following = capabilities[index + 1][0] if index + 1 < len(capabilities) else 0
        default = 20 if kind == 2 else 16
        struct.pack_into(
            "<BBBBBBHII", space, position, 0x09, following, length or default, kind, bar, 0, 0, offset, size
        )
        if kind == 2:
            struct.pack_into("<I", space, position + 16, multiplier)
    return space


def test_windows_of_a_modern_function() -> None:
    windows = parse(bytes(mock_space(GOOD)), BARS)
    assert windows.common == Window(4, 0, 0x38)
    assert windows.isr == Window(4, 0x1000, 0x1000)
    assert windows.device == Window(4, 0x2000, 0x1000)
    assert windows.notify == Window(4, 0x3000, 0x1000)
    assert windows.notify_multiplier == 4
    assert notify_offset(windows, 3) == 0x300C


def test_other_capabilities_and_types_are_passed_over() -> None:
    space = mock_space([*GOOD, (0x90, 5, 0, 0, 0)])
    space[0xA4:0xA6] = bytes([0x11, 0x40])  # MSI-X before everything else
    space[0x34] = 0xA4
    assert parse(bytes(space), BARS).common.length == 0x38


def test_the_first_usable_capability_of_a_type_is_taken() -> None:
    in_ports = (0x90, 1, 2, 0, 0x38)
    second = (0xA4, 1, 4, 0x800, 0x100)
    assert parse(bytes(mock_space([in_ports, *GOOD, second])), BARS).common == Window(4, 0, 0x38)


@pytest.mark.parametrize(
    ("capabilities", "reason"),
    [
        ([ISR, DEVICE, NOTIFY], "common configuration"),
        ([COMMON, ISR, NOTIFY], "device configuration"),
        ([(0x40, 1, 6, 0, 0x38), *GOOD[1:]], "names BAR 6"),
        ([(0x40, 1, 0, 0, 0x38), *GOOD[1:]], "not memory"),
        ([(0x40, 1, 4, 0x3FF0, 0x38), *GOOD[1:]], "ends at"),
        ([(0x40, 1, 4, 0xFFFFFFF0, 0x38), *GOOD[1:]], "ends at"),
        ([(0x40, 1, 4, 0, 0xFFFFFFFF), *GOOD[1:]], "ends at"),
        ([(0x40, 1, 4, 0, 0x37), *GOOD[1:]], "55 bytes"),
        ([(0x40, 1, 4, 2, 0x38), *GOOD[1:]], "not aligned"),
        ([COMMON, ISR, (0x60, 4, 4, 0x2000, 15), NOTIFY], "15 bytes"),
    ],
)
def test_windows_that_cannot_be_used_are_refused(
    capabilities: list[tuple[int, int, int, int, int]], reason: str
) -> None:
    with pytest.raises(CapabilityError, match=reason):
        parse(bytes(mock_space(capabilities)), BARS)


def test_a_list_that_loops_ends() -> None:
    space = mock_space(GOOD)
    space[0x71] = 0x40
    with pytest.raises(CapabilityError, match="loops"):
        parse(bytes(space), BARS)


@pytest.mark.parametrize("pointer", [0x04, 0x3C])
def test_a_list_that_leads_into_the_header_is_refused(pointer: int) -> None:
    space = mock_space(GOOD)
    space[0x34] = pointer
    with pytest.raises(CapabilityError, match="header"):
        parse(bytes(space), BARS)


def test_a_capability_at_the_end_of_the_space_is_not_read_past_it() -> None:
    space = mock_space(GOOD)
    space[0x71] = 0xFC
    space[0xFC:0x100] = bytes([0x09, 0, 16, 1])
    with pytest.raises(CapabilityError, match="runs out"):
        parse(bytes(space), BARS)


def test_a_short_notify_capability_has_no_multiplier() -> None:
    with pytest.raises(CapabilityError, match="20 are needed"):
        parse(bytes(mock_space(GOOD, length=16)), BARS)


@pytest.mark.parametrize("multiplier", [1, 3, 6, 0xFFFFFFFF])
def test_odd_multipliers_are_refused(multiplier: int) -> None:
    with pytest.raises(CapabilityError, match="multiplier"):
        parse(bytes(mock_space(GOOD, multiplier)), BARS)


def test_a_notification_outside_its_window_is_refused() -> None:
    windows = parse(bytes(mock_space(GOOD)), BARS)
    with pytest.raises(CapabilityError, match="outside"):
        notify_offset(windows, 0xFFFF)


@pytest.mark.parametrize("length", [0, 64, 255])
def test_a_space_that_only_root_can_read_whole(length: int) -> None:
    with pytest.raises(CapabilityError, match="root"):
        parse(bytes(mock_space(GOOD))[:length], BARS)


def test_no_capability_list() -> None:
    space = mock_space(GOOD)
    space[0x06] = 0
    with pytest.raises(CapabilityError, match="no capability list"):
        parse(bytes(space), BARS)


def test_any_single_byte_changed_gives_windows_inside_their_bars_or_an_error() -> None:
    good = mock_space(GOOD)
    for position in range(0x34, 0x90):
        for value in range(256):
            space = bytearray(good)
            space[position] = value
            try:
                windows = parse(bytes(space), BARS)
            except CapabilityError:
                continue
            for window in windows[:4]:
                assert window.offset + window.length <= BARS[window.bar].size
