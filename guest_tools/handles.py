"""The IDs that a device gives for its objects, each kind a type of its own (specification.md, section 4.1).

A module by itself because subclasses of int cannot be compiled, which `client.py` can.
"""

class Context(int):
    """A context's ID, as the device gave it: opaque, nonzero, valid until destroyed or reset."""

    __slots__ = ()


class Buffer(int):
    """A buffer's ID."""

    __slots__ = ()


class Program(int):
    """A loaded program's ID."""

    __slots__ = ()


class Queue(int):
    """An execution queue's ID (not a virtqueue)."""

    __slots__ = ()


class Event(int):
    """The ID of the event that owns one submission."""

    __slots__ = ()
