"""Waiting for the device: an INTx interrupt through uio_pci_generic, or sleep that grows while nothing comes.

Knows /dev/uioN (Linux: Documentation/driver-api/uio-howto.rst) and the ISR status register (virtio 1.3, section
4.1.4.5). Does not know the ring. vfio is not used: its type1 container needs an IOMMU before the function, which this
device's backend does not follow, and its no-IOMMU mode is not built into distribution kernels.
"""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

from virtaccel.device.pacing import ACROSS_A_RING
from virtaccel.guest_tools.pci.function import COMMAND_INTX_DISABLE, Function

# An interrupt that was lost must not cost more than a person would notice.
LONGEST_WAIT_S = 0.05


class Polling:
    """Sleep 20 us, then ever longer, up to 1 ms; also what every other way of waiting looks like."""

    uses_interrupts = False
    count = 0
    """Interrupts seen."""

    def __init__(self) -> None:
        self._sleep = ACROSS_A_RING.shortest

    def wait(self, limit: float) -> None:
        """At most `limit` seconds, less if the device has something to say; it may return for nothing."""
        time.sleep(min(self._sleep, limit))
        self._sleep = ACROSS_A_RING.longer(self._sleep)

    def restart(self) -> None:
        """Something came: the next wait is a first one."""
        self._sleep = ACROSS_A_RING.shortest

    def close(self) -> None:
        """Nothing is held."""


class UioInterrupt(Polling):
    """Blocks on /dev/uioN. The kernel masks INTx when it fires; reading ISR status lowers the line, then it is
    unmasked.

    A wait ends after 50 ms whatever happens, so that a lost interrupt costs time and nothing else.
    """

    uses_interrupts = True

    def __init__(self, node: Path, function: Function, isr: memoryview) -> None:
        super().__init__()
        self._function = function
        self._isr = isr
        self._fd = os.open(node, os.O_RDWR | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self.count = 0
        self._unmask()

    def wait(self, limit: float) -> None:
        if self._poll.poll(max(1, round(min(limit, LONGEST_WAIT_S) * 1000))):
            os.read(self._fd, 4)
            self.count += 1
            # Reading the register is what lowers the line (4.1.4.5): unmasked before, it would fire again at once.
            _ = self._isr[0]
            self._unmask()

    def close(self) -> None:
        self._function.set_command(COMMAND_INTX_DISABLE, 0)
        os.close(self._fd)

    def _unmask(self) -> None:
        self._function.set_command(0, COMMAND_INTX_DISABLE)
