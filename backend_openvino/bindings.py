"""What a guest binds to a program's slots: sizes, accesses, overlaps, shapes that sizes resolve, numbers within limits.

Knows slots and ranges of buffers; nothing of models beyond what guards say, and nothing of when something runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from virtaccel.backend_openvino.buffers import Buffer
from virtaccel.backend_openvino.lowering.ranges import FLOATS
from virtaccel.backend_openvino.requests import Call, Executable, Guard, Slot
from virtaccel.device.backend import BackendError, Binding
from virtaccel.device.wire import Access, Status
from virtaccel.tosa_graph.elements import pack
from virtaccel.tosa_graph.graph import DType, Tensor, packed_bytes

UNKNOWN = -1

_greatest = np.maximum.reduce


class Argument(NamedTuple):
    """A slot as the artifact declares it. `bytes` is -1 while a dimension is not known."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    bytes: int
    access: Access
    alignment: int
    """What an offset has to be a multiple of: the element's bytes."""


def argument_of(tensor: Tensor, access: Access) -> Argument:
    """The slot of a tensor, bound with this access."""
    known = UNKNOWN not in tensor.shape
    size = packed_bytes(tensor.dtype, math.prod(tensor.shape)) if known else -1
    return Argument(tensor.name, tensor.dtype, tensor.shape, size, access, packed_bytes(tensor.dtype, 1))


def buffer_of(binding: Binding) -> Buffer:
    """The buffer that a binding names."""
    if not isinstance(binding.buffer, Buffer):
        raise TypeError("a binding names something that is not a buffer of this backend")
    return binding.buffer


def arguments(
    wanted: Sequence[Argument], bindings: Sequence[Binding]
) -> tuple[list[Binding], set[Buffer], set[Buffer]]:
    """Bindings in the order of the slots `wanted`, and the buffers read and written. Raises BackendError if slots,
    access, alignment or overlaps do not fit the program."""
    if len(bindings) != len(wanted):
        raise BackendError(Status.INCOMPATIBLE, f"{len(bindings)} bindings for {len(wanted)} slots")
    by_slot = {binding.slot: binding for binding in bindings}
    if len(by_slot) != len(wanted) or max(by_slot) >= len(wanted):
        raise BackendError(Status.INCOMPATIBLE, f"slots {sorted(by_slot)} are not 0 to {len(wanted) - 1}")
    ordered = [by_slot[slot] for slot in range(len(wanted))]
    reads: set[Buffer] = set()
    writes: set[Buffer] = set()
    for binding, argument in zip(ordered, wanted, strict=True):
        if binding.access != argument.access:
            raise BackendError(Status.INVALID_ARGUMENT, f"slot {binding.slot} is bound with access {binding.access}")
        if binding.offset % argument.alignment:
            raise BackendError(Status.INCOMPATIBLE, f"slot {binding.slot}: offset {binding.offset} splits an element")
        (reads if binding.access == Access.READ else writes).add(buffer_of(binding))
    if len(reads) + len(writes) < len(ordered) or not reads.isdisjoint(writes):
        _refuse_overlap(ordered)
    return ordered, reads, writes


def _refuse_overlap(bindings: Sequence[Binding]) -> None:
    """One buffer may serve several slots, but what one slot writes no other may touch."""
    reach, written = 0, 0
    buffer: object = None
    for binding in sorted(bindings, key=lambda binding: (id(binding.buffer), binding.offset)):
        if binding.buffer is not buffer:
            buffer, reach, written = binding.buffer, 0, 0
        writes = binding.access != Access.READ
        if binding.offset < (reach if writes else written):
            raise BackendError(Status.INVALID_ARGUMENT, f"slot {binding.slot} overlaps another, and one is written")
        reach = max(reach, binding.offset + binding.bytes)
        if writes:
            written = max(written, binding.offset + binding.bytes)


def within(executable: Executable, call: Call) -> bool:
    """Whether every floating-point input holds only numbers no larger than the model was compiled for; an input that
    was found so is not looked through again before something may have changed it.

    Read as integers without the sign bit, IEEE numbers are ordered by magnitude, infinity and NaN above all. With it,
    the greatest unsigned integer is the negative number of the greatest magnitude, if there is a negative one, and the
    greatest signed integer is the greatest positive number: at most two looks, and no memory for numbers in between.
    """
    for guard in executable.guards:
        buffer, offset = call.ranges[guard.slot]
        if call.passed.get(guard) == buffer.changes and not buffer.arena.exposed:
            continue
        data = buffer.array[offset : offset + guard.bytes]
        greatest = int(_greatest(data.view(guard.unsigned)))
        if greatest > guard.largest and (
            greatest <= guard.magnitude
            or greatest & guard.magnitude > guard.largest
            or int(_greatest(data.view(guard.signed))) > guard.largest
        ):
            return False
        call.passed[guard] = buffer.changes
    return True


def guards_for(slots: Sequence[Slot], limit: float) -> list[Guard]:
    """What keeps each of a model's inputs, in order, within `limit`."""
    guards = []
    for index, slot in enumerate(slots):
        if slot.dtype in FLOATS:
            size = 4 if slot.dtype is DType.FP32 else 2
            unsigned, signed = np.dtype(f"<u{size}"), np.dtype(f"<i{size}")
            largest = int(np.frombuffer(pack(np.array([limit], np.float32), slot.dtype), unsigned)[0])
            guards.append(Guard(index, slot.bytes, unsigned, signed, (1 << (8 * size - 1)) - 1, largest))
    return guards


def resolved(argument: Argument, size: int) -> tuple[int, ...]:
    """The shape whose packed form takes `size` bytes: at most one dimension may be unknown."""
    if UNKNOWN not in argument.shape:
        return argument.shape
    if argument.shape.count(UNKNOWN) > 1:
        raise BackendError(Status.INCOMPATIBLE, f"more than one unknown dimension in {argument.shape}")
    known = math.prod(dimension for dimension in argument.shape if dimension != UNKNOWN)
    bits = packed_bytes(argument.dtype, 8 * known)  # bits for one step of the unknown dimension
    length = size * 8 // bits if bits else 0
    shape = tuple(length if dimension == UNKNOWN else dimension for dimension in argument.shape)
    if length < 1 or packed_bytes(argument.dtype, known * length) != size:
        raise BackendError(Status.INCOMPATIBLE, f"{size} bytes do not divide into shape {argument.shape}")
    return shape
