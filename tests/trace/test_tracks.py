"""Traces whose rows have no category and are identified by their tracks: XLA, rocprof and CANN."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from ringprof.analysis.timeline.breakdown import Breakdown
from ringprof.errors import TraceFormatError
from ringprof.scale.pipeline import attribute
from ringprof.trace.columns import KERNEL, MEMCPY, NONE, Device
from ringprof.trace.inputs import detect
from ringprof.trace.kineto import parse_trace
from ringprof.trace.kineto.event_list import Event
from ringprof.trace.kineto.tracks import Tracks
from ringprof.trace.ranks import read_traces

ARGS = msgspec.Raw(b'{"name": "Ascend Hardware"}')
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def named(kind: str, pid: int, name: str, **where: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "args": {"name": name}, **where}


def row(pid: int, tid: int, name: str, start_us: float, us: float) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start_us, "dur": us, "args": {"hlo_op": name}}


XLA: dict[str, Any] = {
    "displayTimeUnit": "ns",
    "metadata": {"highres-ticks": True},
    "traceEvents": [
        named("process_name", 1, "/device:GPU:0"),
        named("thread_name", 1, "Stream #13(compute,MemcpyD2D)", tid=13),
        named("thread_name", 1, "Stream #20(compute)", tid=20),
        named("thread_name", 1, "XLA Ops", tid=10002),
        named("process_name", 2, "/device:GPU:1"),
        named("thread_name", 2, "Stream #13(compute)", tid=13),
        named("process_name", 701, "/host:CPU"),
        row(701, 1, "PjitFunction(train_step)", 0, 500),
        row(1, 13, "gemm_fusion_dot_1", 10.5, 100.25),
        row(1, 20, NCCL, 60.5, 100),
        row(1, 13, "MemcpyD2D", 170, 10),
        row(1, 10002, "gemm_fusion_dot.1", 10.5, 100.25),
        row(2, 13, "loop_add_fusion", 12, 50),
        {},
    ],
}


def breakdowns(path: str) -> list[Breakdown]:
    assert detect([path]).type == "trace"
    return [rank.breakdown for rank in attribute(read_traces([path])).ranks]


def test_each_gpu_of_an_xla_trace_is_a_rank(tmp_path):
    """Read only the stream tracks of a GPU; its other tracks repeat the same work."""
    path = tmp_path / "host.trace.json"
    path.write_text(json.dumps(XLA))
    first, second = breakdowns(str(path))
    assert (first.wall_ns, first.compute_ns) == (169_500, 100_250)
    assert first.exposed_comm_ns == 160_500 - 110_750
    assert first.exposed_memory_ns == 10_000
    assert (second.wall_ns, second.compute_ns) == (50_000, 50_000)
    assert {"gemm", "all_reduce", "memcpy"} == set(first.kinds)


def test_xla_modules_and_operations_are_not_counted_beside_their_kernels(tmp_path):
    """Count 20 us of computation for four kernels of 5 us, each within an operation of 8 us and a module of 9 us."""
    path = tmp_path / "host.trace.json"
    tracks = {1: "Stream #7(Compute)", 2: "XLA Modules", 3: "XLA Ops"}
    events = [named("process_name", 1, "/device:GPU:0")]
    events += [named("thread_name", 1, name, tid=tid) for tid, name in tracks.items()]
    for start in (100, 110, 120, 130):
        events += [row(1, 1, "gemm_kernel", start, 5), row(1, 2, "jit_f", start, 9), row(1, 3, "dot.1", start, 8)]
    path.write_text(json.dumps({"traceEvents": events}))
    (breakdown,) = breakdowns(str(path))
    assert (breakdown.compute_ns, breakdown.wall_ns, breakdown.kinds["gemm"].calls) == (20_000, 35_000, 4)


def test_an_xla_trace_of_one_gpu_is_of_the_rank_in_its_name(tmp_path):
    path = tmp_path / "rank3.trace.json"
    path.write_text(json.dumps({**XLA, "traceEvents": [*XLA["traceEvents"][:4], row(1, 13, "fusion", 1, 2)]}))
    (trace,) = read_traces([str(path)])
    assert (trace.rank, trace.world_size) == (3, None)
    assert not trace.warnings


def test_jax_perfetto_copy_is_not_another_run(tmp_path):
    for name in ("host.trace.json", "perfetto_trace.json.gz"):
        (tmp_path / name).write_text(json.dumps(XLA))
    assert [path.rpartition("/")[2] for path in detect([tmp_path]).paths] == ["host.trace.json"]
    assert len(read_traces(detect([tmp_path]).paths)) == 2


def test_legacy_profiler_traces_are_refused_by_name():
    events = [{**row(1, 1, "aten::mm", 1, 5), "pid": "CUDA functions"}]
    with pytest.raises(TraceFormatError, match=r"nothing to analyse: 1 events, .*; of process 'CUDA functions' \(1\)"):
        parse_trace(json.dumps(events).encode())


def test_rocprof_json_is_read(tmp_path):
    """Read kernels on the tracks of a GPU; warn that copies, on a track without a GPU, are missing."""
    events = [
        {},
        named("process_name", 2, "CPU HIP API"),
        named("process_name", 1, "COPY"),
        named("process_name", 6, "GPU0"),
        {**row(6, 1, "Cijk_Alik_Bljk_SB_MT64x64", 0, 0), "ts": "100", "dur": "50"},
        {**row(6, 2, "__amd_rocclr_copyBuffer", 0, 0), "ts": "160.5", "dur": "3"},
        row(2, 7, "hipLaunchKernel", 90, 5),
        row(1, 0, "CopyHostToDevice", 170, 5),
    ]
    trace = parse_trace(json.dumps({"traceEvents": events, "otherData": {}}).encode())
    rows = trace.activities
    assert rows.start_ns.tolist() == [100_000, 160_500]
    assert rows.stream.tolist() == [1, 2]
    assert set(rows.device.tolist()) == {0}
    (warning,) = trace.warnings
    assert (warning.code, warning.count) == ("unknown_category", 1)
    assert "process 'COPY' (1)" in warning.message


def test_copies_and_kernels_are_distinguished_by_name():
    events = [*XLA["traceEvents"][:6], row(1, 13, "MemcpyP2P", 1, 2), row(1, 13, "fusion", 4, 2)]
    rows = parse_trace(json.dumps({"traceEvents": events}).encode()).activities
    assert rows.category.tolist() == [MEMCPY, KERNEL]
    assert np.all(rows.correlation == NONE)


@pytest.mark.parametrize("process", ["Ascend Hardware", "/device:TPU:0"])
def test_unread_rows_of_other_devices_are_a_warning(process):
    operator = {**row(9, 1, "aten::mm", 1, 5), "cat": "cpu_op"}
    events = [named("process_name", 2, process), operator, row(2, 10, "MatMulV2", 2, 100)]
    trace = parse_trace(json.dumps(events).encode())
    assert trace.lacks_device
    assert [warning.message for warning in trace.warnings] == [
        f"what ran on the device is not read: process '{process}' (1)"
    ]


def test_track_names_take_little_memory():
    """Limit the memory for names, however many processes a file names and however long their ids are."""
    tracks = Tracks()
    long = [Event(ph="M", name="process_name", pid="p" * 10_000 + str(number), args=ARGS) for number in range(3)]
    tracks.add_names(long)
    tracks.add_names(Event(ph="M", name="process_name", pid=number, args=ARGS) for number in range(100_000))
    assert tracks.unread_source(Event(pid=16_383)) == "process 'Ascend Hardware'"
    assert tracks.unread_source(Event(pid=16_384)) is None
    assert tracks.unread_source(long[0]) == f"process '{'p' * 40}'"


def cann(*rows: dict[str, Any]) -> list[dict[str, Any]]:
    """Return rows in torch_npu's format: times are text, and the process identifies the rows."""
    names = {1: "Python", 2: "CANN", 3: "Ascend Hardware", 4: "Communication", 5: "Overlap Analysis"}
    return [
        *(named("process_name", pid, name) for pid, name in names.items()),
        named("thread_name", 4, "Group 0 Communication", tid=0),
        named("thread_name", 4, "Plane 0", tid=1),
        *({**event, "ts": f"{event['ts']:.3f}"} for event in rows),
    ]


