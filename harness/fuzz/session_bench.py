"""Where target `session` sends its commands: a device in this process with its backend on strings, or any transport.

A bench carries one frame at a time and gives back the bytes used, or says that the head was withheld. The local one
also arms faults, ends submissions and loads, and can be looked into; the remote one can do none of that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from virtaccel.device.config import DeviceConfig, ResourcePolicy
from virtaccel.device.engine import Health
from virtaccel.device.objects import Namespaces
from virtaccel.device.reference import FORMAT, INFO, Fault, Operation, Program, Reference, Script
from virtaccel.device.reset import ResetReport
from virtaccel.device.ring_service import Device
from virtaccel.device.wire import Status
from virtaccel.guest_tools.transport.base import Transport
from virtaccel.harness.fuzz.contract_checker import ContractChecker
from virtaccel.harness.fuzz.frame import quiet
from virtaccel.harness.fuzz.session_model import Bounds
from virtaccel.harness.fuzz.target import Finding
from virtaccel.harness.oracle.programs import SAMPLES
from virtaccel.virtqueue.segments import Chain

PAGE: Final = 4096
ROOM: Final = 160
CANARY: Final = b"\xc5" * ROOM
LIMITS: Final = replace(
    INFO.limits,
    max_contexts=3,
    max_buffers_per_context=5,
    max_programs_per_context=3,
    max_queues_per_context=2,
    max_events_per_context=4,
    max_buffer_bytes=2 * PAGE,
)
BOUNDS: Final = Bounds(3, 5, 3, 2, 4, 2 * PAGE, 14 * PAGE, 500)
_POLICY: Final = ResourcePolicy(max_buffer_backing_bytes=BOUNDS.backing, max_program_resident_bytes=BOUNDS.resident)
_INFO: Final = replace(INFO, limits=LIMITS)
_CONFIG: Final = DeviceConfig()


class Reply(NamedTuple):
    """`used` is the used length, None if the head was withheld; `data` the bytes used."""

    used: int | None
    data: bytes


class Kind(NamedTuple):
    """A program the device takes: what LOAD_PROGRAM says of it, the operand its bytes are combined with (XOR), and the
    size its bindings must have, 0 if any will do."""

    format: int
    target: tuple[int, ...]
    artifact: bytes
    resident: int
    operand: int
    size: int


def reference_kind(operand: int, resident: int) -> Kind:
    return Kind(FORMAT, (0,) * 12, Program(Operation.XOR, operand, 1, 1, 0).pack(), resident, operand, 0)


class LocalBench:
    """A device over an checked reference backend that ends nothing by itself."""

    def __init__(self) -> None:
        self.script = Script(immediate=False)
        self.backend = self._fresh()
        self._log = quiet()
        self.device = Device(self._open, _CONFIG, _POLICY, self._log)
        # The same IDs every time, so that an input means the same every time.
        self.device._namespaces = Namespaces(b"the same every time")
        self.device.engine._namespace = self.device._namespaces
        self.device.engine.reset()
        self.out = bytearray(CANARY)
        self.view = memoryview(self.out)
        self.armed: dict[str, Fault] = {}

    def _fresh(self) -> ContractChecker:
        self.reference = Reference(_INFO, self.script)
        self.backend = ContractChecker(self.reference)
        return self.backend

    def _open(self) -> ContractChecker:
        return self.backend if not self.backend.closed else self._fresh()

    def send(self, frame: bytes, capacity: int, out: memoryview | None = None) -> Reply:
        if out is None:
            self.out[:] = CANARY
            out = self.view[:capacity]
        chain = Chain(0, (memoryview(frame),), (out,), len(frame), capacity)
        used = self.device.engine.process(chain)
        if used is None:
            return Reply(None, b"")
        if out.obj is self.out and self.out[used:] != CANARY[used:]:
            raise Finding("bytes behind the used length were touched")
        return Reply(used, out[:used].tobytes())

    def arm(self, method: str, fault: Fault) -> None:
        self.script.faults[method].clear()
        self.script.next(method, fault)
        self.armed[method] = fault

    def taken(self) -> dict[str, Fault]:
        """Faults that have been met since they were armed; they are then armed no more."""
        if not self.armed:
            return {}
        taken = {method: fault for method, fault in self.armed.items() if not self.script.faults[method]}
        for method in taken:
            del self.armed[method]
        return taken

    def disarm(self) -> None:
        for method in self.armed:
            self.script.faults[method].clear()
        self.armed.clear()

    def complete(self, count: int, error: int) -> None:
        self.reference.complete(count, Status(error))

    @property
    def running(self) -> bool:
        return self.device.engine.health is Health.RUNNING

    def reset(self) -> ResetReport:
        return self.device.reset()

    def close(self) -> None:
        self.device.close()


class RemoteBench:
    """Somebody's device behind a transport, reset at the start."""

    def __init__(self, transport: Transport, patience: float = 60.0) -> None:
        self._transport = transport
        self._patience = patience
        transport.reset()

    def send(self, frame: bytes, capacity: int) -> Reply:
        token = self._transport.publish((frame,), capacity)
        completion = self._transport.collect(self._patience)
        if completion is None:
            raise Finding(f"no answer within {self._patience:.0f} s")
        if completion.token != token:
            raise Finding("another command came back than was sent")
        return Reply(len(completion.response), completion.response.tobytes())

    def reset(self) -> None:
        self._transport.reset()

    def close(self) -> None:
        self._transport.close()

    @staticmethod
    def kinds() -> tuple[Kind, ...]:
        """Programs to try, one of which most devices take."""
        return tuple(
            Kind(one.format, one.target, one.artifact, one.resident, one.operand, one.bytes) for one in SAMPLES
        )
