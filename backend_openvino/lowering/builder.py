"""Walks a block of a TOSA graph and builds the OpenVINO model: operands, layouts, constants, inputs and outputs.

It knows nothing of single operators, whose rows are in the registry; only those that emit nothing live here: CONST,
CONST_SHAPE, IDENTITY and the VARIABLE operators. A variable is an input of the model and, if it is written, an output.
TOSA 1.0, sections 1.7 (tensors), 2.14 (data nodes) and 2.17 (variable operators).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial
from itertools import count

import numpy as np
import openvino as ov

from virtaccel.backend_openvino.lowering import layout as axes
from virtaccel.backend_openvino.lowering import nodes as ops
from virtaccel.backend_openvino.lowering.numbers import (
    ELEMENT_TYPES,
    FOLDS,
    constant_node,
    node_shape,
    packed_node,
)
from virtaccel.backend_openvino.lowering.registry import RECORDS, Array, Layout, Record, Refused, Site, Value
from virtaccel.tosa_graph.elements import CARRIER, unpack
from virtaccel.tosa_graph.graph import Block, DType, Graph, Op, Operator, Tensor, TosaError

BUILT_IN = frozenset({Op.CONST, Op.CONST_SHAPE, Op.IDENTITY, Op.VARIABLE, Op.VARIABLE_READ, Op.VARIABLE_WRITE})
"""Operators without a row."""

_BITS = {DType.FP16: DType.INT16, DType.BF16: DType.INT16, DType.FP32: DType.INT32}
"""As what constants go to outputs: the runtime quiets NaNs of FP16 and flushes subnormal constants of the others."""

_MOVES = frozenset({
    Op.CONCAT, Op.GATHER, Op.PAD, Op.RESHAPE, Op.REVERSE, Op.SCATTER, Op.SLICE, Op.TILE, Op.TRANSPOSE,
})  # fmt: skip
"""Operators that only move elements: folding cannot get them wrong, and what is folded may serve as weights."""
_NO_FOLDING = "DisableConstantFolding_0"

MAX_REGIONS = 1024
"""Blocks that one graph may unfold to, where regions are called from several places."""
MAX_STEPS = 1 << 17
"""Loop iterations of one run, weighted by the size of the loop's body; a run that needs more fails."""


def _key(output: ov.Output) -> tuple[str, int]:
    return output.get_node().get_name(), output.get_index()


