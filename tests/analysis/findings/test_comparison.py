"""Comparisons with metrics that can be checked by hand, and conditions that are parsed, not evaluated."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ringprof.analysis.findings.comparison import combine_recordings, compare_measurements, interleaved
from ringprof.analysis.findings.conditions import parse_condition
from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.analysis.findings.measurements import measurement_of_run, shortest_labels
from ringprof.analysis.findings.metric import Measurement, Metric
from ringprof.analysis.findings.same_work import WORK, match_work
from ringprof.errors import UsageError
from ringprof.printed.benchmarks.logs import entry_of_row
from ringprof.printed.benchmarks.rows import LogRow
from ringprof.report.comparison import verdict_lines
from ringprof.scale.pipeline import attribute
from tests.analysis.build import Builder

SETTINGS: dict[str, str | None] = dict.fromkeys(WORK, "1")


def measurement(label: str, settings: dict[str, str | None] | None = None, **figures: Metric) -> Measurement:
    return Measurement(label, "run", SETTINGS if settings is None else settings, figures)


def rate(value: float, spread: float) -> Metric:
    """Ten measurements around a value, none of which is it."""
    values = tuple(value + spread * (index - 4.5) / 4.5 for index in (3, 8, 0, 5, 9, 1, 7, 2, 6, 4))
    return Metric(value, "TFLOP/s", (values,), higher_is_better=True)


@pytest.mark.parametrize(
    ("base", "other", "verdict"),
    [
        (rate(100, 1), rate(110, 1), "better"),
        (rate(100, 1), rate(90, 1), "worse"),
        (rate(100, 5), rate(101, 5), "noise"),
        (rate(100, 1), rate(100, 1), "same"),
        (rate(100, 1), Metric(110, "TFLOP/s", higher_is_better=True), "differs"),
        (replace(rate(5, 0.1), higher_is_better=None), replace(rate(9, 0.1), higher_is_better=None), "differs"),
    ],
)
def test_unproved_difference_is_noise(base, other, verdict):
    (difference,) = compare_measurements([measurement("a", x=base), measurement("b", x=other)]).differences
    assert difference.verdict == verdict
    assert (difference.low is None) == (not other.recordings)
    if difference.low is not None and difference.high is not None and difference.ratio is not None:
        assert difference.low <= difference.ratio <= difference.high
    assert difference.difference == other.value - base.value
    assert difference.ratio == other.value / base.value


def test_rates_of_two_operators_are_not_compared():
    entries = [measurement("a", x=rate(100, 1)), measurement("b", {**SETTINGS, "operator": "gdn"}, x=rate(110, 1))]
    assert [difference.verdict for difference in compare_measurements(entries).differences] == ["not comparable"]
    assert match_work(*entries).text == "operator gdn against attention"
    assert compare_measurements(entries[1:] * 2).differences[0].verdict == "same"


def test_compare_times_only_of_the_same_work():
    time = Metric(5, "ms", higher_is_better=False, depends_on_work=True)
    longer = measurement("b", SETTINGS | {"seq": "2"}, t=replace(time, value=10))
    unknown = measurement("c", {}, t=time)
    comparison = compare_measurements([measurement("a", t=time), longer, unknown, measurement("d", t=time)])
    assert [d.verdict for d in comparison.differences] == ["not comparable", "not comparable", "same"]
    assert comparison.differing["seq"] == ("1", "2", None, "1")
    assert not match_work(unknown, unknown).same


def test_figure_of_one_side_alone_is_missing():
    comparison = compare_measurements([measurement("a", x=rate(1, 0)), measurement("b", y=rate(1, 0))])
    assert comparison.figures == ("x", "y")
    assert {d.verdict for d in comparison.differences} == {"missing"}


def recorded(label: str, created: str, tflops: float, exposed: float) -> Measurement:
    share = Metric(exposed, "share", higher_is_better=False)
    return replace(
        measurement(label, tflops=rate(tflops, 1), exposed_comm=share),
        created=(created,),
        others={"idle": exposed / 10},
        warnings=("odd",),
    )


def test_recordings_of_one_run_are_combined():
    combined = combine_recordings(
        [recorded("b", "2026-02", 104, 0.3), recorded("a", "2026-01", 100, 0.1), recorded("c", "2026-03", 102, 0.2)]
    )
    assert (combined.label, combined.created) == ("a and 2 more", ("2026-01", "2026-02", "2026-03"))
    # The median over recordings; what was measured once in each is repeated by them.
    assert combined.figures["tflops"].value == 102
    assert combined.figures["exposed_comm"].recordings == ((0.1,), (0.3,), (0.2,))
    assert combined.others == {"idle": pytest.approx(0.02)}
    assert combined.warnings == ("a: odd", "b: odd", "c: odd")
    assert combine_recordings([combined]) is combined


def test_differing_setting_shows_all_values():
    two = [
        replace(measurement(label, SETTINGS | {"torch": version}), created=(label,)) for label, version in ("a1", "b2")
    ]
    combined = combine_recordings(two)
    assert combined.settings["torch"] == "1, 2"
    assert combined.settings["seq"] == "1"
    assert not match_work(
        combined, combine_recordings([replace(e, settings={**e.settings, "seq": e.label}) for e in two])
    ).same


def test_interleaved_recordings_are_detected_by_their_times():
    def made(*times: str) -> Measurement:
        return replace(measurement("x"), created=times)

    assert interleaved(made("01", "04", "05", "08"), made("02", "03", "06", "07"))
    assert not interleaved(made("01", "02", "03", "04"), made("05", "06", "07", "08"))
    assert not interleaved(made("01", "03", "05"), made("02", "04", "06"))
    assert not interleaved(made("01", "03", "05", "07"), made("02"))
    assert not interleaved(made(), made())


def test_compare_requires_two_entries():
    with pytest.raises(ValueError, match="two"):
        compare_measurements([measurement("a")])


def test_log_row_entry_keeps_the_printed_figures():
    row = LogRow(
        file="x.log", line=7, format="columns", system="burst", label="Burst", seq=8, tflops=3.0, forward_ms=2.0
    )
    row_measurement = entry_of_row(row)
    assert (row_measurement.label, row_measurement.settings["seq"], row_measurement.settings["heads"]) == (
        "x.log:7",
        "8",
        None,
    )
    assert {name: metric.value for name, metric in row_measurement.figures.items()} == {
        "forward_ms": 2.0,
        "tflops": 3.0,
    }


@pytest.mark.parametrize(
    ("paths", "labels"),
    [
        (["traces/a/run.json", "traces/b"], ["a", "b"]),
        (["x/a/run.json", "y/a/run.json"], ["x/a", "y/a"]),
        (["a", "a"], ["a (1)", "a (2)"]),
    ],
)
def test_labels_are_the_shortest_that_differ(paths, labels):
    assert shortest_labels(paths) == labels


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
def test_condition_holds_for_its_figure(text, holds):
    assert parse_condition(text).holds({"x": 0.06}, {"x": 0.1}) is holds


@pytest.mark.parametrize(
    ("text", "interval", "answer"),
    [
        ("x < 0.95 * base", (0.90, 0.94), True),
        ("x < 0.95 * base", (0.96, 0.99), False),
        ("x < 0.95 * base", (0.94, 0.96), None),
        ("x > 5%", (0.04, 0.07), None),
        ("x > 5%", (0.051, 0.07), True),
        ("x != 0.06", (0.04, 0.07), False),
        ("x > 5%", None, True),
    ],
)
def test_condition_inside_the_interval_is_undecided(text, interval, answer):
    assert parse_condition(text).holds({"x": 0.06}, {"x": 0.064}, None, interval) is answer


@pytest.mark.parametrize(
    "text", ["", "x", "x >", "> 5", "x > y", "x > 5 * other", "x > 5; y", "__import__('os') > 1", "x > 1e999"]
)
def test_malformed_condition_is_refused(text):
    with pytest.raises(UsageError, match="FIGURE OP NUMBER"):
        parse_condition(text)


def test_unknown_figure_error_lists_the_figures():
    with pytest.raises(UsageError, match="there are: x, y"):
        parse_condition("z > 1").holds({"x": 1.0, "y": 2.0}, {})


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.sampled_from(["<", "<=", ">", ">=", "==", "!="]))
def test_condition_agrees_with_python_comparison(value, limit, sign):
    expected = eval(f"{value!r} {sign} {limit!r}")
    assert parse_condition(f"figure {sign} {limit!r}").holds({"figure": value}, {}) is expected


def test_same_work_option_compares_times_of_unknown_work():
    entries = [
        measurement(label, {}, wall=Metric(value, "ms", depends_on_work=True)) for label, value in (("a", 8), ("b", 6))
    ]
    assert [difference.verdict for difference in compare_measurements(entries).differences] == ["not comparable"]
    (difference,) = compare_measurements(entries, did_same_work=True).differences
    assert (difference.difference, difference.ratio) == (-2, 0.75)


def marked(lengths):
    """Traces of two ranks that mark iterations of these lengths in 0.1 ms; rank 0 is 0.1 ms faster in each."""
    builders = [Builder(rank=rank, world_size=2) for rank in (0, 1)]
    start = 0
    for number, length in enumerate(lengths):
        for rank, builder in enumerate(builders):
            builder.mark(f"ProfilerStep#{number}", start, start + 100_000 * (length + rank))
            builder.operate("aten::mm", start, start + 100_000 * (length + rank))
        start += 100_000 * (length + 2)
    return measurement_of_run("traces", findings_in_memory(attribute([b.trace() for b in builders])))


def test_difference_of_traces_with_iterations_has_an_interval():
    scatter = (-3, 2, 0, 1, -2, 3, -1, 0)
    base, again, slower = (marked([length + deviation for deviation in scatter]) for length in (999, 1000, 1099))
    metric = base.figures["profiled_iteration_ms"]
    assert (metric.value, sorted(metric.recordings[0])) == (100, [99.7, 99.8, 99.9, 100, 100, 100.1, 100.2, 100.3])
    comparison = compare_measurements([base, again, slower], did_same_work=True)
    same, worse = (comparison.against_base("profiled_iteration_ms", index) for index in (1, 2))
    assert same and worse and worse.low and worse.high and worse.ratio
    assert (same.verdict, worse.verdict) == ("noise", "worse")
    # When they were recorded is not known: 1.96 * sqrt(2) * 2.64 % to each side.
    assert (worse.ratio, worse.low, worse.high) == pytest.approx((1.1, 1.1 / 1.0759, 1.1 * 1.0759), rel=1e-3)
    assert worse.assumed_spread and worse.assumed_spread.share == pytest.approx(math.hypot(0.026, 0.0044), rel=0.01)
    assert verdict_lines(comparison)[1].startswith("2: slower by 10.0 % (2.3 to 18.")


def test_single_iteration_has_no_profiled_iteration_figure():
    assert "profiled_iteration_ms" not in marked([1000]).figures
