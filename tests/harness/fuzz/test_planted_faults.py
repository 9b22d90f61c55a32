"""The fuzzers see: known faults, planted one at a time into a process of its own, are each found within a minute.

Each row changes source text of the device (or of the guest's driver), as a plausible slip of the keyboard would. The
same run without a fault finds nothing, which test_fuzz_targets.py shows.
"""

# ruff: noqa: E501 - the table quotes source text line for line

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

SECONDS = 60


class Fault(NamedTuple):
    """What is planted where, and the target that has to find it."""

    target: str
    module: str
    edits: tuple[tuple[str, str], ...]


FAULTS = {
    "chain-walk-off-by-one": Fault(
        "ring", "virtqueue.chain", (("for _ in range(limit):", "for _ in range(limit + 1):"),)
    ),
    "head-outside-the-table": Fault("ring", "virtqueue.chain", (("if index >= size:", "if index > size:"),)),
    "zero-length-descriptor": Fault("ring", "virtqueue.chain", ((" or not length:", ":"),)),
    "readable-after-writable": Fault("ring", "virtqueue.chain", (("elif writable_bytes:", "elif False:"),)),
    "u16-wrap-of-the-available-index": Fault(
        "ring", "virtqueue.split", (("self.last_available = (last + 1) & INDEX_MASK", "self.last_available = last + 1"),)
    ),
    "u16-wrap-of-the-used-index": Fault(
        "ring", "virtqueue.split",
        (("self._used_words[USED_INDEX] = (index + 1) & INDEX_MASK", "self._used_words[USED_INDEX] = (index + 1) % 65535"),),
    ),
    "available-index-believed": Fault(
        "ring", "virtqueue.split", (("if pending + self.outstanding > self.size:", "if False:"),)
    ),
    "given-back-twice": Fault("ring", "virtqueue.split", (("        chain.epoch = 0  # of no queue", "        # "),)),
    "range-end-in-the-hole": Fault(
        "ring", "virtqueue.chain", (("if offset >= 0 and address + length <= end:", "if offset >= 0 and address < end:"),)
    ),
    "missing-reserved-check": Fault(
        "frame", "device.decode", (("if reserved0 != _NO_RESERVED_7 or reserved1:", "if reserved1:"),)
    ),
    "missing-flag-check": Fault(
        "frame", "device.decode", (('        raise unsupported(f"submission flags {flags:#x}")', "        pass"),)
    ),
    "offset-overflow": Fault(
        "frame", "device.decode",
        (("    if offset + size > U64_MAX:\n        raise invalid(\"offset + bytes overflows\")\n    if not buffer",
          "    if not buffer"),),
    ),
    "one-byte-outside-the-buffer": Fault(
        "frame", "device.commands",
        (("if request.offset + request.bytes > buffer.bytes:", "if request.offset + request.bytes > buffer.bytes + 1:"),),
    ),
    "stale-id-accepted": Fault(
        "session", "device.objects",
        (("generation = self._generations[slot] + 1", "generation = self._generations[slot]"),),
    ),
    "double-release": Fault(
        "session", "device.commands",
        (("    outcome = state.backend.free_buffer(buffer.handle)\n",
          "    outcome = state.backend.free_buffer(buffer.handle)\n    state.backend.free_buffer(buffer.handle)\n"),),
    ),
    "quota-leak": Fault(
        "session", "device.state", (("        program.context.programs -= 1\n        self.resident_bytes -= program.resident_bytes\n",
                                     "        program.context.programs -= 1\n"),),
    ),
    "count-leak-of-failed-loads": Fault(
        "session", "device.state", (("        load.context.loads -= 1\n", "        pass\n"),)
    ),
    "short-response-after-mutation": Fault(
        "session", "device.engine",
        (("            if chain.writable_bytes < (capacity or room(request, self._config.wire.max_response_bytes)):\n"
          "                return 0\n            reply = handle(state, request, chain)\n",
          "            reply = handle(state, request, chain)\n"
          "            if chain.writable_bytes < (capacity or room(request, self._config.wire.max_response_bytes)):\n"
          "                return 0\n"),),
    ),
    "indeterminate-submission-as-refusal": Fault(
        "session", "device.commands", (("else Uncertain(outcome.status, event)", "else Uncertain(outcome.status, b'')"),)
    ),
    "event-references-kept": Fault(
        "session", "device.state", (("        event.program.references -= 1\n", ""),)
    ),
    "lost-backend-asked-again": Fault(
        "session", "device.engine", (("        if self.health is not RUNNING:\n            return self._refuse(chain, request_id, DEVICE_LOST)\n", ""),)
    ),
    "descriptor-leak-of-a-replaced-call": Fault(
        "vhost", "device.vhost_user.guest",
        (("        if self._call is not None:\n            self._call.close()\n        self._call = None\n", "        self._call = None\n"),),
    ),
    "descriptor-leak-after-a-failed-watch": Fault(
        "vhost", "device.vhost_user.guest", (("                os.close(fd)\n                raise RequestRefused(f\"kick", "                raise RequestRefused(f\"kick"),)
    ),
    "mapping-leak": Fault(
        "vhost", "device.loop.mapping",
        (("    return memoryview(whole)[region.offset - start :]", "    _KEPT.append(whole)\n    return memoryview(whole)[region.offset - start :]"),
         ('NOT_SHARED = "', '_KEPT: list[object] = []\nNOT_SHARED = "')),
    ),
    "another-vring-believed": Fault(
        "vhost", "device.vhost_user.session", (("    if state.vring != COMMAND_QUEUE:", "    if False:"),)
    ),
    "acknowledgement-unasked": Fault(
        "vhost", "device.vhost_user.session", (("        return message.need_reply and bool(", "        return bool("),)
    ),
    "config-space-read-outside": Fault(
        "vhost", "device.vhost_user.session", (("if not 0 < access.size <= len(space) - access.offset:", "if not 0 < access.size <= len(space):"),)
    ),
    "field-outside-its-table": Fault(
        "tosa", "tosa_graph.encoding",
        (("        if slots and (max(slots) >= table_bytes or any(0 < slot < 4 for slot in slots)):", "        if False:"),
         ("        if offset + width > table.vtable.table_bytes:", "        if False:"),
         ("            if offset and offset + width > vtable.table_bytes:", "            if False:")),
    ),
    "vector-end-not-checked": Fault(
        "tosa", "tosa_graph.encoding", (("        if length * width > self.size - position - 4:", "        if False:"),)
    ),
    "stride-of-zero": Fault(
        "tosa", "tosa_graph.infer_tensor",
        (('    require(min(values) >= 1, f"{name} must be at least 1")', '    require(min(values) >= 0, f"{name} must be at least 1")'),),
    ),
    "used-before-it-is-defined": Fault(
        "tosa", "tosa_graph.walk", (("            if name not in known:\n                raise TosaError(f\"{operand.name} {short(name)} is used before it is defined\")\n", ""),)
    ),
    "length-beyond-the-buffer-believed": Fault(
        "device", "virtqueue.driver", (("        if written > issued.writable_bytes:", "        if False:"),)
    ),
    "unissued-head-believed": Fault(
        "device", "virtqueue.driver", (("        self._issued[head] = None\n        self._free.extend", "        self._free.extend"),)
    ),
    "request-id-not-compared": Fault(
        "device", "guest_tools.client", (("        if request_id != request.request_id:", "        if False:"),)
    ),
    "slot-lost-by-a-broken-ring": Fault(
        "device", "guest_tools.transport.ring",
        (("        except BaseException as error:\n            self._free.append(slot)\n", "        except BaseException as error:\n"),),
    ),
}  # fmt: skip


def plant(fault: Fault, seconds: int = SECONDS) -> dict[str, object]:
    """Fuzz a process with the fault in it."""
    script = Path(__file__).parents[2] / "support" / "planted.py"
    run = subprocess.run(
        [sys.executable, "-W", "error", str(script), f"virtaccel.{fault.module}", fault.target, str(seconds)],
        input=json.dumps(fault.edits), capture_output=True, text=True, timeout=2 * seconds, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    outcome: dict[str, object] = json.loads(run.stdout)
    return outcome


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_found(name: str) -> None:
    outcome = plant(FAULTS[name])
    assert outcome["found"], f"not found in {SECONDS} s: {outcome}"
