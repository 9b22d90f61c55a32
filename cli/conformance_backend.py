"""`virtaccel conformance backend`: every promise of the backend contract, for people who write backends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from virtaccel.cli.conformance import case_options, samples, show
from virtaccel.cli.options import device_option, json_option, option_option
from virtaccel.device import installed
from virtaccel.device.backend import Backend, BackendError
from virtaccel.harness.conformance.backend_suite import run
from virtaccel.harness.conformance.backend_test_bed import BackendTestBed, Subject, slow_tosa
from virtaccel.harness.oracle.programs import Sample


@click.command()
@click.argument("entry_point", metavar="NAME|MODULE:FUNCTION")
@device_option
@option_option
@case_options
@json_option
def backend(
    entry_point: str, device: str | None, options: dict[str, str], only: str, artifact: Path | None,
    artifact_format: int, artifact_bytes: int, as_json: bool,
) -> None:  # fmt: skip
    """Hold a backend to its contract, promise by promise. Exit 1 if one is not kept."""
    opener = installed.find(entry_point)
    chosen = installed.with_defaults(opener, options, installed.from_environment())
    programs = samples(artifact, artifact_format, artifact_bytes)

    def open_one() -> Backend:
        return opener(device, chosen)

    show(run(Subject(open_one, programs, _slow(open_one)), only), as_json, backend=entry_point)


def _slow(open_one: Callable[[], Backend]) -> Sample | None:
    """The slow TOSA program, if the backend takes it."""
    sample = slow_tosa()
    bed = BackendTestBed(Subject(open_one))
    try:
        bed.load(sample)
    except BackendError:
        return None
    finally:
        bed.close()
    return sample
