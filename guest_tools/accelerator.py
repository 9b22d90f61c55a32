"""The numpy API under the name that programs import: `from virtaccel.guest_tools import accelerator`."""

from virtaccel.guest_tools.arrays.accelerator import Accelerator, DeviceBuffer, open

__all__ = ["Accelerator", "DeviceBuffer", "open"]
