"""Functions shared by the benchmarks that torchrun starts on GPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ringprof.iteration.clock import clock_for


def start() -> torch.device:
    """Initialise the process group, and return this rank's GPU."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def leave() -> NoReturn:
    """Wait for the other ranks, and exit without destructors: those of libraries may wait for each other."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def say(*lines: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        for line in lines:
            print(line, flush=True)


def timed(body: Callable[[], Any], device: torch.device, count: int) -> list[int]:
    """Run ``count`` iterations, and return the time of the slowest rank for each, in nanoseconds."""
    clock = clock_for(device)
    for _ in range(count):
        clock.run(body)
    times = torch.tensor(clock.times_ns(), device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return [int(time) for time in times.tolist()]
