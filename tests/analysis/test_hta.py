"""HolisticTraceAnalysis as a second opinion on the overlap ratio.

It rounds each event inward to whole microseconds, hence the tolerance. It needs pandas below 3; where it cannot be
imported these tests are skipped.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest

from ringprof.analysis.attribution import attribute
from ringprof.trace.ranks import read_traces

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("run", ["h200x8-zigzag-131072", "h200x8-zigzag-131072-two-hosts"])
def test_the_overlap_ratio_is_within_three_tenths_of_a_point(run, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        analysis = pytest.importorskip(
            "hta.trace_analysis", reason="HolisticTraceAnalysis (with pandas below 3) is not here", exc_type=ImportError
        )
    folder = tmp_path / run
    shutil.copytree(DATA / run, folder)
    table = analysis.TraceAnalysis(trace_dir=str(folder)).get_comm_comp_overlap(visualize=False)
    theirs = dict(zip(table["rank"].tolist(), table["comp_comm_overlap_pctg"].tolist(), strict=True))
    ours = attribute(read_traces(sorted((DATA / run).iterdir()))).ranks
    assert len(theirs) == len(ours)
    for rank in ours:
        assert rank.breakdown.overlap_ratio is not None
        assert 100 * rank.breakdown.overlap_ratio == pytest.approx(theirs[rank.rank], abs=0.3)
