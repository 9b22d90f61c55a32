"""Operator records: one frozen row for each operator says what is admitted and how it is emitted.

What the device advertises, what is admitted, what is emitted and docs/operators.md all come from these rows. Emitters
see a `Site` (one operator of the graph being lowered) and return values. A value carries its layout: `layout[i]` is the
TOSA axis that lies at stored axis i, so NHWC data kept as NCHW has layout (0, 3, 1, 2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import openvino as ov
from numpy.typing import NDArray

from virtaccel.tosa_graph.graph import AttributeValue, DType, Op, Operator, TosaError

if TYPE_CHECKING:
    from virtaccel.backend_openvino.lowering.builder import Builder

Layout: TypeAlias = tuple[int, ...]
Array: TypeAlias = NDArray[Any]


class Refused(TosaError):
    """This backend does not run the operator as TOSA defines it, so the program is not admitted; the text says why."""


class Value:
    """A tensor while lowering: the node output that holds it, its TOSA type and shape (TOSA's axis order), its layout.

    `constant` is the array (TOSA's axis order) if the value is known while lowering. Its node is made by `make` when it
    is first asked for: most weights are laid out anew, and a node of what they were is never needed.
    """

    __slots__ = ("_made", "constant", "dtype", "laid_out", "layout", "make", "shape")

    def __init__(
        self,
        output: ov.Output | None,
        dtype: DType,
        shape: tuple[int, ...],
        layout: Layout,
        constant: Array | None = None,
        make: Callable[[], ov.Output] | None = None,
    ) -> None:
        self._made = output
        self.dtype = dtype
        self.shape = shape
        self.layout = layout
        self.constant = constant
        self.make = make
        self.laid_out: dict[Layout, ov.Output] | None = None
        """A constant's nodes in other layouts."""

    @property
    def output(self) -> ov.Output:
        made = self._made
        if made is None:
            if self.make is None:
                raise ValueError("a value without a node")
            made = self._made = self.make()
        return made


class Site(NamedTuple):
    """One operator being lowered. `inputs` are tensor operands in order; SHAPE operands are in `shapes` (by position
    among all operands) as tuples of ints."""

    builder: Builder
    operator: Operator
    inputs: tuple[Value | None, ...]
    shapes: Mapping[int, tuple[int, ...]]
    out_shapes: tuple[tuple[int, ...], ...]
    out_dtypes: tuple[DType, ...]

    @property
    def attributes(self) -> Mapping[str, AttributeValue]:
        return self.operator.attributes

    def refuse(self, reason: str) -> Refused:
        return Refused(f"{self.operator.op.name}: {reason}")


Emitter: TypeAlias = Callable[[Site], tuple[Value, ...]]


@dataclass(frozen=True, slots=True)
class Record:
    """How this backend runs one operator.

    `types` are the admitted combinations: the TOSA types of the tensor operands that the standard lets vary, outputs
    last, as the standard's own table of supported types lists them; none for an operator that any types go with.
    `exact` says bit for bit, otherwise within TOSA's bound. `how` is one line for docs/operators.md.
    """

    op: Op
    types: frozenset[tuple[DType, ...]]
    emit: Emitter
    how: str
    exact: bool
    parts: tuple[Record, ...] = ()
    """The rows this one joins, where an operator's types are run in several ways."""

    def admits(self, site: Site) -> bool:
        """Whether the site's types are among `types`."""
        operands = tuple([value.dtype for value in site.inputs if value is not None])
        return self.covers(operands, site.out_dtypes[0] if site.out_dtypes else DType.UNKNOWN)

    def covers(self, operands: tuple[DType, ...], output: DType) -> bool:
        """Whether these types are among `types`: a row's last type is the output's, the ones before it are the first
        operands' in order; a row of one type is the output's, or the operands' where the output is BOOL."""
        types = self.types
        if not types or (output,) in types or (output is DType.BOOL and operands[:1] in types):
            return True
        counts = range(1, min(len(operands), _LONGEST) + 1)
        return not types.isdisjoint([(*operands[:count], output) for count in counts])


_LONGEST = 4
"""Types that a row names beside the output's."""

RECORDS: dict[Op, Record] = {}


def register(*records: Record) -> None:
    """Add rows; a module of operators calls this once at its end. Rows of one operator are joined."""
    for record in records:
        if any(len(row) > _LONGEST + 1 for row in record.types):
            raise ValueError(f"{record.op.name} registered for more types than are looked at")
        known = RECORDS.get(record.op)
        RECORDS[record.op] = record if known is None else _joined(*(known.parts or (known,)), record)


def _joined(*parts: Record) -> Record:
    """One row of all types; each part runs its own."""
    types: frozenset[tuple[DType, ...]] = frozenset().union(*(part.types for part in parts))
    op = parts[0].op
    if len(types) != sum(len(part.types) for part in parts):
        raise ValueError(f"{op.name} registered twice for the same types")

    def emit(site: Site) -> tuple[Value, ...]:
        for part in parts:
            if part.admits(site):
                return part.emit(site)
        raise site.refuse("not run for these types")

    how = "; ".join(dict.fromkeys(part.how for part in parts))
    return Record(op, types, emit, how, all(part.exact for part in parts), parts)
