"""What can go wrong on a ring, and on whose side. Knows names only and imports nothing.

    Exception
     +-- RingError           the driver's ring is wrong for the device: it is stopped
     +-- RegionError         the front end's memory cannot be what it says (a ValueError)
     +-- Backpressure        the driver has too few free descriptors just now
     +-- DeviceMisbehaved    the device's answers are wrong for the driver

`segments.Fault`, a range that nobody holds, belongs to the segments.
"""


class RingError(Exception):
    """The ring itself is wrong: size, address, or an available index that jumped. The ring is stopped."""


class RegionError(ValueError):
    """A region that cannot be, or regions that cannot be together."""


class Backpressure(Exception):
    """Too few free descriptors just now: nothing was published; collect something, then publish the same again."""


class DeviceMisbehaved(Exception):
    """The device returned what it was never given, or more than it was given. Only a reset helps."""
