"""The table of operators: what of TOSA 1.0 this backend runs, for which types, how exactly, and how.

Knows the standard's table of types (tosa_graph.operators), the records of the lowering and what the device offers, and
joins the three; docs/operators.md is its text. It decides nothing: what is admitted is in the records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from virtaccel.backend_openvino import lowering as lowering  # registers the records
from virtaccel.backend_openvino.lowering.builder import BUILT_IN
from virtaccel.backend_openvino.lowering.numbers import ELEMENT_TYPES
from virtaccel.backend_openvino.lowering.registry import RECORDS, Record
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.operators import FIXED_TYPES, SIGNATURES, Need, Operand, Signature
from virtaccel.tosa_graph.target import BASE_PROFILE, PROFILE_NAMES, Extension, Profile, Target, names

EXACT: Final = "exact"
BOUNDED: Final = "within bound"
NOT_RUN: Final = "not run"

FLOATS: Final = frozenset({DType.FP32, DType.FP16, DType.BF16, DType.FP8E4M3, DType.FP8E5M2})

WITHOUT_RECORD: Final[dict[Op, str]] = {
    Op.CONST: "Constant over the file's own bytes",
    Op.CONST_SHAPE: "no node: read while lowering",
    Op.IDENTITY: "no node; from an input or constant straight to an output, a Convert to the same type",
    Op.VARIABLE: "an input of the model, and an output if it is written; bound to the guest's buffer",
    Op.VARIABLE_READ: "no node: what the variable holds at that place",
    Op.VARIABLE_WRITE: "no node: the variable's value from there on",
}
"""How the operators are run that the builder does itself."""

_PLAIN: Final = frozenset({"index_t", "acc_t"})
"""Type variables that are no part of how a row is written."""

_EXTENSION_MEANING: Final[dict[Extension, str]] = {
    Extension.INT16: "the rows of INT16 and INT48",
    Extension.INT4: "the rows of INT4",
    Extension.BF16: "the rows of BF16",
    Extension.FP8E4M3: "the rows of FP8E4M3; only where a program with such tensors compiles",
    Extension.FP8E5M2: "the rows of FP8E5M2; only where a program with such tensors compiles",
    Extension.FFT: "FFT2D, RFFT2D",
    Extension.VARIABLE: "VARIABLE, VARIABLE_READ, VARIABLE_WRITE: state in buffers of the mutable-state usage",
    Extension.CONTROLFLOW: "COND_IF, WHILE_LOOP",
    Extension.DYNAMIC: "operands given at run time instead of constants, as far as operators take them: see below",
    Extension.DOUBLEROUND: "RESCALE with rounding mode DOUBLE_ROUND",
    Extension.INEXACTROUND: "RESCALE with rounding mode INEXACT_ROUND, computed as SINGLE_ROUND",
}


class Row(NamedTuple):
    """Types of one operator that are run alike. `types` as people read them, empty where any will do; `needs` names
    profiles and extensions; `exactness` is EXACT, BOUNDED or NOT_RUN, and `how` then says why not."""

    op: Op
    types: tuple[str, ...]
    needs: str
    exactness: str
    how: str


def rows(offered: Target, ops: Iterable[Op] = SIGNATURES) -> list[Row]:
    """One row for each operator and way of running it, in the standard's order."""
    found: list[Row] = []
    for op in ops:
        joined: dict[tuple[str, str, str], list[str]] = {}
        for types, needs in SIGNATURES[op].rows.items() or [((), ())]:
            exactness, how = how_run(op, types, needs, offered)
            joined.setdefault((_needs(needs), exactness, how), []).append(_spell(SIGNATURES[op], types))
        found += [Row(op, tuple(filter(None, dict.fromkeys(spelled))), *key) for key, spelled in joined.items()]
    return found


def how_run(op: Op, types: tuple[DType, ...], needs: tuple[Need, ...], offered: Target) -> tuple[str, str]:
    """Exactness, and how it is run or why it is not."""
    if not any(_within(need, offered) for need in needs):
        return NOT_RUN, "extension not offered"
    if op in BUILT_IN:
        return (EXACT, WITHOUT_RECORD[op]) if ELEMENT_TYPES.keys() >= set(types) else (NOT_RUN, "no such node")
    record = _covering(op, types)
    if record is None:
        return NOT_RUN, "no record" if op is not Op.CUSTOM else "its meaning is not in the standard"
    # Integers are never anything but exact; what a record says is about its floating-point rows, if it has any.
    return (EXACT if record.exact or FLOATS.isdisjoint(types) else BOUNDED), record.how


def _within(need: Need, offered: Target) -> bool:
    profiles = need.profiles
    for extension in need.extensions:
        profiles |= BASE_PROFILE.get(extension, Profile(0))
    return offered.covers(profiles, need.extensions)


