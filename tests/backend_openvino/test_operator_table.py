"""The table of operators: the file in docs/ is current, and what it says is what the device does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from virtaccel.backend_openvino import operators
from virtaccel.backend_openvino.lowering.builder import BUILT_IN
from virtaccel.backend_openvino.lowering.registry import RECORDS
from virtaccel.backend_openvino.programs import offered
from virtaccel.cli.main import main
from virtaccel.guest_tools.arrays import accelerator as guest
from virtaccel.guest_tools.arrays.accelerator import Accelerator
from virtaccel.guest_tools.errors import Refused
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.operators import SIGNATURES
from virtaccel.tosa_graph.schema import NanMode
from virtaccel.tosa_graph.write import GraphWriter

COMMAND = "virtaccel operators --markdown > docs/operators.md"


@pytest.fixture(scope="module")
def accelerator() -> Iterator[Accelerator]:
    with guest.open(device="CPU") as opened:
        yield opened


def test_the_file_is_current(root: Path) -> None:
    held = (root / "docs" / "operators.md").read_text()
    current = operators.markdown(offered("CPU"))
    assert held == current, f"docs/operators.md is not what the records say; run: {COMMAND}"


def test_the_command_prints_the_file_and_rows(root: Path) -> None:
    printed = CliRunner().invoke(main, ["operators", "--markdown", "--device", "CPU"])
    assert printed.exit_code == 0
    assert printed.stdout == operators.markdown(offered("CPU"))
    assert "INT8 x INT8 -> INT32" in CliRunner().invoke(main, ["operators", "conv2d"]).stdout
    wrong = CliRunner().invoke(main, ["operators", "CONV9D"])
    assert (wrong.exit_code, wrong.stderr) == (2, "virtaccel: TOSA 1.0 has no operator 'CONV9D'\n")


def test_operators_without_a_record_are_the_builder_s() -> None:
    assert operators.WITHOUT_RECORD.keys() == BUILT_IN
    assert not BUILT_IN & RECORDS.keys()


def test_no_record_admits_types_that_the_standard_does_not_list() -> None:
    for op, record in RECORDS.items():
        listed = {frozenset(types) for types in SIGNATURES[op].rows}
        for row in record.types:
            assert any(set(row) <= types for types in listed), (op.name, [dtype.name for dtype in row])


ATTRIBUTES = {
    Op.MAXIMUM: {"nan_mode": NanMode.PROPAGATE},
    Op.MINIMUM: {"nan_mode": NanMode.PROPAGATE},
    Op.ARITHMETIC_RIGHT_SHIFT: {"round": True},
}
SHAPE = (2, 3)


def elementwise() -> list[Op]:
    """Operators that take tensors of one shape and attributes that are known here."""
    names = {"input", "input1", "input2"}
    return [
        op
        for op, signature in SIGNATURES.items()
        if signature.operands
        and all(operand.name in names and not operand.min_rank for operand in signature.operands)
        and op not in (Op.CLAMP, Op.VARIABLE_WRITE)
    ]


def place(writer: GraphWriter, op: Op, types: tuple[DType, ...]) -> None:
    """One operator of its own inputs and output."""
    signature = SIGNATURES[op]
    bound = dict(zip(signature.variables, types, strict=True))
    names = [writer.input(f"{op.name} {types} {operand.name}", SHAPE, bound[operand.type])
             for operand in signature.operands]  # fmt: skip
    writer.output(writer.operator(op, names, (SHAPE, bound[signature.results[0].type]), ATTRIBUTES.get(op)))


def test_the_device_runs_what_the_table_says_it_runs_and_nothing_else(accelerator: Accelerator) -> None:
    target, together, apart = offered("CPU"), GraphWriter(), []
    for op in elementwise():
        for types, needs in SIGNATURES[op].rows.items():
            if operators.how_run(op, types, needs, target)[0] == operators.NOT_RUN:
                apart.append((op, types))
            else:
                place(together, op, types)
    accelerator.load(together.to_bytes(), "all that is run").close()
    for op, types in apart:
        alone = GraphWriter()
        place(alone, op, types)
        with pytest.raises(Refused):
            accelerator.load(alone.to_bytes(), f"{op.name} {types}")
