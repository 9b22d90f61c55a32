"""Every constant, size and field offset of layout.json, and the sizes of the standard's text where that is absent."""

from __future__ import annotations

import json
from enum import IntEnum, IntFlag
from pathlib import Path
from struct import Struct
from typing import Any

import pytest

from virtaccel.device import wire

# Field order of each structure, and how many of the format's characters each field takes.
STRUCTURES: dict[str, tuple[Struct, list[str]]] = {
    "WireConfig": (
        wire.CONFIG,
        [
            "protocol_major", "protocol_minor", "command_queue_count", "max_chain_descriptors", "max_request_bytes",
            "max_response_bytes",
        ],
    ),
    "RequestHeader": (wire.REQUEST_HEADER, ["opcode", "flags", "payload_bytes", "request_id"]),
    "ResponseHeader": (wire.RESPONSE_HEADER, ["status", "flags", "payload_bytes", "request_id"]),
    "WireDeviceInfo": (
        wire.DEVICE_INFO,
        [
            "uuid", "class", "reserved", "vendor_id", "device_id", "capabilities", "max_contexts",
            "max_buffers_per_context", "max_programs_per_context", "max_queues_per_context", "max_events_per_context",
            "max_bindings_per_submission", "max_buffer_bytes", "max_artifact_bytes",
        ],
    ),
    "CreateContextRequest": (wire.CREATE_CONTEXT_REQUEST, ["flags", "reserved"]),
    "ObjectPayload": (wire.OBJECT, ["object_id"]),
    "AllocateBufferRequest": (
        wire.ALLOCATE_BUFFER_REQUEST,
        ["context_id", "bytes", "alignment", "memory_domain", "reserved0", "usage", "reserved1"],
    ),
    "TransferBufferRequest": (wire.TRANSFER_BUFFER_REQUEST, ["buffer_id", "offset", "bytes"]),
    "LoadProgramRequest": (
        wire.LOAD_PROGRAM_REQUEST,
        ["context_id", "format", "flags", "target", *[""] * 11, "payload_bytes", "resident_bytes"],
    ),
    "CreateQueueRequest": (wire.CREATE_QUEUE_REQUEST, ["context_id", "flags", "reserved"]),
    "SubmitRequest": (wire.SUBMIT_REQUEST, ["queue_id", "program_id", "binding_count", "flags", "timeout_ns"]),
    "WireBinding": (wire.BINDING, ["buffer_id", "offset", "bytes", "slot", "access", "reserved"]),
    "SubmitResponse": (wire.OBJECT, ["event_id"]),
    "WireEventState": (wire.EVENT_STATE, ["state", "error", "reserved"]),
}
SIZES = {
    "WireConfig": 16, "RequestHeader": 16, "ResponseHeader": 16, "WireDeviceInfo": 76, "CreateContextRequest": 8,
    "ObjectPayload": 8, "AllocateBufferRequest": 40, "TransferBufferRequest": 24, "LoadProgramRequest": 80,
    "CreateQueueRequest": 16, "SubmitRequest": 32, "WireBinding": 32, "SubmitResponse": 8, "WireEventState": 8,
}  # fmt: skip


def offsets(structure: Struct, names: list[str]) -> dict[str, int]:
    """Where each field begins, found by setting it alone and looking which bytes changed."""
    zero = structure.unpack(bytes(structure.size))
    assert len(zero) == len(names)
    found = {}
    for index, name in enumerate(names):
        values: list[Any] = list(zero)
        values[index] = b"\xff" * len(zero[index]) if isinstance(zero[index], bytes) else 1  # lowest byte comes first
        found[name] = next(at for at, byte in enumerate(structure.pack(*values)) if byte)
    found.pop("", None)
    return found


@pytest.mark.parametrize("name", SIZES)
def test_structure_has_the_size_of_the_standard(name: str) -> None:
    assert STRUCTURES[name][0].size == SIZES[name]
    assert STRUCTURES[name][0].format.startswith("<"), "little-endian without padding"


def test_every_structure_of_the_layout(shared: Path) -> None:
    layout = json.loads((shared / "conformance/v1.0/layout.json").read_text())["structures"]
    assert set(layout) == set(STRUCTURES)
    for name, expected in layout.items():
        structure, fields = STRUCTURES[name]
        assert structure.size == expected["size"], name
        assert offsets(structure, fields) == expected["fields"], name


def named(enumeration: type[IntEnum] | type[IntFlag]) -> dict[str, int]:
    return {member.name: int(member) for member in enumeration if member.name}


def test_every_constant_of_the_layout(shared: Path) -> None:
    layout = json.loads((shared / "conformance/v1.0/layout.json").read_text())

    def numbers(table: dict[str, Any]) -> dict[str, int]:
        return {name: int(value, 0) if isinstance(value, str) else value for name, value in table.items()}

    assert (layout["protocol"]["major"], layout["protocol"]["minor"]) == (wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR)
    assert layout["queue"] == {
        "command_index": wire.COMMAND_QUEUE,
        "baseline_count": 1,
        "hard_max_chain_descriptors": wire.HARD_MAX_CHAIN_DESCRIPTORS,
        "min_max_request_bytes": wire.MIN_MAX_REQUEST_BYTES,
        "min_max_response_bytes": wire.MIN_MAX_RESPONSE_BYTES,
        "hard_max_request_bytes": wire.HARD_MAX_REQUEST_BYTES,
        "hard_max_response_bytes": wire.HARD_MAX_RESPONSE_BYTES,
        "hard_max_bindings": wire.HARD_MAX_BINDINGS,
    }
    assert named(wire.Opcode) == numbers(layout["opcodes"])
    assert named(wire.Status) == numbers(layout["statuses"])
    assert named(wire.EventState) == numbers(layout["event_states"])
    assert named(wire.Domain) == numbers(layout["memory_domains"])
    assert named(wire.Access) == numbers(layout["binding_access"])
    assert named(wire.AcceleratorClass) == numbers(layout["accelerator_classes"])
    assert named(wire.Capability) == numbers(layout["capabilities"]["assigned"])
    usage = numbers(layout["buffer_usage"])
    assert sum(named(wire.Usage).values()) == usage.pop("KNOWN_BITS")
    assert named(wire.Usage) == usage
    reserved = numbers(layout["capabilities"]["reserved"])
    assert not sum(reserved.values()) & sum(named(wire.Capability).values())
