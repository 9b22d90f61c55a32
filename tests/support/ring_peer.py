"""The other side of a ring, in a process of its own: a second processor, not a second thread under one lock.

`serve FILE SIZE A U KICK CALL COUNT`: a device that sleeps whenever it may and echoes COUNT chains.
`hammer FILE SECONDS`: rewrites descriptors 0 and 1 without pause for at most so long, or until standard input closes.
"""

import itertools
import mmap
import os
import select
import struct
import sys
import time

from rings import BASE, BYTES, DATA, INDIRECT, NEXT, WRITE

from virtaccel.virtqueue.memory import GuestMemory, Region
from virtaccel.virtqueue.segments import gather, scatter
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
    table = memoryview(mmap.mmap(file, BYTES))
    rows = [
        struct.pack("<QIHH", address, length, flags, following)
        for address, length, flags, following in itertools.product(
            (DATA, DATA + 64, 0, 2**64 - 8), (24, 40, 0), (NEXT, 0, NEXT | INDIRECT), (1, 0, 7)
        )
    ]
    lasts = [
        struct.pack("<QIHH", DATA + 4096, length, flags, 0)
        for length, flags in itertools.product((24, 2**32 - 1), (WRITE, WRITE | NEXT, 0))
    ]
    sound = [struct.pack("<QIHH", DATA, length, NEXT, 1) for length in (24, 40)]
    until = time.monotonic() + seconds
    while time.monotonic() < until and not select.select([0], [], [], 0)[0]:
        # Mostly sound descriptors whose length alone changes, as fast as can be, so that a second look would differ.
        table[16:32] = lasts[0]
        for _ in range(20_000):
            table[0:16] = sound[0]
            table[0:16] = sound[1]
        for row, last in itertools.product(rows, lasts):
            table[0:16] = row
            table[16:32] = last
    return 0


if __name__ == "__main__":
    role, *numbers = sys.argv[1:]
    sys.exit(serve(*map(int, numbers)) if role == "serve" else hammer(*map(int, numbers)))
