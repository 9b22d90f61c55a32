"""An accelerator for people: open one, load a model, call it with numpy arrays.

    with virtaccel.guest_tools.accelerator.open() as accelerator:
        program = accelerator.load("model.tosa")
        (scores,) = program(image)

Everything an accelerator made is given back when it is closed, child before parent (guest_tools/context.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from virtaccel.guest_tools.arrays.program import Program
from virtaccel.guest_tools.artifact import target_words
from virtaccel.guest_tools.context import ANY_USE, DeviceBuffer, DeviceContext, Model, parse, read_model
from virtaccel.guest_tools.session import PATIENCE_SECONDS, Session
from virtaccel.guest_tools.via import NO_OPTIONS, open_transport

__all__ = ["ANY_USE", "Accelerator", "DeviceBuffer", "Model", "open", "parse", "read_model"]


class Accelerator(DeviceContext):
    """One device, one context and one execution queue on it. Single threaded; close it, or use it in `with`."""

    @property
    def device_name(self) -> str | None:
        """What executes, where this side can know it (a device in this process); None otherwise."""
        return self.session.transport.device_name

    def load(self, model: Model, name: str | None = None, target: Sequence[int] | None = None) -> Program:
        """Load a TOSA model: a path, or the bytes of a file. Raises ModelError (Refused where the device says no).

        `target` is the twelve target words to declare, by default what the model is seen to need."""
        data, name = read_model(model, name)
        graph = parse(data, name)
        return Program(self, self.offer(data, target or target_words(graph), name), graph, name)


def open(
    via: str = "in-process", device: str | None = None, patience: float | None = PATIENCE_SECONDS,
    options: Mapping[str, str] = NO_OPTIONS,
) -> Accelerator:  # fmt: skip
    """Open an accelerator.

    `via` is the way to it (see via.py), `device` a backend's device name or class prefix (None: its choice), `patience`
    the seconds any one command may take, `options` those of a backend in this process. Raises
    errors.Unavailable, TransportError.
    """
    transport = open_transport(via, device, options)
    try:
        return Accelerator(Session(transport, patience))
    except BaseException:
        # Whatever was opened is given back, also where the device's first answer is not one.
        transport.close()
        raise
