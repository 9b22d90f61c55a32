"""`virtaccel vm`: a guest of our own with the device in it: run a model there, open a shell, or print how to pair by
hand.

Knows options and what to print; guest_tools.vm does the work. Exit status of `run` is the guest program's: 0 good, 1
a check failed, 2 bad input, 3 the device was lost.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import click

from virtaccel.guest_tools.errors import AcceleratorError
from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import TosaError
from virtaccel.vm import commands
from virtaccel.vm.machine import GuestFailure, MachineError
from virtaccel.vm.qemu import QemuUnavailable
from virtaccel.vm.session import Options, VmSession

F = TypeVar("F", bound=Callable[..., Any])
EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)
RESULT = "/tmp/outputs.npz"


class VmError(AcceleratorError):
    """No guest could be had, or it failed; shown as one line."""


def _machine_options(function: F) -> F:
    for option in (
        click.option("--accel", type=click.Choice(["kvm", "tcg"]), help="Instead of probing KVM."),
        click.option("--memory", default=512, show_default=True, metavar="MIB", help="The guest's memory."),
        click.option("--backend", metavar="NAME", help="The daemon's backend."),
        click.option("--device", metavar="NAME", help="The backend's device (CPU, GPU, NPU...)."),
    ):
        function = option(function)
    return function


@click.group()
def vm() -> None:
    """A virtual machine with the device: QEMU and a guest are fetched and built as needed, without root."""


@vm.command()
@click.argument("model", type=EXISTING)
@click.option("--check", type=EXISTING, metavar="FILE.npz", help="Feed its in_K, compare with its out_K.")
@click.option(
    "--input", "inputs", type=EXISTING, multiple=True, metavar="FILE.npy", help="One for each input, in order."
)
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.npz", help="Store the outputs."
)
@click.option("--atol", default=0.0, help="Allowed difference of integers.")
@click.option("--repeat", default=1, show_default=True)
@click.option("--polling", is_flag=True, help="Without interrupts in the guest.")
@click.option("--timeout", default=120.0, show_default=True, metavar="SECONDS", help="For the run inside the guest.")
@click.option("--logs", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Keep the logs there.")
@_machine_options
def run(
    model: Path, check: Path | None, inputs: tuple[Path, ...], output: Path | None, logs: Path | None, **options: Any
) -> None:
    """Run MODEL on arrays inside a guest, on this host's backend."""
    _check_model(model)
    files = {"/job/" + path.name: path.read_bytes() for path in (model, *((check,) if check else ()), *inputs)}
    argv = ["--polling"] if options["polling"] else []
    argv += ["run", f"/job/{model.name}", "--repeat", str(options["repeat"]), "--atol", str(options["atol"])]
    argv += ["--check", f"/job/{check.name}"] if check else []
    for path in inputs:
        argv += ["--input", f"/job/{path.name}"]
    argv += ["--output", RESULT] if output else []
    start = time.monotonic()
    with _session(options, files) as session:
        try:
            machine = session.start()
            _progress(f"the guest is up after {time.monotonic() - start:.1f} s")
            status, text, brought = machine.run_program(argv, [RESULT], options["timeout"])
        except (MachineError, GuestFailure) as error:
            raise VmError(str(error)) from error
        finally:
            _keep_logs(session, logs)
    click.echo(text, nl=False)
    if output is not None and RESULT in brought:
        output.write_bytes(brought[RESULT])
    _progress(f"done in {time.monotonic() - start:.1f} s, status {status}")
    sys.exit(status)


@vm.command()
@_machine_options
def shell(**options: Any) -> None:
    """A shell on the console of a guest that has the device. Ctrl-A X ends it."""
    if not sys.stdin.isatty():
        _progress("the console reads from a pipe; end its input with `poweroff -f`")
    with _session(options, {}) as session:
        _progress(f"booting under {session.accelerator.upper()}; Ctrl-A X ends the machine")
        sys.exit(session.shell())


@vm.command()
@click.option(
    "--socket", type=click.Path(path_type=Path), default=Path("/run/virtaccel/accel0.sock"), show_default=True
)
@click.option("--memory", default=512, show_default=True, metavar="MIB")
@click.option("--virtio-id", default=21, show_default=True, help="The device ID that the guest sees.")
def args(socket: Path, memory: int, virtio_id: int) -> None:
    """Print what to add to a QEMU command line and to a libvirt domain. Nothing is started."""
    pairing = commands.Pairing(socket, memory, virtio_id)
    click.echo("# on the host, before the VMM\n" + _shell_line(["vhost-user-accel", "--socket-path", str(socket)]))
    click.echo("\n# QEMU 11.1 or later: these besides the guest's own disks and network")
    words = [*commands.memory_arguments(pairing), *commands.device_arguments(pairing)]
    click.echo(_shell_line(["qemu-system-x86_64", *words]))
    click.echo("\n<!-- libvirt: merge into the domain -->\n" + commands.libvirt_fragment(pairing))
    click.echo("\n# in the guest\npython3 virtaccel-guest.pyz info")


def _check_model(model: Path) -> None:
    """What is no TOSA graph is refused before a guest is booted for it."""
    try:
        read(model.read_bytes())
    except TosaError as error:
        raise VmError(f"{model.name}: {error}") from error


def _shell_line(words: list[str]) -> str:
    """A command with one option and its value on each line."""
    text = words[0]
    for word in words[1:]:
        text += (" \\\n    " if word.startswith("-") else " ") + word
    return text


def _session(options: dict[str, Any], files: dict[str, bytes]) -> VmSession:
    daemon: list[str] = []
    for name in ("backend", "device"):
        daemon += [f"--{name}", options[name]] if options[name] else []
    # SIGTERM ends the run as Ctrl-C does: what was started is ended too.
    signal.signal(signal.SIGTERM, _terminated)
    try:
        return VmSession(
            Options(memory_mib=options["memory"], accelerator=options["accel"], daemon=tuple(daemon), files=files),
            _progress,
        )
    except (QemuUnavailable, MachineError) as error:
        raise VmError(str(error)) from error


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _progress(message: str) -> None:
    click.echo(f"virtaccel vm: {message}", err=True)


def _keep_logs(session: VmSession, logs: Path | None) -> None:
    if logs is None:
        return
    logs.mkdir(parents=True, exist_ok=True)
    for name, data in session.logs().items():
        (logs / name).write_bytes(data)
