"""The guest's initial file system: busybox, a bare python3, a few kernel modules, and what one run brings along.

Knows: the cpio "newc" format (Linux: Documentation/driver-api/early-userspace/buffer-format.rst) and where Debian
puts files. Does not know: QEMU's command line, the device, the protocol.

The kernel unpacks several archives written one after the other, so the base archive is built once and cached, and a
run only appends its own small one (guest program, model, inputs). Nothing is compressed: under emulation, inflating
costs more than it saves.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from virtaccel.vm.bundle import build_guest
from virtaccel.vm.qemu import Progress, QemuUnavailable, Sysroot, cache_directory, exclusive, silent

PYTHON = "python3.13"
GUEST_PROGRAM = "virtaccel-guest.pyz"
JOB = "/job"
MODULES = ("drivers/uio/uio.ko.xz", "drivers/uio/uio_pci_generic.ko.xz")
# Left out of the guest's Python: what neither the guest program nor a person at its shell is likely to import.
UNWANTED_LIBRARY = re.compile(
    r"^(test|idlelib|pydoc_data|tkinter|turtledemo|ensurepip|venv|sqlite3|dbm|wsgiref|xmlrpc|curses|_pyrepl|__pycache__)$"
    r"|^(asyncio|email|http|xml|html|unittest|multiprocessing|concurrent|lib2to3|zoneinfo|tomllib|sysconfig)$"
    r"|^(turtle|antigravity|this|doctest|pdb|pydoc|smtplib|imaplib|ftplib|mailbox|poplib|ssl|_pydecimal|pickletools)\.py$"
    r"|^_(test|xxtest|sqlite3|dbm|ssl|hashlib|curses|codecs_|multibyte|interp|decimal|asyncio)|^xx|^readline|^_sysconfig"
)
PREPARE_TIMEOUT_S = 120.0

INIT = f"""#!/bin/busybox sh
# First program of the guest: mount, load modules, then the guest program on the virtio port or a shell on the console.
/bin/busybox mount -t devtmpfs devtmpfs /dev
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
/bin/busybox mount -t tmpfs tmpfs /tmp
export PATH=/usr/bin:/bin HOME=/root PYTHONDONTWRITEBYTECODE=1 TERM=linux PYTHON_BASIC_REPL=1
for module in uio uio_pci_generic; do insmod /lib/modules/$module.ko.xz || echo "init: no module $module"; done
mode=shell
for word in $(cat /proc/cmdline); do case "$word" in virtaccel.mode=*) mode=${{word#*=}};; esac; done
if [ "$mode" = serve ]; then
    for entry in /sys/class/virtio-ports/*; do
        [ "$(cat $entry/name 2>/dev/null)" = virtaccel ] && port=/dev/${{entry##*/}}
    done
    python3 /{GUEST_PROGRAM} serve "$port"
    echo "init: the guest program ended with status $?"
else
    echo
    echo "python3 /{GUEST_PROGRAM} --help   drives the device; poweroff, or Ctrl-A X, ends the machine"
    cd /root
    setsid cttyhack sh
fi
poweroff -f
"""


# Run by the guest's own Python on the host: a copy of the zip with a .pyc beside each module, never checked against it.
COMPILE = """
import py_compile, sys, zipfile
from pathlib import Path
source, target = sys.argv[1:]
scratch = Path(target).parent
with zipfile.ZipFile(source) as plain, zipfile.ZipFile(target, "w") as out:
    for name in plain.namelist():
        data = plain.read(name)
        out.writestr(name, data)
        if name != "__main__.py":
            (scratch / "module.py").write_bytes(data)
            how = {"doraise": True, "invalidation_mode": py_compile.PycInvalidationMode.UNCHECKED_HASH}
            py_compile.compile(scratch / "module.py", scratch / "module.pyc", name, **how)
            out.writestr(name + "c", (scratch / "module.pyc").read_bytes())
