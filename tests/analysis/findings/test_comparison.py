"""Comparisons with figures that can be checked by hand, and conditions that are parsed, not evaluated."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringprof.analysis.findings.comparison import WORK, Entry, Figure, compare, same_work
from ringprof.analysis.findings.conditions import parse_condition
from ringprof.analysis.findings.entries import labels_of
from ringprof.benchmark_logs.rows import LogRow
from ringprof.benchmark_logs.show import entry_of_row
from ringprof.errors import UsageError

SETTINGS: dict[str, str | None] = dict.fromkeys(WORK, "1")


def entry(label: str, settings: dict[str, str | None] | None = None, **figures: Figure) -> Entry:
    return Entry(label, "run", SETTINGS if settings is None else settings, figures)


def rate(value: float, low: float, high: float) -> Figure:
    return Figure(value, "TFLOP/s", low, high, higher_is_better=True)


@pytest.mark.parametrize(
    ("base", "other", "verdict"),
    [
        (rate(100, 99, 101), rate(110, 109, 111), "better"),
        (rate(100, 99, 101), rate(90, 89, 91), "worse"),
        (rate(100, 95, 105), rate(104, 99, 109), "noise"),
        (rate(100, 99, 101), rate(100, 99, 101), "same"),
        (rate(100, 99, 101), Figure(110, "TFLOP/s", higher_is_better=True), "differs"),
        (Figure(5, "ms", 4, 6, None), Figure(9, "ms", 8, 10, None), "differs"),
    ],
)
def test_a_difference_within_the_spread_is_noise(base, other, verdict):
    (difference,) = compare([entry("a", x=base), entry("b", x=other)]).differences
    assert difference.verdict == verdict
    assert difference.difference == other.value - base.value
    assert difference.ratio == other.value / base.value


def test_times_are_set_against_each_other_only_for_the_same_work():
    time = Figure(5, "ms", 5, 5, False, depends_on_work=True)
    longer = entry("b", SETTINGS | {"seq": "2"}, t=replace(time, value=10))
    unknown = entry("c", {}, t=time)
    found = compare([entry("a", t=time), longer, unknown, entry("d", t=time)])
    assert [d.verdict for d in found.differences] == ["not comparable", "not comparable", "same"]
    assert found.differing["seq"] == ("1", "2", None, "1")
    assert not same_work(unknown, unknown)


def test_a_figure_that_one_side_lacks_is_missing():
    found = compare([entry("a", x=rate(1, 1, 1)), entry("b", y=rate(1, 1, 1))])
    assert found.figures == ("x", "y")
    assert {d.verdict for d in found.differences} == {"missing"}


def test_one_entry_is_no_comparison():
    with pytest.raises(ValueError, match="two"):
        compare([entry("a")])


def test_a_log_row_keeps_what_it_printed():
    row = LogRow(
        file="x.log", line=7, format="columns", system="burst", label="Burst", seq=8, tflops=3.0, forward_ms=2.0
    )
    found = entry_of_row(row)
    assert (found.label, found.settings["seq"], found.settings["heads"]) == ("x.log:7", "8", None)
    assert {name: figure.value for name, figure in found.figures.items()} == {"forward": 2.0, "tflops": 3.0}


@pytest.mark.parametrize(
    ("paths", "labels"),
    [
        (["traces/a/run.json", "traces/b"], ["a", "b"]),
        (["x/a/run.json", "y/a/run.json"], ["x/a", "y/a"]),
        (["a", "a"], ["a (1)", "a (2)"]),
    ],
)
def test_labels_are_the_shortest_that_differ(paths, labels):
    assert labels_of(paths) == labels


# --- conditions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("x > 5%", True),
        ("x > 6 %", False),
        ("x >= .06", True),
        ("x<0.95*base", True),
        ("x < 50% * base", False),
        ("x != 1e-2", True),
        ("x == 6%", True),
    ],
)
def test_a_condition_on_a_figure(text, holds):
    assert parse_condition(text).holds({"x": 0.06}, {"x": 0.1}) is holds


@pytest.mark.parametrize(
    "text", ["", "x", "x >", "> 5", "x > y", "x > 5 * other", "x > 5; y", "__import__('os') > 1", "x > 1e999"]
)
def test_what_is_no_condition_is_refused(text):
    with pytest.raises(UsageError, match="FIGURE OP NUMBER"):
        parse_condition(text)


def test_an_unknown_figure_names_those_that_are():
    with pytest.raises(UsageError, match="there are: x, y"):
        parse_condition("z > 1").holds({"x": 1.0, "y": 2.0}, {})


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.sampled_from(["<", "<=", ">", ">=", "==", "!="]))
def test_a_condition_is_what_python_says(value, limit, sign):
    expected = eval(f"{value!r} {sign} {limit!r}")
    assert parse_condition(f"figure {sign} {limit!r}").holds({"figure": value}, {}) is expected


def test_times_of_work_that_only_the_user_knows_are_set_against_each_other_where_he_says_so():
    entries = [
        entry(label, {}, wall=Figure(value, "ms", depends_on_work=True)) for label, value in (("a", 8), ("b", 6))
    ]
    assert [one.verdict for one in compare(entries).differences] == ["not comparable"]
    (found,) = compare(entries, did_same_work=True).differences
    assert (found.difference, found.ratio) == (-2, 0.75)
