"""What the engine asks of an accelerator (specification.md, sections 3.5 and 4): the backend contract.

A backend sees validated values and its own handles; never wire bytes, object IDs or guest addresses. It never calls
back into the engine: finished work is found by polling, and `fileno` becomes readable when polling may find something
new. All methods are called from one thread, return promptly, and fail by raising `BackendError` with nothing kept,
except where an outcome type says otherwise. A backend may live in another process, so nothing here shares state beyond
the arguments of a call. `Segments` are views of guest memory: they are valid during the call only, and another
processor may be writing them, so every byte is read at most once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol, TypeAlias

from virtaccel.device.wire import EventState, Status

Segments: TypeAlias = Sequence[memoryview]
"""Consecutive pieces of one byte string; each a writable or read-only contiguous view of format 'B'."""

Handle: TypeAlias = object
"""A backend's own object. The engine stores it and hands it back, nothing else."""


class BackendError(Exception):
    """The operation did not happen and nothing was kept. `status` goes to the guest, the text to the host's log only.
    """

    def __init__(self, status: Status, message: str = "") -> None:
        super().__init__(message or status.name)
        self.status = status


@dataclass(frozen=True, slots=True)
class Limits:
    """Advertised bounds (wire-abi.md 5.1), every one nonzero; bytes for the last two, counts elsewhere."""

    max_contexts: int
    max_buffers_per_context: int
    max_programs_per_context: int
    max_queues_per_context: int
    max_events_per_context: int
    max_bindings_per_submission: int
    max_buffer_bytes: int
    max_artifact_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Identity, capabilities and limits; stable for the life of a backend instance."""

    uuid: bytes
    accelerator_class: int
    vendor_id: int
    device_id: int
    capabilities: int
    limits: Limits


class BufferRequest(NamedTuple):
    """A validated ALLOCATE_BUFFER: bytes > 0, alignment a power of two, domain advertised, usage nonempty."""

    bytes: int
    alignment: int
    domain: int
    usage: int


class AllocatedBuffer(NamedTuple):
    """What an allocation really is. `allocation_bytes` is charged to the guest; neither it nor `alignment` may be less
    than asked. `direct` says that submissions use this very memory."""

    handle: Handle
    allocation_bytes: int
    alignment: int
    direct: bool


class Artifact(NamedTuple):
    """A program as the guest sent it: format and the 12 target words are the format's own, the payload untrusted."""

    format: int
    target: tuple[int, ...]
    payload: Segments
    payload_bytes: int
    resident_bytes: int


class Binding(NamedTuple):
    """One program slot and the buffer range (bytes) bound to it; `access` as in wire.Access."""

    buffer: Handle
    offset: int
    bytes: int
    slot: int
    access: int


class Loaded(NamedTuple):
    """A program ready to be submitted."""

    program: Handle


class Loading(NamedTuple):
    """A load under way: ask `poll_load` with this ticket."""

    ticket: Handle


class Accepted(NamedTuple):
    """The submission runs or will run; `event` owns it."""

    event: Handle


class Rejected(NamedTuple):
    """The submission was not accepted and nothing was kept."""

    status: Status


class Indeterminate(NamedTuple):
    """It cannot be told whether the submission was accepted; `event` owns whatever was kept."""

    event: Handle
    status: Status


class Released(NamedTuple):
    """The object is gone."""


class ReleaseRejected(NamedTuple):
    """The object lives on, under the same handle."""

    status: Status


class ReleaseIndeterminate(NamedTuple):
    """Nobody knows whether the object still exists; the backend must be discarded."""

    status: Status


class Polled(NamedTuple):
    """State of an event; `error` is OK unless the state is FAILED. Terminal states never change."""

    state: EventState
    error: Status


SubmitOutcome: TypeAlias = Accepted | Rejected | Indeterminate
ReleaseOutcome: TypeAlias = Released | ReleaseRejected | ReleaseIndeterminate
RELEASED = Released()


