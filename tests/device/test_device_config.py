"""Bounds of every configuration value (wire-abi.md 1, 2 and 5.1; specification.md 4.12 and 5.3)."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from virtaccel.device.backend import Limits
from virtaccel.device.config import U64_MAX, DeviceConfig, ResourcePolicy, WireConfig, check_info, pack_device_info
from virtaccel.device.errors import ConfigError
from virtaccel.device.reference import INFO
from virtaccel.device.wire import Capability


@pytest.mark.parametrize(
    ("name", "lowest", "highest"),
    [
        ("max_chain_descriptors", 2, 256),
        ("max_request_bytes", 97, 16 << 20),
        ("max_response_bytes", 92, 16 << 20),
    ],
)
def test_wire_configuration(name: str, lowest: int, highest: int) -> None:
    for good in (lowest, highest):
        assert len(WireConfig(**{name: good}).pack()) == 16
    for bad in (lowest - 1, highest + 1, -1, 0, True, 128.0, "128", None):
        with pytest.raises(ConfigError, match=name):
            WireConfig(**{name: bad})  # type: ignore[arg-type]


def test_configuration_bytes() -> None:
    packed = WireConfig(3, 4096, 8192).pack()
    assert packed == bytes.fromhex("0100 0000 0100 0300 00100000 00200000".replace(" ", ""))


@pytest.mark.parametrize("name", ["max_buffer_backing_bytes", "max_program_resident_bytes"])
def test_policy(name: str) -> None:
    assert getattr(ResourcePolicy(**{name: 1}), name) == 1
    assert getattr(ResourcePolicy(**{name: 64 * U64_MAX}), name) == 64 * U64_MAX, "sums of 64-bit promises are wider"
    for bad in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match=name):
            ResourcePolicy(**{name: bad})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [item.name for item in fields(Limits)])
def test_every_limit_is_nonzero_and_fits_its_field(name: str) -> None:
    highest = U64_MAX if name in ("max_buffer_bytes", "max_artifact_bytes") else (1 << 32) - 1
    for bad in (0, -1, highest + 1):
        limits = replace(INFO.limits, **{name: bad})
        with pytest.raises(ConfigError, match=name):
            DeviceConfig(limits=limits)
        with pytest.raises(ConfigError, match=name):
            DeviceConfig().advertised(replace(INFO, limits=limits))
    DeviceConfig(limits=replace(INFO.limits, **{name: highest}))


@pytest.mark.parametrize(
    "change",
    [
        {"uuid": bytes(15)},
        {"accelerator_class": 1 << 16},
        {"vendor_id": 1 << 32},
        {"device_id": -1},
        {"capabilities": 0},
        {"capabilities": int(Capability.EVENT_CANCELLATION)},
        {"capabilities": 1 | 1 << 3},
        {"capabilities": 1 | 1 << 4},
        {"capabilities": 1 | 1 << 6},
        {"capabilities": 1 | 1 << 63},
    ],
    ids=str,
)
def test_information_that_the_protocol_cannot_carry(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        check_info(replace(INFO, **change))


@pytest.mark.parametrize("request_bytes", [97, 4096, 16 << 20])
def test_no_artifact_is_promised_that_a_frame_cannot_carry(request_bytes: int) -> None:
    config = DeviceConfig(WireConfig(max_request_bytes=request_bytes))
    info = config.advertised(replace(INFO, limits=replace(INFO.limits, max_artifact_bytes=U64_MAX)))
    assert info.limits.max_artifact_bytes == request_bytes - 96
    small = config.advertised(replace(INFO, limits=replace(INFO.limits, max_artifact_bytes=1)))
    assert small.limits.max_artifact_bytes == 1


def test_no_more_than_4096_bindings_are_promised() -> None:
    info = replace(INFO, limits=replace(INFO.limits, max_bindings_per_submission=1 << 20))
    assert DeviceConfig().advertised(info).limits.max_bindings_per_submission == 4096


def test_host_limits_lower_the_backend_s_and_never_raise_them() -> None:
    host = replace(INFO.limits, max_contexts=1, max_buffer_bytes=U64_MAX)
    limits = DeviceConfig(limits=host).advertised(INFO).limits
    assert limits.max_contexts == 1
    assert limits.max_buffer_bytes == INFO.limits.max_buffer_bytes


def test_device_info_bytes() -> None:
    """Offsets from wire-abi.md 5.1, not from our structure."""
    packed = pack_device_info(replace(INFO, accelerator_class=3, vendor_id=5, device_id=6))
    assert len(packed) == 76
    numbers = [int.from_bytes(packed[a:b], "little") for a, b in ((16, 18), (18, 20), (20, 24), (24, 28), (28, 36))]
    assert numbers == [3, 0, 5, 6, int(INFO.capabilities)]
    assert int.from_bytes(packed[60:68], "little") == INFO.limits.max_buffer_bytes
