"""IDs and tables: nothing stale ever resolves, whatever the order of making and destroying (specification.md 7)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from virtaccel.device.errors import NeedsReset
from virtaccel.device.objects import (
    GENERATION_BITS,
    KIND_BITS,
    NAMESPACE_BITS,
    SLOT_BITS,
    Kind,
    Namespaces,
    Table,
    TableFull,
)

SLOTS, GENERATIONS = 2, 2  # bits: four slots of four generations, so that retirement is met all the time


class TableMachine(RuleBasedStateMachine):
    """A small table against a dictionary, with every ID ever given out remembered."""

    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.table: Table[str] = Table(Kind.BUFFER, 5, slot_bits=SLOTS, generation_bits=GENERATIONS)
        self.model: dict[int, str] = {}
        self.ever: set[int] = set()
        self.made = 0

    @precondition(lambda self: self.table.room > 0)
    @rule(target=ids)
    def insert(self) -> int:
        record = f"object {self.made}"
        self.made += 1
        object_id = self.table.insert(record)
        assert object_id not in self.ever, "an ID came back"
        assert 0 < object_id < 1 << 64
        self.ever.add(object_id)
        self.model[object_id] = record
        return object_id

    @rule(object_id=consumes(ids))
    def remove(self, object_id: int) -> None:
        assert self.table.remove(object_id) == self.model.pop(object_id)
        with pytest.raises(KeyError):
            self.table.remove(object_id)

    @precondition(lambda self: self.table.room == 0)
    @rule()
    def refuse_when_full(self) -> None:
        with pytest.raises(TableFull):
            self.table.insert("one too many")

    @rule(object_id=st.integers(0, (1 << 64) - 1))
    def look_up_anything(self, object_id: int) -> None:
        assert self.table.get(object_id) == self.model.get(object_id)

    @invariant()
    def only_live_ids_resolve(self) -> None:
        assert {object_id for object_id in self.ever if self.table.get(object_id) is not None} == set(self.model)
        assert len(self.table) == len(self.model)
        retired = len(self.ever) == 1 << (SLOTS + GENERATIONS)
        assert self.table.room <= (1 << SLOTS) - len(self.model)
        assert not (retired and self.table.room)


TableMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestTable = TableMachine.TestCase


def test_slots_retire_before_their_generation_wraps() -> None:
    table: Table[int] = Table(Kind.EVENT, 1, slot_bits=1, generation_bits=3)
    seen = set()
    while table.room:
        object_id = table.insert(len(seen))
        seen.add(object_id)
        table.remove(object_id)
    assert len(seen) == 2 * 8
    with pytest.raises(TableFull):
        table.insert(0)


def test_id_has_room_for_its_fields() -> None:
    assert NAMESPACE_BITS + KIND_BITS + SLOT_BITS + GENERATION_BITS == 64
    assert max(Kind) < 1 << KIND_BITS
    assert min(Kind) > 0


@pytest.mark.parametrize("kind", Kind)
def test_no_other_kind_or_epoch_resolves(kind: Kind) -> None:
    namespaces = Namespaces(b"secret")
    epochs = {1: namespaces(), 2: namespaces()}
    tables = {(other, epoch): Table[str](other, epochs[epoch]) for epoch in epochs for other in Kind}
    mine = tables[kind, 1].insert("mine")
    for key, table in tables.items():
        table.insert("first")
        assert (table.get(mine) is not None) == (key == (kind, 1))


def test_namespaces_never_repeat_and_differ_between_secrets() -> None:
    one, two = Namespaces(b"one"), Namespaces(b"two")
    first = [one() for _ in range(20_000)]
    assert len(set(first)) == len(first)
    assert all(0 < value < 1 << NAMESPACE_BITS for value in first)
    assert first[:50] != [two() for _ in range(50)]
    steps = {(b - a) % (1 << NAMESPACE_BITS) for a, b in pairwise(first[:50])}
    assert len(steps) > 40, "the next one does not follow from the last two"


def test_namespaces_run_out_rather_than_repeat() -> None:
    namespaces = Namespaces(b"secret")
    namespaces._next = 1 << NAMESPACE_BITS
    with pytest.raises(NeedsReset):
        namespaces()
