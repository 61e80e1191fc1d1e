"""Blocked time of CPU ranks on two hosts, by class of link."""

from __future__ import annotations

import msgspec
import pytest

from ringprof.analysis.findings.claim import Claim
from ringprof.analysis.findings.parts import cpu_blocked_clause
from ringprof.run import Sent, Work
from ringprof.scale.pipeline import attribute
from tests.analysis.build import Builder
from tests.analysis.recorded import recorded_run

BLOCK = "aten::_scaled_dot_product_flash_attention_for_cpu"


def work(*sent: tuple[str, str, int]) -> Work:
    return Work(
        block_flops=1, block_calls={},
        sent=[
            Sent(channel=channel, phase="forward", operation="send_recv", link=link, count=1, sent_bytes=size)
            for channel, link, size in sent
        ],
    )  # fmt: skip


def attributed(hosts: list[str], ranks: list[Work], waits: list[dict[str, int]]):
    """Return ranks with one iteration of 1,000,000 ns, blocked for these times in each channel."""
    run = recorded_run()
    topology = msgspec.structs.replace(run.topology, hosts=hosts, world_size=len(hosts), ranks_per_host=2)
    run = msgspec.structs.replace(run, topology=topology, work=ranks)
    traces = []
    for rank, blocked in enumerate(waits):
        builder = Builder(rank=rank, world_size=len(hosts)).mark("ringprof::iteration", 0, 1_000_000)
        builder.operate(BLOCK, 0, 1000)
        start = 1000
        for channel, length in blocked.items():
            builder.mark(f"ringprof::wait/{channel}", start, start + length)
            start += length
        traces.append(builder.trace())
    return attribute(traces, run)


def figures(claim: str) -> dict[str, float]:
    assert isinstance(claim, Claim)
    return {figure.name: figure.value for figure in claim.figures}


def test_blocked_time_is_split_by_inter_and_intra_host_channel():
    inner, outer = ("kv_inner", "same_host", 500), ("kv_outer", "other_host", 2000)
    attribution = attributed(["a", "b"], [work(inner, outer)] * 2, [{"kv_inner": 100_000, "kv_outer": 400_000},
                                                             {"kv_inner": 200_000, "kv_outer": 600_000}])  # fmt: skip
    assert cpu_blocked_clause(attribution) == (
        "50.0 % of the time ranks are blocked in channels that cross hosts (kv_outer), 15.0 % in channels within a "
        "host; 0.002 MB leave each host per iteration, 2 MB/s"  # 2000 bytes in 1 ms
    )
    assert attribution.run is not None
    block = msgspec.structs.replace(attribution, run=msgspec.structs.replace(attribution.run, timings=None))
    assert "0.002 MB leave each host in the captured block, 2 MB/s" in cpu_blocked_clause(block)


def test_ring_across_hosts_counts_all_its_ranks_as_blocked_between_hosts():
    here, there = work(("kv", "same_host", 100)), work(("kv", "other_host", 100))
    waits = [{"kv": 100_000}] * 4
    shown = figures(cpu_blocked_clause(attributed(["a", "a", "b", "b"], [here, there, here, there], waits)))
    assert shown == pytest.approx({
        "blocked_between_hosts/time": 0.1, "blocked_within_hosts/time": 0, "leaving_mb": 1e-4, "leaving_mbps": 0.1,
    })  # fmt: skip


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"]])
def test_no_link_sentence_for_one_host_or_unnamed_channels(hosts: list[str]):
    named = hosts == ["a", "a"]
    waits = [{"kv": 100}] * 2 if named else [{}] * 2
    attribution = attributed(hosts, [work(("kv", "same_host" if named else "other_host", 100))] * 2, waits)
    assert cpu_blocked_clause(attribution) == ""


def test_longest_blocking_channel_is_named_first():
    sent = [("dq", "other_host", 1), ("kv", "other_host", 1), ("dkv", "other_host", 1)]
    clause = cpu_blocked_clause(attributed(["a", "b"], [work(*sent)] * 2, [{"dq": 20, "kv": 300, "dkv": 90}] * 2))
    assert "cross hosts (kv, dkv, dq), 0.0 % in" in clause
