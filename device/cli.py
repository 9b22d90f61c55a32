"""`vhost-user-accel`: the back end daemon that a virtual machine monitor connects to.

Follows the "Backend program conventions" of the vhost-user specification: `--socket-path`, `--fd`,
`--print-capabilities`, never in the background, a clean end on SIGTERM. Knows options and how a daemon is put together
from them; the backend comes by entry point (group `virtaccel.backends`) and is the only thing here that may be heavy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FrameType

from virtaccel import __version__
from virtaccel.device import installed, wire
from virtaccel.device.backend import BackendError, BackendUnavailable, Limits, OpenBackend
from virtaccel.device.config import U32_MAX, U64_MAX, DeviceConfig, ResourcePolicy, WireConfig
from virtaccel.device.errors import ConfigError
from virtaccel.device.isolated import WorkerLauncher, WorkerLimits
from virtaccel.device.ring_service import BATCH, Device
from virtaccel.device.vhost_user import sockets
from virtaccel.device.vhost_user.guest import Settings
from virtaccel.device.vhost_user.server import Server, Source
from virtaccel.device.vhost_user.session import MAX_RING_SIZE
from virtaccel.device.vhost_user.sockets import SocketError

PROGRAM = "vhost-user-accel"
CAPABILITIES = {"type": "accel", "features": []}
RUNS_NO_NATIVE_CODE = ("reference",)
"""Backends that gain nothing from a process of their own."""
LEVELS = ("debug", "info", "warning", "error", "critical")

log = logging.getLogger(PROGRAM)


class _Bytes(argparse.Action):
    """A number of bytes, with an optional K, M, G or T (powers of 1024)."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: object, *_: object
    ) -> None:
        try:
            setattr(namespace, self.dest, _parse_bytes(str(value)))
        except ValueError:
            parser.error(f"{self.option_strings[0]}: {value!r} is no number of bytes (digits, then K, M, G or T)")


def _parse_bytes(text: str) -> int:
    unit = "KMGT".find(text[-1:].upper()) + 1 if text[-1:] else 0
    return int(text[:-1] if unit else text) << 10 * unit