def task(tid: int, name: str, start_us: float, us: float, kind: str) -> dict[str, Any]:
    return {**row(3, tid, name, start_us, us), "args": {"Task Type": kind}}


def test_npu_trace_is_read(tmp_path):
    """Count tasks on cores, copies, and each communicator's own track, but no waits, planes and summaries."""
    path = tmp_path / "trace_view.json"
    events = cann(
        {**row(1, 1, "aten::mm", 0, 5), "cat": "cpu_op"},
        {**row(1, 1, "Enqueue", 0, 1), "cat": "enqueue"},
        row(2, 5, "AscendCL@aclnnMm", 0, 3),
        task(2, "aclnnMatmul_MatMulV2_MatMulV2", 10, 100, "AI_CORE"),
        task(2, "aclnnFlashAttentionScore_FlashAttentionScore_FlashAttentionScore", 120, 50, "MIX_AIC"),
        task(2, "FlashAttentionScoreGrad", 170, 60, "KERNEL_MIX_AIC"),
        task(2, "aclnnAdd_AddAiCore_Add", 230, 10, "AI_VECTOR_CORE"),
        task(2, "EVENT_WAIT", 240, 300, "EVENT_WAIT"),
        task(3, "MEMCPY_ASYNC", 240, 20, "MEMCPY_ASYNC"),
        row(4, 0, "hcom_allReduce__606_0_1", 150, 400),
        row(4, 1, "Notify_Wait", 150, 100),
        row(5, 0, "Computing", 10, 100),
    )
    path.write_text(json.dumps(events))
    (breakdown,) = breakdowns(str(path))
    assert (breakdown.wall_ns, breakdown.compute_ns) == (540_000, 220_000)
    # The all-reduce overlaps 90 us of computation at its start, and runs until 550 us.
    assert breakdown.exposed_comm_ns == 310_000
    assert {name: kind.time_ns for name, kind in breakdown.kinds.items()} == {
        "gemm": 100_000,
        "flash_fwd": 50_000,
        "flash_bwd": 60_000,
        "elementwise": 10_000,
        "all_reduce": 400_000,
        "memcpy": 20_000,
    }
    (trace,) = read_traces([str(path)])
    assert (trace.warnings, trace.devices) == ([], [Device(0, "Ascend NPU")])


