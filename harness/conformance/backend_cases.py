"""Every promise of the backend contract (device/backend.py), one case each: BC-."""

from __future__ import annotations

import os
import select
import time
from functools import partial
from typing import Final

from virtaccel.device.backend import BackendError, Binding, BufferRequest, Loading, Polled, Rejected, ReleaseRejected
from virtaccel.device.config import check_info
from virtaccel.device.errors import ConfigError
from virtaccel.device.wire import Access, Capability, EventState, Status
from virtaccel.harness.conformance.backend_test_bed import (
    DOMAINS,
    PATIENCE,
    PLAIN_USE,
    BackendTestBed,
    Prompt,
    gone,
    refuses,
    rejects,
)
from virtaccel.harness.conformance.outcome import Case, Failed, NotShown, must

NO_FORMAT: Final = 0x7E57_7E57  # nobody's
# The contract leaves open which of the two a misfit is.
MISFIT: Final = (Status.INVALID_ARGUMENT, Status.INCOMPATIBLE)
COMPLETE: Final = Polled(EventState.COMPLETE, Status.OK)


# Identity and descriptors


def _info(bed: BackendTestBed) -> None:
    info = bed.backend.info
    try:
        check_info(info)
    except ConfigError as error:
        raise Failed(str(error)) from error
    must(bed.backend.info == info, "info changes within one instance")


def _fileno(bed: BackendTestBed) -> None:
    fd = bed.backend.fileno()
    if fd is None:
        raise NotShown("nothing is ever pending")
    os.fstat(fd)
    bed.backend.acknowledge()
    must(not select.select([fd], [], [], 0)[0], "the descriptor is readable although nothing has happened")


def _wait(bed: BackendTestBed) -> None:
    start = time.monotonic()
    bed.backend.wait(0.05)
    must(time.monotonic() - start < 1.0, "wait outlasts its timeout")


# Memory


def _allocation(bed: BackendTestBed) -> None:
    for size in (1, 63, 64, 4096, 4097, 100_000):
        made = bed.backend.allocate_buffer(bed.context, BufferRequest(size, 64, bed.domain, PLAIN_USE))
        must(made.allocation_bytes >= size, f"{made.allocation_bytes} bytes were allocated for {size}")
        must(made.alignment >= 64, f"alignment {made.alignment} for 64")
        must(made.direct, "a buffer for programs would be copied")
        must(not any(bed.content(made.handle, size)), "a new buffer is not zeroed")
        gone(bed.backend.free_buffer(made.handle))


def _alignment(bed: BackendTestBed) -> None:
    for power in range(17):
        request = BufferRequest(100, 1 << power, bed.domain, PLAIN_USE)
        try:
            made = bed.backend.allocate_buffer(bed.context, request)
        except BackendError as error:
            refusals = (Status.UNSUPPORTED, Status.RESOURCE_LIMIT, Status.OUT_OF_MEMORY)
            must(error.status in refusals, f"alignment {1 << power}: {error.status.name}")
            continue
        must(made.alignment >= 1 << power, f"alignment {made.alignment} for {1 << power}")


def _domains(bed: BackendTestBed) -> None:
    for domain, capability in DOMAINS:
        if bed.backend.info.capabilities & capability:
            bed.backend.allocate_buffer(bed.context, BufferRequest(64, 64, domain, PLAIN_USE))


def _too_much(bed: BackendTestBed) -> None:
    request = BufferRequest(1 << 60, 64, bed.domain, PLAIN_USE)
    refusals = (Status.OUT_OF_MEMORY, Status.RESOURCE_LIMIT, Status.UNSUPPORTED)
    for _ in range(3):
        refuses("2**60 bytes", lambda: bed.backend.allocate_buffer(bed.context, request), *refusals)
    bed.buffer(64)


