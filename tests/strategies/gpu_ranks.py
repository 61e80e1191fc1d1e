"""Spawned processes on this machine's GPUs, one per rank, that communicate over NCCL."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

GPUS = torch.cuda.device_count()
needs_two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
SIZES = [size for size in (2, 4, 8) if size <= max(GPUS, 2)]


def run_gpu_ranks(size: int, function: Callable[..., Any], *args: Any, limit_s: float = 300) -> list[Any]:
    """Run ``function(rank, *args)`` on every rank, one per GPU. Return the results in rank order.

    The result of a rank that exited without one is "gone".

    Raises AssertionError with the first failing rank's traceback, or where a rank has not answered in time.
    """
    context = multiprocessing.get_context("spawn")
    # The store listens here from the first moment on: a port that was free a moment ago can be another test's by now.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_rank, args=(rank, size, store.port, pipes[rank][1], function, args))
        for rank in range(size)
    ]
    for process, (_, sender) in zip(processes, pipes, strict=True):
        process.start()
        sender.close()
    results = []
    try:
        for rank, (pipe, _) in enumerate(pipes):
            assert pipe.poll(limit_s), f"rank {rank} hangs"
            try:
                ok, value = pipe.recv()
            except EOFError:
                ok, value = True, "gone"
            assert ok, value
            results.append(value)
    finally:
        for process in processes:
            process.kill()
    return results


def _rank(rank: int, size: int, port: int, pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    try:
        torch.cuda.set_device(rank)
        store = TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=torch.device("cuda", rank))
        pipe.send((True, function(rank, *args)))
    except BaseException:
        pipe.send((False, f"rank {rank}: {traceback.format_exc()}"))
    finally:
        # Not destroy_process_group: a rank that failed must not wait for the others.
        os._exit(0)
