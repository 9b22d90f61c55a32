"""Cases of configuration, frames and objects: OB- (specification.md 4 to 9) and WA- (wire-abi.md 2 to 6).

Written from the standard's text, one case a paragraph. Standard library only.
"""

from __future__ import annotations

from typing import Final

from virtaccel.harness.conformance.outcome import Case, NotShown, must
from virtaccel.harness.conformance.test_bed import TestBed
from virtaccel.harness.oracle import frames as p
from virtaccel.harness.oracle.frames import say, u64

MAX: Final = (1 << 64) - 1


def _config(bed: TestBed) -> None:
    config = bed.config
    major, minor = config.protocol_major, config.protocol_minor
    must((major, minor) == (1, 0), f"version {major}.{minor}")
    must(config.command_queue_count == 1, f"{config.command_queue_count} command queues")
    must(2 <= config.max_chain_descriptors <= 256, f"max_chain_descriptors {config.max_chain_descriptors}")
    must(97 <= config.max_request_bytes <= 16 << 20, f"max_request_bytes {config.max_request_bytes}")
    must(92 <= config.max_response_bytes <= 16 << 20, f"max_response_bytes {config.max_response_bytes}")


def _info(bed: TestBed) -> None:
    first, second = bed.ok(p.INFO).payload, bed.ok(p.INFO).payload
    must(first == second, "GET_DEVICE_INFO changes from one time to the next")
    faults = bed.info.faults()
    must(not faults, "; ".join(faults))


def _scalars(bed: TestBed) -> None:
    world = bed.world()
    context, source = world.context, world.source
    bed.refuses_each(p.CREATE_CONTEXT, p.INVALID_ARGUMENT, {"a reserved word": bytes(4) + b"\1\0\0\0"})
    bed.refuses_each(p.CREATE_QUEUE, p.INVALID_ARGUMENT, {"a reserved word": u64(context) + bytes(4) + b"\0\0\0\1"})
    bed.refuses_each(p.ALLOCATE, p.INVALID_ARGUMENT, {
        **{f"reserved byte {at}": bed.allocation(context, reserved=(1 << 8 * at).to_bytes(7, "little"))
           for at in range(7)},
        "a reserved word": bed.allocation(context, tail=1),
        **{f"memory domain {unknown}": bed.allocation(context, domain=unknown) for unknown in (0, 4, 255)},
        **{f"alignment {odd}": bed.allocation(context, alignment=odd) for odd in (0, 3, 48, MAX)},
        "a buffer of no bytes": bed.allocation(context, 0), "a buffer of no use": bed.allocation(context, 64, 0),
    })  # fmt: skip
    bed.refuses_each(p.READ, p.INVALID_ARGUMENT, {
        "no bytes": p.transfer(source, 0, 0), "a range that overflows": p.transfer(source, MAX, 1),
    })  # fmt: skip
    bed.refuses_each(p.WRITE, p.INVALID_ARGUMENT, {
        "data longer than said": p.transfer(source, 0, 4) + bytes(5),
        "data shorter than said": p.transfer(source, 0, 4) + bytes(3),
    })  # fmt: skip
    bed.refuses_each(p.ALLOCATE, p.UNSUPPORTED, {
        f"domain {domain} without its capability": bed.allocation(context, domain=domain)
        for domain, bit in p.DOMAIN_CAPABILITY.items() if not bed.info.capabilities & bit
    })  # fmt: skip


def _zero_ids(bed: TestBed) -> None:
    bad = (p.INVALID_ARGUMENT,)
    for opcode in (p.DESTROY_CONTEXT, p.FREE, p.UNLOAD, p.DESTROY_QUEUE, p.POLL, p.DESTROY_EVENT):
        bed.refuses(f"object 0 in command {opcode:#06x}", opcode, bytes(8), *bad)
    bed.refuses("context 0 of a buffer", p.ALLOCATE, bed.allocation(0, 64), *bad)
    bed.refuses("context 0 of a queue", p.CREATE_QUEUE, bytes(16), *bad)
    bed.refuses("buffer 0", p.READ, p.transfer(0, 0, 8), *bad)
    answer = bed.send(p.frame(p.INFO, request_id=0))
    must(answer.status == p.INVALID_ARGUMENT, f"request ID 0: {say(answer.status)}")


def _stale_ids(bed: TestBed) -> None:
    world = bed.world()
    stale = (p.STALE_OBJECT,)
    kinds = {
        p.DESTROY_CONTEXT: world.context, p.FREE: world.source, p.DESTROY_QUEUE: world.queue, p.UNLOAD: world.program,
    }  # fmt: skip
    for opcode in (*kinds, p.POLL, p.DESTROY_EVENT):
        for own, object_id in kinds.items():
            if own != opcode and object_id:
                bed.refuses(f"another kind's ID in command {opcode:#06x}", opcode, u64(object_id), *stale)
        for bit in (0, 17, 40, 63):
            bed.refuses(f"a made-up ID in command {opcode:#06x}", opcode, u64(0x0BAD_0000_0000_0BAD ^ 1 << bit), *stale)
    bed.ok(p.FREE, u64(world.source))
    bed.refuses("a freed buffer", p.FREE, u64(world.source), *stale)
    bed.refuses("a freed buffer", p.READ, p.transfer(world.source, 0, 8), *stale)
    new = bed.buffer(world.context)
    must(new != world.source, "an ID was given to a second object")
    bed.refuses("a freed buffer whose place was taken", p.READ, p.transfer(world.source, 0, 8), *stale)


