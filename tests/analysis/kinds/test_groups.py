"""Communication of one process group, separated from that of other groups."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.analysis.findings.summary import summarise
from ringprof.analysis.timeline.window import Focus
from ringprof.errors import UsageError
from ringprof.report import as_json, terminal
from ringprof.scale.pipeline import attribute
from tests.analysis.build import FLASH, NCCL, Builder, collective
from tests.analysis.sweep import sweep

CP = {"group": "4", "group_description": "CONTEXT_PARALLEL_GROUP", "group_ranks": (0, 1), "group_size": 2}
PP = {"group": "7", "group_description": "PIPELINE", "group_ranks": (0, 2), "group_size": 2}


def training(rank=0):
    """Build a ring hop and a pipeline send that overlaps it, beside a little computation."""
    b = Builder(rank=rank, world_size=2)
    b.run(FLASH, 0, 1000, launched=10)
    b.batch(100, 500, 2000, to=1 - rank, source=1 - rank, tensors=1, **CP)
    b.run(NCCL, 1500, 3000, launched=200, own=collective("send", destination_rank=2, **PP), stream=30)
    b.run(FLASH, 2500, 2600, launched=210)
    return b.run("Memset (Device)", 2900, 3100, launched=220, category=2)


def attribution_of_group(group, *builders):
    return attribute([b.trace() for b in builders or (training(0), training(1))], focus=Focus(group=group))


@pytest.mark.parametrize("group", ["4", "context_parallel_group", "0,1", "0-1", "CONTEXT*", "tp,*parallel*", "3-5;0-1"])
def test_only_communication_of_the_chosen_group_counts(group):
    for rank in attribution_of_group(group).ranks:
        figures = rank.breakdown
        assert (figures.comm_ns, figures.overlapped_ns, figures.exposed_comm_ns) == (1500, 500, 1000)
        assert figures.exposed_other_groups_ns == 900
        assert (figures.exposed_memory_ns, figures.idle_ns, figures.wall_ns) == (100, 0, 3100)
        assert {kind: times.time_ns for kind, times in figures.kinds.items()} == {
            "flash_fwd": 1100,
            "send_recv": 1500,
            "memset": 200,
            "other_groups": 1500,
        }
        assert [hop.parts[0].transfer.group[0] for hop in rank.hops] == ["4"]


def test_all_communication_counts_without_a_chosen_group():
    (rank, _) = attribute([training(0).trace(), training(1).trace()]).ranks
    assert rank.breakdown.comm_ns == 2500
    assert len(rank.hops) == 2
    assert rank.breakdown.exposed_other_groups_ns == 0


def test_several_groups_can_be_chosen():
    for group in ("4;7", "*", "*PARALLEL*,PIPE*", "0,1;0,2"):
        assert attribution_of_group(group).ranks[0].breakdown.comm_ns == 2500


@pytest.mark.parametrize("group", ["mesh_cp", "MESH_C?", "4", "0-3"])
def test_derived_strategy_groups_count_as_their_parent_group(group):
    # Two rings of two ranks within the context-parallel group of four; the data-parallel group belongs to others.
    inner = {"group": "9", "group_description": "ringprof:read_inner", "group_ranks": (0, 1), "group_size": 2}
    b = Builder(world_size=8).run(FLASH, 0, 1000, launched=10)
    b.batch(100, 1000, 2000, to=1, source=1, tensors=1, **inner)
    sharded = collective("allreduce", group="5", group_description="mesh_dp", group_ranks=(0, 4), group_size=2)
    b.run("ncclDevKernel_AllReduce", 2000, 2500, launched=200, own=sharded, stream=30)
    trace = replace(b.trace(), groups={"4": (0, 1, 2, 3), "mesh_cp": (0, 1, 2, 3), "5": (0, 4)})
    (rank,) = attribute([trace], focus=Focus(group=group)).ranks
    assert (rank.breakdown.exposed_comm_ns, rank.breakdown.exposed_other_groups_ns) == (1000, 500)
    (rank,) = attribute([trace], focus=Focus(group="mesh_dp")).ranks
    assert (rank.breakdown.exposed_comm_ns, rank.breakdown.exposed_other_groups_ns) == (500, 1000)


def test_unknown_group_error_lists_the_groups():
    with pytest.raises(UsageError, match=r"--group 'dp'.* 4 \(CONTEXT_PARALLEL_GROUP\) of ranks 0,1; 7 \(PIPELINE\)"):
        attribution_of_group("dp")


def test_kernels_without_a_record_are_excluded_and_counted():
    b = training(0).run(NCCL, 3100, 3200, launched=300)
    attribution = attribution_of_group("4", b, training(1))
    assert [(warning.code, warning.count) for warning in attribution.warnings] == [("group_unknown", 1)]
    assert attribution.ranks[0].breakdown.exposed_other_groups_ns == 1000


def test_peer_copies_belong_to_the_ring():
    b = training(0).run("Memcpy PtoP (Device -> Device)", 3100, 3400, launched=300, category=1, size=64)
    assert attribution_of_group("4", b, training(1)).ranks[0].breakdown.exposed_comm_ns == 1300


def test_report_shows_other_groups_as_a_separate_part():
    attribution = attribution_of_group("4")
    summary = summarise(attribution)
    *parts, wall = summary.parts
    assert sum(part.mean_ns for part in parts) == wall.mean_ns
    assert "exposed_other_groups" in [part.name for part in parts]
    report = as_json.as_dict(findings_in_memory(attribution), source="trace", paths=[])
    assert report["ranks"][0]["exposed_other_groups_ns"] == 900
    assert "other groups" in terminal.render(findings_in_memory(attribution))


def test_parts_of_random_intervals_equal_a_sweep():
    """Check random intervals of four classes against a sweep over all edges."""
    random = np.random.default_rng(3)
    for _ in range(20):
        b, events = Builder(world_size=1), []
        for number in range(30):
            start = int(random.integers(0, 400))
            end, choice = start + int(random.integers(0, 60)), int(random.integers(0, 4))
            events.append((start, end, ("compute", "comm", "others", "memory")[choice]))
            own = {1: collective("allreduce", **CP), 2: collective("allreduce", **PP)}.get(choice)
            name = FLASH if choice == 0 else NCCL if choice < 3 else "Memset (Device)"
            b.run(name, start, end, launched=number, own=own, category=2 if choice == 3 else 0)
        figures = attribution_of_group("4", b).ranks[0].breakdown
        # The sweep lacks the other groups' activities: the time that only they cover is idle there.
        expected = sweep([event for event in events if event[2] != "others"])
        assert figures.compute_ns == expected["compute"]
        assert figures.exposed_comm_ns == expected["exposed_comm"]
        other_groups_ns = sum(
            any(event[0] <= time < event[1] for event in events if event[2] == "others")
            and not any(event[0] <= time < event[1] for event in events if event[2] in ("compute", "comm"))
            for time in range(500)
        )
        assert figures.exposed_other_groups_ns == other_groups_ns
