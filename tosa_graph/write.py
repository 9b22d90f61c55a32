"""Author TOSA graphs as FlatBuffers files (`tosa.fbs`), for tests, examples and tools. Nothing here reads a file.

A single operator takes five lines:

    writer = GraphWriter()
    x = writer.input("x", (2, 3), DType.FP32)
    y = writer.operator(Op.ADD, [x, writer.constant(np.ones((2, 3), np.float32))], ((2, 3), DType.FP32))
    writer.output(y)
    data = writer.to_bytes()

What is written is what was asked for, right or wrong: broken graphs have to be authored too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, overload

import flatbuffers
import numpy as np
from numpy.typing import ArrayLike

from virtaccel.tosa_graph.elements import NATURAL, Array, pack
from virtaccel.tosa_graph.graph import AttributeValue, DType, Graph, Op
from virtaccel.tosa_graph.schema import (
    ATTRIBUTES,
    DEFAULTS,
    FILE_IDENTIFIER,
    BlockSlot,
    GraphSlot,
    Kind,
    NanMode,
    OperatorSlot,
    RegionSlot,
    ShapeSlot,
    TensorSlot,
    VersionSlot,
)

Attribute: TypeAlias = AttributeValue | Sequence[int] | np.generic
Spec: TypeAlias = tuple[Sequence[int], DType]
"""Shape and element type of an output."""


class _Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: DType
    data: bytes | None
    variable: str | None


class _Shape(NamedTuple):
    name: str
    rank: int
    data: bytes | None


class _Operator(NamedTuple):
    op: int
    attributes: Mapping[str, Attribute]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attribute_type: int


class RegionWriter:
    """One region with one basic block. Methods return the names of what they declare, to be used as operands."""

    def __init__(self, name: str, prefix: str = "") -> None:
        self.name = name
        self.block_name = name
        self._prefix = prefix
        self._tensors: list[_Tensor] = []
        self._shapes: list[_Shape] = []
        self._operators: list[_Operator] = []
        self._inputs: list[str] = []
        self._outputs: list[str] = []
        self._fresh = 0

    def _name(self, kind: str) -> str:
        self._fresh += 1
        return f"{self._prefix}{kind}{self._fresh}"

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        dtype: DType,
        data: bytes | None = None,
        variable: str | None = None,
    ) -> str:
        """Declare a tensor without any operator; `variable` is a variable's public name."""
        self._tensors.append(_Tensor(name, tuple(shape), dtype, data, variable))
        return name

    def shape_value(self, name: str, rank: int, data: bytes | None = None) -> str:
        """Declare an entry of the shapes table without any operator; `data` is eight bytes a dimension."""
        self._shapes.append(_Shape(name, rank, data))
        return name

    def input(self, name: str, shape: Sequence[int], dtype: DType) -> str:
        """Declare a tensor and list it as the block's next input."""
        self._inputs.append(self.tensor(name, shape, dtype))
        return name

    def inputs(self, *names: str) -> None:
        """List tensors or shapes declared elsewhere as the block's next inputs."""
        self._inputs.extend(names)

    def output(self, *names: str) -> None:
        """List tensors as the block's next outputs."""
        self._outputs.extend(names)

    def constant(
        self,
        array: ArrayLike,
        dtype: DType | None = None,
        name: str | None = None,
        data: bytes | None = None,
    ) -> str:
        """A CONST. The element type is numpy's own unless given; `data` overrides the packed bytes."""
        values: Array = np.asarray(array)
        if dtype is None:
            dtype = NATURAL[values.dtype.name]
        name = name or self._name("const")
        self.tensor(name, values.shape, dtype, pack(values, dtype) if data is None else data)
        self._operators.append(_Operator(Op.CONST, {}, (), (name,), Op.CONST))
        return name

    def const_shape(self, values: Sequence[int], name: str | None = None) -> str:
        """A CONST_SHAPE."""
        name = name or self._name("shape")
        self.shape_value(name, len(values), np.asarray(values, "<i8").tobytes())
        self._operators.append(_Operator(Op.CONST_SHAPE, {}, (), (name,), Op.CONST_SHAPE))
        return name

    def variable(self, array: ArrayLike, dtype: DType | None = None, name: str | None = None) -> str:
        """A variable tensor with its initial value; VARIABLE_READ takes its name as input, VARIABLE_WRITE as output."""
        values: Array = np.asarray(array)
        if dtype is None:
            dtype = NATURAL[values.dtype.name]
        name = name or self._name("variable")
        return self.tensor(name, values.shape, dtype, pack(values, dtype), variable=name)

    @overload
    def operator(
        self, op: Op, inputs: Sequence[str], outputs: Spec, attributes: Mapping[str, Attribute] | None = None
    ) -> str: ...
    @overload
    def operator(
        self, op: Op, inputs: Sequence[str], outputs: list[Spec], attributes: Mapping[str, Attribute] | None = None
    ) -> list[str]: ...
    def operator(
        self,
        op: Op,
        inputs: Sequence[str],
        outputs: Spec | list[Spec],
        attributes: Mapping[str, Attribute] | None = None,
    ) -> str | list[str]:
        """An operator with fresh output tensors of the given shapes and types. NaN mode is PROPAGATE unless given."""
        single = isinstance(outputs, tuple)
        specs: list[Spec] = [outputs] if isinstance(outputs, tuple) else outputs
        names = [self.tensor(self._name(op.name.lower()), shape, dtype) for shape, dtype in specs]
        self.place(op, inputs, names, attributes)
        return names[0] if single else names

    def place(
        self,
        op: int,
        inputs: Sequence[str],
        outputs: Sequence[str],
        attributes: Mapping[str, Attribute] | None = None,
        attribute_type: int | None = None,
    ) -> None:
        """An operator whose outputs are declared already. `attribute_type` is the union's type if it is to differ.

        Variable accesses are written as other serialisers write them, as IDENTITY with the access's own attributes.
        """
        union = op if attribute_type is None else attribute_type
        if attribute_type is None and op in (Op.VARIABLE_READ, Op.VARIABLE_WRITE):
            op = Op.IDENTITY
        self._operators.append(_Operator(op, attributes or {}, tuple(inputs), tuple(outputs), union))


