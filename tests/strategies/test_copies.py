"""Hops by copy engine: the same bits and bytes as hops by NCCL, for every strategy, call after call.

Without GPUs only the refusals can be tested; the transfers need two GPUs of one host that can reach each other.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringprof.strategies import communicator, copies, create
from ringprof.strategies.errors import Unfit
from tests.strategies.cases import CASES, Case

GPUS = torch.cuda.device_count()


def test_hops_that_nothing_carries_are_refused_by_name():
    with pytest.raises(Unfit, match="hops 'pigeon': write one of nccl, copy"):
        create("ring", hops="pigeon")


@pytest.mark.skipif(GPUS > 0, reason="needs a machine without CUDA")
def test_without_cuda_there_are_no_copy_engines():
    with pytest.raises(Unfit, match="hops by copy engine need CUDA"):
        create("zigzag", hops="copy")


@pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device")
def test_a_single_hardware_queue_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(Unfit, match="CUDA_DEVICE_MAX_CONNECTIONS of at least 8, which is 1"):
        create("zigzag", hops="copy")


def _calls(strategy: Any, seeds: range, heads: int, kv_heads: int) -> list[list[torch.Tensor]]:
    """Output and gradients of several calls, posted without waiting for one another."""
    results = []
    for seed in seeds:
        torch.manual_seed(seed)
        q, k, v, dout = (
            torch.randn(1, 1024, count, 64, device="cuda", dtype=torch.bfloat16)
            for count in (heads, kv_heads, kv_heads, heads)
        )
        mine = [strategy.shard(tensor).requires_grad_() for tensor in (q, k, v)]
        out = strategy.attention(*mine, causal=True)
        results.append([out.detach(), *torch.autograd.grad(out, mine, strategy.shard(dout))])
    return results


def _compared(case: Case) -> str:
    """Empty where both ways of a case give the same bits and count the same bytes; else what differs."""
    params = {**case.params, "deterministic": True}
    ways = {hops: create(case.name, kernel="torch-flash", hops=hops, **params) for hops in communicator.HOPS}
    results = {hops: _calls(strategy, range(6), 8, 4) for hops, strategy in ways.items()}
    for call, pair in enumerate(zip(*results.values(), strict=True)):
        for name, one, other in zip(("out", "dq", "dk", "dv"), *pair, strict=True):
            if not torch.equal(one, other):
                return f"{case}: {name} of call {call} differs by {(one - other).abs().max().item()}"
    sent = {
        hops: {(*key[:2], key[3]): value for key, value in strategy.comm.meter.sent.items()}
        for hops, strategy in ways.items()
    }
    if sent["nccl"] != sent["copy"]:
        return f"{case}: counted {sent}"
    hops = [key for key in ways["copy"].comm.meter.sent if key[2] == "copy"]
    return "" if bool(hops) == bool(copies.held_bytes()) else f"{case}: memory is held for {hops}"


def _rank(rank: int, size: int, port: int, pipe: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    found = []
    for case in CASES:
        found += [_compared(case)] if size in case.worlds else []
        # What one case held must be free before the next counts.
        gc.collect()
    pipe.send([problem for problem in found if problem])
    os._exit(0)


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("size", [size for size in (2, 4, 8) if size <= max(GPUS, 2)])
def test_every_strategy_gives_the_same_bits_and_bytes_either_way(size):
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [context.Process(target=_rank, args=(rank, size, port, pipes[rank][1])) for rank in range(size)]
    for process in processes:
        process.start()
    try:
        for rank, (pipe, _) in enumerate(pipes):
            assert pipe.poll(120), f"rank {rank} hangs"
            assert pipe.recv() == []
    finally:
        for process in processes:
            process.kill()
