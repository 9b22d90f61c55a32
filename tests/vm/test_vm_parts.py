"""The parts of `virtaccel vm` that need no guest: archives, arguments, and what is said where QEMU cannot be had."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from threading import Thread

import pytest
from click.testing import CliRunner

from virtaccel.cli.main import main
from virtaccel.vm import qemu
from virtaccel.vm.commands import Pairing, device_arguments, libvirt_fragment, memory_arguments
from virtaccel.vm.image import Archive, job_archive


def entries(data: bytes) -> dict[str, tuple[int, bytes]]:
    """Read a newc archive by the kernel's description of it: name -> (mode, content)."""
    found: dict[str, tuple[int, bytes]] = {}
    position = 0
    while True:
        assert data[position : position + 6] == b"070701"
        fields = [int(data[position + 6 + 8 * index : position + 14 + 8 * index], 16) for index in range(13)]
        size, name_size = fields[6], fields[11]
        start = position + 110
        name = data[start : start + name_size - 1].decode()
        body = -(-(start + name_size) // 4) * 4
        if name == "TRAILER!!!":
            return found
        found[name] = (fields[1], data[body : body + size])
        position = -(-(body + size) // 4) * 4


def test_archive_holds_files_links_and_their_folders() -> None:
    archive = Archive()
    archive.file("/usr/bin/x", b"abc", 0o755)
    archive.link("/bin/y", "../usr/bin/x")
    assert entries(archive.finish()) == {
        "usr": (0o040755, b""),
        "usr/bin": (0o040755, b""),
        "usr/bin/x": (0o100755, b"abc"),
        "bin": (0o040755, b""),
        "bin/y": (0o120777, b"../usr/bin/x"),
    }


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 100_001])
def test_files_of_any_length_keep_the_next_header_aligned(size: int) -> None:
    found = entries(job_archive({"/job/a": bytes(size), "/job/b": b"after"}))
    assert found["job/a"][1] == bytes(size)
    assert found["job/b"][1] == b"after"


def test_qemu_arguments_share_the_memory_and_name_the_socket() -> None:
    pairing = Pairing(Path("/run/a,b.sock"), memory_mib=256, virtio_id=40)
    assert "memory-backend-memfd,id=mem,size=256M,share=on" in memory_arguments(pairing)
    device = device_arguments(pairing)
    assert "socket,id=accel0,path=/run/a,,b.sock" in device
    assert "virtio-id=40" in device[-1]
    assert "config_size=16" in device[-1]


def test_libvirt_fragment_is_xml_with_the_same_arguments() -> None:
    pairing = Pairing(Path('/run/"quoted"&.sock'))
    domain = ElementTree.fromstring(libvirt_fragment(pairing))
    space = "{http://libvirt.org/schemas/domain/qemu/1.0}"
    assert [arg.get("value") for arg in domain.iter(f"{space}arg")] == device_arguments(pairing)
    access = domain.find("memoryBacking/access")
    assert access is not None
    assert access.get("mode") == "shared"


def test_vm_args_prints_both() -> None:
    done = CliRunner().invoke(main, ["vm", "args", "--socket", "/run/x.sock"])
    assert done.exit_code == 0, done.output
    for part in ("vhost-user-accel", "--socket-path /run/x.sock", "vhost-user-test-device-pci", "<qemu:commandline>"):
        assert part in done.output


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "virtaccel"


def test_no_debian_machine_is_a_clear_message(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(empty_cache))
    with pytest.raises(qemu.QemuUnavailable, match=r"no Debian-family machine.*apt-get"):
        qemu.obtain()


