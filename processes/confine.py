"""What a process gives up before it touches anything of a guest's: limits, privileges, system calls (prctl(2),
setrlimit(2), seccomp(2)). All of it can be done by a plain user and none of it can be undone.

The filter is a list of what a compiler or an inference never needs: other processes, new programs, the network,
changing files, kernel interfaces. Memory, threads and descriptors that the process holds remain. It guards against code
that turned hostile and is not the only wall: the process also has nothing worth reaching, and ends with its parent.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import resource
import signal
import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_TIMERSLACK, _PR_SET_NO_NEW_PRIVS = 1, 4, 29, 38
_SET_MODE_FILTER, _TSYNC = 1, 1
_CLONE_THREAD, _TIOCSTI, _TIOCLINUX = 0x10000, 0x5412, 0x541C
_CHANGES_FILES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_X32 = 0x4000_0000

_libc = ctypes.CDLL(None, use_errno=True)


class Machine(NamedTuple):
    """What of the system call interface is the machine's own: audit value, numbers, and how to call seccomp(2)."""

    audit: int
    numbers: dict[str, int]


_SINCE_2019: Final = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_open": 434, "clone3": 435,
    "openat2": 437, "pidfd_getfd": 438, "fchmodat2": 452,
}  # fmt: skip
_X86_64: Final = {
    "open": 2, "ioctl": 16, "shmget": 29, "shmat": 30, "socket": 41, "connect": 42, "accept": 43, "bind": 49,
    "listen": 50, "clone": 56, "fork": 57, "vfork": 58, "execve": 59, "kill": 62, "semget": 64,
    "msgget": 68, "truncate": 76, "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85, "link": 86, "unlink": 87,
    "symlink": 88, "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94, "ptrace": 101, "mknod": 133,
    "personality": 135, "chroot": 161, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169,
    "init_module": 175, "delete_module": 176, "quotactl": 179, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190,
    "tkill": 200, "tgkill": 234, "mq_open": 240, "add_key": 248, "request_key": 249, "keyctl": 250, "openat": 257,
    "mkdirat": 258, "mknodat": 259, "fchownat": 260, "unlinkat": 263, "renameat": 264, "linkat": 265, "symlinkat": 266,
    "fchmodat": 268, "unshare": 272, "accept4": 288, "perf_event_open": 298, "name_to_handle_at": 303,
    "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
    "finit_module": 313, "renameat2": 316, "seccomp": 317, "bpf": 321, "execveat": 322, "userfaultfd": 323,
    **_SINCE_2019,
}  # fmt: skip
_AARCH64: Final = {
    "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "ioctl": 29, "mknodat": 33, "mkdirat": 34, "unlinkat": 35,
    "symlinkat": 36, "linkat": 37, "renameat": 38, "umount2": 39, "mount": 40, "truncate": 45, "chroot": 51,
    "fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55, "openat": 56, "quotactl": 60, "personality": 92,
    "unshare": 97, "init_module": 105, "delete_module": 106, "ptrace": 117, "kill": 129, "tkill": 130, "tgkill": 131,
    "reboot": 142, "mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194, "shmat": 196, "socket": 198,
    "bind": 200, "listen": 201, "accept": 202, "connect": 203, "add_key": 217, "request_key": 218,
    "keyctl": 219, "clone": 220, "execve": 221, "swapon": 224, "swapoff": 225, "perf_event_open": 241, "accept4": 242,
    "name_to_handle_at": 264, "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270,
    "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "renameat2": 276, "seccomp": 277, "bpf": 280,
    "execveat": 281, "userfaultfd": 282, **_SINCE_2019,
}  # fmt: skip
MACHINES: Final = {"x86_64": Machine(0xC000_003E, _X86_64), "aarch64": Machine(0xC000_00B7, _AARCH64)}

_LOOKED_AT: Final = ("open", "openat", "clone", "ioctl", "tgkill")
"""Calls that are refused for some arguments only."""
_PRETENDED_MISSING: Final = ("clone3", "openat2")
"""Their flags lie in memory, where no filter can look; callers fall back on the older call."""


