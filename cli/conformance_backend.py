"""`virtaccel conformance backend`: every promise of the backend contract, for people who write backends."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import cast

import click

from virtaccel.cli.conformance import case_options, samples, show
from virtaccel.cli.options import json_option
from virtaccel.device.backend import BackendError, BackendUnavailable, OpenBackend
from virtaccel.guest_tools.errors import Unavailable
from virtaccel.guest_tools.transport.in_process import find_backend
from virtaccel.harness.conformance.backend_suite import run
from virtaccel.harness.conformance.backend_test_bed import BackendTestBed, Subject, slow_tosa
from virtaccel.harness.oracle.programs import Sample


def find(name: str) -> OpenBackend:
    """An installed backend's name, or MODULE:FUNCTION. Raises Unavailable."""
    module, _, function = name.partition(":")
    if not function:
        return find_backend(name)
    try:
        return cast(OpenBackend, getattr(import_module(module), function))
    except (ImportError, AttributeError) as error:
        raise Unavailable(f"{name} cannot be loaded: {error}") from error


@click.command()
@click.argument("entry_point", metavar="NAME|MODULE:FUNCTION")
@click.option("--device", metavar="NAME", help="The backend's own device name.")
@case_options
@json_option
def backend(
    entry_point: str, device: str | None, only: str, artifact: Path | None, artifact_format: int, artifact_bytes: int,
    as_json: bool,
) -> None:  # fmt: skip
    """Hold a backend to its contract, promise by promise. Exit 1 if one is not kept."""
    opener = find(entry_point)
    programs = samples(artifact, artifact_format, artifact_bytes)
    try:
        subject = Subject(lambda: opener(device), programs, _slow(opener, device))
        show(run(subject, only), as_json, backend=entry_point)
    except BackendUnavailable as error:
        raise Unavailable(str(error)) from error


def _slow(opener: OpenBackend, device: str | None) -> Sample | None:
    """The slow TOSA program, if the backend takes it."""
    sample = slow_tosa()
    bed = BackendTestBed(Subject(lambda: opener(device)))
    try:
        bed.load(sample)
    except BackendError:
        return None
    finally:
        bed.close()
    return sample
