"""Bytes and peers from ``run.json`` where no trace record has them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from ringprof.analysis.transfers.hops import hop_totals
from ringprof.run import Sent, Work, read_run
from ringprof.scale.pipeline import attribute
from ringprof.trace.columns import NONE
from ringprof.trace.ranks import read_traces
from tests.analysis.build import NCCL, Builder
from tests.analysis.recorded import recorded_run
from tests.paths import TRACES


def sent(channel, phase, count, size, operation="send_recv"):
    return Sent(
        channel=channel, phase=phase, operation=operation, link="same_host", count=count, sent_bytes=count * size
    )


def with_ring_receivers(work, step=1):
    """Return ``work`` with each rank's messages addressed to the rank ``step`` further."""
    return [
        msgspec.structs.replace(
            rank_work, sent=[msgspec.structs.replace(entry, to=(rank + step) % len(work)) for entry in rank_work.sent]
        )
        for rank, rank_work in enumerate(work)
    ]  # fmt: skip


def attribution_without_records(hops, *entries, step=1, **changes):
    """Attribute four ranks whose kernels have no record, with a run that counted ``entries`` on a ring."""
    builders = [Builder(rank=rank) for rank in range(4)]
    for b in builders:
        for number in range(hops):
            b.run(NCCL, 1000 * number, 1000 * number + 500, launched=10 * number + 1, stream=20)
    work = [Work(block_flops=1, block_calls={}, sent=list(entries)) for _ in range(4)]
    work = with_ring_receivers(work, step) if step else work
    return attribute([b.trace() for b in builders], recorded_run(work=work, **changes))


def test_hops_of_one_size_take_bytes_from_run_json():
    attribution = attribution_without_records(6, sent("kv", "forward", 3, 4000))
    for rank in attribution.ranks:
        assert [part.transfer.source for part in rank.splits] == ["run"] * 6
        assert hop_totals(rank.hops).sent_bytes == 6 * 4000
        assert {message.peer for message in rank.splits[0].transfer.sends} == {(rank.rank + 1) % 4}
        assert hop_totals(rank.hops).wire_ns == 6 * 500
    assert attribution.warnings == ()


def test_hops_of_two_sizes_in_a_pass_have_unknown_bytes():
    attribution = attribution_without_records(
        5, sent("kv", "forward", 1, 4000), sent("kv", "backward", 2, 4000), sent("dkv", "backward", 2, 8000)
    )
    assert [hop.sent_bytes for hop in attribution.ranks[0].hops] == [4000, None, None, None, None]


def test_hop_counts_that_disagree_with_run_json_give_no_bytes():
    attribution = attribution_without_records(5, sent("kv", "forward", 3, 4000))
    assert {part.transfer.source for rank in attribution.ranks for part in rank.splits} == {"none"}
    assert [warning.code for warning in attribution.warnings] == ["no_record"]


def test_run_with_all_to_all_gives_no_bytes_to_hops():
    attribution = attribution_without_records(
        3, sent("kv", "forward", 3, 4000), sent("q", "forward", 1, 10, "all_to_all")
    )
    assert {part.transfer.source for rank in attribution.ranks for part in rank.splits} == {"none"}


@pytest.mark.parametrize("step", [2, 0])
def test_peers_from_run_json_need_one_ring_over_all_ranks(step):
    """Check two rings of two ranks, and a run recorded before peers were."""
    attribution = attribution_without_records(3, sent("kv", "forward", 3, 4000), step=step)
    (part, *_) = attribution.ranks[0].splits
    assert (part.transfer.sent_bytes, part.transfer.sends, part.wait_ns) == (4000, (), None)
    assert [warning.code for warning in attribution.warnings] == ["no_record"]


@pytest.mark.parametrize("name", ["h200x4-zigzag-262144", "h200x4-ring-262144", "h200x4-stripe-262144"])
def test_filled_values_equal_the_records_of_a_real_run(name):
    run = read_run(TRACES / name / "run.json")
    traces = read_traces([TRACES / name / trace.path for trace in run.traces])
    none = np.empty(0, np.int64)
    without_records = []
    for trace in traces:
        rows = replace(trace.activities, collective=np.full_like(trace.activities.collective, NONE))
        records = replace(
            trace.comm_records, start_ns=none, end_ns=none, thread=none, external_id=none,
            collective=none.astype(np.int32),
        )  # fmt: skip
        without_records.append(replace(trace, activities=rows, comm_records=records))
    assert run.work is not None
    # These runs were recorded before run.json named the receivers.
    run = msgspec.structs.replace(run, work=with_ring_receivers(run.work))
    recorded, filled = attribute(traces, run), attribute(without_records, run)
    sizes_compared = 0
    for recorded_rank, filled_rank in zip(recorded.ranks, filled.ranks, strict=True):
        for hop, expected in zip(filled_rank.hops, recorded_rank.hops, strict=True):
            assert hop.parts[0].transfer.source == "run"
            assert {message.peer for message in hop.parts[0].transfer.sends} == {
                message.peer for message in expected.parts[0].transfer.sends
            }
            if hop.sent_bytes is not None:
                sizes_compared += 1
                assert hop.sent_bytes == expected.sent_bytes
    assert sizes_compared


def test_replayed_graphs_get_a_warning():
    b = Builder(world_size=1).run(NCCL, 0, 500, correlation=7, node=3).run(NCCL, 600, 700, correlation=7, node=4)
    (warning, other) = attribute([b.trace()]).warnings
    assert (warning.code, other.code) == ("cuda_graph", "no_record")
    assert "2 activities were replayed" in warning.message
