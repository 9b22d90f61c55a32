"""`virtaccel conformance protocol`: the standard's cases, hostile ones too, against any device behind a transport."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, cast

import click

from virtaccel.cli.options import device_options, json_option
from virtaccel.guest_tools.artifact import TOSA_FORMAT
from virtaccel.guest_tools.errors import Unavailable
from virtaccel.guest_tools.transport.raw import HasRawRing
from virtaccel.guest_tools.via import open_transport
from virtaccel.harness.conformance import protocol_suite as suite
from virtaccel.harness.conformance.protocol_bench import Failed
from virtaccel.harness.conformance.protocol_programs import SAMPLES, Sample

EXIT_FAILED: Final = 1


@click.command()
@click.option("--only", default="", metavar="TEXT", help="Only cases whose name contains this, as VQ-006.")
@click.option(
    "--artifact",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A program that the device takes: one input at slot 0 copied to one output at slot 1.",
)
@click.option("--artifact-format", type=int, default=TOSA_FORMAT, show_default=True, help="Its format number.")
@click.option("--target", "words", metavar="WORDS", help="Its 12 target words, separated by commas.")
@click.option("--artifact-bytes", type=click.IntRange(1, 64), default=16, show_default=True, help="Bytes of each slot.")
@click.option("--patience", type=click.FloatRange(0.1), default=20.0, show_default=True, help="Seconds for an answer.")
@device_options
@json_option
def protocol(
    only: str, artifact: Path | None, artifact_format: int, words: str | None, artifact_bytes: int, patience: float,
    via: str, device: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Hold a device to virtio-accel protocol 1.0, case by case.

    Publishes chains that no sound driver would. The device is reset before every case. Exit 1 if a case fails.
    """
    samples = SAMPLES if artifact is None else (_sample(artifact, artifact_format, words, artifact_bytes), *SAMPLES)
    transport = open_transport(via, device)
    try:
        if not hasattr(transport, "raw_ring"):
            raise Unavailable(f"{via} has no ring that can be written by hand")
        results = []
        for result in suite.run(cast(HasRawRing, transport), samples, only, patience):
            results.append(result)
            if not as_json:
                click.echo(suite.line(result))
    except Failed as error:
        raise Unavailable(f"the device does not answer its first commands: {error}") from error
    finally:
        transport.close()
    content = suite.as_json(results)
    if as_json:
        click.echo(json.dumps({"via": via, **content}))
    else:
        click.echo(", ".join(f"{count} {kind}" for kind, count in content["counts"].items()))
    if content["counts"][suite.FAILED] or not results:
        raise SystemExit(EXIT_FAILED)


def _sample(path: Path, format_id: int, words: str | None, size: int) -> Sample:
    try:
        target = tuple(int(word, 0) for word in words.split(",")) if words else (0,) * 12
    except ValueError as error:
        raise click.BadParameter(f"target words: {error}") from error
    if len(target) != 12:
        raise click.BadParameter(f"{len(target)} target words, not 12")
    return Sample(path.name, format_id, target, path.read_bytes(), (1 << 64) - 1, size, 0)
