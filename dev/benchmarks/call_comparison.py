"""Measure what the comparison of calls costs, which every call with packed documents makes.

    python dev/benchmarks/call_comparison.py                            # on CPUs: ranks are forked, gloo
    torchrun --nproc-per-node 4 dev/benchmarks/call_comparison.py       # on GPUs: the comparison in shared memory

Prints the median time of one comparison for groups of --ranks, in shared memory and in the store of torch.distributed:
with new documents in every call, and with the documents of the call before, as in all layers of a model but the first.
(Strategies on a CPU compare every call as if its documents were new.) Then its share of a forward and backward pass of
--tokens tokens in all, 16 documents, on 2 ranks (torchrun: on all), and the same pass measured with and without the
comparison.
With more ranks than processor cores, a comparison mostly waits for its turn on a core.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
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


BY_STORE = patch.object(call_comparison.CallComparison, "_map", lambda *_: None)
MEANS = tuple(f"{means}, {documents} documents" for means in ("memory", "store") for documents in ("new", "same"))


def comparison_us(means: str, count: int) -> float:
    """Return the time of one comparison of 16 documents in a new group."""
    group = dist.new_group()
    processes = create("ring", group=group).comm.processes
    documents = tuple(range(0, 4097, 256))

    def compare(index: int) -> None:
        last = 4096 if "same" in means else 4096 + index
        call = {"documents": (*documents, last), "causal": True, "softmax_scale": 0.1, "q": (1, 4096, 32, 128)}
        call_comparison.compare_call(group, call, processes, may_pass=True)

    with BY_STORE if "store" in means else nullcontext():
        return median_us(compare, count)


def pass_us(tokens: int, device: torch.device, count: int) -> dict[str, float]:
    """Return the times of a forward and backward pass of zigzag: compared in memory, in the store, and not compared."""
    documents = list(range(0, tokens + 1, tokens // 16))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (
        torch.randn(1, tokens // dist.get_world_size(), heads, 128, dtype=dtype, device=device, requires_grad=True)
        for heads in (32, 8, 8)
    )
    times = {}
    for means in ("memory", "store", "none"):
        strategy = create("zigzag", group=dist.new_group())
        if means == "none":
            strategy.comm.compares_calls = strategy.comm.compare_call = lambda *_, **__: None

        def run(index: int, strategy: Any = strategy) -> None:
            out = strategy.attention(q, k, v, documents=documents)
            out.backward(torch.ones_like(out))
            if device.type == "cuda":
                torch.cuda.synchronize()

        with BY_STORE if means == "store" else nullcontext():
            times[means] = median_us(run, count)
    return times


def measure(options: argparse.Namespace, device: torch.device, measures_pass: bool) -> None:
    """Measure on this rank, and print on the first."""
    results = {means: comparison_us(means, options.calls) for means in MEANS}
    lines = [f"{dist.get_world_size()} ranks: {'; '.join(f'{means} {x:.1f} us' for means, x in results.items())}"]
    if measures_pass:
        times = pass_us(options.tokens, device, options.passes)
        shares = "; ".join(f"{means} {result / times['none']:.3%}" for means, result in results.items())
        passes = ", ".join(f"{means} {x / 1e3:.3f} ms" for means, x in times.items())
        lines += [f"  of a pass of {options.tokens} tokens: {shares}", f"  pass, compared by: {passes}"]
    if dist.get_rank() == 0:
        print("\n".join(lines), flush=True)


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
