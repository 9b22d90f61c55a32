"""Remote control of the guest program over a character device: one JSON object a line, one answer for each.

Knows the operations in `OPERATIONS`; the host's half is guest_tools/vm.py. An answer is the operation's own fields, or
`error` (kind and text) where it failed: failures are answers here, since what fails how is what the host wants to know.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from virtaccel.guest_tools.bare.arrays import Array, ArrayError, compare, read_npz
from virtaccel.guest_tools.bare.model import Lane, Model
from virtaccel.guest_tools.client import Buffer, ClientError, DeviceError, Event, status_name
from virtaccel.guest_tools.errors import AcceleratorError, Refused
from virtaccel.guest_tools.pci.function import COMMAND, COMMAND_MASTER, DEVICES, choose
from virtaccel.guest_tools.pci.transport import PciTransport, open_pci
from virtaccel.guest_tools.session import Session
from virtaccel.guest_tools.transport.base import TransportError

# A host that never ends its line must not fill the guest's memory; files of some tens of MiB fit, in base64.
LONGEST_LINE = 64 << 20
Fields = dict[str, Any]
EXPECTED = (ClientError, TransportError, AcceleratorError, ArrayError, OSError, KeyError, ValueError)


class Line:
    """Whole lines over a file descriptor that delivers pieces."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""

    def read(self) -> bytes | None:
        """The next line without its end; None when the other side is gone."""
        # A character device delivers what has come, not what was sent.
        while b"\n" not in self._rest:
            if len(self._rest) > LONGEST_LINE:
                raise ValueError("the line is too long")
            piece = os.read(self._fd, 1 << 16)
            if not piece:
                return None
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def write(self, fields: Fields) -> None:
        data = memoryview(json.dumps(fields).encode() + b"\n")
        while data:
            data = data[os.write(self._fd, data) :]


