"""A user-space driver for the PCI function inside a guest: `PciTransport`, for a kernel that has never heard of the
device.

    capabilities   config space bytes -> windows (sans-IO)
    function       sysfs: find, unbind, enable, map
    registers      the virtio common configuration, one access of the right width for each field
    dma            memory whose physical address cannot change under the device
    interrupt      uio_pci_generic, or polling that goes to sleep
    transport      the ring and the frames

Standard library only: this runs on a bare python3. It needs root, because mapping PCI resources, reading physical
addresses and locking memory do.
"""
