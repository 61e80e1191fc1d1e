"""Ring steps on passes with known steps, and on recorded runs without their annotations."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from ringprof.analysis.rank import in_memory_reader
from ringprof.analysis.steps.blocks import AttentionRuns, StepKey, number_runs_like
from ringprof.analysis.steps.steps import Step, steps_in_memory
from ringprof.scale.pipeline import attribute
from tests.analysis.build import FLASH, NCCL, Builder, collective
from tests.analysis.rings import BACKWARD, causal, ring_pass, uniform_blocks
from tests.analysis.test_real_runs import NVLINK, TWO_HOSTS, attribution_of
from tests.analysis.transfers.test_hops import BYTES

NAMES = {"ringprof": "ringprof::{phase}/step={step}/block", "annotation": "ring_step_{phase}_{step}", "order": None}


def steps_of(builders):
    return steps_in_memory(attribute([b.trace() for b in builders]).ranks).steps


def steps_of_rank(steps, rank, phase, call=0):
    return [step for step in steps if (step.rank, step.phase, step.call) == (rank, phase, call)]


@pytest.mark.parametrize("source", NAMES)
def test_block_longer_than_its_hop_hides_it(source):
    steps = steps_of(ring_pass(block=uniform_blocks(900), hop_ns=400, names=NAMES[source]))
    assert {step.source for step in steps} == {source}
    forward = steps_of_rank(steps, 2, "fwd")
    assert [(s.step, s.start_ns, s.end_ns) for s in forward] == [
        (0, 0, 1000), (1, 1000, 2000), (2, 2000, 3000), (3, 3000, 3900),
    ]  # fmt: skip
    assert [(s.block_ns, s.compute_ns) for s in forward] == [(900, 910)] * 3 + [(900, 900)]
    assert [(s.hops, s.bytes, s.wait_ns, s.wire_ns) for s in forward] == [(1, 2 * BYTES, 0, 400)] * 3 + [(0, 0, 0, 0)]
    assert [(s.exposed_ns, s.exposed_wire_ns, s.bound) for s in forward] == [(0, 0, "compute")] * 4


@pytest.mark.parametrize("source", NAMES)
def test_exposed_time_is_charged_to_the_step_of_its_block(source):
    steps = steps_of(ring_pass(block=uniform_blocks(600), hop_ns=800, names=NAMES[source]))
    forward = steps_of_rank(steps, 0, "fwd")
    # Block and merge overlap 610 of the hop's 800 ns.
    assert [(s.exposed_ns, s.exposed_wire_ns, s.bound) for s in forward] == [(190, 190, "wire")] * 3 + [
        (0, 0, "compute")
    ]


@pytest.mark.parametrize("source", NAMES)
def test_gradients_hide_behind_the_next_block(source):
    backward = steps_of_rank(steps_of(ring_pass(names=NAMES[source])), 1, "bwd")
    # K and V move in steps 0 to 2, the previous step's gradients in 1 to 3; no block overlaps the last gradients.
    assert [(s.step, s.hops) for s in backward] == [(0, 1), (1, 2), (2, 2), (3, 2)]
    assert [s.exposed_ns for s in backward] == [0, 0, 0, 400]
    assert backward[3].end_ns == 8400


@pytest.mark.parametrize("source", NAMES)
def test_steps_without_computation_count_for_waiting_ranks(source):
    # Rank 0 computes in step 0 only, but its waits are still assigned to steps.
    builders = ring_pass(block=causal(900), hop_ns=950, names=NAMES[source])
    steps = steps_of(builders)
    assert [(s.step, s.block_ns, s.hops) for s in steps_of_rank(steps, 0, "fwd")] == [
        (0, 900, 1),
        (1, 0, 1),
        (2, 0, 1),
        (3, 0, 0),
    ]
    assert [s.exposed_ns for s in steps_of_rank(steps, 0, "fwd")] == [40, 950, 950, 0]
    assert [(s.step, s.block_ns) for s in steps_of_rank(steps, 3, "fwd")] == [(step, 900) for step in range(4)]
    assert [(s.step, s.hops) for s in steps_of_rank(steps, 0, "bwd")] == [
        (s.step, s.hops) for s in steps_of_rank(steps, 3, "bwd")
    ]


@pytest.mark.parametrize("source", NAMES)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_each_layer_is_a_separate_call(world, source):
    steps = steps_of(ring_pass(world=world, layers=3, names=NAMES[source]))
    for rank in range(world):
        for phase in ("fwd", "bwd"):
            numbers = [(step.call, step.step) for step in steps if (step.rank, step.phase) == (rank, phase)]
            assert numbers == [(call, step) for call in range(3) for step in range(world)]


def test_last_gradient_hop_belongs_to_its_layer():
    steps = steps_of(ring_pass(layers=2))
    for call in (0, 1):
        assert [s.hops for s in steps_of_rank(steps, 0, "bwd", call)] == [1, 2, 2, 2]


def test_a_step_that_waits_for_a_peer_shows_the_wait():
    builders = ring_pass(world=4, block=uniform_blocks(900), hop_ns=950)
    late = builders[2]
    # Rank 2 posts its first hop 700 ns late, and all ranks end together.
    for rank, b in enumerate(builders):
        start, end = (700, 1650) if rank == 2 else (0, 1650)
        rows = [row for row in b.activities if row[5] == 20]
        b.activities[b.activities.index(rows[0])] = (start, end, *rows[0][2:])
    assert late.rank == 2
    first = steps_of_rank(steps_of(builders), 0, "fwd")[0]
    assert (first.wait_ns, first.wire_ns) == (700, 950)
    assert first.exposed_ns == 90


def test_steps_without_launch_records_follow_device_order():
    builders = ring_pass(block=uniform_blocks(900), hop_ns=400)
    for b in builders:
        b.launches.clear()
    steps = steps_of(builders)
    assert [(s.step, s.hops, s.block_ns) for s in steps_of_rank(steps, 0, "fwd")] == [
        (s, int(s < 3), 900) for s in range(4)
    ]


def test_single_rank_steps_with_exposed_time_have_no_bound():
    steps = steps_of(ring_pass(block=uniform_blocks(600), hop_ns=800)[:1])
    assert [(s.exposed_ns, s.exposed_wire_ns, s.bound) for s in steps_of_rank(steps, 0, "fwd")][:2] == [
        (190, None, None)
    ] * 2
    assert steps_of_rank(steps, 0, "fwd")[3].bound == "compute"


def test_no_steps_without_hops_or_names():
    assert steps_of([Builder(world_size=1).run(FLASH, 0, 10, launched=1).run(BACKWARD, 20, 30, launched=2)]) == ()
    assert steps_of([Builder(world_size=1).run(NCCL, 0, 10, launched=1)]) == ()


@pytest.mark.parametrize("run", [NVLINK, TWO_HOSTS])
def test_ring_steps_account_for_all_exposed_communication(run):
    attribution = attribution_of(run)
    steps = steps_in_memory(attribution.ranks).steps
    assert len(steps) == 8 * 16
    for rank in attribution.ranks:
        rank_steps = [step for step in steps if step.rank == rank.rank]
        assert [(s.phase, s.step) for s in rank_steps] == [(phase, s) for phase in ("fwd", "bwd") for s in range(8)]
        assert sum(s.exposed_ns for s in rank_steps) == rank.breakdown.exposed_comm_ns
        assert sum(s.hops for s in rank_steps) == len(rank.hops)
        assert sum(s.bytes or 0 for s in rank_steps) == sum(hop.sent_bytes or 0 for hop in rank.hops)
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(rank_steps))


@pytest.mark.parametrize("run", [NVLINK, TWO_HOSTS])
def test_steps_by_order_equal_steps_by_name(run):
    attribution = attribution_of(run)
    named = steps_in_memory(attribution.ranks).steps
    ranks = []
    for rank in attribution.ranks:
        trace = rank.classified.trace
        nowhere = np.zeros(len(trace.annotations.start_ns), np.bool_)
        columns = msgspec.structs.asdict(trace.annotations)
        without_annotations = replace(
            trace, annotations=type(trace.annotations)(**{k: v[nowhere] for k, v in columns.items()})
        )
        detail = replace(rank.detail, classified=replace(rank.classified, trace=without_annotations))
        ranks.append(dataclasses.replace(rank, read_detail=in_memory_reader(detail)))
    inferred = steps_in_memory(ranks).steps
    assert Counter(step.source for step in inferred) == {"order": len(named)}
    values = [name for name in Step.__struct_fields__ if name != "source"]
    assert [[getattr(s, name) for name in values] for s in inferred] == [
        [getattr(s, name) for name in values] for s in named
    ]


@pytest.mark.parametrize(("hop_ns", "exposed", "bound"), [(630, 20, "compute"), (631, 21, "wire")])
def test_exposed_time_below_2_percent_of_a_step_is_negligible(hop_ns, exposed, bound):
    # Block and merge overlap 610 of each step's 1000 ns.
    step = steps_of_rank(steps_of(ring_pass(block=uniform_blocks(600), hop_ns=hop_ns)), 1, "fwd")[1]
    assert (step.end_ns - step.start_ns, step.exposed_ns, step.bound) == (1000, exposed, bound)


@pytest.mark.parametrize(("late", "exposed_wire", "bound"), [(805, 195, "wire"), (806, 194, "peer")])
def test_wire_is_the_bound_from_half_of_the_exposed_time(late, exposed_wire, bound):
    # The first hop lasts until 1000, 390 longer than block and merge, and moves nothing before the late rank arrives.
    builders = ring_pass(block=uniform_blocks(600), hop_ns=800)
    for rank, b in enumerate(builders):
        hop = next(row for row in b.activities if row[5] == 20)
        b.activities[b.activities.index(hop)] = (late if rank == 2 else 0, 1000, *hop[2:])
    step = steps_of_rank(steps_of(builders), 0, "fwd")[0]
    assert (step.exposed_ns, step.exposed_wire_ns, step.bound) == (390, exposed_wire, bound)


def test_block_time_is_the_union_of_its_own_kernels():
    # The second kernel of step 0 begins during the first, and ends after the start of step 1's on another stream.
    b = Builder(world_size=1)
    for step, (launched, spans) in enumerate([(10, [(0, 1000), (400, 1300)]), (500, [(1100, 1500)])]):
        for number, (start, end) in enumerate(spans):
            b.run(FLASH, start, end, launched=launched + 10 * (number + 1), stream=7 + step)
        b.mark(f"ringprof::fwd/step={step}/block", launched, launched + 100)
    b.run(NCCL, 0, 200, launched=5, stream=20)
    first, second = steps_of([b])
    assert (first.block_ns, second.block_ns) == (1300, 400)


@pytest.mark.parametrize("name", ["_allgather_base", "_reduce_scatter_base"])
def test_collective_hidden_by_a_block_is_a_hop_of_its_step(name):
    builders = [Builder(rank=rank, world_size=2) for rank in range(2)]
    for b in builders:
        own = collective(name, group_ranks=(0, 1), group_size=2)
        b.run(NCCL, 0, 700, launched=10, own=own, stream=20)
        b.mark("ringprof::fwd/step=0/block", 20, 80).run(FLASH, 0, 600, launched=30)
        b.mark("ringprof::fwd/step=1/block", 90, 150).run(FLASH, 700, 1300, launched=100)
    steps = steps_of(builders)
    assert [(s.rank, s.step, s.hops, s.wire_ns, s.exposed_ns) for s in steps] == [
        (0, 0, 1, 700, 100), (0, 1, 0, 0, 0), (1, 0, 1, 700, 100), (1, 1, 0, 0, 0),
    ]  # fmt: skip


def runs_with(hops_before, phase, iteration):
    rows = np.arange(len(hops_before))
    return AttentionRuns(rows, rows, rows, hops_before, phase, iteration)


def test_steps_are_numbered_by_the_count_of_preceding_hops():
    model = runs_with((0, 1, 1, 2), ("fwd", "fwd", "bwd", "bwd"), (0, 0, 0, 0))
    keys = [StepKey(0, "fwd", 0, 0), StepKey(0, "fwd", 0, 1), StepKey(0, "bwd", 0, 0), StepKey(0, "bwd", 0, 1)]
    assert number_runs_like(runs_with((1, 1, 2), ("fwd", "bwd", "bwd"), (0, 0, 0)), model, keys) == keys[1:]
    assert number_runs_like(runs_with((1, 1), ("fwd", "fwd"), (0, 0)), model, keys) is None
    assert number_runs_like(runs_with((1,), ("fwd",), (1,)), model, keys) is None