class GraphWriter(RegionWriter):
    """A file: its own methods write the main region, `region` opens further ones for COND_IF and WHILE_LOOP."""

    def __init__(self, version: tuple[int, int, int] = (1, 0, 0), draft: bool = False) -> None:
        super().__init__("main")
        self.version = version
        self.draft = draft
        self._regions: list[RegionWriter] = [self]

    def region(self, name: str) -> RegionWriter:
        region = RegionWriter(name, prefix=f"{name}_")
        self._regions.append(region)
        return region

    def to_bytes(self) -> bytes:
        return _Encoder().graph(self._regions, self.version, self.draft)


def encode(graph: Graph) -> bytes:
    """A file that reads as `graph`, which must be valid: one block a region, no tensor without a rank."""
    version = graph.version
    writer = GraphWriter((version.major, version.minor, version.patch), version.draft)
    for position, region in enumerate(graph.regions):
        (block,) = region.blocks
        target = writer if position == 0 else writer.region(region.name)
        target.name, target.block_name = region.name, block.name
        for tensor in block.tensors.values():
            variable = tensor.variable_name if tensor.variable else None
            target.tensor(tensor.name, tensor.shape, tensor.dtype, tensor.data, variable)
        for shape in block.shapes.values():
            data = None if shape.values is None else np.asarray(shape.values, "<i8").tobytes()
            target.shape_value(shape.name, shape.rank, data)
        for operator in block.operators:
            target.place(operator.op, operator.inputs, operator.outputs, operator.attributes)
        target.inputs(*block.inputs)
        target.output(*block.outputs)
    return writer.to_bytes()


_ENUM_DEFAULTS: Final[dict[str, int]] = {"nan_mode": NanMode.PROPAGATE}


