"""Repeated events and counts that contradict ``run.json`` are warned of; sound runs are not."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import ringprof
from ringprof.analysis.attribution import Attribution
from ringprof.analysis.timeline.window import EVERYTHING
from ringprof.run import Sent, StrategyUsed, Work
from ringprof.scale.pipeline import attribute
from tests.analysis.build import FLASH, Builder
from tests.analysis.recorded import recorded_run
from tests.analysis.rings import BACKWARD
from tests.paths import DATA, TRACES

Event = dict[str, Any]
RUN = TRACES / "h200x2-zigzag-65536"


def rewritten(tmp_path: Path, change: Callable[[list[Event]], list[Event]]) -> Path:
    """Copy the run with changed events, without the reduced form of its traces."""
    target = tmp_path / RUN.name
    target.mkdir()
    (target / "run.json").write_bytes((RUN / "run.json").read_bytes())
    for path in RUN.glob("*.json.gz"):
        document = json.loads(gzip.decompress(path.read_bytes()))
        document["traceEvents"] = change(document["traceEvents"])
        (target / path.name).write_bytes(gzip.compress(json.dumps(document).encode(), 1))
    return target


def figures(analysis: ringprof.Analysis) -> Any:
    report = json.loads(json.dumps(analysis.report(), default=str))
    return {key: value for key, value in report.items() if key not in ("warnings", "inputs", "source")} | {
        "ranks": [{**rank, "path": ""} for rank in report["ranks"]]
    }


def codes(analysis: ringprof.Analysis | Attribution) -> set[str]:
    return {warning.code for warning in analysis.warnings}


def test_duplicated_events_count_once(tmp_path):
    twice = ringprof.load(rewritten(tmp_path, lambda events: [*events, *events]))
    assert codes(twice) == {"repeated_events"}
    assert figures(twice) == figures(ringprof.load(RUN))


@pytest.mark.parametrize("name", sorted(path.name for path in TRACES.iterdir() if (path / "run.json").exists()))
def test_committed_runs_have_no_cross_check_warnings(name):
    warning_codes = codes(ringprof.load(TRACES / name))
    assert not warning_codes & {"repeated_events", "stream_overlap", "run_counts_differ"}


def test_duplicated_events_at_shifted_times_are_a_warning(tmp_path):
    """Repeat the hops and the ranges of blocks; run.json counts 3 hops of 536,870,912 bytes, 2 and 4 blocks."""

    def repeated(event: Event) -> bool:
        return event["ph"] == "X" and ("SendRecv" in event["name"] or event["name"].endswith("/block"))

    path = rewritten(
        tmp_path, lambda events: [*events, *({**each, "ts": each["ts"] + 0.001} for each in events if repeated(each))]
    )
    messages = [each.message for each in ringprof.load(path).warnings if each.code == "run_counts_differ"]
    assert [message.partition(" in 1 profiled iteration")[0] for message in messages] == [
        # One launch states the bytes of one kernel: those of the repeated kernels are not known.
        "the trace has 6 send/recv, run.json counts 3 hops (536,870,912 bytes)",
        "the trace has 4 forward blocks, run.json counts 2",
        "the trace has 8 backward blocks, run.json counts 4",
    ]


def ring_of_two(hops: int, blocks: int, *, with_bytes: bool = True) -> list[Any]:
    """Return the traces of two ranks with one iteration of this many hops and forward blocks."""
    traces = []
    for rank in (0, 1):
        builder = Builder(rank=rank, world_size=2)
        for number in range(hops):
            start = 1000 * number
            fields = {"group_ranks": (0, 1), "group_size": 2, "elements": 1000 if with_bytes else None}
            builder.batch(start + 200, start + 500, start + 600, to=1 - rank, source=1 - rank, tensors=1, **fields)
        for number in range(blocks):
            start = 1000 * number
            builder.run(FLASH, start + 650, start + 700, launched=start + 310)
            builder.mark(f"ringprof::fwd/step={number}/block", start + 300, start + 320)
        builder.mark("ringprof::iteration", 0, 1000 * max(hops, blocks))
        traces.append(builder.trace())
    return traces


def run_with(count: int, sent_bytes: int, blocks: int, to: int | None = None) -> Any:
    """Return a run whose run.json counts these hops, bytes and forward blocks per rank."""
    works = []
    for rank in (0, 1):
        sent = Sent(
            channel="kv", phase="forward", operation="send_recv", link="same_host", count=count, sent_bytes=sent_bytes,
            to=1 - rank if to is None else to,
        )  # fmt: skip
        works.append(Work(block_flops=1, block_calls={"forward": blocks, "backward": 0}, sent=[sent]))
    strategy = StrategyUsed(name="zigzag", target="ringprof.strategies.algorithms.zigzag:Zigzag", params={})
    return recorded_run(2, work=works, strategy=strategy)


@pytest.mark.parametrize(
    ("hops", "blocks", "expected"),
    [
        (3, 4, []),
        (6, 4, ["6 send/recv (12,000 bytes), run.json counts 3 hops (6,000 bytes)"]),
        (2, 4, ["2 send/recv (4,000 bytes), run.json counts 3 hops (6,000 bytes)"]),
        (3, 8, ["8 forward blocks, run.json counts 4"]),
        (3, 3, ["3 forward blocks, run.json counts 4"]),
        # A CUDA graph replays the kernels without the ranges.
        (3, 0, []),
    ],
)
def test_counts_that_differ_from_run_json_are_a_warning(hops, blocks, expected):
    attribution = attribute(ring_of_two(hops, blocks), run_with(3, 6000, 4))
    warnings = [warning for warning in attribution.warnings if warning.code == "run_counts_differ"]
    assert [warning.message.partition(" in 1 profiled iteration:")[0] for warning in warnings] == [
        f"the trace has {text}" for text in expected
    ]
    assert all((warning.rank, warning.count) == (None, 2) for warning in warnings)


def test_hops_without_bytes_are_counted():
    assert "run_counts_differ" not in codes(attribute(ring_of_two(3, 4, with_bytes=False), run_with(3, 6000, 4)))
    assert "run_counts_differ" in codes(attribute(ring_of_two(6, 4, with_bytes=False), run_with(3, 6000, 4)))


def test_hop_of_several_kernels_is_not_a_warning():
    assert "run_counts_differ" not in codes(attribute(ring_of_two(6, 4), run_with(3, 12000, 4)))


def test_messages_outside_the_ring_are_not_hops():
    """Messages of a pipeline, of which the ring is one stage, do not count."""
    traces = []
    for rank in (0, 1):
        builder = Builder(rank=rank, world_size=4).mark("ringprof::iteration", 0, 9000)
        for number, peer in enumerate((1 - rank, 1 - rank, 1 - rank, rank + 2, rank + 2)):
            start = 1000 * number
            builder.batch(start + 200, start + 500, start + 600, to=peer, source=peer, tensors=1)
        traces.append(builder.trace())
    assert "run_counts_differ" not in codes(attribute(traces, run_with(3, 6000, 4)))
    assert "run_counts_differ" in codes(attribute(traces, run_with(4, 8000, 4)))


def test_a_window_of_part_of_the_iteration_is_not_compared():
    traces = ring_of_two(6, 8)
    part = msgspec.structs.replace(EVERYTHING, between_ns=(0, 2000))
    assert "run_counts_differ" not in codes(attribute(traces, run_with(3, 6000, 4), None, part))


def test_overlapping_kernels_on_one_stream_are_a_warning():
    """Two kernels at once on one stream, as where events are repeated with other times."""
    builder = Builder(world_size=1)
    for start in (0, 10):
        builder.run(BACKWARD, start, start + 700, stream=7).run(BACKWARD, start + 710, start + 980, stream=7)
    (warning,) = attribute([builder.trace()]).warnings
    # 2 x 970 ns of flash backward in 990 ns.
    assert (warning.code, warning.rank) == ("stream_overlap", 0)
    assert warning.message.startswith("flash backward on stream 7 adds up to 196.0% of the window")


def test_concurrent_streams_are_not_a_warning():
    builder = Builder(world_size=1)
    for stream in (7, 8, 9):
        builder.run(BACKWARD, 0, 1000, stream=stream)
    assert not attribute([builder.trace()]).warnings


FUSED = {
    "gemm_one_shot_all_reduce_kernel": "gemm_one_shot_all_reduce_kernel",
    "void aiter::allreduce_fusion_kernel_1stage<__hip_bfloat16, 8, 512>(aiter::RankData*)": (
        "allreduce_fusion_kernel_1stage"
    ),
    "void flashinfer::trtllm_mnnvl_allreduce::oneshotAllreduceFusionKernel<8, true>(int*)": (
        "oneshotAllreduceFusionKernel"
    ),
    "iris_stage_one_shot_allreduce_residual_attnres_gluon_kernel": (
        "iris_stage_one_shot_allreduce_residual_attnres_gluon_kernel"
    ),
}
"""Names of kernels that do both, from tests/data/kernel_kinds.csv, and what the warning calls them."""
SEPARATE = [
    "void flashinfer::trtllm_mnnvl_allreduce::twoshotAllreduceKernel<8, __nv_bfloat16>(__nv_bfloat16*)",
    "_all_gather_matmul_kernel_comm", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", BACKWARD,
    "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)",
    "void at::native::elementwise_kernel<all_reduce, gemm>(int)",
]  # fmt: skip


@pytest.mark.parametrize("name", FUSED)
def test_a_kernel_that_communicates_and_computes_is_a_warning(name: str) -> None:
    traces = [Builder(rank=rank, world_size=2).run(name, 0, 1000, stream=7).trace() for rank in (0, 1)]
    (warning,) = [item for item in attribute(traces).warnings if item.code == "fused_communication"]
    assert f"compute at once ({FUSED[name]}):" in warning.message and warning.count == 2


@pytest.mark.parametrize("name", SEPARATE)
def test_a_kernel_that_does_one_of_both_is_no_warning(name: str) -> None:
    builder = Builder(world_size=1).run(name, 0, 1000, stream=7)
    assert "fused_communication" not in codes(attribute([builder.trace()]))


def test_fused_kernels_of_the_list_of_kernels_are_communication() -> None:
    """No attention kernel and no matrix product of the list is called fused; all that are count as communication."""
    with (DATA / "kernel_kinds.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.reader(file) if len(row) > 1]
    fused = {}
    for name, kind, *_ in rows[1:]:
        trace = Builder(world_size=1).run(name, 0, 1000, stream=7).trace()
        if "fused_communication" in codes(attribute([trace])):
            fused[name] = kind
    assert len(fused) == 8 and set(fused.values()) == {"all_reduce"}
