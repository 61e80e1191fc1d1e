"""Waterfalls compared with a sweep over instants, on synthetic passes and on every committed run."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from ringprof.analysis.exposure import exposure_of
from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.analysis.findings.parts import WATERFALL_LABELS
from ringprof.analysis.findings.waterfall import ATTENTION_PARTS
from ringprof.analysis.intervals import length_ns
from ringprof.analysis.kinds.kinds import COMMUNICATION, COMPUTE, KINDS, MEMORY
from ringprof.run import Work
from ringprof.scale.pipeline import attribute
from tests.analysis.build import FLASH, NCCL, Builder
from tests.analysis.idle_oracle import idle_by_cause, run_traces_of
from tests.analysis.recorded import recorded_run
from tests.analysis.rings import LENGTH, MERGING, causal, ring_pass, uniform_blocks
from tests.analysis.transfers.test_hops import ring
from tests.loaded import analysis
from tests.paths import ROOT

RUNS = [
    *sorted(path.parent for path in (ROOT / "traces").glob("h200*/run.json")),
    *sorted(path for path in (ROOT / "tests" / "data").glob("h200*") if path.is_dir()),
    *sorted((ROOT / "tests" / "data").glob("waits-*")),
]
NONE: MappingProxyType[int, Any] = MappingProxyType({})
ATTENTION = set(ATTENTION_PARTS)
FIRST = {
    "attention": {"flash_fwd", "flash_bwd"},
    "recurrence": {"recurrence"},
    "matrix_products": {"gemm", "convolution"},
    "optimizer": {"optimizer"},
    "merge_and_copies": {"merge", "permute"},
}
"""Kinds of computation by precedence: an instant counts for the first that runs, any other is ``other_compute``."""


def waterfall_of(attribution):
    return findings_in_memory(attribution).waterfall


def instants(rank, blocks):
    """Sum the rank's window by what runs: (computes, on the wire, split unknown, communicates, memory), then
    whether each of `FIRST` does. Time blocked on a peer communicates."""
    columns, activity = rank.classified.trace.activities, rank.window.activities()
    edges = []
    for row in activity.tolist():
        kind = KINDS[rank.classified.kind[row]]
        name = next(n for n, kinds in (("k", COMPUTE), ("c", COMMUNICATION), ("m", MEMORY)) if kind in kinds)
        edges.append((int(columns.start_ns[row]), int(columns.end_ns[row]), name))
        edges += [(*edges[-1][:2], part) for part, kinds in FIRST.items() if kind in kinds]
    split = {}
    for part in rank.splits:
        if part.wire_ns is not None:
            split[part.transfer.activity] = part
            edges.append((part.transfer.end_ns - part.wire_ns, part.transfer.end_ns, "w"))
    for start, end, name in [
        (int(columns.start_ns[row]), int(columns.end_ns[row]), "u")
        for row in activity.tolist()
        if KINDS[rank.classified.kind[row]] in COMMUNICATION and row not in split
    ]:
        edges.append((start, end, name))
    for block in blocks:
        edges += [(block.start, block.end, name) for name in {"wait": "c", "wire": "cw", "unsplit": "cu"}[block.part]]
    moments = sorted([(start, name, 1) for start, _, name in edges] + [(end, name, -1) for _, end, name in edges])
    running: defaultdict[str, int] = defaultdict(int)
    time_of_state: defaultdict[tuple[bool, ...], int] = defaultdict(int)
    before = moments[0][0]
    for moment, name, change in moments:
        state = tuple(running[key] > 0 for key in (*"kwucm", *FIRST))
        time_of_state[state] += moment - before
        before = moment
        running[name] += change
    return time_of_state


def expected(attribution, blocks, blocked_idle):
    """Return the mean of every part over ranks, as fractions, by the rule in docs/metrics.md.

    Of the idle time of each rank, ``blocked_idle`` nanoseconds lie after the launch of the next activity.
    """
    ranks = attribution.ranks
    swept = {rank.rank: instants(rank, blocks.get(rank.rank, ())) for rank in ranks}
    computes = {
        rank: sum(ns for state, ns in time_of_state.items() if state[0]) for rank, time_of_state in swept.items()
    }
    walls = {rank: sum(time_of_state.values()) for rank, time_of_state in swept.items()}
    slowest = max(walls, key=lambda rank: (walls[rank], -rank))
    parts: defaultdict[str, Fraction] = defaultdict(Fraction)
    for rank in ranks:
        time_of_state = swept[rank.rank]
        wire = wait = unknown = memory = idle = 0
        computing: defaultdict[str, int] = defaultdict(int)
        for (k, w, u, c, m, *firsts), ns in time_of_state.items():
            if k:
                first = (part for part, runs in zip(FIRST, firsts, strict=True) if runs)
                computing[next(first, "other_compute")] += ns
            elif c:
                wire += ns * w
                unknown += ns * (u and not w)
                wait += ns * (not u and not w)
            else:
                memory += ns * m
                idle += ns * (not m)
        early = walls[slowest] - walls[rank.rank]
        if unknown:
            unknown += early
        else:
            wait += early
        imbalance = min(wait, max(computes.values()) - computes[rank.rank])
        computing["merge_and_copies"] += memory
        values = {
            **computing,
            "imbalance": imbalance,
            "exposed_wire": wire,
            "peer_wait": wait - imbalance,
            "exposed_unsplit": unknown,
            "launch_gaps": idle - blocked_idle.get(rank.rank, 0),
            "blocked": blocked_idle.get(rank.rank, 0),
        }
        for name, value in values.items():
            parts[name] += Fraction(value, len(ranks))
    return parts, walls[slowest]


def check(attribution, blocks=NONE, blocked_idle=NONE):
    """Compare with a sweep; the idle reference gives ``blocks`` on peers' copies and ``blocked_idle`` of each rank."""
    waterfall = waterfall_of(attribution)
    truth, wall = expected(attribution, blocks, blocked_idle)
    assert waterfall.wall_ns == wall == sum(part.time_ns for part in waterfall.parts)
    mine: defaultdict[str, int] = defaultdict(int)
    for part in waterfall.parts:
        mine["attention" if part.part in ATTENTION else part.part] += part.time_ns
    assert set(mine) <= set(WATERFALL_LABELS)
    for name in truth.keys() | mine.keys():
        # Each part is a whole nanosecond, the attention kernels' up to four of them.
        assert abs(mine[name] - truth[name]) < (4 if name == "attention" else 1), name
    return waterfall


