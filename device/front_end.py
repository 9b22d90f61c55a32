"""What a front end says about guest memory and rings, in words that the protocol's side and the kernel's side share.

Imports nothing of ours: `vhost_user` decides what a message means and `loop` carries it out on descriptors, and neither
has to know the other for it.
"""

from __future__ import annotations

from typing import NamedTuple


class RequestRefused(Exception):
    """The front end's request is well formed and not granted; the text is for the log."""


class MemoryRegion(NamedTuple):
    """One piece of guest memory: `size` bytes from `offset` of its descriptor's file."""

    guest_address: int
    size: int
    user_address: int
    offset: int


class RingSetup(NamedTuple):
    """A split ring: number of descriptors, parts in front-end user addresses, next available index to read."""

    size: int
    descriptors: int
    available: int
    used: int
    base: int
