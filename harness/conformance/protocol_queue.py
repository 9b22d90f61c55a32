"""Cases VQ-001 to VQ-020 (virtqueue.md, section 13), as far as a driver can show them, hostile chains included.

Every bad chain is published together with a good one behind it, which has to complete. Standard library only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from virtaccel.guest_tools.transport.raw import INDIRECT, NEXT, NO_INTERRUPT, WRITE
from virtaccel.harness.conformance.outcome import Case, Failed, NotShown, must
from virtaccel.harness.conformance.test_bed import ROOM, TestBed
from virtaccel.harness.oracle import frames as p
from virtaccel.harness.oracle.frames import frame, say, u64

ROUNDS: Final = 500  # a lost wake-up is a race of a few microseconds
QUIET_SECONDS: Final = 0.05  # a device that goes on after a reset does so at once
_NOWHERE: Final = 0xDEAD_0000_0000_0000  # beyond what any machine can address


def _vq_001(bed: TestBed) -> None:
    answer = bed.call(p.INFO, room=(92,))
    must(answer.used == 92 and answer.status == p.OK, f"{say(answer.status)}, {answer.used} bytes used")


def _fixed(bed: TestBed) -> dict[str, Callable[[], tuple[int, bytes, tuple[int, ...]]]]:
    """Commands with a fixed part, made anew for each split, with what must be undone afterwards."""
    world = bed.world()
    rows: dict[str, Callable[[], tuple[int, bytes, tuple[int, ...]]]] = {
        "CREATE_CONTEXT": lambda: (p.CREATE_CONTEXT, bytes(8), (p.DESTROY_CONTEXT,)),
        "ALLOCATE_BUFFER": lambda: (p.ALLOCATE, bed.allocation(world.context, 64), (p.FREE,)),
        "WRITE_BUFFER": lambda: (p.WRITE, p.transfer(world.source, 3, 5) + b"hello", ()),
        "READ_BUFFER": lambda: (p.READ, p.transfer(world.source, 0, 16), ()),
        "CREATE_QUEUE": lambda: (p.CREATE_QUEUE, p.queue_of(world.context), (p.DESTROY_QUEUE,)),
        "FREE_BUFFER": lambda: (p.FREE, u64(bed.buffer(world.context)), ()),
    }
    if bed.sample is not None:
        sample = bed.sample
        rows["LOAD_PROGRAM"] = lambda: (p.LOAD, p.load(world.context, sample), (p.UNLOAD,))
        rows["SUBMIT"] = lambda: (p.SUBMIT, bed.submitted(world), (p.POLL, p.DESTROY_EVENT))
    return rows


def _vq_002(bed: TestBed) -> None:
    for name, make in _fixed(bed).items():
        opcode, body, _ = make()
        ends = 16 + min(len(body), 96)
        for cut in range(1, ends):
            opcode, body, undo = make()
            answer = bed.call(opcode, body, room=(1 + cut % 39, ROOM), cuts=(cut,))
            must(answer.status == p.OK, f"{name} cut at byte {cut}: {say(answer.status)}")
            if p.POLL in undo:
                bed.terminal(answer.id)
            for follow in undo:
                if follow != p.POLL:
                    bed.ok(follow, u64(answer.id))


def _vq_003(bed: TestBed) -> None:
    world = bed.world()
    most = min(bed.config.max_chain_descriptors, bed.ring.size)
    data = bytes(range(1, 61))
    request = p.transfer(world.source, 2, 60) + data
    single = min(most - 17, 60) if most > 20 else 0
    bed.ok(
        p.WRITE,
        request,
        room=(16,) if most < 4 else (1,) * min(16, max(1, most - single - 2)) + (16,),
        cuts=(1,) * single,
    )
    pieces = (7,) * max(1, min(10, most - 4)) + (80,)
    answer = bed.ok(p.READ, p.transfer(world.source, 2, 60), room=pieces if most >= 5 else (80,), cuts=(3,))
    must(answer.payload == data, "segments do not concatenate to the bytes that were written")


def _with_a_good_one(bed: TestBed, what: str, bad_head: int, describe: Callable[[], None]) -> None:
    """Publish a bad chain and a good one in one batch: the bad head comes back empty, the good one completes."""
    ring = bed.ring
    describe()
    canary = bed.canary()
    request, room = ring.piece(frame(p.INFO, request_id=77)), canary
    good = ring.chain(ring.size - 2, [request], [room])
    ring.offer(bad_head, good)
    answers = {}
    for _ in range(2):
        used = ring.collect(bed.patience)
        must(used is not None, f"{what}: not both chains came back")
        if used is not None:
            answers[used.head] = used.written
    must(answers.get(bad_head) == 0, f"{what}: the bad head came back with {answers.get(bad_head)} bytes used")
    answer = bed.read(answers.get(good, 0), [room], 77)
    must(answer.status == p.OK and answer.used == 92, f"{what}: the good chain behind it got {say(answer.status)}")
    ring.scratch_again()


def _vq_004(bed: TestBed) -> None:
    ring = bed.ring
    piece = ring.piece(frame(p.INFO))
    _with_a_good_one(bed, "no writable descriptor", 0, lambda: ring.describe(0, piece.address, 16))
    _with_a_good_one(bed, "no readable descriptor", 0, lambda: ring.describe(0, piece.address, 16, WRITE))


def _vq_005(bed: TestBed) -> None:
    ring = bed.ring
    create = frame(p.CREATE_CONTEXT, bytes(8))

    def describe() -> None:
        first, room, last = ring.piece(create[:16]), ring.piece(bytes(64)), ring.piece(create[16:])
        ring.describe(0, first.address, 16, NEXT, 1)
        ring.describe(1, room.address, 64, NEXT | WRITE, 2)
        ring.describe(2, last.address, 8)

    _with_a_good_one(bed, "a readable descriptor after a writable one", 0, describe)


def _vq_006(bed: TestBed) -> None:
    ring = bed.ring
    size, most = ring.size, bed.config.max_chain_descriptors

    def pair(first: tuple[int, int, int], second: tuple[int, int, int]) -> Callable[[], None]:
        """Two descriptors as (length, flags, next), each over good memory."""

        def describe() -> None:
            for index, (length, flags, following) in enumerate((first, second)):
                ring.describe(index, ring.piece(bytes(64)).address, length, flags, following)

        return describe

    def long_chain(count: int) -> Callable[[], None]:
        def describe() -> None:
            piece = ring.piece(bytes(64))
            for index in range(count):
                last = index == count - 1
                ring.describe(index, piece.address, 1, WRITE if last else NEXT, 0 if last else index + 1)

        return describe

    def at(address: int, length: int) -> Callable[[], None]:
        def describe() -> None:
            ring.describe(0, address, length, NEXT, 1)
            ring.describe(1, ring.piece(bytes(64)).address, 64, WRITE)

        return describe

    rows = {
        "a zero-length descriptor": pair((0, NEXT, 1), (64, WRITE, 0)),
        "a zero-length writable descriptor": pair((16, NEXT, 1), (0, WRITE, 0)),
        "a loop of two": pair((16, NEXT, 1), (16, NEXT, 0)),
        "a loop of one": pair((16, NEXT, 0), (16, 0, 0)),
        "a loop through writable descriptors": pair((16, NEXT, 1), (64, NEXT | WRITE, 1)),
        "a next descriptor outside the table": pair((16, NEXT, size), (16, 0, 0)),
        "a next descriptor far outside": pair((16, NEXT, 0xFFFF), (16, 0, 0)),
        "an indirect table that was not negotiated": pair((32, INDIRECT, 0), (16, 0, 0)),
        "an indirect flag on a writable descriptor": pair((16, NEXT, 1), (64, WRITE | INDIRECT, 0)),
        "memory that is not there": at(_NOWHERE, 16),
        "memory that wraps at 2**64": at((1 << 64) - 8, 16),
        "more bytes than there are": at(ring.piece(b"\0").address, (1 << 32) - 1),
    }
    for what, describe in rows.items():
        _with_a_good_one(bed, what, 0, describe)
    for head in (size, 0xFFFF):
        _with_a_good_one(bed, f"head {head} in a ring of {size}", head, lambda: None)
    if size - 2 > most:
        _with_a_good_one(bed, f"{most + 1} descriptors", 0, long_chain(most + 1))


def _vq_007(bed: TestBed) -> None:
    for size in range(1, 16):
        answer = bed.send(frame(p.INFO)[:size].ljust(size, b"\0"))
        must(answer.used == 0, f"a header of {size} bytes: {answer.used} bytes used")
    for room in range(1, 16):
        answer = bed.call(p.INFO, room=(room,))
        must(answer.used == 0, f"room for {room} bytes: {answer.used} bytes used")


def _vq_008(bed: TestBed) -> None:
    for what, request in {
        "CREATE_CONTEXT of 7 bytes": frame(p.CREATE_CONTEXT, bytes(7), 5),
        "POLL_EVENT of object 0": frame(p.POLL, bytes(8), 5),
        "SUBMIT of 8 bytes": frame(p.SUBMIT, bytes(8), 5),
        "payload_bytes above the payload": frame(p.INFO, b"", 5, length=1),
        "payload_bytes below the payload": frame(p.CREATE_CONTEXT, bytes(8), 5, length=7),
        "ALLOCATE_BUFFER of nothing": frame(p.ALLOCATE, bytes(40), 5),
    }.items():
        answer = bed.send(request)
        must(
            (answer.used, answer.status) == (16, p.INVALID_ARGUMENT),
            f"{what}: {say(answer.status)}, {answer.used} used",
        )


def _vq_009(bed: TestBed) -> None:
    for opcode in (0, 2, 0x0102, 0x0204, 0x0504, 0xDEAD, 0xFFFF):
        answer = bed.call(opcode)
        must((answer.used, answer.status) == (16, p.UNSUPPORTED), f"opcode {opcode:#06x}: {say(answer.status)}")
    for _ in range(min(bed.info.contexts, 64)):
        bed.context()  # as many as ever: nothing was made of those commands


def _vq_010(bed: TestBed) -> None:
    world = bed.world()
    for bit in range(16):
        answer = bed.send(frame(p.INFO, request_id=5, flags=1 << bit))
        must((answer.used, answer.status) == (16, p.UNSUPPORTED), f"request flag {bit}: {say(answer.status)}")
    for bit in (0, 1, 7, 31):
        flag = (1 << bit).to_bytes(4, "little")
        bed.refuses(f"context flag {bit}", p.CREATE_CONTEXT, flag + bytes(4), p.UNSUPPORTED)
        bed.refuses(f"queue flag {bit}", p.CREATE_QUEUE, u64(world.context) + flag + bytes(4), p.UNSUPPORTED)
        two = (p.binding(world.source, 0, 1, 16), p.binding(world.target, 1, 2, 16))
        body = p.submission(world.queue, world.program or world.queue, *two, flags=1 << bit)
        bed.refuses(f"submission flag {bit}", p.SUBMIT, body, p.UNSUPPORTED)
        if bed.sample is not None:
            bed.refuses(f"program flag {bit}", p.LOAD, p.load(world.context, bed.sample, flags=1 << bit), p.UNSUPPORTED)
    for bit in (5, 6, 31):
        bed.refuses(f"usage bit {bit}", p.ALLOCATE, bed.allocation(world.context, 64, 1 | 1 << bit), p.UNSUPPORTED)


def _vq_011(bed: TestBed) -> None:
    world = bed.world()
    commands = {
        p.INFO: b"", p.CREATE_CONTEXT: bytes(8), p.DESTROY_CONTEXT: u64(world.context),
        p.ALLOCATE: bed.allocation(world.context, 64), p.FREE: u64(world.source),
        p.READ: p.transfer(world.source, 0, 8), p.WRITE: p.transfer(world.source, 0, 8) + bytes(8),
        p.CREATE_QUEUE: p.queue_of(world.context), p.DESTROY_QUEUE: u64(world.queue), p.POLL: u64(world.queue),
        p.UNLOAD: u64(world.program or 1), p.CANCEL: u64(1), p.DESTROY_EVENT: u64(1),
    }  # fmt: skip
    if bed.sample is not None:
        commands[p.SUBMIT] = bed.submitted(world)
        commands[p.LOAD] = p.load(world.context, bed.sample)
    for opcode, body in commands.items():
        counted = bed.call(opcode, body + b"\0")
        must(counted.status == p.INVALID_ARGUMENT, f"command {opcode:#06x} and a byte: {say(counted.status)}")
        uncounted = bed.send(frame(opcode, body, 5) + b"\0")
        must(uncounted.status == p.INVALID_ARGUMENT, f"command {opcode:#06x} and a stray byte: {say(uncounted.status)}")


def _vq_012(bed: TestBed) -> None:
    tries = min(bed.info.contexts, 64) + 1
    for _ in range(tries):
        answer = bed.call(p.CREATE_CONTEXT, bytes(8), room=(23,))
        must(answer.used == 0, f"CREATE_CONTEXT with 23 bytes of room: {answer.used} bytes used")
    world = bed.world()  # nothing was made, or the limit would be reached
    rows = {
        p.ALLOCATE: bed.allocation(world.context, 64),
        p.CREATE_QUEUE: p.queue_of(world.context),
        p.READ: p.transfer(world.source, 0, 8),
    }
    if bed.sample is not None:
        rows[p.SUBMIT] = bed.submitted(world)
        rows[p.LOAD] = p.load(world.context, bed.sample)
    for opcode, body in rows.items():
        answer = bed.call(opcode, body, room=(23,))
        must(answer.used == 0, f"command {opcode:#06x} with 23 bytes of room: {answer.used} bytes used")
    answer = bed.call(p.INFO, room=(91,))
    must(answer.used == 0, f"GET_DEVICE_INFO with 91 bytes of room: {answer.used} bytes used")
    for opcode, object_id in ((p.DESTROY_QUEUE, world.queue), (p.FREE, world.source)):
        bed.ok(opcode, u64(object_id))


def _vq_013(bed: TestBed) -> None:
    world = bed.world()
    for opcode, body, used in (
        (p.INFO, b"", 92), (p.CREATE_CONTEXT, bytes(8), 24), (p.READ, p.transfer(world.source, 0, 33), 49),
        (p.WRITE, p.transfer(world.source, 0, 1) + b"x", 16), (p.POLL, u64(world.queue), 16),
        (p.FREE, u64(world.target), 16),
    ):  # fmt: skip
        answer = bed.call(opcode, body, room=(500,))
        must(answer.used == used, f"command {opcode:#06x}: {answer.used} bytes used, should be {used}")


def _vq_014(bed: TestBed) -> None:
    context = bed.context()
    ring = bed.ring
    requests = [(frame(p.INFO, request_id=number), number) for number in range(100, 100 + min(6, ring.size // 2 - 1))]
    if bed.sample is not None:
        requests.insert(0, (frame(p.LOAD, p.load(context, bed.sample), 99), 99))
    out = {}
    for index, (request, number) in enumerate(requests):
        head, room = bed.publish(request, first=2 * index)
        out[head] = room, number
    for _ in requests:
        used = ring.collect(bed.patience)
        if used is None or used.head not in out:
            raise Failed(f"of {len(requests)} commands published together, not all came back once")
        room, number = out.pop(used.head)
        answer = bed.read(used.written, room, number)
        must(answer.status == p.OK, f"request {number}: {say(answer.status)}")


def _vq_015(bed: TestBed) -> None:
    sample = bed.program_of()
    world = bed.world()
    data = bytes(range(3, 3 + sample.bytes))
    bed.ok(p.WRITE, p.transfer(world.source, 0, len(data)) + data)
    answer = bed.ok(p.SUBMIT, bed.submitted(world))
    must(answer.used == 24, f"SUBMIT used {answer.used} bytes")
    must(bed.terminal(answer.id) == (p.COMPLETE, p.OK), "the submission did not complete")
    must(bed.terminal(answer.id) == (p.COMPLETE, p.OK), "a terminal event changed its state")
    result = bed.ok(p.READ, p.transfer(world.target, 0, sample.bytes)).payload
    must(result == bytes(byte ^ sample.operand for byte in data), f"{sample.name} gave {result.hex()}")
    for opcode, object_id in ((p.FREE, world.source), (p.UNLOAD, world.program), (p.DESTROY_QUEUE, world.queue)):
        bed.refuses("an object of an undestroyed event", opcode, u64(object_id), p.BUSY)
    bed.ok(p.DESTROY_EVENT, u64(answer.id))
    for opcode, object_id in ((p.FREE, world.source), (p.UNLOAD, world.program), (p.DESTROY_QUEUE, world.queue)):
        bed.ok(opcode, u64(object_id))


def _vq_016(bed: TestBed) -> None:
    ring = bed.ring
    out = {}
    for index in range(ring.size // 2):
        head, room = bed.publish(frame(p.INFO, request_id=index + 1), room=(92,), first=2 * index)
        out[head] = room, index + 1
    while out:
        used = ring.collect(bed.patience)
        if used is None or used.head not in out:
            raise Failed(f"{len(out)} commands of a full ring did not come back")
        room, number = out.pop(used.head)
        must(bed.read(used.written, room, number).status == p.OK, "a command of a full ring was refused")


def _vq_017(bed: TestBed) -> None:
    for round_ in range(ROUNDS):
        bed.ring.set_flags(NO_INTERRUPT if round_ & 1 else 0)
        answer = bed.call(p.INFO, room=(92,))
        must(answer.status == p.OK, f"round {round_}: {say(answer.status)}")


def _vq_018(bed: TestBed) -> None:
    ring = bed.ring
    if bed.sample is not None:
        context = bed.context()
        bed.publish(frame(p.LOAD, p.load(context, bed.sample), 99), first=ring.size - 2)
    for index in range(min(8, ring.size // 2 - 1)):
        bed.publish(frame(p.INFO, request_id=index + 1), first=2 * index)
    ring.restart()
    canaries = [bed.canary(4096) for _ in range(8)]
    time.sleep(QUIET_SECONDS)
    must(ring.used_index == 0, f"{ring.used_index} used elements after a reset")
    must(all(bytes(one.view) == bytes([p.CANARY]) * 4096 for one in canaries), "memory was written after a reset")
    ring.scratch_again()
    must(bed.call(p.INFO).status == p.OK, "the device does not answer after a reset")


def _vq_019(bed: TestBed) -> None:
    world = bed.world()
    event = bed.ok(p.SUBMIT, bed.submitted(world)).id if bed.sample is not None else 0
    bed.renew()
    for opcode, object_id in (
        (p.DESTROY_CONTEXT, world.context), (p.FREE, world.source), (p.DESTROY_QUEUE, world.queue),
        (p.UNLOAD, world.program), (p.POLL, event), (p.CANCEL, event), (p.DESTROY_EVENT, event),
    ):  # fmt: skip
        if object_id and not (opcode == p.CANCEL and not bed.info.capabilities & p.CANCELLATION):
            bed.refuses("an ID from before a reset", opcode, u64(object_id), p.STALE_OBJECT)
    again = bed.world()
    must(not {*world} - {0} & {*again} - {0}, "an ID of an earlier epoch was given again")


def _vq_020(bed: TestBed) -> None:
    raise NotShown("no driver can make a device's own write or release fail")


CASES: Final = (
    Case("VQ-001", "one readable and one writable descriptor carry a command", _vq_001),
    Case("VQ-002", "header and fixed payloads decode across every byte split", _vq_002),
    Case("VQ-003", "many segments concatenate without padding", _vq_003),
    Case("VQ-004", "a missing region completes with used length zero", _vq_004),
    Case("VQ-005", "a readable descriptor after a writable one is rejected", _vq_005),
    Case("VQ-006", "zero-length, looping, excessive and indirect chains are rejected", _vq_006),
    Case("VQ-007", "a truncated header writes nothing", _vq_007),
    Case("VQ-008", "a malformed payload gets exactly a 16-byte error", _vq_008),
    Case("VQ-009", "an unknown opcode changes nothing", _vq_009),
    Case("VQ-010", "nonzero flags are rejected", _vq_010),
    Case("VQ-011", "trailing readable bytes are rejected", _vq_011),
    Case("VQ-012", "short capacity is detected before mutation and writes nothing", _vq_012),
    Case("VQ-013", "used lengths equal the bytes written", _vq_013),
    Case("VQ-014", "requests outstanding together keep their request IDs", _vq_014),
    Case("VQ-015", "SUBMIT completes independently of its event", _vq_015),
    Case("VQ-016", "a full queue is no protocol status", _vq_016),
    Case("VQ-017", "notification suppression loses no work", _vq_017),
    Case("VQ-018", "a reset produces no late used entries or writes", _vq_018),
    Case("VQ-019", "a reset invalidates every ID and frees request IDs", _vq_019),
    Case("VQ-020", "output failure after mutation asks for a reset", _vq_020),
)