"""


class Archive:
    """A cpio "newc" archive under construction. Paths are absolute in the guest; folders above a file are added by
    themselves."""

    def __init__(self) -> None:
        self._out = io.BytesIO()
        self._entries = 0
        self._folders: set[str] = set()

    def file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        self._parents(path)
        self._entry(path, stat.S_IFREG | mode, data)

    def link(self, path: str, target: str) -> None:
        """A symbolic link at `path`."""
        self._parents(path)
        self._entry(path, stat.S_IFLNK | 0o777, target.encode())

    def folder(self, path: str) -> None:
        if path in ("", "/") or path in self._folders:
            return
        self._parents(path)
        self._folders.add(path)
        self._entry(path, stat.S_IFDIR | 0o755, b"")

    def character_device(self, path: str, major: int, minor: int) -> None:
        self._parents(path)
        self._entry(path, stat.S_IFCHR | 0o600, b"", major, minor)

    def tree(self, source: Path, path: str) -> None:
        """A folder of the host with everything in it, links followed."""
        for entry in sorted(source.iterdir()):
            there = f"{path}/{entry.name}"
            if entry.is_dir():
                self.tree(entry, there)
            else:
                self.file(there, entry.read_bytes(), 0o755 if os.access(entry, os.X_OK) else 0o644)

    def finish(self) -> bytes:
        self._entry("TRAILER!!!", 0, b"")
        return self._out.getvalue()

    def _parents(self, path: str) -> None:
        above = path.rpartition("/")[0]
        if above:
            self.folder(above)

    def _entry(self, path: str, mode: int, data: bytes, major: int = 0, minor: int = 0) -> None:
        name = path.lstrip("/").encode() + b"\0"
        self._entries += 1
        fields = (self._entries, mode, 0, 0, 1, 0, len(data), 0, 0, major, minor, len(name), 0)
        self._out.write(b"070701" + b"".join(b"%08X" % field for field in fields) + name)
        self._pad()
        self._out.write(data)
        self._pad()

    def _pad(self) -> None:
        self._out.write(bytes(-self._out.tell() % 4))


def base_image(sysroot: Sysroot, progress: Progress = silent) -> Path:
    """The cached base archive for this sysroot; built in some seconds when missing."""
    recipe = hashlib.sha256("\n".join([*sysroot.packages, INIT, Path(__file__).read_text()]).encode()).hexdigest()[:16]
    target = cache_directory() / f"base-{recipe}.cpio"
    if target.exists():
        return target
    with exclusive("image", progress):
        if not target.exists():
            progress("building the guest's base image")
            for old in target.parent.glob("base-*.cpio"):
                old.unlink(missing_ok=True)
            part = target.with_suffix(".part")
            part.write_bytes(_build(sysroot))
            part.rename(target)
    return target


def guest_program(sysroot: Sysroot) -> bytes:
    """The one-file guest program with its modules compiled for the guest's Python beside their sources; cached.

    The same file without them runs as well, but importing it from source takes seconds under emulation.
    """
    plain = build_guest()
    name = hashlib.sha256("\n".join([*sysroot.packages, COMPILE]).encode() + plain).hexdigest()[:16]
    target = cache_directory() / f"guest-{name}.pyz"
    if not target.exists():
        with exclusive("image"), tempfile.TemporaryDirectory(prefix="virtaccel-guest-") as scratch:
            for old in target.parent.glob("guest-*.pyz"):
                old.unlink(missing_ok=True)
            source, compiled = Path(scratch) / "plain.pyz", Path(scratch) / "compiled.pyz"
            source.write_bytes(plain)
            _guest_python(sysroot, "-c", COMPILE, str(source), str(compiled))
            part = target.with_suffix(".part")
            part.write_bytes(compiled.read_bytes())
            part.rename(target)
    return target.read_bytes()


def job_archive(files: Mapping[str, bytes]) -> bytes:
    """An archive of one run's files: absolute path in the guest -> content."""
    archive = Archive()
    for path, data in files.items():
        archive.file(path, data)
    return archive.finish()


