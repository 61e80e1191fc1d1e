"""Several ranks on this machine's GPUs: spawned processes that talk over NCCL."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

GPUS = torch.cuda.device_count()
needs_two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
SIZES = [size for size in (2, 4, 8) if size <= max(GPUS, 2)]


def run_gpu_ranks(size: int, function: Callable[..., Any], *args: Any, limit_s: float = 300) -> list[Any]:
    """``function(rank, *args)`` on every rank, one a GPU; its results in rank order, "gone" of a rank that just ended.

    Raises AssertionError with the first failing rank's traceback, or where a rank has not answered in time.
    """
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_rank, args=(rank, size, port, pipes[rank][1], function, args)) for rank in range(size)
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
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
        pipe.send((True, function(rank, *args)))
    except BaseException:
        pipe.send((False, f"rank {rank}: {traceback.format_exc()}"))
    finally:
        # Not destroy_process_group: a rank that failed must not wait for the others.
        os._exit(0)