def _transfers(bed: BackendTestBed) -> None:
    data = bytes(range(1, 201))
    buffer = bed.buffer(256)
    pieces = [memoryview(data[:1]), memoryview(data[1:64]), memoryview(data[64:])]
    bed.backend.write_buffer(buffer, 17, pieces)
    first, second = bytearray(100), bytearray(156)
    bed.backend.read_buffer(buffer, 0, [memoryview(first), memoryview(second)])
    must(bytes(first + second) == bytes(17) + data + bytes(39), "segments were not written or read one after another")
    bed.backend.write_buffer(buffer, 255, [memoryview(b"z")])
    must(bed.content(buffer, 1, 255) == b"z", "the last byte cannot be written")


def _only_during_the_call(bed: BackendTestBed) -> None:
    source = bytearray(b"before")
    buffer = bed.buffer(64)
    bed.backend.write_buffer(buffer, 0, [memoryview(source)])
    source[:] = b"after!"
    must(bed.content(buffer, 6) == b"before", "written bytes are looked at after the call")
    sink = bytearray(6)
    bed.backend.read_buffer(buffer, 0, [memoryview(sink)])
    bed.backend.write_buffer(buffer, 0, [memoryview(b"later!")])
    must(sink == b"before", "read bytes change after the call")


def _never_another_owners(bed: BackendTestBed) -> None:
    for size in (64, 4096, 65536):
        for _ in range(4):
            buffer = bed.buffer(size, b"\xee" * size)
            gone(bed.backend.free_buffer(buffer))
            must(not any(bed.content(bed.buffer(size), size)), "a buffer shows an earlier owner's bytes")


# Programs


def _load_copies(bed: BackendTestBed) -> None:
    sample = bed.sample()
    payload = bytearray(sample.artifact)
    half = len(payload) // 2
    pieces = [memoryview(payload)[:half], memoryview(payload)[half:]]
    outcome = bed.backend.load_program(bed.context, bed.artifact(sample, pieces))
    payload[:] = bytes(len(payload))
    program = bed.finish_load(outcome)
    gone(bed.backend.unload_program(program))


def _load_wakes(bed: BackendTestBed) -> None:
    fd = bed.backend.fileno()
    outcome = bed.backend.load_program(bed.context, bed.artifact(bed.sample()))
    if not isinstance(outcome, Loading):
        raise NotShown("loads end at once")
    if fd is None:
        raise Failed("loads take their time and there is no descriptor to wait for")
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        readable = select.select([fd], [], [], 1.0)[0]
        if readable:
            bed.backend.acknowledge()
        if bed.backend.poll_load(outcome.ticket) is not None:
            must(bool(readable), "a load ended and the descriptor said nothing")
            return
    raise Failed("the descriptor never tells that a load has ended")


def _unknown_format(bed: BackendTestBed) -> None:
    sample = bed.sample()._replace(format=NO_FORMAT)
    refuses("a format nobody has", lambda: bed.load(sample), Status.UNSUPPORTED)


