"""One pass over a graph in execution order: structure, types, shapes, levels and size of every operator.

Section 2.1 of TOSA 1.0 (operator graphs), which leans on the tables of `operators` and the rules of `infer`. The walk
computes the shape of every tensor from the shapes of the inputs; validation compares, specialisation keeps them. Work
is linear in the graph: every region is walked once. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final, NamedTuple, cast

from virtaccel.tosa_graph.flatbuffer import short
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
    packed_bytes,
)
from virtaccel.tosa_graph.infer import INFERENCE, nan_mode
from virtaccel.tosa_graph.node import UNKNOWN, Dims, Node, require, same, size
from virtaccel.tosa_graph.operators import FIXED_TYPES, SIGNATURES, Need, Operand, Signature
from virtaccel.tosa_graph.schema import RoundingMode
from virtaccel.tosa_graph.target import NO_PROFILE, Extension, Level, Target

_DTYPES: Final = {int(dtype): dtype for dtype in DType}
_ROUNDING: Final = {
    RoundingMode.DOUBLE_ROUND: Extension.DOUBLEROUND,
    RoundingMode.INEXACT_ROUND: Extension.INEXACTROUND,
}


@dataclass(frozen=True, slots=True)
class Budget:
    """What a graph may take once compiled: bytes of one tensor, bytes of all tensors, nesting of regions."""

    max_tensor_bytes: int = 1 << 29
    max_total_bytes: int = 1 << 31
    max_nesting: int = 32


DEFAULT_BUDGET: Final = Budget()


class Call(NamedTuple):
    """The shapes a region was walked with and what it gave."""

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]


@dataclass(slots=True)
class Scope:
    """What is known inside a block so far: the shape of every value defined, and which values are constant."""

    region: Region
    block: Block
    shapes: dict[str, Dims] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)
    resolved: dict[int, Dims] = field(default_factory=dict)
    """RESHAPE operators whose new shape had a -1, by position: the shape found."""


class Walk:
    """A graph under examination; after `run`, `scopes` holds what was found in each region reached, `needs` the
    alternatives of every operator's row of types."""

    def __init__(self, graph: Graph, target: Target, budget: Budget = DEFAULT_BUDGET) -> None:
        self.graph = graph
        self.target = target
        self.level: Level = target.level
        self.budget = budget
        self.regions: Mapping[str, Region] = {region.name: region for region in graph.regions}
        self.variables = {tensor.variable_name: tensor for tensor in graph.variables}
        self.scopes: dict[str, Scope] = {}
        self.needs: set[tuple[Need, ...]] = set()
        self._typed: set[tuple[Op, AttributeValue | None, tuple[DType, ...], tuple[DType, ...]]] = set()
        """Operators with their accumulator and their operands' and results' types, found good."""
        self.total = 0
        self.dynamic = False
        self._calls: dict[str, Call] = {}

    def run(self, input_shapes: Sequence[Dims]) -> None:
        """Walk everything reachable from the main region, its inputs having these shapes."""
        require(all(len(region.blocks) == 1 for region in self.graph.regions), "a region has more than one block")
        require(len(self.variables) == len(self.graph.variables), "two variables have the same name")
        self._nesting(self.graph.regions[0].name, 0, {}, set())
        self.dynamic = any(UNKNOWN in shape for shape in input_shapes)
        self.region(self.graph.regions[0], tuple(input_shapes))

    def _nesting(self, name: str, depth: int, heights: dict[str, int], open_regions: set[str]) -> int:
        """Levels of control flow below a region. Regions must exist, not call themselves, not nest too deep."""
        if name in heights:
            return heights[name]
        region = self.regions.get(name)
        if region is None:
            raise TosaError(f"region {short(name)} does not exist")
        require(name not in open_regions, f"region {short(name)} calls itself")
        limit = min(self.level.max_nesting, self.budget.max_nesting)
        require(depth <= limit, f"regions nest deeper than MAX_NESTING {limit}")
        open_regions.add(name)
        callees = [callee for operator in region.blocks[0].operators for callee in callees_of(operator)]
        height = max((1 + self._nesting(callee, depth + 1, heights, open_regions) for callee in callees), default=0)
        open_regions.remove(name)
        require(height + depth <= limit, f"regions nest deeper than MAX_NESTING {limit}")
        heights[name] = height
        return height

    def region(self, region: Region, input_shapes: tuple[Dims, ...]) -> tuple[Dims, ...]:
        """Walk a region once and return the shapes of its outputs."""
        call = self._calls.get(region.name)
        if call is not None:
            require(call.inputs == input_shapes, f"region {short(region.name)} is used with different shapes")
            return call.outputs
        block = region.blocks[0]
        scope = self.scopes[region.name] = Scope(region, block)
        self._parameters(scope, input_shapes)
        for index, operator in enumerate(block.operators):
            try:
                self._operator(scope, index, operator)
            except TosaError as error:
                raise TosaError(f"{self._where(scope, index, operator)}: {error}") from None
        for name in block.outputs:
            require(name in scope.shapes, f"output {short(name)} is never produced")
            require(not block.tensors[name].variable, f"output {short(name)} is a variable")
        outputs = tuple(scope.shapes[name] for name in block.outputs)
        self._calls[region.name] = Call(input_shapes, outputs)
        return outputs

    def _where(self, scope: Scope, index: int, operator: Operator) -> str:
        result = f" -> {short(operator.outputs[0])}" if operator.outputs else ""
        inside = "" if scope.region is self.graph.regions[0] else f" of region {short(scope.region.name)}"
        return f"operator {index}{inside}, {operator.op.name}{result}"

    def _parameters(self, scope: Scope, input_shapes: tuple[Dims, ...]) -> None:
        """Inputs and variables: what is defined before the first operator."""
        block = scope.block
        require(len(set(block.inputs)) == len(block.inputs), "an input is listed twice")
        require(
            len(input_shapes) == len(block.inputs),
            f"region {short(scope.region.name)} has {len(block.inputs)} inputs, {len(input_shapes)} are given",
        )
        for name, shape in zip(block.inputs, input_shapes, strict=True):
            tensor = block.tensors[name]
            try:
                require(not tensor.variable, "is a variable")
                # Writers leave a constant's data on the tensor that stands for it in another region: not a value there.
                require(tensor.data is None or scope.region is not self.graph.regions[0], "has data of its own")
                self._define(scope, tensor, shape)
            except TosaError as error:
                raise TosaError(f"input {short(name)}: {error}") from None
        for tensor in block.tensors.values():
            if tensor.variable:
                self._variable(scope, tensor)

    def _variable(self, scope: Scope, tensor: Tensor) -> None:
        known = self.variables.get(tensor.variable_name)
        fits = known is not None and (known.shape, known.dtype) == (tensor.shape, tensor.dtype)
        require(fits, f"variable {short(tensor.name)} is not one of the main region")
        require(UNKNOWN not in tensor.shape, f"variable {short(tensor.name)} has an unknown dimension")
        if scope.region is self.graph.regions[0]:
            self._define(scope, tensor, tensor.shape)
        else:
            scope.shapes[tensor.name] = tensor.shape

    def _define(self, scope: Scope, tensor: Tensor, shape: Dims) -> None:
        """A tensor comes into being with a shape, which has to fit the declared one, the level and the budget."""
        if tensor.name in scope.shapes:
            raise TosaError(f"{short(tensor.name)} is defined twice")
        if tensor.unranked:
            raise TosaError(f"{short(tensor.name)} has no rank")
        if tensor.dtype is DType.SHAPE:
            raise TosaError(f"{short(tensor.name)} is a tensor of shapes")
        if shape != tensor.shape:
            shape = merge(shape, tensor.shape)
        if len(shape) > self.level.max_rank:
            raise TosaError(f"rank {len(shape)} exceeds MAX_RANK {self.level.max_rank}")
        unknown = False
        for extent in shape:
            if extent < 1:
                if extent != UNKNOWN:
                    raise TosaError(f"shape {list(shape)} has an empty dimension")
                unknown = True
        if not unknown:
            self._account(packed_bytes(tensor.dtype, prod(shape)))
        elif not self.dynamic:
            raise TosaError(f"shape {list(shape)} is unknown though all inputs are known")
        scope.shapes[tensor.name] = shape

    def _account(self, count: int) -> None:
        if count >= 1 << self.level.max_log2_size:
            raise TosaError(f"a tensor of {count} bytes exceeds MAX_LOG2_SIZE {self.level.max_log2_size}")
        budget = self.budget
        if count > budget.max_tensor_bytes:
            raise TosaError(f"a tensor of {count} bytes exceeds {budget.max_tensor_bytes}")
        self.total += count
        if self.total > budget.max_total_bytes:
            raise TosaError(f"all tensors together exceed {budget.max_total_bytes} bytes")

    def _operator(self, scope: Scope, index: int, operator: Operator) -> None:
        op = operator.op
        signature = SIGNATURES[op]
        operands = self._arity(signature.operands, signature.repeats_operand, operator.inputs, "operands")
        results = self._arity(signature.results, signature.repeats_result, operator.outputs, "results")
        node = self._node(scope, operator, operands)
        self._types(node, signature, operands, results)
        _ranks(operands, node.shapes, self.level)
        if op is not Op.ARGMAX:
            _ranks(results, node.declared, self.level)
        if "nan_mode" in operator.attributes:
            nan_mode(node)
        inference = INFERENCE.get(op)
        shapes = inference(node) if inference is not None else _CONTROL[op](self, node)
        if op is Op.RESHAPE and node.values[1] is not None and UNKNOWN in node.values[1]:
            scope.resolved[index] = merge(shapes[0], node.declared[0])
        self._results(scope, operator, shapes)

    def _arity(
        self, pattern: tuple[Operand, ...], repeats: bool, names: Sequence[str], what: str
    ) -> tuple[Operand, ...]:
        """The pattern with its repeated operand as often as there are names for it."""
        if not repeats:
            if len(names) != len(pattern):
                raise TosaError(f"{len(names)} {what}, not {len(pattern)}")
            return pattern
        fixed = pattern[:-1]
        more = len(names) - len(fixed)
        if more < 0:
            raise TosaError(f"{len(names)} {what}, fewer than {len(fixed)}")
        limit = self.level.max_tensor_list_size
        if more > limit:
            raise TosaError(f"{more} tensors in a list exceed MAX_TENSOR_LIST_SIZE {limit}")
        return fixed + pattern[-1:] * more

    def _node(self, scope: Scope, operator: Operator, operands: Sequence[Operand]) -> Node:
        shapes: list[Dims] = []
        dtypes: list[DType] = []
        values: list[Dims | None] = []
        data: list[bytes | None] = []
        known, tensors = scope.shapes, scope.block.tensors
        reads = operator.op is Op.VARIABLE_READ
        for operand, name in zip(operands, operator.inputs, strict=True):
            if name not in known:
                raise TosaError(f"{operand.name} {short(name)} is used before it is defined")
            shapes.append(known[name])
            constant = name in scope.constants
            if operand.constant and not constant:
                self._need(Need(NO_PROFILE, Extension.DYNAMIC), f"{operand.name} is not a compile time constant")
            if operand.type == "shape_t":
                value = scope.block.shapes.get(name)
                require(value is not None, f"{operand.name} {short(name)} is not a shape")
                dtypes.append(DType.SHAPE)
                values.append(cast(Shape, value).values)
                data.append(None)
                continue
            tensor = tensors.get(name)
            if tensor is None:
                raise TosaError(f"{operand.name} {short(name)} is a shape")
            if tensor.variable != reads:
                raise TosaError(f"{operand.name} {short(name)} {'is a' if tensor.variable else 'is no'} variable")
            dtypes.append(tensor.dtype)
            values.append(None)
            data.append(tensor.data if constant else None)
        declared, result_dtypes = self._declared(scope, operator)
        return Node(
            operator.op,
            operator.attributes,
            tuple(shapes),
            tuple(dtypes),
            tuple(values),
            tuple(data),
            declared,
            result_dtypes,
            self.level,
        )

    def _declared(self, scope: Scope, operator: Operator) -> tuple[tuple[Dims, ...], tuple[DType, ...]]:
        shapes: list[Dims] = []
        dtypes: list[DType] = []
        for name in operator.outputs:
            tensor = scope.block.tensors.get(name)
            if tensor is not None:
                if tensor.unranked:
                    raise TosaError(f"{short(name)} has no rank")
                shapes.append(tensor.shape)
                dtypes.append(tensor.dtype)
                continue
            shape = scope.block.shapes.get(name)
            if shape is not None:
                shapes.append((shape.rank,))
                dtypes.append(DType.SHAPE)
            else:
                raise TosaError(f"result {short(name)} is neither a tensor nor a shape")
        return tuple(shapes), tuple(dtypes)

    def _types(self, node: Node, signature: Signature, operands: Sequence[Operand], results: Sequence[Operand]) -> None:
        """Types the operator has, and the target has them."""
        accumulator = node.attributes.get("acc_type")
        found = (node.op, accumulator, node.dtypes, node.result_dtypes)
        if found not in self._typed:
            self._row(node, signature, operands, results)
            self._typed.add(found)
        if node.op is Op.RESCALE:
            extension = _ROUNDING.get(RoundingMode(min(node.number("rounding_mode"), max(RoundingMode))))
            if extension is not None:
                self._need(Need(NO_PROFILE, extension), "the rounding mode")

    def _row(self, node: Node, signature: Signature, operands: Sequence[Operand], results: Sequence[Operand]) -> None:
        """Bind the type variables and look the row up; then see that the target has it."""
        bound: dict[str, DType] = {}
        if "acc_t" in signature.variables:
            bound["acc_t"] = _DTYPES.get(node.number("acc_type"), DType.UNKNOWN)
        for operand, dtype in zip((*operands, *results), node.dtypes + node.result_dtypes, strict=True):
            if operand.type == "any":
                require(dtype != DType.SHAPE, f"{operand.name} is a shape")
                continue
            if operand.type == "shape_t":
                require(dtype == DType.SHAPE, f"{operand.name} is not a shape")
                continue
            wanted = FIXED_TYPES.get(operand.type) or bound.setdefault(operand.type, dtype)
            require(dtype == wanted, f"{operand.name} must be {wanted.name}, not {dtype.name}")
        if signature.variables and not set(signature.variables) <= set(bound):
            return  # a VARIABLE without a tensor: nothing to look up
        key = tuple(bound[variable] for variable in signature.variables)
        needs = signature.rows.get(key)
        if needs is None:
            raise TosaError(f"types {', '.join(dtype.name for dtype in key)} are not supported")
        self._need_any(needs, f"types {', '.join(dtype.name for dtype in key)}" if key else "the operator")

    def _need(self, need: Need, what: str) -> None:
        self._need_any((need,), what)

    def _need_any(self, needs: tuple[Need, ...], what: str) -> None:
        self.needs.add(needs)
        if not any(self.target.covers(need.profiles, need.extensions) for need in needs):
            raise TosaError(f"{what}: needs {' or '.join(map(_text, needs))}, outside the target")

    def _results(self, scope: Scope, operator: Operator, shapes: Sequence[Dims]) -> None:
        op = operator.op
        for name, shape in zip(operator.outputs, shapes, strict=True):
            tensor = scope.block.tensors.get(name)
            if tensor is None:
                self._shape_result(scope, scope.block.shapes[name])
            elif op is Op.VARIABLE or op is Op.VARIABLE_WRITE:
                require(tensor.variable, f"{short(name)} is no variable")
                merge(shape, tensor.shape)
            else:
                if tensor.variable:
                    raise TosaError(f"{short(name)} is a variable")
                if op is Op.CONST:
                    if tensor.data is None:
                        raise TosaError("the constant has no data")
                    scope.constants.add(name)
                elif tensor.data is not None:
                    raise TosaError(f"{short(name)} has data though it is computed")
                self._define(scope, tensor, shape)

    def _shape_result(self, scope: Scope, shape: Shape) -> None:
        """CONST_SHAPE."""
        if shape.name in scope.shapes:
            raise TosaError(f"{short(shape.name)} is defined twice")
        values = shape.values
        if values is None or len(values) != shape.rank:
            raise TosaError("the constant has no data")
        longest = self.level.max_shape_len
        if shape.rank > longest:
            raise TosaError(f"a shape of rank {shape.rank} exceeds MAX_SHAPE_LEN {longest}")
        bound = 1 << self.level.max_log2_size
        require(all(-bound <= value < bound for value in values), f"a dimension exceeds {bound}")
        scope.shapes[shape.name] = (shape.rank,)
        scope.constants.add(shape.name)

    def callee(self, node: Node, attribute: str, inputs: Sequence[int]) -> tuple[Region, tuple[Dims, ...]]:
        """A region that control flow names, walked with the operands at these positions."""
        region = self.regions[cast(str, node.attributes[attribute])]
        block = region.blocks[0]
        kinds = tuple(block.tensors[name].dtype for name in block.inputs)
        given = tuple(node.dtypes[operand] for operand in inputs)
        require(kinds == given, f"the inputs of {attribute} are {_names(kinds)}, not {_names(given)}")
        shapes = tuple(node.shapes[operand] for operand in inputs)
        for shape, name in zip(shapes, block.inputs, strict=True):
            merge(shape, block.tensors[name].shape, f"{attribute} input {short(name)}")
        return region, self.region(region, shapes)


