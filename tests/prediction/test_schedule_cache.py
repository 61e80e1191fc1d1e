"""Cached schedules against new ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="a dry run runs a strategy on shapes")

from msgspec.structs import replace as changed

from ringprof.dryrun.schedule import Schedule
from ringprof.prediction import schedules
from ringprof.prediction.network import Cluster
from ringprof.prediction.query import Query
from ringprof.prediction.schedules import ScheduleCache, schedule, schedule_of
from ringprof.workload.workload import Workload

CLUSTER = Cluster(2, 2, nic_gbit=400.0)
PROBLEM = Workload(seq=4096, heads=8, kv_heads=4, head_dim=128)


@pytest.mark.parametrize(
    ("strategy", "causal"),
    [("zigzag", True), ("ring", True), ("ring", False), ("burst", True), ("ulysses", True), ("stripe", True),
     ("megatron", True), ("allgather", False)],
)  # fmt: skip
def test_a_cached_schedule_equals_a_new_one(strategy: str, causal: bool) -> None:
    """Query some ranks first, then all."""
    cache = ScheduleCache()
    query = Query(strategy, changed(PROBLEM, causal=causal), CLUSTER, "cudnn")
    for seq in (4096, 2048, 16384, 4096):
        other_query = replace(query, workload=changed(query.workload, seq=seq))
        assert [program.rank for program in cache.of(other_query, CLUSTER, [2]).programs] == [2]
        assert cache.of(other_query, CLUSTER, None) == schedule_of(other_query, CLUSTER, None)


def test_every_program_is_created_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links and rates need no new program; another length, transport or cluster does."""
    created: list[object] = []

    def count_calls(*arguments: Any, **options: Any) -> Schedule:
        created.append(options["ranks"])
        return schedule(*arguments, **options)

    monkeypatch.setattr(schedules, "schedule", count_calls)
    cache, query = ScheduleCache(), Query("zigzag", PROBLEM, CLUSTER, "cudnn")
    for ranks in ([0], [3, 0], None, [1]):
        assert [program.rank for program in cache.of(query, CLUSTER, ranks).programs] == (ranks or [0, 1, 2, 3])
    cache.of(replace(query, cluster=replace(CLUSTER, nic_gbit=100.0)), replace(CLUSTER, nic_gbit=100.0), None)
    assert created == [[0], [3], [1, 2]]
    cache.of(replace(query, workload=changed(PROBLEM, seq=8192)), CLUSTER, None)
    cache.of(replace(query, hops="copy"), CLUSTER, [0])
    one_host = Cluster(1, 4)
    cache.of(replace(query, cluster=one_host), one_host, [0])
    assert created[3:] == [[0, 1, 2, 3], [0], [0]]


def test_parameters_of_any_type_are_taken() -> None:
    """A strategy of a user may have a list as a parameter."""
    query = Query("tests.prediction.user_strategies:Chatty", PROBLEM, CLUSTER, "cudnn", params={"extra": [7]})
    assert schedule_of(query, CLUSTER, [0]).params["extra"] == [7]