def _build(sysroot: Sysroot) -> bytes:
    archive = Archive()
    for folder in ("/dev", "/proc", "/sys", "/tmp", "/root", JOB):
        archive.folder(folder)
    archive.character_device("/dev/console", 5, 1)
    archive.file("/init", INIT.encode(), 0o755)
    _add_busybox(archive, sysroot)
    for module in MODULES:
        path = sysroot.modules / "kernel" / module
        if path.exists():
            archive.file(f"/lib/modules/{path.name}", path.read_bytes())
    with tempfile.TemporaryDirectory(prefix="virtaccel-image-") as scratch:
        _add_python(archive, sysroot, Path(scratch))
    return archive.finish()


def _add_busybox(archive: Archive, sysroot: Sysroot) -> None:
    busybox = sysroot.root / "usr/bin/busybox"
    archive.file("/bin/busybox", busybox.read_bytes(), 0o755)
    for applet in _output([str(busybox), "--list"]).split():
        if applet != "busybox":
            archive.link(f"/bin/{applet}", "busybox")


def _add_python(archive: Archive, sysroot: Sysroot, scratch: Path) -> None:
    """The interpreter, its library compiled ahead (compiling under emulation takes seconds), and the shared objects
    they need."""
    program = sysroot.root / "usr/bin" / PYTHON
    library = scratch / "usr/lib" / PYTHON

    def unwanted(folder: str, names: list[str]) -> Iterable[str]:
        return [name for name in names if UNWANTED_LIBRARY.search(name)]

    shutil.copytree(
        sysroot.root / "usr/lib" / PYTHON, library, symlinks=False, ignore=unwanted, ignore_dangling_symlinks=True
    )
    compile_all = [
        "-m",
        "compileall",
        "-q",
        "-b",
        "--invalidation-mode",
        "unchecked-hash",
        "-s",
        str(scratch),
        "-p",
        "/",
    ]
    _guest_python(sysroot, *compile_all, str(library))
    for source in library.rglob("*.py"):
        source.unlink()
    archive.tree(library, f"/usr/lib/{PYTHON}")
    archive.file(f"/usr/bin/{PYTHON}", program.read_bytes(), 0o755)
    archive.link("/usr/bin/python3", PYTHON)
    _add_shared_objects(archive, sysroot, [program, *library.glob("lib-dynload/*.so")])


def _add_shared_objects(archive: Archive, sysroot: Sysroot, programs: Iterable[Path]) -> None:
    loader = sysroot.libraries / "ld-linux-x86-64.so.2"
    archive.file("/lib64/ld-linux-x86-64.so.2", loader.read_bytes(), 0o755)
    needed: dict[str, Path] = {}
    for program in programs:
        listed = _output([str(loader), "--library-path", str(sysroot.libraries), "--list", str(program)])
        for name, path in re.findall(r"^\s*(\S+) => (\S+)", listed, re.MULTILINE):
            needed[name] = Path(path)
    for name, path in sorted(needed.items()):
        if not name.startswith("ld-linux"):
            archive.file(f"/usr/lib/x86_64-linux-gnu/{name}", path.read_bytes(), 0o755)
    archive.link("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu")


def _guest_python(sysroot: Sysroot, *arguments: str) -> str:
    """Run the guest's Python here."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment["PYTHONHOME"] = str(sysroot.root / "usr")
    return _output([*sysroot.program(f"usr/bin/{PYTHON}"), "-S", *arguments], environment)


def _output(command: list[str], environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PREPARE_TIMEOUT_S, env=environment
    )
    if done.returncode != 0:
        raise QemuUnavailable(
            f"{Path(command[-1]).name} could not be prepared for the guest: {done.stderr.strip()[-400:]}"
        )
    return done.stdout
