"""Synthetic valid traces of profilers other than torch's: XLA (JAX, TensorFlow), rocprof, an Ascend NPU."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from ringprof.trace.columns import Trace
from ringprof.trace.ranks import read_traces

GEMM, NCCL = "gemm_fusion_dot_1", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def named(kind: str, pid: int, name: str, **fields: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "args": {"name": name}, **fields}


def row(pid: int, tid: int, name: str, start: object, duration: object, **args: object) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start, "dur": duration, "args": args}


def xla() -> dict[str, Any]:
    """Make a trace of two GPUs with two streams each, a track that repeats their operations by name, and the host."""
    events = [named("process_name", 701, "/host:CPU"), row(701, 1, "PjitFunction(train_step)", 0, 500)]
    for gpu in (0, 1):
        pid = gpu + 1
        events.append(named("process_name", pid, f"/device:GPU:{gpu}"))
        events.append(named("thread_name", pid, "Stream #13(compute,MemcpyD2D)", tid=13))
        events.append(named("thread_name", pid, "Stream #20(compute)", tid=20))
        events.append(named("thread_name", pid, "XLA Ops", tid=10002))
        for step in range(4):
            begin = 10.5 + 200 * step + gpu
            events.append(row(pid, 13, GEMM, begin, 100.25, hlo_op="dot.1", correlation_id=str(step)))
            events.append(row(pid, 20, NCCL, begin + 50, 100, hlo_op="all-reduce.1"))
            events.append(row(pid, 13, "MemcpyD2D", begin + 160, 10, memcpy_details="size:64"))
            events.append(row(pid, 10002, "gemm_fusion_dot.1", begin, 100.25))
    return {"displayTimeUnit": "ns", "metadata": {"highres-ticks": True}, "traceEvents": [*events, {}]}


def rocprof() -> dict[str, Any]:
    """Make a trace of one GPU whose times are strings, with API calls, and with copies on a track of no GPU."""
    processes = {2: "CPU HIP API", 1: "COPY", 6: "GPU0"}
    events: list[dict[str, Any]] = [{}, *(named("process_name", pid, name) for pid, name in processes.items())]
    for number in range(6):
        begin = 100 + 60 * number
        events.append(row(2, 77, "hipLaunchKernel", str(begin - 10), "5"))
        events.append(row(6, 1 + number % 2, "Cijk_Alik_Bljk_SB_MT64x64", str(begin), "50.5", queue="0"))
        events.append(row(1, 0, "CopyHostToDevice", str(begin + 20), "5"))
    return {"traceEvents": events, "otherData": {}}


def ascend() -> list[dict[str, Any]]:
    """Make a trace of one NPU: tasks, a communicator with its planes, and a process that repeats the others' rows."""
    names = {1: "Python", 2: "CANN", 3: "Ascend Hardware", 4: "Communication", 5: "Overlap Analysis"}
    events: list[dict[str, Any]] = [named("process_name", pid, name) for pid, name in names.items()]
    events.append(named("thread_name", 4, "Group 0 Communication", tid=0))
    events.append(named("thread_name", 4, "Plane 0", tid=1))
    for number in range(4):
        begin = 10 + 500 * number
        kinds = {
            "MatMulV2": "AI_CORE",
            "FlashAttentionScore": "MIX_AIC",
            "Add": "AI_VECTOR_CORE",
            "copy": "MEMCPY_ASYNC",
        }
        for slot, (name, kind) in enumerate(kinds.items()):
            events.append(row(3, 2, name, f"{begin + 60 * slot}.125", 50, **{"Task Type": kind}))
        events.append(row(3, 2, "EVENT_WAIT", f"{begin + 240}.000", 200, **{"Task Type": "EVENT_WAIT"}))
        events.append(row(4, 0, "hcom_allReduce__606_0_1", f"{begin + 100}.500", 300))
        events.append(row(4, 1, "Notify_Wait", f"{begin + 100}.500", 90))
        events.append(row(5, 0, "Computing", f"{begin}.000", 100))
        events.append({**row(1, 1, "aten::mm", f"{begin - 5}.000", 5), "cat": "cpu_op"})
    return events


SOUND = {"xla": xla, "rocprof": rocprof, "ascend": ascend}
ON_DEVICE = {
    "xla": (GEMM, NCCL),
    "rocprof": ("Cijk_Alik_Bljk_SB_MT64x64",),
    "ascend": ("MatMulV2", "hcom_allReduce__606_0_1"),
}
"""Names of rows whose times change every figure."""


def read(data: bytes, limits: Any) -> list[Trace]:
    """Read the traces of all ranks in a document through a file, whose format is detected from its content."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "host.trace.json"
        path.write_bytes(data)
        return read_traces([str(path)], jobs=1, limits=limits)


def events_of(tree: Any) -> list[Any]:
    """Return the list of events of an undamaged document."""
    events: list[Any] = tree if isinstance(tree, list) else tree["traceEvents"]
    return events


def document(name: str) -> Any:
    """Return a copy of an undamaged document."""
    return json.loads(json.dumps(SOUND[name]()))