class _Encoder:
    """Children first, as FlatBuffers are built; every method returns the offset of what it wrote."""

    def __init__(self) -> None:
        self.builder: Any = flatbuffers.Builder(1024)

    def graph(self, regions: Sequence[RegionWriter], version: tuple[int, int, int], draft: bool) -> bytes:
        regions_offset = self.offsets([self.region(region) for region in regions])
        b = self.builder
        b.StartObject(len(VersionSlot))
        for slot, number in zip(VersionSlot, version, strict=False):
            b.PrependInt32Slot(slot, number, -1)
        b.PrependBoolSlot(VersionSlot.DRAFT, draft, True)
        version_offset = b.EndObject()
        root = self.table(len(GraphSlot), {GraphSlot.VERSION: version_offset, GraphSlot.REGIONS: regions_offset})
        b.Finish(root, file_identifier=FILE_IDENTIFIER)
        return bytes(b.Output())

    def table(self, slots: int, fields: Mapping[int, int]) -> int:
        """A table of offsets only; an offset of 0 is left out."""
        self.builder.StartObject(slots)
        for slot, offset in fields.items():
            self.builder.PrependUOffsetTRelativeSlot(slot, offset, 0)
        return int(self.builder.EndObject())

    def region(self, region: RegionWriter) -> int:
        operators = self.offsets([self.operator(operator) for operator in region._operators])
        tensors = self.offsets([self.tensor(tensor) for tensor in region._tensors])
        shapes = self.offsets([self.shape(shape) for shape in region._shapes])
        block = self.table(
            len(BlockSlot),
            {
                BlockSlot.NAME: self.builder.CreateString(region.block_name),
                BlockSlot.OPERATORS: operators,
                BlockSlot.TENSORS: tensors,
                BlockSlot.INPUTS: self.strings(region._inputs),
                BlockSlot.OUTPUTS: self.strings(region._outputs),
                BlockSlot.SHAPES: shapes,
            },
        )
        blocks = self.offsets([block])
        name = self.builder.CreateString(region.name)
        return self.table(len(RegionSlot), {RegionSlot.NAME: name, RegionSlot.BLOCKS: blocks})

    def offsets(self, offsets: Sequence[int]) -> int:
        self.builder.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            self.builder.PrependUOffsetTRelative(offset)
        return int(self.builder.EndVector())

    def strings(self, texts: Sequence[str]) -> int:
        return self.offsets([self.builder.CreateSharedString(text) for text in texts])

    def aligned(self, data: bytes) -> int:
        """Bytes that start at a multiple of 8 in the file, as the schema's force_align asks."""
        self.builder.Prep(8, len(data))
        return int(self.builder.CreateByteVector(data))

    def int32s(self, values: Sequence[int]) -> int:
        self.builder.StartVector(4, len(values), 4)
        for value in reversed(values):
            self.builder.PrependInt32(int(value))
        return int(self.builder.EndVector())

    def tensor(self, tensor: _Tensor) -> int:
        b = self.builder
        name = b.CreateSharedString(tensor.name)
        shape = self.int32s(tensor.shape)
        data = 0 if tensor.data is None else self.aligned(tensor.data)
        variable_name = b.CreateString(tensor.variable) if tensor.variable is not None else 0
        b.StartObject(TensorSlot.SIZE + 1)
        b.PrependUOffsetTRelativeSlot(TensorSlot.NAME, name, 0)
        b.PrependUOffsetTRelativeSlot(TensorSlot.SHAPE, shape, 0)
        b.PrependUint32Slot(TensorSlot.TYPE, int(tensor.dtype), 0)
        b.PrependUOffsetTRelativeSlot(TensorSlot.DATA, data, 0)
        b.PrependBoolSlot(TensorSlot.VARIABLE, tensor.variable is not None, False)
        b.PrependUOffsetTRelativeSlot(TensorSlot.VARIABLE_NAME, variable_name, 0)
        return int(b.EndObject())

    def shape(self, shape: _Shape) -> int:
        b = self.builder
        name = b.CreateSharedString(shape.name)
        data = 0 if shape.data is None else self.aligned(shape.data)
        b.StartObject(len(ShapeSlot))
        b.PrependUOffsetTRelativeSlot(ShapeSlot.NAME, name, 0)
        b.PrependUint32Slot(ShapeSlot.RANK, shape.rank, 0)
        b.PrependUOffsetTRelativeSlot(ShapeSlot.DATA, data, 0)
        return int(b.EndObject())

    def operator(self, operator: _Operator) -> int:
        attribute = self.attribute(operator.attribute_type, operator.attributes)
        inputs = self.strings(operator.inputs)
        outputs = self.strings(operator.outputs)
        b = self.builder
        b.StartObject(len(OperatorSlot))
        b.PrependUint32Slot(OperatorSlot.OP, int(operator.op), 0)
        b.PrependUint8Slot(OperatorSlot.ATTRIBUTE_TYPE, operator.attribute_type, 0)
        b.PrependUOffsetTRelativeSlot(OperatorSlot.ATTRIBUTE, attribute, 0)
        b.PrependUOffsetTRelativeSlot(OperatorSlot.INPUTS, inputs, 0)
        b.PrependUOffsetTRelativeSlot(OperatorSlot.OUTPUTS, outputs, 0)
        return int(b.EndObject())

    def attribute(self, op: int, given: Mapping[str, Attribute]) -> int:
        fields = ATTRIBUTES[Op(op)] if op in ATTRIBUTES else ()
        unknown = set(given) - {field.name for field in fields}
        if unknown:
            raise ValueError(f"operator {op} has no attribute {', '.join(sorted(unknown))}")
        values: list[Any] = [
            given.get(field.name, _ENUM_DEFAULTS.get(field.name, DEFAULTS[field.kind])) for field in fields
        ]
        stored = [self.child(field.kind, value) for field, value in zip(fields, values, strict=True)]
        b = self.builder
        b.StartObject(len(fields))
        for slot, (field, value, offset) in enumerate(zip(fields, values, stored, strict=True)):
            match field.kind:
                case Kind.I32:
                    b.PrependInt32Slot(slot, int(value), 0)
                case Kind.U32:
                    b.PrependUint32Slot(slot, int(value), 0)
                case Kind.BOOL:
                    b.PrependBoolSlot(slot, bool(value), False)
                case _:
                    b.PrependUOffsetTRelativeSlot(slot, offset, 0)
        return int(b.EndObject())

    def child(self, kind: Kind, value: Any) -> int:
        """Write what lies outside the table; 0 for scalars. A numpy scalar serves as bytes (CLAMP's bounds)."""
        match kind:
            case Kind.I32S:
                return self.int32s(value)
            case Kind.BYTES:
                return self.aligned(value.tobytes() if isinstance(value, np.generic) else bytes(value))
            case Kind.STRING:
                return int(self.builder.CreateString(value))
            case _:
                return 0
