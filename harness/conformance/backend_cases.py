"""Every promise of the backend contract (device/backend.py), one case each: BC-."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from virtaccel.device.backend import BackendError, Binding, BufferRequest, Loading, Polled, Rejected, ReleaseRejected
from virtaccel.device.config import check_info
from virtaccel.device.errors import ConfigError
from virtaccel.device.wire import Access, Capability, EventState, Status
from virtaccel.harness.conformance.backend_bench import (
    DOMAINS,
    PATIENCE,
    PLAIN_USE,
    Bench,
    Prompt,
    gone,
    refuses,
    rejects,
)
from virtaccel.harness.conformance.protocol_bench import Failed, NotShown

NO_FORMAT: Final = 0x7E57_7E57
MISFIT: Final = (Status.INVALID_ARGUMENT, Status.INCOMPATIBLE)
COMPLETE: Final = Polled(EventState.COMPLETE, Status.OK)


def _is(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Failed(otherwise)


# Identity and descriptors


def _info(bench: Bench) -> None:
    info = bench.backend.info
    try:
        check_info(info)
    except ConfigError as error:
        raise Failed(str(error)) from error
    _is(bench.backend.info == info, "info changes within one instance")


def _fileno(bench: Bench) -> None:
    fd = bench.backend.fileno()
    if fd is None:
        raise NotShown("nothing is ever pending")
    os.fstat(fd)
    bench.backend.acknowledge()
    _is(not select.select([fd], [], [], 0)[0], "the descriptor is readable although nothing has happened")


def _wait(bench: Bench) -> None:
    start = time.monotonic()
    bench.backend.wait(0.05)
    _is(time.monotonic() - start < 1.0, "wait outlasts its timeout")


# Memory


def _allocation(bench: Bench) -> None:
    for size in (1, 63, 64, 4096, 4097, 100_000):
        made = bench.backend.allocate_buffer(bench.context, BufferRequest(size, 64, bench.domain, PLAIN_USE))
        _is(made.allocation_bytes >= size, f"{made.allocation_bytes} bytes were allocated for {size}")
        _is(made.alignment >= 64, f"alignment {made.alignment} for 64")
        _is(made.direct, "a buffer for programs would be copied")
        _is(not any(bench.content(made.handle, size)), "a new buffer is not zeroed")
        gone(bench.backend.free_buffer(made.handle))


def _alignment(bench: Bench) -> None:
    for power in range(17):
        request = BufferRequest(100, 1 << power, bench.domain, PLAIN_USE)
        try:
            made = bench.backend.allocate_buffer(bench.context, request)
        except BackendError as error:
            refusals = (Status.UNSUPPORTED, Status.RESOURCE_LIMIT, Status.OUT_OF_MEMORY)
            _is(error.status in refusals, f"alignment {1 << power}: {error.status.name}")
            continue
        _is(made.alignment >= 1 << power, f"alignment {made.alignment} for {1 << power}")


def _domains(bench: Bench) -> None:
    for domain, capability in DOMAINS:
        if bench.backend.info.capabilities & capability:
            bench.backend.allocate_buffer(bench.context, BufferRequest(64, 64, domain, PLAIN_USE))


def _too_much(bench: Bench) -> None:
    request = BufferRequest(1 << 60, 64, bench.domain, PLAIN_USE)
    refusals = (Status.OUT_OF_MEMORY, Status.RESOURCE_LIMIT, Status.UNSUPPORTED)
    for _ in range(3):
        refuses("2**60 bytes", lambda: bench.backend.allocate_buffer(bench.context, request), *refusals)
    bench.buffer(64)


def _transfers(bench: Bench) -> None:
    data = bytes(range(1, 201))
    buffer = bench.buffer(256)
    pieces = [memoryview(data[:1]), memoryview(data[1:64]), memoryview(data[64:])]
    bench.backend.write_buffer(buffer, 17, pieces)
    first, second = bytearray(100), bytearray(156)
    bench.backend.read_buffer(buffer, 0, [memoryview(first), memoryview(second)])
    _is(bytes(first + second) == bytes(17) + data + bytes(39), "segments were not written or read one after another")
    bench.backend.write_buffer(buffer, 255, [memoryview(b"z")])
    _is(bench.content(buffer, 1, 255) == b"z", "the last byte cannot be written")


def _only_during_the_call(bench: Bench) -> None:
    source = bytearray(b"before")
    buffer = bench.buffer(64)
    bench.backend.write_buffer(buffer, 0, [memoryview(source)])
    source[:] = b"after!"
    _is(bench.content(buffer, 6) == b"before", "written bytes are looked at after the call")
    sink = bytearray(6)
    bench.backend.read_buffer(buffer, 0, [memoryview(sink)])
    bench.backend.write_buffer(buffer, 0, [memoryview(b"later!")])
    _is(sink == b"before", "read bytes change after the call")


def _never_another_owners(bench: Bench) -> None:
    for size in (64, 4096, 65536):
        for _ in range(4):
            buffer = bench.buffer(size, b"\xee" * size)
            gone(bench.backend.free_buffer(buffer))
            _is(not any(bench.content(bench.buffer(size), size)), "a buffer shows an earlier owner's bytes")


# Programs


def _load_copies(bench: Bench) -> None:
    sample = bench.sample()
    payload = bytearray(sample.artifact)
    half = len(payload) // 2
    pieces = [memoryview(payload)[:half], memoryview(payload)[half:]]
    outcome = bench.backend.load_program(bench.context, bench.artifact(sample, pieces))
    payload[:] = bytes(len(payload))
    program = bench.finish_load(outcome)
    gone(bench.backend.unload_program(program))


def _load_wakes(bench: Bench) -> None:
    fd = bench.backend.fileno()
    outcome = bench.backend.load_program(bench.context, bench.artifact(bench.sample()))
    if not isinstance(outcome, Loading):
        raise NotShown("loads end at once")
    if fd is None:
        raise Failed("loads take their time and there is no descriptor to wait for")
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        readable = select.select([fd], [], [], 1.0)[0]
        if readable:
            bench.backend.acknowledge()
        if bench.backend.poll_load(outcome.ticket) is not None:
            _is(bool(readable), "a load ended and the descriptor said nothing")
            return
    raise Failed("the descriptor never tells that a load has ended")


def _unknown_format(bench: Bench) -> None:
    sample = bench.sample()._replace(format=NO_FORMAT)
    refuses("a format nobody has", lambda: bench.load(sample), Status.UNSUPPORTED)


def _no_program(bench: Bench) -> None:
    sample = bench.sample()
    for junk in (bytes(64), b"\xff" * 200, sample.artifact[: len(sample.artifact) // 2]):
        none = sample._replace(artifact=junk)
        refuses("an artifact that is none", partial(bench.load, none), *MISFIT)
    gone(bench.backend.unload_program(bench.load(sample)))


def _abandon(bench: Bench) -> None:
    sample = bench.sample()
    outcome = bench.backend.load_program(bench.context, bench.artifact(sample))
    if not isinstance(outcome, Loading):
        raise NotShown("loads end at once")
    with Prompt("abandon_load"):
        bench.backend.abandon_load(outcome.ticket)
    gone(bench.backend.unload_program(bench.load(sample)))


# Submissions


def _computes(bench: Bench) -> None:
    sample = bench.sample()
    program, size = bench.load(sample), sample.bytes
    for round_ in range(3):
        data = bytes(round_ + index & 0xFF for index in range(size))
        source, target = bench.buffer(size + 8, data), bench.buffer(size + 8, b"\xa5" * (size + 8))
        event = bench.submit(program, bench.bindings(source, target, size))
        for _ in range(2):
            _is(bench.end(event) == COMPLETE, "a sound submission did not complete")
        result = bench.content(target, size + 8)
        wanted = bytes(byte ^ sample.operand for byte in data) + b"\xa5" * 8
        _is(result == wanted, f"{sample.name} gave {result.hex()} for {data.hex()}")
        _is(bench.content(source, size) == data, "an input was written")
        gone(bench.backend.destroy_event(event))
        gone(bench.backend.free_buffer(source))
        gone(bench.backend.free_buffer(target))
    gone(bench.backend.unload_program(program))


def _misfits(bench: Bench) -> None:
    sample = bench.sample()
    program, size = bench.load(sample), sample.bytes
    source, target = bench.buffer(2 * size), bench.buffer(2 * size)
    read, write = bench.bindings(source, target, size)
    for what, bindings in {
        "a slot too few": [read],
        "a slot too many": [read, write, Binding(source, size, size, 2, Access.READ)],
        "another slot": [read, write._replace(slot=5)],
        "an output bound for reading": [read, write._replace(access=Access.READ)],
        "an input bound for writing": [read._replace(access=Access.WRITE), write],
        "sizes that differ": [read, write._replace(bytes=size - 1)],
    }.items():
        rejects(what, bench.backend.submit(bench.queue, program, bindings, 0), *MISFIT)
    rejects("one range as input and output", bench.backend.submit(
        bench.queue, program, [read, write._replace(buffer=source)], 0), *MISFIT, Status.BUSY)  # fmt: skip
    bench.backend.write_buffer(source, 0, [memoryview(b"x")])
    bench.backend.write_buffer(target, 0, [memoryview(b"x")])
    event = bench.submit(program, [write, read])
    _is(bench.end(event) == COMPLETE, "bindings in another order did not complete")


def _never_waits(bench: Bench) -> None:
    sample = bench.slow()
    program = bench.load(sample)
    source, target = bench.buffer(sample.bytes), bench.buffer(sample.bytes)
    with Prompt("submit"):
        event = bench.submit(program, bench.bindings(source, target, sample.bytes))
    with Prompt("poll_event"):
        state = bench.backend.poll_event(event).state
    _is(state is EventState.PENDING, f"the slow program is {state.name} at once")
    with Prompt("a second submission"):
        rejects("a buffer that is being written", bench.backend.submit(
            bench.queue, program, bench.bindings(source, target, sample.bytes), 0), Status.BUSY)  # fmt: skip
    _is(bench.end(event).state is EventState.COMPLETE, "the slow program did not complete")


def _in_use(bench: Bench) -> None:
    running = bench.pending()
    backend = bench.backend
    with Prompt("transfers of buffers in use"):
        refuses(
            "writing an output in use", lambda: backend.write_buffer(running.target, 0, [memoryview(b"x")]), Status.BUSY
        )
        refuses(
            "writing an input in use", lambda: backend.write_buffer(running.source, 0, [memoryview(b"x")]), Status.BUSY
        )
        sink = memoryview(bytearray(4))
        refuses("reading an output in use", lambda: backend.read_buffer(running.target, 0, [sink]), Status.BUSY)
        backend.read_buffer(running.source, 0, [sink])
    bench.end(running.event)
    backend.write_buffer(running.target, 0, [memoryview(b"x")])
    backend.write_buffer(running.source, 0, [memoryview(b"x")])


def _shared_input(bench: Bench) -> None:
    running = bench.pending()
    other = bench.buffer(running.size)
    event = bench.submit(running.program, bench.bindings(running.source, other, running.size))
    _is(bench.end(event).state is EventState.COMPLETE, "a second reader of one input did not complete")
    _is(bench.end(running.event).state is EventState.COMPLETE, "the first reader did not complete")


def _cancels(bench: Bench) -> None:
    if not bench.backend.info.capabilities & Capability.EVENT_CANCELLATION:
        raise NotShown("no event cancellation")
    running = bench.pending()
    with Prompt("cancel_event"):
        bench.backend.cancel_event(running.event)
    cancelled = Polled(EventState.CANCELLED, Status.OK)
    _is(bench.backend.poll_event(running.event) == cancelled, "a cancelled event is not cancelled at once")
    refuses("a second cancel", lambda: bench.backend.cancel_event(running.event), Status.BUSY)
    bench.subject.let_end(bench.backend)
    time.sleep(0.05)
    _is(bench.backend.poll_event(running.event) == cancelled, "a terminal state changed")
    gone(bench.backend.destroy_event(running.event))


def _completion_wins(bench: Bench) -> None:
    if not bench.backend.info.capabilities & Capability.EVENT_CANCELLATION:
        raise NotShown("no event cancellation")
    sample = bench.sample()
    event = bench.submit(bench.load(sample), bench.bindings(bench.buffer(64), bench.buffer(64), sample.bytes))
    _is(bench.end(event) == COMPLETE, "a sound submission did not complete")
    refuses("cancelling a complete event", lambda: bench.backend.cancel_event(event), Status.BUSY)
    _is(bench.backend.poll_event(event) == COMPLETE, "a terminal state changed")


def _busy_until_stopped(bench: Bench) -> None:
    """After a cancel the buffers stay in use until the work has really stopped; freeing one then is safe."""
    if not bench.backend.info.capabilities & Capability.EVENT_CANCELLATION:
        raise NotShown("no event cancellation")
    running = bench.pending()
    bench.backend.cancel_event(running.event)
    gone(bench.backend.destroy_event(running.event))
    until = time.monotonic() + PATIENCE
    while True:
        try:
            bench.backend.write_buffer(running.target, 0, [memoryview(b"mine")])
            break
        except BackendError as error:
            _is(error.status is Status.BUSY, f"writing after a cancel: {error.status.name}")
            _is(time.monotonic() < until, "a buffer is never free again after a cancel")
            time.sleep(0.01)
    time.sleep(0.1)
    _is(bench.content(running.target, 4) == b"mine", "work that was cancelled wrote into a buffer that was free again")


def _free_while_stopping(bench: Bench) -> None:
    if not bench.backend.info.capabilities & Capability.EVENT_CANCELLATION:
        raise NotShown("no event cancellation")
    running = bench.pending()
    bench.backend.cancel_event(running.event)
    gone(bench.backend.destroy_event(running.event))
    with Prompt("free_buffer"):
        outcome = bench.backend.free_buffer(running.target)
    _is(not isinstance(outcome, ReleaseRejected) or outcome.status is Status.BUSY, f"freeing after a cancel: {outcome}")
    other = bench.buffer(running.size)
    time.sleep(0.2)
    _is(not any(bench.content(other, running.size)), "cancelled work wrote into another buffer")


def _deadline(bench: Bench) -> None:
    if not bench.subject.deadlines:
        raise NotShown("the backend keeps no time")
    sample = bench.slow()
    program = bench.load(sample)
    source, target = bench.buffer(sample.bytes), bench.buffer(sample.bytes)
    outcome = bench.backend.submit(bench.queue, program, bench.bindings(source, target, sample.bytes), 1)
    if isinstance(outcome, Rejected):
        _is(outcome.status is Status.DEADLINE_EXPIRED, f"a timeout of 1 ns: {outcome}")
        return
    start = time.monotonic()
    polled = bench.end(outcome.event)
    expired = Polled(EventState.FAILED, Status.DEADLINE_EXPIRED)
    _is(polled == expired, f"a timeout of 1 ns on a slow program: {polled}")
    _is(time.monotonic() - start < PATIENCE / 2, "an expired event is told late")
    _is(bench.backend.poll_event(outcome.event) == expired, "a terminal state changed")


# Endings


def _releases(bench: Bench) -> None:
    backend = bench.backend
    contexts = [backend.create_context() for _ in range(3)]
    _is(len({id(one) for one in contexts}) == 3, "two contexts share a handle")
    for context in contexts:
        queue = backend.create_queue(context)
        gone(backend.destroy_queue(queue))
        gone(backend.destroy_context(context))


def _closes(bench: Bench) -> None:
    bench.buffer(4096, b"live when the backend closes" * 100)
    if bench.subject.slow is not None:
        bench.start_slow()
    with Prompt("close"):
        bench.close()


def _instances_apart(bench: Bench) -> None:
    other = Bench(bench.subject)
    try:
        here, there = bench.buffer(64, b"a" * 64), other.buffer(64, b"b" * 64)
        _is(bench.content(here, 64) == b"a" * 64, "two instances share memory")
        bench.close()
        _is(other.content(there, 64) == b"b" * 64, "closing one instance ended another")
        sample = other.sample()
        event = other.submit(other.load(sample), other.bindings(there, other.buffer(64), sample.bytes))
        _is(other.end(event) == COMPLETE, "closing one instance stopped another")
    finally:
        other.close()


class Case(NamedTuple):
    """One promise."""

    name: str
    asserts: str
    show: Callable[[Bench], None]


_PROMISES: Final = (
    ("info is stable and such that protocol 1.0 can carry it", _info),
    ("fileno is quiet when nothing has happened", _fileno),
    ("wait keeps to its timeout", _wait),
    ("an allocation is zeroed, large enough, aligned and direct", _allocation),
    ("every power of two is honoured as an alignment, or refused", _alignment),
    ("every advertised memory domain can be had", _domains),
    ("too large an allocation is refused and keeps nothing", _too_much),
    ("transfers cover segments and any range", _transfers),
    ("segments are used during the call only", _only_during_the_call),
    ("a buffer never shows an earlier owner's bytes", _never_another_owners),
    ("load_program copies its payload before it returns", _load_copies),
    ("fileno tells that a load has ended", _load_wakes),
    ("an unknown format is UNSUPPORTED", _unknown_format),
    ("what is no program is refused, and nothing is kept", _no_program),
    ("abandon_load never waits", _abandon),
    ("a submission computes in the bound memory and nowhere else", _computes),
    ("bindings that do not fit are rejected, and nothing is kept", _misfits),
    ("submit and poll_event never wait", _never_waits),
    ("buffers in use are BUSY, inputs may be read", _in_use),
    ("one input serves several submissions", _shared_input),
    ("cancel is immediate, and its state is the last", _cancels),
    ("cancel is BUSY once completion has won", _completion_wins),
    ("buffers stay in use until cancelled work has stopped", _busy_until_stopped),
    ("freeing under cancelled work harms nobody", _free_while_stopping),
    ("an expired deadline ends the event as failed", _deadline),
    ("releases of idle objects succeed", _releases),
    ("close does not wait for running work", _closes),
    ("instances are apart", _instances_apart),
)
CASES: Final = tuple(Case(f"BC-{number:02}", text, show) for number, (text, show) in enumerate(_PROMISES, 1))
