"""Record runs for tests of predictions: shapes, masks and kernels that no committed run has, and host-bound ones.

    torchrun --standalone --nproc-per-node 2 dev/benchmarks/prediction_truth.py FOLDER [SECONDS [LIST,LIST...]]

Lists: host, masks, device, flash-attn-3, short (default: all). All runs share one launcher, so that each takes seconds.
Each writes a run.json; failures and runs without time left are named on stderr.
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

from ringprof.iteration.shard import WorkloadShard
from ringprof.ranks.launcher import launcher_rank
from ringprof.ranks.machine import device_name, host_name
from ringprof.ranks.process_group import GroupRanks, world_group
from ringprof.ranks.progress import SilentReporter
from ringprof.recording.measure import measure
from ringprof.recording.recording import RankResult, build_run, strategy_used
from ringprof.run import Timings, write_run
from ringprof.strategies import create
from ringprof.workload.workload import Workload

WARMUP, ITERS = 4, 12
SMALL, SMALL_FACTOR = 8192, 10
"""Tokens up to which the host is likely to be the bound, and the factor on such a run's repetitions."""
_PACKED = (9000, 300, 2100, 14000, 1200, 700, 5852, 3000, 450, 12550)
"""Lengths of documents."""


@dataclass(frozen=True)
class Case:
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


CASES = {
    "host": (
        Case("zigzag", 3072, 8, 8),
        Case("zigzag", 4096, 8, 8, "flash-attn"),
        Case("zigzag", 8192, 16, 4),
        Case("zigzag", 2048, 16, 16, hops="copy"),
        Case("zigzag", 4096, 8, 8, "flash-attn", backward=False),
        Case("ring", 2048, 8, 8, causal=False),
        Case("ring", 4096, 16, 16, "flash-attn", causal=False, hops="copy"),
        Case("ring", 3072, 8, 8, "flash-attn"),
        Case("stripe", 2048, 16, 16),
        Case("stripe", 4096, 8, 8, backward=False),
        Case("stripe", 4096, 8, 8, "flash-attn", hops="copy"),
        Case("burst", 4096, 8, 8),
        Case("burst", 3072, 16, 16, "flash-attn", hops="copy"),
        Case("double-ring", 2048, 8, 8, "flash-attn"),
        Case("double-ring", 4096, 8, 8, hops="copy"),
        Case("ulysses", 2048, 8, 4),
        Case("ulysses", 4096, 16, 16, "flash-attn", backward=False),
        Case("usp", 3072, 8, 8),
        Case("usp", 4096, 16, 16, "flash-attn", hops="copy"),
        Case("allgather", 1536, 8, 8, params={"layout": "zigzag"}),
        Case("allgather", 4096, 8, 4, "flash-attn", params={"layout": "zigzag"}),
        Case("megatron", 3072, 8, 8),
        Case("megatron", 4096, 16, 16, "flash-attn", backward=False),
    ),
    "masks": (
        Case("ring", 49152, 24, 8, "flash-attn", window=6144),
        Case("zigzag", 49152, 32, 8, "flash-attn", documents=_PACKED),
        Case("ulysses", 49152, 16, 16, "flash-attn", documents=_PACKED),
        Case("allgather", 49152, 32, 8, "flash-attn", window=2048, params={"layout": "zigzag"}),
    ),
    "device": (
        Case("zigzag", 73728, 20, 20),
        Case("burst", 49152, 28, 28),
        Case("stripe", 57344, 16, 16),
        Case("ring", 40960, 32, 8, causal=False),
        Case("ulysses", 65536, 24, 8),
        Case("allgather", 57344, 16, 4, params={"layout": "zigzag"}),
        Case("megatron", 40960, 24, 24),
        Case("double-ring", 49152, 24, 24),
        Case("zigzag", 32768, 64, 8, "flash-attn"),
        Case("zigzag", 81920, 40, 8, hops="copy"),
        # Between host and device.
        Case("zigzag", 24576, 8, 8),
        Case("burst", 12288, 16, 16),
        Case("stripe", 16384, 12, 12),
        Case("ulysses", 16384, 8, 8),
    ),
    "flash-attn-3": (
        Case("zigzag", 65536, 40, 40, "flash-attn-3"),
        Case("burst", 65536, 40, 40, "flash-attn-3"),
        Case("ulysses", 65536, 32, 8, "flash-attn-3"),
        Case("zigzag", 131072, 32, 8, "flash-attn-3", hops="copy"),
        Case("ring", 32768, 40, 40, "flash-attn-3", causal=False),
        Case("stripe", 49152, 24, 4, "flash-attn-3"),
        Case("megatron", 65536, 32, 8, "flash-attn-3"),
        Case("zigzag", 98304, 24, 4, "flash-attn-3", hops="copy"),
        Case("double-ring", 32768, 40, 40, "flash-attn-3"),
        Case("usp", 57344, 20, 20, "flash-attn-3"),
        Case("allgather", 57344, 16, 4, "flash-attn-3", params={"layout": "zigzag"}),
        Case("ring", 49152, 24, 8, "flash-attn-3", window=6144),
        Case("zigzag", 49152, 32, 8, "flash-attn-3", documents=_PACKED),
        Case("ulysses", 49152, 16, 16, "flash-attn-3", documents=_PACKED),
        Case("zigzag", 16384, 40, 40, "flash-attn-3"),
        Case("zigzag", 8192, 32, 8, "flash-attn-3", hops="copy"),
        # Today's default before it, for the ratio of the two.
        Case("zigzag", 65536, 40, 40),
        Case("zigzag", 98304, 24, 4, hops="copy"),
        Case("ulysses", 65536, 32, 8),
    ),
    "short": (
        Case("zigzag", 10240, 32, 32),
        Case("zigzag", 8192, 48, 8, "flash-attn"),
        Case("zigzag", 14336, 28, 4, hops="copy"),
        Case("ring", 6144, 32, 8, causal=False),
        Case("ring", 12288, 20, 20, "flash-attn"),
        Case("stripe", 12288, 24, 24),
        Case("stripe", 20480, 16, 4, "flash-attn", hops="copy"),
        Case("burst", 8192, 40, 40),
        Case("burst", 16384, 24, 24, "flash-attn"),
        Case("double-ring", 18432, 12, 12),
        Case("megatron", 10240, 24, 24),
        Case("ulysses", 12288, 32, 8),
        Case("ulysses", 8192, 64, 64, "flash-attn"),
        Case("usp", 14336, 16, 16),
        Case("allgather", 16384, 20, 4, params={"layout": "zigzag"}),
        Case("zigzag", 16384, 40, 40, backward=False),
    ),
}
"""Runs to record, by their bound or by their topic."""


