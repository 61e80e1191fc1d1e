"""Spawned processes on this machine's GPUs, one per rank, that communicate over NCCL."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from ringprof.strategies.kernels.registry import KERNELS

GPUS = torch.cuda.device_count()
needs_two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
SIZES = [size for size in (2, 4, 8) if size <= max(GPUS, 2)]


def why_kernel_is_left_out(name: str, dtype: torch.dtype = torch.bfloat16, head_dim: int = 128) -> str | None:
    """Return why tests leave a kernel out on this machine's GPUs; None where they run it."""
    reason = KERNELS[name].why_unsupported(torch.device("cuda"), dtype, head_dim)
    if reason is None and name == "flash-attn" and "+hdim128" in version("flash-attn"):
        return None if (dtype, head_dim) == (torch.bfloat16, 128) else "was built for bf16 with head_dim 128 only"
    return reason


def run_gpu_ranks(
    size: int, function: Callable[..., Any], *args: Any, limit_s: float = 300, nodes: int = 1
) -> list[Any]:
    """Run ``function(rank, *args)`` on every rank, one per GPU. Return the results in rank order.

    The result of a rank that exited without one is "gone". ``nodes``: the ranks believe to be on so many hosts, between
    which NCCL uses sockets of the loopback device.

    Raises AssertionError with the first failing rank's traceback, or where a rank has not answered in time.
    """
    context = multiprocessing.get_context("spawn")
    # The store listens here from the first moment on: a port that was free a moment ago can be another test's by now.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_rank, args=(rank, size, nodes, store.port, pipes[rank][1], function, args))
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


def _rank(
    rank: int, size: int, nodes: int, port: int, pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    node, local_rank = divmod(rank, size // nodes)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(size // nodes)}
    if nodes > 1:
        os.environ |= {"NCCL_HOSTID": f"node{node}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
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
