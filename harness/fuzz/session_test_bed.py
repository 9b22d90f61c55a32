"""Where target `session` sends its commands: a device in this process with its backend on strings, or any transport.

A bed carries one frame at a time and gives back the answer, or None where the head was withheld. The local one also
arms faults, ends submissions and loads, and can be looked into; the remote one can do none of that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from virtaccel.device.config import DeviceConfig, ResourcePolicy
from virtaccel.device.engine import Health
from virtaccel.device.objects import Namespaces
from virtaccel.device.reference import INFO, Fault, Operation, Program, Reference, Script
from virtaccel.device.reset import ResetReport
from virtaccel.device.ring_service import Device
from virtaccel.device.wire import Status
from virtaccel.guest_tools.transport.base import Transport
from virtaccel.harness.fuzz.contract_checker import ContractChecker
from virtaccel.harness.fuzz.target import Finding, quiet
from virtaccel.harness.oracle import frames as f
from virtaccel.harness.oracle.frames import Answer, BadAnswer, Info
from virtaccel.harness.oracle.model import Limits
from virtaccel.harness.oracle.programs import REFERENCE_FORMAT, Sample
from virtaccel.virtqueue.segments import Chain

PAGE: Final = 4096
ROOM: Final = 160  # more than any answer here has, so that bytes behind it are seen
CANARIES: Final = bytes([f.CANARY]) * ROOM
# So small that a few hundred moves reach every limit and both budgets.
_LIMITS: Final = replace(
    INFO.limits,
    max_contexts=3,
    max_buffers_per_context=5,
    max_programs_per_context=3,
    max_queues_per_context=2,
    max_events_per_context=4,
    max_buffer_bytes=2 * PAGE,
)
BACKING: Final = 14 * PAGE
RESIDENT: Final = 500
_POLICY: Final = ResourcePolicy(max_buffer_backing_bytes=BACKING, max_program_resident_bytes=RESIDENT)
_INFO: Final = replace(INFO, limits=_LIMITS)
_CONFIG: Final = DeviceConfig()


def same_namespaces() -> Namespaces:
    """The same IDs every time, so that an input means the same every time."""
    return Namespaces(b"the same every time")


def reference_sample(operand: int, resident: int) -> Sample:
    """A program of the reference backend, for bindings of any size."""
    artifact = Program(Operation.XOR, operand, 1, 1, 0).pack()
    return Sample("XOR", REFERENCE_FORMAT, (0,) * 12, artifact, resident, 0, operand)


class LocalBed:
    """A device over a checked reference backend that ends nothing by itself."""

    limits: Final = Limits(
        _CONFIG.wire.max_request_bytes, _CONFIG.wire.max_response_bytes,
        Info(bytes(16), 0, 0, 0, 0, INFO.capabilities, 3, 5, 3, 2, 4, _LIMITS.max_bindings_per_submission, 2 * PAGE,
             _LIMITS.max_artifact_bytes),
        BACKING, RESIDENT,
    )  # fmt: skip

    def __init__(self) -> None:
        self.script = Script(immediate=False)
        self.backend = self._fresh()
        self.device = Device(self._open, _CONFIG, _POLICY, quiet())
        self.device._namespaces = self.device.engine._namespace = same_namespaces()
        self.device.engine.reset()
        self.out = bytearray(ROOM)
        self.view = memoryview(self.out)
        self.armed: dict[str, Fault] = {}

    def _fresh(self) -> ContractChecker:
        self.reference = Reference(_INFO, self.script)
        self.backend = ContractChecker(self.reference)
        return self.backend

    def _open(self) -> ContractChecker:
        return self.backend if not self.backend.closed else self._fresh()

    def send(self, request: bytes, capacity: int, out: memoryview | None = None) -> Answer | None:
        if out is None:
            self.out[:] = CANARIES
            out = self.view[:capacity]
        chain = Chain(0, (memoryview(request),), (out,), len(request), capacity)
        used = self.device.engine.process(chain)
        if used is None:
            return None
        whole = self.out if out.obj is self.out else out
        return answer_to(request, bytes(whole), used)

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


class RemoteBed:
    """Somebody's device behind a transport, reset at the start. Raises Finding if it does not say what it is."""

    def __init__(self, transport: Transport, patience: float = 60.0) -> None:
        self._transport = transport
        self._patience = patience
        transport.reset()
        config = transport.config
        payload = self.send(f.frame(f.INFO), 92).payload
        if len(payload) != f.OK_PAYLOAD[f.INFO]:
            raise Finding("the device does not say what it is")
        self.limits = Limits(config.max_request_bytes, config.max_response_bytes, Info.read(payload))

    def send(self, request: bytes, capacity: int) -> Answer:
        token = self._transport.publish((request,), capacity)
        completion = self._transport.collect(self._patience)
        if completion is None:
            raise Finding(f"no answer within {self._patience:.0f} s")
        if completion.token != token:
            raise Finding("another command came back than was sent")
        return answer_to(request, completion.response.tobytes(), len(completion.response))

    def reset(self) -> None:
        self._transport.reset()

    def close(self) -> None:
        self._transport.close()


def answer_to(request: bytes, room: bytes, used: int) -> Answer:
    """Raises Finding for what is no answer."""
    try:
        return f.answer_to(request, room, used)
    except BadAnswer as error:
        raise Finding(f"command {f.field(request, 0, 2):#06x}: {error}") from error
