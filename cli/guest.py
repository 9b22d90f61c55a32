"""The one-file guest program: `python3 virtaccel-guest.pyz info|run|conformance|serve`, on a bare python3 in a guest.

Knows arguments and what to print. Exit status: 0 good, 1 a check failed, 2 bad input or no device, 3 the device was
lost.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from virtaccel.guest_tools.bare.arrays import NAMES, Array, ArrayError, compare, read_npy, read_npz, write_npz
from virtaccel.guest_tools.bare.model import Model
from virtaccel.guest_tools.bare.remote import serve
from virtaccel.guest_tools.client import ClientError
from virtaccel.guest_tools.errors import AcceleratorError, InputError
from virtaccel.guest_tools.pci.function import DEFAULT_VIRTIO_ID
from virtaccel.guest_tools.pci.transport import LOST_AFTER_S, DeviceLost, PciTransport, open_pci
from virtaccel.guest_tools.session import Session
from virtaccel.guest_tools.transport.base import TransportError
from virtaccel.harness.conformance import outcome, protocol_suite
from virtaccel.harness.conformance.outcome import Failed

GOOD, MISMATCH, BAD, LOST = 0, 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, act, and turn what went wrong into one line and an exit status."""
    options = _parser().parse_args(argv)
    try:
        return int(options.action(options))
    except DeviceLost as error:
        print(f"virtaccel: {error}", file=sys.stderr)
        return LOST
    except (TransportError, ClientError, AcceleratorError, ArrayError, Failed, OSError) as error:
        print(f"virtaccel: {error}", file=sys.stderr)
        return BAD


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="virtaccel-guest.pyz", description="Drive a virtio-accel PCI function.")
    parser.add_argument("--pci", metavar="ADDRESS", help="the function, e.g. 0000:00:02.0 (default: the only one)")
    parser.add_argument(
        "--virtio-id", type=int, default=DEFAULT_VIRTIO_ID, help="virtio device ID (default: %(default)s)"
    )
    parser.add_argument("--no-huge-pages", action="store_true", help="leave the pool of huge pages alone")
    parser.add_argument("--polling", action="store_true", help="do not use interrupts")
    parser.add_argument(
        "--lost-after", type=float, default=LOST_AFTER_S, metavar="SECONDS", help="silence that means a lost device"
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    info = actions.add_parser("info", help="what the device says of itself")
    info.set_defaults(action=_info)
    run = actions.add_parser("run", help="run a TOSA model")
    run.add_argument("model", type=Path)
    run.add_argument(
        "--input", action="append", default=[], type=Path, metavar="FILE.npy", help="one for each input, in order"
    )
    run.add_argument("--check", type=Path, metavar="FILE.npz", help="feed its in_K, compare with its out_K")
    run.add_argument("--atol", type=float, default=0.0, help="allowed difference of integers")
    run.add_argument("--output", type=Path, metavar="FILE.npz", help="store the outputs as out_K")
    run.add_argument("--repeat", type=int, default=1)
    run.set_defaults(action=_run)
    cases = actions.add_parser("conformance", help="hold the device to protocol 1.0, case by case")
    cases.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains this")
    cases.add_argument("--json", action="store_true", help="print one JSON object")
    cases.set_defaults(action=_conformance)
    remote = actions.add_parser("serve", help="be controlled over a character device")
    remote.add_argument("port")
    remote.set_defaults(action=lambda options: serve(options.port, main))
    return parser


def _open_pci(options: argparse.Namespace) -> PciTransport:
    return open_pci(
        options.pci,
        virtio_id=options.virtio_id,
        interrupts=not options.polling,
        huge_pages=not options.no_huge_pages,
        lost_after=options.lost_after,
    )


def _open(options: argparse.Namespace) -> Session:
    transport = _open_pci(options)
    print(f"{transport.function.address}: {transport.how}")
    return Session(transport)


def _conformance(options: argparse.Namespace) -> int:
    transport = _open_pci(options)
    try:
        results = []
        for result in protocol_suite.run(transport, only=options.only):
            results.append(result)
            if not options.json:
                print(outcome.line(result), flush=True)
    finally:
        transport.close()
    content = outcome.as_json(results)
    print(json.dumps(content if options.json else content["counts"]))
    return MISMATCH if content["counts"][outcome.FAILED] or not results else GOOD


def _info(options: argparse.Namespace) -> int:
    session = _open(options)
    try:
        info = session.call(session.client.get_device_info())
        for name, value in (*session.client.config._asdict().items(), *info._asdict().items()):
            print(f"{name:28} {value.hex() if isinstance(value, bytes) else value}")
    finally:
        session.close()
    return GOOD


class _Case(NamedTuple):
    """What to feed and what to expect, for each step of a sequence."""

    inputs: list[list[bytes]]
    expected: list[list[Array]]


def _run(options: argparse.Namespace) -> int:
    artifact = options.model.read_bytes()
    session = _open(options)
    try:
        model = Model(session, artifact, options.model.name)
        print(f"{options.model.name}: loaded in {model.load_seconds * 1000:.0f} ms")
        case = _case(options, model)
        status = GOOD
        for _ in range(max(1, options.repeat)):
            model.restart(model.lanes[0])
            status = max(status, _steps(options, model, case))
        model.close()
        return status
    finally:
        session.close()


def _case(options: argparse.Namespace, model: Model) -> _Case:
    if options.check is not None:
        arrays = read_npz(options.check)
        try:
            given = [arrays[f"in_{index}"] for index in range(len(model.program.inputs))]
            wanted = [arrays[f"out_{index}"] for index in range(len(model.program.outputs))]
        except KeyError as error:
            raise ArrayError(f"{options.check.name}: no array {error}") from error
    else:
        given, wanted = [read_npy(path.read_bytes(), path.name) for path in options.input], []
    if len(given) != len(model.program.inputs):
        raise InputError(f"the model has {len(model.program.inputs)} inputs, {len(given)} were given")
    steps = _step_count(model, given)
    expected = _split(wanted, steps) if wanted else [[] for _ in range(steps)]
    return _Case([[array.data for array in row] for row in _split(given, steps)], expected)


def _step_count(model: Model, given: list[Array]) -> int:
    """1, or the length of the leading axis that every array has more than its tensor."""
    counts = set()
    for tensor, array in zip(model.program.inputs, given, strict=True):
        kind = NAMES.get(tensor.dtype)
        if kind is not None and kind != array.kind:
            raise InputError(f"{tensor.name}: {array.kind} was given, {kind} is needed")
        extra = len(array.shape) == len(tensor.shape) + 1
        counts.add(array.shape[0] if extra else 1)
        if (array.shape[1:] if extra else array.shape) != tensor.shape:
            raise InputError(f"{tensor.name}: shape {array.shape} was given, {tensor.shape} is needed")
    if len(counts) > 1:
        raise InputError("the inputs have different numbers of steps")
    return counts.pop() if counts else 1


def _split(arrays: list[Array], steps: int) -> list[list[Array]]:
    rows: list[list[Array]] = [[] for _ in range(steps)]
    for array in arrays:
        size = len(array.data) // steps
        shape = array.shape[1:] if steps > 1 else array.shape
        for index, row in enumerate(rows):
            row.append(Array(array.kind, shape, array.data[index * size : (index + 1) * size]))
    return rows


def _steps(options: argparse.Namespace, model: Model, case: _Case) -> int:
    status = GOOD
    worst: dict[int, tuple[float, float, bool]] = {}
    results: Sequence[bytes] = ()
    start = time.monotonic()
    for inputs, expected in zip(case.inputs, case.expected, strict=True):
        results = model.run(inputs)
        for index, want in enumerate(expected):
            found = compare(results[index], want, options.atol)
            if not found.good:
                status = MISMATCH
            if index not in worst or found.error > worst[index][0]:
                worst[index] = (found.error, found.allowed, found.good)
    seconds = time.monotonic() - start
    print(f"{len(case.inputs)} run{'s' if len(case.inputs) > 1 else ''} in {seconds * 1000:.1f} ms")
    for index, (error, allowed, good) in worst.items():
        print(f"out_{index}: worst error {error:.3g}, allowed {allowed:.3g}: {'good' if good else 'MISMATCH'}")
    if options.output is not None:
        write_npz(options.output, {f"out_{index}": _array(model, index, data) for index, data in enumerate(results)})
    return status


def _array(model: Model, index: int, data: bytes) -> Array:
    tensor = model.program.outputs[index]
    kind = NAMES.get(tensor.dtype)
    return Array(kind, tensor.shape, data) if kind else Array("|u1", (len(data),), data)


if __name__ == "__main__":
    sys.exit(main())