def _ranges(bed: TestBed) -> None:
    context = bed.context()
    buffer = bed.buffer(context, 64)
    for offset, size in ((0, 65), (64, 1), (1, 64), (63, 2), (1 << 40, 1), (MAX - 8, 8)):
        # The answer to a larger transfer may not fit into any response either.
        what, statuses = f"{size} bytes at {offset} of 64", (p.OUT_OF_BOUNDS, p.RESOURCE_LIMIT)
        bed.refuses(what, p.READ, p.transfer(buffer, offset, size), *statuses)
    bed.refuses("2 bytes at 63 of 64", p.WRITE, p.transfer(buffer, 63, 2) + b"ab", p.OUT_OF_BOUNDS)
    bed.ok(p.WRITE, p.transfer(buffer, 63, 1) + b"z")
    content = bed.ok(p.READ, p.transfer(buffer, 0, 64)).payload
    must(content == bytes(63) + b"z", "a buffer does not hold what was written")


def _usage(bed: TestBed) -> None:
    context = bed.context()
    source, destination = bed.buffer(context, 64, p.SOURCE), bed.buffer(context, 64, p.DESTINATION)
    bed.ok(p.READ, p.transfer(source, 0, 8))
    bed.ok(p.WRITE, p.transfer(destination, 0, 8) + bytes(8))
    bed.refuses("writing a transfer source", p.WRITE, p.transfer(source, 0, 8) + bytes(8), p.PERMISSION_DENIED)
    bed.refuses("reading a transfer destination", p.READ, p.transfer(destination, 0, 8), p.PERMISSION_DENIED)


def _zeroed(bed: TestBed) -> None:
    context = bed.context()
    for _ in range(4):
        buffer = bed.buffer(context, 4096)
        for start in range(0, 4096, 1024):
            content = bed.ok(p.READ, p.transfer(buffer, start, 1024), room=(1040,)).payload
            must(not any(content), "a new buffer is not zeroed")
            bed.ok(p.WRITE, p.transfer(buffer, start, 1024) + b"\xff" * 1024)
        bed.ok(p.FREE, u64(buffer))


def _limits(bed: TestBed) -> None:
    limit = bed.info.contexts
    if limit > 4096:
        raise NotShown(f"{limit} contexts are too many to make")
    contexts = [bed.context() for _ in range(limit)]
    bed.refuses("one context more than the limit", p.CREATE_CONTEXT, bytes(8), p.RESOURCE_LIMIT)
    bed.ok(p.DESTROY_CONTEXT, u64(contexts[0]))
    contexts[0] = bed.context()
    must(len(set(contexts)) == limit, "two contexts have one ID")
    size = bed.info.buffer_bytes + 1
    if size <= MAX:
        bed.refuses("a buffer above the limit", p.ALLOCATE, bed.allocation(contexts[0], size), p.RESOURCE_LIMIT)


def _children(bed: TestBed) -> None:
    world = bed.world()
    children = [(p.FREE, world.source), (p.FREE, world.target), (p.DESTROY_QUEUE, world.queue)]
    children += [(p.UNLOAD, world.program)] if world.program else []
    for opcode, object_id in children:
        bed.refuses("a context with children", p.DESTROY_CONTEXT, u64(world.context), p.BUSY)
        bed.ok(opcode, u64(object_id))
    bed.ok(p.DESTROY_CONTEXT, u64(world.context))
    bed.refuses("a destroyed context", p.DESTROY_CONTEXT, u64(world.context), p.STALE_OBJECT)


