"""Measure what the comparison of calls costs, which every call with packed documents makes.

    python benchmarks/call_comparison.py                                    # on CPUs: ranks are forked, gloo
    torchrun --nproc-per-node 4 benchmarks/call_comparison.py               # on GPUs: the comparison in shared memory

Prints the median time of one comparison, in shared memory and in the store of torch.distributed, for groups of --ranks,
and its share of a forward and backward pass of --tokens tokens in all, 16 documents, on 2 ranks (torchrun: on all).
With more ranks than processor cores, a comparison mostly waits for its turn on a core.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from on_gpus import leave, start

from ringprof.strategies import create
from ringprof.strategies.transport import call_comparison

WARM = 5


def median_us(body: Callable[[int], Any], count: int) -> float:
    """Return the median time of one call of ``body`` on this rank; the calls before it are warm-up."""
    times = []
    for index in range(WARM + count):
        begin = time.perf_counter()
        body(index)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[WARM:]) * 1e6


def comparison_us(means: str, count: int) -> float:
    """Return the time of one comparison of 16 documents that change with every call, in a new group."""
    group = dist.new_group()
    processes = create("ring", group=group).comm.processes
    documents = tuple(range(0, 4097, 256))

    def compare(index: int) -> None:
        call = {"documents": (*documents, 4096 + index), "causal": True, "softmax_scale": 0.1, "q": (1, 4096, 32, 128)}
        call_comparison.compare_call(group, call, processes)

    if means == "memory":
        return median_us(compare, count)
    with patch.object(call_comparison.CallComparison, "_map", lambda *_: None):
        return median_us(compare, count)


def pass_us(tokens: int, device: torch.device, count: int) -> tuple[float, float]:
    """Return the times of a forward and backward pass of zigzag, with and without the comparison of its calls."""
    strategy = create("zigzag")
    documents = list(range(0, tokens + 1, tokens // 16))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (
        torch.randn(1, tokens // dist.get_world_size(), heads, 128, dtype=dtype, device=device, requires_grad=True)
        for heads in (32, 8, 8)
    )

    def run(index: int) -> None:
        out = strategy.attention(q, k, v, documents=documents)
        out.backward(torch.ones_like(out))
        if device.type == "cuda":
            torch.cuda.synchronize()

    times = []
    for _ in range(2):
        times.append(median_us(run, count))
        # The second time, no call is compared.
        strategy.comm.compares_calls = strategy.comm.compare_call = lambda *_: None
    return times[0], times[1]


def measure(options: argparse.Namespace, device: torch.device, measures_pass: bool) -> None:
    """Measure on this rank, and print on the first."""
    ranks = dist.get_world_size()
    results = {means: comparison_us(means, options.calls) for means in ("memory", "store")}
    line = ", ".join(f"{means} {result:.0f} us" for means, result in results.items())
    if measures_pass:
        compared, alone = pass_us(options.tokens, device, options.passes)
        shares = ", ".join(f"{means} {result / alone:.3%}" for means, result in results.items())
        line += f"; a pass of {options.tokens} tokens {compared / 1e3:.2f} ms, {alone / 1e3:.2f} without: {shares}"
    if dist.get_rank() == 0:
        print(f"{ranks} ranks: {line}", flush=True)


def _forked(rank: int, ranks: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", options.port, ranks, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    measure(options, torch.device("cpu"), measures_pass=ranks == 2)
    leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,8,64", help="sizes of the forked groups")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a pass, over all ranks")
    parser.add_argument("--calls", type=int, default=200, help="comparisons per group")
    parser.add_argument("--passes", type=int, default=5, help="passes")
    parser.add_argument("--port", type=int, default=29871, help="port of the store, and those after it")
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options, start(), measures_pass=True)
        leave()
    context = multiprocessing.get_context("fork")
    for ranks in map(int, options.ranks.split(",")):
        processes = [context.Process(target=_forked, args=(rank, ranks, options)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        options.port += 1


if __name__ == "__main__":
    main()
