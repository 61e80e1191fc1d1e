"""Kept tapes against those that are made anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="a tape runs a strategy on shapes")

from msgspec.structs import replace as changed

from ringprof.prediction import schedule_cache
from ringprof.prediction.network import Cluster
from ringprof.prediction.query import Query
from ringprof.prediction.schedules import schedule_of, stand_in_schedule
from ringprof.record.dryrun.schedule import Schedule
from ringprof.run import Workload

HERE = Cluster(2, 2, nic_gbit=400.0)
PROBLEM = Workload(seq=4096, heads=8, kv_heads=4, head_dim=128)


@pytest.mark.parametrize(
    ("strategy", "causal"),
    [("zigzag", True), ("ring", True), ("ring", False), ("burst", True), ("ulysses", True), ("stripe", True),
     ("megatron", True), ("allgather", False)],
)  # fmt: skip
def test_another_length_is_as_if_made_anew(strategy: str, causal: bool) -> None:
    """Asked for some ranks first, for all then."""
    kept = schedule_cache.ScheduleCache()
    asked = Query(strategy, changed(PROBLEM, causal=causal), HERE, "cudnn")
    for seq in (4096, 2048, 16384, 4096):
        other = replace(asked, workload=changed(asked.workload, seq=seq))
        assert [one.rank for one in kept.of(other, HERE, [2]).programs] == [2]
        assert kept.of(other, HERE, None) == schedule_of(other, HERE, None)


def test_every_program_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links and rates change none; another length, other hops and another cluster do."""
    made: list[object] = []

    def counted(*given: Any) -> Schedule:
        made.append(given[-1])
        return stand_in_schedule(*given)

    monkeypatch.setattr(schedule_cache, "stand_in_schedule", counted)
    kept, asked = schedule_cache.ScheduleCache(), Query("zigzag", PROBLEM, HERE, "cudnn")
    for ranks in ([0], [3, 0], None, [1]):
        assert [one.rank for one in kept.of(asked, HERE, ranks).programs] == (ranks or [0, 1, 2, 3])
    kept.of(replace(asked, cluster=replace(HERE, nic_gbit=100.0)), replace(HERE, nic_gbit=100.0), None)
    assert made == [[0], [3], [1, 2]]
    kept.of(replace(asked, workload=changed(PROBLEM, seq=8192)), HERE, None)
    kept.of(replace(asked, hops="copy"), HERE, [0])
    one_host = Cluster(1, 4)
    kept.of(replace(asked, cluster=one_host), one_host, [0])
    assert made[3:] == [[0, 1, 2, 3], [0], [0]]
