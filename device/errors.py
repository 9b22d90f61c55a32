"""What can go wrong, and whose fault it is. Knows statuses, nothing else.

    Exception
     +-- ConfigError      a limit or a budget that the standard does not allow: the host's mistake, before any guest
     +-- CommandError     the guest's fault or a limit it met: `status` is the response, nothing has changed
     +-- NeedsReset       ours: ownership or truth is lost, every further command gets DEVICE_LOST until a reset

`BackendError`, what an accelerator raises, belongs to the contract: see backend.py.
"""

from __future__ import annotations

from virtaccel.device.wire import Status


class ConfigError(ValueError):
    """A configuration value outside what protocol 1.0 allows; the text names the value and its bounds."""


class CommandError(Exception):
    """A command is refused with `status`; no state has changed and no backend was asked to change any."""

    def __init__(self, status: Status, message: str = "") -> None:
        super().__init__(message or status.name)
        self.status = status


class NeedsReset(Exception):
    """Continued operation could not keep ownership or truth (virtqueue.md, section 12).

    `discard` says that the backend instance is lost as well, since nobody knows what it still owns.
    """

    def __init__(self, message: str, *, discard: bool) -> None:
        super().__init__(message)
        self.discard = discard