def test_npu_tasks_are_joined_to_their_launches_by_arrows(tmp_path):
    """Join each task to the start of the arrow whose number holds the connection of the task."""
    path = tmp_path / "trace_view.json"
    tasks = [task(2, "aclnnAdd_AddAiCore_Add", start, 10, "AI_VECTOR_CORE") for start in (100, 200, 300)]
    arrows = []
    for connection, (event, launched) in enumerate(zip(tasks, (90, 180, 310), strict=True), start=8):
        event["args"]["connection_id"] = connection
        number = {"cat": "HostToDevice", "id": str((connection << 32) + 0xFFFFFFFF)}
        arrows.append({**number, "ph": "s", "pid": 2, "tid": 5, "ts": launched})
        arrows.append({**number, "ph": "f", "pid": 3, "tid": 2, "ts": event["ts"], "bp": "e"})
    path.write_text(json.dumps(cann(*tasks, *arrows)))
    (trace,) = read_traces([str(path)])
    assert trace.producer == "ascend" and not trace.warnings
    (rank,) = attribute([trace]).ranks
    # Gaps of 90 us: the second task is launched 70 us into the first gap, the third after its own start.
    assert rank.idle is not None
    assert (rank.idle.host_ns, rank.idle.blocked_ns) == (70_000 + 90_000, 20_000)


def test_untyped_npu_tasks_match_the_summary_of_the_file(tmp_path):
    """Classify tasks of the type "Other", common in CANN 7; the lane "Overlap Analysis" has the expected times."""
    path = tmp_path / "trace_view.json"
    tasks = [
        ("aclnnInplaceZero_ZerosLikeAiCore_ZerosLike", 100.204, 1.35, "Other"),
        ("aclnnMm_MatMulCommon_MatMulV2", 103.5, 40.25, "Other"),
        ("trans_TransData_3", 143.75, 6.125, "Other"),
        ("DropOutGenMaskV4", 200.0, 9.5, "AI_CPU"),
        ("MEMCPY_ASYNC", 220.0, 10.0, "Other"),
        ("EVENT_WAIT", 230.0, 300.0, "Other"),
        ("Conv2DBackpropFilter6", 600.0, 100.001, "Other"),
    ]
    computing = [(100.204, 1.35), (103.5, 46.375), (200.0, 9.5), (600.0, 100.001)]
    free = [(101.554, 1.946), (149.875, 50.125), (209.5, 390.5)]
    summary = [row(5, 0, "Computing", start, us) for start, us in computing]
    summary += [row(5, 3, "Free", start, us) for start, us in free]
    path.write_text(json.dumps(cann(*(task(3, *fields) for fields in tasks), *summary)))
    (breakdown,) = breakdowns(str(path))
    busy_ns, free_ns = (round(1000 * sum(us for _, us in spans)) for spans in (computing, free))
    assert breakdown.compute_ns == busy_ns == 157_226
    # The summary counts copies as free time.
    assert (breakdown.exposed_memory_ns, breakdown.exposed_memory_ns + breakdown.idle_ns) == (10_000, free_ns)
    assert breakdown.wall_ns == busy_ns + free_ns
    (trace,) = read_traces([str(path)])
    assert (len(trace.activities.start_ns), trace.warnings) == (6, [])


def test_unread_tasks_of_an_npu_trace_are_a_warning():
    """Warn about tasks of an unknown type, and about those of a second NPU, which could be mistaken for the first's."""
    second = {**task(2, "MatMulV2", 20, 5, "AI_CORE"), "pid": 6}
    events = cann(task(2, "MatMulV2", 10, 5, "AI_CORE"), task(3, "FUTURE_SQE", 540, 2, "FUTURE_SQE"))
    trace = parse_trace(json.dumps([named("process_name", 6, "Ascend Hardware"), *events, second]).encode())
    assert len(trace.activities.start_ns) == 1
    (warning,) = trace.warnings
    assert warning.message.endswith("task 'AI_CORE' (1), task 'FUTURE_SQE' (1)")
