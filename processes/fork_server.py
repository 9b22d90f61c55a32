"""A process that has imported everything heavy, runs no thread, and forks a child whenever it is asked to.

Starting an interpreter and a runtime takes about a second; a fork of one that stands ready takes milliseconds, and
starts from a state that no guest has touched. `ForkServer` is the side that asks, `Child` a process as that side sees
it; `attend` is the fork server itself. Every process here ends when the one that asked for it does. Knows nothing of
accelerators: what is imported and what a child does is the business of the module it is started with, whose `prepare`
takes the command line's words and returns the function that children run.

A request is one datagram: the child's work as bytes, and descriptors, the first of which is the child's lifeline. On it
the fork server says the child's process number, then how it ended; when its other end is closed the child is killed.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Final, NoReturn, TypeAlias

from virtaccel.processes import confine

log = logging.getLogger(__name__)

Run: TypeAlias = Callable[[bytes, list[int]], int]
"""What a child does: its work and its descriptors, and the exit status that comes of it."""

MAX_WORK_BYTES: Final = 1 << 16
MAX_DESCRIPTORS: Final = 8
MAX_CHILDREN: Final = 256
_LIFE: Final = Struct("<i")
_CRASHED: Final = 70
_START: Final = f"import sys; from {__name__} import main; main(sys.argv[1:])"


class ForkServerLost(Exception):
    """The fork server has ended, so nothing can be started there any more."""


class Child:
    """A process that a fork server forked. `fileno` becomes readable when there is something to learn about it."""

    def __init__(self, lifeline: socket.socket) -> None:
        self._lifeline = lifeline
        self.process: int | None = None
        self._status: int | None = None

    def fileno(self) -> int:
        return self._lifeline.fileno()

    def born(self, timeout: float) -> int:
        """Its process number, waiting for it. Raises ForkServerLost, TimeoutError."""
        if self.process is None:
            self._lifeline.settimeout(timeout)
            self.process = self._learn()
        return self.process

    def ended(self, timeout: float) -> int | None:
        """How it ended: an exit status, or minus the signal's number; None if it still runs. Raises ForkServerLost."""
        until = time.monotonic() + timeout
        try:
            self.born(timeout)
            if self._status is None:
                self._lifeline.settimeout(max(until - time.monotonic(), 1e-6))
                self._status = os.waitstatus_to_exitcode(self._learn())
        except TimeoutError:
            return None
        return self._status

    def _learn(self) -> int:
        try:
            data = self._lifeline.recv(_LIFE.size)
        except ConnectionError as error:
            raise ForkServerLost(str(error)) from error
        if len(data) != _LIFE.size:
            raise ForkServerLost("the fork server has ended")
        return int(_LIFE.unpack(data)[0])

    def kill(self) -> None:
        """End it, unless it has ended, and forget it. May be called at any time, from another thread too."""
        with contextlib.suppress(OSError):
            self._lifeline.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.kill()
        self._lifeline.close()