def _cond_if(walk: Walk, node: Node) -> tuple[Dims, ...]:
    require(size(node.shapes[0]) in (1, UNKNOWN), "the condition must be one element")
    results = [_branch(walk, node, attribute) for attribute in ("then_graph", "else_graph")]
    return tuple(merge(one, other, "the branches' results") for one, other in zip(*results, strict=True))


def _branch(walk: Walk, node: Node, attribute: str) -> tuple[Dims, ...]:
    region, outputs = walk.callee(node, attribute, range(1, len(node.shapes)))
    _outputs_fit(node, region, outputs, attribute)
    return outputs


def _outputs_fit(node: Node, region: Region, outputs: Sequence[Dims], attribute: str) -> None:
    """A region's outputs are the operator's results, in number, type and shape."""
    block = region.blocks[0]
    kinds = tuple(block.tensors[name].dtype for name in block.outputs)
    require(
        kinds == node.result_dtypes,
        f"the outputs of {attribute} are {_names(kinds)}, not {_names(node.result_dtypes)}",
    )
    for shape, declared in zip(outputs, node.declared, strict=True):
        merge(shape, declared, f"an output of {attribute}")


def _while_loop(walk: Walk, node: Node) -> tuple[Dims, ...]:
    everything = range(len(node.shapes))
    require(node.dtypes == node.result_dtypes, "inputs and outputs differ in number or type")
    shapes = tuple(merge(a, b, "inputs and outputs") for a, b in zip(node.shapes, node.declared, strict=True))
    condition, outputs = walk.callee(node, "cond_graph", everything)
    block = condition.blocks[0]
    kinds = [block.tensors[name].dtype for name in block.outputs]
    require(kinds == [DType.BOOL] and size(outputs[0]) in (1, UNKNOWN), "cond_graph must give one BOOL element")
    body, outputs = walk.callee(node, "body_graph", everything)
    _outputs_fit(node, body, outputs, "body_graph")
    for shape, output in zip(shapes, outputs, strict=True):
        merge(shape, output, "inputs and outputs of body_graph")
    return shapes


