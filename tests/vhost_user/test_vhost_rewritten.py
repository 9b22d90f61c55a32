"""Requests and descriptors that another processor of the guest rewrites while the daemon serves them.

Field case R7 over a real socket. The peer is a process of its own. Every field holds one of a few values at any time,
so what one reading of each can lead to is known from the standard (virtqueue.md 4 and 5, wire-abi.md 3 to 5); anything
else, a byte outside the response, an effect that the status does not tell, or an exception in the log, is a second
look. VIRTACCEL_REWRITE_SECONDS makes it longer.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
from daemons import FRAMES_AT, GUEST, MEMORY_BYTES, PATIENCE, Daemon, Vm
from frames import (
    CANARY,
    CODES,
    COMPLETE,
    INCOMPATIBLE,
    INVALID_ARGUMENT,
    OK,
    OUT_OF_BOUNDS,
    RESOURCE_LIMIT,
    WRITE,
    XOR,
    allocate,
    binding,
    load,
    request,
    submit,
    transfer,
    u64,
)

SECONDS = float(os.environ.get("VIRTACCEL_REWRITE_SECONDS", "5")) / 2
REWRITER = Path(__file__).resolve().parent.parent / "support" / "rewriter.py"
U32 = 2**32 - 1
DESCRIPTOR = struct.Struct("<QIHH")
HAS_NEXT, DEVICE_WRITES = 1, 2
FRAME, ANSWERS, STEADY = FRAMES_AT, (FRAMES_AT + 0x1000, FRAMES_AT + 0x2000), FRAMES_AT + 0x3000
ROOM = 256
NOTHING = -1
"""The head comes back with nothing written: no sound chain."""
NEXT = (1, 2, 0, 7, 0xFFFF)
"""Either of two places for the response; itself, a descriptor over no memory, outside the table."""


class Driver:
    """A driver by hand: the head 0 is the chain that is rewritten, head 4 one that is left alone."""

    def __init__(self, vm: Vm) -> None:
        self.vm = vm
        self.view = vm.memory.view
        at = vm.queue.addresses
        assert at is not None
        self.table, self.available, self.used = (part - GUEST for part in (at.descriptors, at.available, at.used))
        self.index = 0
        self.describe(1, ANSWERS[0], ROOM, DEVICE_WRITES, 0)
        self.describe(2, ANSWERS[1], ROOM, DEVICE_WRITES, 0)
        self.describe(5, STEADY + 0x800, ROOM, DEVICE_WRITES, 0)

    def describe(self, index: int, at: int, size: int, flags: int, following: int) -> None:
        DESCRIPTOR.pack_into(self.view, self.table + 16 * index, GUEST + at, size, flags, following)

    def go(self, head: int) -> int:
        """Publish the head, and wait for it; the used length."""
        struct.pack_into("<H", self.view, self.available + 4 + 2 * (self.index % self.vm.size), head)
        before, self.index = self.index, (self.index + 1) & 0xFFFF
        struct.pack_into("<H", self.view, self.available + 2, self.index)
        self.vm.ring_bell()
        until = time.monotonic() + PATIENCE
        while struct.unpack_from("<H", self.view, self.used + 2)[0] != self.index:
            assert time.monotonic() < until, "no answer"
            time.sleep(0)
        found, written = struct.unpack_from("<II", self.view, self.used + 4 + 8 * (before % self.vm.size))
        assert found == head
        return int(written)

    def call(self, name: str, payload: bytes) -> bytes:
        """A command that nobody disturbs, and that has to succeed."""
        frame = request(CODES[name], payload)
        self.view[STEADY : STEADY + len(frame)] = frame
        self.describe(4, STEADY, len(frame), HAS_NEXT, 5)
        written = self.go(4)
        answer = bytes(self.view[STEADY + 0x800 : STEADY + 0x800 + written])
        assert answer[:2] == bytes(2), (name, answer)
        return answer[16:]

    def made(self, name: str, payload: bytes) -> int:
        return int.from_bytes(self.call(name, payload), "little")

    def read(self, buffer: int, size: int) -> bytes:
        return self.call("READ_BUFFER", transfer(buffer, 0, size))

    def disturbed(self, request_id: int) -> tuple[int, bytes]:
        """The chain under attack, once: the response's status and payload, after what every response must be."""
        blank = bytes([CANARY]) * ROOM
        for at in ANSWERS:
            self.view[at : at + ROOM] = blank
        written = self.go(0)
        answers = [bytes(self.view[at : at + ROOM]) for at in ANSWERS]
        if not written:
            assert answers == [blank, blank]
            return NOTHING, b""
        answer, other = sorted(answers, key=lambda one: one == blank)
        assert other == blank, "a response in two places"
        status, flags, payload_bytes, answered = struct.unpack_from("<HHIQ", answer)
        assert (flags, payload_bytes, answered) == (0, written - 16, request_id)
        assert answer[written:] == blank[written:], "bytes behind the used length"
        return status, answer[16:written]


