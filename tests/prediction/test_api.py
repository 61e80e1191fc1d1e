"""`ringprof.predict` and `ringprof.advise`: frames that add up, plots that show the same figures, and the page."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="a prediction runs strategies on shapes")
pytest.importorskip("matplotlib", reason="plots need the plot extra")

from msgspec.structs import replace

import ringprof
from ringprof.errors import UnknownStrategyError, UnsupportedWorkloadError, UsageError
from ringprof.prediction.advise import Advice, Choice, _on_front, crossings, probability_faster
from ringprof.prediction.api import Prediction, Recommendation
from ringprof.prediction.calibration import read_calibration
from ringprof.prediction.predict import inputs
from ringprof.report import plots
from tests.page.shown import shows
from tests.page.test_page import Page

PROBLEM = ringprof.Workload(seq=131072, heads=16, kv_heads=8, head_dim=128)
TWO_HOSTS = ringprof.Cluster(hosts=2, gpus_per_host=2, nic_gbit=200.0)


@cache
def recommendation() -> Recommendation:
    return ringprof.advise(PROBLEM, TWO_HOSTS, machine="h200", strategies=("burst", "ulysses", "zigzag"))


@cache
def prediction() -> Prediction:
    return ringprof.predict("zigzag", PROBLEM, TWO_HOSTS, machine="h200")


def test_a_problem_is_a_workload_or_its_fields() -> None:
    fields = {"seq": 131072, "heads": 16, "kv_heads": 8, "head_dim": 128}
    hosts: Any = {"hosts": 2, "gpus_per_host": 2, "nic_gbit": 200.0}
    problem: Any = fields
    assert ringprof.predict("zigzag", problem, hosts, machine="h200").interval_ms == prediction().interval_ms
    for wrong, message in (({**fields, "seq": "64k"}, "seq"), ("64k", "Workload")):
        with pytest.raises(UsageError, match=message):
            ringprof.predict("zigzag", wrong, hosts, machine="h200")  # type: ignore[arg-type]


def test_parts_sum_to_the_simulated_time_of_the_slowest_rank() -> None:
    frame = prediction().parts()
    timelines = prediction().prediction.timelines
    assert frame.time_ms.sum() == pytest.approx(max(timeline.end_ns for timeline in timelines) / 1e6, rel=1e-6)
    assert set(frame.phase) == {"forward", "backward"} and set(frame.attrs["columns"]) == set(frame.columns)


def test_choices_are_sorted_by_time_and_probabilities_sum_to_1() -> None:
    frame = recommendation().choices()
    assert frame.fits.all() and frame.middle_ms.is_monotonic_increasing
    assert frame.best.sum() == pytest.approx(1.0)
    assert (frame.low_ms < frame.middle_ms).all() and (frame.middle_ms < frame.high_ms).all()
    report = recommendation().report()["choices"]
    assert [round(ms, 4) for ms in frame.middle_ms] == [row["iteration_ms"]["p50"] for row in report]


@pytest.mark.parametrize(("name", "points"), [("tokens", 5), ("hosts", 4), ("nic", 6)])
def test_frames_and_plots_over_a_size_agree(name: str, points: int) -> None:
    frame = recommendation().over(name)
    assert frame["at"].nunique() == points
    axes = getattr(recommendation().plot, name)()
    lines = [line for line in axes.lines if len(line.get_xdata()) == points]
    assert [line.get_label() for line in lines] == list(frame.choice.unique())
    for line in lines:
        rows = frame[frame.choice == line.get_label()]
        # Per GPU, of two to a host.
        flops = [
            replace(PROBLEM, seq=int(value)).model_flops() if name == "tokens" else PROBLEM.model_flops()
            for value in rows["at"]
        ]
        gpus = [2 * value if name == "hosts" else 4 for value in rows["at"]]
        speeds = [work / size / ms / 1e9 for work, size, ms in zip(flops, gpus, rows.middle_ms, strict=True)]
        assert list(line.get_ydata()) == pytest.approx(speeds)


def test_plots_of_choices_and_parts() -> None:
    axes = recommendation().plot.choices()
    assert [tick.get_text() for tick in axes.get_yticklabels()] == list(recommendation().choices().choice[:12])
    bars: list[Any] = list(prediction().plot().patches)
    assert sum(bar.get_width() for bar in bars) == pytest.approx(prediction().parts().time_ms.sum())


def test_balance_of_contiguous_causal_work_by_hand() -> None:
    """Each of 2 ranks has a triangle of 32 x 33 / 2 pairs of its own tokens, the second a square more."""
    triangle, square = 32 * 33 / 2, 32**2
    frame = ringprof.balance({"seq": 64, "heads": 2, "kv_heads": 2, "head_dim": 8}, world=2)  # type: ignore[arg-type]
    ring, zigzag = (frame[frame.strategy == name].iloc[0] for name in ("ring", "zigzag"))
    assert ring.busiest == pytest.approx((triangle + square) / (triangle + square / 2)) and ring.needed == 0.5
    assert zigzag.busiest == 1.0 and zigzag.needed == 1.0
    assert list(frame.columns) == list(frame.attrs["columns"])
    with pytest.raises(UsageError, match="world"):
        ringprof.balance(ringprof.Workload(seq=64, heads=2, kv_heads=2, head_dim=8), world=0)


def test_hidden_choices_are_counted() -> None:
    advice = recommendation().advice
    threefold = dataclasses.replace(advice, choices=advice.choices * 3)
    count = len(threefold.choices)
    assert f"\n{count - 12} more choices are slower: --format json lists all {count}\n" in Recommendation(
        threefold).to_terminal()  # fmt: skip
    # A line about a single one would take as much space as its row.
    thirteen = dataclasses.replace(advice, choices=threefold.choices[:13])
    for shown in (recommendation(), Recommendation(thirteen)):
        assert "more choices" not in shown.to_terminal()
    assert Recommendation(thirteen).to_terminal().count(" GiB\n") == 13
    assert "The slowest are in the table alone." in Recommendation(threefold).to_html()


def test_plot_labels_beside_lines_stay_inside_the_axes() -> None:
    marks = [(2.0, "near the left"), (60.0, "near the right")]
    axes = plots.bands("tokens", "speed", {"a": [(1.0, (1.0, 2.0, 3.0)), (64.0, (1.0, 2.0, 3.0))]}, marks)
    assert {text.get_text(): text.get_horizontalalignment() for text in axes.texts} == {
        "near the left": "left", "near the right": "right",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("others", "variance", "expected"),
    [
        # Ahead by a tenth at 1, behind by a tenth at 4: halfway on a logarithmic axis.
        ((1.1, 1 / 1.1), {}, [2.0]),
        # Equal is neither: half a per cent either way is chance.
        ((1.004, 0.996), {}, []),
        ((1.1, 1.2), {}, []),
        # Links 5 % either way for each: 1.28 * sqrt(2) * 5 % = 9.05 % of the ratio, less than the 9.53 % of log 1.1.
        ((1.1, 1 / 1.1), {"other_host": 0.0025}, [2.0]),
        ((1.09, 1 / 1.09), {"other_host": 0.0025}, []),
        # A kernel that is slower than measured slows both alike.
        ((1.09, 1 / 1.09), {"forward kernel": 0.0025}, [2.0]),
    ],
)
def test_crossing_points_by_hand(
    others: tuple[float, float], variance: dict[str, float], expected: list[float]
) -> None:
    points = [
        (position, (_prediction_of(1.0, variance), _prediction_of(ms, variance)))
        for position, ms in zip((1.0, 4.0), others, strict=True)
    ]
    assert [value for value, _ in crossings(points)] == pytest.approx(expected)


def _prediction_of(ms: float, variance: dict[str, float], strategy: str = "usp") -> Any:
    """Return a stand-in for a prediction that has only a time and its log-variance by input."""
    return SimpleNamespace(median_ns=ms * 1e6, device_variance=variance, query=SimpleNamespace(strategy=strategy))


@pytest.mark.parametrize(("strategy", "probability"), [("usp", 1.0), ("megatron", 0.6620)])
def test_error_of_a_family_is_shared_within_it_only(strategy: str, probability: float) -> None:
    """3 % apart, 5 % per family: log 1.03 over sqrt(2) x 5 % is 0.418 standard deviations between two families."""
    first, second = _prediction_of(1.0, {"family": 0.0025}), _prediction_of(1.03, {"family": 0.0025}, strategy)
    assert probability_faster(first, second) == pytest.approx(probability, abs=1e-3)
    choices: Any = [SimpleNamespace(prediction=prediction, fits=True) for prediction in (first, second)]
    assert len(Advice(tuple(choices), (), {}).undecided()) == (probability < 0.8)
    choices[1].fits = False
    assert Advice(tuple(choices), (), {}).undecided() == []


def test_advice_says_what_it_cannot_tell() -> None:
    """Two choices of equal time, of two families: neither is faster in four of five cases."""
    advice = recommendation().advice
    first = advice.first.prediction
    rival = dataclasses.replace(
        first, query=dataclasses.replace(first.query, strategy="rival"),
        device_variance={**first.device_variance, "family": 0.01},
    )  # fmt: skip
    tie = dataclasses.replace(advice, choices=(advice.first, dataclasses.replace(advice.first, prediction=rival)))
    assert [choice.label for choice in tie.undecided()] == [Recommendation(tie).advice.choices[1].label]
    assert "cannot tell: " in Recommendation(tie).to_terminal() and "rival" in Recommendation(tie).to_terminal()
    assert "cannot tell " in Recommendation(tie).to_html()


@pytest.mark.parametrize(
    ("ms", "peak_bytes", "on_front"),
    [(2.0, 100, False), (2.0, 101, False), (2.0, 99, True), (1.0, 100, True), (1.0, 200, True), (0.5, 300, True)],
)
def test_choice_is_on_the_pareto_front_of_time_and_memory(ms: float, peak_bytes: int, on_front: bool) -> None:
    other: Any = SimpleNamespace(median_ns=1.0, peak_bytes=100)
    choice: Any = SimpleNamespace(median_ns=ms, peak_bytes=peak_bytes)
    assert _on_front(choice, [other, choice]) is on_front


def test_page_of_a_prediction_shows_its_times_and_inputs() -> None:
    page = Page(prediction().to_html())
    low, middle, high = prediction().interval_ms
    rows = {(row[0], row[1]): row[2] for row in page.tables["Where the time goes"][1:]}
    frame = prediction().parts()
    assert len(rows) == len(frame)
    assert all(shows(rows[row.phase, row.part], row.time_ms) for row in frame.itertuples())
    assert [row[0] for row in page.tables["What it rests on"][1:]] == list(inputs(prediction().prediction))
    text = prediction().to_html()
    assert f"Predicted: {middle:,.2f} ms per iteration ({low:,.2f} ms to {high:,.2f} ms" in text
    # It needs no plotting library.
    assert len(text) < 100_000 and "Bokeh.register" not in text


def test_prediction_survives_a_write_and_a_read(tmp_path: Path) -> None:
    run = prediction().write(tmp_path / "predicted")
    loaded = ringprof.load(tmp_path / "predicted")
    assert isinstance(loaded, ringprof.Analysis) and len(loaded.ranks) == 4 and run.predicted is not None
    assert "PREDICTED zigzag" in repr(prediction()) and "PREDICTED" in prediction().to_terminal()


def test_uncalibrated_masks_are_refused_by_name() -> None:
    windowed = ringprof.Workload(seq=131072, heads=16, kv_heads=8, head_dim=128, window=4096)
    b200 = read_calibration("b200")
    with_cudnn_alone = msgspec.structs.replace(b200, kernels=[b200.kernel("cudnn")])
    with pytest.raises(UnsupportedWorkloadError, match="no kernel is calibrated for packed documents and windows"):
        ringprof.predict("zigzag", windowed, machine=with_cudnn_alone)


def choice(label: str, **parts_ms: float) -> Any:
    """Return a stand-in for a choice whose time is the sum of its parts."""
    breakdown = SimpleNamespace(total=lambda part: parts_ms.get(part, 0.0) * 1e6)
    choice_prediction = SimpleNamespace(breakdown=breakdown, median_ns=sum(parts_ms.values()) * 1e6)
    return SimpleNamespace(label=label, prediction=choice_prediction)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"kernel": 1100.0, "peers": 10.0}, "b takes 0.909 % (10.0 ms) longer: +100 ms of attention, -90.0 ms of "
         "waiting for peers"),
        ({"kernel": 1010.0, "peers": 100.0}, "b takes 0.909 % (10.0 ms) longer: +10.0 ms of attention"),
        ({"kernel": 1030.0, "memory": 5.0, "peers": 75.0}, "b takes 0.909 % (10.0 ms) longer: +30.0 ms of attention, "
         "-25.0 ms of waiting for peers, +5.00 ms of merges and copies"),
    ],
)  # fmt: skip
def test_why_not_the_second_choice_names_gain_and_loss(other: dict[str, float], expected: str) -> None:
    choices: tuple[Choice, ...] = (choice("a", kernel=1000.0, peers=100.0), choice("b", **other))
    assert Advice(choices, (), {}).why_not_the_second() == expected


def test_invalid_prediction_arguments_are_refused() -> None:
    """An unknown transport was once predicted as NCCL's, and a name as text chose every strategy that contains it."""
    with pytest.raises(UsageError, match="hops 'zz' is not one of auto, nccl, copy"):
        ringprof.predict("zigzag", PROBLEM, machine="h200", hops="zz")
    with pytest.raises(UsageError, match="hosts must be at least 1, not 0"):
        ringprof.Cluster(hosts=0)
    with pytest.raises(UnknownStrategyError, match="no strategy 'nope' to choose; there are: zigzag, stripe, "):
        ringprof.advise(PROBLEM, machine="h200", strategies=("nope",))
    assert set(ringprof.advise(PROBLEM, machine="h200", strategies="zigzag").choices().choice) == {
        "zigzag", "zigzag, hops copied"
    }  # fmt: skip