def test_a_mirror_that_does_not_answer_is_a_clear_message(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("apt-get") is None or not qemu.KEYRING.exists():
        pytest.skip("no apt on this machine, so there is no such failure")
    monkeypatch.setenv(qemu.MIRROR_VARIABLE, "http://127.0.0.1:9/debian")
    with pytest.raises(qemu.QemuUnavailable, match="apt-get"):
        qemu.obtain()
    assert not list(empty_cache.glob("sysroot-*")), "nothing half done stays behind"


def test_vm_run_without_qemu_ends_with_one_line_and_status_2(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    monkeypatch.setenv("PATH", str(empty_cache))
    done = CliRunner().invoke(main, ["vm", "run", str(root / "examples/digits/digits.tosa")])
    assert done.exit_code == 2
    assert "virtaccel: this is no Debian-family machine" in done.output
    assert "Traceback" not in done.output


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert qemu.cache_directory() == Path("/somewhere/virtaccel")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/invalid")
    assert qemu.cache_directory() == Path.home() / ".cache/virtaccel"


def test_a_file_that_is_no_model_is_refused_before_a_guest_boots(empty_cache: Path, tmp_path: Path) -> None:
    model = tmp_path / "junk.tosa"
    model.write_bytes(b"junk")
    done = CliRunner().invoke(main, ["vm", "run", str(model)])
    assert done.exit_code == 2
    assert "junk.tosa" in done.output
    assert "Traceback" not in done.output
    assert not empty_cache.exists()


def test_a_second_run_waits_for_the_first_one_s_download(empty_cache: Path) -> None:
    """The lock is held by another process, as two `vm run` at once would do it."""
    code = (
        "import sys, time; from virtaccel.vm.qemu import exclusive\n"
        "with exclusive('sysroot'):\n    print('held', flush=True); sys.stdin.read()"
    )
    said: list[str] = []
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        waiting = Thread(target=lambda: take_lock(said))
        waiting.start()
        limit = time.monotonic() + 30
        while not said and time.monotonic() < limit:
            time.sleep(0.01)
        assert said == ["waiting for another run to finish its download"]
        other.stdin.close()
        waiting.join(30)
    assert said[1:] == ["taken"]


def take_lock(said: list[str]) -> None:
    with qemu.exclusive("sysroot", said.append):
        said.append("taken")


@pytest.mark.parametrize(
    ("listed", "uri"),
    [
        (["http://m.example/debian/|bookworm|main|Debian"], "http://m.example/debian/"),
        (
            ["http://a/|nodistro|main|Node", "http://s/|bookworm-security|main|Debian", "http://d/|trixie|main|"],
            "http://d/",
        ),
        (["http://u.example/ubuntu/|noble|main|Ubuntu"], None),
        ([], None),
    ],
)
def test_the_mirror_is_the_machine_s_own(
    listed: list[str], uri: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for apt-get prints what apt would list: other machines' configurations cannot be had here."""
    stand_in = tmp_path / "apt-get"
    lines = "\n".join(f"echo '{line}'" for line in listed)
    stand_in.write_text(f'#!/bin/sh\n[ "$1" = indextargets ] || exit 9\n{lines}\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv(qemu.MIRROR_VARIABLE, raising=False)
    if uri is not None:
        assert qemu.mirror() == uri
    else:
        with pytest.raises(qemu.QemuUnavailable, match=qemu.MIRROR_VARIABLE):
            qemu.mirror()


def test_kvm_is_tried_only_where_it_can_be_opened(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qemu.os, "access", lambda *_: False)
    assert qemu.accelerator(qemu.Sysroot(empty_cache, ())) == "tcg"
    assert not empty_cache.exists()


def test_an_answer_about_kvm_holds_until_the_machine_reboots(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes = []
    monkeypatch.setattr(qemu.os, "access", lambda *_: True)
    monkeypatch.setattr(qemu, "_kvm_runs", lambda sysroot: probes.append(sysroot) or True)
    sysroot = qemu.Sysroot(empty_cache, ())
    assert [qemu.accelerator(sysroot) for _ in range(3)] == ["kvm"] * 3
    assert len(probes) == 1
    note = empty_cache / "accelerator.json"
    note.write_text(note.read_text().replace('"boot": "', '"boot": "x'))
    assert qemu.accelerator(sysroot) == "kvm"
    assert len(probes) == 2
