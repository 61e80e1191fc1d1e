"""Record runs to hold predictions against: shapes, masks and kernels that no committed run has, and host-bound ones.

    torchrun --standalone --nproc-per-node 2 benchmarks/foresight_truth.py FOLDER [SECONDS]

Under one launcher, so that each takes seconds. Writes a run folder each; what fails or does not fit into the time is
named on stderr.
"""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch

from ringprof.record.launcher import launcher_rank
from ringprof.record.machine import device_name, host_name
from ringprof.record.measure import Problem, measure, profile_iterations
from ringprof.record.progress import SilentReporter
from ringprof.record.recording import RankResult, assemble, exchange, strategy_used
from ringprof.record.run_folder import trace_name
from ringprof.record.world_group import world_group
from ringprof.run import Timings, Workload, write_run
from ringprof.strategies import create

WARMUP, ITERS = 4, 12
HOST_CALLS = 30
SMALL = 8192
"""Tokens up to which the host is likely to be the bound."""


@dataclass(frozen=True)
class Wanted:
    strategy: str
    seq: int
    heads: int
    kv_heads: int
    kernel: str = "cudnn"
    causal: bool = True
    backward: bool = True
    batch: int = 1
    hops: str = "nccl"
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        marks = [
            self.strategy, str(self.seq), f"{self.heads}h{self.kv_heads}kv", self.kernel,
            "" if self.causal else "full", "" if self.backward else "forward", f"b{self.batch}" * (self.batch > 1),
            "copied" if self.hops == "copy" else "",
        ]  # fmt: skip
        return "-".join(mark for mark in marks if mark)

    @property
    def workload(self) -> Workload:
        return Workload(
            batch=self.batch, seq=self.seq, heads=self.heads, kv_heads=self.kv_heads, head_dim=128, causal=self.causal,
            backward=self.backward,
        )  # fmt: skip


WANTED = (
    # The device is the bound.
    Wanted("zigzag", 49152, 24, 24),
    Wanted("burst", 81920, 16, 16),
    Wanted("zigzag", 98304, 32, 8),
    Wanted("stripe", 32768, 32, 32),
    Wanted("ring", 65536, 24, 4, causal=False),
    Wanted("ulysses", 49152, 64, 8),
    Wanted("zigzag", 49152, 32, 8, "flash-attn"),
    Wanted("burst", 65536, 20, 20, "flash-attn"),
    Wanted("allgather", 40960, 28, 4, params={"layout": "zigzag"}),
    Wanted("megatron", 57344, 32, 32),
    Wanted("zigzag", 65536, 48, 8, hops="copy"),
    Wanted("zigzag", 16384, 16, 16, batch=2),
    Wanted("stripe", 24576, 40, 8, "flash-attn"),
    Wanted("burst", 131072, 12, 12, causal=False),
    # The host is.
    Wanted("zigzag", 2048, 8, 8),
    Wanted("burst", 2048, 16, 2),
    Wanted("ulysses", 1024, 16, 16),
    Wanted("allgather", 2048, 8, 2, params={"layout": "zigzag"}),
    Wanted("megatron", 2048, 8, 8),
    Wanted("stripe", 1024, 8, 8, "flash-attn"),
    Wanted("ring", 1024, 8, 8, causal=False),
    Wanted("zigzag", 2048, 8, 8, backward=False),
    Wanted("burst", 1024, 8, 8, "flash-attn"),
    Wanted("zigzag", 8192, 16, 4),
    Wanted("ulysses", 8192, 16, 16),
    Wanted("double-ring", 2048, 8, 8),
    Wanted("usp", 2048, 8, 8),
)


def record(wanted: Wanted, folder: Path, device: torch.device) -> str:
    """Record one run; returns what it took."""
    strategy = create(wanted.strategy, kernel=wanted.kernel, hops=wanted.hops, **wanted.params)
    problem = Problem.of(strategy, wanted.workload, device)
    measured = measure(problem, device, WARMUP, ITERS, SilentReporter())
    posted_ns = host_ns(problem) if wanted.seq <= SMALL else 0.0
    rank = strategy.comm.rank
    here = folder / wanted.name
    here.mkdir(parents=True, exist_ok=True)
    profiled = profile_iterations(problem, device, 1, here / trace_name(rank), SilentReporter())
    result = RankResult(
        host=host_name(), local_rank=rank, device=device_name(device), trace=trace_name(rank),
        iterations_ns=measured.iterations_ns, profiled_ns=profiled, peak_bytes=measured.peak_bytes, work=measured.work,
    )  # fmt: skip
    results = exchange(result, device)
    timings = Timings(warmup=WARMUP, iterations_ns=[one.iterations_ns for one in results])
    if rank == 0:
        run = assemble(wanted.name, f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}", [], results, device)
        used = strategy_used(strategy, wanted.strategy)
        run = msgspec.structs.replace(
            run, workload=wanted.workload, strategy=used, kernel=wanted.kernel, timings=timings
        )
        write_run(run, here / "run.json")
    return f"{(timings.median_ns() or 0.0) / 1e6:.3f} ms, the host alone {posted_ns / 1e6:.3f} ms"


def host_ns(problem: Problem) -> float:
    """What an iteration takes the host, the device not waited for."""
    torch.cuda.synchronize()
    took = []
    for _ in range(HOST_CALLS):
        start = time.perf_counter_ns()
        problem.iteration()
        took.append(time.perf_counter_ns() - start)
    torch.cuda.synchronize()
    return median(took)


def main(folder: Path, seconds: float) -> None:
    until = time.monotonic() + seconds
    place = launcher_rank()
    assert place is not None, "start it under torchrun"
    with world_group(place, "cuda", seconds + 120) as device:
        for wanted in WANTED:
            late = torch.tensor([time.monotonic() > until], dtype=torch.int32, device=device)
            torch.distributed.all_reduce(late, op=torch.distributed.ReduceOp.MAX)
            try:
                said = "no time left" if late.item() else record(wanted, folder, device)
            except Exception as error:  # the others are still wanted
                said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            gc.collect()
            torch.cuda.empty_cache()
            if place.rank == 0:
                print(f"{wanted.name}: {said}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 120.0)
