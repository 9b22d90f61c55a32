"""How times are taken and shown: order, statistics, bars, bounds."""

from __future__ import annotations

import json

import pytest

from virtaccel.harness.bench import report
from virtaccel.harness.bench.measure import alternate, in_words, median_ratio, timing
from virtaccel.harness.bench.report import Figure, Report, Row, bar


def test_works_take_turns_and_nobody_is_always_second() -> None:
    calls: list[str] = []
    samples = alternate({name: lambda name=name: calls.append(name) for name in "ab"}, rounds=4, warm_up=2)
    assert "".join(calls) == "abba" * 3
    assert {name: len(found) for name, found in samples.items()} == {"a": 4, "b": 4}


def test_what_a_work_returns_is_tidied_up_outside_the_clock() -> None:
    numbers, tidied = iter(range(10)), []
    alternate({"a": lambda: next(numbers)}, rounds=3, warm_up=1, after={"a": tidied.append})
    assert tidied == [0, 1, 2, 3]


def test_statistics_of_a_known_sample() -> None:
    found = timing(list(range(1, 101)))
    assert (found.times, found.least, found.median) == (100, 1.0, 50.5)
    assert found.p99 == pytest.approx(99.01)
    assert median_ratio([2, 4, 6], [1, 2, 3]) == 2.0


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [(12.3, "12.3 ns"), (999.4, "999 ns"), (1500, "1.5 us"), (123456, "123 us"), (2.5e6, "2.5 ms"), (2e9, "2000 ms")],
)
def test_times_in_words(nanoseconds: float, text: str) -> None:
    assert in_words(nanoseconds) == text


def test_bars_are_as_long_as_their_share() -> None:
    assert bar(1.0) == "█" * report.BAR
    assert len(bar(0.5)) == report.BAR // 2
    assert bar(0.001) == "▏"
    assert bar(0.0) == ""


def test_figures_hold_up_to_their_bound_either_way() -> None:
    assert Figure("latency", 6.0, "us", 6.0).holds
    assert not Figure("latency", 6.1, "us", 6.0).holds
    assert Figure("rate", 0.6, bound=0.6, at_least=True).holds
    assert not Figure("rate", 0.59, bound=0.6, at_least=True).holds
    assert Figure("for information", 1e9).holds


def test_json_says_what_the_table_says(capsys: pytest.CaptureFixture[str]) -> None:
    made = Report("made up", [Row("work", "lane", timing([1000, 2000, 3000]), "note")], [Figure("f", 2.0, "us", 3.0)])
    made.show(True, report.Console())
    plain = json.loads(capsys.readouterr().out)
    times = {"count": 3, "min_ns": 1000.0, "p50_ns": 2000.0, "p99_ns": 2980.0}
    assert plain["rows"] == [{"what": "work", "lane": "lane", "note": "note", **times}]
    assert plain["figures"][0] | {"value": 2.0, "bound": 3.0, "holds": True} == plain["figures"][0]
    assert plain["host"]["processors"] >= 1
    made.show(False, report.Console(width=160))
    text = capsys.readouterr().out
    assert "work" in text
    assert "2 us" in text
    assert "holds" in text
