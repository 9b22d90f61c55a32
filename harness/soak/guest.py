"""One guest of a soak: random work over a vhost-user socket, every answer held against what it must be.

A process of its own, which may be killed at any moment: `python -m virtaccel.harness.soak.guest`, see `main`. Knows
the device as any driver does, and from the counters which processes of the device have been killed: only those excuse a
DEVICE_LOST or a failed compilation. It ends with a line on standard error and one of the statuses below when something
is not as it must be.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

import numpy as np

from virtaccel.device.wire import EventState, Opcode, Status
from virtaccel.guest_tools.arrays.accelerator import Accelerator, DeviceBuffer
from virtaccel.guest_tools.arrays.program import Array, Invocation, Program, State
from virtaccel.guest_tools.artifact import TOSA_FORMAT, target_words
from virtaccel.guest_tools.client import Buffer, DeviceError, Event, EventStatus, Request, status_name
from virtaccel.guest_tools.errors import ExecutionFailed, Refused
from virtaccel.guest_tools.session import NoAnswer, Session
from virtaccel.guest_tools.transport.base import TransportError
from virtaccel.guest_tools.transport.vhost_user import FrontEnd, VhostUserTransport
from virtaccel.harness.soak import programs
from virtaccel.harness.soak.counters import Counters, Own, Shared
from virtaccel.tosa_graph.flatbuffer import read

EXIT_WRONG: Final = 3
EXIT_STUCK: Final = 4
# Few enough that loads and unloads keep alternating, enough that stale IDs meet reused slots.
MOST_PROGRAMS, MOST_BUFFERS = 6, 12
# The size of one transfer command: larger ones are several of the same.
LARGEST_BUFFER: Final = 1 << 20
_BULK_BYTES: Final = 8 << 20
# A worker may be killed during each reset; twenty times in a row is no chance any more.
_RECOVERIES: Final = 20
_PAUSE: Final = 0.002
_IDLE: Final = 0.01


class Wrong(Exception):
    """The device did what it must not do."""


class Lost(Exception):
    """The device's worker is gone, and there is a reason: reset it."""


class Loaded(NamedTuple):
    """A program on the device, and what is known of it; a stream's sum so far stands in `total`."""

    program: Program
    known: programs.Program
    state: State | None
    total: Array


class Kept(NamedTuple):
    """A buffer on the device, and the bytes that must be in it."""

    buffer: DeviceBuffer
    content: bytearray


