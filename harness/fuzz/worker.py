"""One process of a fuzzing run: makes its target, fuzzes it, and tells its parent.

What is being run at the moment lies in memory that the parent can read, so an input that kills this process, or never
ends, is known all the same.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import signal
import sys
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from random import Random
from struct import Struct
from typing import Any, Final, NamedTuple

from virtaccel.harness.fuzz.engine import Found, Fuzzer, Limits, Tally, Watcher, describe, signature
from virtaccel.harness.fuzz.target import Target
from virtaccel.harness.fuzz.targets import make
from virtaccel.processes.confine import die_with_parent

INPUT_BYTES: Final = 1 << 20
MEMORY_BYTES: Final = 8 << 30
FRESH_INPUTS: Final = 64
_COUNTS: Final = Struct("=QQI")
SHARED_BYTES: Final = _COUNTS.size + INPUT_BYTES


class Order(NamedTuple):
    """What a process is to do. `scratch` is a folder for libFuzzer to begin with, empty where our own engine runs."""

    target: str
    via: str
    seed: int
    limits: Limits
    corpus: tuple[bytes, ...]
    keep: str
    scratch: str


class Slate:
    """Shared between a process and its parent: inputs and steps so far, and the input at hand."""

    def __init__(self, raw: Any = None) -> None:
        self.raw = raw if raw is not None else RawArray("B", SHARED_BYTES)
        self._view = memoryview(self.raw).cast("B")

    def begin(self, data: bytes) -> None:
        """Called for every input: two stores."""
        size = min(len(data), INPUT_BYTES)
        self._view[_COUNTS.size : _COUNTS.size + size] = data[:size]
        self._view[16:20] = size.to_bytes(4, sys.byteorder)

    def count(self, inputs: int, steps: int) -> None:
        _COUNTS.pack_into(self._view, 0, inputs, steps, 0)

    def read(self) -> tuple[int, int, bytes]:
        """Inputs, steps, and the input at hand (empty between inputs)."""
        inputs, steps, size = _COUNTS.unpack_from(self._view)
        return inputs, steps, bytes(self._view[_COUNTS.size : _COUNTS.size + size])


def work(order: Order, raw: Any, talk: Connection) -> None:
    """The process: sends ("found", Found), and at the end ("done", inputs) or ("failed", text)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us in order
    parent = parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)  # and if it is killed, it cannot
    logging.disable(logging.CRITICAL)  # whatever a fuzzed device says of its guest
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        slate = Slate(raw)
        watcher = Watcher(slate.begin, slate.count, lambda found: talk.send(("found", found)), _keeper(order.keep))
        if order.scratch:
            _follow_coverage(order, watcher)
            return
        target = make(order.target, order.via)
        gc.freeze()  # what is loaded by now stays: the collector need not look at it again
        tally = Fuzzer(target, order.seed, order.corpus, watcher).run(order.limits)
        target.close()
        talk.send(("done", tally.inputs))
    except Exception as error:
        talk.send(("failed", f"{type(error).__name__}: {error}"))


def _keeper(folder: str) -> Any:
    """Stores inputs that are worth keeping into `folder`, if there is one."""
    if not folder:
        return lambda data: None

    def keep(data: bytes) -> None:
        import hashlib

        (Path(folder) / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)

    return keep


def _follow_coverage(order: Order, watcher: Watcher) -> None:
    """Let libFuzzer choose the inputs, by the code that they reach. It ends this process itself."""
    _fall_silent()
    import atheris

    with atheris.instrument_imports(include=["virtaccel.device", "virtaccel.virtqueue", "virtaccel.tosa_graph"]):
        for name in ("device.ring_service", "device.vhost_user.server", "virtqueue.driver", "tosa_graph.validate"):
            __import__(f"virtaccel.{name}")
    target: Target = make(order.target, order.via)
    tally = Tally()
    known: set[str] = set()

    def one(data: bytes) -> None:
        watcher.before(data)
        try:
            tally.steps += target.execute(data)
        except Exception as error:
            if signature(error) not in known:
                found = describe(target, data, error)
                known.update((signature(error), found.signature))
                watcher.found(found)
        tally.inputs += 1
        watcher.after(tally.inputs, tally.steps)

    options = [f"-seed={order.seed & 0x7FFFFFFF or 1}", "-verbosity=0", f"-max_len={1 << 14}", "-print_final_stats=0"]
    if order.limits.seconds is not None:
        options.append(f"-max_total_time={max(1, int(order.limits.seconds))}")
    # libFuzzer adds to the first folder; the other is only there to begin with, and its owner is our parent.
    random = Random(order.seed)
    for index, data in enumerate((*order.corpus, *(target.generate(random) for _ in range(FRESH_INPUTS)))):
        (Path(order.scratch) / str(index)).write_bytes(data)
    atheris.Setup([sys.argv[0], *options, *([order.keep] if order.keep else []), order.scratch], one)
    atheris.Fuzz()


def _fall_silent() -> None:
    """libFuzzer talks to descriptor 2 directly."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


__all__ = ["Found", "Order", "Slate", "work"]
