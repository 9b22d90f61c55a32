"""Small programs that a device may take, for suites that need one to run: bytes and what LOAD_PROGRAM says of them.

A protocol does not say which programs a device knows, so a suite tries these in turn, or one that the user brings.
Standard library only: this also runs inside a guest.
"""

from __future__ import annotations

from base64 import b64decode
from typing import Final, NamedTuple

TOSA_FORMAT: Final = 0x544F5341
REFERENCE_FORMAT: Final = 0x46455256
UNBOUNDED: Final = (1 << 64) - 1


class Sample(NamedTuple):
    """A program with one input at slot 0 and one output at slot 1, each of `bytes` bytes: the output is the input with
    `operand` XORed into every byte. `resident` is the promise that LOAD_PROGRAM makes, in bytes."""

    name: str
    format: int
    target: tuple[int, ...]
    artifact: bytes
    resident: int
    bytes: int
    operand: int


_IDENTITY: Final = (
    "CAAAAFRPU0HM////KAAAABAAAAAMABQAEAAMAAgABwAMAAAAAAAAAAAAAAAAAAAAAQAAAAEAAAAMAAAACAAMAAgABAAIAAAAFAAA"
    "AAQAAAAEAAAAbWFpbgAAAAABAAAAFAAAABAAHAAYABQAEAAMAAgABAAQAAAANAAAABQAAAAYAAAALAAAAHAAAAAUAAAAAQAAAJwA"
    "AAABAAAArAAAAAQAAABtYWluAAAAAAAAAAACAAAALAAAAAQAAADm////AwAAAAgAAABoAAAAAQAAABAAAAAAAAoAEAAMAAgABAAK"
    "AAAAAwAAAAgAAABcAAAAAQAAABAAAAABAAAAFAAAAAAADgAYABQAEwAMAAgABAAOAAAAFAAAACgAAAA4AAAAAAAAREQAAAABAAAA"
    "BAAAAAkAAABpZGVudGl0eTEAAAABAAAABAAAAAEAAAB4AAAABAAEAAQAAAA="
)

TOSA_IDENTITY: Final = Sample(
    "TOSA IDENTITY of 16 INT8",
    TOSA_FORMAT,
    (1414484801, 1, 1, 0, 0, 3, 1, 0, 0, 0, 0, 0),
    b64decode(_IDENTITY),
    UNBOUNDED,
    16,
    0,
)
REFERENCE_XOR: Final = Sample(
    "XOR of the reference backend", REFERENCE_FORMAT, (0,) * 12, b"VREF\x01\x5a\x01\x01\0\0\0\0", 64, 16, 0x5A
)
SAMPLES: Final = (TOSA_IDENTITY, REFERENCE_XOR)
