"""Waterfalls of runs that separate different parts, reduced to the parts of all runs."""

from __future__ import annotations

import pytest

import ringprof
from ringprof.analysis.findings.comparison import combine_recordings, compare_measurements
from ringprof.analysis.findings.metric import Measurement, Metric, merged_parts, shared_parts
from ringprof.report.comparison import verdict_lines
from tests.loaded import analysis
from tests.paths import TRACES
from tests.renamed import with_gpu_named

SPLIT = {"peak": 50.0, "vendor_peak": 8.0, "kernel_limit": 20.0, "slower_kernel": 12.0, "repeated": 3.0,
         "slowdown": -2.0, "exposed_wire": 9.0}  # fmt: skip
NO_OTHER_KERNEL = {name: value for name, value in SPLIT.items() if name != "slower_kernel"}
WHOLE = {"peak": 50.0, "kernel": 40.0, "repeated": 3.0, "slowdown": -2.0, "exposed_wire": 9.0}


@pytest.mark.parametrize(
    ("other", "one_then", "other_then"),
    [
        (WHOLE, WHOLE, WHOLE),
        # The peak is not known, so the attention is not split.
        ({"attention": 90.0, "exposed_wire": 8.0}, {"attention": 91.0, "exposed_wire": 9.0}, None),
        # No solo rate, then no count of the blocks either: the kernel's loss holds both.
        ({"peak": 50.0, "kernel": 39.0, "repeated": 2.0, "exposed_wire": 9.0},
         {"peak": 50.0, "kernel": 38.0, "repeated": 3.0, "exposed_wire": 9.0}, None),
        ({"peak": 50.0, "kernel": 41.0, "exposed_wire": 9.0},
         {"peak": 50.0, "kernel": 41.0, "exposed_wire": 9.0}, None),
        # Wire, wait and imbalance are not separated.
        ({**WHOLE, "exposed_wire": 0.0, "exposed_unsplit": 9.0},
         {"peak": 50.0, "kernel": 40.0, "repeated": 3.0, "slowdown": -2.0, "exposed_unsplit": 9.0},
         {"peak": 50.0, "kernel": 40.0, "repeated": 3.0, "slowdown": -2.0, "exposed_unsplit": 9.0}),
    ],
)  # fmt: skip
def test_compared_parts_are_those_both_runs_distinguish(other, one_then, other_then):
    assert shared_parts([WHOLE, other]) == [one_then, other if other_then is None else other_then]
    assert shared_parts([other, WHOLE]) == [other if other_then is None else other_then, one_then]
    for parts in shared_parts([WHOLE, other]):
        assert sum(parts.values()) in (sum(WHOLE.values()), sum(other.values()))


def test_parts_of_the_kernel_are_compared_where_both_sides_know_them():
    assert shared_parts([SPLIT, SPLIT]) == [SPLIT, SPLIT] and shared_parts([SPLIT, WHOLE]) == [WHOLE, WHOLE]
    # No other kernel is known on one side: what another one would save is in the rest there.
    together = {**NO_OTHER_KERNEL, "kernel_limit": 32.0}
    assert shared_parts([SPLIT, NO_OTHER_KERNEL]) == [together, NO_OTHER_KERNEL]
    # No solo rate on one side: the slow-down is in the rest there.
    without = {name: value for name, value in SPLIT.items() if name != "slowdown"}
    assert shared_parts([SPLIT, without]) == [{**without, "kernel_limit": 18.0}, without]
    assert shared_parts([SPLIT, {"attention": 91.0, "exposed_wire": 9.0}])[0] == {
        "attention": 91.0,
        "exposed_wire": 9.0,
    }


def test_only_present_parts_are_merged():
    assert merged_parts([{"attention"}, {"attention", "launch_gaps"}]) == {}
    assert merged_parts([{"attention"}, {"peak", "kernel"}]) == {"peak": "attention", "kernel": "attention"}


def unknown_gpu(name: str, tmp_path) -> ringprof.Analysis:
    """Return the run as if recorded on a GPU without a published peak."""
    return ringprof.load(with_gpu_named(TRACES / name, "NVIDIA RTX PRO 6000", tmp_path / "unknown"))


def test_unknown_peak_does_not_change_the_comparison(tmp_path):
    known, unknown = analysis(TRACES / "h200x4-zigzag-65536"), unknown_gpu("h200x4-zigzag-65536", tmp_path)
    for pair in ((known, unknown), (unknown, known)):
        comparison = ringprof.compare(*pair)
        assert verdict_lines(comparison) == ["1: the same"]
        assert comparison.changes is not None
        assert {part.what: part.share for part in comparison.changes.parts if part.share} == {}
        assert {"waterfall.peak_ms", "waterfall.kernel_ms"}.isdisjoint(comparison.figures)
        (attention,) = (
            difference for difference in comparison.differences if difference.figure == "waterfall.attention_ms"
        )
        assert (attention.verdict, attention.ratio) == ("same", 1.0)
        for measurement in comparison.entries:
            values = measurement.values()
            assert "waterfall.peak" not in values and "waterfall.attention" in values
        split = ("peak", "vendor_peak", "kernel_limit", "slower_kernel", "repeated", "slowdown")
        assert comparison.merged == dict.fromkeys(split, "attention")


def test_parts_are_merged_per_recording():
    def recorded(label, parts):
        return Measurement(
            label, "run", {}, {f"waterfall.{name}_ms": Metric(value, "ms") for name, value in parts.items()}
        )

    base = combine_recordings([recorded("a", {"peak": 5.0, "kernel": 4.0}), recorded("b", {"peak": 5.0, "kernel": 6.0}),
                   recorded("c", {"peak": 5.0, "kernel": 5.0})])  # fmt: skip
    comparison = compare_measurements([base, recorded("d", {"attention": 10.0})])
    figure = comparison.entries[0].figures["waterfall.attention_ms"]
    assert (figure.value, figure.recordings) == (10.0, ((9.0,), (11.0,), (10.0,)))
