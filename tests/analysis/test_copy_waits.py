"""Time blocked on a peer's copy-engine hops: handwritten cases, and random runs against an independent reference."""

from __future__ import annotations

import numpy as np
import pytest

import ringprof
from ringprof.analysis.copy_waits import CopiedHop, count_unequal_hops, peers_of_ranks
from ringprof.analysis.kinds.kinds import COMMUNICATION, COMPUTE, KINDS, MEMORY
from ringprof.errors import InputError
from ringprof.run import write_run
from ringprof.scale.pipeline import attribute
from ringprof.trace.kineto import read_trace
from ringprof.trace.reduced import parse_reduced, reduce_trace
from ringprof.training.api import sample_figures
from tests.analysis.idle_oracle import assert_same_idle, run_traces_of
from tests.analysis.random_copy_runs import run_with_hops, write_random_run
from tests.analysis.sweep import sweep
from tests.analysis.trace_text import BASE_NS, START_NS, TraceText
from tests.loaded import analysis
from tests.paths import DATA

US = 1000
EARLY = (1 * US, 2 * US)
"""Start and end of a launch long before the launched activity."""


def blocks_of(rank):
    """Return part, peer, start and end of each time blocked on a peer, in whole microseconds of the trace."""
    return [
        (block.part, block.peer, *((time - BASE_NS - START_NS) // US for time in (block.start_ns, block.end_ns)))
        for block in rank.detail.blocks
    ]


def loaded(folder, *traces, hops=None, world=2):
    """Write traces, with a run.json where ``hops`` are given, and return the metrics of each rank."""
    for trace in traces:
        trace.write(folder)
    if hops is not None:
        present = [trace.rank for trace in traces]
        write_run(run_with_hops(["node"] * world, hops, present=present), folder / "run.json")
    run = ringprof.load(folder)
    for rank in run.attribution.ranks:
        breakdown = rank.breakdown
        assert breakdown.blocked_on_peer_ns == sum(block.time_ns for block in rank.detail.blocks)
        busy = breakdown.compute_ns + breakdown.exposed_memory_ns + breakdown.exposed_comm_ns
        assert busy + breakdown.idle_ns == breakdown.wall_ns
        assert rank.idle is not None and rank.idle.total_ns == breakdown.idle_ns
    return {rank.rank: rank for rank in run.attribution.ranks}


def sender(world=2, to=1, device=0):
    """Return the trace of rank 0: it computes until 100 us; its hop, launched at 10 us, runs from 180 to 200 us."""
    trace = TraceText(0, world, device)
    trace.run(0, 100 * US, launched=EARLY)
    trace.hop("kv", to, (10 * US, 12 * US, 180 * US, 200 * US))
    return trace


def receiver(rank=1, world=2, to=0, device=1):
    """Rank that computes until 150 us, sends its hop from 151 to 170 us, and computes again from 203 us on."""
    trace = TraceText(rank, world, device)
    trace.run(0, 150 * US, launched=EARLY)
    trace.hop("kv", to, (20 * US, 22 * US, 151 * US, 170 * US))
    trace.run(203 * US, 300 * US, launched=(30 * US, 31 * US))
    return trace


def test_send_waits_for_posted_receive_and_receive_for_the_copy(tmp_path):
    ranks = loaded(tmp_path, sender(), receiver(), hops={"kv": 1})
    # The receiver computes until 150 us, so it posts then.
    assert blocks_of(ranks[0]) == [("wait", 1, 100, 150), ("wire", 1, 150, 180)]
    # Its own hop leaves at once, in 1 us; then nothing of it runs until 3 us after the sender's copy.
    assert blocks_of(ranks[1]) == [("wire", 0, 150, 151), ("wait", 0, 170, 180), ("wire", 0, 180, 200)]
    assert [ranks[rank].breakdown.exposed_comm_ns for rank in (0, 1)] == [80 * US + 20 * US, 31 * US + 19 * US]
    assert [ranks[rank].breakdown.comm_ns for rank in (0, 1)] == [20 * US, 19 * US]
    assert [ranks[rank].idle.gap_ns for rank in (0, 1)] == [0, 3 * US]


def test_two_ranks_match_without_run_json_at_any_device_numbering(tmp_path):
    # Each process sees its own GPU as device 0 and the peer's as device 1.
    ranks = loaded(tmp_path, sender(to=1, device=0), receiver(to=1, device=0))
    assert blocks_of(ranks[0]) == [("wait", 1, 100, 150), ("wire", 1, 150, 180)]


def test_host_time_precedes_blocked_time(tmp_path):
    first = TraceText(0, 2)
    first.run(0, 100 * US, launched=EARLY)
    first.hop("kv", 1, (110 * US, 120 * US, 180 * US, 200 * US))
    ranks = loaded(tmp_path, first, receiver(), hops={"kv": 1})
    assert blocks_of(ranks[0]) == [("wait", 1, 120, 150), ("wire", 1, 150, 180)]
    assert ranks[0].idle.host_ns == 20 * US


def test_receiver_posts_after_its_launch_and_both_streams(tmp_path):
    first, second = sender(), TraceText(1, 2)
    first.range("ringprof::iteration", 0, 300 * US)
    second.range("ringprof::iteration", 15 * US, 300 * US)
    # Launched before the iteration: on the compute stream, on the copy stream, and on one that does not count.
    second.run(0, 130 * US, launched=(5 * US, 6 * US), stream=9)
    second.run(0, 125 * US, launched=(7 * US, 8 * US), stream=20)
    second.run(0, 140 * US, launched=(3 * US, 4 * US), stream=11)
    second.run(140 * US, 141 * US, launched=(10 * US, 11 * US), stream=9)
    # Launched in the iteration, but after the hop.
    second.hop("kv", 0, (20 * US, 22 * US, 145 * US, 160 * US))
    second.run(160 * US, 170 * US, launched=(30 * US, 31 * US), stream=9)
    ranks = loaded(tmp_path, first, second, hops={"kv": 1})
    assert blocks_of(ranks[0]) == [("wait", 1, 100, 141), ("wire", 1, 141, 180)]


def test_ring_of_three_waits_for_receiver_and_sender(tmp_path):
    middle = receiver(rank=1, world=3, to=2)
    last = TraceText(2, 3)
    last.run(0, 110 * US, launched=EARLY)
    last.hop("kv", 0, (20 * US, 22 * US, 230 * US, 240 * US))
    first = sender(world=3)
    first.run(245 * US, 250 * US, launched=(30 * US, 31 * US))
    ranks = loaded(tmp_path, first, middle, last, hops={"kv": 1}, world=3)
    assert blocks_of(ranks[0]) == [
        ("wait", 1, 100, 150), ("wire", 1, 150, 180), ("wait", 2, 200, 230), ("wire", 2, 230, 240)
    ]  # fmt: skip
    # Rank 2 sends to rank 0, which has posted at 100 us.
    assert blocks_of(ranks[2]) == [("wire", 0, 110, 230)]


@pytest.mark.parametrize("device", ["own", "renumbered"])
def test_runs_without_peers_find_the_receiver_by_device(tmp_path, device):
    traces = []
    for rank in range(3):
        trace = TraceText(rank, 3, rank if device == "own" else 0)
        trace.run(0, (100 + 10 * rank) * US, launched=EARLY)
        trace.hop("kv", (rank + 1) % 3 if device == "own" else 1, (10 * US, 12 * US, 180 * US, 200 * US))
        traces.append(trace)
    ranks = loaded(tmp_path, *traces, hops={"kv": None}, world=3)
    if device == "own":
        assert blocks_of(ranks[0]) == [("wait", 1, 100, 110), ("wire", 1, 110, 180)]
        assert blocks_of(ranks[2]) == [("wire", 0, 120, 180)]
    else:
        assert blocks_of(ranks[0]) == [("unsplit", None, 100, 180)]


def test_targets_that_no_device_tells_are_a_warning(tmp_path):
    """Warn where each rank calls its own GPU 0 and no run says that hops are copied: the blocked time is idle."""
    for rank in range(3):
        trace = TraceText(rank, 3, 0)
        trace.run(0, (100 + 10 * rank) * US, launched=EARLY)
        trace.hop("kv", 1, (10 * US, 12 * US, 180 * US, 200 * US))
        trace.write(tmp_path)
    run = ringprof.load(tmp_path)
    (warning,) = [warning for warning in run.warnings if warning.code == "copy_targets_unknown"]
    assert warning.count == 3 and not any(rank.breakdown.blocked_on_peer_ns for rank in run.attribution.ranks)


def test_hop_without_the_trace_of_its_receiver_is_not_split(tmp_path):
    ranks = loaded(tmp_path, sender(), hops={"kv": 1})
    assert blocks_of(ranks[0]) == [("unsplit", 1, 100, 180)]
    assert ranks[0].breakdown.exposed_comm_ns == 100 * US


def test_copy_wait_is_unknown_without_receiver_trace_and_run_json(tmp_path):
    ranks = loaded(tmp_path, sender())
    assert blocks_of(ranks[0]) == []
    assert ranks[0].breakdown.exposed_comm_ns == 20 * US
    assert [(event.name, event.time_ns) for event in ranks[0].idle.events] == [("unknown", 80 * US)]


def second_rank_with(start, category="kernel", name="gemm", launched=(30 * US, 31 * US)):
    """Rank 1, whose next activity after its hop starts at ``start``; the sender's copy has come at 200 us."""
    trace = TraceText(1, 2)
    trace.run(0, 150 * US, launched=EARLY)
    trace.hop("kv", 0, (20 * US, 22 * US, 151 * US, 170 * US))
    trace.run(start, start + 50 * US, launched=launched, category=category, name=name)
    return trace


@pytest.mark.parametrize(
    ("changes", "blocked"),
    [
        ({"start": 220 * US}, True),
        ({"start": 220 * US + 1}, False),
        ({"start": 200 * US}, True),
        ({"start": 200 * US - 1}, False),
        # Launched before the rank's own hop: it cannot wait for what comes in exchange.
        ({"start": 210 * US, "launched": (17 * US, 18 * US)}, False),
        ({"start": 210 * US, "launched": None}, False),
        ({"start": 210 * US, "category": "gpu_memset", "name": "Memset (Device)"}, False),
        ({"start": 210 * US, "category": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)"}, True),
    ],
)
def test_kernels_that_wait_for_a_copy_to_arrive(tmp_path, changes, blocked):
    ranks = loaded(tmp_path, sender(), second_rank_with(**changes), hops={"kv": 1})
    parts = [("wait", 0, 170, 180), ("wire", 0, 180, 200)] if blocked else []
    assert [block for block in blocks_of(ranks[1]) if block[2] >= 170] == parts


def test_an_unknown_stall_before_a_memory_set_stays_unknown(tmp_path):
    second = second_rank_with(270 * US, category="gpu_memset", name="Memset (Device)")
    rank = loaded(tmp_path, sender(), second, hops={"kv": 1})[1]
    assert [(event.event_class, event.name, event.time_ns) for event in rank.idle.events] == [
        ("blocked", "unknown", 100 * US)
    ]


def test_only_the_first_copy_of_a_hop_waits(tmp_path):
    first = TraceText(0, 2)
    first.run(0, 100 * US, launched=EARLY)
    first.hop("kv", 1, (10 * US, 12 * US, 180 * US, 190 * US), (14 * US, 15 * US, 196 * US, 200 * US))
    ranks = loaded(tmp_path, first, receiver(), hops={"kv": 1})
    assert blocks_of(ranks[0]) == [("wait", 1, 100, 150), ("wire", 1, 150, 180)]
    assert [(event.name, event.time_ns) for event in ranks[0].idle.events] == [("unknown", 6 * US)]
    # The hop as a whole is on the wire until its last copy ends.
    assert blocks_of(ranks[1])[1:] == [("wait", 0, 170, 180), ("wire", 0, 180, 200)]


def test_channels_with_different_hop_counts_are_not_matched(tmp_path):
    first = sender()
    first.hop("kv", 1, (40 * US, 42 * US, 400 * US, 420 * US))
    ranks = loaded(tmp_path, first, receiver(), hops={"kv": 1})
    assert {part for part, *_ in blocks_of(ranks[0])} == {"unsplit"}
    assert blocks_of(ranks[1]) == [("unsplit", 0, 150, 151)]


def test_arrival_of_a_later_hop_does_not_hide_an_earlier_one(tmp_path):
    # The gradients of the next step arrive at 202 us, but rank 1 exchanges them only after the block that waits.
    first, second = sender(), second_rank_with(210 * US)
    first.hop("dkv", 1, (15 * US, 16 * US, 190 * US, 202 * US), stream=21)
    second.hop("dkv", 0, (40 * US, 41 * US, 265 * US, 270 * US), stream=21)
    ranks = loaded(tmp_path, first, second, hops={"kv": 1, "dkv": 1})
    assert [block for block in blocks_of(ranks[1]) if 170 <= block[2] < 260] == [
        ("wait", 0, 170, 180), ("wire", 0, 180, 200)
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(1000, 1040))
def test_copy_waits_of_a_random_run_equal_the_oracle(seed, tmp_path):
    write_random_run(seed, tmp_path)
    try:
        run = ringprof.load(tmp_path)
    except InputError as refused:
        assert "do not overlap in time" in str(refused)
        return
    truth = run_traces_of(run, tmp_path)
    assert_same_idle(run, truth)
    for rank in run.attribution.ranks:
        expected = sweep(classed_events(rank))
        blocked = sum(block.end - block.start for block in truth.blocks(rank.rank))
        assert rank.breakdown.comm_ns == expected["comm"]
        assert rank.breakdown.exposed_comm_ns == expected["exposed_comm"] + blocked


def classed_events(rank):
    """Yield (start, end, class) of device activities in a rank's window, and of computation outside it."""
    rows = rank.detail.rows()
    beside = rank.detail.background(rows)
    for start, end, code in [(*_times(rows, row), rows.kind[row]) for row in range(len(rows.kind))]:
        name = KINDS[code]
        yield start, end, "comm" if name in COMMUNICATION else "memory" if name in MEMORY else "compute"
    for row in np.flatnonzero(beside.of(*COMPUTE)):
        yield *_times(beside, row), "compute"


def _times(rows, row):
    return int(rows.start_ns[row]), int(rows.end_ns[row])


def test_copies_and_nccl_have_the_same_losses():
    # Two recordings of one program, which differ in what carries the hops. NCCL's kernels show waiting themselves.
    copies, nccl = (analysis(DATA / f"waits-{name}") for name in ("copies", "nccl"))
    wall = copies.findings.waterfall.wall_ns
    for part in ("imbalance", "peer_wait", "exposed_wire"):
        times = [run.findings.waterfall.of(part) for run in (copies, nccl)]
        assert abs(times[0] - times[1]) < 0.03 * wall, part
    for first, second in zip(copies.attribution.ranks, nccl.attribution.ranks, strict=True):
        assert abs(first.breakdown.exposed_comm_ns - second.breakdown.exposed_comm_ns) < 0.03 * wall
    for run in (copies, nccl):
        assert run.findings.waterfall.of("imbalance") > 0.2 * wall
        assert run.findings.next_step is not None
        assert "launch" not in " ".join([*run.findings.verdict, run.findings.next_step.text]).lower()


def test_different_hop_counts_of_two_ranks_are_a_warning() -> None:
    def hop(channel: str, number: int, receiver: int) -> CopiedHop:
        return CopiedHop(channel, number, number, 0, 1, number, 0, 0, 0, receiver)

    # Rank 0 posts three hops of kv, rank 1 two; of dkv both post one.
    hops = {
        0: [*(hop("kv", number, 1) for number in range(3)), hop("dkv", 0, 1)],
        1: [*(hop("kv", number, 0) for number in range(2)), hop("dkv", 0, 0)],
    }
    assert count_unequal_hops(peers_of_ranks(hops)) == 5
    hops[1].append(hop("kv", 2, 0))
    assert count_unequal_hops(peers_of_ranks(hops)) == 0


def test_monitor_sample_sees_waiting_for_copies() -> None:
    """The monitor has the ranks' reduced traces and no run.json."""
    folder = DATA / "waits-copies"
    traces = [parse_reduced(reduce_trace(read_trace(folder / f"rank{rank}.json.gz"))) for rank in (0, 1)]
    look, report = sample_figures(attribute(traces)), analysis(folder).report()
    assert look["exposed_comm_share"] == report["summary"]["exposed_comm_share"]
    assert look["exposed_comm_share"]["worst"] > 0.5 and look["straggler"] == 0
    waits = [rank["hops"]["wait_ns"] for rank in report["ranks"]]
    assert look["wait_ms"] == pytest.approx(sum(waits) / 2e6) and sum(waits) > 22e6
