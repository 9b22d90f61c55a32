"""The protocol's cases through PCI: run by the guest program, inside a real guest, on a bare python3."""

from __future__ import annotations

import json

import pytest

from virtaccel.harness.conformance import outcome
from virtaccel.harness.conformance import protocol_suite as suite
from virtaccel.vm.session import VmSession

pytestmark = [pytest.mark.vm, pytest.mark.timeout(400)]


def test_protocol_cases_inside_a_guest(vm: VmSession) -> None:
    assert vm.machine is not None
    vm.machine.ask("close")
    status, text, _ = vm.machine.run_program(["conformance", "--json"], [], 240)
    content = json.loads(text.splitlines()[-1])
    bad = {case["name"]: case["detail"] for case in content["cases"] if case["outcome"] != outcome.PASSED}
    assert status == 0, bad
    assert set(bad) == {"VQ-020"}
    assert len(content["cases"]) == len(suite.CASES)
