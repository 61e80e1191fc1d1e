"""A small `Run` as the recorder writes it."""

from __future__ import annotations

from typing import Any

from ringprof.run import (
    Environment,
    Profiled,
    RankTrace,
    Run,
    StrategyUsed,
    TensorError,
    Timings,
    Topology,
    Verification,
    Work,
)
from ringprof.workload.workload import Workload

MS = 1_000_000


def recorded_run(world_size: int = 4, **changes: Any) -> Run:
    """Three timed iterations whose slowest rank took 2, 3 and 4 ms, and one profiled one of 3.3 ms."""
    error = TensorError(max_abs=1e-2, rms=2e-3, kernel_rms=1.9e-3, allowed_rms=4e-3, rank=1)
    fields: dict[str, Any] = {
        "name": "burst-1024",
        "created": "2026-11-20T12:00:00Z",
        "command": ["ringprof", "record"],
        "workload": Workload(seq=1024, heads=8, kv_heads=8, head_dim=64),
        "topology": Topology(
            world_size=world_size,
            hosts=["node"] * world_size,
            local_ranks=list(range(world_size)),
            ranks_per_host=world_size,
            device_type="cuda",
            backend="nccl",
        ),
        "strategy": StrategyUsed(
            name="burst", target="ringprof.strategies.algorithms.burst:Burst", params={"double_ring": False}
        ),
        "kernel": "cudnn",
        "environment": Environment(devices=["NVIDIA H200"] * world_size, versions={}, variables={}),
        "verification": Verification(passed=True, seq=256, errors={"out": error}),
        "timings": Timings(
            warmup=1, iterations_ns=[[2 * MS - rank, 3 * MS - rank, 4 * MS - rank] for rank in range(world_size)]
        ),
        "profiled": Profiled(iterations_ns=[[33 * MS // 10 - rank] for rank in range(world_size)]),
        "peak_memory_bytes": [1 << 30] * world_size,
        "work": [
            Work(block_flops=10**9, block_calls={"forward": 4, "backward": 4}, sent=[]) for _ in range(world_size)
        ],
        "traces": [RankTrace(rank=rank, path=f"rank{rank}.json.gz") for rank in range(world_size)],
    }
    return Run(**{**fields, **changes})