@contextmanager
def rewriting(driver: Driver, words: dict[int, tuple[int, tuple[int, ...]]]) -> Iterator[subprocess.Popen[bytes]]:
    """`words`: width and values by offset. The offsets are kept clear of whatever this process writes meanwhile."""
    told = [f"{offset}:{width}:{','.join(map(str, values))}" for offset, (width, values) in words.items()]
    file = driver.vm.memory.fd
    peer = subprocess.Popen(
        [sys.executable, "-S", str(REWRITER), str(file), str(MEMORY_BYTES), *told],
        stdin=subprocess.PIPE, pass_fds=[file],
    )  # fmt: skip
    try:
        yield peer
        assert peer.poll() is None, "the peer ended early"
    finally:
        peer.communicate(timeout=PATIENCE)
    assert peer.returncode == 0


def outcomes(
    verdict: Callable[[int, int, int], set[int]], lengths: tuple[int, ...], *fields: tuple[int, ...]
) -> set[int]:
    """Statuses that one reading of each field can lead to. A loop, a descriptor over no memory, or one outside the
    table is no chain; a readable part shorter than a header is none either."""
    found = {NOTHING}
    for length, payload, third in product(lengths, *fields):
        found |= verdict(length, payload, third) if 16 <= length < MEMORY_BYTES - FRAME else {NOTHING}
    return found


def attack(
    driver: Driver, frame: bytes, lengths: tuple[int, ...], payloads: tuple[int, ...], thirds: tuple[int, ...],
    judge: Callable[[int, bytes], None], allowed: set[int], enough: Callable[[], bool] = lambda: True,
) -> Counter[int]:  # fmt: skip
    """Serve the frame over and over while its words are rewritten; what became of it, each time judged. Goes on until
    the outcomes that have to occur have, and `enough` says so."""
    driver.view[FRAME : FRAME + len(frame)] = frame
    driver.describe(0, FRAME, len(frame), HAS_NEXT, 1)
    words = {
        driver.table + 8: (4, lengths), driver.table + 14: (2, NEXT), FRAME + 4: (4, payloads), FRAME + 32: (4, thirds),
    }  # fmt: skip
    seen: Counter[int] = Counter()
    with rewriting(driver, words):
        until = time.monotonic() + SECONDS
        while time.monotonic() < until or not (seen.keys() >= allowed - {OUT_OF_BOUNDS, INCOMPATIBLE} and enough()):
            status, payload = driver.disturbed(1)
            assert status in allowed, (status, allowed)
            seen[status] += 1
            judge(status, payload)
            assert time.monotonic() < until + PATIENCE, seen
    print(dict(seen))
    return seen


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    with Daemon(tmp_path) as daemon:
        with Vm(daemon.path).start() as vm:
            made = Driver(vm)
            before = made.call("GET_DEVICE_INFO", b"")
            yield made
            assert made.call("GET_DEVICE_INFO", b"") == before, "the device lives"
        log = daemon.log()
        assert not [word for word in ("Traceback", "unexpected", " ERROR", "ring stopped") if word in log]
        assert daemon.stop() == 0