def _covering(op: Op, types: tuple[DType, ...]) -> Record | None:
    record = RECORDS.get(op)
    if record is None:
        return None
    signature = SIGNATURES[op]
    bound = dict(zip(signature.variables, types, strict=True))
    operands = tuple(_dtype(operand, bound) for operand in signature.operands if operand.type != "shape_t")
    output = _dtype(signature.results[0], bound)
    return next((part for part in record.parts or (record,) if part.covers(operands, output)), None)


def _dtype(operand: Operand, bound: dict[str, DType]) -> DType:
    return bound.get(operand.type) or FIXED_TYPES.get(operand.type, DType.UNKNOWN)


def _spell(signature: Signature, types: tuple[DType, ...]) -> str:
    """INT8 x INT4 -> INT32, or FP32 where all are of one type."""
    bound = {name: dtype.name for name, dtype in zip(signature.variables, types, strict=True) if name not in _PLAIN}
    taken = [name for variable, name in bound.items() if variable != "out_t"]
    if "out_t" not in bound or not taken:
        text = " x ".join(bound.values())
    else:
        text = f"{' x '.join(taken)} -> {bound['out_t']}"
    sums = dict(zip(signature.variables, types, strict=True)).get("acc_t")
    return f"{text} (sums {sums.name})" if sums is not None and not text.endswith(sums.name) else text


def _needs(needs: tuple[Need, ...]) -> str:
    return " or ".join(" and ".join(names(*need)) for need in needs)


# ---- as text

_HEAD: Final = """\
# Operators

Made by `virtaccel operators --markdown > docs/operators.md` from the operator records; do not edit. It says what the
CPU device of the OpenVINO backend runs of TOSA 1.0.

"exact" is the one result that TOSA allows, bit for bit; "within bound" is an error no larger than the operator's
section of the standard allows, with NaN and infinity where it wants them. Everything of integers and booleans is exact.
All of it runs in OpenVINO's own kernels, compiled for FP32 and never for a narrower precision; narrower tensors are
rounded at every operator. "limbs", "words" and "parts" are pieces of a number or of a sum small enough to be exact.
"""

_REFUSED: Final = """\
## What is refused

A program is refused while it is loaded, with one line in the host's log that names the operator; with `virtaccel
inspect` the line is shown for each operator. Refused is:

* what the standard calls an error: every ERROR_IF that can be known without the values of tensors, the maxima of level
  8K (or what the target words say), operands that have to be constants and are none;
* a target that is not offered, and an operator, type or rounding mode outside of the target that the program declares;
* what is "not run" above;
* shapes given at run time, and other operands that have to be constants without EXT-DYNAMIC where the operator wants
  them constant with it, too: the line then says "is not a constant";
* floating-point zero points other than 0;
* more tensors, regions or bytes than the budget of one program, whatever its operators;
* what OpenVINO does not compile.

Sizes of -1 are taken from the bindings of a submission. A shape that the operators refuse fails that submission alone.

Never refused, as they depend on values: an index outside of its tensor (GATHER, SCATTER), a division by zero, a shift
beyond the type. The standard leaves their results open; here they stay inside the tensors of the program. A loop that
does not end fails its submission after a bounded number of iterations.
"""


def markdown(offered: Target) -> str:
    """docs/operators.md."""
    found = rows(offered)
    ran = [row for row in found if row.exactness != NOT_RUN]
    operators = len({row.op for row in ran})
    lines = [
        _HEAD,
        f"{operators} of {len(SIGNATURES)} operators are run, in "
        f"{sum(max(1, len(row.types)) for row in ran)} of {sum(max(1, len(row.types)) for row in found)} "
        "combinations of types.\n",
        "## Profiles and extensions\n",
        *_table(("name", "offered", "what it brings"), _extensions(offered)),
        "",
        "## Operators and types\n",
        *_table(
            ("operator", "types", "part of", "result", "how"),
            ((row.op.name, ", ".join(row.types) or "any", row.needs, row.exactness, row.how) for row in found),
        ),
        "",
        _REFUSED,
    ]
    return "\n".join(lines)


def _extensions(offered: Target) -> Iterator[tuple[str, str, str]]:
    for profile, name in PROFILE_NAMES.items():
        yield name, "yes" if profile & offered.profiles else "no", "the rows marked so"
    for extension, meaning in _EXTENSION_MEANING.items():
        yield f"EXT-{extension.name}", "yes" if extension & offered.extensions else "no", meaning


def _table(headings: tuple[str, ...], cells: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(headings) + " |"
    yield "|" + "---|" * len(headings)
    for row in cells:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