_CONTROL: Final[dict[Op, Callable[[Walk, Node], tuple[Dims, ...]]]] = {
    Op.COND_IF: _cond_if,
    Op.WHILE_LOOP: _while_loop,
}
_CALLEES: Final = {Op.COND_IF: ("then_graph", "else_graph"), Op.WHILE_LOOP: ("cond_graph", "body_graph")}


def callees_of(operator: Operator) -> tuple[str, ...]:
    """Names of the regions that an operator runs."""
    return tuple(cast(str, operator.attributes[name]) for name in _CALLEES.get(operator.op, ()))


def merge(shape: Dims, declared: Dims, what: str = "the result") -> Dims:
    """What is known of a shape from two sides; they must not disagree."""
    if shape == declared:
        return shape
    if len(shape) != len(declared):
        raise TosaError(f"{what}: rank {len(declared)}, must be {len(shape)}")
    rule = f"{what}: shape {list(declared)}, must be {list(shape)}"
    return tuple(same(rule, one, other) for one, other in zip(shape, declared, strict=True))


def _ranks(operands: Sequence[Operand], shapes: Sequence[Dims], level: Level) -> None:
    """See that the ranks are those of the pattern; shape operands have none of their own."""
    for operand, shape in zip(operands, shapes, strict=True):
        rank, most = len(shape), operand.max_rank
        if most is None:
            most = level.max_rank
        if (rank < operand.min_rank or rank > most) and operand.type != "shape_t":
            raise TosaError(f"{operand.name} has rank {rank}, must be {operand.min_rank} to {most}")


def _names(dtypes: Sequence[DType]) -> str:
    return "(" + ", ".join(dtype.name for dtype in dtypes) + ")"


def _text(need: Need) -> str:
    names = [f"profile {member.name}" for member in need.profiles] + [f"{member.name}" for member in need.extensions]
    return " and ".join(names)
