"""Tests of committed runs of inference, a whole layer and dynamic sizes: reports against traces and formulas."""

from __future__ import annotations

import gzip
import json
from statistics import fmean, median

import pytest

from ringprof.analysis.findings.inference import inference_of
from ringprof.report.text import TextStyle
from ringprof.run import read_run
from tests.loaded import analysis
from tests.paths import ROOT

TRACES = ROOT / "traces"
RUN = TRACES / "h200x2-decode-1048576"
CACHE = 2 * 8 * 1048576 * 8 * 128 * 2 // 2
"""Bytes of K and V of 8 sequences of 1048576 keys, 8 heads of 128 in bf16, on one of two ranks: 16 GiB."""


def attention_ns(rank: int) -> int:
    """Sum the time of the two attention kernels of a step, split keys and their merge, which do not overlap."""
    with gzip.open(RUN / f"rank{rank}.json.gz", "rt") as trace:
        events = json.load(trace)["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel" and "flash_fwd_splitkv" in event["name"]]
    assert len(kernels) == 2
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in kernels)
    assert spans[0][1] <= spans[1][0]
    time: int = round(sum(event["dur"] for event in kernels) * 1000)
    return time


def test_decode_time_per_token_and_memory_rate() -> None:
    run = analysis(RUN)
    inference = inference_of(run.attribution, run.findings.summary)
    assert inference is not None
    recorded = json.loads((RUN / "run.json").read_text())
    step = median(max(times) for times in zip(*recorded["timings"]["iterations_ns"], strict=True))
    assert inference.step_ns == step
    assert inference.new_tokens == 8
    assert inference.tokens_per_second == pytest.approx(8 / step * 1e9)
    assert inference.cache_bytes == CACHE == 17_179_869_184
    rate = fmean(CACHE / attention_ns(rank) for rank in range(2))
    assert inference.read_gbps == pytest.approx(rate, rel=1e-5)
    assert 4600 < rate < 4800, "of 4800 GB/s that an H200's memory has"
    assert inference.of_bandwidth == pytest.approx(rate / 4800, rel=1e-5)
    assert inference.bound_by == "cache"
    # Each rank has 16 heads of 128 of 8 sequences in bf16, gathered and reduced, and 32 LSEs of each in float32.
    assert inference.sent_bytes_per_token == 2 * (32768 + 32768 + 1024) / 8


def test_prefix_with_window_sends_its_rows_and_computes_its_pairs() -> None:
    """Two ranks have zigzag chunks of 16384; each sends the prefix of 1024 and the 4095 tokens before a chunk."""
    run = read_run(TRACES / "h200x2-zigzag-65536-prefix" / "run.json")
    rows = (1024 + 4095) * 8 * 128 * 2
    assert run.work is not None and run.verification is not None and run.verification.timed is not None
    for rank in run.work:
        assert rank.sent is not None
        # K and V in both passes; dK and dV in float32 go directly to their owner.
        assert [(entry.channel, entry.count, entry.sent_bytes) for entry in rank.sent] == [
            ("kv", 1, 2 * rows), ("kv", 1, 2 * rows), ("dkv_back", 1, 4 * rows),
        ]  # fmt: skip
    window = 4096 * 4097 // 2 + (65536 - 4096) * 4096
    # Each query from 4096 on sees one more key of the prefix, until all 1024 lie before its window.
    beside = sum(min(1024, query - 4095) for query in range(4096, 65536))
    assert sum(rank.block_flops or 0 for rank in run.work) == 14 * 32 * 128 * (window + beside)


def test_decode_reads_only_the_window_of_the_cache() -> None:
    run = analysis(TRACES / "h200x2-decode-1048576-window")
    inference = inference_of(run.attribution, run.findings.summary)
    assert inference is not None and inference.cache_bytes == CACHE // 16
    # The bytes sent do not depend on the window.
    assert inference.sent_bytes_per_token == 2 * (32768 + 32768 + 1024) / 8


def slowest_median_s(name: str) -> float:
    """Return the median over iterations of the slowest rank's time, in seconds."""
    recorded = json.loads((TRACES / name / "run.json").read_text())
    seconds: float = median(max(times) for times in zip(*recorded["timings"]["iterations_ns"], strict=True)) / 1e9
    return seconds


def test_prefill_sends_queries_and_returns_outputs_and_lse() -> None:
    run = analysis(TRACES / "h200x2-ring-prefill-262144")
    inference = inference_of(run.attribution, run.findings.summary)
    assert inference is not None and inference.new_tokens == 32768 and inference.bound_by == "attention"
    # 32 heads of 128 in bf16 there and back, and an LSE each in float32, to the one other rank.
    assert inference.sent_bytes_per_token == 32 * 128 * 2 * 2 + 32 * 4 == 16_512
    # The last 32768 of 262144 tokens, causal: 2 FLOPs for a pair's score and 2 for its value, a number.
    pairs = 32768 * (262144 - 32768) + 32768 * 32768 // 2
    seconds = slowest_median_s("h200x2-ring-prefill-262144")
    assert run.report()["summary"]["tflops"] == pytest.approx(4 * pairs * 32 * 128 / 2 / seconds / 1e12, rel=1e-3)


def test_a_layers_rate_is_of_attention_and_matrix_products() -> None:
    report = analysis(TRACES / "h200x2-zigzag-65536-layer").report()
    tokens, hidden, kv, mlp = 65536, 32 * 128, 8 * 128, 11008
    products = 6 * tokens * (hidden * (hidden + 2 * kv) + hidden * hidden + 3 * hidden * mlp)
    attention = 3.5 * 4 * tokens**2 / 2 * hidden
    seconds = slowest_median_s("h200x2-zigzag-65536-layer")
    assert report["summary"]["tflops"] == pytest.approx((products + attention) / 2 / seconds / 1e12, rel=1e-3)
    assert report["summary"]["tflops"] == pytest.approx(532.0, rel=1e-3)


def test_every_step_of_changing_sizes_has_its_time_and_rate() -> None:
    folder = TRACES / "h200x2-zigzag-65536-sizes"
    steps = analysis(folder).report()["run"]["cp_steps"]
    timings = read_run(folder / "run.json").timings
    assert timings is not None and timings.steps_ns is not None
    assert [(step["ranks"], step["sequences"], step["seq"]) for step in steps] == [
        (2, 1, 65536), (1, 2, 32768), (2, 1, 65536),
    ]  # fmt: skip
    text = analysis(folder).to_terminal(TextStyle(width=200))
    for number, step in enumerate(steps):
        # The steps' times sum to more than an iteration, since each is of its own slowest rank.
        assert f"{step['slowest_ns'] / 1e6:.2f} ms on its slowest rank" in text
        assert step["slowest_ns"] == max(rank[number] for rank in timings.steps_ns)
        flops = step["sequences"] * 3.5 * 4 * step["seq"] ** 2 / 2 * 32 * 128 / 2
        assert step["tflops"] == pytest.approx(flops / step["slowest_ns"] / 1e3, rel=1e-6)