def _no_program(bed: BackendTestBed) -> None:
    sample = bed.sample()
    for junk in (bytes(64), b"\xff" * 200, sample.artifact[: len(sample.artifact) // 2]):
        none = sample._replace(artifact=junk)
        refuses("an artifact that is none", partial(bed.load, none), *MISFIT)
    gone(bed.backend.unload_program(bed.load(sample)))


def _abandon(bed: BackendTestBed) -> None:
    sample = bed.sample()
    outcome = bed.backend.load_program(bed.context, bed.artifact(sample))
    if not isinstance(outcome, Loading):
        raise NotShown("loads end at once")
    with Prompt("abandon_load"):
        bed.backend.abandon_load(outcome.ticket)
    gone(bed.backend.unload_program(bed.load(sample)))


# Submissions


def _computes(bed: BackendTestBed) -> None:
    sample = bed.sample()
    program, size = bed.load(sample), sample.bytes
    for round_ in range(3):
        data = bytes(round_ + index & 0xFF for index in range(size))
        source, target = bed.buffer(size + 8, data), bed.buffer(size + 8, b"\xa5" * (size + 8))
        event = bed.submit(program, bed.bindings(source, target, size))
        for _ in range(2):
            must(bed.end(event) == COMPLETE, "a sound submission did not complete")
        result = bed.content(target, size + 8)
        wanted = bytes(byte ^ sample.operand for byte in data) + b"\xa5" * 8
        must(result == wanted, f"{sample.name} gave {result.hex()} for {data.hex()}")
        must(bed.content(source, size) == data, "an input was written")
        gone(bed.backend.destroy_event(event))
        gone(bed.backend.free_buffer(source))
        gone(bed.backend.free_buffer(target))
    gone(bed.backend.unload_program(program))


def _misfits(bed: BackendTestBed) -> None:
    sample = bed.sample()
    program, size = bed.load(sample), sample.bytes
    source, target = bed.buffer(2 * size), bed.buffer(2 * size)
    read, write = bed.bindings(source, target, size)
    for what, bindings in {
        "a slot too few": [read],
        "a slot too many": [read, write, Binding(source, size, size, 2, Access.READ)],
        "another slot": [read, write._replace(slot=5)],
        "an output bound for reading": [read, write._replace(access=Access.READ)],
        "an input bound for writing": [read._replace(access=Access.WRITE), write],
        "sizes that differ": [read, write._replace(bytes=size - 1)],
    }.items():
        rejects(what, bed.backend.submit(bed.queue, program, bindings, 0), *MISFIT)
    rejects("one range as input and output", bed.backend.submit(
        bed.queue, program, [read, write._replace(buffer=source)], 0), *MISFIT, Status.BUSY)  # fmt: skip
    bed.backend.write_buffer(source, 0, [memoryview(b"x")])
    bed.backend.write_buffer(target, 0, [memoryview(b"x")])
    event = bed.submit(program, [write, read])
    must(bed.end(event) == COMPLETE, "bindings in another order did not complete")


def _never_waits(bed: BackendTestBed) -> None:
    sample = bed.slow()
    program = bed.load(sample)
    source, target = bed.buffer(sample.bytes), bed.buffer(sample.bytes)
    with Prompt("submit"):
        event = bed.submit(program, bed.bindings(source, target, sample.bytes))
    with Prompt("poll_event"):
        state = bed.backend.poll_event(event).state
    must(state is EventState.PENDING, f"the slow program is {state.name} at once")
    with Prompt("a second submission"):
        rejects("a buffer that is being written", bed.backend.submit(
            bed.queue, program, bed.bindings(source, target, sample.bytes), 0), Status.BUSY)  # fmt: skip
    must(bed.end(event).state is EventState.COMPLETE, "the slow program did not complete")


def _in_use(bed: BackendTestBed) -> None:
    running = bed.pending()
    backend = bed.backend
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
    bed.end(running.event)
    backend.write_buffer(running.target, 0, [memoryview(b"x")])
    backend.write_buffer(running.source, 0, [memoryview(b"x")])


def _shared_input(bed: BackendTestBed) -> None:
    running = bed.pending()
    other = bed.buffer(running.size)
    event = bed.submit(running.program, bed.bindings(running.source, other, running.size))
    must(bed.end(event).state is EventState.COMPLETE, "a second reader of one input did not complete")
    must(bed.end(running.event).state is EventState.COMPLETE, "the first reader did not complete")


def _cancellable(bed: BackendTestBed) -> BackendTestBed:
    if not bed.backend.info.capabilities & Capability.EVENT_CANCELLATION:
        raise NotShown("no event cancellation")
    return bed


def _cancels(bed: BackendTestBed) -> None:
    running = _cancellable(bed).pending()
    with Prompt("cancel_event"):
        bed.backend.cancel_event(running.event)
    cancelled = Polled(EventState.CANCELLED, Status.OK)
    must(bed.backend.poll_event(running.event) == cancelled, "a cancelled event is not cancelled at once")
    refuses("a second cancel", lambda: bed.backend.cancel_event(running.event), Status.BUSY)
    bed.subject.let_end(bed.backend)
    time.sleep(0.05)
    must(bed.backend.poll_event(running.event) == cancelled, "a terminal state changed")
    gone(bed.backend.destroy_event(running.event))


def _completion_wins(bed: BackendTestBed) -> None:
    sample = _cancellable(bed).sample()
    event = bed.submit(bed.load(sample), bed.bindings(bed.buffer(64), bed.buffer(64), sample.bytes))
    must(bed.end(event) == COMPLETE, "a sound submission did not complete")
    refuses("cancelling a complete event", lambda: bed.backend.cancel_event(event), Status.BUSY)
    must(bed.backend.poll_event(event) == COMPLETE, "a terminal state changed")


def _busy_until_stopped(bed: BackendTestBed) -> None:
    """After a cancel the buffers stay in use until the work has really stopped; freeing one then is safe."""
    running = _cancellable(bed).pending()
    bed.backend.cancel_event(running.event)
    gone(bed.backend.destroy_event(running.event))
    until = time.monotonic() + PATIENCE
    while True:
        try:
            bed.backend.write_buffer(running.target, 0, [memoryview(b"mine")])
            break
        except BackendError as error:
            must(error.status is Status.BUSY, f"writing after a cancel: {error.status.name}")
            must(time.monotonic() < until, "a buffer is never free again after a cancel")
            time.sleep(0.01)
    time.sleep(0.1)
    must(bed.content(running.target, 4) == b"mine", "work that was cancelled wrote into a buffer that was free again")


def _free_while_stopping(bed: BackendTestBed) -> None:
    running = _cancellable(bed).pending()
    bed.backend.cancel_event(running.event)
    gone(bed.backend.destroy_event(running.event))
    with Prompt("free_buffer"):
        outcome = bed.backend.free_buffer(running.target)
    must(
        not isinstance(outcome, ReleaseRejected) or outcome.status is Status.BUSY, f"freeing after a cancel: {outcome}"
    )
    other = bed.buffer(running.size)
    time.sleep(0.2)
    must(not any(bed.content(other, running.size)), "cancelled work wrote into another buffer")


def _deadline(bed: BackendTestBed) -> None:
    if not bed.subject.deadlines:
        raise NotShown("the backend keeps no time")
    sample = bed.slow()
    program = bed.load(sample)
    source, target = bed.buffer(sample.bytes), bed.buffer(sample.bytes)
    outcome = bed.backend.submit(bed.queue, program, bed.bindings(source, target, sample.bytes), 1)
    if isinstance(outcome, Rejected):
        must(outcome.status is Status.DEADLINE_EXPIRED, f"a timeout of 1 ns: {outcome}")
        return
    start = time.monotonic()
    polled = bed.end(outcome.event)
    expired = Polled(EventState.FAILED, Status.DEADLINE_EXPIRED)
    must(polled == expired, f"a timeout of 1 ns on a slow program: {polled}")
    must(time.monotonic() - start < PATIENCE / 2, "an expired event is told late")
    must(bed.backend.poll_event(outcome.event) == expired, "a terminal state changed")


# Endings


def _releases(bed: BackendTestBed) -> None:
    backend = bed.backend
    contexts = [backend.create_context() for _ in range(3)]
    must(len({id(one) for one in contexts}) == 3, "two contexts share a handle")
    for context in contexts:
        queue = backend.create_queue(context)
        gone(backend.destroy_queue(queue))
        gone(backend.destroy_context(context))


def _closes(bed: BackendTestBed) -> None:
    bed.buffer(4096, b"live when the backend closes" * 100)
    if bed.subject.slow is not None:
        bed.start_slow()
    with Prompt("close"):
        bed.close()


def _instances_apart(bed: BackendTestBed) -> None:
    other = BackendTestBed(bed.subject)
    try:
        here, there = bed.buffer(64, b"a" * 64), other.buffer(64, b"b" * 64)
        must(bed.content(here, 64) == b"a" * 64, "two instances share memory")
        bed.close()
        must(other.content(there, 64) == b"b" * 64, "closing one instance ended another")
        sample = other.sample()
        event = other.submit(other.load(sample), other.bindings(there, other.buffer(64), sample.bytes))
        must(other.end(event) == COMPLETE, "closing one instance stopped another")
    finally:
        other.close()


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
