"""The fuzzers see: known faults, planted one at a time into a process of its own, are each found within a minute.

Each row changes the syntax tree of the device (or of the guest's driver) in one place, as a plausible slip of the
keyboard would; `tests/support/planted.py` knows the kinds of slips. The same run without a fault finds nothing, which
test_fuzz_targets.py shows.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

SECONDS = 60


class Fault(NamedTuple):
    """The target that has to find it, the module, and what is changed: function, kind of slip, names that say where."""

    target: str
    module: str
    changes: list[list[Any]]


FAULTS = {
    "chain-walk-off-by-one": Fault("ring", "virtqueue.chain", [["walk", "longer", ["range", "limit"], 1]]),
    "head-outside-the-table": Fault(
        "ring", "virtqueue.chain", [["walk", "operator", ["index", "size"], "Gt"]]
    ),
    "zero-length-descriptor": Fault(
        "ring", "virtqueue.chain", [["walk", "without", ["KNOWN_FLAGS", "length"], "length"]]
    ),
    "readable-after-writable": Fault("ring", "virtqueue.chain", [["walk", "never", ["only", "writable_bytes"]]]),
    "u16-wrap-of-the-available-index": Fault(
        "ring", "virtqueue.split", [["pop", "modulo", ["only", "last", "INDEX_MASK"], 1 << 32]]
    ),
    "u16-wrap-of-the-used-index": Fault(
        "ring", "virtqueue.split", [["push", "modulo", ["index", "INDEX_MASK"], 65535]]
    ),
    "available-index-believed": Fault("ring", "virtqueue.split", [["pop", "never", ["pending", "outstanding"]]]),
    "given-back-twice": Fault("ring", "virtqueue.split", [["push", "dropped", ["chain", "epoch"]]]),
    "range-end-in-the-hole": Fault(
        "ring", "virtqueue.chain", [["walk", "judged by its start", ["offset", "address", "length", "end"]]]
    ),
    "missing-reserved-check": Fault(
        "frame", "device.decode", [["decode_allocate", "without", ["reserved0", "reserved1"], "reserved0"]]
    ),
    "missing-flag-check": Fault("frame", "device.decode", [["decode_submit", "dropped", ["unsupported", "flags"]]]),
    "offset-overflow": Fault("frame", "device.decode", [["_decode_transfer", "never", ["offset", "size"]]]),
    "one-byte-outside-the-buffer": Fault(
        "frame", "device.commands", [["_transferable", "more", ["request", "offset", "buffer"], 1]]
    ),
    "stale-id-accepted": Fault("session", "device.objects", [["insert", "left side only", ["_generations", "slot"]]]),
    "double-release": Fault("session", "device.commands", [["free_buffer", "twice", ["free_buffer", "handle"]]]),
    "quota-leak": Fault("session", "device.state", [["remove_program", "dropped", ["resident_bytes"]]]),
    "count-leak-of-failed-loads": Fault("session", "device.state", [["remove_load", "dropped", ["context", "loads"]]]),
    "short-response-after-mutation": Fault(
        "session", "device.engine", [["process", "after the next statement", ["chain", "writable_bytes", "capacity"]]]
    ),
    "indeterminate-submission-as-refusal": Fault(
        "session", "device.commands", [["submit", "empty", ["Uncertain", "status"]]]
    ),
    "event-references-kept": Fault(
        "session", "device.state", [["remove_event", "dropped", ["program", "references"]]]
    ),
    "lost-backend-asked-again": Fault("session", "device.engine", [["process", "never", ["health", "RUNNING"]]]),
    "descriptor-leak-of-a-replaced-call": Fault(
        "vhost", "device.vhost_user.guest", [["set_call", "never", ["_call"]]]
    ),
    "descriptor-leak-after-a-failed-watch": Fault(
        "vhost", "device.vhost_user.guest", [["set_kick", "dropped", ["os", "close", "fd"]]]
    ),
    "mapping-leak": Fault("vhost", "device.loop.mapping", [["_map", "kept", ["whole", "region", "start"], "whole"]]),
    "another-vring-believed": Fault(
        "vhost", "device.vhost_user.session", [["_command_queue", "never", ["vring", "COMMAND_QUEUE"]]]
    ),
    "acknowledgement-unasked": Fault(
        "vhost", "device.vhost_user.session", [["_wants_ack", "without", ["need_reply"], "need_reply"]]
    ),
    "config-space-read-outside": Fault(
        "vhost", "device.vhost_user.session", [["_get_config", "left side only", ["space", "offset"]]]
    ),
    "field-outside-its-table": Fault("tosa", "tosa_graph.encoding", [
        ["_vtable", "never", ["slots", "table_bytes"]], ["field", "never", ["offset", "width", "table_bytes"]],
        ["fit", "never", ["offset", "width", "table_bytes"]],
    ]),
    "vector-end-not-checked": Fault("tosa", "tosa_graph.encoding", [["vector", "never", ["length", "width", "size"]]]),
    "stride-of-zero": Fault("tosa", "tosa_graph.infer_tensor", [["_positive", "more", ["only", "min", "values"], -1]]),
    "used-before-it-is-defined": Fault("tosa", "tosa_graph.walk", [["_node", "never", ["name", "known"]]]),
    "length-beyond-the-buffer-believed": Fault(
        "device", "virtqueue.driver", [["collect", "never", ["written", "writable_bytes"]]]
    ),
    "unissued-head-believed": Fault(
        "device", "virtqueue.driver", [["collect", "dropped", ["only", "_issued", "head", "self"]]]
    ),
    "request-id-not-compared": Fault("device", "guest_tools.client", [["receive", "never", ["request_id"]]]),
    "slot-lost-by-a-broken-ring": Fault(
        "device", "guest_tools.transport.ring", [["publish", "not tidied", ["BaseException", "slot"]]]
    ),
}  # fmt: skip


def fuzz_with(fault: Fault, seconds: int = SECONDS) -> dict[str, object]:
    """Fuzz a process with the fault in it."""
    script = Path(__file__).parents[2] / "support" / "planted.py"
    run = subprocess.run(
        [sys.executable, "-W", "error", str(script), f"virtaccel.{fault.module}", fault.target, str(seconds)],
        input=json.dumps(fault.changes), capture_output=True, text=True, timeout=2 * seconds, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    outcome: dict[str, object] = json.loads(run.stdout)
    return outcome


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_found(name: str) -> None:
    outcome = fuzz_with(FAULTS[name])
    assert outcome["found"], f"not found in {SECONDS} s: {outcome}"