def record(case: Case, folder: Path, device: torch.device) -> str:
    """Record one run; return its median time."""
    strategy = create(case.strategy, kernel=case.kernel, hops=case.hops, **case.params)
    shard = WorkloadShard.create(strategy, case.workload, device)
    factor = SMALL_FACTOR if case.seq <= SMALL else 1
    measured = measure(shard, factor * WARMUP, factor * ITERS, SilentReporter())
    rank = strategy.comm.rank
    result = RankResult(
        host=host_name(), local_rank=rank, device=device_name(device), trace="",
        iterations_ns=measured.iterations_ns, peak_bytes=measured.peak_bytes, work=measured.work,
    )  # fmt: skip
    results = GroupRanks(None).gather_structs(result)
    timings = Timings(warmup=factor * WARMUP, iterations_ns=[rank_result.iterations_ns for rank_result in results])
    if rank == 0:
        run_folder = folder / case.name
        run_folder.mkdir(parents=True, exist_ok=True)
        run = build_run(case.name, f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", [], results, device)
        strategy_info = strategy_used(strategy, case.strategy)
        run = msgspec.structs.replace(
            run, traces=[], workload=case.workload, strategy=strategy_info, kernel=case.kernel, timings=timings
        )
        write_run(run, run_folder / "run.json")
    return f"{(timings.median_ns() or 0.0) / 1e6:.3f} ms"


def main(folder: Path, seconds: float, lists: Sequence[str]) -> None:
    until = time.monotonic() + seconds
    launcher = launcher_rank()
    assert launcher is not None, "start it under torchrun"
    with world_group(launcher, "cuda", seconds + 120) as device:
        for current in (case for name in lists for case in CASES[name]):
            late = torch.tensor([time.monotonic() > until], dtype=torch.int32, device=device)
            torch.distributed.all_reduce(late, op=torch.distributed.ReduceOp.MAX)
            try:
                outcome = "no time left" if late.item() else record(current, folder, device)
            except Exception as error:  # the others are still wanted
                outcome = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            gc.collect()
            torch.cuda.empty_cache()
            if launcher.rank == 0:
                print(f"{current.name}: {outcome}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    _, output, *others = sys.argv
    main(Path(output), float(others[0]) if others else 120.0, others[1].split(",") if others[1:] else list(CASES))
