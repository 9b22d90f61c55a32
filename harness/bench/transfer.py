"""`bench transfer`: WRITE_BUFFER and READ_BUFFER against a plain copy in memory of as many bytes.

Data lies in memory that the device reaches (`Accelerator.share`), as it does in a guest, so that it is copied once; or
in arrays of the caller's own, and is then copied twice. All data is in the caches as far as it fits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import numpy as np

from virtaccel.guest_tools.arrays.accelerator import Accelerator
from virtaccel.guest_tools.session import Session
from virtaccel.guest_tools.transport.vhost_user import VhostUserTransport
from virtaccel.guest_tools.via import open_transport
from virtaccel.harness.bench import programs
from virtaccel.harness.bench.commands import IN_PROCESS, POLL_SECONDS, POLLING, SLEEPING
from virtaccel.harness.bench.measure import alternate, median_ratio, timing
from virtaccel.harness.bench.report import Figure, Report, Row

SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)
JUDGED = 1 << 20
MEMCPY = "memcpy"


def measure(rounds: int, socket: bool, device: str | None) -> Report:
    """Every size in every lane."""
    report = Report("transfer")
    with ExitStack() as stack:
        lanes = {IN_PROCESS: stack.enter_context(Accelerator(Session(open_transport("in-process", device))))}
        if socket:
            for lane, options, spin in ((SLEEPING, (), 0.0), (POLLING, ("--poll-us", "200"), POLL_SECONDS)):
                path = stack.enter_context(programs.daemon(*options, device=device))
                lanes[lane] = stack.enter_context(Accelerator(Session(VhostUserTransport(path, spin=spin))))
        for size in SIZES:
            _one_size(report, lanes, size, max(rounds * JUDGED // max(size, JUDGED), 20))
    return report


def _one_size(report: Report, lanes: dict[str, Accelerator], size: int, rounds: int) -> None:
    source, target = (np.full(size, value, np.uint8) for value in (1, 2))
    works: dict[str, Callable[[], object]] = {MEMCPY: lambda: np.copyto(target, source)}
    buffers, shared = [], []
    for lane, accelerator in lanes.items():
        buffer = accelerator.buffer(size)
        buffers.append(buffer)
        near = accelerator.share(size)
        shared.append((accelerator, near))
        works[f"WRITE {lane}"] = partial(buffer.write, near)
        works[f"READ {lane}"] = partial(buffer.read, near)
        works[f"WRITE {lane}, from an array"] = partial(buffer.write, source)
        works[f"READ {lane}, into an array"] = partial(buffer.read, target)
    samples = alternate(works, rounds, twice=True)
    what = f"{size >> 10} KiB"
    for name, found in samples.items():
        taken = timing(found)
        report.rows.append(Row(what, name, taken, f"{size / taken.median:.1f} GB/s"))
        if size == JUDGED and name.endswith((SLEEPING, POLLING)):
            ratio = median_ratio(samples[MEMCPY], found)
            bound = 0.6 if name.endswith(POLLING) else None
            report.figures.append(Figure(f"{name}, 1 MiB, of memcpy's rate", ratio, bound=bound, at_least=True))
    for buffer in buffers:
        buffer.free()
    for accelerator, near in shared:
        accelerator.unshare(near)
