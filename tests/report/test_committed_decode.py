"""The committed decode run: what its report says of a token, held against its own trace and the formulas."""

from __future__ import annotations

import gzip
import json
from statistics import fmean, median

import pytest

from ringprof import load
from ringprof.analysis.findings.inference import inference_of
from tests.paths import ROOT

RUN = ROOT / "traces" / "h200x2-decode-1048576"
CACHE = 2 * 8 * 1048576 * 8 * 128 * 2 // 2
"""K and V of 8 sequences of 1048576 keys, 8 heads of 128 in bf16, on one of two ranks: 16 GiB."""


def attention_ns(rank: int) -> int:
    """Time of the attention kernels by their names, none of which overlap; two a step: split keys, and their merge."""
    with gzip.open(RUN / f"rank{rank}.json.gz", "rt") as trace:
        events = json.load(trace)["traceEvents"]
    found = [event for event in events if event.get("cat") == "kernel" and "flash_fwd_splitkv" in event["name"]]
    assert len(found) == 2
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in found)
    assert spans[0][1] <= spans[1][0]
    time: int = round(sum(event["dur"] for event in found) * 1000)
    return time


def test_a_token_and_the_memorys_rate() -> None:
    analysis = load(RUN)
    found = inference_of(analysis.attribution, analysis.findings.summary)
    assert found is not None
    recorded = json.loads((RUN / "run.json").read_text())
    step = median(max(times) for times in zip(*recorded["timings"]["iterations_ns"], strict=True))
    assert found.step_ns == step
    assert found.new_tokens == 8
    assert found.tokens_per_second == pytest.approx(8 / step * 1e9)
    assert found.cache_bytes == CACHE == 17_179_869_184
    rate = fmean(CACHE / attention_ns(rank) for rank in range(2))
    assert found.read_gbps == pytest.approx(rate, rel=1e-5)
    assert 4600 < rate < 4800, "of 4800 GB/s that an H200's memory has"
    assert found.of_bandwidth == pytest.approx(rate / 4800, rel=1e-5)
    assert found.bound_by == "cache"
    # Of each rank: 16 heads of 128 of 8 sequences in bf16, gathered and reduced, and 32 LSEs of each in float32.
    assert found.sent_bytes_per_token == 2 * (32768 + 32768 + 1024) / 8
