"""`ringprof.predict` and `ringprof.advise`: frames that add up, plots that show the same figures, the page."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="a prediction runs strategies on shapes")
pytest.importorskip("matplotlib", reason="plots need the plot extra")

from msgspec.structs import replace

import ringprof
from ringprof.errors import UnknownStrategyError, UnsupportedWorkloadError, UsageError
from ringprof.prediction.advise import Advice, Choice, Point, _on_front, crossings
from ringprof.prediction.api import Prediction, Recommendation
from ringprof.report import plots

PROBLEM = ringprof.Workload(seq=131072, heads=16, kv_heads=8, head_dim=128)
TWO_HOSTS = ringprof.Cluster(hosts=2, gpus_per_host=2, nic_gbit=200.0)


@cache
def advised() -> Recommendation:
    return ringprof.advise(PROBLEM, TWO_HOSTS, machine="h200", strategies=("burst", "ulysses", "zigzag"))


@cache
def foreseen() -> Prediction:
    return ringprof.predict("zigzag", PROBLEM, TWO_HOSTS, machine="h200")


def test_a_problem_is_a_workload_or_its_fields() -> None:
    fields = {"seq": 131072, "heads": 16, "kv_heads": 8, "head_dim": 128}
    hosts: Any = {"hosts": 2, "gpus_per_host": 2, "nic_gbit": 200.0}
    problem: Any = fields
    assert ringprof.predict("zigzag", problem, hosts, machine="h200").interval_ms == foreseen().interval_ms
    for wrong, said in (({**fields, "seq": "64k"}, "seq"), ("64k", "Workload")):
        with pytest.raises(UsageError, match=said):
            ringprof.predict("zigzag", wrong, hosts, machine="h200")  # type: ignore[arg-type]


def test_parts_add_up_to_the_simulated_time_of_the_slowest_rank() -> None:
    frame = foreseen().parts()
    timelines = foreseen().prediction.timelines
    assert frame.time_ms.sum() == pytest.approx(max(one.end_ns for one in timelines) / 1e6, rel=1e-6)
    assert set(frame.phase) == {"forward", "backward"} and set(frame.attrs["columns"]) == set(frame.columns)


def test_choices_are_in_the_order_of_their_times_and_share_one_probability() -> None:
    frame = advised().choices()
    assert frame.fits.all() and frame.middle_ms.is_monotonic_increasing
    assert frame.best.sum() == pytest.approx(1.0)
    assert (frame.low_ms < frame.middle_ms).all() and (frame.middle_ms < frame.high_ms).all()
    report = advised().report()["choices"]
    assert [round(ms, 4) for ms in frame.middle_ms] == [one["iteration_ms"]["p50"] for one in report]


@pytest.mark.parametrize(("name", "places"), [("tokens", 5), ("hosts", 4), ("nic", 6)])
def test_frames_and_plots_over_a_size_show_the_same(name: str, places: int) -> None:
    frame = advised().over(name)
    assert frame["at"].nunique() == places
    drawn = getattr(advised().plot, name)()
    lines = [line for line in drawn.lines if len(line.get_xdata()) == places]
    assert [line.get_label() for line in lines] == list(frame.choice.unique())
    for line in lines:
        mine = frame[frame.choice == line.get_label()]
        # Per GPU, of two to a host.
        flops = [
            replace(PROBLEM, seq=int(at)).model_flops() if name == "tokens" else PROBLEM.model_flops()
            for at in mine["at"]
        ]
        gpus = [2 * at if name == "hosts" else 4 for at in mine["at"]]
        speeds = [work / size / ms / 1e9 for work, size, ms in zip(flops, gpus, mine.middle_ms, strict=True)]
        assert list(line.get_ydata()) == pytest.approx(speeds)


def test_plots_of_choices_and_parts() -> None:
    drawn = advised().plot.choices()
    assert [tick.get_text() for tick in drawn.get_yticklabels()] == list(advised().choices().choice[:12])
    bars: list[Any] = list(foreseen().plot().patches)
    assert sum(bar.get_width() for bar in bars) == pytest.approx(foreseen().parts().time_ms.sum())


def test_choices_that_are_not_shown_are_counted() -> None:
    advice = advised().advice
    threefold = dataclasses.replace(advice, choices=advice.choices * 3)
    assert "\nand 3 more: --format json has them\n" in Recommendation(threefold).to_terminal()
    assert " more:" not in advised().to_terminal()
    assert "The slowest are in the table alone." in Recommendation(threefold).to_html()


def test_a_word_beside_a_line_stays_inside_the_picture() -> None:
    marks = [(2.0, "near the left"), (60.0, "near the right")]
    drawn = plots.bands("tokens", "speed", {"a": [(1.0, (1.0, 2.0, 3.0)), (64.0, (1.0, 2.0, 3.0))]}, marks)
    assert {text.get_text(): text.get_horizontalalignment() for text in drawn.texts} == {
        "near the left": "left", "near the right": "right",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("others", "at"),
    [
        # Ahead by a tenth at 1, behind by a tenth at 4: halfway on a logarithmic axis.
        ((1.1, 1 / 1.1), [2.0]),
        # Equal is neither: half a per cent either way is chance.
        ((1.004, 0.996), []),
        ((1.1, 1.2), []),
    ],
)
def test_crossings_by_hand(others: tuple[float, float], at: list[float]) -> None:
    points = [Point(x, (_told(1.0), _told(ms))) for x, ms in zip((1.0, 4.0), others, strict=True)]
    assert [place for place, _ in crossings(points)] == pytest.approx(at)


def _told(ms: float) -> Any:
    """A prediction of which only the time is asked."""
    return SimpleNamespace(median_ns=ms * 1e6)


@pytest.mark.parametrize(
    ("ms", "peak_bytes", "on_front"),
    [(2.0, 100, False), (2.0, 101, False), (2.0, 99, True), (1.0, 100, True), (1.0, 200, True), (0.5, 300, True)],
)
def test_a_choice_is_on_the_front_where_nothing_faster_needs_as_little_memory(
    ms: float, peak_bytes: int, on_front: bool
) -> None:
    other: Any = SimpleNamespace(median_ns=1.0, peak_bytes=100)
    one: Any = SimpleNamespace(median_ns=ms, peak_bytes=peak_bytes)
    assert _on_front(one, [other, one]) is on_front


def test_a_prediction_is_written_and_read_again(tmp_path: Path) -> None:
    run = foreseen().write(tmp_path / "predicted")
    loaded = ringprof.load(tmp_path / "predicted")
    assert isinstance(loaded, ringprof.Analysis) and len(loaded.ranks) == 4 and run.predicted is not None
    assert "PREDICTED zigzag" in repr(foreseen()) and "PREDICTED" in foreseen().to_terminal()


def test_masks_are_refused_by_name_where_nothing_is_calibrated_for_them() -> None:
    windowed = ringprof.Workload(seq=131072, heads=16, kv_heads=8, head_dim=128, window=4096)
    with pytest.raises(UnsupportedWorkloadError, match="no kernel is calibrated for packed documents and windows"):
        ringprof.predict("zigzag", windowed, machine="h100")
    with pytest.raises(UsageError, match="of documents and windows': nothing measured"):
        ringprof.predict("zigzag", windowed, machine="h100", kernel="flash-attn-3")


def choice(label: str, **parts_ms: float) -> Any:
    """A choice that takes as long as its parts together."""
    spans = SimpleNamespace(total=lambda part: parts_ms.get(part, 0.0) * 1e6)
    prediction = SimpleNamespace(spans=spans, median_ns=sum(parts_ms.values()) * 1e6)
    return SimpleNamespace(label=label, prediction=prediction)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"kernel": 1100.0, "peers": 10.0}, "b takes 0.9 % (10.00 ms) longer: +100.00 ms of attention, -90.00 ms of "
         "waiting for peers"),
        ({"kernel": 1010.0, "peers": 100.0}, "b takes 0.9 % (10.00 ms) longer: +10.00 ms of attention"),
    ],
)  # fmt: skip
def test_what_the_second_gains_is_said_where_it_loses_more_than_the_difference(
    other: dict[str, float], said: str
) -> None:
    choices: tuple[Choice, ...] = (choice("a", kernel=1000.0, peers=100.0), choice("b", **other))
    assert Advice(choices, (), (), (), ()).why_not_the_second() == said


def test_what_cannot_be_meant_is_refused() -> None:
    """Hops that are none were foreseen as NCCL's, and one name as text chose every strategy whose name is in it."""
    with pytest.raises(UsageError, match="hops 'zz' is not one of auto, nccl, copy"):
        ringprof.predict("zigzag", PROBLEM, machine="h200", hops="zz")
    with pytest.raises(UsageError, match="hosts must be at least 1, not 0"):
        ringprof.Cluster(hosts=0)
    with pytest.raises(UnknownStrategyError, match="advise has no strategy 'nope' to choose; it has: zigzag, stripe, "):
        ringprof.advise(PROBLEM, machine="h200", strategies=("nope",))
    assert set(ringprof.advise(PROBLEM, machine="h200", strategies="zigzag").choices().choice) == {
        "zigzag", "zigzag, hops copied"
    }  # fmt: skip