class Remote:
    """The device as the host plays with it: a session, a model, and submissions under way."""

    def __init__(self, run: Callable[[list[str]], int]) -> None:
        self._run = run
        self.session: Session | None = None
        self.model: Model | None = None
        self.expected: list[Array] = []
        self.events: list[Event] = []
        self.tokens: list[int] = []

    def handle(self, fields: Fields) -> Fields:
        """Carry out one operation."""
        name = fields.pop("op", None)
        operation = OPERATIONS.get(name) if isinstance(name, str) else None
        if operation is None:
            return {"error": {"kind": "ValueError", "text": f"no operation {name!r}"}}
        start = time.monotonic()
        try:
            answer = operation(self, **fields)
        # Anything else is a mistake in here, and ends the program with its traceback.
        except EXPECTED as error:
            answer = {"error": {"kind": type(error).__name__, "text": str(error)}}
            if isinstance(error, (DeviceError, Refused)):
                answer["error"]["status"] = status_name(error.status)
        answer["seconds"] = time.monotonic() - start
        return answer

    @property
    def _session(self) -> Session:
        if self.session is None:
            raise ValueError("not open")
        return self.session

    @property
    def _model(self) -> Model:
        if self.model is None:
            raise ValueError("no model loaded")
        return self.model

    def program(self, argv: list[str], files: list[str]) -> Fields:
        """The guest program itself with these arguments: its status, its text, and the files it left."""
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            status = self._run(argv)
        found = {name: Path(name) for name in files if Path(name).is_file()}
        return {
            "status": status,
            "text": text.getvalue(),
            "files": {name: base64.b64encode(path.read_bytes()).decode() for name, path in found.items()},
        }

    def killed(self, argv: list[str], seconds: float) -> Fields:
        """The guest program in a process of its own, killed after so long: was it running, and is its function still
        a bus master?"""
        import subprocess  # only here: under emulation importing it costs every start a quarter of a second

        self.close()
        child = subprocess.Popen(
            [sys.executable, sys.argv[0], *argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(seconds)
        running = child.poll() is None
        child.kill()
        child.wait()
        # A function that stays bus master after its driver was killed could still write to that driver's pages.
        command = (DEVICES / choose(None) / "config").read_bytes()[COMMAND]
        return {"running": running, "master": bool(command & COMMAND_MASTER)}

    def open(self, **options: Any) -> Fields:
        """Take the function over (options as open_pci's)."""
        self.close()
        transport: PciTransport = open_pci(**options)
        self.session = Session(transport)
        return {"how": transport.how, "config": list(transport.config), "address": transport.function.address}

    def close(self) -> Fields:
        """Let the function go."""
        self._forget()
        if self.session is not None:
            self.session.close()
        self.session = None
        return {}

    def _forget(self) -> None:
        self.model = None
        self.events, self.tokens = [], []

    def reset(self) -> Fields:
        """A reset by the driver."""
        self._forget()
        self._session.reset()
        return {}

    def call(self, name: str, arguments: list[Any], keywords: Fields | None = None) -> Fields:
        """One command by the name of its Client method, with integers as arguments."""
        # Commands only: no host may reach into the client.
        if name.startswith("_"):
            raise ValueError(name)
        value = self._session.call(getattr(self._session.client, name)(*arguments, **(keywords or {})))
        if hasattr(value, "_asdict"):
            value = {key: item.hex() if isinstance(item, bytes) else item for key, item in value._asdict().items()}
        return {"value": value}

    def commands(self, count: int) -> Fields:
        """GET_DEVICE_INFO so many times: round trips in microseconds, and how many differing answers there were."""
        session = self._session
        times, answers = [], set()
        for _ in range(count):
            start = time.perf_counter_ns()
            answers.add(session.call(session.client.get_device_info()))
            times.append(time.perf_counter_ns() - start)
        times.sort()
        return {
            "answers": len(answers),
            "count": len(times),
            "median_us": times[len(times) // 2] / 1000,
            "p99_us": times[len(times) * 99 // 100] / 1000,
            "interrupts": session.transport.interrupts,
        }

    def load(self, model: str, check: str | None = None) -> Fields:
        """Load a model; with `check`, write its inputs and remember its outputs."""
        self.model = Model(self._session, Path(model).read_bytes())
        self.expected = []
        if check is not None:
            arrays = read_npz(Path(check))
            program = self._model.program
            self._model.lanes[0].run.write([arrays[f"in_{index}"].data for index in range(len(program.inputs))])
            self.expected = [arrays[f"out_{index}"] for index in range(len(program.outputs))]
        loaded, context = self._model, self._model.context
        buffers = [buffer.id for buffer in loaded.lanes[0].run.buffers]
        return {"context": context.context, "program": loaded.program.id, "queue": context.queue, "buffers": buffers}

    def _right(self, lane: Lane) -> bool:
        """Whether all outputs of a lane are what they should be."""
        return all(compare(got, want).good for got, want in zip(lane.run.read(), self.expected, strict=True))

    def submissions(self, count: int) -> Fields:
        """So many runs one after another, each checked."""
        model, right = self._model, 0
        lane = model.lanes[0]
        for _ in range(count):
            model.blank(lane)
            model.finish(self._session.call(model.submission(lane)))
            right += self._right(lane)
        return {"right": right, "count": count}

    def begin(self, count: int) -> Fields:
        """Publish so many SUBMIT commands, each with output buffers of its own, and collect none of them."""
        session, model = self._session, self._model
        # Buffers are busy until their run has ended, so each run under way has its own.
        while len(model.lanes) < count:
            model.lanes.append(model.new_lane())
        for lane in model.lanes[:count]:
            model.blank(lane)
        self.tokens = [session.start(model.submission(lane)) for lane in model.lanes[:count]]
        return {"outstanding": len(self.tokens)}

    def admitted(self) -> Fields:
        """Collect the answers to `begin`: the events."""
        refused = []
        for token in self.tokens:
            try:
                self.events.append(self._session.result(token))
            except DeviceError as error:
                refused.append(status_name(error.status))
        self.tokens = []
        return {"events": list(self.events), "refused": refused}

    def states(self) -> Fields:
        """Poll every event once."""
        poll = self._session.client.poll_event
        return {"states": [self._session.call(poll(event)).state.name for event in self.events]}

    def finish(self, timeout: float = 60.0) -> Fields:
        """Wait for all events of `begin`, destroy them, and check each lane's outputs."""
        for event in self.events:
            self._model.finish(event, timeout)
        right = sum(self._right(lane) for lane in self._model.lanes[: len(self.events)])
        count, self.events = len(self.events), []
        return {"finished": count, "right": right}

    def digest(self, buffer: int, size: int) -> Fields:
        """How many bytes of a buffer are not zero."""
        sink = bytearray(size)
        self._session.read(Buffer(buffer), memoryview(sink))
        return {"nonzero": size - sink.count(0)}

    def traffic(self, seconds: float) -> Fields:
        """Commands as fast as they go, for so long or until the device fails; the failure is part of the answer."""
        session, count = self._session, 0
        last = time.monotonic()
        end = last + seconds
        try:
            while last < end:
                session.call(session.client.get_device_info())
                count += 1
                last = time.monotonic()
        except TransportError as error:
            waited = time.monotonic() - last
            return {"count": count, "kind": type(error).__name__, "text": str(error), "waited": waited}
        return {"count": count, "kind": None}


OPERATIONS: dict[str, Callable[..., Fields]] = {
    operation.__name__: operation
    for operation in (
        Remote.program, Remote.killed, Remote.open, Remote.close, Remote.reset, Remote.call, Remote.commands,
        Remote.load, Remote.submissions, Remote.begin, Remote.admitted, Remote.states, Remote.finish, Remote.digest,
        Remote.traffic,
    )
}  # fmt: skip


def serve(port: str, run: Callable[[list[str]], int]) -> int:
    """Answer on the device node `port` until the other side closes it."""
    fd = os.open(port, os.O_RDWR | os.O_CLOEXEC)
    line = Line(fd)
    # So that the host can tell a guest that was reset from one that was slow.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # The empty line ends whatever a guest before a reset was in the middle of.
    os.write(fd, b"\n")
    line.write({"hello": "virtaccel", "boot": boot, "python": sys.version.split()[0]})
    remote = Remote(run)
    while (text := line.read()) is not None:
        if not text.strip():
            continue
        try:
            fields = json.loads(text)
            answer = (
                remote.handle(fields)
                if isinstance(fields, dict)
                else {"error": {"kind": "ValueError", "text": "no object"}}
            )
        except ValueError as error:
            answer = {"error": {"kind": "ValueError", "text": str(error)}}
        line.write(answer)
    return 0
