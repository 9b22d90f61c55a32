"""Ways to a full barrier. That it orders is the processor's promise; that it is the right instruction is ours."""

import ctypes
import platform

import pytest

from virtaccel.virtqueue import barrier


@pytest.mark.parametrize("source", barrier.SOURCES)
def test_every_way_works_or_declares_itself_absent(source: object) -> None:
    try:
        fence = source()  # type: ignore[operator]
    except barrier.NoBarrier:
        # libatomic need not be installed, and a lock is a barrier on x86-64 only; the instructions must be placeable.
        assert source is not barrier.from_instructions
        return
    for _ in range(1000):
        fence()


def test_instructions_are_those_of_the_manuals() -> None:
    # Intel SDM volume 2, MFENCE: NP 0F AE F0, RET: C3. Arm ARM, C6.2: DMB with CRm=1011 (ISH), RET with Rn=30.
    assert barrier.INSTRUCTIONS["x86_64"] == b"\x0f\xae\xf0\xc3"
    dmb, ret = 0xD50330BF | 0b1011 << 8, 0xD65F0000 | 30 << 5
    assert barrier.INSTRUCTIONS["aarch64"] == dmb.to_bytes(4, "little") + ret.to_bytes(4, "little")


def test_fence_exists_here_and_keeps_the_interpreter_lock() -> None:
    assert platform.machine() in barrier.INSTRUCTIONS, "this machine runs on a fallback: add its instruction"
    function = barrier.from_instructions()
    assert type(function).__bases__[0] is ctypes._CFuncPtr  # type: ignore[attr-defined]
    python_function = 4  # FUNCFLAG_PYTHONAPI: called without giving the lock away
    assert type(function)._flags_ & python_function  # type: ignore[attr-defined]
