"""Taking times: what is compared is measured alternately, so that a machine that wanders wanders for all alike.

Knows clocks and order, nothing of what it times. Times are nanoseconds of `time.perf_counter_ns`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np

clock = time.perf_counter_ns
Work: TypeAlias = Callable[[], object]
NANOSECONDS = {"ns": 1.0, "us": 1e3, "ms": 1e6}


class Timing(NamedTuple):
    """A sample of times, in nanoseconds."""

    times: int
    least: float
    median: float
    p99: float

    def plain(self) -> dict[str, float]:
        return {"count": self.times, "min_ns": self.least, "p50_ns": self.median, "p99_ns": self.p99}


def timing(samples: Sequence[int]) -> Timing:
    """Of at least one sample."""
    values = np.asarray(samples, np.float64)
    return Timing(len(values), float(values.min()), float(np.median(values)), float(np.percentile(values, 99)))


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection between two looks at the clock."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def alternate(
    works: Mapping[str, Work],
    rounds: int,
    warm_up: int = 3,
    after: Mapping[str, Callable[[Any], object]] | None = None,
    twice: bool = False,
) -> dict[str, list[int]]:
    """Time every work once a round, in one order and then in the other: whoever comes second has no lasting favour.
    What a work returns goes to `after`, when the clock has stopped. `twice` does each work once before it is timed,
    for works whose data would drive each other out of the processor's caches."""
    tidy = after or {}
    samples: dict[str, list[int]] = {name: [] for name in works}
    orders = list(works.items()), list(works.items())[::-1]
    with undisturbed():
        for number in range(-warm_up, rounds):
            for name, work in orders[number % 2]:
                if twice:
                    work()
                start = clock()
                result = work()
                taken = clock() - start
                if number >= 0:
                    samples[name].append(taken)
                if name in tidy:
                    tidy[name](result)
    return samples


def median_ratio(over: Sequence[int], under: Sequence[int]) -> float:
    """Median of the one over median of the other, both sampled in the same rounds."""
    return float(np.median(over) / np.median(under))


def in_words(nanoseconds: float) -> str:
    """With three digits and a unit a reader can compare."""
    for unit in ("ns", "us", "ms"):
        value = nanoseconds / NANOSECONDS[unit]
        if value < 999.5 or unit == "ms":
            break
    return f"{value:.3g} {unit}" if value < 99.95 else f"{value:.0f} {unit}"
