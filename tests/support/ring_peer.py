"""The other side of a ring, in a process of its own: a second processor, not a second thread under one lock.

`serve FILE SIZE A U KICK CALL COUNT`: a device that sleeps whenever it may and echoes COUNT chains.
`hammer FILE SECONDS`: rewrites descriptors 0 and 1 without pause for at most so long, or until standard input closes.
"""

import mmap
import os
import select
import sys
import time

from rings import BASE, BYTES, DATA, NEXT, WRITE, RawRing

from virtaccel.virtqueue.chain import gather, scatter
from virtaccel.virtqueue.memory import GuestMemory, Region
from virtaccel.virtqueue.split import DeviceQueue


def serve(file: int, size: int, available: int, used: int, kick: int, call: int, count: int) -> int:
    memory = GuestMemory([Region(BASE, mmap.mmap(file, BYTES))])
    queue = DeviceQueue(memory, size, BASE, available, used, 256)
    done = 0
    while done < count:
        while chain := queue.pop():
            scatter(chain.writable, 0, gather(chain.readable, 0, 8))
            queue.push(chain, 8)
            done += 1
            if queue.should_notify():
                os.eventfd_write(call, 1)
        if queue.enable_kicks():
            continue
        if done < count and not select.select([kick], [], [], 10)[0]:
            return 3  # ten seconds without a kick: a wake-up was lost
        if done < count:
            os.eventfd_read(kick)
        queue.disable_kicks()
    return 0


def hammer(file: int, seconds: int) -> int:
    ring = RawRing(8, mmap.mmap(file, BYTES))
    until = time.monotonic() + seconds
    turn = 0
    while time.monotonic() < until and not select.select([0], [], [], 0)[0]:
        for _ in range(200):
            turn += 1
            address = (DATA, DATA + 64, 0, 2**64 - 8)[turn % 4]
            ring.descriptor(
                0, address, (24, 40, 0)[turn % 3], (NEXT, NEXT, NEXT, 0, NEXT | 4)[turn % 5], (1, 0, 7)[turn % 3]
            )
            ring.descriptor(1, DATA + 4096, (24, 2**32 - 1)[turn % 2], (WRITE, WRITE | NEXT, 0)[turn % 3], turn % 11)
    return 0


if __name__ == "__main__":
    role, *numbers = sys.argv[1:]
    sys.exit(serve(*map(int, numbers)) if role == "serve" else hammer(*map(int, numbers)))