@pytest.mark.parametrize("folder", RUNS, ids=lambda path: path.name)
def test_waterfall_of_a_recorded_run_equals_a_sweep(folder):
    run = analysis(folder)
    copies = run_traces_of(run, folder)
    check(
        run.attribution,
        {rank: copies.blocks(rank) for rank in copies.traces},
        {rank: blocked_idle(copies, rank) for rank in copies.traces},
    )


def blocked_idle(copies, rank):
    return sum(ns for (cause, _), ns in idle_by_cause(copies, rank).items() if cause == "blocked")


@pytest.mark.parametrize("block", [uniform_blocks(900), uniform_blocks(300), causal(900)])
@pytest.mark.parametrize("hop_ns", [100, 400, 1500])
@pytest.mark.parametrize("present", [4, 2])
def test_waterfall_of_a_ring_pass_equals_a_sweep(block, hop_ns, present):
    check(attribute([builder.trace() for builder in ring_pass(block=block, hop_ns=hop_ns)[:present]]))


def test_waterfall_of_a_hidden_ring_by_hand():
    # Blocks of 900 hide hops of 400, merges take 10 of the 100 left in a step; the gradients' last hop hides nowhere.
    waterfall = waterfall_of(attribute([builder.trace() for builder in ring_pass()]))
    assert waterfall.wall_ns == 8 * LENGTH + 400
    assert waterfall.of("attention") == 8 * 900
    assert waterfall.of("merge_and_copies") == 8 * MERGING
    assert waterfall.of("exposed_wire") == 400
    assert waterfall.of("launch_gaps") == 8 * (LENGTH - 900 - MERGING)
    assert waterfall.of("imbalance", "peer_wait", "exposed_unsplit") == 0


def test_rank_with_less_computation_is_imbalance():
    # Two ranks, one block of 600 and one of 1000; the shorter one waits for nothing but the longer.
    builders = [
        Builder(rank=rank, world_size=2).run(FLASH, 0, time, launched=1) for rank, time in enumerate((600, 1000))
    ]
    waterfall = waterfall_of(attribute([builder.trace() for builder in builders]))
    assert {part.part: part.time_ns for part in waterfall.parts if part.time_ns} == {"attention": 800, "imbalance": 200}
    assert waterfall.slowest_rank == 1
    assert (waterfall.bounds.free_ns, waterfall.bounds.balanced_ns, waterfall.bounds.hidden_ns) == (1000, 800, 800)


def test_early_rank_counts_as_waiting_only_where_wait_is_known():
    """Two of four ranks have a trace, so nothing separates wait from wire. Rank 0 ends 300 ns before rank 1."""
    builders = ring([1000] * 4, [2000] * 4)[:2]
    builders[1].run(FLASH, 2000, 2300, launched=500)
    waterfall = waterfall_of(attribute([builder.trace() for builder in builders]))
    # Exposed on both ranks for 1000 ns, on rank 0 until rank 1 is done: (1300 + 1000) / 2.
    parts = {part.part: part.time_ns for part in waterfall.parts if part.time_ns}
    assert parts == {"attention": 150, "exposed_unsplit": 1150}


