"""Target `session`: stateful command sequences with scripted backend faults, each answer compared with a model.

An input is a list of records, one move each: a command with operands chosen among what is alive, dead or of another
kind, a damaged frame, a fault armed in the backend, a submission or a load that ends, a reset. After every move the
answer must be the model's; in this process also the engine's counts and charges and what the backend still holds must
be the model's sums, and a contract checker between engine and backend must have seen no breach of the contract. Against
somebody else's device only what a guest sees can be held to the model, and what is left open by the standard is left
open.
"""

from __future__ import annotations

from collections.abc import Hashable
from random import Random
from struct import Struct
from typing import Final

from virtaccel.guest_tools.transport.base import Backpressure, TransportError
from virtaccel.guest_tools.via import open_transport
from virtaccel.harness.fuzz import strict
from virtaccel.harness.fuzz.session_bench import (
    BOUNDS,
    Kind,
    LocalBench,
    RemoteBench,
    reference_kind,
)
from virtaccel.harness.fuzz.session_model import Bounds
from virtaccel.harness.fuzz.session_steps import LOCAL_MOVES, REMOTE_MOVES, Steps, load_body
from virtaccel.harness.fuzz.strict import (
    OK,
)
from virtaccel.harness.fuzz.target import Finding, mutate_bytes

RECORD: Final = 6
LONGEST: Final = 400
_INFO: Final = Struct("<16sHHIIQIIIIIIQQ")


class SessionTarget:
    """See the module. `via` is the way to a device, empty for one in this process."""

    name = "session"
    unit = "steps"
    stride = RECORD

    def __init__(self, via: str = "") -> None:
        self.features: set[Hashable] = set()
        self._remote = RemoteBench(open_transport(via)) if via else None
        self._kind: Kind | None = None
        self._bounds = BOUNDS
        if self._remote is not None:
            self._learn(self._remote)

    def _learn(self, bench: RemoteBench) -> None:
        """Limits of the device, and a program that it takes."""
        steps = Steps(self.features, bench, BOUNDS, reference_kind(0, 1))
        info = _INFO.unpack(steps.exchange(strict.GET_DEVICE_INFO, b"").payload)
        self._bounds = Bounds(info[6], info[7], info[8], info[9], info[10], info[12], 0, 0)
        context = steps.exchange(strict.CREATE_CONTEXT, bytes(8)).payload
        for kind in bench.kinds():
            if steps.exchange(strict.LOAD_PROGRAM, load_body(int.from_bytes(context, "little"), kind)).status == OK:
                self._kind = kind
                break

    def generate(self, random: Random) -> bytes:
        return random.randbytes(RECORD * random.randrange(20, LONGEST))

    def mutate(self, data: bytes, random: Random) -> bytes:
        return mutate_bytes(data, random, RECORD, RECORD * LONGEST)

    def execute(self, data: bytes) -> int:
        if self._remote is not None:
            self._remote.reset()
            return self._run(self._remote, data)
        bench = LocalBench()
        try:
            return self._run(bench, data)
        finally:
            bench.close()

    def _run(self, bench: LocalBench | RemoteBench, data: bytes) -> int:
        steps = Steps(self.features, bench, self._bounds, self._kind or reference_kind(0x5A, 64))
        moves = LOCAL_MOVES if isinstance(bench, LocalBench) else REMOTE_MOVES
        try:
            steps.populate()
            for at in range(0, len(data) - RECORD + 1, RECORD):
                moves[data[at]](steps, data[at + 1 : at + RECORD])
                steps.settle()
        except (TransportError, Backpressure) as error:
            raise Finding(f"the device stopped answering: {error}") from error
        return len(data) // RECORD

    def close(self) -> None:
        if self._remote is not None:
            self._remote.close()