def test_r7_submissions_rewritten_by_another_processor_are_read_once(driver: Driver) -> None:
    context = driver.made("CREATE_CONTEXT", bytes(8))
    source, target = (driver.made("ALLOCATE_BUFFER", allocate(context)) for _ in range(2))
    driver.call("WRITE_BUFFER", transfer(source) + bytes(range(8)))
    program = driver.made("LOAD_PROGRAM", load(context, XOR.pack()))
    queue = driver.made("CREATE_QUEUE", u64(context) + u64(0))
    frame = request(CODES["SUBMIT"], submit(queue, program, binding(source), binding(target, 1, WRITE)))
    right = bytes(value ^ 0x5A for value in range(8))

    def verdict(length: int, payload: int, count: int) -> set[int]:
        if payload != length - 16 or payload < 32:
            return {INVALID_ARGUMENT}
        if count > 4096:
            return {RESOURCE_LIMIT}
        if 32 * count != payload - 32:
            return {INVALID_ARGUMENT}
        return {OK} if count == 2 else {INCOMPATIBLE, INVALID_ARGUMENT}

    def judge(status: int, payload: bytes) -> None:
        if status == OK:
            assert len(payload) == 8
            until = time.monotonic() + PATIENCE
            while (polled := driver.call("POLL_EVENT", payload))[0] == 0:
                assert time.monotonic() < until
            assert polled[:4] == bytes([COMPLETE, 0, 0, 0])
            driver.call("DESTROY_EVENT", payload)
        else:
            assert payload == b""
        assert driver.read(target, 8) == (right if status == OK else bytes(8))
        if status == OK:
            driver.call("WRITE_BUFFER", transfer(target) + bytes(8))

    lengths = (len(frame), len(frame) - 32, len(frame) - 1, 32, 16, 15, 0, U32)
    payloads = (len(frame) - 16, len(frame) - 48, len(frame) - 17, 0, U32)
    counts = (2, 1, 0, 3, 1 << 27, U32)
    seen = attack(
        driver, frame, lengths, payloads, counts, judge, outcomes(verdict, lengths, payloads, counts)
    )  # fmt: skip
    assert seen[OK]
    for name, number in (
        ("UNLOAD_PROGRAM", program), ("DESTROY_QUEUE", queue), ("FREE_BUFFER", source), ("FREE_BUFFER", target),
        ("DESTROY_CONTEXT", context),
    ):  # fmt: skip
        driver.call(name, u64(number))  # nothing that was refused has left anything


def test_r7_writes_rewritten_by_another_processor_are_read_once(driver: Driver) -> None:
    """Two sound readings, of 8 and of 16 bytes: the buffer tells which one it was, and that it was one."""
    context = driver.made("CREATE_CONTEXT", bytes(8))
    target = driver.made("ALLOCATE_BUFFER", allocate(context))
    data = bytes(range(1, 17))
    frame = request(CODES["WRITE_BUFFER"], transfer(target, 0, 16) + data)
    written: Counter[bytes] = Counter()

    def verdict(length: int, payload: int, size: int) -> set[int]:
        if payload != length - 16 or payload < 24:
            return {INVALID_ARGUMENT}
        return {OK} if size == payload - 24 and size else {INVALID_ARGUMENT, OUT_OF_BOUNDS}

    def judge(status: int, payload: bytes) -> None:
        assert payload == b""
        found = driver.read(target, 64)
        if status == OK:
            written[found] += 1
            driver.call("WRITE_BUFFER", transfer(target, 0, 16) + bytes(16))
        else:
            assert found == bytes(64)

    lengths = (len(frame), len(frame) - 8, len(frame) - 1, 40, 16, 15, 0, U32)
    payloads = (len(frame) - 16, len(frame) - 24, len(frame) - 17, 24, 0, U32)
    sizes = (16, 8, 0, 15, 64, U32)
    allowed = outcomes(verdict, lengths, payloads, sizes)
    sound = {data + bytes(48), data[:8] + bytes(56), data[:15] + bytes(49)}
    attack(driver, frame, lengths, payloads, sizes, judge, allowed, lambda: len(written) > 1)
    assert written.keys() <= sound
    print([(len(key.rstrip(bytes(1))), count) for key, count in written.items()])
    driver.call("FREE_BUFFER", u64(target))
    driver.call("DESTROY_CONTEXT", u64(context))