def _option(text: str) -> tuple[str, str]:
    try:
        return installed.parse_option(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def arguments() -> argparse.ArgumentParser:
    """The options, in groups as `--help` shows them."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="A virtio-accel device for virtual machines: runs TOSA programs of a guest on this host.",
        epilog="Without a socket option, sockets of socket activation (LISTEN_FDS) are served.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--print-capabilities", action="store_true", help="print a JSON description and exit")

    where = parser.add_argument_group("where front ends come from (one kind)").add_mutually_exclusive_group()
    where.add_argument(
        "--socket-path", metavar="PATH", action="append", default=[],
        help="listen here; once per guest, each socket is a device of its own",
    )
    where.add_argument("--sockets", metavar="PATH", nargs="+", default=[], help="the same for several at once")
    where.add_argument("--fd", metavar="FDNUM", type=int, help="an inherited socket, connected or listening")
    where.add_argument("--connect", metavar="PATH", help="connect to a VMM that listens; exits with its session")
    parser.add_argument(
        "--connect-timeout", metavar="SECONDS", type=float, default=30.0, help="how long to wait for it (30)"
    )

    what = parser.add_argument_group("the device")
    what.add_argument("--backend", default=installed.DEFAULT, help=f"what executes programs ({installed.DEFAULT})")
    what.add_argument("--device", help="the backend's own device name, such as CPU or GPU (its choice)")
    what.add_argument("--list-backends", action="store_true", help="print the installed backends and exit")
    what.add_argument(
        "--option", metavar="NAME=VALUE", action="append", default=[], type=_option,
        help="something to tell the backend, once for each; `virtaccel info --backends` lists what there is",
    )
    what.add_argument(
        "--threads", metavar="N", type=int, help="processors that one guest's inference may use at a time (all)"
    )
    what.add_argument(
        "--prefer", choices=("latency", "throughput"),
        help="throughput: always run submissions side by side; latency: only where several are under way all the time "
        "(latency)",
    )

    apart = parser.add_argument_group("isolation: what happens in processes of their own")
    apart.add_argument(
        "--isolation", choices=("none", "compile", "worker"),
        help="compile: each program is compiled in a sandbox; worker: and a guest's programs run in a worker, so that "
        "this process runs no native code of a backend (worker; none for the reference backend)",
    )
    apart.add_argument("--compile-seconds", metavar="SECONDS", type=float, help="longest that compiling may take (60)")
    apart.add_argument("--compile-memory", metavar="BYTES", action=_Bytes, help="most that compiling may need (4G)")
    apart.add_argument(
        "--worker-memory", metavar="BYTES", action=_Bytes, default=8 << 30,
        help="private memory of a worker, its guest's buffers apart; 0 is no limit (8G)",
    )

    ring = parser.add_argument_group("the command queue")
    ring.add_argument("--queue-size", metavar="N", type=int, default=1024, help="largest ring served (1024)")
    ring.add_argument(
        "--max-chain", metavar="N", type=int, default=WireConfig().max_chain_descriptors,
        help=f"descriptors in one command ({WireConfig().max_chain_descriptors})",
    )
    for name, default in (("request", wire.HARD_MAX_REQUEST_BYTES), ("response", wire.HARD_MAX_RESPONSE_BYTES)):
        ring.add_argument(
            f"--max-{name}-bytes", metavar="BYTES", action=_Bytes, default=default, help=f"largest {name} frame (16M)"
        )
    ring.add_argument("--turn", metavar="N", type=int, default=BATCH, help=f"commands served per turn ({BATCH})")
    ring.add_argument(
        "--poll-us", metavar="MICROSECONDS", type=int, default=0,
        help="look for more commands this long before sleeping: lower latency for processor time (0)",
    )

    quota = parser.add_argument_group("quotas of one guest")
    policy = ResourcePolicy()
    quota.add_argument(
        "--max-backing-bytes", metavar="BYTES", action=_Bytes, default=policy.max_buffer_backing_bytes,
        help="memory of all buffers together (4G)",
    )
    quota.add_argument(
        "--max-resident-bytes", metavar="BYTES", action=_Bytes, default=policy.max_program_resident_bytes,
        help="what all programs together are promised to need (64 programs of unknown size)",
    )
    for name, text in _COUNTS.items():
        quota.add_argument(f"--{name.replace('_', '-')}", metavar="N", type=int, help=text)
    quota.add_argument("--max-buffer-bytes", metavar="BYTES", action=_Bytes, help="one buffer")
    quota.add_argument(
        "--require-sealed", action=argparse.BooleanOptionalAction,
        help="refuse guest memory whose owner could shrink it, which would end this process (SIGBUS); for several "
        "sockets unless told otherwise, since one front end could end the service of all",
    )
    parser.add_argument(
        "--ready-fd", metavar="FDNUM", type=int,
        help="an inherited descriptor to write a line to, and close, once every socket is served",
    )
    parser.add_argument("--log-level", choices=LEVELS, default="info", help="(info)")
    return parser


_NAMED = ("threads", "prefer", "compile_seconds", "compile_memory")
"""Arguments that are options of a backend, for those that have them."""
_COUNTS = {
    "max_contexts": "contexts",
    "max_buffers_per_context": "buffers of one context",
    "max_programs_per_context": "programs of one context",
    "max_queues_per_context": "execution queues of one context",
    "max_events_per_context": "events of one context",
    "max_bindings_per_submission": "bindings of one submission",
}


def _config(options: argparse.Namespace) -> DeviceConfig:
    """Limits that were not given are as high as the protocol has them: they never raise the backend's own."""
    given = {name: getattr(options, name) or U32_MAX for name in _COUNTS}
    limits = Limits(**given, max_buffer_bytes=options.max_buffer_bytes or U64_MAX, max_artifact_bytes=U64_MAX)
    frames = WireConfig(options.max_chain, options.max_request_bytes, options.max_response_bytes)
    return DeviceConfig(frames, limits)


def _policy(options: argparse.Namespace) -> ResourcePolicy:
    return ResourcePolicy(options.max_backing_bytes, options.max_resident_bytes)


def _settings(options: argparse.Namespace) -> Settings:
    if not 2 <= options.queue_size <= MAX_RING_SIZE:
        raise ConfigError(f"--queue-size is {options.queue_size}, must be 2 to {MAX_RING_SIZE}")
    if options.max_chain > options.queue_size:
        raise ConfigError(f"--max-chain {options.max_chain} above --queue-size {options.queue_size}")
    if options.threads is not None and options.threads < 1:
        raise ConfigError("--threads is at least 1")
    if options.turn < 1 or options.poll_us < 0:
        raise ConfigError("--turn is at least 1 and --poll-us not below 0")
    if options.ready_fd is not None:
        try:
            os.set_inheritable(options.ready_fd, False)  # a worker that held it open would hide this process's end
        except OSError as error:
            raise ConfigError(f"--ready-fd {options.ready_fd}: {error.strerror}") from error
    several = len(options.socket_path) + len(options.sockets) > 1
    sealed = several if options.require_sealed is None else options.require_sealed
    return Settings(options.queue_size, sealed, options.turn, options.poll_us / 1e6, wary=several)


def _defaults(options: argparse.Namespace) -> dict[str, str]:
    """Options that a backend gets where it has them: of the environment, and of arguments with a name of their own."""
    named = {name.replace("_", "-"): getattr(options, name) for name in _NAMED}
    return installed.from_environment() | {name: str(value) for name, value in named.items() if value is not None}


def _opener(options: argparse.Namespace) -> tuple[OpenBackend, Callable[[], None]]:
    """How backends are opened, isolated as asked, and what ends whatever that needs. Raises BackendUnavailable."""
    isolation = options.isolation or ("none" if options.backend in RUNS_NO_NATIVE_CODE else "worker")
    defaults, given = _defaults(options), dict(options.option)
    if isolation != "none":
        defaults["compile"] = "sandbox"
    if isolation == "worker":
        installed.require(options.backend)
        isolated = WorkerLauncher(options.backend, WorkerLimits(options.worker_memory, defaults=defaults))
        return partial(isolated, options=given), isolated.close
    opener = installed.find(options.backend)
    return partial(opener, options=installed.with_defaults(opener, given, defaults)), lambda: None


def _listeners(options: argparse.Namespace) -> list[Source]:
    """Sockets that exist without a VMM, all or none. Raises SocketError."""
    if options.fd is not None:
        return [sockets.inherited(options.fd)]
    activated = sockets.activated(os.environ)
    opened: list[Source] = []
    try:
        opened.extend(sockets.listen(path) for path in (*options.socket_path, *options.sockets))
    except SocketError:
        _close(opened)
        raise
    if not opened and not activated and options.connect is None:
        raise SocketError("no socket to serve: give --socket-path, --fd or --connect, or use socket activation")
    return opened or (activated if options.connect is None else [])


def _close(closing: Iterable[Source | Device]) -> None:
    for each in closing:
        each.close()


def _serve(options: argparse.Namespace) -> None:
    """Listen first, since a runtime may take a second to come up and a VMM can wait in the socket's queue for that
    long; then the backends; then serve. A backend that cannot be had takes the sockets away again."""
    settings, config, policy = _settings(options), _config(options), _policy(options)
    open_isolated, end = _opener(options)
    opener = partial(open_isolated, options.device)
    sources = _listeners(options)
    devices: list[Device] = []
    server = Server(settings)
    try:
        count = max(1, len(sources))
        logs = [log if count == 1 else log.getChild(str(number)) for number in range(count)]
        devices.extend(Device(opener, config, policy, each) for each in logs)
        if options.connect is not None:
            sources = [sockets.connect(options.connect, options.connect_timeout)]
        log.info("%s %s on %s", PROGRAM, __version__, options.backend)
    except BaseException:
        _close(devices)
        _close(sources)
        end()
        raise
    for source, device, each in zip(sources, devices, logs, strict=True):
        server.add(source, device, each)
    try:
        _tell_ready(options.ready_fd)
        server.run()
    finally:
        end()


def _tell_ready(descriptor: int | None) -> None:
    """Once every socket is served. Whoever asked may have gone; that is no reason not to serve."""
    if descriptor is not None:
        with contextlib.suppress(OSError):
            os.write(descriptor, b"ready\n")
        os.close(descriptor)


def _early(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the daemon; the process's exit status."""
    parser = arguments()
    arguments_given = sys.argv[1:] if argv is None else argv
    if "--print-capabilities" in arguments_given:  # "Other options and arguments should be ignored"
        print(json.dumps(CAPABILITIES))
        return 0
    options = parser.parse_args(arguments_given)
    if options.list_backends:
        print("\n".join(installed.names()))
        return 0
    logging.basicConfig(
        level=options.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s: %(message)s"
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _early)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each guest may bring dozens of descriptors
    try:
        _serve(options)
    except (BackendUnavailable, BackendError, ConfigError, SocketError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