def die_with_parent(parent: int) -> None:
    """Be killed when the parent (process `parent`, which this is called right after the fork by) ends, however."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def quick_sleeps() -> None:
    """Let short sleeps be short: the kernel may otherwise add 50 us to each."""
    _libc.prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)


def keep_only(descriptors: Iterable[int]) -> None:
    """Close every descriptor but the standard ones and these."""
    start = 3
    for descriptor in sorted(set(descriptors)):
        os.closerange(start, descriptor)
        start = max(descriptor + 1, 3)
    os.closerange(start, max(resource.getrlimit(resource.RLIMIT_NOFILE)[0], start))


def _lower(kind: int, value: int, grace: int = 0) -> None:
    hard, most = resource.getrlimit(kind)[1], value + grace
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(kind, (min(value, most), most))


def limit(*, memory: int = 0, cpu_seconds: int = 0, file_bytes: int | None = None, descriptors: int = 0) -> None:
    """Lower resource limits for good; 0 (None for `file_bytes`) leaves one as it is. Never a core file: it would hold
    a guest's bytes. `memory` bounds private writable memory in bytes; buffers that are shared do not count."""
    _lower(resource.RLIMIT_CORE, 0)
    if memory:
        _lower(resource.RLIMIT_DATA, memory)
    if cpu_seconds:
        _lower(resource.RLIMIT_CPU, cpu_seconds, 1)  # SIGXCPU, which tells why, a second before SIGKILL
    if file_bytes is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the interpreter ignores it
        _lower(resource.RLIMIT_FSIZE, file_bytes)
    if descriptors:
        _lower(resource.RLIMIT_NOFILE, descriptors)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_void_p))


# Instructions of classic BPF over struct seccomp_data: number 0, architecture 4, arguments from 16, 8 bytes each.
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ALLOW, _KILL = 0x7FFF_0000, 0x8000_0000


def _refuse(error: int) -> int:
    return 0x0005_0000 | error


def _op(code: int, value: int, when_true: int = 0, when_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, when_true, when_false, value)


def _argument(index: int) -> bytes:
    """Load the low half of an argument."""
    return _op(_LOAD, _ARGUMENTS + 8 * index)


def _when(number: int, *body: bytes) -> list[bytes]:
    """Run `body`, which returns, for one system call."""
    return [_op(_EQUAL, number, 0, len(body)), *body]


def program(machine: Machine, files: bool) -> list[bytes]:
    """The filter. `files`: files may still be opened for reading."""
    calls = machine.numbers
    denied, allowed = _op(_RETURN, _refuse(errno.EPERM)), _op(_RETURN, _ALLOW)
    code = [_op(_LOAD, _ARCHITECTURE), _op(_EQUAL, machine.audit, 1, 0), _op(_RETURN, _KILL), _op(_LOAD, _NUMBER)]
    code += [_op(_AT_LEAST, _X32, 0, 1), _op(_RETURN, _KILL)]
    for name, flags_at in (("open", 1), ("openat", 2)):
        if name in calls:
            look = (_argument(flags_at), _op(_ANY_BIT, _CHANGES_FILES, 0, 1), denied, allowed)
            code += _when(calls[name], *(look if files else (denied,)))
    code += _when(calls["clone"], _argument(0), _op(_ANY_BIT, _CLONE_THREAD, 1, 0), denied, allowed)
    code += _when(
        calls["ioctl"], _argument(1), _op(_EQUAL, _TIOCSTI, 1, 0), _op(_EQUAL, _TIOCLINUX, 0, 1), denied, allowed
    )
    code += _when(calls["tgkill"], _argument(0), _op(_EQUAL, os.getpid(), 1, 0), denied, allowed)  # abort(3) needs it
    for name in _PRETENDED_MISSING:
        code += _when(calls[name], _op(_RETURN, _refuse(errno.ENOSYS)))
    for name, number in calls.items():
        if name not in _LOOKED_AT and name not in _PRETENDED_MISSING:
            code += _when(number, denied)
    return [*code, allowed]


def filter_calls(*, files: bool) -> bool:
    """Refuse system calls that no inference needs, in all threads, for good; whether that is in force. `files`: files
    may still be opened for reading. A machine that this file does not know gets no filter, which is logged."""
    machine = MACHINES.get(platform.machine())
    if machine is None:
        log.warning("no system call filter for %s", platform.machine())
        return False
    return _install(program(machine, files), machine.numbers["seccomp"])


def _install(code: Sequence[bytes], seccomp: int) -> bool:
    joined = b"".join(code)
    memory = ctypes.create_string_buffer(joined, len(joined))
    described = _Filter(len(code), ctypes.addressof(memory))
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if _libc.syscall(ctypes.c_long(seccomp), _SET_MODE_FILTER, _TSYNC, ctypes.byref(described)):
        log.warning("no system call filter: %s", os.strerror(ctypes.get_errno()))
        return False
    return True
