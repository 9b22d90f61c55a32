"""The nine recorded traces of scenarios.json, replayed through a real ring and the engine with a scripted backend.

Statuses, used lengths and bytes must be equal. Object IDs in the traces are another implementation's, so each ID that a
recorded response hands out is mapped to ours; nothing else is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_ring import CommandRing
from frames import CODES, Response

from virtaccel.device.config import DeviceConfig, WireConfig
from virtaccel.device.engine import Health
from virtaccel.device.reference import INFO, Doubt, Operation, Program, Reference, Refuse, Script
from virtaccel.device.reset import ResetReport
from virtaccel.device.wire import Status
from virtaccel.virtqueue.errors import Backpressure

NAMES = (
    "complete_lifecycle", "out_of_order", "backpressure", "notification_suppression", "short_response", "timeout",
    "indeterminate_recovery", "reset_inflight", "device_loss",
)  # fmt: skip
TRACED_FORMAT = 0x56414D4B
TRACED_INFO = replace(
    INFO,
    uuid=b"virtio-accelmock",
    accelerator_class=1,
    limits=replace(INFO.limits, max_buffer_bytes=4096, max_artifact_bytes=1 << 32),
)
CREATORS = {CODES[name] for name in ("CREATE_CONTEXT", "ALLOCATE_BUFFER", "LOAD_PROGRAM", "CREATE_QUEUE", "SUBMIT")}
# Where requests carry object IDs, from the beginning of the frame.
ID_PLACES = dict.fromkeys(CODES.values(), (16,))
ID_PLACES[CODES["GET_DEVICE_INFO"]] = ID_PLACES[CODES["CREATE_CONTEXT"]] = ()
ID_PLACES[CODES["SUBMIT"]] = (16, 24, 48)  # queue, program, the one binding's buffer


def read_traced_program(payload: bytes) -> Program:
    """The traces' artifact: it works in place on one buffer bound for reading and writing."""
    assert payload[:4] == b"VAMK"
    return Program(Operation.XOR, 0x5A, inputs=0, outputs=0, states=1)


class Replay:
    """One scenario's ring, engine and script, and the IDs seen so far."""

    def __init__(self, scenario: dict[str, Any], ring_size: int = 16) -> None:
        self.trace: list[dict[str, Any]] = scenario["trace"]
        self.controls = {control["action"]: control for control in scenario["controls"]}
        self.script = Script(immediate=False)
        self.ids: dict[int, int] = {}
        readers = {TRACED_FORMAT: read_traced_program}
        self.ring = CommandRing(
            lambda: Reference(TRACED_INFO, self.script, readers),
            size=ring_size,
            config=DeviceConfig(WireConfig(max_request_bytes=4096, max_response_bytes=4096)),
        )

    def request(self, step: dict[str, Any]) -> bytes:
        frame = bytearray.fromhex(step["request"])
        for at in ID_PLACES[step["opcode"]]:
            theirs = int.from_bytes(frame[at : at + 8], "little")
            frame[at : at + 8] = self.ids[theirs].to_bytes(8, "little")
        return bytes(frame)

    def publish(self, step: dict[str, Any]) -> int:
        sizes = {
            direction: [region["bytes"] for region in step["regions"] if region["direction"] == direction]
            for direction in ("readable", "writable")
        }
        return self.ring.publish(self.request(step), sizes["readable"], sizes["writable"])

    def assert_response(self, step: dict[str, Any], response: Response | None) -> None:
        assert response is not None
        expected = bytearray.fromhex(step["response"])
        if step["opcode"] in CREATORS and len(expected) == 24:
            theirs = int.from_bytes(expected[16:], "little")
            self.ids[theirs] = int.from_bytes(response.payload, "little")
            expected[16:] = response.payload
        assert response.raw == bytes(expected), step["operation"]
        assert (response.used, response.status) == (step["used"], step["status"]), step["operation"]

    def step(self, step: dict[str, Any]) -> None:
        self.publish(step)
        self.ring.service.service()
        self.assert_response(step, self.ring.collect())

    def steps(self, *request_ids: int) -> None:
        for number in request_ids:
            recorded = next(step for step in self.trace if step["request_id"] == number)
            self.step(recorded)


def assert_same_report(report: ResetReport, control: dict[str, Any]) -> None:
    assert report.released._asdict() == control["released"]
    assert report.quarantined._asdict() == control["quarantined"]
    assert report.discard == (control["action"] == "backend_discard_required")


def replay_complete_lifecycle(replay: Replay) -> None:
    assert "complete_submissions_immediately" in replay.controls
    replay.steps(*range(1, 14))
    replay.script.immediate = True
    replay.steps(*range(14, 21))
    assert not any(replay.ring.device.engine.state.counts)


