#!/usr/bin/env python3
"""The 360 held-back digits through a whole virtio-accel device, a few of them shown as pictures.

Needs what virtaccel itself needs, nothing else. Exit status 1 if fewer than 97 % are recognised.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
from numpy.typing import NDArray
from rich.columns import Columns
from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from virtaccel.guest_tools import accelerator
from virtaccel.guest_tools.arrays.program import Program
from virtaccel.guest_tools.errors import AcceleratorError

HERE = Path(__file__).resolve().parent
LEAST_ACCURACY = 0.97
BRIGHTEST = 16
UPPER_HALF = "▀"
WITHOUT_COLOUR = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}

Pixels = NDArray[np.uint8]


class Outcome(NamedTuple):
    """What the device said of every image, and the seconds of every call."""

    labels: NDArray[np.int32]
    confidence: NDArray[np.float32]
    seconds: NDArray[np.float64]


def recognise(program: Program, images: Pixels) -> Outcome:
    """One call for each image: written to the device, executed, read back."""
    labels, confidence, seconds = [], [], []
    for image in images:
        pixels = image.astype(np.float32).reshape(1, 8, 8, 1)
        start = time.perf_counter()
        probabilities, label = program(pixels)
        seconds.append(time.perf_counter() - start)
        labels.append(label[0])
        confidence.append(probabilities[0, label[0]])
    return Outcome(np.array(labels), np.array(confidence), np.array(seconds))


def picture(image: Pixels, colour: bool) -> Text:
    """8 lines of pixels in 4 lines of text: a half block's two colours are the upper and the lower pixel. Without
    colour, bright pixels are drawn and dark ones are not."""
    text = Text()
    for upper, lower in zip(image[0::2], image[1::2], strict=True):
        for above, below in zip(upper, lower, strict=True):
            if colour:
                text.append(UPPER_HALF * 2, f"{_grey(above)} on {_grey(below)}")
            else:
                text.append(WITHOUT_COLOUR[bool(above > BRIGHTEST // 2), bool(below > BRIGHTEST // 2)] * 2)
        text.append("\n")
    return text


def _grey(value: np.uint8) -> str:
    level = int(value) * 255 // BRIGHTEST
    return f"rgb({level},{level},{level})"


def card(image: Pixels, label: int, confidence: float, truth: int, colour: bool) -> Panel:
    """One image with what the device thinks it is."""
    verdict = Text(f"{label}  {confidence:.1%}", "bold green" if label == truth else "bold red")
    note = Text("" if label == truth else f"it is a {truth}", "red")
    return Panel(Group(picture(image, colour), verdict, note), width=20, border_style="dim")


def chosen(outcome: Outcome, truth: Pixels, count: int) -> list[int]:
    """Mistakes first, then the first images as they come."""
    wrong = np.flatnonzero(outcome.labels != truth).tolist()
    right = np.flatnonzero(outcome.labels == truth).tolist()
    return [*wrong[: count // 2], *right][:count]


@click.command()
@click.option("--via", default="in-process", show_default=True, help="Way to the device.")
@click.option("--device", help="The backend's device; its choice if absent.")
@click.option("--show", type=click.IntRange(0, 360), default=8, show_default=True, help="How many pictures to show.")
def main(via: str, device: str | None, show: int) -> None:
    """Recognise handwritten digits through a virtio-accel device."""
    held_back = np.load(HERE / "held_back.npz")
    images, truth = held_back["images"], held_back["labels"]
    console = Console()
    colour = console.color_system is not None
    try:
        with accelerator.open(via, device) as device_under_test:
            outcome = recognise(device_under_test.load(HERE / "digits.tosa"), images)
            executed = device_under_test.device_name or "a device behind " + via
    except AcceleratorError as error:
        raise click.ClickException(str(error)) from error
    console.print(
        Columns(
            card(images[i], int(outcome.labels[i]), float(outcome.confidence[i]), int(truth[i]), colour)
            for i in chosen(outcome, truth, show)
        )
    )
    right = int((outcome.labels == truth).sum())
    accuracy = right / len(truth)
    micros = outcome.seconds * 1e6
    console.print(f"accuracy   {accuracy:.1%} ({right} of {len(truth)} held-back images)", highlight=False)
    console.print(
        f"latency    {np.median(micros):.0f} us an image (median; 90 % within {np.quantile(micros, 0.9):.0f} us): "
        "written, executed, read back",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"executed   on {executed}, through the device's ring ({via})", highlight=False)
    if accuracy < LEAST_ACCURACY:
        raise click.ClickException(f"only {accuracy:.1%} recognised; at least {LEAST_ACCURACY:.0%} are expected")


if __name__ == "__main__":
    main()
