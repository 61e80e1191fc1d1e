"""Compare predicted with measured peak memory on GPUs, for every strategy, transport and kind of workload.

    torchrun --nproc-per-node 2 dev/benchmarks/plan_memory.py --out plan_memory.csv [--only fsdp2,flex] [--seconds 80]

Each case is measured as in a recording, in MiB, the largest over the ranks. ``error`` is the ratio of the predicted to
the measured memory, minus one. ``rest_mib`` was allocated before and is not counted.
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace

from ringprof.dryrun import memory
from ringprof.iteration.baselines import measure_baselines, strategy_without_transport
from ringprof.iteration.layer import LayersShard
from ringprof.iteration.request import RecordRequest
from ringprof.iteration.shard import DynamicCpShard, WorkloadShard
from ringprof.ranks.progress import SilentReporter
from ringprof.recording.measure import measure, peak_bytes
from ringprof.strategies import create, names
from ringprof.strategies.algorithms.dynamic import Dynamic
from ringprof.strategies.transport.copy_engine import held_bytes
from ringprof.workload.workload import LayerAround, Workload

PLAIN = Workload(seq=32768, heads=32, kv_heads=8, head_dim=128)
DECODE = Workload(seq=1, batch=4, heads=32, kv_heads=8, head_dim=128, backward=False, phase="decode", kv_length=131072)
PREFILL = replace(DECODE, seq=16384, batch=1, phase="prefill")


def cases(world: int) -> Iterator[tuple[str, RecordRequest, str]]:
    """Yield the name, request and kernel of each case."""

    def case(name: str, strategy: str, workload: Workload, kernel: str = "flash-attn", **fields: Any) -> Any:
        request = RecordRequest(
            workload=workload, strategy=strategy, device="cuda", world=world, verify=False,
            **({"hops": "nccl"} | fields),
        )  # fmt: skip
        return f"{strategy} {name} {kernel} {request.hops}", request, kernel

    for strategy in names():
        params: dict[str, Any] = {"layout": "zigzag"} if strategy == "allgather" else {}
        for hops in ("nccl", "copy"):
            yield case("trains", strategy, PLAIN, hops=hops, params=params)
            yield case("forward", strategy, replace(PLAIN, backward=False), hops=hops, params=params)
        yield case("as many kv heads", strategy, replace(PLAIN, kv_heads=32), "cudnn", hops="copy", params=params)
        yield case("controls", strategy, PLAIN, hops="copy", controls=True, params=params)
    for merge in ("reduce-scatter", "all-to-all", "all-gather"):
        yield case(f"decode {merge}", "dcp", DECODE, params={"merge": merge})
    for passes in ("q", "kv"):
        yield case(f"prefill {passes}", "ring-prefill", PREFILL, "cudnn", hops="copy", params={"passes": passes})
    third = PLAIN.seq // 3
    masks: dict[str, dict[str, Any]] = {
        "documents": {"documents": (third, PLAIN.seq - third - 1000, 1000)}, "window": {"window": 2048},
        "window and prefix": {"window": 2048, "prefix": 512}, "softcap": {"softcap": 30.0},
        "sinks": {"sinks": "learned"},
    }  # fmt: skip
    for strategy in ("zigzag", "burst", "ulysses"):
        for name, mask in masks.items():
            packed = {"documents_layout": "packed"} if name == "documents" and strategy != "ulysses" else {}
            yield case(name, strategy, replace(PLAIN, **mask), hops="copy", params=packed)
    yield case("MLA", "zigzag", replace(PLAIN, kv_heads=32, head_dim=192, v_head_dim=128), "torch-flash")
    yield case("fp32", "zigzag", replace(PLAIN, seq=8192, dtype="fp32"), "torch-efficient")
    yield case("bf16", "zigzag", replace(PLAIN, seq=8192), "torch-efficient")
    yield case("bf16", "zigzag", PLAIN, "torch-flash")
    yield case("fp32", "ring", replace(PLAIN, seq=2048, heads=4, kv_heads=2, dtype="fp32"), "reference")
    halves = tuple(world // size for size in (world, world // 2, world))
    sizes = tuple(world // count for count in halves)
    yield case("sizes", "zigzag", replace(PLAIN, sequences=halves), hops="copy", cp_sizes=sizes)
    for parallel in ("ddp", "fsdp2"):
        for again in (False, True):
            for layers in (1, 3):
                layer = LayerAround(parallel=parallel, mlp_size=11008, checkpoint=again)
                yield case(
                    f"{layers} layers {parallel}{' again' * again}", "zigzag",
                    replace(PLAIN, layer=layer, layers=layers), hops="copy",
                )  # fmt: skip
        layer = LayerAround(parallel=parallel, mlp_size=11008)
        yield case(f"layer {parallel} forward", "zigzag", replace(PLAIN, layer=layer, backward=False))
    yield case("flex", "zigzag", replace(PLAIN, seq=8192), "flex")


def measured(request: RecordRequest, kernel: str, device: torch.device) -> tuple[int, int]:
    """Run a case, and return the bytes allocated at the peak and before."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device) + held_bytes()
    options: Any = {"kernel": kernel, "hops": request.hops, **request.params}
    workload, reporter = request.workload, SilentReporter()
    problem: WorkloadShard
    if request.cp_sizes:
        problem = DynamicCpShard.from_dynamic(Dynamic(request.strategy, **options), workload, request.cp_sizes, device)
    else:
        kind = WorkloadShard if workload.layer is None else LayersShard
        problem = kind.create(create(request.strategy, **options), workload, device)
    peak = measure(problem, 3, 2, reporter).peak_bytes or 0
    if request.controls:
        silent = strategy_without_transport(request.strategy, kernel, None, request.params)
        measure_baselines(problem, silent, 1, 1, reporter)
        peak = max(peak, peak_bytes(device) or 0)
    return peak, before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=80.0, help="start no case after this time")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, world, start = dist.get_rank(), dist.get_world_size(), time.monotonic()
    rows = []
    for name, request, kernel in cases(world):
        late = torch.tensor([float(time.monotonic() - start > options.seconds)], device=device)
        dist.all_reduce(late)
        if late.item() or not any(part in name for part in options.only.split(",")):
            continue
        rows.append(_row(name, request, kernel, device))
        if rank == 0:
            print(rows[-1], flush=True)
            with options.out.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
    dist.destroy_process_group()


def _row(name: str, request: RecordRequest, kernel: str, device: torch.device) -> dict[str, Any]:
    peak, before, problem = 0, 0, ""
    try:
        peak, before = measured(request, kernel, device)
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    most = torch.tensor([peak - before, before], device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    measured_bytes, rest = (int(value) for value in most)
    start = time.perf_counter()
    try:
        plan = memory.peak_bytes(request, request.workload, kernel, request.world or 1)
    except Exception as error:
        plan, problem = 0, problem or f"plan: {error}"
    took = time.perf_counter() - start
    mib = 2**20
    return {
        "case": name, "plan_mib": round(plan / mib, 1), "held_mib": round(measured_bytes / mib, 1),
        "error": f"{plan / measured_bytes - 1:+.1%}" if measured_bytes and plan else "",
        "rest_mib": round(rest / mib, 1), "plan_ms": round(took * 1e3), "problem": problem,
    }  # fmt: skip


if __name__ == "__main__":
    main()