class ForkServer:
    """The asking side. Several threads may use it."""

    def __init__(self, control: socket.socket, process: subprocess.Popen[bytes] | int) -> None:
        self._control = control
        self._process = process

    @property
    def pid(self) -> int:
        return self._process if isinstance(self._process, int) else self._process.pid

    @classmethod
    def spawn(cls, module: str, *words: str) -> ForkServer:
        """A fresh interpreter with `module`. Returns at once; what is asked for meanwhile waits for it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            level = logging.getLevelName(logging.getLogger().getEffectiveLevel())
            command = [sys.executable, "-c", _START, str(theirs.fileno()), level, module, *words]
            # OpenBLAS would start a thread, and a process with threads must not fork.
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
            try:
                process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                ours.close()
                raise ForkServerLost(f"cannot start an interpreter: {error}") from error
        return cls(ours, process)

    @classmethod
    def fork(cls, run: Run) -> ForkServer:
        """A fork of this process, which must have no other thread and should not have touched anything of a guest's."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        process = os.fork()
        if not process:
            confine.die_with_parent(parent)
            confine.keep_only([theirs.fileno()])
            _leave(lambda: attend(theirs, run))
        theirs.close()
        return cls(ours, process)

    def start(self, work: bytes, descriptors: Sequence[int]) -> Child:
        """Ask for a child. The descriptors stay the caller's. Raises ForkServerLost."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            rights = array.array("i", [theirs.fileno(), *descriptors])
            try:
                self._control.sendmsg([work], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], socket.MSG_NOSIGNAL)
            except OSError as error:
                ours.close()
                raise ForkServerLost(f"the fork server has ended: {error.strerror}") from error
        return Child(ours)

    def close(self) -> None:
        """End it and every child of it."""
        self._control.close()
        if isinstance(self._process, int):
            _end_fork(self._process)
            return
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _end_fork(process: int) -> None:
    """Kill and reap a child of this process. One that is confined may kill nobody; the child then ends by itself, since
    nobody can ask it any more."""
    with contextlib.suppress(OSError):
        os.kill(process, signal.SIGKILL)
    until = time.monotonic() + 1.0
    with contextlib.suppress(ChildProcessError):
        while not os.waitpid(process, os.WNOHANG)[0] and time.monotonic() < until:
            time.sleep(0.001)


# ---- the fork server itself


def attend(control: socket.socket, run: Run) -> None:
    """Fork children that `run`, until nobody is left who could ask."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # whoever asked decides when this ends
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    gc.collect()
    gc.freeze()  # the collector would otherwise write to, and so copy, every page that children share
    lifelines: dict[int, socket.socket] = {}
    dying: set[int] = set()
    while True:
        living = {line.fileno(): process for process, line in lifelines.items() if process not in dying}
        readable = select.select([control.fileno(), woken, *living], [], [])[0]
        if control.fileno() in readable and not _asked(control, run, lifelines):
            break
        if woken in readable:
            os.read(woken, 4096)
        for descriptor in readable:
            if descriptor in living:
                dying.add(living[descriptor])
                os.kill(living[descriptor], signal.SIGKILL)  # not reaped yet, so the number is its own
        _reap(lifelines)
        dying &= lifelines.keys()
    for process in lifelines:
        os.kill(process, signal.SIGKILL)


def _asked(control: socket.socket, run: Run, lifelines: dict[int, socket.socket]) -> bool:
    """Fork for one request; False if there will be no more."""
    room = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
    work, ancillary, _, _ = control.recvmsg(MAX_WORK_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for _, _, content in ancillary:
        descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    if not work or not descriptors:
        return False
    line = socket.socket(fileno=descriptors[0])
    parent = os.getpid()
    try:
        process = -1 if len(lifelines) >= MAX_CHILDREN else os.fork()
    except OSError as error:
        log.error("cannot fork: %s", error.strerror)
        process = -1
    if not process:
        _leave(lambda: _live(run, work, list(descriptors[1:]), parent))
    for descriptor in descriptors[1:]:
        os.close(descriptor)
    if process < 0:
        line.close()
        return True
    lifelines[process] = line
    with contextlib.suppress(OSError):
        line.send(_LIFE.pack(process), socket.MSG_NOSIGNAL)
    return True


def _reap(lifelines: dict[int, socket.socket]) -> None:
    """Tell how children ended, to those who still want to know."""
    for process, line in list(lifelines.items()):
        try:
            reaped, status = os.waitpid(process, os.WNOHANG)
        except ChildProcessError:
            reaped, status = process, 0
        if reaped:
            with contextlib.suppress(OSError):
                line.send(_LIFE.pack(status), socket.MSG_NOSIGNAL)
            lifelines.pop(process).close()


def _live(run: Run, work: bytes, descriptors: list[int], parent: int) -> int:
    confine.die_with_parent(parent)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    confine.keep_only(descriptors)
    return run(work, descriptors)


def _leave(work: Callable[[], int | None]) -> NoReturn:
    """Work, then end, without running what the process that was forked has registered for its own end."""
    status = _CRASHED
    try:
        status = work() or 0
    except BaseException:
        log.exception("a process of the device failed")
    finally:
        logging.shutdown()
        os._exit(status)


def main(words: Sequence[str]) -> None:
    """What `spawn` starts, with CONTROL-FD LOG-LEVEL MODULE WORDS..."""
    control = socket.socket(fileno=int(words[0]))
    control.set_inheritable(False)
    logging.basicConfig(
        level=words[1], stream=sys.stderr, format="%(asctime)s %(name)s[%(process)d] %(levelname)s: %(message)s"
    )
    run: Run = importlib.import_module(words[2]).prepare(words[3:])
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        log.warning("%d threads run in a process that is to be forked", threads)
    _leave(lambda: attend(control, run))
