"""Work that takes long, compiling above all, on one daemon thread beside the command loop, told by an eventfd.

It knows callables and nothing of programs. A job's result is taken on the loop's thread; the thread itself touches
nothing but the job. TOSA and the protocol play no part here.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Job(Generic[T]):
    """One piece of work. `result` may be asked once `done`."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._result: T | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self.on_abandon: Callable[[], None] | None = None
        """Set by work that can be cut short; called from another thread, perhaps when the work has just ended."""

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def abandon(self) -> None:
        """Nobody wants the result any more; a job that has not started is not started."""
        self._work = None
        cut_short = self.on_abandon
        if cut_short is not None:
            cut_short()

    def run(self) -> None:
        """Do the work; whatever it raises is kept for `result`."""
        work = self._work
        _running.job = self
        try:
            if work is not None:
                self._result = work()
        except BaseException as error:  # it belongs to whoever asks for the result
            self._error = error
        _running.job = None
        self._work = None
        self._ended.set()

    def result(self) -> T:
        """What the work returned, or raises what it raised."""
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


_running = threading.local()


def current_job() -> Job[object] | None:
    """The job that the calling thread runs."""
    job: Job[object] | None = getattr(_running, "job", None)
    return job


class Loader:
    """Runs jobs one after another. The descriptor becomes readable when one has ended."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job[object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        # Holds the descriptor, closed by whichever of owner and thread comes last, and `_told`: that it is readable.
        self._lock = threading.Lock()
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._told = False

    @property
    def descriptor(self) -> int:
        return self._descriptor

    def submit(self, work: Callable[[], T]) -> Job[T]:
        """Queue a job; the thread is started by the first."""
        job = Job(work)
        self._jobs.put(job)  # type: ignore[arg-type]  # the queue never looks at results
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return job

    def acknowledge(self) -> None:
        """Make the descriptor quiet."""
        with self._lock:  # who has seen it readable finds it told
            if self._told:
                self._told = False
                os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """No further jobs; the thread ends with the one it runs. Never waits."""
        self._closed = True
        self._jobs.put(None)
        if self._thread is None:
            os.close(self._descriptor)
        else:
            with self._lock:
                os.close(self._descriptor)
                self._descriptor = -1

    def join(self, timeout: float) -> bool:
        """Wait for the thread's end after `close`, at most `timeout` seconds; whether it has ended."""
        if self._thread is not None:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._closed:
                job.abandon()
            job.run()
            del job
            with self._lock:
                if self._descriptor >= 0:
                    os.eventfd_write(self._descriptor, 1)
                    self._told = True