def _bindings(bed: TestBed) -> None:
    sample = bed.program_of()
    world, size = bed.world(), sample.bytes
    good = (p.binding(world.source, 0, 1, size), p.binding(world.target, 1, 2, size))

    def refused(what: str, status: int, *bindings: bytes, count: int | None = None) -> None:
        bed.refuses(what, p.SUBMIT, p.submission(world.queue, world.program, *bindings, count=count), status)

    refused("no bindings", p.INVALID_ARGUMENT)
    refused("a count that lies", p.INVALID_ARGUMENT, *good, count=1)
    refused("a count beyond the limit", p.RESOURCE_LIMIT, *good, count=bed.info.bindings + 1)
    refused("a count of 2**32-1", p.RESOURCE_LIMIT, *good, count=0xFFFFFFFF)
    refused("a slot bound twice", p.INVALID_ARGUMENT, good[0], p.binding(world.target, 0, 2, size))
    for access in (0, 4, 255):
        refused(f"access {access}", p.INVALID_ARGUMENT, good[0], p.binding(world.target, 1, access, size))
    refused("a reserved byte", p.INVALID_ARGUMENT, good[0], p.binding(world.target, 1, 2, size, reserved=b"\0\0\1"))
    refused("an empty range", p.INVALID_ARGUMENT, good[0], p.binding(world.target, 1, 2, 0))
    refused("a range that overflows", p.INVALID_ARGUMENT, good[0], p.binding(world.target, 1, 2, 8, offset=MAX))
    refused("buffer 0", p.INVALID_ARGUMENT, good[0], p.binding(0, 1, 2, size))
    refused("a range outside its buffer", p.OUT_OF_BOUNDS, good[0], p.binding(world.target, 1, 2, size, offset=64))
    refused("a stale buffer", p.STALE_OBJECT, good[0], p.binding(world.queue, 1, 2, size))
    only_in = bed.buffer(world.context, 64, p.INPUT | p.DESTINATION)
    refused("writing a program input", p.PERMISSION_DENIED, good[0], p.binding(only_in, 1, 2, size))
    refused("read and write without mutable state", p.PERMISSION_DENIED, good[0], p.binding(world.target, 1, 3, size))


def _contexts_apart(bed: TestBed) -> None:
    size = bed.program_of().bytes
    one, two = bed.world(), bed.world()
    for what, queue, program, source in (
        ("a buffer", one.queue, one.program, two.source), ("a program", one.queue, two.program, one.source),
        ("a queue", two.queue, one.program, one.source),
    ):  # fmt: skip
        body = p.submission(queue, program, p.binding(source, 0, 1, size), p.binding(one.target, 1, 2, size))
        bed.refuses(f"{what} of another context", p.SUBMIT, body, p.STALE_OBJECT)


def _cancel(bed: TestBed) -> None:
    event = bed.ok(p.SUBMIT, bed.submitted(bed.world())).id
    if not bed.info.capabilities & p.CANCELLATION:
        bed.refuses("cancellation without its capability", p.CANCEL, u64(event), p.UNSUPPORTED)
        return
    cancelled = bed.call(p.CANCEL, u64(event))
    state, _ = bed.terminal(event)
    if cancelled.status == p.OK:
        must(state == p.CANCELLED, f"a cancelled event is in state {state}")
    else:
        must(cancelled.status == p.BUSY and state != p.CANCELLED, f"{say(cancelled.status)} and state {state}")
    bed.refuses("cancelling a terminal event", p.CANCEL, u64(event), p.BUSY)
    bed.ok(p.DESTROY_EVENT, u64(event))
    bed.refuses("a destroyed event", p.POLL, u64(event), p.STALE_OBJECT)


def _programs(bed: TestBed) -> None:
    sample = bed.program_of()
    context = bed.context()
    bad = (p.INVALID_ARGUMENT,)
    bed.refuses("format 0", p.LOAD, p.load(context, sample._replace(format=0)), *bad)
    bed.refuses("payload_bytes 0", p.LOAD, p.load(context, sample, size=0), *bad)
    bed.refuses("payload_bytes above the tail", p.LOAD, p.load(context, sample, size=len(sample.artifact) + 1), *bad)
    bed.refuses("resident_bytes 0", p.LOAD, p.load(context, sample, resident=0), *bad)
    refusals = (p.UNSUPPORTED, p.INCOMPATIBLE, p.INVALID_ARGUMENT)
    bed.refuses("a format nobody has", p.LOAD, p.load(context, sample._replace(format=0x7E57_7E57)), *refusals)
    junk = sample._replace(artifact=bytes(64))
    bed.refuses("an artifact of zeros", p.LOAD, p.load(context, junk), *refusals)
    bed.ok(p.UNLOAD, u64(bed.made(p.LOAD, p.load(context, sample))))


CASES: Final = (
    Case("WA-2", "the configuration is one of protocol 1.0", _config),
    Case("WA-4", "scalars and reserved bytes are checked", _scalars),
    Case("WA-5.1", "device information is valid and stable", _info),
    Case("WA-5.4", "programs that are none are refused", _programs),
    Case("WA-5.6", "bindings are checked", _bindings),
    Case("WA-6", "zero IDs are invalid", _zero_ids),
    Case("OB-4.1", "IDs that are stale, made up or of another kind never resolve", _stale_ids),
    Case("OB-4.3", "objects of two contexts never meet; a parent outlives its children", _children),
    Case("OB-4.3x", "a submission stays inside one context", _contexts_apart),
    Case("OB-4.4", "transfers stay inside their buffer", _ranges),
    Case("OB-4.4u", "transfers need the declared usage", _usage),
    Case("OB-4.4z", "new buffers are zeroed", _zeroed),
    Case("OB-4.9", "cancellation and completion choose one end", _cancel),
    Case("OB-4.12", "advertised limits hold", _limits),
)
