"""A device that answers nonsense: every deviation from wire-abi.md 3.2, 4.5 and 5 is noticed, nothing is guessed."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtaccel.guest_tools.client import (
    Buffer,
    Client,
    ClientError,
    Context,
    DeviceError,
    Event,
    ProtocolViolation,
    Queue,
    RecoveryNeeded,
    Request,
    RequestTooLarge,
)
from virtaccel.guest_tools.client import Program as ProgramId
from virtaccel.guest_tools.transport.base import Config

HEADER = Struct("<HHIQ")
CONFIG = Config(1, 0, 1, 16, 4096, 4096)
INFO = Struct("<16sHHIIQIIIIIIQQ")
GOOD_INFO: tuple[object, ...] = (b"0123456789abcdef", 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1)


def answer(
    payload: bytes = b"", status: int = 0, flags: int = 0, size: int | None = None, request_id: int = 1
) -> bytes:
    return HEADER.pack(status, flags, len(payload) if size is None else size, request_id) + payload


# One of each shape of response: info, ID, event, nothing, data, event state.
REQUESTS: tuple[Callable[[Client], Request[Any]], ...] = (
    lambda client: client.get_device_info(),
    lambda client: client.create_context(),
    lambda client: client.submit(Queue(1), ProgramId(1), []),
    lambda client: client.free_buffer(Buffer(1)),
    lambda client: client.read_buffer(Buffer(1), 0, memoryview(bytearray(8))),
    lambda client: client.poll_event(Event(1)),
)


@pytest.mark.parametrize(
    "response",
    [
        b"",
        answer()[:15],
        answer(request_id=2),
        answer(request_id=0),
        answer(flags=1),
        answer(size=1),
        answer(b"x", size=0),
        answer(b"x"),
        answer(b"\0" * 8, status=3),
        answer(b"\0" * 7),
        answer(b"\0" * 9),
    ],
    ids=lambda response: response.hex() or "nothing",
)
def test_broken_responses_break_the_session(response: bytes) -> None:
    for make in REQUESTS:
        client = Client(CONFIG)
        with pytest.raises(ProtocolViolation):
            client.receive(make(client), memoryview(response))
        with pytest.raises(ProtocolViolation, match="reset first"):
            client.create_context()
        client.reset()
        assert client.recovery is None


def test_object_id_zero_is_refused() -> None:
    client = Client(CONFIG)
    with pytest.raises(ProtocolViolation, match="ID 0"):
        client.receive(client.create_context(), memoryview(answer(bytes(8))))


def test_indeterminate_submit_without_an_event_is_a_violation() -> None:
    client = Client(CONFIG)
    with pytest.raises(ProtocolViolation):
        client.receive(client.submit(Queue(1), ProgramId(1), []), memoryview(answer(bytes(8), status=9)))


@pytest.mark.parametrize(
    ("state", "error", "reserved"),
    [(0, 1, 0), (1, 9, 0), (3, 3, 0), (2, 0, 0), (4, 0, 0), (0xFFFF, 0, 0), (1, 0, 1), (2, 9, 1)],
)
def test_event_states_outside_section_4_5_keep_the_event(state: int, error: int, reserved: int) -> None:
    client = Client(CONFIG)
    with pytest.raises(RecoveryNeeded) as caught:
        client.receive(client.poll_event(Event(77)), memoryview(answer(Struct("<HHI").pack(state, error, reserved))))
    assert caught.value.event == 77


def test_failed_event_with_an_unknown_error_is_still_failed() -> None:
    client = Client(CONFIG)
    response = memoryview(answer(Struct("<HHI").pack(2, 0x1234, 0)))
    assert client.receive(client.poll_event(Event(1)), response) == (2, 0x1234)


@pytest.mark.parametrize("field", [2, *range(6, 14)])
def test_device_info_outside_section_5_1_is_refused(field: int) -> None:
    values = list(GOOD_INFO)
    values[field] = 1 if field == 2 else 0  # reserved not zero; a limit of zero
    client = Client(CONFIG)
    with pytest.raises(ProtocolViolation):
        client.receive(client.get_device_info(), memoryview(answer(INFO.pack(*values))))


@pytest.mark.parametrize(("capabilities", "good"), [(0, False), (4, False), (9, False), (17, False), (33, True)])
def test_capabilities(capabilities: int, good: bool) -> None:
    values = list(GOOD_INFO)
    values[5] = capabilities
    client = Client(CONFIG)
    response = memoryview(answer(INFO.pack(*values)))
    if good:
        assert client.receive(client.get_device_info(), response).capabilities == capabilities
    else:
        with pytest.raises(ProtocolViolation, match="capabilities"):
            client.receive(client.get_device_info(), response)


@given(make=st.sampled_from(REQUESTS), response=st.binary(max_size=120))
def test_any_bytes_are_a_value_or_a_client_error(
    make: Callable[[Client], Request[Any]], response: bytes
) -> None:
    client = Client(CONFIG)
    request = make(client)
    try:
        client.receive(request, memoryview(response))
    except ClientError:
        return
    status, flags, size, request_id = HEADER.unpack_from(response)
    assert (status, flags, size + 16, request_id) == (0, 0, len(response), request.request_id)


@given(status=st.integers(1, 0xFFFF))
def test_no_status_but_zero_is_success(status: int) -> None:
    client = Client(CONFIG)
    with pytest.raises(DeviceError) as caught:
        client.receive(client.free_buffer(Buffer(1)), memoryview(answer(status=status)))
    assert caught.value.status == status
    assert client.recovery is None


def test_frames_beyond_the_limits_are_not_made() -> None:
    client = Client(CONFIG)
    client.write_buffer(Buffer(1), 0, bytes(4096 - 40))
    client.read_buffer(Buffer(1), 0, memoryview(bytearray(4096 - 16)))
    client.load_program(Context(1), 1, [0] * 12, bytes(4096 - 96))
    with pytest.raises(RequestTooLarge):
        client.write_buffer(Buffer(1), 0, bytes(4096 - 39))
    with pytest.raises(RequestTooLarge):
        client.read_buffer(Buffer(1), 0, memoryview(bytearray(4096 - 15)))
    with pytest.raises(RequestTooLarge):
        client.load_program(Context(1), 1, [0] * 12, bytes(4096 - 95))


def test_chunks_cover_the_data_within_the_limits() -> None:
    client = Client(CONFIG)
    data = memoryview(bytes(range(256)) * 40)
    written = bytearray(len(data))
    for request in client.write_chunks(Buffer(1), 100, data):
        frame = b"".join(request.frame)
        assert len(frame) <= 4096
        offset, size = Struct("<QQ").unpack_from(frame, 24)
        written[offset - 100 : offset - 100 + size] = frame[40:]
    assert written == data
    reads = client.read_chunks(Buffer(1), 0, memoryview(written))
    asked = [(request.capacity, len(request.sink or b"")) for request in reads]
    assert all(capacity == 16 + size <= 4096 for capacity, size in asked)
    assert sum(size for _, size in asked) == len(data)


def test_payloads_are_not_copied_into_frames() -> None:
    client = Client(CONFIG)
    data = memoryview(bytearray(64))
    assert client.write_buffer(Buffer(1), 0, data).frame[1] is data
