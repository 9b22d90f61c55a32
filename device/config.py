"""Limits of one device: the 16 configuration bytes, what a guest may be promised, and the host's two budgets.

Knows wire-abi.md, sections 1, 2 and 5.1, and specification.md 4.12. Three owners, no boundary held twice: `WireConfig`
bounds frames and chains, the backend's `Limits` bound single objects and their counts, `ResourcePolicy` bounds what all
objects together may keep on the host and is never shown to a guest. Everything is checked when it is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from virtaccel.device import wire
from virtaccel.device.backend import DeviceInfo, Limits
from virtaccel.device.errors import ConfigError
from virtaccel.device.wire import Capability

U16_MAX = (1 << 16) - 1
U32_MAX = (1 << 32) - 1
U64_MAX = (1 << 64) - 1

LOAD_PROGRAM_OVERHEAD = wire.REQUEST_HEADER.size + wire.LOAD_PROGRAM_REQUEST.size
"""Bytes of a LOAD_PROGRAM frame before its artifact: 96."""

DOMAIN_CAPABILITIES = Capability.HOST_VISIBLE_MEMORY | Capability.DEVICE_LOCAL_MEMORY | Capability.SHARED_MEMORY
ASSIGNED_CAPABILITIES = DOMAIN_CAPABILITIES | Capability.EVENT_CANCELLATION


def _within(name: str, value: int, lowest: int, highest: int) -> None:
    if type(value) is not int or not lowest <= value <= highest:
        raise ConfigError(f"{name} is {value!r}, must be {lowest} to {highest}")


@dataclass(frozen=True, slots=True)
class WireConfig:
    """The device-specific configuration (wire-abi.md, section 2) that this device exposes.

    Frame limits are in bytes and include the 16-byte header. Raises ConfigError.
    """

    max_chain_descriptors: int = 128
    max_request_bytes: int = wire.HARD_MAX_REQUEST_BYTES
    max_response_bytes: int = wire.HARD_MAX_RESPONSE_BYTES

    def __post_init__(self) -> None:
        _within("max_chain_descriptors", self.max_chain_descriptors, 2, wire.HARD_MAX_CHAIN_DESCRIPTORS)
        _within(
            "max_request_bytes", self.max_request_bytes, wire.MIN_MAX_REQUEST_BYTES, wire.HARD_MAX_REQUEST_BYTES
        )
        _within(
            "max_response_bytes", self.max_response_bytes, wire.MIN_MAX_RESPONSE_BYTES, wire.HARD_MAX_RESPONSE_BYTES
        )

    def pack(self) -> bytes:
        """The 16 bytes of configuration space."""
        return wire.CONFIG.pack(
            wire.PROTOCOL_MAJOR,
            wire.PROTOCOL_MINOR,
            1,  # one command queue, index 0
            self.max_chain_descriptors,
            self.max_request_bytes,
            self.max_response_bytes,
        )


@dataclass(frozen=True, slots=True)
class ResourcePolicy:
    """What one guest may keep on this host in total, in bytes (specification.md 4.12). Raises ConfigError.

    `max_program_resident_bytes` bounds promises, not measurements: each program is charged the `resident_bytes` that
    its LOAD_PROGRAM authorised. A runtime that publishes no bound makes its guests promise 2^64-1 for each program, so
    the default is 64 such promises, and the sum is no 64-bit number.
    """

    max_buffer_backing_bytes: int = 4 << 30
    max_program_resident_bytes: int = 64 * U64_MAX

    def __post_init__(self) -> None:
        for item in fields(self):
            _within(item.name, getattr(self, item.name), 1, U32_MAX * U64_MAX)


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Everything a host decides about one device before it exists. `limits` lowers the backend's own, never raises
    them; None takes them as they are. Raises ConfigError."""

    wire: WireConfig = field(default_factory=WireConfig)
    limits: Limits | None = None

    def __post_init__(self) -> None:
        if self.limits is not None:
            check_limits(self.limits)

    def advertised(self, info: DeviceInfo) -> DeviceInfo:
        """What the guest is told: the backend's `info` under this configuration's limits.

        An artifact must fit a LOAD_PROGRAM frame and a submission 4096 bindings, so those two are lowered to that;
        anything else that the protocol cannot express raises ConfigError.
        """
        check_info(info)
        limits = info.limits
        ceilings = {
            "max_artifact_bytes": self.wire.max_request_bytes - LOAD_PROGRAM_OVERHEAD,
            "max_bindings_per_submission": wire.HARD_MAX_BINDINGS,
        }
        lowered = {
            item.name: min(
                getattr(limits, item.name),
                ceilings.get(item.name, U64_MAX),
                U64_MAX if self.limits is None else getattr(self.limits, item.name),
            )
            for item in fields(Limits)
        }
        # Plain numbers from here on: arithmetic with flags costs several times as much.
        return replace(info, capabilities=int(info.capabilities), limits=Limits(**lowered))


def check_limits(limits: Limits) -> None:
    """Every limit is nonzero and fits its field (wire-abi.md 5.1). Raises ConfigError."""
    for item in fields(Limits):
        highest = U64_MAX if item.name in ("max_buffer_bytes", "max_artifact_bytes") else U32_MAX
        _within(item.name, getattr(limits, item.name), 1, highest)


def check_info(info: DeviceInfo) -> None:
    """The backend's report is one that protocol 1.0 can carry (specification.md 5.3). Raises ConfigError."""
    if len(info.uuid) != 16:
        raise ConfigError(f"uuid has {len(info.uuid)} bytes, must be 16")
    _within("accelerator_class", int(info.accelerator_class), 0, U16_MAX)
    _within("vendor_id", info.vendor_id, 0, U32_MAX)
    _within("device_id", info.device_id, 0, U32_MAX)
    unassigned = int(info.capabilities) & ~int(ASSIGNED_CAPABILITIES)
    if unassigned:
        raise ConfigError(f"capabilities {info.capabilities:#x} contain {unassigned:#x}, not assigned in protocol 1.0")
    if not info.capabilities & DOMAIN_CAPABILITIES:
        raise ConfigError(f"capabilities {info.capabilities:#x} name no memory domain")
    check_limits(info.limits)


def pack_device_info(info: DeviceInfo) -> bytes:
    """The 76 bytes of a GET_DEVICE_INFO response payload (wire-abi.md 5.1)."""
    limits = info.limits
    return wire.DEVICE_INFO.pack(
        info.uuid,
        info.accelerator_class,
        0,
        info.vendor_id,
        info.device_id,
        info.capabilities,
        limits.max_contexts,
        limits.max_buffers_per_context,
        limits.max_programs_per_context,
        limits.max_queues_per_context,
        limits.max_events_per_context,
        limits.max_bindings_per_submission,
        limits.max_buffer_bytes,
        limits.max_artifact_bytes,
    )
