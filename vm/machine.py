"""One running QEMU and the guest program inside it: start, ask, pause, reset, end.

Knows QEMU's process and the line protocol of guest_tools/bare/remote.py. Does not know the daemon.
"""

from __future__ import annotations

import base64
import json
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from virtaccel.processes.child import Child
from virtaccel.vm import commands
from virtaccel.vm.image import GUEST_PROGRAM, base_image, guest_program, job_archive
from virtaccel.vm.qemu import Sysroot
from virtaccel.vm.qmp import Qmp, QmpError, connect

BOOT_S = 90.0
ANSWER_S = 120.0
POWER_OFF_S = 10.0


class MachineError(Exception):
    """The guest did not come up, did not answer, or QEMU ended; the text has the end of the log that tells why."""


class GuestFailure(Exception):
    """An operation failed in the guest: `kind` is the exception's name there, `status` the device's status, if any."""

    def __init__(self, kind: str, text: str, status: str | None) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.status = status


class Machine:
    """A QEMU with one device, its guest program waiting for operations."""

    def __init__(
        self,
        sysroot: Sysroot,
        pairing: commands.Pairing,
        folder: Path,
        accelerator: str,
        files: Mapping[str, bytes],
        *,
        reboots: bool = False,
    ) -> None:
        self._folder = folder
        self._socket: socket.socket | None = None
        self._rest = b""
        self._qmp: Qmp | None = None
        initrd = write_initrd(sysroot, folder, files)
        self.console = folder / "console.log"
        command = [
            *sysroot.qemu(),
            *base_arguments(pairing, accelerator),
            *commands.control_arguments(folder / "qmp", folder / "port"),
            *commands.kernel_arguments(sysroot.kernel, initrd, "quiet virtaccel.mode=serve"),
            *("-display", "none", "-serial", f"file:{self.console}"),
            *(() if reboots else ("-no-reboot",)),
        ]
        self.qemu = Child("QEMU", command, folder / "qemu.log")

    @property
    def qmp(self) -> Qmp:
        if self._qmp is None:
            try:
                self._qmp = Qmp(self._folder / "qmp")
            except QmpError as error:
                raise self._failed(str(error)) from error
        return self._qmp

    def wait_ready(self, timeout: float = BOOT_S) -> dict[str, Any]:
        """Wait for the guest program's greeting: after the start, and after each system reset."""
        limit = time.monotonic() + timeout
        if self._socket is None:
            while not (self._folder / "port").exists() and self.qemu.status is None and time.monotonic() < limit:
                time.sleep(0.02)
            try:
                self._socket = connect(self._folder / "port", 5.0)
            except QmpError as error:
                raise self._failed(str(error)) from error
        while True:
            fields = self._receive(limit)
            if "hello" in fields:
                return fields

    def ask(self, op: str, *, timeout: float = ANSWER_S, **fields: Any) -> dict[str, Any]:
        """One operation in the guest. Raises GuestFailure where it failed there, MachineError where no answer came."""
        self.send(op, **fields)
        return self.answer(timeout)

    def send(self, op: str, **fields: Any) -> None:
        """Begin an operation whose answer is taken later."""
        if self._socket is None:
            raise MachineError("the guest is not up")
        try:
            self._socket.settimeout(ANSWER_S)
            self._socket.sendall(json.dumps({"op": op, **fields}).encode() + b"\n")
        except OSError as error:
            raise self._failed(f"the guest's port is closed ({error})") from error

    def answer(self, timeout: float = ANSWER_S) -> dict[str, Any]:
        """The answer to the operation sent last."""
        fields = self._receive(time.monotonic() + timeout)
        if "error" in fields:
            error = fields["error"]
            raise GuestFailure(error["kind"], error["text"], error.get("status"))
        return fields

    def run_program(
        self, argv: Sequence[str], files: Sequence[str], timeout: float
    ) -> tuple[int, str, dict[str, bytes]]:
        """The guest program with these arguments: status, text, and those of `files` that it left."""
        done = self.ask("program", argv=list(argv), files=list(files), timeout=timeout)
        brought = {name: base64.b64decode(data) for name, data in done["files"].items()}
        return int(done["status"]), str(done["text"]), brought

    def _receive(self, limit: float) -> dict[str, Any]:
        while True:
            line = self._line(limit)
            try:
                fields = json.loads(line)
            except ValueError:
                continue  # what a guest had begun to say when it was reset
            if isinstance(fields, dict):
                return fields

    def _line(self, limit: float) -> bytes:
        assert self._socket is not None
        while b"\n" not in self._rest:
            left = limit - time.monotonic()
            if left <= 0:
                raise self._failed("no answer from the guest in time")
            self._socket.settimeout(min(left, 1.0))
            try:
                piece = self._socket.recv(1 << 16)
            except TimeoutError:
                if self.qemu.status is not None:
                    raise self._failed("QEMU has ended") from None
                continue
            except OSError as error:
                raise self._failed(f"the guest's port broke: {error}") from error
            if not piece:
                raise self._failed("QEMU closed the guest's port")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def system_reset(self) -> None:
        """The reset button."""
        self.qmp.execute("system_reset")

    def close(self) -> None:
        """End the machine: the guest powers off when its port closes, then QEMU is ended."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._qmp is not None:
            self._qmp.close()
            self._qmp = None
        self.qemu.stop()

    def _failed(self, what: str) -> MachineError:
        try:
            console = "\n".join(self.console.read_text(errors="replace").splitlines()[-15:])
        except OSError:
            console = ""
        ended = "" if self.qemu.status is None else f" (QEMU's exit status is {self.qemu.status})"
        return MachineError("\n".join(part for part in (what + ended, self.qemu.tail(), console) if part))


def base_arguments(pairing: commands.Pairing, accelerator: str) -> list[str]:
    """A machine with the device and nothing that nobody asked for. It ends with the process that started it."""
    return [
        *("-nodefaults", "-no-user-config", "-run-with", "exit-with-parent=on"),
        *commands.memory_arguments(pairing),
        *commands.processor_arguments(accelerator),
        *commands.device_arguments(pairing),
    ]


def write_initrd(sysroot: Sysroot, folder: Path, files: Mapping[str, bytes]) -> Path:
    """The base image with the guest program and one run's files behind it."""
    path = folder / "initrd"
    path.write_bytes(
        base_image(sysroot).read_bytes() + job_archive({f"/{GUEST_PROGRAM}": guest_program(sysroot), **files})
    )
    return path
