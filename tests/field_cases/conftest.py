"""Cases that people who build such devices have met in the field, each through the whole device on OpenVINO: frames,
ring, engine, backend. The name of a test begins with the case it shows. Where each case is:

    N1..N6, N11     floating point      field_cases/test_field_floats.py; each kind of operand: backend_openvino/
    N7..N10, N12    integers            field_cases/test_field_integers.py; exhaustively: backend_openvino/
    L1, L2, L3      work under way      vhost_user/test_vhost_lifecycle.py (sockets, signals, reboots);
                                        backend_openvino/test_backend.py (quarantine, guard pages, the process's end)
    L4, L5, L6      life cycle          field_cases/test_field_life_cycle.py; backend_openvino/test_backend.py
    R1..R7          rings               virtqueue/, contract/test_protocol_suite.py, vhost_user/test_vhost_rings.py
    V1..V5          sessions            vhost_user/test_vhost_session.py, test_vhost_connections.py
    H1, H2, H3      hostile programs    field_cases/test_field_hostile_programs.py; the reader alone: tosa_graph/;
                                        compilers that hang or eat memory: isolation/
    streams, sizes                      field_cases/test_field_streams.py
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from virtaccel.backend_openvino import open_backend
from virtaccel.guest_tools.arrays.accelerator import Accelerator
from virtaccel.guest_tools.session import Session
from virtaccel.guest_tools.transport.in_process import InProcessTransport


@pytest.fixture(scope="module")
def accelerator() -> Iterator[Accelerator]:
    """A device with OpenVINO's CPU behind it, in this process."""
    with Accelerator(Session(InProcessTransport(lambda: open_backend("CPU")))) as opened:
        yield opened
