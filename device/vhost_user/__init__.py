"""The vhost-user side of the device: a virtual machine monitor connects, and its guest drives the engine.

message: bytes to messages and back. session: what each message means, without I/O. channel: the socket and the file
descriptors on it. mapping: guest memory from descriptors. guest: one front end's memory, ring and engine. server: the
loop. QEMU's "Vhost-user Protocol" (docs/interop/vhost-user.rst) is the standard cited throughout.
"""
