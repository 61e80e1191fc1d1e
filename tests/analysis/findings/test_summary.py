"""Summary of a run, on metrics that can be checked by hand."""

from __future__ import annotations

import pytest

from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.analysis.findings.measurements import measurement_of_run
from ringprof.analysis.findings.metric import Metric
from ringprof.analysis.findings.summary import summarise
from ringprof.scale.pipeline import attribute
from tests.analysis.build import FLASH, Builder
from tests.analysis.recorded import recorded_run
from tests.analysis.transfers.test_hops import BYTES, ring


def summary_of(builders, run=None):
    return summarise(attribute([b.trace() for b in builders], run))


def ring_with_compute():
    builders = ring([1000, 1000, 1000, 1500], [2500] * 4)
    for rank, b in enumerate(builders):
        b.run(FLASH, 500, 1500 + 100 * rank, launched=90)
    return builders


def test_the_means_of_the_parts_sum_to_the_mean_wall():
    *parts, wall = summary_of(ring_with_compute()).parts
    assert sum(part.mean_ns for part in parts) == wall.mean_ns == 2000
    assert sum(part.share for part in parts) == pytest.approx(1.0)
    assert [(part.name, part.min_ns, part.max_ns) for part in parts[:2]] == [
        ("compute", 1000, 1300),
        ("exposed_comm", 700, 1000),
    ]


def test_exposed_shares_name_the_worst_rank():
    summary = summary_of(ring_with_compute())
    assert (summary.exposed_worst, summary.exposed_worst_rank) == (0.5, 0)
    assert summary.exposed_mean == pytest.approx((1000 + 900 + 800 + 700) / 4 / 2000)
    assert summary.exposed_mean == summary.parts[1].share


def test_kernels_of_a_kind_in_flight_at_once_take_their_time_once():
    b = Builder().run(FLASH, 100, 160, launched=1).run(FLASH, 140, 180, launched=2, stream=8)
    b.run("elementwise_kernel", 180, 200, launched=3)
    flash, _ = summary_of([b]).kinds
    assert (flash.time_ns, flash.calls, flash.average_ns, flash.share) == (100, 2, 50, pytest.approx(80 / 100))


def test_communication_is_split_over_all_ranks():
    (row,) = summary_of(ring_with_compute()).communication
    assert (row.kind, row.kernels, row.sent_bytes) == ("send_recv", 4, 4 * 2 * BYTES)
    assert row.wait_share == pytest.approx(3 * 500 / (3 * 1500 + 1000))
    assert row.wire_gbps == pytest.approx(4 * 2 * BYTES / 4000)
    assert row.wait_share + row.wire_share == pytest.approx(1.0)


def test_traces_alone_have_no_rates():
    rates = summary_of(ring_with_compute()).rates
    assert (rates.tflops, rates.block_tflops, rates.profiler_overhead) == (None, None, None)


def test_achieved_rate_uses_the_median_time_of_the_slowest_rank():
    summary = summary_of(ring_with_compute(), recorded_run())
    rates = summary.rates
    # 4·1·1024²·8·64 / 2 · 3.5 FLOPs over 4 ranks; the slowest rank takes 2, 3 and 4 ms.
    flops = 4 * 1024**2 * 8 * 64 // 2 * 7 // 2 / 4
    assert rates.tflops == pytest.approx(flops / 3e-3 / 1e12)
    assert rates.tflops_quantiles["p10"] == pytest.approx(flops / 3.8e-3 / 1e12)
    assert rates.tflops_quantiles["p90"] == pytest.approx(flops / 2.2e-3 / 1e12)
    assert rates.iterations_timed == 3
    assert rates.peak_memory_bytes == 1 << 30
    assert rates.profiler_overhead == pytest.approx(0.1)


def test_block_rate_is_over_the_union_of_the_attention_kernels():
    summary = summary_of(ring_with_compute(), recorded_run())
    expected = sum(1e9 / (1000 + 100 * rank) / 1e3 for rank in range(4)) / 4
    assert summary.rates.block_tflops == pytest.approx(expected)


def test_many_ranks_are_summarised_as_mean_min_max():
    builders = [Builder(rank=rank, world_size=17).run(FLASH, 0, 100 + rank, launched=1) for rank in range(17)]
    rows = summary_of(builders).ranks
    assert [(row.label, row.wall_ns) for row in rows] == [("mean", 108.0), ("min", 100), ("max", 116)]
    assert {row.overlap_ratio for row in rows} == {None}


def test_run_as_an_entry_of_a_comparison():
    attribution = attribute([b.trace() for b in ring_with_compute()], recorded_run())
    entry = measurement_of_run("mine", findings_in_memory(attribution))
    flops = 4 * 1024**2 * 8 * 64 // 2 * 7 // 2 / 4
    assert (entry.label, entry.source) == ("mine", "run")
    timed = Metric(3, "ms", ((2, 3, 4),), higher_is_better=False, depends_on_work=True)
    assert entry.figures["iteration_ms"] == timed
    rate = entry.figures["tflops"]
    assert (rate.value, *rate.recordings[0]) == pytest.approx((flops / 3e9, flops / 2e9, flops / 3e9, flops / 4e9))
    assert (rate.unit, rate.higher_is_better, rate.depends_on_work) == ("TFLOP/s", True, False)
    assert entry.figures["peak_memory_mib"] == Metric(1024, "MiB", higher_is_better=False, depends_on_work=True)
    # Each rank computes 1000 to 1300 ns of a wall of 2000.
    assert entry.figures["compute_ms"] == Metric(1150 / 1e6, "ms", higher_is_better=False, depends_on_work=True)
    assert entry.figures["wall_ms"].value == 2000 / 1e6
    assert entry.figures["exposed_comm"] == Metric(0.425, "share", higher_is_better=False)
    assert entry.figures["overlap_ratio"].higher_is_better is True
    assert {name: value for name, value in entry.settings.items() if value is not None} == {
        "world_size": "4", "seq": "1024", "batch": "1", "heads": "8", "kv_heads": "8", "head_dim": "64",
        "causal": "true", "dtype": "bf16", "passes": "forward and backward", "strategy": "burst", "hops": "nccl",
        "-p double_ring": "False", "kernel": "cudnn", "ranks_per_host": "4", "device": "NVIDIA H200",
    }  # fmt: skip


def test_times_of_an_entry_are_per_iteration():
    b = Builder(world_size=1)
    for begin in (0, 10_000):
        b.mark("ringprof::iteration", begin, begin + 5_000).run(
            FLASH, begin + 1_000, begin + 3_000, launched=begin + 10
        )
    figures = measurement_of_run("mine", findings_in_memory(attribute([b.trace()]))).figures
    # Each iteration is 2000 ns of attention; nothing runs for the 8000 ns between them.
    wanted = {"wall": 6000, "compute": 2000, "flash_fwd": 2000, "idle": 4000}
    wanted |= {"waterfall.attention": 2000, "waterfall.launch_gaps": 4000}
    assert {name: figures[f"{name}_ms"].value * 1e6 for name in wanted} == pytest.approx(wanted)
