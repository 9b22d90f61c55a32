"""The seam between the client and whatever carries its frames: configuration, completions, the `Transport` protocol.

Knows the 16 configuration bytes (wire-abi.md, section 2) as a 1.0 driver reads them. Knows no command, no ring and no
object. Standard library only: this also runs inside a guest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

from virtaccel.device import wire
from virtaccel.guest_tools.errors import Unavailable
from virtaccel.virtqueue.errors import Backpressure

__all__ = [
    "Backpressure", "Completion", "Config", "ConfigSpaceError", "Part", "Shared", "Transport", "TransportError",
    "decode_config",
]  # fmt: skip

# A piece of a request frame; a memoryview is contiguous and of format 'B'.
Part: TypeAlias = bytes | bytearray | memoryview


class TransportError(Exception):
    """The way to the device broke: it is closed, gone, or its ring cannot be trusted. Nothing more can be asked."""


class ConfigSpaceError(TransportError):
    """The device's configuration is not one that a 1.0 driver can work with; the text says which field."""


class Config(NamedTuple):
    """The configuration prefix (wire-abi.md, section 2). Frame limits are in bytes and include the 16-byte header."""

    protocol_major: int
    protocol_minor: int
    command_queue_count: int
    max_chain_descriptors: int
    max_request_bytes: int
    max_response_bytes: int


class Completion(NamedTuple):
    """A command that came back. `response` holds exactly the bytes the device says it wrote, and is valid until the
    next `publish`, `collect`, `reset` or `close`. Of a command with a shared sink it holds the header; `beyond` is how
    many bytes the device wrote behind it, into the sink."""

    token: int
    response: memoryview
    beyond: int = 0


class Shared:
    """Memory that the device reaches, handed out by a transport (`share`): transfers from and to it copy nothing
    on this side. `view` is its bytes, `offset` the transport's own idea of where they are. Slices are shared too."""

    __slots__ = ("offset", "view")

    def __init__(self, offset: int, view: memoryview) -> None:
        self.offset = offset
        self.view = view

    def __len__(self) -> int:
        return len(self.view)

    def __getitem__(self, part: slice) -> Shared:
        start, stop, step = part.indices(len(self.view))
        if step != 1:
            raise ValueError("shared memory is contiguous")
        return Shared(self.offset + start, self.view[start : max(start, stop)])


class Transport(Protocol):
    """One command queue of one device. Single threaded. All methods raise TransportError when the device is gone.

    Transports derive from this class: what stands below the line is what not every way to a device can do, with what
    is true of one that cannot.
    """

    config: Config

    def publish(self, request: Sequence[Part], capacity: int) -> int:
        """Hand one frame (its parts, in order) to the device with room for `capacity` response bytes. Returns a token
        that is unique among outstanding commands. Raises Backpressure when there is no room
        just now, and TransportError when there never will be. The parts may be reused when this returns."""

    def collect(self, timeout: float | None) -> Completion | None:
        """The next finished command, in whatever order the device finishes them. Waits up to `timeout` seconds (None:
        as long as it takes, 0: not at all) and returns None if nothing finished. Waiting does not spin."""

    def reset(self) -> None:
        """Reset the device: every object and every outstanding command is gone, tokens and request IDs start anew."""

    def close(self) -> None:
        """Give back the queue and its memory. May be called twice."""

    # -- powers that not every way to a device has ----------------------------------------------------------------

    # What is false, empty or refused here is what a caller may count on from every transport, so that nobody has to ask
    # whether a method exists.
    together: bool = False
    """The device runs in the caller's own thread: `pause` rests until it has news, `expect_patience` is of use."""
    device_name: str | None = None
    """What executes, in the device's words."""
    interrupts: int = 0
    """How many came so far."""

    def pause(self, seconds: float) -> None:
        """Rest up to `seconds`, or until something may have changed."""
        return

    def expect_patience(self) -> None:
        """Whoever submits next will wait for it and do nothing else."""
        return

    def take_reasons(self) -> tuple[str, ...]:
        """Why the device refused what it refused since the last time, oldest first: what no guest is told."""
        return ()

    def share(self, size: int) -> Shared:
        """`size` bytes until `unshare`. Raises Unavailable where there is no such memory, Backpressure where none is
        left."""
        raise Unavailable("this way to the device has no memory to share")

    def unshare(self, shared: Shared) -> None:
        """Give back exactly what `share` gave, when no command uses it."""
        return

    def publish_shared(
        self, request: Sequence[Part], capacity: int, source: Shared | None, sink: Shared | None
    ) -> int:
        """As `publish`, the frame continued by `source`, and `capacity` bytes of response by `sink`, where given."""
        raise Unavailable("this way to the device has no memory to share")


_Rule: TypeAlias = tuple[str, int, int]
_RULES: tuple[_Rule, ...] = (
    ("protocol_major", wire.PROTOCOL_MAJOR, wire.PROTOCOL_MAJOR),
    ("command_queue_count", 1, 1),
    ("max_chain_descriptors", 2, wire.HARD_MAX_CHAIN_DESCRIPTORS),
    ("max_request_bytes", wire.MIN_MAX_REQUEST_BYTES, wire.HARD_MAX_REQUEST_BYTES),
    ("max_response_bytes", wire.MIN_MAX_RESPONSE_BYTES, wire.HARD_MAX_RESPONSE_BYTES),
)


def decode_config(raw: bytes | bytearray | memoryview, queue_size: int = wire.HARD_MAX_CHAIN_DESCRIPTORS) -> Config:
    """Read and check the prefix. A higher minor version is accepted, bytes after the prefix are ignored. Raises
    ConfigSpaceError: nothing may be allocated from a configuration that is not valid."""
    # A hostile device is met here first: no memory is sized by a number that has not passed these rows.
    if len(raw) < wire.CONFIG.size:
        raise ConfigSpaceError(f"configuration has {len(raw)} bytes, a 1.0 device has {wire.CONFIG.size}")
    config = Config._make(wire.CONFIG.unpack_from(raw))
    for name, lowest, highest in _RULES:
        value = getattr(config, name)
        if not lowest <= value <= highest:
            raise ConfigSpaceError(f"device configuration: {name} is {value}, must be {lowest} to {highest}")
    if config.max_chain_descriptors > queue_size:
        raise ConfigSpaceError(
            f"device configuration: max_chain_descriptors {config.max_chain_descriptors} above queue size {queue_size}"
        )
    return config
