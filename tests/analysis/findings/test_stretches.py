"""Stretches without computation, against a walk over every moment at which something begins or ends."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from ringprof.analysis.findings.stretches import stretches_of
from ringprof.analysis.kinds.kinds import COMMUNICATION, COMPUTE
from tests.loaded import analysis
from tests.paths import TRACES

RUNS = ("h200x4-zigzag-65536", "h200x4-zigzag-65536-copied", "h200x2-decode-1048576", "h200x2-zigzag-65536-layer")


@pytest.mark.parametrize("name", RUNS)
def test_all_stretches_sum_to_what_is_exposed_and_idle(name: str) -> None:
    run = analysis(TRACES / name)
    ranks = run.findings.attribution.ranks
    stretches = stretches_of(ranks, 1_000_000)
    assert [stretch.time_ns for stretch in stretches] == sorted((s.time_ns for s in stretches), reverse=True)
    for rank in ranks:
        for what, total in (("exposed_comm", rank.breakdown.exposed_comm_ns), ("idle", rank.breakdown.idle_ns)):
            mine = sorted(stretch[2:4] for stretch in stretches if (stretch.rank, stretch.what) == (rank.rank, what))
            assert sum(end - start for start, end in mine) == total
            # Each is as long as it can be: none touches the next.
            assert all(left[1] < right[0] for left, right in pairwise(mine))
    assert stretches_of(ranks, 5)[:5] == stretches[:5]


def running(rows: Any, kinds: tuple[str, ...], start: int, end: int) -> bool:
    """Return whether an activity of the kinds runs in a span, by a comparison with each activity."""
    mask = rows.of(*kinds)
    return any(
        first < end and last > start
        for first, last in zip(rows.start_ns[mask].tolist(), rows.end_ns[mask].tolist(), strict=True)
    )


def test_only_communication_runs_in_an_exposed_stretch_and_nothing_in_an_idle_one() -> None:
    ranks = analysis(TRACES / "h200x4-zigzag-65536").findings.attribution.ranks
    rows = {rank.rank: rank.detail.rows() for rank in ranks}
    stretches = stretches_of(ranks, 30)
    assert {stretch.what for stretch in stretches} == {"exposed_comm", "idle"}
    for stretch in stretches:
        span = rows[stretch.rank], stretch.start_ns, stretch.end_ns
        communicates = running(span[0], COMMUNICATION, *span[1:])
        assert not running(span[0], COMPUTE, *span[1:])
        assert communicates == (stretch.what == "exposed_comm")
        assert stretch.what == "idle" or stretch.wait_ns + stretch.wire_ns == stretch.time_ns
        assert bool(stretch.cause) == (stretch.what == "idle")
