"""Whole sentences of the verdict, on traces whose metrics can be checked by hand."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from ringprof.analysis.findings.conditions import metrics_of
from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.analysis.findings.parts import parts_in_words
from ringprof.analysis.findings.recommendations import rate_to_hide
from ringprof.analysis.findings.summary import summarise
from ringprof.analysis.findings.waterfall import Facts, find_waterfall
from ringprof.analysis.steps.steps import steps_in_memory
from ringprof.scale.pipeline import attribute
from ringprof.trace.columns import KERNEL, MEMCPY, MEMSET
from ringprof.workload.workload import Workload
from tests.analysis.build import FLASH, NCCL, Builder, collective
from tests.analysis.findings.test_summary import ring_with_compute
from tests.analysis.recorded import recorded_run
from tests.analysis.rings import MERGE

MS = 1_000_000


def sentences(*builders):
    return findings_in_memory(attribute([builder.trace() for builder in builders])).verdict


@pytest.mark.parametrize(
    ("name", "category", "said"),
    [
        (MERGE, KERNEL, "39.0 % is merges and copies."),
        ("sm90_xmma_gemm_bf16", KERNEL, "39.0 % is matrix products."),
        ("multi_tensor_apply_kernel<FusedAdamMathFunctor>", KERNEL, "39.0 % is the optimizer."),
        ("elementwise_kernel", KERNEL, "39.0 % is other computation."),
        ("Memcpy DtoD", MEMCPY, "40.0 % is merges and copies, most of it memory copies."),
        ("Memset", MEMSET, "40.0 % is merges and copies, most of it memory sets."),
    ],
)
def test_verdict_names_the_largest_part_beside_attention(name, category, said):
    """Attention, which takes longer, comes first. Beside 390 ms of it stand 10 ms of merging, or of arithmetic where it
    is merging itself."""
    b = Builder(world_size=1).run(FLASH, 0, 600 * MS, launched=1)
    b.run(name, 600 * MS, 990 * MS, launched=2, category=category)
    b.run(MERGE if name != MERGE else "elementwise_kernel", 990 * MS, 1000 * MS, launched=3)
    assert sentences(b) == ("one GPU: nothing is communicated", f"60.0 % of the time is attention, {said}")


def ring_of(spans, *, compute, world, ms=MS):
    """One hop a rank at these spans, beside computation of ``compute[rank]`` from 0 on; all times in ms, or ``ms``."""
    builders = []
    for rank, (start, end) in enumerate(spans):
        b = Builder(rank=rank, world_size=world).run(FLASH, 0, compute[rank] * ms, launched=1)
        b.batch(
            100, start * ms, end * ms, to=(rank + 1) % world, source=(rank - 1) % world, elements=125_000 * 1000,
            tensors=1, group_ranks=tuple(range(world)), group_size=world,
        )  # fmt: skip
        builders.append(b)
    return builders


def test_verdict_of_slow_wire_with_one_slow_rank():
    # 250 MB a hop: in 10 ms 25 GB/s, in 100 ms 2.5 GB/s. No rank waits, and exposed are
    # 10 + 100 + 10 + 10 of 110 + 200 + 110 + 110.
    spans, compute = [(100, 110), (100, 200), (100, 110), (100, 110)], [100] * 4
    cost, cause, gain = sentences(*ring_of(spans, compute=compute, world=4))
    assert cost == "24.5 % of the time is exposed communication, 50.0 % at worst (rank 1)."
    # The others are done 90 ms before rank 1: 3 x 90 of 4 x 200.
    assert cause == (
        "33.8 % of the slowest rank's wall is waiting for peers whose hops are slow, or for the slowest rank to end, "
        "16.2 % wire: "
        "rank 1 sends at 2.5 GB/s, the others at 25."
    )
    assert gain == (
        "200.0 ms could be 100.0 ms (50.0 % less) with free communication, "
        "100.0 ms (50.0 %) with perfect balance and overlap."
    )


def test_rates_of_thousands_have_no_exponent():
    # The same a thousandth as long, but 10 us of computation: 25,000 GB/s and 2,500.
    spans = [(10, 20), (10, 110), (10, 20), (10, 20)]
    builders = ring_of(spans, compute=[10] * 4, world=4, ms=MS // 1000)
    assert sentences(*builders)[1].endswith("rank 1 sends at 2,500 GB/s, the others at 25,000.")
    run_findings = findings_in_memory(attribute([b.trace() for b in builders]))
    wire = next(part for part in run_findings.waterfall.parts if part.part == "exposed_wire")
    # A GB of all ranks in 130 us of hops.
    assert wire.evidence == "on the wire with no computation beside it; send_recv 7,692 GB/s"
    # 250 MB of each rank beside 10 us.
    assert rate_to_hide(run_findings.attribution, run_findings.summary) == (
        "; 0.010 ms of computation can hide these bytes from 25,000 GB/s per rank on"
    )


@pytest.mark.parametrize(
    ("compute", "rises"),
    [([100, 200, 300], True), ([100, 300, 200], False), ([100, 200], False), ([100, 100, 300], False)],
)
def test_work_rising_with_rank_suggests_contiguous_causal_shards(compute, rises):
    longest = max(compute)
    spans = [(time, longest + 10) for time in compute]
    _, cause, _ = sentences(*ring_of(spans, compute=compute, world=len(compute)))
    assert cause.startswith("95 % of rank 0's SendRecv time" if longest == 300 else "91 % of rank 0's SendRecv time")
    assert (f"ranks that compute up to {longest}.0 ms, where it computes 100.0 ms; " in cause) is True
    assert ("work rises with the rank, as in contiguous pieces" in cause) is rises
    assert ("imbalance takes " in cause) is not rises


def test_evidence_text_of_every_waterfall_part():
    # Two ranks whose hop of 250 MB begins when both are there, at 200: 50 ms on the wire, then 10 ms of merging.
    builders = ring_of([(100, 250), (200, 250)], compute=[100, 200], world=2)
    for b in builders:
        b.run(MERGE, 250 * MS, 260 * MS, launched=200)
    waterfall = findings_in_memory(attribute([b.trace() for b in builders])).waterfall
    assert {part.part: (part.time_ns // MS, part.evidence) for part in waterfall.parts} == {
        "attention": (150, "union of the attention kernels; the traces do not tell the work: not compared with a peak"),
        "imbalance": (50, "rank 0 computes 110.0 ms, rank 1 computes 210.0 ms"),
        "exposed_wire": (50, "on the wire with no computation beside it; send_recv 5 GB/s"),
        "peer_wait": (0, "waiting beyond what the ranks' computation differs by"),
        "merge_and_copies": (10, "not beside attention; mean of all: merge 10.0 ms"),
        "launch_gaps": (0, "nothing ran on the device before the next activity was launched, and in gaps below 5 us"),
    }
    assert [part.share for part in waterfall.parts] == [pytest.approx(n / 260) for n in (150, 50, 50, 0, 10, 0)]


def test_metrics_by_name():
    figures = metrics_of(findings_in_memory(attribute([b.trace() for b in ring_of(
        [(100, 250), (200, 250)], compute=[100, 200], world=2
    )])))  # fmt: skip
    expected = {
        "wall_ns": 250 * MS, "compute_ns": 150 * MS, "max(compute_ns)": 200 * MS, "min(compute_ns)": 100 * MS,
        "exposed_comm_ns": 100 * MS, "exposed_comm": 0.4, "max(exposed_comm)": 0.6, "min(exposed_comm)": 0.2,
        "overlapped_ns": 0, "overlap_ratio": 0, "idle_ns": 0, "flash_fwd_ns": 150 * MS, "merge_ns": 0,
        "send_recv_ns": 100 * MS, "wait_ns": 50 * MS, "max(wait_ns)": 100 * MS, "wire_ns": 50 * MS,
        "wait_share": (2 / 3 + 0) / 2, "wire_gbps": 5, "hops": 1, "hop_bytes": 250_000_000,
        "slowest_excess": 0, "warnings": 0, "waterfall.attention": 0.6, "waterfall.imbalance": 0.2,
    }  # fmt: skip
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    assert "tflops" not in figures and "of_solo" not in figures


def test_waiting_is_attributed_to_the_longest_communication():
    # A short all-gather, nearly all of it waiting, before a send/recv of which 100 of 110 ms are.
    builders = []
    for rank, (gathers, sends) in enumerate([((0, 10), (100, 210)), ((9, 10), (200, 210))]):
        b = Builder(rank=rank, world_size=2)
        own = collective("_allgather_base", group_ranks=(0, 1), group_size=2)
        b.run(NCCL, gathers[0] * MS, gathers[1] * MS, launched=1, own=own, stream=20)
        b.run(FLASH, 10 * MS, sends[0] * MS, launched=20)
        b.batch(100, sends[0] * MS, sends[1] * MS, to=1 - rank, source=1 - rank, group_ranks=(0, 1), group_size=2)
        builders.append(b)
    _, cause, _ = sentences(*builders)
    assert cause == (
        "91 % of rank 0's SendRecv time was waiting for ranks that compute up to 190.0 ms, "
        "where it computes 90.0 ms; imbalance takes 23.8 % of the slowest rank's wall."
    )


def test_waterfall_keeps_zero_parts_that_inform():
    alone = Builder(world_size=1).run(FLASH, 0, 100, launched=1)
    parts = findings_in_memory(attribute([alone.trace()])).waterfall.parts
    assert [(part.part, part.time_ns) for part in parts] == [
        ("attention", 100), ("merge_and_copies", 0), ("launch_gaps", 0),
    ]  # fmt: skip
    assert parts[1].evidence == "not beside attention; mean of all: none"
    copying = Builder(world_size=1).run(FLASH, 0, 100 * MS, launched=1)
    copying.run("Memcpy DtoD", 100 * MS, 130 * MS, launched=2, category=MEMCPY)
    copying.run("Memset", 130 * MS, 150 * MS, launched=3, category=MEMSET)
    parts = findings_in_memory(attribute([copying.trace()])).waterfall.parts
    assert parts[1].evidence == "not beside attention; mean of all: memcpy 30.0 ms, memset 20.0 ms"


def test_communication_is_listed_by_its_time():
    builders = []
    for rank in range(2):
        b = Builder(rank=rank, world_size=2)
        for number, (name, start, end) in enumerate([("_allgather_base", 0, 100), ("allreduce", 100, 400)]):
            own = collective(name, group_ranks=(0, 1), group_size=2)
            b.run(NCCL, start, end, launched=10 * number + 1, own=own, stream=20)
        builders.append(b)
    rows = findings_in_memory(attribute([b.trace() for b in builders])).summary.communication
    # All-gather sends the rank's 2000 bytes, all-reduce twice half of them.
    assert [(row.kind, row.kernels, row.sent_bytes, row.wire_gbps) for row in rows] == [
        ("all_reduce", 2, 4000, 4000 / 600), ("all_gather", 2, 4000, 4000 / 200),
    ]  # fmt: skip


def test_verdict_without_a_notable_loss_or_known_rate():
    b = Builder(world_size=1).run(FLASH, 0, 990, launched=1).run(MERGE, 990, 1000, launched=2)
    assert (
        sentences(b)[1] == "No loss outside the attention kernels reaches 2 %: 99.0 % of the time is attention kernels."
    )


def test_a_link_is_slow_below_a_third_of_the_fastest():
    def cause(slowest_ms):
        spans = [(100, 110), (100, 100 + slowest_ms), (100, 110), (100, 110)]
        return sentences(*ring_of(spans, compute=[100] * 4, world=4))[1]

    assert "rank 1 sends at" not in cause(30)
    assert "rank 1 sends at 8.06 GB/s, the others at 25." in cause(31)


@pytest.mark.parametrize("counted", [True, False])
def test_the_evidence_of_a_run_against_the_devices_peak(counted):
    # 8 heads of 64 over 16 tokens, causal, forward and backward: 14 x 8 x 64 x 136 FLOPs; 4 ranks of 1 us or more.
    run = recorded_run(workload=Workload(seq=16, heads=8, kv_heads=8, head_dim=64))
    run = run if counted else msgspec.structs.replace(run, work=None)
    attribution = attribute([b.trace() for b in ring_with_compute()], run)
    summary = replace(summarise(attribution), devices=("NVIDIA H200",))
    needed, done, spent = 14 * 8 * 64 * 136, 4 * 10**9, 4600
    facts = Facts(attribution, summary, find_waterfall(attribution, summary), steps_in_memory(attribution.ranks))
    words = {part.part: part for part in parts_in_words(facts)}
    assert words["peak"].evidence == "0.0 TFLOP per device at 989 TFLOP/s (H200, dense bf16, vendor's figure)"
    rate = (done if counted else needed) / spent / 1e3
    merged = "" if counted else " repeated work and"
    # The calibration of H200 has no blocks as short as 16 tokens.
    assert words["kernel_limit"].evidence == (
        f"{rate:,.1f} TFLOP/s in the run; no solo rate:{merged} slow-down beside communication is in it; "
        "what another kernel takes is not known: calibration h200 does not cover these blocks by cudnn"
    )
    assert ("repeated" in words) is counted
    if counted:
        assert words["repeated"].evidence == f"blocks of {done / needed:.4f} times the work that the mask needs"
