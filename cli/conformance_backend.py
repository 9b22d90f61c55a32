"""`virtaccel conformance backend`: every promise of the backend contract, for people who write backends."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Final, cast

import click

from virtaccel.cli.options import json_option
from virtaccel.device.backend import BackendError, BackendUnavailable, OpenBackend
from virtaccel.guest_tools.artifact import TOSA_FORMAT
from virtaccel.guest_tools.errors import Unavailable
from virtaccel.guest_tools.transport.in_process import find_backend
from virtaccel.harness.conformance import protocol_suite as suite
from virtaccel.harness.conformance.backend_bench import Bench, Subject, slow_tosa
from virtaccel.harness.conformance.backend_suite import run
from virtaccel.harness.conformance.protocol_programs import SAMPLES, Sample
from virtaccel.harness.conformance.protocol_suite import FAILED

EXIT_FAILED: Final = 1


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
@click.option("--only", default="", metavar="TEXT", help="Only cases whose name contains this, as BC-07.")
@click.option(
    "--artifact",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A program that copies its one input (slot 0) to its one output (slot 1).",
)
@click.option("--artifact-format", type=int, default=TOSA_FORMAT, show_default=True, help="Its format number.")
@click.option("--artifact-bytes", type=click.IntRange(1, 64), default=16, show_default=True, help="Bytes of each slot.")
@json_option
def backend(
    entry_point: str, device: str | None, only: str, artifact: Path | None, artifact_format: int, artifact_bytes: int,
    as_json: bool,
) -> None:  # fmt: skip
    """Hold a backend to its contract, promise by promise. Exit 1 if one is not kept."""
    opener = find(entry_point)
    samples: tuple[Sample, ...] = SAMPLES
    if artifact is not None:
        own = Sample(artifact.name, artifact_format, (0,) * 12, artifact.read_bytes(), (1 << 64) - 1, artifact_bytes, 0)
        samples = (own, *SAMPLES)
    subject = Subject(lambda: opener(device), samples, _slow(opener, device))
    results = []
    try:
        for result in run(subject, only):
            results.append(result)
            if not as_json:
                click.echo(suite.line(result))
    except BackendUnavailable as error:
        raise Unavailable(str(error)) from error
    content = suite.as_json(results)
    if as_json:
        click.echo(json.dumps({"backend": entry_point, **content}))
    else:
        click.echo(", ".join(f"{count} {kind}" for kind, count in content["counts"].items()))
    if content["counts"][FAILED] or not results:
        raise SystemExit(EXIT_FAILED)


def _slow(opener: OpenBackend, device: str | None) -> Sample | None:
    """The slow TOSA program, if the backend takes it."""
    sample = slow_tosa()
    try:
        bench = Bench(Subject(lambda: opener(device)))
    except BackendUnavailable as error:
        raise Unavailable(str(error)) from error
    try:
        bench.load(sample)
    except BackendError:
        return None
    finally:
        bench.close()
    return sample
