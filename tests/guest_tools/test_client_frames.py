"""The client's bytes and verdicts against the standard's canonical frames, in both directions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from virtaccel.device.wire import EventState, Usage
from virtaccel.guest_tools.client import (
    Binding,
    Buffer,
    Client,
    Context,
    DeviceError,
    DeviceInfo,
    Event,
    EventStatus,
    IndeterminateSubmit,
    Program,
    Queue,
    RecoveryNeeded,
    Request,
)
from virtaccel.guest_tools.transport.base import Config, ConfigSpaceError, decode_config

REQUEST_ID = 0x0102030405060708
CONTEXT, BUFFER = Context(0x1112131415161718), Buffer(0x2122232425262728)
PROGRAM, QUEUE, EVENT = Program(0x3132333435363738), Queue(0x4142434445464748), Event(0x5152535455565758)
CONFIG = Config(1, 0, 1, 128, 1 << 20, 1 << 20)

Make = Callable[[Client], Request[Any]]

REQUESTS: dict[str, Make] = {
    "get_device_info": lambda client: client.get_device_info(),
    "create_context": lambda client: client.create_context(),
    "destroy_context": lambda client: client.destroy_context(CONTEXT),
    "allocate_buffer": lambda client: client.allocate_buffer(
        CONTEXT, 4096, Usage.PROGRAM_INPUT | Usage.PROGRAM_OUTPUT, domain=3, alignment=64
    ),
    "free_buffer": lambda client: client.free_buffer(BUFFER),
    "write_buffer": lambda client: client.write_buffer(BUFFER, 4, b"\xde\xad\xbe\xef"),
    "read_buffer": lambda client: client.read_buffer(BUFFER, 4, memoryview(bytearray(4))),
    "load_program": lambda client: client.load_program(CONTEXT, 1, range(12), b"\xa1\xb2\xc3\xd4", 4096),
    "unload_program": lambda client: client.unload_program(PROGRAM),
    "create_queue": lambda client: client.create_queue(CONTEXT),
    "destroy_queue": lambda client: client.destroy_queue(QUEUE),
    "submit": lambda client: client.submit(QUEUE, PROGRAM, [Binding(BUFFER, 0, 4096, 7, 3)], 1_000_000),
    "poll_event": lambda client: client.poll_event(EVENT),
    "cancel_event": lambda client: client.cancel_event(EVENT),
    "destroy_event": lambda client: client.destroy_event(EVENT),
}

# What each canonical response means, read off the standard's tables (wire-abi.md, sections 3 to 6).
RESPONSES: dict[str, tuple[str, object]] = {
    "get_device_info": (
        "get_device_info",
        DeviceInfo(
            b"virtio-accelmock", 1, 0x12345678, 0x9ABCDEF0, 7, 64, 1024, 256, 16, 4096, 256, 1 << 30, 16 << 20
        ),
    ),
    "create_context": ("create_context", CONTEXT),
    "destroy_context": ("destroy_context", None),
    "allocate_buffer": ("allocate_buffer", BUFFER),
    "free_buffer": ("free_buffer", None),
    "write_buffer": ("write_buffer", None),
    "read_buffer": ("read_buffer", None),
    "load_program": ("load_program", PROGRAM),
    "unload_program": ("unload_program", None),
    "create_queue": ("create_queue", QUEUE),
    "destroy_queue": ("destroy_queue", None),
    "submit_accepted": ("submit", EVENT),
    "poll_event_pending": ("poll_event", EventStatus(EventState.PENDING, 0)),
    "poll_event_complete": ("poll_event", EventStatus(EventState.COMPLETE, 0)),
    "poll_event_failed": ("poll_event", EventStatus(EventState.FAILED, 9)),
    "poll_event_cancelled": ("poll_event", EventStatus(EventState.CANCELLED, 0)),
    "cancel_event": ("cancel_event", None),
    "destroy_event": ("destroy_event", None),
}


@pytest.fixture(scope="module")
def vectors(shared: Path) -> dict[str, dict[str, bytes]]:
    """name -> bytes, by kind and by whether it is an edge case."""
    loaded = json.loads((shared / "conformance/v1.0/vectors.json").read_text())
    found: dict[str, dict[str, bytes]] = {}
    for group in ("frames", "edge_cases"):
        for item in loaded[group]:
            name = item["name"].removeprefix(f"{item['kind']}_")
            found.setdefault(f"{group} {item['kind']}", {})[name] = bytes.fromhex(item["hex"])
    return found


def client() -> Client:
    return Client(CONFIG, REQUEST_ID)


def receive(make: Make, response: bytes) -> object:
    one = client()
    return one.receive(make(one), memoryview(response))


def test_every_canonical_request_has_a_maker_and_every_response_a_meaning(vectors: dict[str, dict[str, bytes]]) -> None:
    assert set(vectors["frames request"]) == set(REQUESTS)
    assert set(vectors["frames response"]) == {*RESPONSES, "submit_indeterminate", "unknown_opcode"}


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_are_the_canonical_bytes(name: str, vectors: dict[str, dict[str, bytes]]) -> None:
    assert b"".join(REQUESTS[name](client()).frame) == vectors["frames request"][name]


@pytest.mark.parametrize("name", RESPONSES)
def test_canonical_responses_decode(name: str, vectors: dict[str, dict[str, bytes]]) -> None:
    command, meaning = RESPONSES[name]
    assert receive(REQUESTS[command], vectors["frames response"][name]) == meaning


def test_read_data_arrive_in_the_sink(vectors: dict[str, dict[str, bytes]]) -> None:
    one, sink = client(), bytearray(4)
    one.receive(one.read_buffer(BUFFER, 4, memoryview(sink)), memoryview(vectors["frames response"]["read_buffer"]))
    assert sink == b"\xde\xad\xbe\xef"


def test_indeterminate_submit_keeps_the_event(vectors: dict[str, dict[str, bytes]]) -> None:
    with pytest.raises(IndeterminateSubmit) as caught:
        receive(REQUESTS["submit"], vectors["frames response"]["submit_indeterminate"])
    assert (caught.value.event, caught.value.status) == (EVENT, 9)


def test_unknown_status_is_an_opaque_failure(vectors: dict[str, dict[str, bytes]]) -> None:
    with pytest.raises(DeviceError, match="unknown status 4660") as caught:
        receive(REQUESTS["destroy_event"], vectors["edge_cases response"]["unknown_status"])
    assert caught.value.status == 0x1234


def test_unknown_event_state_keeps_the_event_and_asks_for_recovery(vectors: dict[str, dict[str, bytes]]) -> None:
    one = client()
    with pytest.raises(RecoveryNeeded) as caught:
        one.receive(one.poll_event(EVENT), memoryview(vectors["edge_cases response"]["unknown_event_state"]))
    assert caught.value.event == EVENT
    assert one.recovery is caught.value


def test_canonical_configurations(vectors: dict[str, dict[str, bytes]]) -> None:
    configs = vectors["frames config"]
    assert decode_config(configs["minimum"]) == Config(1, 0, 1, 2, 97, 92)
    assert decode_config(configs["maximum"]) == Config(1, 0, 1, 256, 16 << 20, 16 << 20)
    edges = vectors["edge_cases config"]
    assert decode_config(edges["future_minor_compatible"]).protocol_minor == 1
    for name in ("descriptor_limit_above_hard_max", "unknown_major"):
        with pytest.raises(ConfigSpaceError):
            decode_config(edges[name])


GOOD_CONFIG = bytes.fromhex("0100 0000 0100 8000 00000100 00000100")


@pytest.mark.parametrize(
    ("offset", "field", "complaint"),
    [
        (0, "0000", "protocol_major"),
        (4, "0000", "command_queue_count"),
        (4, "0200", "command_queue_count"),
        (6, "0100", "max_chain_descriptors"),
        (6, "0101", "max_chain_descriptors"),
        (8, "60000000", "max_request_bytes"),
        (8, "01000001", "max_request_bytes"),
        (12, "5b000000", "max_response_bytes"),
        (12, "01000001", "max_response_bytes"),
    ],
)
def test_configuration_outside_section_2_is_refused(offset: int, field: str, complaint: str) -> None:
    raw = bytearray(GOOD_CONFIG)
    raw[offset : offset + len(field) // 2] = bytes.fromhex(field)
    with pytest.raises(ConfigSpaceError, match=complaint):
        decode_config(raw)


def test_configuration_prefix_may_be_followed_by_more_but_not_cut() -> None:
    assert decode_config(GOOD_CONFIG + b"\xff" * 16) == decode_config(GOOD_CONFIG)
    with pytest.raises(ConfigSpaceError, match="15 bytes"):
        decode_config(GOOD_CONFIG[:15])


def test_chain_limit_above_the_queue_size_is_refused() -> None:
    with pytest.raises(ConfigSpaceError, match="queue size 64"):
        decode_config(GOOD_CONFIG, queue_size=64)