def _leave_to_kernels(node: ov.Node) -> None:
    """Keep the runtime from folding a node made of constants, and those before it: what folds is other code than the
    kernels, which truncates where these round (to BF16) and treats NaN in its own way."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        info = node.get_rt_info()
        if node.get_type_name() == "Constant" or _NO_FOLDING in info:
            continue
        info[_NO_FOLDING] = ""
        waiting += [node.input_value(index).get_node() for index in range(node.get_input_size())]


class Builder:
    """Nodes of one block. Emitters get it as `site.builder`."""

    def __init__(self, graph: Graph, block: Block, bounded: Collection[str] = ()) -> None:
        """`bounded` names tensors known to hold finite numbers only."""
        self.graph = graph
        self.block = block
        self._bounded = frozenset(bounded)
        self._numbers: set[tuple[str, int]] = set()
        self._fixed: set[tuple[str, int]] = set()
        self.values: dict[str, Value] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.producers: dict[str, Operator] = {}
        self.readers: dict[str, int] = {}
        self.variables: dict[str, Value] = {}
        self.inside = False
        """Whether this is a region's block, in the body of an If or Loop node."""
        self.steps: ov.Output | None = None
        """INT32 [1], the loop iterations that are left, in a graph with loops."""
        self.regions = count(1)
        """How many regions have been emitted, this and nested ones together."""
        self._laid_out: dict[tuple[str, int, Layout], ov.Output] = {}
        readers, producers = self.readers, self.producers
        for operator in block.operators:
            for name in operator.inputs:
                readers[name] = readers.get(name, 0) + 1
            for name in operator.outputs:
                producers[name] = operator

    # ---- values

    def value(
        self,
        output: ov.Output | ov.Node,
        dtype: DType,
        shape: Sequence[int],
        layout: Layout | None = None,
    ) -> Value:
        """A tensor held by `output`, of TOSA shape `shape`, stored in `layout` (None: TOSA's order)."""
        held = output.output(0) if isinstance(output, ov.Node) else output
        return Value(held, dtype, tuple(shape), axes.identity(len(shape)) if layout is None else layout)

    def constant(self, array: Array, dtype: DType) -> Value:
        """A tensor known while lowering; `array` in TOSA's order, of the array type `unpack` gives for `dtype`."""
        made = partial(constant_node, array, dtype)
        return Value(None, dtype, array.shape, axes.identity(array.ndim), array, made)

    def tosa(self, value: Value) -> ov.Output:
        """The node that holds the value in TOSA's axis order."""
        return self.to_layout(value, axes.identity(len(value.shape)))

    def to_layout(self, value: Value, layout: Layout) -> ov.Output:
        """The node that holds the value in `layout`; a constant is laid out now, anything else once and remembered."""
        if value.layout == layout:
            return value.output
        if value.constant is not None:
            return self._constant_in_layout(value, value.constant, layout)
        key = (*_key(value.output), axes.permutation(value.layout, layout))
        known = self._laid_out.get(key)
        if known is None:
            known = self._laid_out[key] = self._move(value, layout)
        return known

    @staticmethod
    def _constant_in_layout(value: Value, array: Array, layout: Layout) -> ov.Output:
        if value.laid_out is None:
            value.laid_out = {}
        known = value.laid_out.get(layout)
        if known is None:
            known = value.laid_out[layout] = constant_node(np.transpose(array, layout), value.dtype)
        return known

    def _move(self, value: Value, layout: Layout) -> ov.Output:
        if axes.same_memory(value.shape, value.layout, layout):
            target = np.array(axes.stored(value.shape, layout), np.int64)
            return ops.reshape(value.output, target, special_zero=False).output(0)
        order = np.array(axes.permutation(value.layout, layout), np.int64)
        return ops.transpose(value.output, order).output(0)

    def align(self, *values: Value) -> tuple[list[ov.Output], Layout]:
        """All operands in one layout, for elementwise work on operands of equal rank (broadcast axes have size 1).

        The layout is the operands' own one that moves the fewest elements; constants and reshapes move nothing.
        """
        rank = len(values[0].shape)
        candidates: list[Layout] = []
        for value in values:
            if len(value.shape) != rank:
                raise TosaError("operands of one elementwise operator differ in rank")
            if value.constant is None and value.layout not in candidates:
                candidates.append(value.layout)
        layout = candidates[0] if candidates else axes.identity(rank)
        if len(candidates) > 1:
            layout = min(candidates, key=lambda candidate: sum(self._moved(value, candidate) for value in values))
        return [self.to_layout(value, layout) for value in values], layout

    @staticmethod
    def _moved(value: Value, layout: Layout) -> int:
        if value.constant is not None or axes.same_memory(value.shape, value.layout, layout):
            return 0
        return math.prod(value.shape)

    def may_be_nan(self, value: Value) -> bool:
        """Whether the value may hold a NaN or an infinity, so that an emitter has to care for them."""
        if value.constant is not None:
            return not np.isfinite(value.constant).all()
        return _key(value.output) not in self._numbers

    def _set(self, name: str, value: Value) -> None:
        self.values[name] = value
        if name in self._bounded and value.constant is None:
            self._numbers.add(_key(value.output))

    # ---- walking

    def operand(self, name: str) -> Value:
        try:
            return self.values[name]
        except KeyError:
            raise TosaError(f"tensor {name!r} is used before it is written") from None

    def run(self) -> None:
        """Emit every operator of the block; operands of inputs must be in `values` already."""
        for operator in self.block.operators:
            self.emit(operator)

    def emit(self, operator: Operator) -> None:
        """Emit one operator; its results are in `values` then. Raises Refused."""
        if operator.op not in BUILT_IN:
            self._emit_record(operator)
        elif operator.op is Op.CONST_SHAPE:
            self._const_shape(operator)
        elif operator.op is Op.CONST:
            tensor = self.block.tensors[operator.outputs[0]]
            if tensor.data is None:
                raise TosaError(f"CONST: tensor {tensor.name!r} has no data")
            self.values[tensor.name] = self._const(tensor, tensor.data)
        elif operator.op is Op.IDENTITY:
            self.values[operator.outputs[0]] = self.operand(operator.inputs[0])
        elif operator.op is Op.VARIABLE_READ:
            self.values[operator.outputs[0]] = self.variables[self._variable(operator.inputs[0])]
        elif operator.op is Op.VARIABLE_WRITE:
            self.variables[self._variable(operator.outputs[0])] = self.operand(operator.inputs[0])

    def _variable(self, name: str) -> str:
        return self.block.tensors[name].variable_name

    def nested(self, name: str) -> Builder:
        """For a block of the region called `name`; what its operators and results need is rounded as between operators.
        Raises Refused if regions call each other so often that their number explodes."""
        if next(self.regions) > MAX_REGIONS:
            raise Refused(f"control flow unfolds to more than {MAX_REGIONS} regions")
        block = next((region.blocks[0] for region in self.graph.regions if region.name == name), None)
        if block is None:
            raise TosaError(f"there is no region {name!r}")
        child = Builder(self.graph, block)
        child.regions = self.regions
        child.inside = True
        for output in block.outputs:
            child.readers[output] = child.readers.get(output, 0) + 1
        return child

    def _const(self, tensor: Tensor, data: bytes) -> Value:
        if tensor.dtype not in ELEMENT_TYPES:
            raise TosaError(f"CONST: tensor {tensor.name!r} has type {tensor.dtype.name}")
        try:
            array = unpack(data, tensor.dtype, tensor.shape)
        except ValueError as error:
            raise TosaError(f"CONST: tensor {tensor.name!r} has {error}") from None
        if tensor.dtype is DType.INT48:
            return self.constant(array, tensor.dtype)
        made = partial(packed_node, data, tensor.shape, tensor.dtype)
        return Value(None, tensor.dtype, tensor.shape, axes.identity(array.ndim), array, made)

    def _const_shape(self, operator: Operator) -> None:
        shape = self.block.shapes[operator.outputs[0]]
        if shape.values is None:
            raise TosaError(f"CONST_SHAPE: shape {shape.name!r} has no values")
        self.shapes[shape.name] = shape.values

    def site(self, operator: Operator) -> Site:
        """The operator with its operands resolved."""
        inputs: list[Value | None] = []
        shapes: dict[int, tuple[int, ...]] = {}
        for position, name in enumerate(operator.inputs):
            if name in self.block.shapes:
                if name not in self.shapes:
                    raise Refused(f"{operator.op.name}: shape operand {name!r} is not a constant")
                shapes[position] = self.shapes[name]
            else:
                inputs.append(self.operand(name) if name else None)
        outputs = [self.block.tensors[name] for name in operator.outputs]
        return Site(
            self, operator, tuple(inputs), shapes,
            tuple([tensor.shape for tensor in outputs]), tuple([tensor.dtype for tensor in outputs]),
        )  # fmt: skip

    def _emit_record(self, operator: Operator) -> None:
        record = RECORDS.get(operator.op)
        if record is None:
            raise Refused(f"{operator.op.name}: not run by this backend")
        if operator.op in FOLDS and self._fold(operator, record):
            return
        site = self.site(operator)
        if not record.admits(site):
            found = [value.dtype.name for value in site.inputs if value] + [d.name for d in site.out_dtypes]
            raise site.refuse(f"not run for the types {', '.join(found)}")
        results = record.emit(site)
        for name, value, shape in zip(operator.outputs, results, site.out_shapes, strict=True):
            if value.shape != shape:
                raise site.refuse(f"gives shape {value.shape} where {name!r} has {shape}")
            self._set(name, value)
        if operator.op not in _MOVES and self._all_fixed(site):
            for value in results:
                _leave_to_kernels(value.output.get_node())
                self._fixed.add(_key(value.output))

    def _fold(self, operator: Operator, record: Record) -> bool:
        """Make another constant of one that the operator moves or casts; False if that is not what it does."""
        source = self.values.get(operator.inputs[0])
        if source is None or source.constant is None or any(name not in self.shapes for name in operator.inputs[1:]):
            return False
        result = self.block.tensors[operator.outputs[0]]
        if not record.covers((source.dtype,), result.dtype):
            return False
        array = FOLDS[operator.op](operator, source.constant, source.dtype, result)
        if array is None or array.shape != result.shape:
            return False
        self.values[result.name] = self.constant(array, result.dtype)
        return True

    def _all_fixed(self, site: Site) -> bool:
        """Whether the operator works on nothing but constants and what was made of them."""
        for value in site.inputs:
            if value is None or value.constant is not None:
                continue
            if not self._fixed or _key(value.output) not in self._fixed:
                return False
        return True

    def stand_in(self, operator: Operator) -> None:
        """Go on after a refusal, as if the operator's results were inputs: only to learn of the other operators."""
        for name in operator.outputs:
            tensor = self.block.tensors[name]
            node = ops.parameter(node_shape(tensor.shape, tensor.dtype), ELEMENT_TYPES[tensor.dtype])
            self.values[name] = self.value(node, tensor.dtype, tensor.shape)

    # ---- inputs and outputs

    def parameters(self) -> list[ov.op.Parameter]:
        """One Parameter for each input, then for each variable, in order, in TOSA's type and axis order."""
        passed = self._only_passed()
        nodes: list[ov.op.Parameter] = []
        for name in (*self.block.inputs, *(tensor.name for tensor in self.graph.variables)):
            tensor = self.block.tensors[name]
            element = ov.Type.i16 if name in passed else ELEMENT_TYPES[tensor.dtype]
            node = ops.parameter(node_shape(tensor.shape, tensor.dtype), element, name=f"in{len(nodes)}")
            if tensor.variable:
                self.variables[tensor.variable_name] = self.value(node, tensor.dtype, tensor.shape)
            else:
                self._set(name, self.value(node, tensor.dtype, tensor.shape))
            nodes.append(node)
        if has_loops(self.graph):
            self.steps = ops.constant(np.array([MAX_STEPS], np.int32)).output(0)
        return nodes

    def _only_passed(self) -> set[str]:
        """FP16 inputs that go nowhere but to outputs: the runtime widens FP16 and quiets NaNs, so they go as INT16."""
        halves = {name for name in self.block.inputs if self.block.tensors[name].dtype is DType.FP16}
        used: set[str] = set()
        for operator in reversed(self.block.operators) if halves else ():
            if operator.op is not Op.IDENTITY or not used.isdisjoint(operator.outputs):
                used.update(operator.inputs)
        return halves - used

    def results(self) -> list[ov.op.Result]:
        """One Result for each output, then for each variable that is written, in TOSA's type and axis order; in a graph
        with loops one more for the iterations left, below which there is nothing to trust."""
        nodes: list[ov.op.Result] = []
        seen: set[tuple[str, int]] = set()
        values = [self.operand(name) for name in self.block.outputs]
        values += [self.variables[tensor.variable_name] for tensor in written_variables(self.graph)]
        for value in values:
            output = self.tosa(value)
            if value.constant is not None and value.dtype in _BITS:
                output = constant_node(_bits(value.constant, value.dtype), _BITS[value.dtype])
            key = _key(output)
            if output.get_node().get_type_name() in ("Parameter", "Constant", "Reshape") or key in seen:
                # A parameter or constant wired straight to a result is never written, one node wired to two results is
                # written once; a Convert to the same type copies bit for bit.
                output = ops.convert(output, output.get_element_type()).output(0)
            seen.add(key)
            nodes.append(ops.result(output, name=f"out{len(nodes)}"))
        if self.steps is not None:
            nodes.append(ops.result(ops.convert(self.steps, ov.Type.i32), name="steps"))
        return nodes


