"""Canonical frames in both directions: ours out of values, the engine's reading of theirs, and malformed ones.

The same bytes are spelled out by hand in support/frames.py from the standard's text, so these tests say something
where vectors.json is absent, too: see `OURS`.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from frames import (
    CODES,
    FAILED,
    INVALID_ARGUMENT,
    NAMES,
    READ_WRITE,
    RESOURCE_LIMIT,
    SHARED,
    UNSUPPORTED,
    Bench,
    allocate,
    binding,
    chain,
    load,
    request,
    submit,
    transfer,
    u64,
)

from virtaccel.device import decode, wire
from virtaccel.device.backend import DeviceInfo, Limits, Polled
from virtaccel.device.commands import COMMANDS, pack_polled
from virtaccel.device.config import WireConfig, pack_device_info
from virtaccel.device.errors import CommandError
from virtaccel.device.reference import INFO
from virtaccel.device.wire import EventState, Status

REQUEST_ID = 0x0102030405060708
CONTEXT, BUFFER, PROGRAM, QUEUE, EVENT = (
    0x1112131415161718, 0x2122232425262728, 0x3132333435363738, 0x4142434445464748, 0x5152535455565758,
)  # fmt: skip
TARGET = tuple(range(12))
ARTIFACT = bytes.fromhex("a1b2c3d4")
DATA = bytes.fromhex("deadbeef")

# Each command's canonical request by hand, and what the engine must read in it.
SUBMISSION = submit(QUEUE, PROGRAM, binding(BUFFER, 7, READ_WRITE, 0, 4096), timeout_ns=1_000_000)
OURS: dict[str, tuple[bytes, Any]] = {
    "GET_DEVICE_INFO": (b"", None),
    "CREATE_CONTEXT": (bytes(8), None),
    "DESTROY_CONTEXT": (u64(CONTEXT), CONTEXT),
    "ALLOCATE_BUFFER": (allocate(CONTEXT, 4096, 64, SHARED, 12), (CONTEXT, 4096, 64, SHARED, 12)),
    "FREE_BUFFER": (u64(BUFFER), BUFFER),
    "WRITE_BUFFER": (transfer(BUFFER, 4, 4) + DATA, (BUFFER, 4, 4)),
    "READ_BUFFER": (transfer(BUFFER, 4, 4), (BUFFER, 4, 4)),
    "LOAD_PROGRAM": (
        load(CONTEXT, ARTIFACT, format_id=1, target=TARGET, resident_bytes=4096),
        (CONTEXT, 1, TARGET, 4, 4096),
    ),
    "UNLOAD_PROGRAM": (u64(PROGRAM), PROGRAM),
    "CREATE_QUEUE": (u64(CONTEXT) + u64(0), CONTEXT),
    "DESTROY_QUEUE": (u64(QUEUE), QUEUE),
    "SUBMIT": (
        SUBMISSION,
        (QUEUE, PROGRAM, 1_000_000, ((BUFFER, 0, 4096, 7, READ_WRITE, bytes(3)),), SUBMISSION),
    ),
    "POLL_EVENT": (u64(EVENT), EVENT),
    "CANCEL_EVENT": (u64(EVENT), EVENT),
    "DESTROY_EVENT": (u64(EVENT), EVENT),
}
MOCK_INFO = DeviceInfo(
    uuid=b"virtio-accelmock",
    accelerator_class=1,
    vendor_id=0x12345678,
    device_id=0x9ABCDEF0,
    capabilities=7,
    limits=Limits(64, 1024, 256, 16, 4096, 256, 1 << 30, 16 << 20),
)


def vectors(shared: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((shared / "conformance/v1.0/vectors.json").read_text())
    return loaded


def read_by_engine(frame: bytes) -> Any:
    """The request as the engine's own decoder reads it, its header checked on the way."""
    opcode, flags, payload_bytes, request_id = wire.REQUEST_HEADER.unpack_from(frame)
    assert (flags, payload_bytes, request_id) == (0, len(frame) - 16, REQUEST_ID)
    return COMMANDS[opcode].decode(frame[: decode.PREFIX_BYTES], chain(frame, 4096), INFO.limits)


@pytest.mark.parametrize("name", OURS)
def test_request_written_from_the_text_is_read_right(name: str) -> None:
    payload, expected = OURS[name]
    assert read_by_engine(request(CODES[name], payload, REQUEST_ID)) == expected


def test_every_request_of_the_vectors_both_ways(shared: Path) -> None:
    seen = set()
    for frame in vectors(shared)["frames"]:
        if frame["kind"] == "request":
            payload, expected = OURS[frame["opcode"]]
            raw = bytes.fromhex(frame["hex"])
            assert request(CODES[frame["opcode"]], payload, REQUEST_ID) == raw, frame["name"]
            assert read_by_engine(raw) == expected, frame["name"]
            seen.add(frame["opcode"])
    assert seen == set(CODES)


