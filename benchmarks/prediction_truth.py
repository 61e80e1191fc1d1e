"""Record runs to hold predictions against: shapes, masks and kernels that no committed run has, and host-bound ones.

    torchrun --standalone --nproc-per-node 2 benchmarks/prediction_truth.py FOLDER [SECONDS [host,masks,device,short]]

Under one launcher, so that each takes seconds. Writes a run.json each; what fails or does not fit into the time is
named on stderr.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch

from ringprof.record.launcher import launcher_rank
from ringprof.record.machine import device_name, host_name
from ringprof.record.measure import WorkloadShard, measure
from ringprof.record.process_group import world_group
from ringprof.record.progress import SilentReporter
from ringprof.record.recording import RankResult, build_run, gather_results, strategy_used
from ringprof.run import Timings, Workload, write_run
from ringprof.strategies import create

WARMUP, ITERS = 4, 12
SMALL, OF_SMALL = 8192, 10
"""Tokens up to which the host is likely to be the bound, and how many times as often such a run is repeated."""
_PACKED = (9000, 300, 2100, 14000, 1200, 700, 5852, 3000, 450, 12550)
"""Lengths of documents."""


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
    window: int | None = None
    documents: tuple[int, ...] | None = None
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        marks = [
            self.strategy, str(self.seq), f"{self.heads}h{self.kv_heads}kv", self.kernel,
            "" if self.causal else "full", "" if self.backward else "forward", f"b{self.batch}" * (self.batch > 1),
            "copied" if self.hops == "copy" else "", f"window{self.window}" if self.window else "",
            "packed" if self.documents else "",
        ]  # fmt: skip
        return "-".join(mark for mark in marks if mark)

    @property
    def workload(self) -> Workload:
        return Workload(
            batch=self.batch, seq=self.seq, heads=self.heads, kv_heads=self.kv_heads, head_dim=128, causal=self.causal,
            backward=self.backward, window=self.window, documents=self.documents,
        )  # fmt: skip


WANTED = {
    "host": (
        Wanted("zigzag", 3072, 8, 8),
        Wanted("zigzag", 4096, 8, 8, "flash-attn"),
        Wanted("zigzag", 8192, 16, 4),
        Wanted("zigzag", 2048, 16, 16, hops="copy"),
        Wanted("zigzag", 4096, 8, 8, "flash-attn", backward=False),
        Wanted("ring", 2048, 8, 8, causal=False),
        Wanted("ring", 4096, 16, 16, "flash-attn", causal=False, hops="copy"),
        Wanted("ring", 3072, 8, 8, "flash-attn"),
        Wanted("stripe", 2048, 16, 16),
        Wanted("stripe", 4096, 8, 8, backward=False),
        Wanted("stripe", 4096, 8, 8, "flash-attn", hops="copy"),
        Wanted("burst", 4096, 8, 8),
        Wanted("burst", 3072, 16, 16, "flash-attn", hops="copy"),
        Wanted("double-ring", 2048, 8, 8, "flash-attn"),
        Wanted("double-ring", 4096, 8, 8, hops="copy"),
        Wanted("ulysses", 2048, 8, 4),
        Wanted("ulysses", 4096, 16, 16, "flash-attn", backward=False),
        Wanted("usp", 3072, 8, 8),
        Wanted("usp", 4096, 16, 16, "flash-attn", hops="copy"),
        Wanted("allgather", 1536, 8, 8, params={"layout": "zigzag"}),
        Wanted("allgather", 4096, 8, 4, "flash-attn", params={"layout": "zigzag"}),
        Wanted("megatron", 3072, 8, 8),
        Wanted("megatron", 4096, 16, 16, "flash-attn", backward=False),
    ),
    "masks": (
        Wanted("ring", 49152, 24, 8, "flash-attn", window=6144),
        Wanted("zigzag", 49152, 32, 8, "flash-attn", documents=_PACKED),
        Wanted("ulysses", 49152, 16, 16, "flash-attn", documents=_PACKED),
        Wanted("allgather", 49152, 32, 8, "flash-attn", window=2048, params={"layout": "zigzag"}),
    ),
    "device": (
        Wanted("zigzag", 73728, 20, 20),
        Wanted("burst", 49152, 28, 28),
        Wanted("stripe", 57344, 16, 16),
        Wanted("ring", 40960, 32, 8, causal=False),
        Wanted("ulysses", 65536, 24, 8),
        Wanted("allgather", 57344, 16, 4, params={"layout": "zigzag"}),
        Wanted("megatron", 40960, 24, 24),
        Wanted("double-ring", 49152, 24, 24),
        Wanted("zigzag", 32768, 64, 8, "flash-attn"),
        Wanted("zigzag", 81920, 40, 8, hops="copy"),
        # Between host and device.
        Wanted("zigzag", 24576, 8, 8),
        Wanted("burst", 12288, 16, 16),
        Wanted("stripe", 16384, 12, 12),
        Wanted("ulysses", 16384, 8, 8),
    ),
    "short": (
        Wanted("zigzag", 10240, 32, 32),
        Wanted("zigzag", 8192, 48, 8, "flash-attn"),
        Wanted("zigzag", 14336, 28, 4, hops="copy"),
        Wanted("ring", 6144, 32, 8, causal=False),
        Wanted("ring", 12288, 20, 20, "flash-attn"),
        Wanted("stripe", 12288, 24, 24),
        Wanted("stripe", 20480, 16, 4, "flash-attn", hops="copy"),
        Wanted("burst", 8192, 40, 40),
        Wanted("burst", 16384, 24, 24, "flash-attn"),
        Wanted("double-ring", 18432, 12, 12),
        Wanted("megatron", 10240, 24, 24),
        Wanted("ulysses", 12288, 32, 8),
        Wanted("ulysses", 8192, 64, 64, "flash-attn"),
        Wanted("usp", 14336, 16, 16),
        Wanted("allgather", 16384, 20, 4, params={"layout": "zigzag"}),
        Wanted("zigzag", 16384, 40, 40, backward=False),
    ),
}
"""By what is the bound, or what they are about."""


def record(wanted: Wanted, folder: Path, device: torch.device) -> str:
    """Record one run; returns what it took."""
    strategy = create(wanted.strategy, kernel=wanted.kernel, hops=wanted.hops, **wanted.params)
    problem = WorkloadShard.create(strategy, wanted.workload, device)
    often = OF_SMALL if wanted.seq <= SMALL else 1
    measured = measure(problem, device, often * WARMUP, often * ITERS, SilentReporter())
    rank = strategy.comm.rank
    result = RankResult(
        host=host_name(), local_rank=rank, device=device_name(device), trace="",
        iterations_ns=measured.iterations_ns, peak_bytes=measured.peak_bytes, work=measured.work,
    )  # fmt: skip
    results = gather_results(result, device)
    timings = Timings(warmup=often * WARMUP, iterations_ns=[one.iterations_ns for one in results])
    if rank == 0:
        here = folder / wanted.name
        here.mkdir(parents=True, exist_ok=True)
        run = build_run(wanted.name, f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", [], results, device)
        used = strategy_used(strategy, wanted.strategy)
        run = msgspec.structs.replace(
            run, traces=[], workload=wanted.workload, strategy=used, kernel=wanted.kernel, timings=timings
        )
        write_run(run, here / "run.json")
    return f"{(timings.median_ns() or 0.0) / 1e6:.3f} ms"


def main(folder: Path, seconds: float, lists: Sequence[str]) -> None:
    until = time.monotonic() + seconds
    place = launcher_rank()
    assert place is not None, "start it under torchrun"
    with world_group(place, "cuda", seconds + 120) as device:
        for wanted in (one for name in lists for one in WANTED[name]):
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
    _, output, *others = sys.argv
    main(Path(output), float(others[0]) if others else 120.0, others[1].split(",") if others[1:] else list(WANTED))
