"""virtaccel: a virtio-accel device in user space.

The import root. Each package below it is a link to a folder at the top of the repository (see
docs/architecture.md); always import `virtaccel.device`, never `device`.
"""

__version__ = "0.1.0"