def test_unsplit_communication_beside_wire_counts_as_wire():
    """A hop of two ranks from 1000 to 2000, beside a kernel without a record from 1500 to 2500."""
    builders = ring([1000] * 2, [2000] * 2, world=2)
    for b in builders:
        b.run(NCCL, 1500, 2500, launched=600, stream=30)
    attribution = attribute([builder.trace() for builder in builders])
    for rank in attribution.ranks:
        exposure = exposure_of(rank.detail, rank.detail.rows())
        assert [length_ns(spans) for spans in (exposure.wire, exposure.wait, exposure.unknown)] == [1000, 0, 500]
    parts = {part.part: part.time_ns for part in waterfall_of(attribution).parts if part.time_ns}
    assert parts == {"exposed_wire": 1000, "exposed_unsplit": 500}


def test_one_rank_has_unsplit_exposed_communication():
    waterfall = waterfall_of(attribute([ring_pass(hop_ns=1500)[0].trace()]))
    assert waterfall.of("exposed_unsplit") > 0
    assert waterfall.of("imbalance", "exposed_wire", "peer_wait") == 0
    assert next(part.evidence for part in waterfall.parts if part.part == "exposed_unsplit")


def test_waterfall_without_run_json_has_no_rate_or_peak():
    waterfall = waterfall_of(attribute([builder.trace() for builder in ring_pass()]))
    assert waterfall.work.peak is None
    assert waterfall.tflops is None
    assert {part.tflops for part in waterfall.parts} == {None}


def test_waterfall_starts_at_the_device_peak():
    folder = ROOT / "traces" / "h200x4-zigzag-262144-copied"
    run = analysis(folder)
    waterfall = run.findings.waterfall
    assert run.run is not None and run.run.workload is not None
    workload = run.run.workload
    pairs = workload.seq * (workload.seq + 1) // 2
    flops = 14 * workload.heads * workload.head_dim * pairs / 4
    first, *_ = waterfall.parts
    assert first.part == "peak"
    assert first.time_ns == pytest.approx(flops / 989e12 * 1e9, rel=1e-6)
    assert first.tflops == pytest.approx(989, rel=1e-6)
    assert waterfall.tflops == pytest.approx(flops / waterfall.wall_ns / 1e3)
    after = {part.part: part.tflops for part in waterfall.parts}
    assert after["vendor_peak"] == pytest.approx(790, rel=1e-6)
    # With a solo rate the kernel's loss ends at it, repeated work left out (there is none).
    assert after["slower_kernel"] == pytest.approx(run.summary.rates.solo_tflops, rel=2e-4)
    assert waterfall.parts[-1].tflops == pytest.approx(waterfall.tflops)


def test_peak_attention_time_covers_all_iterations():
    """1024 tokens, 8 heads and 64 channels: 14 FLOPs per pair and channel, 3.76e9, take 3804 ns at 989 TFLOP/s."""
    b = Builder(rank=0, world_size=1)
    for start in (0, 20_000):
        b.mark("ringprof::iteration", start, start + 15_000)
        b.run(FLASH, start + 100, start + 10_100, launched=start + 50)
    work = [Work(block_flops=14 * 512 * 1024 * 1025 // 2, block_calls={"forward": 1, "backward": 1}, sent=[])]
    waterfall = waterfall_of(attribute([b.trace()], recorded_run(world_size=1, work=work)))
    assert waterfall.of("peak") == round(2 * 14 * 512 * 1024 * 1025 / 2 / 989e3) == 7607


def test_waterfall_frame_has_the_parts():
    run = analysis(RUNS[0])
    frame = run.waterfall()
    assert list(frame.columns) == ["part", "time_ns", "share", "tflops", "evidence", "remedy"]
    assert frame["time_ns"].sum() == run.summary.slowest_wall_ns
    assert frame["share"].sum() == pytest.approx(1)
    assert np.isfinite(frame["tflops"].astype(float)).all()


def test_no_rates_where_run_json_has_another_world_size():
    attribution = attribute([builder.trace() for builder in ring_pass()], recorded_run(world_size=8))
    assert waterfall_of(attribution).work.peak is None


def test_hidden_bound_is_communication_where_that_is_longer():
    # Blocks of 400 and 200, then a hop of 1000 that begins beside them: hidden, the hop is all that is left.
    builders = ring([100, 100], [1100, 1100], world=2)
    for b, time in zip(builders, (400, 200), strict=True):
        b.run(FLASH, 0, time, launched=1)
    bounds = waterfall_of(attribute([builder.trace() for builder in builders])).bounds
    assert (bounds.free_ns, bounds.hidden_ns) == (400, 1000)
