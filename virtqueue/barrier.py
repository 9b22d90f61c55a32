"""A full memory barrier for rings shared with another processor, from the standard library alone.

Knows instruction sets, nothing of rings. What the two sides of a ring need from it (virtio 1.3, 2.7.7 and 2.7.13):

* x86-64 keeps loads in order with loads and stores with stores, so reading an index and then the entry, or writing an
  entry and then the index, needs no instruction. It does let a load overtake an earlier store to another address, and
  exactly that pair decides about notifications: "publish my index, then read the other side's flag" here, "write my
  flag, then read the other side's index" there. If both loads overtake both stores, each side believes the other is
  awake and the ring sleeps forever. Only a locked instruction or MFENCE forbids it.
* aarch64 may reorder all four pairs of plain accesses, so besides the place above a barrier stands between reading an
  index and the entries it covers, and between writing an entry and the index that publishes it (`WEAKLY_ORDERED`).
  DMB ISH is full over the inner shareable domain, which holds every processor that runs a host thread or a virtual
  CPU. A lock's acquire and release instructions would not do: they are one-way barriers. Architectures unknown to this
  file count as weakly ordered.

The interpreter itself reorders nothing: each access is a call behind a function pointer, in bytecode order.

Python has no fence, so one is called through ctypes, as a *Python* function pointer, which keeps the interpreter lock.
A call that gives the lock away (cffi's calls, ctypes.CDLL) costs the same alone, about 0.1 us, but with another thread
computing in Python it was measured at 54 us on average, since that thread takes its turn at every fence.
"""

import platform
from collections.abc import Callable
from typing import Final

STRONGLY_ORDERED_MACHINES: Final = ("x86_64", "AMD64")
MACHINE: Final = platform.machine()
WEAKLY_ORDERED: Final = MACHINE not in STRONGLY_ORDERED_MACHINES

# The whole function, per machine: the barrier and the return.
INSTRUCTIONS: Final = {
    "x86_64": bytes.fromhex("0faef0 c3"),  # mfence; ret
    "AMD64": bytes.fromhex("0faef0 c3"),
    "aarch64": bytes.fromhex("bf3b03d5 c0035fd6"),  # dmb ish; ret
}


class NoBarrier(ImportError):
    """This machine offers no way to a full barrier, so no ring may be shared with another processor."""


def from_instructions() -> Callable[[], object]:
    """The barrier as two instructions in a page of our own.

    The page is a memory file mapped readable and executable, never writable, so it asks for nothing that a system
    which forbids writable code refuses; and the kernel, not we, keeps instruction caches coherent. Raises NoBarrier
    where the machine is unknown or the system grants no executable mapping.
    """
    try:
        import ctypes
        import mmap
        import os

        code = INSTRUCTIONS[MACHINE]
        file = os.memfd_create("barrier", os.MFD_CLOEXEC)
        try:
            os.write(file, code)
            page = mmap.mmap(file, len(code), flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC)
        finally:
            os.close(file)
        address = _address_of(page)
    except (ImportError, AttributeError, KeyError, OSError) as error:
        raise NoBarrier(f"no barrier instruction can be placed on {MACHINE}: {error}") from error
    function = ctypes.PYFUNCTYPE(None)(address)
    _KEPT.append(page)
    return function


def from_libatomic() -> Callable[[], object]:
    """The barrier as C11's atomic_thread_fence(memory_order_seq_cst), which GCC's libatomic has as a function.

    Raises NoBarrier where that library is not installed.
    """
    try:
        import ctypes

        function = ctypes.PyDLL("libatomic.so.1").atomic_thread_fence
    except (ImportError, AttributeError, OSError) as error:
        raise NoBarrier(f"no libatomic: {error}") from error
    function.argtypes = (ctypes.c_int,)
    function.restype = None
    sequentially_consistent = ctypes.c_int(5)
    return lambda: function(sequentially_consistent)


def from_lock() -> Callable[[], object]:
    """The barrier as a lock of Python's own, taken and given back: for a guest whose Python has no ctypes.

    Right on x86-64 only, where taking it is a locked compare-and-exchange and every locked instruction is a full
    barrier. Raises NoBarrier elsewhere.
    """
    if WEAKLY_ORDERED:
        raise NoBarrier(f"a lock is no full barrier on {MACHINE}")
    from _thread import allocate_lock

    lock = allocate_lock()

    def barrier() -> None:
        lock.acquire(False)
        lock.release()

    return barrier


SOURCES: Final = (from_instructions, from_libatomic, from_lock)
_KEPT: list[object] = []


def _address_of(buffer: object) -> int:
    # ctypes' own from_buffer takes writable objects only, so the buffer protocol is asked directly.
    import ctypes

    class BufferView(ctypes.Structure):
        """Py_buffer, as far as its size and first field matter."""

        _fields_ = (("address", ctypes.c_void_p), ("rest", ctypes.c_byte * 256))

    view = BufferView()
    python = ctypes.pythonapi
    if python.PyObject_GetBuffer(ctypes.py_object(buffer), ctypes.byref(view), 0) != 0:
        raise OSError("no buffer")
    address = view.address
    python.PyBuffer_Release(ctypes.byref(view))
    return int(address or 0)


def _first() -> Callable[[], object]:
    reasons = []
    for source in SOURCES:
        try:
            return source()
        except NoBarrier as reason:
            reasons.append(str(reason))
    raise NoBarrier("; ".join(reasons))


# Full barrier: no access before the call is seen after one behind it, by any processor. About 0.1 us.
fence: Final[Callable[[], object]] = _first()
