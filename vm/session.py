"""Daemon and machine together: everything that one run starts, and that everything ends with it.

One daemon serves one machine here; several sessions at once are several folders, sockets and processes.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from virtaccel.device.launcher import Daemon, DaemonFailed
from virtaccel.processes.child import Child
from virtaccel.vm import commands, qemu
from virtaccel.vm.machine import Machine, MachineError, base_arguments, write_initrd


@dataclass(frozen=True)
class Options:
    """How to pair. `daemon` are further arguments of vhost-user-accel; `accelerator` None means: find out."""

    memory_mib: int = 512
    virtio_id: int = 21
    accelerator: str | None = None
    reboots: bool = False
    daemon: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)


class VmSession:
    """A context manager: a private folder, a daemon in it, and, once started, a machine."""

    def __init__(self, options: Options, progress: qemu.Progress = qemu.silent) -> None:
        self.options = options
        self._progress = progress
        self.folder = Path(tempfile.mkdtemp(prefix="virtaccel-vm-"))
        self._stack = ExitStack()
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        try:
            self.sysroot = qemu.obtain(progress)
            self.accelerator = options.accelerator or qemu.accelerator(self.sysroot, progress)
            socket = self.folder / "accel.sock"
            self.pairing = commands.Pairing(socket, options.memory_mib, options.virtio_id)
            self.daemon = self._stack.enter_context(Daemon([socket], self.folder / "daemon.log", *options.daemon))
        except DaemonFailed as error:
            self._stack.close()
            raise MachineError(str(error)) from error
        except BaseException:
            self._stack.close()
            raise
        self.machine: Machine | None = None

    def start(self) -> Machine:
        """Boot the guest and wait for its program."""
        self._progress(f"booting a guest under {self.accelerator.upper()}")
        options = self.options
        machine = Machine(
            self.sysroot,
            self.pairing,
            self.folder,
            self.accelerator,
            options.files,
            reboots=options.reboots,
        )
        self._stack.callback(machine.close)
        try:
            machine.wait_ready()
        except MachineError as error:
            raise MachineError(f"{error}\n{self.daemon.tail()}".strip()) from error
        self.machine = machine
        return machine

    def shell(self) -> int:
        """A guest with its console on this terminal; returns QEMU's exit status."""
        pairing = replace(self.pairing)
        initrd = write_initrd(self.sysroot, self.folder, self.options.files)
        command = [
            *self.sysroot.qemu(),
            *base_arguments(pairing, self.accelerator),
            *commands.kernel_arguments(self.sysroot.kernel, initrd, "quiet virtaccel.mode=shell"),
            *("-display", "none", "-serial", "mon:stdio", "-no-reboot"),
        ]
        console = Child("QEMU", command, self.folder / "qemu.log", interactive=True)
        self._stack.callback(console.stop)
        return console.wait() or 0

    def logs(self) -> dict[str, bytes]:
        """Log files of this run by name."""
        return {path.name: path.read_bytes() for path in sorted(self.folder.glob("*.log"))}

    def close(self) -> None:
        """End everything that was started here, and remove the folder. May be called twice."""
        self._stack.close()

    def __enter__(self) -> VmSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