class Backend(Protocol):
    """One accelerator, opened for one device instance."""

    @property
    def info(self) -> DeviceInfo: ...

    def fileno(self) -> int | None:
        """Descriptor (an eventfd) that becomes readable when a load finishes, or None if none is ever pending. The
        owner of the event loop watches it; `acknowledge` makes it quiet again and lets the backend go on with what
        waited. The end of a submission may be told here too, but need not: it is found by `poll_event`."""

    def acknowledge(self) -> None: ...

    def create_context(self) -> Handle: ...
    def destroy_context(self, context: Handle) -> ReleaseOutcome: ...

    def allocate_buffer(self, context: Handle, request: BufferRequest) -> AllocatedBuffer:
        """Zeroed memory. Raises OUT_OF_MEMORY, UNSUPPORTED or RESOURCE_LIMIT."""

    def free_buffer(self, buffer: Handle) -> ReleaseOutcome: ...

    def write_buffer(self, buffer: Handle, offset: int, source: Segments) -> None:
        """One copy, range already checked. Raises BUSY while a submission uses the buffer."""

    def read_buffer(self, buffer: Handle, offset: int, sink: Segments) -> None:
        """One copy, range already checked. Raises BUSY while a submission writes the buffer."""

    def load_program(self, context: Handle, artifact: Artifact) -> Loaded | Loading:
        """Copies the payload before it returns. Raises UNSUPPORTED (format), INCOMPATIBLE (target, operators),
        INVALID_ARGUMENT (not a program), RESOURCE_LIMIT (too large, or resident_bytes too small a promise)."""

    def poll_load(self, ticket: Handle) -> Loaded | None:
        """None while loading. Raises what load_program would have raised; the ticket is then gone."""

    def abandon_load(self, ticket: Handle) -> None:
        """Forget a load: its result is released by the backend. Never waits."""

    def unload_program(self, program: Handle) -> ReleaseOutcome: ...
    def create_queue(self, context: Handle) -> Handle: ...
    def destroy_queue(self, queue: Handle) -> ReleaseOutcome: ...

    def submit(self, queue: Handle, program: Handle, bindings: Sequence[Binding], timeout_ns: int) -> SubmitOutcome:
        """Admit, never wait for, one execution; one that takes no longer than commands do may be over when this
        returns. `timeout_ns` counts from admission, 0 is no limit. Rejections: BUSY (a
        buffer is in use in a conflicting way), INVALID_ARGUMENT or INCOMPATIBLE (bindings do not fit the program)."""

    def poll_event(self, event: Handle) -> Polled:
        """Never waits. Raises DEVICE_LOST when the device is gone."""

    def cancel_event(self, event: Handle) -> None:
        """Only called with capability EVENT_CANCELLATION, and never waits. Raises BUSY if completion won. After a
        cancel or an expired deadline the buffers stay in use until the work has really stopped."""

    def destroy_event(self, event: Handle) -> ReleaseOutcome:
        """Only called on a terminal event."""

    def wait(self, timeout: float) -> None:
        """Block up to `timeout` seconds until something pending may have changed. For in-process users; a server
        watches `fileno` instead."""

    def close(self) -> None:
        """Give everything back, live objects included, without waiting for running work: what still runs keeps its
        memory until it stops."""


class SharesMemory(Protocol):
    """What a backend has to offer besides, to be run in a process of its own: all its buffers lie in one file."""

    def memory(self) -> int:
        """Descriptor of that file, one that is sealed against shrinking (memfd_create(2), F_SEAL_SHRINK)."""

    def place(self, buffer: Handle) -> int:
        """Offset, in the file, of a buffer's first byte."""


class RunsForItsCaller(Protocol):
    """What a backend may offer besides to whoever uses it in process."""

    def expect_patience(self) -> None:
        """The caller will submit something next and then wait for its end, before anything else: `submit` may do the
        work itself, on the caller's thread. Forgotten by the next `submit`."""


class Option(NamedTuple):
    """One thing that a backend can be told when it is opened. A backend lists its own as `OPTIONS` in the module of the
    function that opens it."""

    name: str
    meaning: str
    default: str = ""


ANY_OPTION: Final = "*"
"""Name of an Option that stands for all others, where a backend passes them on to one that judges them."""
NO_OPTIONS: Final[Mapping[str, str]] = MappingProxyType({})


class OpenBackend(Protocol):
    """What an entry point in the group `virtaccel.backends` names: opens a fresh instance.

    `device` is the backend's own device name or class prefix, None for its choice. Raises `BackendUnavailable`, also
    for an option that it does not know.
    """

    def __call__(self, device: str | None = None, options: Mapping[str, str] = NO_OPTIONS) -> Backend: ...


class BackendUnavailable(Exception):
    """No accelerator could be opened; the text says what is wrong and what to do."""


def option_values(backend: str, table: Sequence[Option], options: Mapping[str, str]) -> dict[str, str]:
    """A value for every option of the table, defaults where nothing was given. Raises BackendUnavailable."""
    known = {option.name: option.default for option in table}
    unknown = [name for name in options if name not in known]
    if unknown:
        those = f"its options are {', '.join(known)}" if known else "it has none"
        raise BackendUnavailable(f"backend {backend} has no option {unknown[0]!r}; {those}")
    return {**known, **options}
