"""What each command answers to each kind of wrong request (wire-abi.md, sections 3, 5 and 6): one row a case.

Rows are written from the standard's text. Every refusal is exactly 16 bytes, or nothing at all where the success shape
has no room; it changes no state and, except in the rows that say so, never reaches the backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from frames import (
    BUSY,
    CODES,
    DESTINATION,
    INCOMPATIBLE,
    INPUT,
    INVALID_ARGUMENT,
    NAMES,
    OUT_OF_BOUNDS,
    OUTPUT,
    PERMISSION_DENIED,
    READ,
    READ_WRITE,
    RESOURCE_LIMIT,
    SOURCE,
    STALE_OBJECT,
    U64_MAX,
    UNSUPPORTED,
    WRITE,
    XOR,
    Bench,
    World,
    allocate,
    binding,
    load,
    request,
    submit,
    transfer,
    u32,
    u64,
    world,
)

from virtaccel.device.config import DeviceConfig, ResourcePolicy, WireConfig
from virtaccel.device.reference import INFO, Script
from virtaccel.device.wire import Capability

CONFIG = DeviceConfig(WireConfig(max_request_bytes=8192, max_response_bytes=1024))
LIMITS = replace(
    INFO.limits,
    max_contexts=2,
    max_buffers_per_context=4,
    max_programs_per_context=2,
    max_queues_per_context=2,
    max_events_per_context=2,
    max_bindings_per_submission=8,
    max_buffer_bytes=8192,
    max_artifact_bytes=100,
)
POLICY = ResourcePolicy(max_buffer_backing_bytes=16 << 12, max_program_resident_bytes=1000)
HOST_ONLY = int(Capability.HOST_VISIBLE_MEMORY)


class Place(NamedTuple):
    """Where a case happens: a bench, one of everything, a pending event, and a second context."""

    bench: Bench
    w: World
    event: int
    other: World


def make(capabilities: int = int(INFO.capabilities)) -> Place:
    bench = Bench(
        Script(immediate=False), config=CONFIG, policy=POLICY, info=replace(INFO, limits=LIMITS)
    )
    first, second = world(bench), world(bench)
    event = bench.made("SUBMIT", first.submission())
    bench.engine.state.info = replace(bench.engine.state.info, capabilities=capabilities)
    return Place(bench, first, event, second)


Payload = Callable[[Place], bytes]
FOREIGN = 0x0123_4567_89AB_CDEF

# Commands whose whole payload is one object ID, and a kind of object that is the wrong one for each.
BY_ID: dict[str, tuple[Callable[[Place], int], Callable[[Place], int]]] = {
    "DESTROY_CONTEXT": (lambda p: p.w.context, lambda p: p.w.source),
    "FREE_BUFFER": (lambda p: p.w.source, lambda p: p.w.context),
    "UNLOAD_PROGRAM": (lambda p: p.w.program, lambda p: p.w.queue),
    "DESTROY_QUEUE": (lambda p: p.w.queue, lambda p: p.w.program),
    "POLL_EVENT": (lambda p: p.event, lambda p: p.w.context),
    "CANCEL_EVENT": (lambda p: p.event, lambda p: p.w.source),
    "DESTROY_EVENT": (lambda p: p.event, lambda p: p.w.queue),
}
# A good payload for every command, for the cases that damage the frame around it.
GOOD: dict[str, Payload] = {
    "GET_DEVICE_INFO": lambda p: b"",
    "CREATE_CONTEXT": lambda p: bytes(8),
    "ALLOCATE_BUFFER": lambda p: allocate(p.w.context),
    "WRITE_BUFFER": lambda p: transfer(p.other.source) + bytes(8),
    "READ_BUFFER": lambda p: transfer(p.other.source),
    "LOAD_PROGRAM": lambda p: load(p.w.context, XOR.pack()),
    "CREATE_QUEUE": lambda p: u64(p.w.context) + u64(0),
    "SUBMIT": lambda p: p.other.submission(),
    **{name: (lambda p, own=own: u64(own(p))) for name, (own, _) in BY_ID.items()},  # type: ignore[misc]
}
NEEDED = {
    "GET_DEVICE_INFO": 92, "CREATE_CONTEXT": 24, "ALLOCATE_BUFFER": 24, "READ_BUFFER": 24, "LOAD_PROGRAM": 24,
    "CREATE_QUEUE": 24, "SUBMIT": 24, "POLL_EVENT": 24,
}  # fmt: skip


class Case(NamedTuple):
    name: str
    opcode: str
    payload: Payload
    status: int
    capabilities: int = int(INFO.capabilities)
    backend_is_asked: bool = False


def zero_id(opcode: str, payload: Payload, at: int = 0) -> Case:
    def zeroed(place: Place) -> bytes:
        whole = payload(place)
        return whole[:at] + bytes(8) + whole[at + 8 :]

    return Case(f"zero ID at {at}", opcode, zeroed, INVALID_ARGUMENT)


def foreign_id(opcode: str, payload: Payload, at: int = 0) -> Case:
    def changed(place: Place) -> bytes:
        whole = payload(place)
        return whole[:at] + u64(FOREIGN) + whole[at + 8 :]

    return Case(f"foreign ID at {at}", opcode, changed, STALE_OBJECT)


def wrong_generation(opcode: str, payload: Payload, at: int = 0) -> Case:
    def changed(place: Place) -> bytes:
        whole = payload(place)
        return whole[:at] + u64(int.from_bytes(whole[at : at + 8], "little") ^ 1) + whole[at + 8 :]

    return Case(f"ID with one bit flipped at {at}", opcode, changed, STALE_OBJECT)


def ids(opcode: str, *places: int) -> list[Case]:
    good = GOOD[opcode]
    return [make_case(opcode, good, at) for at in places for make_case in (zero_id, foreign_id, wrong_generation)]


def by_id() -> list[Case]:
    cases = []
    for opcode, (own, wrong_kind) in BY_ID.items():
        cases += ids(opcode, 0)
        cases.append(Case("ID of another kind", opcode, lambda p, f=wrong_kind: u64(f(p)), STALE_OBJECT))  # type: ignore[misc]
        cases.append(Case("payload too short", opcode, lambda p, f=own: u64(f(p))[:7], INVALID_ARGUMENT))  # type: ignore[misc]
        cases.append(Case("trailing byte", opcode, lambda p, f=own: u64(f(p)) + b"\0", INVALID_ARGUMENT))  # type: ignore[misc]
        cases.append(Case("no payload", opcode, lambda p: b"", INVALID_ARGUMENT))
    return cases


def submission(*bindings: Callable[[Place], bytes], **changes: Any) -> Payload:
    return lambda p: submit(p.other.queue, p.other.program, *(one(p) for one in bindings), **changes)


def source(**changes: Any) -> Callable[[Place], bytes]:
    return lambda p: binding(p.other.source, **{"slot": 0, "access": READ, **changes})


def target(**changes: Any) -> Callable[[Place], bytes]:
    return lambda p: binding(p.other.target, **{"slot": 1, "access": WRITE, **changes})


def narrow(place: Place, usage: int) -> int:
    return place.bench.buffer(place.other.context, usage=usage)


I, U, L, B, P, S = INVALID_ARGUMENT, UNSUPPORTED, RESOURCE_LIMIT, OUT_OF_BOUNDS, PERMISSION_DENIED, STALE_OBJECT  # noqa: E741
CASES: list[Case] = [
    *by_id(),
    Case("trailing byte", "GET_DEVICE_INFO", lambda p: b"\0", I),
    # Contexts
    Case("flag", "CREATE_CONTEXT", lambda p: u32(1) + u32(0), U),
    Case("highest flag", "CREATE_CONTEXT", lambda p: u32(1 << 31) + u32(0), U),
    Case("reserved", "CREATE_CONTEXT", lambda p: u32(0) + u32(1), I),
    Case("short", "CREATE_CONTEXT", lambda p: bytes(7), I),
    Case("trailing byte", "CREATE_CONTEXT", lambda p: bytes(9), I),
    Case("more contexts than advertised", "CREATE_CONTEXT", lambda p: bytes(8), L),
    Case("children", "DESTROY_CONTEXT", lambda p: u64(p.w.context), BUSY),
    # Buffers
    *ids("ALLOCATE_BUFFER", 0),
    Case("bytes zero", "ALLOCATE_BUFFER", lambda p: allocate(p.w.context, 0), I),
    Case("bytes above the advertised", "ALLOCATE_BUFFER", lambda p: allocate(p.w.context, 8193), L),
    Case("bytes of 2^64-1", "ALLOCATE_BUFFER", lambda p: allocate(p.w.context, U64_MAX), L),
    Case("alignment zero", "ALLOCATE_BUFFER", lambda p: allocate(p.w.context, alignment=0), I),
    Case("alignment 3", "ALLOCATE_BUFFER", lambda p: allocate(p.w.context, alignment=3), I),
    Case("alignment 2^64-1", "ALLOCATE_BUFFER", lambda p: allocate(p.w.context, alignment=U64_MAX), I),
    Case("alignment 2^63", "ALLOCATE_BUFFER", lambda p: allocate(p.w.context, alignment=1 << 63), U,
         backend_is_asked=True),
    Case("domain zero", "ALLOCATE_BUFFER", lambda p: allocate(p.w.context, domain=0), I),
    Case("domain 4", "ALLOCATE_BUFFER", lambda p: allocate(p.w.context, domain=4), I),
    Case("domain 255", "ALLOCATE_BUFFER", lambda p: allocate(p.w.context, domain=255), I),
    Case("device domain not offered", "ALLOCATE_BUFFER", lambda p: allocate(p.w.context, domain=2), U, HOST_ONLY),
    Case("shared domain not offered", "ALLOCATE_BUFFER", lambda p: allocate(p.w.context, domain=3), U, HOST_ONLY),
    Case("host domain not offered", "ALLOCATE_BUFFER", lambda p: allocate(p.w.context, domain=1), U,
         int(Capability.SHARED_MEMORY)),
    Case("usage zero", "ALLOCATE_BUFFER", lambda p: allocate(p.w.context, usage=0), I),
    Case("usage bit 5", "ALLOCATE_BUFFER", lambda p: allocate(p.w.context, usage=33), U),
    Case("usage bit 31", "ALLOCATE_BUFFER", lambda p: allocate(p.w.context, usage=1 << 31), U),
    Case("reserved", "ALLOCATE_BUFFER", lambda p: allocate(p.w.context, reserved=b"\0\0\0\0\0\0\1"), I),
    Case("reserved tail", "ALLOCATE_BUFFER", lambda p: allocate(p.w.context, tail=1), I),
    Case("trailing byte", "ALLOCATE_BUFFER", lambda p: allocate(p.w.context) + b"\0", I),
    Case("short", "ALLOCATE_BUFFER", lambda p: allocate(p.w.context)[:-1], I),
    Case("event holds it", "FREE_BUFFER", lambda p: u64(p.w.source), BUSY),
    # Transfers
    *ids("WRITE_BUFFER", 0),
    *ids("READ_BUFFER", 0),
    Case("bytes zero", "WRITE_BUFFER", lambda p: transfer(p.other.source, 0, 0), I),
    Case("less data than bytes", "WRITE_BUFFER", lambda p: transfer(p.other.source) + bytes(7), I),
    Case("more data than bytes", "WRITE_BUFFER", lambda p: transfer(p.other.source) + bytes(9), I),
    Case("short", "WRITE_BUFFER", lambda p: transfer(p.other.source)[:23], I),
    Case("range overflows", "WRITE_BUFFER", lambda p: transfer(p.other.source, U64_MAX - 7) + bytes(8), I),
    Case("range at the end", "WRITE_BUFFER", lambda p: transfer(p.other.source, 57) + bytes(8), B),
    Case("offset 2^63", "WRITE_BUFFER", lambda p: transfer(p.other.source, 1 << 63) + bytes(8), B),
    Case("usage", "WRITE_BUFFER", lambda p: transfer(narrow(p, SOURCE | INPUT)) + bytes(8), P),
    Case("bytes zero", "READ_BUFFER", lambda p: transfer(p.other.source, 0, 0), I),
    Case("trailing byte", "READ_BUFFER", lambda p: transfer(p.other.source) + b"\0", I),
    Case("range overflows", "READ_BUFFER", lambda p: transfer(p.other.source, U64_MAX, 1), I),
    Case("range at the end", "READ_BUFFER", lambda p: transfer(p.other.source, 60, 8), B),
    Case("usage", "READ_BUFFER", lambda p: transfer(narrow(p, DESTINATION | OUTPUT)), P),
    Case("above the response limit", "READ_BUFFER", lambda p: transfer(p.other.source, 0, 1009), L),
    Case("2^64-1 bytes", "READ_BUFFER", lambda p: transfer(p.other.source, 0, U64_MAX), L),
    # Programs
    *ids("LOAD_PROGRAM", 0),
    Case("format zero", "LOAD_PROGRAM", lambda p: load(p.w.context, XOR.pack(), format_id=0), I),
    Case("format unknown", "LOAD_PROGRAM", lambda p: load(p.w.context, XOR.pack(), format_id=7), U,
         backend_is_asked=True),
    Case("flag", "LOAD_PROGRAM", lambda p: load(p.w.context, XOR.pack(), flags=1), U),
    Case("no artifact", "LOAD_PROGRAM", lambda p: load(p.w.context, b""), I),
    Case("payload_bytes zero", "LOAD_PROGRAM", lambda p: load(p.w.context, XOR.pack(), payload_bytes=0), I),
    Case("payload_bytes too small", "LOAD_PROGRAM", lambda p: load(p.w.context, XOR.pack(), payload_bytes=11), I),
    Case("payload_bytes 2^64-1", "LOAD_PROGRAM", lambda p: load(p.w.context, XOR.pack(), payload_bytes=U64_MAX), I),
    Case("short", "LOAD_PROGRAM", lambda p: load(p.w.context, b"")[:79], I),
    Case("resident_bytes zero", "LOAD_PROGRAM", lambda p: load(p.w.context, XOR.pack(), resident_bytes=0), I),
    Case("over the budget", "LOAD_PROGRAM", lambda p: load(p.w.context, XOR.pack(), resident_bytes=1000), L),
    Case("artifact above the advertised", "LOAD_PROGRAM", lambda p: load(p.w.context, bytes(101)), L),
    Case("event holds it", "UNLOAD_PROGRAM", lambda p: u64(p.w.program), BUSY),
    # Execution queues
    *ids("CREATE_QUEUE", 0),
    Case("flag", "CREATE_QUEUE", lambda p: u64(p.w.context) + u32(1) + u32(0), U),
    Case("reserved", "CREATE_QUEUE", lambda p: u64(p.w.context) + u32(0) + u32(1), I),
    Case("trailing byte", "CREATE_QUEUE", lambda p: u64(p.w.context) + bytes(9), I),
    Case("event holds it", "DESTROY_QUEUE", lambda p: u64(p.w.queue), BUSY),
    # Submissions
    *ids("SUBMIT", 0, 8, 32, 64),
    Case("no bindings", "SUBMIT", submission(), I),
    Case("flag", "SUBMIT", submission(source(), target(), flags=1), U),
    Case("count above the advertised", "SUBMIT", submission(*[source(slot=slot) for slot in range(9)]), L),
    Case("count that overflows", "SUBMIT", submission(count=0xFFFF_FFFF), L),
    Case("fewer bindings than count", "SUBMIT", submission(source(), count=2), I),
    Case("more bindings than count", "SUBMIT", submission(source(), target(), count=1), I),
    Case("half a binding", "SUBMIT", lambda p: p.other.submission()[:-1], I),
    Case("short", "SUBMIT", lambda p: p.other.submission()[:31], I),
    Case("slot twice", "SUBMIT", submission(source(), target(slot=0)), I),
    Case("access zero", "SUBMIT", submission(source(access=0), target()), I),
    Case("access 4", "SUBMIT", submission(source(access=4), target()), I),
    Case("reserved", "SUBMIT", submission(source(reserved=b"\0\0\1"), target()), I),
    Case("binding of no bytes", "SUBMIT", submission(source(size=0), target()), I),
    Case("range overflows", "SUBMIT", submission(source(offset=U64_MAX), target()), I),
    Case("range outside", "SUBMIT", submission(source(offset=57), target()), B),
    Case("program of another context", "SUBMIT",
         lambda p: submit(p.other.queue, p.w.program, source()(p), target()(p)), S),
    Case("queue of another context", "SUBMIT",
         lambda p: submit(p.w.queue, p.other.program, source()(p), target()(p)), S),
    Case("buffer of another context", "SUBMIT",
         lambda p: submit(p.other.queue, p.other.program, source()(p), binding(p.w.target, 1, WRITE)), S),
    Case("read of an output", "SUBMIT",
         lambda p: submission(lambda p: binding(narrow(p, OUTPUT), 0, READ), target())(p), P),
    Case("write of an input", "SUBMIT",
         lambda p: submission(source(), lambda p: binding(narrow(p, INPUT), 1, WRITE))(p), P),
    Case("read-write without state", "SUBMIT",
         lambda p: submission(source(), lambda p: binding(narrow(p, INPUT | OUTPUT), 1, READ_WRITE))(p), P),
    Case("transfer buffer", "SUBMIT",
         lambda p: submission(lambda p: binding(narrow(p, SOURCE | DESTINATION), 0, READ), target())(p), P),
    Case("lengths that do not fit the program", "SUBMIT", submission(source(), target(size=4)), INCOMPATIBLE,
         backend_is_asked=True),
    Case("a slot the program does not have", "SUBMIT", submission(source(), target(), source(slot=2)), I,
         backend_is_asked=True),
    # Events
    Case("cancellation not offered", "CANCEL_EVENT", lambda p: u64(p.event), U, int(Capability.SHARED_MEMORY)),
    Case("pending", "DESTROY_EVENT", lambda p: u64(p.event), BUSY, backend_is_asked=True),
]  # fmt: skip


def snapshot(bench: Bench) -> tuple[Any, ...]:
    state = bench.engine.state
    return state.counts, state.retained, len(state.loads), bench.backend.live


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.opcode}: {case.name}")
def test_verdict(case: Case) -> None:
    place = make(case.capabilities)
    payload = case.payload(place)
    before = snapshot(place.bench)
    place.bench.script.calls.clear()
    response = place.bench.call(case.opcode, payload)
    assert (response.status, response.used) == (case.status, 16)
    assert snapshot(place.bench) == before
    if not case.backend_is_asked:
        assert not place.bench.script.calls
    # And the device goes on: the same bench still serves a good command.
    assert place.bench.status("GET_DEVICE_INFO") == 0


@pytest.mark.parametrize("opcode", GOOD)
def test_good_payloads_really_are_good(opcode: str) -> None:
    """So that the cases which damage one thing are refused for that thing."""
    bench = Bench(config=CONFIG)
    first, second = world(bench), world(bench)
    event = bench.made("SUBMIT", first.submission())
    place = Place(bench, first, event, second)
    if opcode in ("DESTROY_CONTEXT", "FREE_BUFFER", "UNLOAD_PROGRAM", "DESTROY_QUEUE"):
        bench.ok("DESTROY_EVENT", u64(event))
    if opcode == "DESTROY_CONTEXT":
        for name, object_id in (
            ("FREE_BUFFER", first.source), ("FREE_BUFFER", first.target), ("UNLOAD_PROGRAM", first.program),
            ("DESTROY_QUEUE", first.queue),
        ):
            bench.ok(name, u64(object_id))
    if opcode == "CANCEL_EVENT":
        bench.script.immediate = False
        place = place._replace(event=bench.made("SUBMIT", first.submission()))
    assert bench.status(opcode, GOOD[opcode](place)) == 0


@pytest.mark.parametrize("opcode", GOOD)
def test_vq_010_request_flags_and_request_id_zero(opcode: str) -> None:
    place = make()
    payload = GOOD[opcode](place)
    for flags in (1, 2, 0x8000, 0xFFFF):
        assert place.bench.send(request(CODES[opcode], payload, 77, flags=flags))[:2] == (16, UNSUPPORTED)
    assert place.bench.send(request(CODES[opcode], payload, 0))[:2] == (16, INVALID_ARGUMENT)


@pytest.mark.parametrize("opcode", GOOD)
@pytest.mark.parametrize("lie", [-1, 1, 16, 0xFFFF_FFFF])
def test_payload_bytes_that_lie(opcode: str, lie: int) -> None:
    place = make()
    payload = GOOD[opcode](place)
    length = lie if lie > 100 else max(0, len(payload) + lie)
    if length == len(payload):
        length = 1
    assert place.bench.send(request(CODES[opcode], payload, 5, length=length))[:2] == (16, INVALID_ARGUMENT)


@pytest.mark.parametrize("opcode", GOOD)
def test_frame_above_the_configured_limit(opcode: str) -> None:
    place = make()
    frame = request(CODES[opcode], bytes(8192 - 16 + 1), 5)
    assert place.bench.send(frame)[:2] == (16, RESOURCE_LIMIT)


@pytest.mark.parametrize("opcode", GOOD)
def test_vq_012_no_room_for_the_success_shape(opcode: str) -> None:
    """Every capacity below what success needs: nothing written, used length 0, no state change, no backend."""
    for room in range(1, NEEDED.get(opcode, 16)):
        place = make()
        payload = GOOD[opcode](place)
        before = snapshot(place.bench)
        place.bench.script.calls.clear()
        response = place.bench.send(request(CODES[opcode], payload, 9), room)
        assert response.used == 0
        assert snapshot(place.bench) == before
        assert not place.bench.script.calls


@pytest.mark.parametrize("opcode", [0, 2, 0x00FF, 0x0102, 0x0204, 0x0302, 0x0402, 0x0504, 0xDEAD, 0xFFFF])
def test_vq_009_unknown_opcode(opcode: str | int) -> None:
    place = make()
    before = snapshot(place.bench)
    assert opcode not in NAMES
    assert place.bench.send(request(int(opcode), bytes(8), 9))[:2] == (16, UNSUPPORTED)
    assert place.bench.send(request(int(opcode), b"", 9), 16)[:2] == (16, UNSUPPORTED)
    assert snapshot(place.bench) == before


@pytest.mark.parametrize(
    ("opcode", "payload"),
    [
        ("ALLOCATE_BUFFER", lambda p: allocate(p.other.context)),
        ("LOAD_PROGRAM", lambda p: load(p.other.context, XOR.pack())),
        ("CREATE_QUEUE", lambda p: u64(p.other.context) + u64(0)),
    ],
)
def test_children_per_context_are_limited(opcode: str, payload: Payload) -> None:
    place = make()
    while (status := place.bench.status(opcode, payload(place))) == 0:
        pass
    assert status == RESOURCE_LIMIT
    calls = len(place.bench.script.calls)
    assert place.bench.status(opcode, payload(place)) == RESOURCE_LIMIT
    assert len(place.bench.script.calls) == calls, "a full quota does not reach the backend"


def test_events_per_context_are_limited() -> None:
    bench = Bench(config=CONFIG, info=replace(INFO, limits=LIMITS))
    here = world(bench)
    events = [bench.made("SUBMIT", here.submission()) for _ in range(2)]
    assert bench.status("SUBMIT", here.submission()) == RESOURCE_LIMIT
    bench.ok("DESTROY_EVENT", u64(events[0]))
    bench.made("SUBMIT", here.submission())
