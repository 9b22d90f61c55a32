"""Reading a site's operands and attributes: what an emitter may rely on, refused where it does not hold."""

from __future__ import annotations

from virtaccel.backend_openvino.lowering.registry import Array, Site, Value
from virtaccel.tosa_graph.elements import unpack
from virtaccel.tosa_graph.graph import DType, packed_bytes
from virtaccel.tosa_graph.schema import NanMode

FLOATS = (DType.FP32, DType.FP16, DType.BF16)
"""What arithmetic is for."""
FP8 = (DType.FP8E4M3, DType.FP8E5M2)
"""What is only moved, compared, multiplied and added up, and cast."""


def types(*dtypes: DType) -> frozenset[tuple[DType, ...]]:
    """Rows of one type each."""
    return frozenset((dtype,) for dtype in dtypes)


def operand(site: Site, index: int) -> Value:
    value = site.inputs[index] if index < len(site.inputs) else None
    if value is None:
        raise site.refuse(f"operand {index} is missing")
    return value


def known(site: Site, index: int, what: str) -> Array:
    """The array of an operand that has to be a constant."""
    constant = operand(site, index).constant
    if constant is None:
        raise site.refuse(f"{what} is not a constant")
    return constant


def known_integer(site: Site, index: int, what: str) -> int:
    """Value of an operand that has to be a constant of one integer element."""
    array = known(site, index, what)
    if array.size != 1 or array.dtype.kind not in "iu":
        raise site.refuse(f"{what} is not one integer")
    return int(array.reshape(-1)[0])


def axis_of(site: Site, rank: int) -> int:
    axis = site.attributes.get("axis")
    if not isinstance(axis, int) or not 0 <= axis < rank:
        raise site.refuse(f"axis {axis!r} is outside the operand's rank {rank}")
    return axis


def propagates_nan(site: Site) -> bool:
    mode = site.attributes.get("nan_mode")
    if mode not in (NanMode.PROPAGATE, NanMode.IGNORE):
        raise site.refuse("NaN mode is neither PROPAGATE nor IGNORE")
    return mode == NanMode.PROPAGATE


def scalar_attribute(site: Site, name: str, dtype: DType) -> float | int:
    """An attribute that holds the bytes of one value of `dtype`."""
    data = site.attributes.get(name)
    size = packed_bytes(dtype, 1)
    if not isinstance(data, bytes) or len(data) < size:
        raise site.refuse(f"{name} does not hold a value of {dtype.name}")
    value = unpack(data[:size], dtype, ())
    return int(value) if dtype in (DType.INT8, DType.INT16) else float(value)
