"""What the API raises, each with one line that says what is wrong and what to do about it.

    AcceleratorError
     +-- Unavailable       no device could be opened
     +-- ModelError        the file is no TOSA graph, or not one that can be run
     |    +-- Refused      the device does not admit the program
     +-- InputError        an array does not fit the program's tensor
     +-- ExecutionFailed   a submission was not accepted, failed or ran out of time; `status` is the raw number

What the device itself got wrong (client.ClientError, transport.base.TransportError) is not wrapped.
"""

from __future__ import annotations

from virtaccel.device.wire import Status


class AcceleratorError(Exception):
    """Root of what the API raises."""


# What a person can act on is told apart; what only the device's maker could act on is not ours to wrap.
class Unavailable(AcceleratorError):
    """No device could be opened."""


class ModelError(AcceleratorError):
    """The model cannot be run."""


class Refused(ModelError):
    """The device does not admit the program. `status` is the raw number, `reasons` what a local device logged."""

    def __init__(self, message: str, status: int, reasons: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.reasons = reasons


class InputError(AcceleratorError):
    """An array does not fit."""


class ExecutionFailed(AcceleratorError):
    """A submission did not complete."""

    def __init__(self, message: str, status: int = Status.INTERNAL_ERROR) -> None:
        super().__init__(message)
        self.status = status
