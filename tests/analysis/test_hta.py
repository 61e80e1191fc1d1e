"""HolisticTraceAnalysis as a second opinion on the overlap ratio and the temporal breakdown, through ``run.hta()``.

It rounds each event inward to whole microseconds, hence the tolerances. It needs pandas below 3; where it cannot be
imported these tests are skipped.
"""

from __future__ import annotations

import sys
import warnings

import pytest

from ringprof.errors import InputError, MissingExtraError
from tests.loaded import analysis
from tests.paths import ROOT
from tests.trace.test_nsys import export

RUNS = [
    *sorted(path for path in (ROOT / "tests" / "data").glob("h200*") if path.is_dir()),
    *sorted(path.parent for path in (ROOT / "traces").glob("h200*/run.json")),
]


@pytest.fixture(params=RUNS, ids=lambda path: path.name)
def both(request):
    """(theirs, ours) of one folder of traces."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(
            "hta.trace_analysis", reason="HolisticTraceAnalysis (with pandas below 3) is not here", exc_type=ImportError
        )
        # It knows no marked iterations: both look at the whole trace.
        run = analysis(request.param, window="trace")
        return run.hta(), run


@pytest.mark.filterwarnings("ignore")
def test_the_overlap_ratio_is_within_three_tenths_of_a_point(both):
    theirs, ours = both
    table = theirs.get_comm_comp_overlap(visualize=False)
    ratios = dict(zip(table["rank"].tolist(), table["comp_comm_overlap_pctg"].tolist(), strict=True))
    assert len(ratios) == len(ours.ranks)
    for rank in ours.attribution.ranks:
        assert rank.breakdown.overlap_ratio is not None
        if "copy_engine" in rank.breakdown.kinds:
            # To it a peer-to-peer copy is memory: where copies carry the hops it finds nothing to overlap.
            assert ratios[rank.rank] == 0
            continue
        assert 100 * rank.breakdown.overlap_ratio == pytest.approx(ratios[rank.rank], abs=0.3)


@pytest.mark.filterwarnings("ignore")
def test_the_temporal_breakdown_is_within_two_microseconds_an_activity(both):
    theirs, ours = both
    table = theirs.get_temporal_breakdown(visualize=False).set_index("rank")
    for rank in ours.attribution.ranks:
        figures, row = rank.breakdown, table.loc[rank.rank]
        # Of each activity up to 2 us is lost to the rounding; what is lost shows as idle there.
        lost = 2 * sum(kind.calls for kind in figures.kinds.values())
        assert figures.wall_ns / 1e3 == pytest.approx(row["kernel_time(us)"], abs=2)
        assert figures.compute_ns / 1e3 == pytest.approx(row["compute_time(us)"], abs=lost)
        beside = figures.exposed_comm_ns + figures.exposed_memory_ns
        assert beside / 1e3 == pytest.approx(row["non_compute_time(us)"], abs=lost)
        assert figures.idle_ns / 1e3 == pytest.approx(row["idle_time(us)"], abs=lost)


def test_without_it_the_error_names_the_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "hta.trace_analysis", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ringprof\[hta\]' 'pandas<3'"):
        analysis(RUNS[0]).hta()


def test_it_is_not_given_what_it_cannot_read(tmp_path):
    with pytest.raises(InputError, match="reads Kineto files only"):
        analysis(export(tmp_path / "one.sqlite", 41)).hta()