class Guest:
    """The work, step by step. Raises Wrong, NoAnswer, TimeoutError, TransportError."""

    def __init__(self, path: str, counters: Counters, number: int, rng: Random, patience: float) -> None:
        self._path, self._counters, self._rng, self._patience = path, counters, rng, patience
        self._words = counters.of(number)
        self._session: Session | None = None
        self._device: Accelerator | None = None
        self._loaded: list[Loaded] = []
        self._kept: list[Kept] = []
        self._stale: Buffer | None = None
        table: tuple[tuple[Callable[[], None], int], ...] = (
            (self._run, 24),
            (self._run_several, 8),
            (self._transfer, 24),
            (self._transfer_several, 6),
            (self._load, 6),
            (self._load_bad, 3),
            (self._unload, 3),
            (self._cancel, 4),
            (self._expire, 3),
            (self._ask_wrongly, 4),
            (self._reset, 1),
            (self._drop, 1),
            (self._send_garbage, 1),
        )
        self._steps, self._weights = zip(*table, strict=True)

    def live(self) -> None:
        """Until the runner says stop, or has gone."""
        parent = os.getppid()
        while not self._counters.get(Shared.STOP) and os.getppid() == parent:
            asked = self._counters.get(Shared.REST)
            if asked != self._words[Own.RESTING]:
                self._rest(asked)
                continue
            try:
                self._step()
            except Lost:
                self._recover()
            self._count(Own.PROGRESS)
        self._leave()

    def _step(self) -> None:
        try:
            self._device_or_connect()
            self._rng.choices(self._steps, self._weights)[0]()
            self._count(Own.STEPS)
        except (DeviceError, ExecutionFailed, Refused) as error:
            self._judge(error)

    # ---- the connection

    def _count(self, word: Own, number: int = 1) -> None:
        self._words[word] += number

    def _device_or_connect(self) -> Accelerator:
        if self._device is None:
            if self._session is None:
                transport = VhostUserTransport(self._path, bulk_bytes=_BULK_BYTES, timeout=self._patience)
                self._session = Session(transport, self._patience)
                self._count(Own.CONNECTIONS)
            self._device = Accelerator(self._session)
        return self._device

    def _forget(self) -> None:
        """Whatever was on the device is no more."""
        if self._kept:
            self._stale = self._kept[0].buffer.id
        self._device = None
        self._loaded.clear()
        self._kept.clear()

    def _leave(self) -> None:
        """Go, as one that tidies up or as one that does not care."""
        device, session = self._device, self._session
        # Real guests do both, and each leaves the device other work.
        if device is not None and self._rng.random() < 0.5:
            device.close()
        elif session is not None:
            session.close()
        self._session = None
        self._forget()

    def _rest(self, asked: int) -> None:
        """Have nothing on the device, until all go on."""
        self._leave()
        # Told only when everything is given back: then the runner counts.
        self._words[Own.RESTING] = asked
        while self._counters.get(Shared.REST) == asked and asked % 2 and not self._counters.get(Shared.STOP):
            time.sleep(_IDLE)

    def _judge(self, error: DeviceError | ExecutionFailed | Refused, compiled_from: int | None = None) -> None:
        """Returns if there is a reason for `error`; raises Wrong if there is none, Lost for a device that is lost."""
        if error.status == Status.DEVICE_LOST:
            if self._counters.get(Shared.WORKER_KILLS) == self._words[Own.KILLS_SEEN]:
                raise Wrong(f"the device is lost and nobody killed its worker: {error}")
            self._count(Own.LOSSES)
            raise Lost from error
        now = self._counters.get(Shared.COMPILER_KILLS)
        if compiled_from is None or error.status != Status.INTERNAL_ERROR or (now == compiled_from and now % 2 == 0):
            raise Wrong(f"unexpected: {error}") from error

    def _recover(self) -> None:
        """A reset brings the device back; a worker may be killed meanwhile, of course."""
        for _ in range(_RECOVERIES):
            try:
                self._reset()
                return
            except DeviceError as error:
                try:
                    self._judge(error)
                except Lost:
                    self._count(Own.PROGRESS)
        raise Wrong(f"{_RECOVERIES} resets do not bring the device back")

    def _reset(self) -> None:
        session = self._session
        # Read before the reset: a kill during it may have hit the new worker, and must excuse the next loss.
        kills = self._counters.get(Shared.WORKER_KILLS)
        self._forget()
        if session is not None:
            session.reset()
        self._words[Own.KILLS_SEEN] = kills
        self._count(Own.RESETS)
        self._device_or_connect()

    def _drop(self) -> None:
        """Go in the middle of commands and work."""
        device = self._device_or_connect()
        session, client = device.session, device.session.client
        slow = self._slow()
        slow.write(programs.rotation_work(self._rng).inputs)
        artifact = programs.salted(self._rng).artifact
        words = target_words(read(artifact))
        session.start(slow.request())
        # Something that runs, something that compiles and something that is answered at once: nobody waits for any of
        # them.
        session.start(client.load_program(device.context, TOSA_FORMAT, words, artifact))
        session.start(client.get_device_info())
        if self._rng.random() < 0.5:
            time.sleep(self._rng.random() * 0.05)
        session.close()
        self._session = None
        self._forget()
        self._count(Own.DROPS)

    def _send_garbage(self) -> None:
        """Not a front end at all, on the same socket."""
        self._leave()
        if self._rng.random() < 0.5:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as noise:
                noise.settimeout(self._patience)
                noise.connect(self._path)
                # Up to a few whole headers: enough to be a message of any kind.
                noise.sendall(self._rng.randbytes(self._rng.randrange(1, 400)))
        else:
            front = FrontEnd(self._path, self._patience)
            for _ in range(self._rng.randrange(1, 8)):
                try:
                    front.send(self._rng.randrange(1, 48), self._rng.randbytes(self._rng.randrange(64)))
                except TransportError:
                    break  # it has had enough
            front.close()
        self._count(Own.GARBAGE)

    # ---- programs

    def _load(self) -> None:
        if len(self._loaded) >= MOST_PROGRAMS:
            self._unload()
        known = programs.salted(self._rng) if self._rng.random() < 0.4 else self._rng.choice(programs.catalogue())
        self._load_known(known)

    def _load_known(self, known: programs.Program) -> Loaded | None:
        """None if its compiler was killed."""
        compiled_from = self._counters.get(Shared.COMPILER_KILLS)
        try:
            program = self._device_or_connect().load(known.artifact, known.name)
        except Refused as error:
            self._judge(error, compiled_from)
            return None
        self._count(Own.LOADS)
        state = program.new_state() if known.stream else None
        self._loaded.append(Loaded(program, known, state, np.zeros(programs.ELEMENTS, np.float32)))
        return self._loaded[-1]

    def _load_bad(self) -> None:
        bad = programs.refused() if self._rng.random() < 0.3 else programs.malformed(self._rng)
        words = target_words(read(programs.addition().artifact))
        try:
            self._device_or_connect().offer(bad.artifact, words, bad.name)
        except Refused as error:
            # A refusal with the wrong word is as wrong as an answer.
            if error.status != bad.status:
                raise Wrong(f"{bad.name}: {status_name(error.status)}, not {bad.status.name}") from error
            self._count(Own.REFUSALS)
            return
        raise Wrong(f"{bad.name}: the device takes it")

    def _unload(self) -> None:
        if self._loaded:
            self._loaded.pop(self._rng.randrange(len(self._loaded))).program.close()

    def _any(self) -> Loaded | None:
        if not self._loaded:
            self._load()
        return self._rng.choice(self._loaded) if self._loaded else None

    def _run(self) -> None:
        loaded = self._any()
        if loaded is None:
            return
        work = loaded.known.make(self._rng)
        compiled_from = self._counters.get(Shared.COMPILER_KILLS)
        try:
            found = loaded.program(*work.inputs, state=loaded.state)
        except ExecutionFailed as error:
            self._judge(error, compiled_from)
            raise Lost from error  # a program that could not be compiled for these inputs: begin anew
        if loaded.known.stream:
            np.add(loaded.total, work.inputs[0], out=loaded.total)
            work = work._replace(outputs=(loaded.total,))
        self._check(loaded.known, work, found)

    def _check(self, known: programs.Program, work: programs.Work, found: programs.Arrays) -> None:
        difference = programs.difference(work, found)
        if difference is not None:
            raise Wrong(f"{known.name}: {difference}")
        self._count(Own.ANSWERS)

    def _run_several(self) -> None:
        """Submissions that overlap, awaited in another order; each has buffers of its own."""
        started = []
        for _ in range(self._rng.randrange(2, 5)):
            loaded = self._any()
            if loaded is None or loaded.state is not None or loaded.known.name == "dynamic":
                continue
            work = loaded.known.make(self._rng)
            run = loaded.program.new_invocation()
            run.write(work.inputs)
            started.append((loaded.known, work, run, self._submit(run)))
        # In another order than they were started, since completion order is no promise.
        self._rng.shuffle(started)
        for known, work, run, event in started:
            self._completed(self._outcome(event), known.name)
            self._check(known, work, run.read())
            run.close()

    # ---- submissions by hand

    def _submit(self, run: Invocation, timeout_ns: int = 0) -> Event:
        return self._device_or_connect().session.call(run.request(timeout_ns=timeout_ns))

    def _outcome(self, event: Event) -> EventStatus:
        """How it ends; the event is given back."""
        session = self._device_or_connect().session
        status = session.wait(event, self._patience)
        if status.state == EventState.PENDING:
            raise NoAnswer(f"a submission is pending after {self._patience} s")
        session.call(session.client.destroy_event(event))
        if status.error == Status.DEVICE_LOST:
            self._judge(DeviceError(Opcode.POLL_EVENT, status.error))
        return status

    def _completed(self, status: EventStatus, name: str) -> None:
        if status.state != EventState.COMPLETE:
            raise Wrong(f"{name}: the submission ended as {status.state.name}, {status_name(status.error)}")

    def _slow(self) -> Invocation:
        """The slow program, with buffers of its own."""
        for loaded in self._loaded:
            if loaded.known.name == programs.SLOW:
                return loaded.program.new_invocation()
        found = None
        while found is None:
            found = self._load_known(programs.rotation())
        return found.program.new_invocation()

    def _cancel(self) -> None:
        """Cancelled, or right; and the buffers come back once the work has stopped."""
        run, work, client = self._slow(), programs.rotation_work(self._rng), self._device_or_connect().session.client
        run.write(work.inputs)
        event = self._submit(run)
        # Before it starts, while it runs, about when it ends.
        time.sleep(self._rng.choice((0.0, 0.001, 0.01, 0.05)))
        cancelled = self._status(client.cancel_event(event))
        if cancelled not in (Status.OK, Status.BUSY):
            raise Wrong(f"CANCEL_EVENT: {status_name(cancelled)}")
        self._ended_early(run, work, event, EventStatus(EventState.CANCELLED, 0), cancelled == Status.OK, Own.CANCELLED)

    def _expire(self) -> None:
        """Out of time, or right."""
        run, work = self._slow(), programs.rotation_work(self._rng)
        run.write(work.inputs)
        # Certainly over, probably over, perhaps over, certainly not.
        limit = self._rng.choice((1, 100_000, 5_000_000, 60_000_000_000))
        event = self._submit(run, limit)
        late = EventStatus(EventState.FAILED, Status.DEADLINE_EXPIRED)
        self._ended_early(run, work, event, late, True if limit == 1 else None, Own.EXPIRED)

    def _ended_early(
        self, run: Invocation, work: programs.Work, event: Event, early: EventStatus, must: bool | None, word: Own
    ) -> None:
        """It ended as `early` says, if it `must` (None: it may), or completed. Then the buffers serve again."""
        status = self._outcome(event)
        if status == early and must is not False:
            self._count(word)
        elif must:
            raise Wrong(f"a submission ended as {status.state.name}, not as {early.state.name}")
        else:
            self._completed(status, programs.SLOW)
            self._check(programs.rotation(), work, run.read())
        data = np.ascontiguousarray(work.inputs[0]).reshape(-1).view(np.uint8).data
        client = self._device_or_connect().session.client
        self._until_free(lambda: client.write_buffer(run.buffers[0].id, 0, data))
        result = run.buffers[1].id
        self._until_free(lambda: client.read_buffer(result, 0, memoryview(bytearray(4))))
        self._completed(self._outcome(self._submit(run)), programs.SLOW)
        self._check(programs.rotation(), work, run.read())
        run.close()

    def _until_free(self, make: Callable[[], Request[None]]) -> None:
        """BUSY as long as native work goes on, and no longer than somebody's patience."""
        until = time.monotonic() + self._patience
        while (status := self._status(make())) == Status.BUSY:
            if time.monotonic() > until:
                raise NoAnswer(f"a buffer is BUSY {self._patience} s after its submission ended")
            time.sleep(_PAUSE)
        if status:
            raise Wrong(f"a buffer of an ended submission: {status_name(status)}")

    # ---- buffers

    def _transfer(self) -> None:
        """Allocate, free, write or read one."""
        choice = self._rng.random()
        if not self._kept or (choice < 0.15 and len(self._kept) < MOST_BUFFERS):
            # A byte, a cache line, a page, no multiple of anything, and a whole command.
            size = self._rng.choice((1, 64, 4096, 70_001, LARGEST_BUFFER))
            self._kept.append(Kept(self._device_or_connect().buffer(size), bytearray(size)))
            return
        kept = self._rng.choice(self._kept)
        if choice < 0.25:
            self._kept.remove(kept)
            kept.buffer.free()
            self._stale = kept.buffer.id
            return
        start, end = self._range(kept)
        if choice < 0.6:
            data = self._rng.randbytes(end - start)
            kept.buffer.write(memoryview(data), start)
            kept.content[start:end] = data
        else:
            sink = memoryview(bytearray(end - start))
            kept.buffer.read(sink, start)
            self._same(kept, start, sink)
        self._count(Own.BYTES, end - start)

    def _range(self, kept: Kept) -> tuple[int, int]:
        start = self._rng.randrange(kept.buffer.bytes)
        return start, self._rng.randrange(start, kept.buffer.bytes) + 1

    def _same(self, kept: Kept, start: int, found: memoryview) -> None:
        if found != memoryview(kept.content)[start : start + len(found)]:
            at = next(n for n, byte in enumerate(found) if byte != kept.content[start + n])
            raise Wrong(f"buffer of {kept.buffer.bytes} bytes: byte {start + at} is not what was written")

    def _transfer_several(self) -> None:
        """Reads that are all outstanding at once, collected in another order."""
        session = self._device_or_connect().session
        started = []
        # Bounded, so that all of them fit the transport's memory at once.
        for kept in self._kept[:8]:
            start, end = self._range(kept)
            end = min(end, start + (64 << 10))
            sink = memoryview(bytearray(end - start))
            started.append((kept, start, sink, session.start(session.client.read_buffer(kept.buffer.id, start, sink))))
        self._rng.shuffle(started)
        for kept, start, sink, token in started:
            session.result(token)
            self._same(kept, start, sink)
            self._count(Own.BYTES, len(sink))

    # ---- what a driver must not ask

    def _ask_wrongly(self) -> None:
        device = self._device_or_connect()
        client = device.session.client
        # Odd, so it is not zero, which is refused for another reason.
        foreign = Buffer(self._rng.getrandbits(63) | 1)
        cases: list[tuple[Request[None], Status]] = [
            (client.free_buffer(foreign if self._stale is None else self._stale), Status.STALE_OBJECT),
            (client.destroy_context(device.context), Status.BUSY),
            (client.free_buffer(Buffer(device.context)), Status.STALE_OBJECT),
            (client.free_buffer(Buffer(0)), Status.INVALID_ARGUMENT),
        ]
        if self._kept:
            buffer = self._rng.choice(self._kept).buffer
            beyond = client.read_buffer(buffer.id, buffer.bytes, memoryview(bytearray(1)))
            cases.append((beyond, Status.OUT_OF_BOUNDS))
        request, expected = self._rng.choice(cases)
        status = self._status(request)
        if status != expected:
            raise Wrong(f"opcode {request.opcode:#06x}: {status_name(status)}, not {expected.name}")

    def _status(self, request: Request[None]) -> int:
        """What the device says. Raises Lost."""
        try:
            self._device_or_connect().session.call(request)
        except DeviceError as error:
            if error.status == Status.DEVICE_LOST:
                self._judge(error)
            return error.status
        return Status.OK


def main(words: list[str]) -> int:
    """PATH COUNTERS GUESTS NUMBER SEED PATIENCE; the exit status."""
    path, counters, guests, number, seed, patience = words
    # So that the runner can ask a stuck guest where it is.
    faulthandler.register(signal.SIGUSR1)
    guest = Guest(path, Counters(Path(counters), int(guests)), int(number), Random(seed), float(patience))
    try:
        guest.live()
    except Wrong as error:
        print(f"{error}", file=sys.stderr)
        return EXIT_WRONG
    except (NoAnswer, TimeoutError) as error:
        print(f"no answer: {error}", file=sys.stderr)
        return EXIT_STUCK
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
