"""Two recorded runs of 8 GPUs: every metric of every rank against a sweep over the raw events, to the nanosecond.

The reference shares nothing with the package: it uses the standard library's JSON, decimal times, and kinds by the
kernel names of these two runs.
"""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from functools import cache

import pytest

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.summary import summarise
from ringprof.analysis.transfers.hops import hop_totals
from ringprof.scale.pipeline import attribute
from ringprof.trace.ranks import read_traces
from tests.analysis.sweep import sweep
from tests.paths import DATA

NVLINK, TWO_HOSTS = "h200x8-zigzag-131072", "h200x8-zigzag-131072-two-hosts"
RANKS = [(run, rank) for run in (NVLINK, TWO_HOSTS) for rank in range(8)]


@cache
def attribution_of(run: str, ranks_per_host: int | None = None) -> Attribution:
    paths = [DATA / run / f"rank{rank}.json.gz" for rank in range(8)]
    return attribute(read_traces(paths), ranks_per_host=ranks_per_host)


def nanoseconds(microseconds: str) -> int:
    value = Decimal(microseconds) * 1000
    assert value == value.to_integral_value()
    return int(value)


@cache
def raw_events(run: str, rank: int) -> list[tuple[int, int, str]]:
    """Return (start, end, class) of all device activities, without the base time."""
    text = gzip.decompress((DATA / run / f"rank{rank}.json.gz").read_bytes())
    events = []
    for event in json.loads(text, parse_float=str, parse_int=str)["traceEvents"]:
        if event.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"}:
            start = nanoseconds(event["ts"])
            memory = "comm" if "PtoP" in event["name"] else "memory"
            kernel = "comm" if event["name"].startswith("nccl") else "compute"
            kind = kernel if event["cat"] == "kernel" else memory
            events.append((start, start + nanoseconds(event["dur"]), kind))
    return events


@pytest.mark.parametrize(("run", "rank"), RANKS)
def test_every_figure_equals_the_sweep_over_raw_events(run, rank):
    expected = sweep(raw_events(run, rank))
    result = attribution_of(run).ranks[rank].breakdown
    assert {name: getattr(result, f"{name}_ns") for name in expected} == expected


@pytest.mark.parametrize(("run", "rank"), RANKS)
def test_kinds_account_for_every_activity(run, rank):
    raw = raw_events(run, rank)
    kinds = attribution_of(run).ranks[rank].breakdown.kinds
    assert sum(kind.calls for kind in kinds.values()) == len(raw)
    assert sum(kind.time_ns for kind in kinds.values()) == sum(end - start for start, end, _ in raw)


def test_the_known_figures_of_the_nvlink_run():
    summary = summarise(attribution_of(NVLINK))
    means = {part.name: round(part.mean_ns / 1e6, 3) for part in summary.parts}
    assert means == {
        "compute": 150.477,
        "exposed_comm": 10.770,
        "exposed_memory": 0.077,
        "idle": 0.091,
        "wall": 161.415,
    }
    assert (summary.slowest_rank, round(summary.slowest_wall_ns / 1e6, 2)) == (5, 163.12)
    times = {row.kind: row for row in summary.kinds}
    assert round(times["flash_bwd"].time_ns / 1e6, 2) == 105.30
    assert round(times["send_recv"].time_ns / 1e6, 2) == 53.71
    assert times["send_recv"].hidden == pytest.approx(0.80, abs=0.005)
    assert summary.attention == ("cuDNN",)


def test_waiting_and_wire_of_the_nvlink_run():
    (row,) = summarise(attribution_of(NVLINK)).communication
    assert row.wait_share == pytest.approx(0.35, abs=0.005)
    assert row.wire_gbps == pytest.approx(289, abs=1)
    assert row.best_gbps == pytest.approx(438, abs=0.5)
    assert attribution_of(NVLINK).warnings == ()


def test_every_hop_has_its_peers_and_bytes():
    kv, dkv = 2 * 131072 // 8 * 40 * 128 * 2, 2 * 131072 // 8 * 40 * 128 * 4
    for rank in attribution_of(NVLINK).ranks:
        assert len(rank.hops) == 22
        for hop in rank.hops:
            (part,) = hop.parts
            assert part.transfer.source == "cpu_records"
            assert {message.peer for message in part.transfer.sends} == {(rank.rank + 1) % 8}
            assert {message.peer for message in part.transfer.receives} == {(rank.rank - 1) % 8}
            assert part.transfer.sent_bytes in {kv, dkv}


@pytest.mark.parametrize("run", [NVLINK, TWO_HOSTS])
def test_wait_and_wire_sum_to_each_kernel_below_the_best_rate(run):
    attribution = attribution_of(run)
    for rank in attribution.ranks:
        for part in rank.splits:
            assert part.wait_ns is not None and part.wire_ns and part.transfer.sent_bytes
            assert part.wait_ns + part.wire_ns == part.transfer.duration_ns
            assert part.wait_ns >= 0
            rate = part.transfer.sent_bytes / part.wire_ns
            assert rate <= attribution.best_gbps["send_recv", part.link] * (1 + 1e-6)


@pytest.mark.parametrize("ranks_per_host", [None, 4])
def test_ranks_at_the_slow_link_are_mostly_on_the_wire(ranks_per_host):
    for rank in attribution_of(TWO_HOSTS, ranks_per_host).ranks:
        totals = hop_totals(rank.hops)
        assert totals.wait_share is not None and totals.wire_gbps is not None
        if rank.rank in {0, 3, 4, 7}:
            assert totals.wait_share < 0.3
            assert 3.0 < totals.wire_gbps < 4.5
        else:
            assert totals.wait_share > 0.8


def test_host_names_split_the_links():
    rows = {row.link: row for row in summarise(attribution_of(TWO_HOSTS, 4)).communication}
    assert set(rows) == {"same_host", "other_host"}
    assert rows["other_host"].wire_gbps == pytest.approx(3.7, abs=0.2)
