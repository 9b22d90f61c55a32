"""Bounded reader of TOSA files (`tosa.fbs`) from untrusted bytes. Standard library only.

Knows which table holds what; how tables lie in the bytes, and whether they do, is for `encoding` to say, and whether
the graph means anything for `validate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from struct import unpack_from
from typing import Final, TypeAlias

from virtaccel.tosa_graph.encoding import I32, U32, U64, Reader, ReadLimits, Table, Vtable
from virtaccel.tosa_graph.graph import (
    AttributeValue,
    Block,
    DType,
    Graph,
    Op,
    Operator,
    Region,
    Shape,
    Tensor,
    TosaError,
    Version,
    packed_bytes,
)
from virtaccel.tosa_graph.schema import (
    ATTRIBUTES,
    DEFAULTS,
    FILE_IDENTIFIER,
    BlockSlot,
    CompatibilitySlot,
    GraphSlot,
    Kind,
    RegionSlot,
    ShapeSlot,
    TensorSlot,
    VersionSlot,
)

Bytes: TypeAlias = bytes | bytearray | memoryview

DEFAULT_LIMITS: Final = ReadLimits()

_u32 = U32.unpack_from
_u64 = U64.unpack_from
_OPS: Final = {int(op): op for op in Op}
_DTYPES: Final = {int(dtype): dtype for dtype in DType}
_VARIABLE_ACCESS: Final = frozenset({Op.VARIABLE_READ, Op.VARIABLE_WRITE})
_OPERATOR_WIDTHS: Final = (4, 1, 4, 4, 4)
_TENSOR_WIDTHS: Final = (4, 4, 4, 4, 1, 1, 4, 8, 8, 4, 4, 4, 8, 8)
"""Bytes of the fields read of the two tables there are most of, by slot (OperatorSlot, TensorSlot)."""
_SCALED: Final = slice(TensorSlot.SCALE_TYPE, TensorSlot.SCALE_SIZE + 1)
_ALIGNMENT: Final = 8  # constants may be padded with zeros to a multiple of this (force_align in the schema)


def read(data: Bytes, limits: ReadLimits = DEFAULT_LIMITS) -> Graph:
    """The graph in a file. Tensor data is copied out of it once; data that may change is copied as a whole before.

    Raises TosaError for anything that is not a well-formed file of TOSA 1.0, or of the 1.1 draft as far as it only uses
    what 1.0 has: later operators, element types and block scaling are refused, and so is data outside the file.
    """
    if len(data) > limits.max_file_bytes:
        raise TosaError(f"a file of more than {limits.max_file_bytes} bytes")
    reader = Reader(bytes(data), limits)
    if reader.size < 12 or reader.data[4:8] != FILE_IDENTIFIER:
        reader.fail("the file identifier is missing")
    root = reader.table(reader.follow(0))
    version = _version(reader, root)
    compatibility = reader.reference(root, GraphSlot.COMPATIBILITY)
    if compatibility and reader.scalar(reader.table(compatibility), CompatibilitySlot.FEATURES, U64, 0):
        raise TosaError("the file needs features of a later draft")
    regions = tuple(
        _region(reader, reader.table(position))
        for position in reader.tables(root, GraphSlot.REGIONS, limits.max_regions, "regions")
    )
    if not regions:
        raise TosaError("the file holds no region")
    if len({region.name for region in regions}) != len(regions):
        raise TosaError("two regions have the same name")
    return Graph(version, regions)


def _version(reader: Reader, root: Table) -> Version:
    position = reader.reference(root, GraphSlot.VERSION)
    if not position:
        reader.fail("the version is missing")
    table = reader.table(position)
    major, minor, patch = (
        reader.scalar(table, slot, I32, -1) for slot in (VersionSlot.MAJOR, VersionSlot.MINOR, VersionSlot.PATCH)
    )
    draft = reader.boolean(table, VersionSlot.DRAFT, True)
    # Files of final 1.0 carry the draft flag too: a writer that says nothing gets the schema's default, true.
    if (major, minor) != (1, 0) and (major, minor, patch, draft) != (1, 1, 0, True):
        raise TosaError(f"version {major}.{minor}.{patch}{' draft' if draft else ''} is neither 1.0 nor the 1.1 draft")
    return Version(major, minor, patch, draft)


def _region(reader: Reader, table: Table) -> Region:
    name = reader.string(table, RegionSlot.NAME)
    blocks = reader.tables(table, RegionSlot.BLOCKS, reader.limits.max_blocks, "blocks")
    if not blocks:
        raise TosaError(f"region {short(name)} has no block")
    return Region(name, tuple(_block(reader, reader.table(block)) for block in blocks))


def _block(reader: Reader, table: Table) -> Block:
    limits = reader.limits
    name = reader.string(table, BlockSlot.NAME)
    tensors: dict[str, Tensor] = {}
    for entry in reader.tables(table, BlockSlot.TENSORS, limits.max_tensors, "tensors"):
        tensor = _tensor(reader, entry)
        if tensor.name in tensors:
            raise TosaError(f"two tensors are called {short(tensor.name)}")
        tensors[tensor.name] = tensor
    shapes: dict[str, Shape] = {}
    for entry in reader.tables(table, BlockSlot.SHAPES, limits.max_shapes, "shapes"):
        shape = _shape(reader, reader.table(entry))
        if shape.name in shapes or shape.name in tensors:
            raise TosaError(f"two values are called {short(shape.name)}")
        shapes[shape.name] = shape
    operators = tuple(
        _operator(reader, entry)
        for entry in reader.tables(table, BlockSlot.OPERATORS, limits.max_operators, "operators")
    )
    inputs = reader.strings(table, BlockSlot.INPUTS, limits.max_block_operands)
    outputs = reader.strings(table, BlockSlot.OUTPUTS, limits.max_block_operands)
    for operand in (*inputs, *outputs):
        if operand not in tensors:
            raise TosaError(f"block {short(name)} lists {short(operand)}, which is no tensor of it")
    return Block(name, operators, tensors, shapes, inputs, outputs)


def _tensor(reader: Reader, position: int) -> Tensor:
    vtable = reader.layout(position)
    if vtable.fitting is not _TENSOR_WIDTHS:
        reader.fit(vtable, _TENSOR_WIDTHS)
    named, shaped, typed, filled, variable, unranked, variable_named, offset, size = vtable.slots[:9]
    data = reader.data
    name = reader.string_at(reader.follow(position + named)) if named else ""
    if not name:
        raise TosaError("a tensor has no name")
    if (offset and _u64(data, position + offset)[0]) or (size and _u64(data, position + size)[0]):
        raise TosaError(f"tensor {short(name)}: its data lie outside the FlatBuffer")
    if vtable.used > TensorSlot.SCALE_TYPE:
        _refuse_scaled(reader, position, vtable, name)
    number = _u32(data, position + typed)[0] if typed else 0
    dtype = _DTYPES.get(number)
    if not dtype:
        raise TosaError(f"tensor {short(name)}: element type {number} is unknown to TOSA 1.0")
    shape = reader.int32s_at(reader.follow(position + shaped), reader.limits.max_rank) if shaped else ()
    constant = None
    if filled:
        start, length = reader.vector(reader.follow(position + filled), 1)
        if length:
            constant = _constant(name, data, start, length, dtype, shape)
    return Tensor(
        name,
        shape,
        dtype,
        constant,
        bool(variable and data[position + variable]),
        bool(unranked and data[position + unranked]),
        reader.string_at(reader.follow(position + variable_named)) if variable_named else "",
    )


def _refuse_scaled(reader: Reader, position: int, vtable: Vtable, name: str) -> None:
    """Block scaling came after 1.0; its fields may be present with nothing in them."""
    data = reader.data
    scale_type, scale_data, block_shape, offset, size = vtable.slots[_SCALED]
    if (
        (scale_type and _u32(data, position + scale_type)[0])
        or (block_shape and _u32(data, position + block_shape)[0])
        or (offset and _u64(data, position + offset)[0])
        or (size and _u64(data, position + size)[0])
        or (scale_data and reader.vector(reader.follow(position + scale_data), 1)[1])
    ):
        raise TosaError(f"tensor {short(name)}: block scaling is unknown to TOSA 1.0")


def _constant(name: str, data: bytes, start: int, length: int, dtype: DType, shape: Sequence[int]) -> bytes:
    """A tensor's data without the padding; exactly what its shape needs."""
    if min(shape, default=0) < 0:
        raise TosaError(f"tensor {short(name)}: data for a shape that is not known")
    need = packed_bytes(dtype, prod(shape))
    if length != need:
        padded = -(-need // _ALIGNMENT) * _ALIGNMENT
        if length != padded or any(data[start + need : start + length]):
            raise TosaError(f"tensor {short(name)}: {length} bytes of data, its shape needs {need}")
    return data[start : start + need]


def _shape(reader: Reader, table: Table) -> Shape:
    name = reader.string(table, ShapeSlot.NAME)
    if not name:
        raise TosaError("a shape has no name")
    rank = reader.scalar(table, ShapeSlot.RANK, U32, 0)
    blob = reader.blob(table, ShapeSlot.DATA)
    if rank > 2 * reader.limits.max_rank:
        raise TosaError(f"shape {short(name)}: rank {rank}")
    if rank == 0:
        if blob and (len(blob) > _ALIGNMENT or any(blob)):
            raise TosaError(f"shape {short(name)}: data for rank 0")
        return Shape(name, 0, ())
    if not blob:
        return Shape(name, rank, None)
    if len(blob) != 8 * rank:
        raise TosaError(f"shape {short(name)}: {len(blob)} bytes of data for rank {rank}")
    return Shape(name, rank, unpack_from(f"<{rank}q", blob))


def _operator(reader: Reader, position: int) -> Operator:
    vtable = reader.layout(position)
    if vtable.fitting is not _OPERATOR_WIDTHS:
        reader.fit(vtable, _OPERATOR_WIDTHS)
    numbered, union_typed, attributed, reads, writes = vtable.slots[:5]
    data = reader.data
    number = _u32(data, position + numbered)[0] if numbered else 0
    op = _OPS.get(number)
    if op is None:
        raise TosaError(f"operator number {number} is unknown to TOSA 1.0")
    union_type = data[position + union_typed] if union_typed else 0
    if union_type != op:
        # Serialisers write variable accesses as IDENTITY, told apart by their attribute alone.
        access = _OPS.get(union_type)
        if op != Op.IDENTITY or access not in _VARIABLE_ACCESS:
            raise TosaError(f"{op.name} carries the attributes of operator number {union_type}")
        op = access
    if not attributed:
        raise TosaError(f"{op.name} carries no attributes")
    attribute_table = reader.table(reader.follow(position + attributed))
    attributes = {
        name: read_attribute(reader, attribute_table, slot) for name, read_attribute, slot in _ATTRIBUTE_FIELDS[op]
    }
    limit = reader.limits.max_operator_operands
    return Operator(
        op,
        attributes,
        reader.strings_at(reader.follow(position + reads), limit) if reads else (),
        reader.strings_at(reader.follow(position + writes), limit) if writes else (),
    )


def _bytes(reader: Reader, table: Table, slot: int) -> AttributeValue:
    blob = reader.blob(table, slot)
    return DEFAULTS[Kind.BYTES] if blob is None else blob


_ATTRIBUTE_READERS: Final[dict[Kind, Callable[[Reader, Table, int], AttributeValue]]] = {
    Kind.I32: lambda reader, table, slot: reader.scalar(table, slot, I32, 0),
    Kind.U32: lambda reader, table, slot: reader.scalar(table, slot, U32, 0),
    Kind.BOOL: lambda reader, table, slot: reader.boolean(table, slot),
    Kind.I32S: lambda reader, table, slot: reader.int32s(table, slot, 2 * reader.limits.max_rank),
    Kind.BYTES: _bytes,
    Kind.STRING: lambda reader, table, slot: reader.string(table, slot),
}


_ATTRIBUTE_FIELDS: Final = {
    op: tuple((field.name, _ATTRIBUTE_READERS[field.kind], slot) for slot, field in enumerate(fields))
    for op, fields in ATTRIBUTES.items()
}


def short(name: str) -> str:
    """A name as messages show it: quoted, control characters escaped, bounded."""
    return repr(name if len(name) <= 64 else name[:61] + "...")
