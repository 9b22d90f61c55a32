"""`virtaccel conformance protocol`: the standard's cases, hostile ones too, against any device behind a transport."""

from __future__ import annotations

from pathlib import Path

import click

from virtaccel.cli.conformance import case_options, samples, show
from virtaccel.cli.options import Way, device_options, json_option
from virtaccel.guest_tools.errors import Unavailable
from virtaccel.guest_tools.transport.raw import HasRawRing
from virtaccel.guest_tools.via import open_transport
from virtaccel.harness.conformance.outcome import Failed
from virtaccel.harness.conformance.protocol_suite import run


@click.command()
@case_options
@click.option("--target", "words", metavar="WORDS", help="Its 12 target words, separated by commas.")
@click.option("--patience", type=click.FloatRange(0.1), default=20.0, show_default=True, help="Seconds for an answer.")
@device_options
@json_option
def protocol(
    only: str, artifact: Path | None, artifact_format: int, words: str | None, artifact_bytes: int, patience: float,
    way: Way, as_json: bool,
) -> None:  # fmt: skip
    """Hold a device to virtio-accel protocol 1.0, case by case.

    Publishes chains that no sound driver would. The device is reset before every case. Exit 1 if a case fails.
    """
    programs = samples(artifact, artifact_format, artifact_bytes, _target(words))
    transport = open_transport(*way)
    try:
        if not isinstance(transport, HasRawRing):
            raise Unavailable(f"{way.via} has no ring that can be written by hand")
        show(run(transport, programs, only, patience), as_json, via=way.via)
    except Failed as error:
        raise Unavailable(f"the device does not answer its first commands: {error}") from error
    finally:
        transport.close()


def _target(words: str | None) -> tuple[int, ...]:
    try:
        target = tuple(int(word, 0) for word in words.split(",")) if words else (0,) * 12
    except ValueError as error:
        raise click.BadParameter(f"target words: {error}") from error
    if len(target) != 12:
        raise click.BadParameter(f"{len(target)} target words, not 12")
    return target
