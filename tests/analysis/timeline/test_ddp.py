"""DistributedDataParallel on two ranks over gloo, recorded with torch 2.13: two AdamW steps, four all-reduces.

The expected values are sums over the events in the files.
"""

from __future__ import annotations

import gzip
import json
from decimal import Decimal

import pytest

from ringprof import load
from tests.paths import DATA

FOLDER = DATA / "cpu2-ddp-gloo"


@pytest.fixture(scope="module")
def ranks():
    return load(FOLDER).attribution.ranks


def events(rank):
    text = gzip.decompress((FOLDER / f"rank{rank}.json.gz").read_bytes())
    return [event for event in json.loads(text, parse_float=Decimal)["traceEvents"] if event["ph"] == "X"]


def nanoseconds(spans):
    """Return the time that any of the spans covers."""
    covered, until = 0, -1
    for start, end in sorted(spans):
        covered += max(0, end - max(start, until))
        until = max(until, end)
    return covered


@pytest.mark.parametrize("rank", [0, 1])
def test_gloo_is_communication_and_ddp_leaves_no_gap(ranks, rank):
    gloo = [
        (int(event["ts"] * 1000), int((event["ts"] + event["dur"]) * 1000))
        for event in events(rank)
        if event["name"].startswith("gloo:")
    ]
    assert len(gloo) == 4
    breakdown = ranks[rank].breakdown
    all_reduce = breakdown.kinds["all_reduce"]
    assert (all_reduce.calls, all_reduce.time_ns) == (4, nanoseconds(gloo))
    assert breakdown.comm_ns == nanoseconds(gloo)
    # Nothing computes while gloo's worker reduces the last bucket: all of it is exposed, none idle.
    assert breakdown.exposed_comm_ns == nanoseconds(gloo)
    assert {kind for kind in breakdown.kinds if kind.startswith(("all_", "send", "broad", "comm"))} == {"all_reduce"}


def test_the_figures_of_rank_0(ranks):
    # 6792.953 + 154.278 + 808.257 + 92.244 µs, which do not overlap.
    assert ranks[0].breakdown.exposed_comm_ns == 7_847_732
    assert [rank.breakdown.kinds["optimizer"].calls > 0 for rank in ranks] == [True, True]


def test_the_verdict_names_the_all_reduce():
    assert "all-reduce" in " ".join(load(FOLDER).verdict)