def test_every_configuration_of_the_vectors(shared: Path) -> None:
    made = {"config_minimum": WireConfig(2, 97, 92), "config_maximum": WireConfig(256, 16 << 20, 16 << 20)}
    for frame in vectors(shared)["frames"]:
        if frame["kind"] == "config":
            assert made.pop(frame["name"]).pack().hex() == frame["hex"]
    assert not made


RESPONSES: dict[str, bytes] = {
    "response_get_device_info": pack_device_info(MOCK_INFO),
    "response_create_context": u64(CONTEXT),
    "response_allocate_buffer": u64(BUFFER),
    "response_read_buffer": DATA,
    "response_load_program": u64(PROGRAM),
    "response_create_queue": u64(QUEUE),
    "response_submit_accepted": u64(EVENT),
    "response_submit_indeterminate": u64(EVENT),
    "response_poll_event_pending": pack_polled(Polled(EventState.PENDING, Status.OK)),
    "response_poll_event_complete": pack_polled(Polled(EventState.COMPLETE, Status.OK)),
    "response_poll_event_failed": pack_polled(Polled(EventState.FAILED, Status.DEVICE_LOST)),
    "response_poll_event_cancelled": pack_polled(Polled(EventState.CANCELLED, Status.OK)),
}


def test_every_response_of_the_vectors_both_ways(shared: Path) -> None:
    """Payloads as our encoders make them, and the header's fields as our structure reads them."""
    left = set(RESPONSES)
    for frame in vectors(shared)["frames"]:
        if frame["kind"] != "response":
            continue
        raw, payload = bytes.fromhex(frame["hex"]), RESPONSES.get(frame["name"], b"")
        status = Status[frame["status"]]
        assert wire.RESPONSE_HEADER.pack(status, 0, len(payload), REQUEST_ID) + payload == raw, frame["name"]
        assert wire.RESPONSE_HEADER.unpack_from(raw) == (status, 0, len(raw) - 16, REQUEST_ID), frame["name"]
        left.discard(frame["name"])
    assert not left


EDGE_STATUSES = {"UNSUPPORTED": UNSUPPORTED, "INVALID_ARGUMENT": INVALID_ARGUMENT, "RESOURCE_LIMIT": RESOURCE_LIMIT}


def test_every_malformed_request_of_the_vectors(shared: Path) -> None:
    """Through the whole engine: the verdict, exactly 16 bytes, and no call to the backend."""
    count = 0
    for case in vectors(shared)["edge_cases"]:
        if case["kind"] != "request":
            continue
        bench = Bench()
        response = bench.send(bytes.fromhex(case["hex"]))
        if case["expected"] == "Size":
            assert response.used == 0, case["name"]
        else:
            assert (response.used, response.status) == (16, EDGE_STATUSES[case["expected"]]), case["name"]
        assert not bench.script.calls, case["name"]
        count += 1
    assert count == 7


def test_configurations_that_the_vectors_call_wrong_cannot_be_made(shared: Path) -> None:
    """Edge cases of the driver's reading are the client's; the device must not be able to expose them."""
    cases = {case["name"]: bytes.fromhex(case["hex"]) for case in vectors(shared)["edge_cases"]}
    *_, descriptors, request_bytes, response_bytes = wire.CONFIG.unpack(cases["config_descriptor_limit_above_hard_max"])
    with pytest.raises(ValueError, match="max_chain_descriptors"):
        WireConfig(descriptors, request_bytes, response_bytes)
    for name in ("config_unknown_major", "config_future_minor_compatible"):
        assert WireConfig(2, 97, 92).pack() != cases[name]


def test_a_failed_event_never_reports_ok() -> None:
    """A backend that says FAILED without an error would make a response that section 4.5 does not allow."""
    assert pack_polled(Polled(EventState.FAILED, Status.OK))[2:4] == b"\xff\xff"
    assert pack_polled(Polled(EventState.COMPLETE, Status.BUSY)) == bytes([1, 0, 0, 0, 0, 0, 0, 0])
    assert FAILED == EventState.FAILED


def test_the_table_has_all_commands_and_no_other() -> None:
    assert {code: NAMES[code] for code in COMMANDS} == NAMES


def test_device_info_response_of_the_engine() -> None:
    bench = Bench(info=replace(MOCK_INFO, capabilities=0x27))
    payload = bench.ok("GET_DEVICE_INFO", capacity=92)
    assert len(payload) == 76
    assert payload[:16] == MOCK_INFO.uuid
    assert int.from_bytes(payload[68:], "little") == (16 << 20) - 96, "no more than a frame can carry"


def test_reading_a_request_never_raises_anything_but_a_verdict() -> None:
    """Each byte of each canonical request set to 0x00, 0x01, 0x80 and 0xFF."""
    for name, (payload, _) in OURS.items():
        frame = request(CODES[name], payload, REQUEST_ID)
        for at in range(16, len(frame)):
            for byte in (0x00, 0x01, 0x80, 0xFF):
                damaged = frame[:at] + bytes([byte]) + frame[at + 1 :]
                with suppress(CommandError):
                    COMMANDS[CODES[name]].decode(damaged, chain(damaged, 64), INFO.limits)
