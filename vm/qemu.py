"""QEMU and a Linux guest kernel, fetched without root on a Debian-family machine.

Knows: apt, dpkg and a cache folder. Does not know: images, devices, the daemon.

Distribution releases of QEMU before 11.1 have no vhost-user device that a user may create for an arbitrary virtio ID,
so the one from Debian's `trixie-backports` is unpacked into a private folder and run through that folder's own
dynamic loader: it needs nothing from the machine's libraries, and nothing on the machine changes. Where the archives
come from is taken from the machine's own apt configuration; its signatures are checked by apt as always.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

Progress = Callable[[str], None]

RELEASE = "trixie"
BACKPORTS = f"{RELEASE}-backports"
PACKAGES = ("qemu-system-x86", "linux-image-cloud-amd64", "python3-minimal", "libpython3-stdlib", "busybox-static")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
MIRROR_VARIABLE = "VIRTACCEL_DEBIAN_MIRROR"
DEBIAN_SUITES = ("bookworm", "trixie", "forky", "sid", "stable", "testing", "unstable", "bullseye", "oldstable")

APT_TIMEOUT_S = 600.0
DPKG_TIMEOUT_S = 120.0
LOCK_TIMEOUT_S = 900.0
KVM_PROBE_S = 6.0
UNWANTED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/lintian", "var")


class QemuUnavailable(Exception):
    """QEMU and its kernel cannot be had on this machine; the text says why and what would help."""


def silent(message: str) -> None:
    """Progress that nobody reads."""


def cache_directory() -> Path:
    """Where downloads and images stay from run to run: `virtaccel` in the XDG cache directory."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "virtaccel"


@dataclass(frozen=True)
class Sysroot:
    """An unpacked QEMU, kernel, Python and busybox. `packages` is apt's own list of what was taken, with versions."""

    root: Path
    packages: tuple[str, ...]

    @property
    def libraries(self) -> Path:
        return self.root / "usr/lib/x86_64-linux-gnu"

    @property
    def modules(self) -> Path:
        """The one kernel's folder under /usr/lib/modules; its name is the kernel's release."""
        found = sorted((self.root / "usr/lib/modules").iterdir())
        if not found:
            raise QemuUnavailable(f"no kernel in {self.root}; remove that folder and try again")
        return found[-1]

    @property
    def kernel(self) -> Path:
        inside, beside = self.modules / "vmlinuz", self.root / "boot" / f"vmlinuz-{self.modules.name}"
        return inside if inside.exists() else beside

    def program(self, path: str) -> list[str]:
        """The command that runs a program of this folder with this folder's loader and libraries."""
        loader = self.libraries / "ld-linux-x86-64.so.2"
        return [str(loader), "--library-path", str(self.libraries), str(self.root / path)]

    def qemu(self) -> list[str]:
        share = self.root / "usr/share"
        return [*self.program("usr/bin/qemu-system-x86_64"), "-L", str(share / "qemu"), "-L", str(share / "seabios")]


def obtain(progress: Progress = silent) -> Sysroot:
    """The cached folder, or a fresh one: about 90 MB to download, some 10 seconds on a good line.

    Safe against concurrent runs (the second waits for the first). Raises `QemuUnavailable`.
    """
    target = cache_directory() / f"sysroot-{RELEASE}"
    found = _cached(target)
    if found is not None:
        return found
    with exclusive("sysroot", progress):
        found = _cached(target)
        if found is not None:
            return found
        _check_machine()
        work = target.with_name(f"{target.name}.part")
        shutil.rmtree(work, ignore_errors=True)
        try:
            packages = _fetch(work, progress)
            (work / "root" / "manifest.json").write_text(json.dumps({"packages": packages}))
            shutil.rmtree(target, ignore_errors=True)
            (work / "root").rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return Sysroot(target, tuple(packages))