def replay_out_of_order(replay: Replay) -> None:
    """The device takes both chains in order and finishes the second one first."""
    last, first = replay.trace
    replay.publish(first)
    replay.publish(last)
    queue, engine = replay.ring.queue, replay.ring.device.engine
    chains = [queue.pop(), queue.pop()]
    for chain in reversed(chains):
        assert chain is not None
        written = engine.process(chain)
        assert written is not None
        queue.push(chain, written)
    replay.assert_response(last, replay.ring.collect())
    replay.assert_response(first, replay.ring.collect())


def replay_backpressure(replay: Replay) -> None:
    """A ring of two descriptors holds one command: the second is refused before it is published, and then retried."""
    first, second = replay.trace
    replay.publish(first)
    with pytest.raises(Backpressure):
        replay.publish(second)
    replay.ring.service.service()
    replay.assert_response(first, replay.ring.collect())
    replay.step(second)


def replay_notification_suppression(replay: Replay) -> None:
    """No kick while the device looks anyway, no interrupt while the driver does not want one: work is not lost."""
    (step,) = replay.trace
    ring = replay.ring
    ring.queue.disable_kicks()
    replay.publish(step)
    assert not ring.driver.should_kick()
    assert ring.queue.enable_kicks(), "what came without a kick must be noticed"
    ring.driver.disable_interrupts()
    ring.service.service()
    assert ring.notified == 0
    replay.assert_response(step, ring.collect())


def replay_short_response(replay: Replay) -> None:
    """A transport that reports one byte less: the driver's side is the client's, the bytes are ours."""
    (step,) = replay.trace
    replay.publish(step)
    queue = replay.ring.queue
    chain = queue.pop()
    assert chain is not None
    written = replay.ring.device.engine.process(chain)
    assert written == step["used"] + 1
    queue.push(chain, written - 1)
    used = replay.ring.driver.collect()
    assert used is not None
    assert used.written == step["used"]
    raw = b"".join(replay.ring.published[used.head].writable)
    assert raw[: used.written].hex() == step["response"]


def replay_timeout(replay: Replay) -> None:
    replay.steps(*range(1, 6))
    replay.script.finite_timeouts_expire = True
    replay.steps(*range(6, 11))


def replay_indeterminate_recovery(replay: Replay) -> None:
    replay.steps(1, 2)
    replay.script.next("allocate_buffer", Refuse(Status.OUT_OF_MEMORY))
    replay.steps(3, 4, 5, 6)
    replay.script.next("submit", Doubt(Status.DEADLINE_EXPIRED))
    replay.steps(7)
    replay.script.calls.clear()
    engine = replay.ring.device.engine
    report = engine.reset()
    assert_same_report(report, replay.controls["backend_discard_required"])
    assert engine.health is Health.DISCARD_REQUIRED
    calls = len(replay.script.calls)
    assert_same_report(engine.reset(), replay.controls["backend_discard_required"])
    assert len(replay.script.calls) == calls, "a discarded backend is not called again"


def replay_reset_inflight(replay: Replay) -> None:
    before, again = replay.trace[:-1], replay.trace[-1]
    for step in before:
        replay.step(step)
    event = next(step for step in before if step["operation"] == "SUBMIT")
    event_id = replay.ids[int.from_bytes(bytes.fromhex(event["response"])[16:], "little")]
    poll = CODES["POLL_EVENT"].to_bytes(2, "little") + bytes(2) + (8).to_bytes(4, "little") + (7).to_bytes(8, "little")
    head = replay.ring.publish(poll + event_id.to_bytes(8, "little"))
    report = replay.ring.reset()
    assert_same_report(report, replay.controls["backend_reusable"])
    assert replay.ring.untouched(head)
    replay.step(again)
    assert replay.ring.collect() is None


def replay_device_loss(replay: Replay) -> None:
    replay.steps(*range(1, 7))
    replay.script.lost = True
    replay.steps(7)
    assert replay.ring.device.health is Health.DISCARD_REQUIRED


REPLAYS: dict[str, Callable[[Replay], None]] = {name: globals()[f"replay_{name}"] for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_trace(name: str, shared: Path) -> None:
    scenarios = json.loads((shared / "conformance/v1.0/scenarios.json").read_text())["scenarios"]
    scenario = next(scenario for scenario in scenarios if scenario["name"] == name)
    REPLAYS[name](Replay(scenario, ring_size=2 if name == "backpressure" else 16))


def test_every_trace_is_replayed(shared: Path) -> None:
    scenarios = json.loads((shared / "conformance/v1.0/scenarios.json").read_text())["scenarios"]
    assert {scenario["name"] for scenario in scenarios} == set(NAMES)