def _bits(constant: Array, dtype: DType) -> Array:
    """The codes of a constant as integers of their width."""
    if dtype is DType.BF16:  # held as FP32, of which it is the upper half
        return (constant.view(np.uint32) >> 16).astype(np.uint16).view(np.int16)
    return constant.view(CARRIER[_BITS[dtype]])


def written_variables(graph: Graph) -> tuple[Tensor, ...]:
    """Variables that some region writes, in order of declaration."""
    if not graph.variables:
        return ()
    names = {
        block.tensors[operator.outputs[0]].variable_name
        for region in graph.regions
        for block in region.blocks
        for operator in block.operators
        if operator.op is Op.VARIABLE_WRITE
    }
    return tuple(tensor for tensor in graph.variables if tensor.variable_name in names)


def has_loops(graph: Graph) -> bool:
    """Whether a model of this graph gives the iterations left as its last output."""
    if len(graph.regions) == 1:
        return False  # a loop needs regions of its own
    blocks = [block for region in graph.regions for block in region.blocks]
    return any(operator.op is Op.WHILE_LOOP for block in blocks for operator in block.operators)


def lower(graph: Graph, bounded: Collection[str] = ()) -> ov.Model:
    """The OpenVINO model of a validated graph of known shapes: Parameters for inputs and variables, Results for outputs
    and written variables, each in order, in TOSA axis order and element types. Tensors named in `bounded` are known to
    hold finite numbers only.

    Raises `Refused` with the operator's name if an operator is not run as TOSA defines it.
    """
    builder = Builder(graph, graph.main, bounded)
    parameters = builder.parameters()
    builder.run()
    return ov.Model(builder.results(), parameters, "tosa")
