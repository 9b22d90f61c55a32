"""A whole pairing on one machine: daemon, QEMU, guest, and the host's end of the guest program.

commands   the QEMU arguments and the libvirt fragment (text only)
process    a child process: its log, its end
qmp        QEMU's control socket
machine    one running QEMU and the guest program inside it
session    daemon and machine together, as `virtaccel vm` and the tests use them
"""
