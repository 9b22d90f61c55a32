"""Finding a function. The folders here are a mock of /sys/bus/pci/devices; a real one is driven in
test_vm_session.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from virtaccel.guest_tools.pci import function
from virtaccel.guest_tools.pci.function import PciError, choose, find


@pytest.fixture
def mock_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for address, vendor, device in (
        ("0000:00:01.0", "0x1af4", "0x1043"),
        ("0000:00:02.0", "0x1af4", "0x1055"),
        ("0000:00:03.0", "0x8086", "0x1055"),
    ):
        folder = tmp_path / address
        folder.mkdir()
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "device").write_text(device + "\n")
    monkeypatch.setattr(function, "DEVICES", tmp_path)
    monkeypatch.setattr(find, "__defaults__", (21, tmp_path))
    return tmp_path


def test_the_only_function_is_found(mock_devices: Path) -> None:
    assert choose(None) == "0000:00:02.0"
    assert choose("00:02.0") == "0000:00:02.0"


def test_another_virtio_id(mock_devices: Path) -> None:
    assert choose(None, 3) == "0000:00:01.0"


def test_a_function_that_is_another_device_is_not_taken(mock_devices: Path) -> None:
    with pytest.raises(PciError, match=r"no virtio function.*0000:00:02\.0"):
        choose("0000:00:03.0")


def test_two_functions_have_to_be_told_apart(mock_devices: Path) -> None:
    second = mock_devices / "0000:00:04.0"
    second.mkdir()
    (second / "vendor").write_text("0x1af4")
    (second / "device").write_text("0x1055")
    with pytest.raises(PciError, match="several functions"):
        choose(None)
    assert choose("0000:00:04.0") == "0000:00:04.0"


def test_none_is_a_clear_message(mock_devices: Path) -> None:
    with pytest.raises(PciError, match="no PCI function 1af4:1068"):
        choose(None, 40)
