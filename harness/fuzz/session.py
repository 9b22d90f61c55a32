"""Target `session`: stateful command sequences with scripted backend faults, each answer held to the oracle.

An input is a list of records, one move each: a command with operands chosen among what is alive, dead or of another
kind, a damaged frame, a fault armed in the backend, a submission or a load that ends, a reset. After every move the
answer must be one the oracle allows; in this process also the engine's counts and charges and what the backend still
holds must be the model's sums, and a contract checker between engine and backend must have seen no breach of the
contract. Against somebody else's device only what a guest sees can be held to the model, and what is left open by the
standard is left open.
"""

from __future__ import annotations

from random import Random
from typing import Final

from virtaccel.guest_tools.transport.base import Backpressure, TransportError
from virtaccel.guest_tools.via import open_transport
from virtaccel.harness.fuzz.session_steps import LOCAL_MOVES, REMOTE_MOVES, Steps
from virtaccel.harness.fuzz.session_test_bed import LocalBed, RemoteBed, reference_sample
from virtaccel.harness.fuzz.target import Finding, TargetBase
from virtaccel.harness.oracle import frames as f
from virtaccel.harness.oracle.frames import BadAnswer
from virtaccel.harness.oracle.programs import SAMPLES, Sample

RECORD: Final = 6
LONGEST: Final = 400  # records: enough to fill every table and empty it again


class SessionTarget(TargetBase):
    """See the module. `via` is the way to a device, empty for one in this process."""

    name = "session"
    stride = RECORD

    def __init__(self, via: str = "") -> None:
        super().__init__()
        self._remote = RemoteBed(open_transport(via)) if via else None
        self._sample = reference_sample(0x5A, 64) if self._remote is None else self._taken_by(self._remote)

    def _taken_by(self, bed: RemoteBed) -> Sample:
        """A program that the device takes."""
        context = bed.send(f.frame(f.CREATE_CONTEXT, bytes(8)), 24).id
        for sample in SAMPLES:
            if bed.send(f.frame(f.LOAD, f.load(context, sample)), 24).status == f.OK:
                return sample
        return SAMPLES[0]

    def generate(self, random: Random) -> bytes:
        return random.randbytes(RECORD * random.randrange(20, LONGEST))

    def execute(self, data: bytes) -> int:
        if self._remote is not None:
            self._remote.reset()
            return self._run(self._remote, data)
        bed = LocalBed()
        try:
            return self._run(bed, data)
        finally:
            bed.close()

    def _run(self, bed: LocalBed | RemoteBed, data: bytes) -> int:
        steps = Steps(self.features, bed, self._sample)
        moves = LOCAL_MOVES if isinstance(bed, LocalBed) else REMOTE_MOVES
        try:
            steps.populate()
            for at in range(0, len(data) - RECORD + 1, RECORD):
                moves[data[at]](steps, data[at + 1 : at + RECORD])
                steps.settle()
        except BadAnswer as error:
            raise Finding(str(error)) from error
        except (TransportError, Backpressure) as error:
            raise Finding(f"the device stopped answering: {error}") from error
        return len(data) // RECORD

    def close(self) -> None:
        if self._remote is not None:
            self._remote.close()
