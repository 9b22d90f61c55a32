"""One context and one execution queue on a device, and what lives in them: buffers, programs, submissions.

Knows the life of objects (specification.md, section 4) and gives everything back child before parent. Bytes only: what
they mean is `program`'s part, or the numpy API's. Knows no transport. Standard library only: this runs inside a guest.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeAlias

from virtaccel.device.wire import Status, Usage
from virtaccel.guest_tools.artifact import TOSA_FORMAT
from virtaccel.guest_tools.client import Buffer, ClientError, DeviceError, DeviceInfo, Program
from virtaccel.guest_tools.errors import ModelError, Refused
from virtaccel.guest_tools.session import Session
from virtaccel.guest_tools.transport.base import Shared, TransportError
from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import Graph, TosaError

Model: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview

ANY_USE: Final = (
    Usage.TRANSFER_SOURCE | Usage.TRANSFER_DESTINATION | Usage.PROGRAM_INPUT | Usage.PROGRAM_OUTPUT
)
# What still runs at the end is cancelled first, so this only has to outlast native work that cannot be interrupted.
CLOSING_SECONDS = 10.0
_ADVICE: Final[dict[int, str]] = {
    Status.INCOMPATIBLE: "it uses an operator, type or shape that this device does not run as TOSA defines it",
    Status.INVALID_ARGUMENT: "it is not a valid TOSA program",
    Status.UNSUPPORTED: "it takes no TOSA programs",
    Status.RESOURCE_LIMIT: "it is larger than the device's limits allow",
    Status.OUT_OF_MEMORY: "the device has too little memory",
}


class Closes(Protocol):
    """A program of this context, for its end."""

    def close(self) -> None: ...


class Settles(Protocol):
    """A submission of this context, for its end."""

    def settle(self, patience: float) -> None: ...


class Flattens(Protocol):
    """An array that shows its bytes, as numpy's do."""

    def reshape(self, shape: Any, /) -> Any: ...


class DeviceBuffer:
    """Memory on the device, `bytes` long; a program's input or output can be bound to it."""

    def __init__(self, context: DeviceContext, handle: Buffer, size: int, usage: Usage) -> None:
        self.accelerator = context
        self.id = handle
        self.bytes = size
        self.usage = usage
        self._freed = False

    def write(self, data: memoryview | Shared | Flattens, offset: int = 0) -> None:
        """Copy bytes (or an array's bytes) to the device from byte `offset` on; those of shared memory only once."""
        self.accelerator.session.write(self.id, _view(data), offset)

    def read(self, sink: memoryview | Shared | Flattens, offset: int = 0) -> None:
        """Fill `sink` from byte `offset` on."""
        self.accelerator.session.read(self.id, _view(sink), offset)

    def free(self) -> None:
        """Give it back. Raises DeviceError BUSY while a submission uses it. May be called twice."""
        if self._freed:
            return
        session = self.accelerator.session
        session.call(session.client.free_buffer(self.id))
        self._freed = True
        self.accelerator.buffers.discard(self)


def _view(data: memoryview | Shared | Flattens) -> memoryview | Shared:
    if isinstance(data, (memoryview, Shared)):
        return data
    # By the array's own methods, so that this file needs no numpy.
    flat: memoryview = data.reshape(-1).view("u1").data
    return flat


class DeviceContext:
    """One device, one context and one execution queue on it. Single threaded; close it, or use it in `with`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        # Whoever makes an object enters it here, and whoever frees it takes it out: what is left is what has to go at
        # the end.
        self.programs: set[Closes] = set()
        self.buffers: set[DeviceBuffer] = set()
        self.pending: set[Settles] = set()
        client = session.client
        self.info: DeviceInfo = session.call(client.get_device_info())
        self.domain = self.info.domain
        self.context = session.call(client.create_context())
        self.queue = session.call(client.create_queue(self.context))
        self._closed = False

    def offer(self, data: bytes, target: Sequence[int], name: str) -> Program:
        """LOAD_PROGRAM of bytes that nobody has looked at: only the device judges. The caller unloads what was loaded.
        Raises ModelError (Refused where the device says no)."""
        client = self.session.client
        largest = min(self.info.max_artifact_bytes, client.largest_artifact)
        if len(data) > largest:
            raise ModelError(f"{name} has {len(data)} bytes, the device takes models of up to {largest}")
        request = client.load_program(self.context, TOSA_FORMAT, target, data)
        transport = self.session.transport
        transport.take_reasons()  # those of earlier refusals are not this one's
        try:
            return self.session.call(request)
        except DeviceError as error:
            if error.status == Status.DEVICE_LOST:
                # Nobody can tell what a lost device would have said.
                raise  # says nothing about the program
            reasons = transport.take_reasons()
            why = reasons[-1] if reasons else _ADVICE.get(error.status, "no reason given")
            raise Refused(f"the device refuses {name}: {why} ({error})", error.status, reasons) from error

    def buffer(self, size: int, usage: Usage = ANY_USE) -> DeviceBuffer:
        """Zeroed memory on the device, `size` bytes. Raises DeviceError."""
        client = self.session.client
        handle = self.session.call(client.allocate_buffer(self.context, size, usage, domain=self.domain))
        buffer = DeviceBuffer(self, handle, size, usage)
        self.buffers.add(buffer)
        return buffer

    def share(self, size: int) -> Shared:
        """`size` bytes that the device reaches: writes from there and reads to there copy nothing on this side. Fill or
        look at `view`, say with numpy.frombuffer. Raises Unavailable where the way to the device has no such memory,
        Backpressure where none is left."""
        return self.session.transport.share(size)

    def unshare(self, shared: Shared) -> None:
        """Give back what `share` gave."""
        self.session.transport.unshare(shared)

    def close(self) -> None:
        """Cancel or await what still runs, give everything back, close the transport. May be called twice."""
        if self._closed:
            return
        self._closed = True
        try:
            self.give_back()
        except (ClientError, TransportError, TimeoutError):
            # A device that is lost or confused cannot be tidied up; closing the transport ends the session anyway.
            pass
        finally:
            self.session.close()

    def give_back(self) -> None:
        """Everything of this context and the context itself; the session stays open. Raises what the device says."""
        # Children first: a buffer is BUSY while a submission uses it, and so is a program that runs.
        for pending in tuple(self.pending):
            pending.settle(CLOSING_SECONDS)
        for program in tuple(self.programs):
            program.close()
        for buffer in tuple(self.buffers):
            buffer.free()
        session, client = self.session, self.session.client
        session.call(client.destroy_queue(self.queue))
        session.call(client.destroy_context(self.context))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def parse(data: bytes, name: str) -> Graph:
    """The graph in a model's bytes. Raises ModelError with one line."""
    try:
        return read(data)
    except TosaError as error:
        advice = "give a whole .tosa file, as converters write it"
        raise ModelError(f"{name} is not a TOSA model that can be read: {error}; {advice}") from error


def read_model(model: Model, name: str | None = None) -> tuple[bytes, str]:
    """Bytes and name of a model. Raises ModelError if the file cannot be read."""
    if isinstance(model, (bytes, bytearray, memoryview)):
        return bytes(model), name or "the model"
    path = Path(model)
    try:
        return path.read_bytes(), name or path.name
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