def _cached(target: Path) -> Sysroot | None:
    try:
        manifest = json.loads((target / "manifest.json").read_text())
        return Sysroot(target, tuple(manifest["packages"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def exclusive(name: str, progress: Progress = silent) -> Iterator[None]:
    """Hold the cache's lock `name`, waiting up to 15 minutes for another run to finish its download."""
    directory = cache_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / f"{name}.lock", "w")  # noqa: SIM115 - closed below, whatever happens
    except OSError as error:
        raise QemuUnavailable(f"cannot use the cache folder {directory}: {error}") from error
    with lock:
        told = False
        limit = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > limit:
                    raise QemuUnavailable(f"another run has held {lock.name} for {LOCK_TIMEOUT_S:.0f} s") from None
                if not told:
                    progress("waiting for another run to finish its download")
                    told = True
                time.sleep(0.2)
        yield


def _check_machine() -> None:
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise QemuUnavailable(
            "QEMU is fetched for Linux on x86-64 only; see docs/pairing.md to start your own QEMU 11.1"
        )
    missing = [tool for tool in ("apt-get", "apt-config", "dpkg", "dpkg-deb") if shutil.which(tool) is None]
    if missing:
        raise QemuUnavailable(
            f"this is no Debian-family machine ({', '.join(missing)} not found), so QEMU cannot be fetched; "
            "see docs/pairing.md to start your own QEMU 11.1"
        )
    if not KEYRING.exists():
        raise QemuUnavailable(f"{KEYRING} is missing: install the package debian-archive-keyring")


def mirror() -> str:
    """The Debian mirror that this machine's apt uses, or the one named in VIRTACCEL_DEBIAN_MIRROR."""
    chosen = os.environ.get(MIRROR_VARIABLE)
    if chosen:
        return chosen
    listed = _run(["apt-get", "indextargets", "--format", "$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(ORIGIN)"], 30.0)
    for line in listed.splitlines():
        uri, release, component, origin = (line.split("|") + [""] * 4)[:4]
        if component == "main" and release in DEBIAN_SUITES and origin in ("Debian", "", "$(ORIGIN)"):
            return uri
    raise QemuUnavailable(
        "this machine's apt configuration names no Debian mirror; set "
        + MIRROR_VARIABLE
        + " to one that carries "
        + RELEASE
    )


def _fetch(work: Path, progress: Progress) -> list[str]:
    """Download with apt into `work`, unpack into `work/root`; returns the file names of the archives."""
    for folder in ("state/lists/partial", "cache/archives/partial", "root"):
        (work / folder).mkdir(parents=True)
    (work / "status").touch()
    source = mirror()
    (work / "sources.list").write_text(
        "".join(f"deb [arch=amd64 signed-by={KEYRING}] {source} {suite} main\n" for suite in (RELEASE, BACKPORTS))
    )
    options = [f"-o{key}={value}" for key, value in _apt_options(work).items()]
    progress(f"reading the package lists of {RELEASE} and {BACKPORTS}")
    _run(["apt-get", *options, "update"], APT_TIMEOUT_S)
    progress("downloading QEMU and a guest kernel (about 90 MB)")
    install = ["install", "--yes", "--download-only", "--no-install-recommends", "-t", BACKPORTS]
    _run(["apt-get", *options, *install, *PACKAGES], APT_TIMEOUT_S)
    archives = sorted((work / "cache/archives").glob("*.deb"))
    progress(f"unpacking {len(archives)} archives")
    for archive in archives:
        _run(["dpkg", "-x", str(archive), str(work / "root")], DPKG_TIMEOUT_S)
    for folder in UNWANTED:
        shutil.rmtree(work / "root" / folder, ignore_errors=True)
    return [archive.name for archive in archives]


def _apt_options(work: Path) -> dict[str, str]:
    """A world of its own: nothing is read from the machine's package state, nothing is written to it.

    The rest of the machine's apt configuration (proxies, certificates) stays in force.
    """
    return {
        "Dir::State": f"{work}/state",
        "Dir::State::status": f"{work}/status",
        "Dir::Cache": f"{work}/cache",
        "Dir::Log": f"{work}/state",
        "Dir::Etc::sourcelist": f"{work}/sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "APT::Architecture": "amd64",
        "APT::Architectures::": "amd64",
        "APT::Sandbox::User": "",
        "Acquire::Languages": "none",
        "Acquire::Retries": "2",
        "Debug::NoLocking": "true",
    }


def _run(command: list[str], timeout: float) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env={**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"},
        )
    except subprocess.TimeoutExpired as error:
        raise QemuUnavailable(f"{command[0]} took longer than {timeout:.0f} s") from error
    except OSError as error:
        raise QemuUnavailable(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-6:])
        raise QemuUnavailable(
            f"{' '.join(command[:1] + [c for c in command[1:] if c in ('update', 'install')])} failed:\n{tail}"
        )
    return done.stdout


def accelerator(sysroot: Sysroot, progress: Progress = silent) -> str:
    """`kvm` where a guest's first code really runs under it, `tcg` otherwise. Remembered until the machine reboots.

    A /dev/kvm that opens is no proof: some hosts accept the VM and then never execute it. So the kernel is started
    under KVM and has six seconds to print its first line.
    """
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "tcg"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    note = cache_directory() / "accelerator.json"
    try:
        known = json.loads(note.read_text())
        if known["boot"] == boot and known["accelerator"] in ("kvm", "tcg"):
            return str(known["accelerator"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    progress("probing KVM")
    chosen = "kvm" if _kvm_runs(sysroot) else "tcg"
    progress(f"the guest will run under {chosen.upper()}")
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps({"boot": boot, "accelerator": chosen}))
    return chosen


def _kvm_runs(sysroot: Sysroot) -> bool:
    command = [
        *sysroot.qemu(),
        *("-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35", "-accel", "kvm", "-m", "256"),
        *("-kernel", str(sysroot.kernel), "-append", "console=ttyS0 earlyprintk=ttyS0 panic=-1", "-no-reboot"),
        *("-serial", "stdio"),
    ]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    seen = b""
    limit = time.monotonic() + KVM_PROBE_S
    try:
        while time.monotonic() < limit and process.poll() is None:
            seen += process.stdout.read() or b""
            if b"Linux version" in seen:
                return True
            time.sleep(0.05)
        return b"Linux version" in seen
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
