"""What to tell QEMU and libvirt so that a guest gets the device: text, nothing is started here.

Knows QEMU's generic vhost-user device (`vhost-user-test-device-pci`, QEMU 11.1) and the two things it needs: memory
that another process can map, and a socket where the daemon listens. docs/pairing.md explains each argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import quoteattr

CONFIG_BYTES = 16
PORT_NAME = "virtaccel"
# A guest that lives for seconds and runs our own program only: what costs time under emulation is left out.
QUICK_BOOT = "mitigations=off nokaslr cryptomgr.notests no_timer_check audit=0 nmi_watchdog=0 random.trust_cpu=on"


@dataclass(frozen=True)
class Pairing:
    """One device of one guest. `socket` is where the daemon listens; `memory_mib` is the guest's whole memory."""

    socket: Path
    memory_mib: int = 512
    virtio_id: int = 21
    queue_size: int = 256
    name: str = "accel0"


def memory_arguments(pairing: Pairing) -> list[str]:
    """Shared memory and the machine that uses it."""
    size = f"{pairing.memory_mib}M"
    return [
        *("-object", f"memory-backend-memfd,id=mem,size={size},share=on"),
        *("-m", size),
        *("-machine", "q35,memory-backend=mem"),
    ]


def device_arguments(pairing: Pairing) -> list[str]:
    """The character device that connects to the daemon, and the PCI function behind it."""
    return [
        *("-chardev", f"socket,id={pairing.name},path={_escaped(pairing.socket)}"),
        *(
            "-device",
            f"vhost-user-test-device-pci,chardev={pairing.name},virtio-id={pairing.virtio_id},num_vqs=1,"
            f"vq_size={pairing.queue_size},config_size={CONFIG_BYTES}",
        ),
    ]


def processor_arguments(accelerator: str) -> list[str]:
    """`accelerator` is kvm or tcg.

    Emulated, the guest has one processor: when Linux patches its own code while it boots, a second one, emulated by
    another host thread, can run into half a patch, and one boot in some dozens then ends in a panic.
    """
    if accelerator == "kvm":
        return ["-accel", "kvm", "-cpu", "host", "-smp", "2"]
    return ["-accel", "tcg", "-cpu", "max", "-smp", "1"]


def control_arguments(qmp: Path, port: Path) -> list[str]:
    """QMP on one socket, the guest program's port on another."""
    return [
        *("-qmp", f"unix:{_escaped(qmp)},server=on,wait=off"),
        *("-device", "virtio-serial-pci"),
        *("-chardev", f"socket,id=port,path={_escaped(port)},server=on,wait=off"),
        *("-device", f"virtserialport,chardev=port,name={PORT_NAME}"),
    ]


def kernel_arguments(kernel: Path, initrd: Path, words: str) -> list[str]:
    append = f"console=ttyS0 panic=-1 {QUICK_BOOT} {words}"
    return ["-kernel", str(kernel), "-initrd", str(initrd), "-append", append]


def libvirt_fragment(pairing: Pairing) -> str:
    """What to merge into a domain's XML. libvirt knows no such device, so its arguments go through the QEMU
    namespace."""
    arguments = "\n".join(f"    <qemu:arg value={quoteattr(word)}/>" for word in device_arguments(pairing))
    return (
        '<domain type="kvm" xmlns:qemu="http://libvirt.org/schemas/domain/qemu/1.0">\n'
        "  <memoryBacking>\n"
        '    <source type="memfd"/>\n'
        '    <access mode="shared"/>\n'
        "  </memoryBacking>\n"
        "  <qemu:commandline>\n"
        f"{arguments}\n"
        "  </qemu:commandline>\n"
        "</domain>"
    )


def _escaped(path: Path) -> str:
    """A path inside a QEMU option: a comma is doubled."""
    return str(path).replace(",", ",,")
