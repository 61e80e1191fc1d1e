"""Missing data of a run is reported before any metric."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.scale.pipeline import attribute
from ringprof.trace.columns import NO_DEVICE_ACTIVITIES, Notice
from tests.analysis.build import FLASH, Builder


def trace(rank: int = 0, *codes: str, computes: bool = True):
    b = Builder(rank=rank, world_size=2)
    if computes:
        b.run(FLASH, 0, 900, launched=1).run(FLASH, 950, 1000, launched=2)
    else:
        b.operate("aten::mm", 0, 1000)
    return replace(b.trace(), warnings=[Notice(code, f"about {code}") for code in codes])


def verdict(*traces):
    return findings_in_memory(attribute(list(traces))).verdict


def test_verdict_without_device_activity_names_only_that():
    (line,) = verdict(trace(0, NO_DEVICE_ACTIVITIES, computes=False), trace(1, NO_DEVICE_ACTIVITIES, computes=False))
    assert line.startswith("Missing: all that ran on the GPU.")


def test_rank_without_device_activity_is_left_out():
    attribution = attribute([trace(0), trace(1, NO_DEVICE_ACTIVITIES, computes=False)])
    assert [rank.rank for rank in attribution.ranks] == [0]
    lines = findings_in_memory(attribution).verdict
    assert lines[0] == "Missing: traces that are left out (see warnings)."


@pytest.mark.parametrize("code", ["truncated", "damaged_compression"])
def test_verdict_begins_with_truncated_traces(code):
    lines = verdict(trace(0, code), trace(1, code))
    assert (
        lines[0] == "Missing: the end of what is cut off, so that all figures are of what comes before (see warnings)."
    )


def test_complete_run_has_no_missing_line():
    assert not [line for line in verdict(trace(0), trace(1)) if line.startswith("Missing")]
