"""Verify and time the gated delta rule over this machine's GPUs, beside flash-linear-attention's context parallelism.

    torchrun --nproc-per-node 2 benchmarks/recurrent_speed.py --check
    torchrun --nproc-per-node 2 benchmarks/recurrent_speed.py --tokens 16384,65536

Needs flash-linear-attention (fla), which compiles and tunes its kernels for minutes at their first use. bf16, 16 heads
of 128. With --check, outputs and gradients of every strategy are compared with float64. Times are medians of the
slowest rank over competitors that take turns; a ratio is to fla's kernel alone, on as many tokens per GPU and without
communication.

fla refuses gated backward passes on Hopper with Triton 3.4 to 3.7.0, which computes wrong gradients for tiles of 64 key
channels (its issue 640). Heads of 128 have tiles of 128: this script removes the refusal, and --check verifies them.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import triton
from fla.ops.common import chunk_o
from fla.ops.cp import build_cp_context
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from torch import Tensor

from ringprof.strategies.recurrent import fla as fla_kernels
from ringprof.strategies.recurrent.state_strategies import STRATEGIES, create_recurrent

HEADS, SIZE = 16, 128
DTYPE = torch.bfloat16
chunk_o.TRITON_ABOVE_3_7_1 = True


def inputs_of(tokens: int, device: Any) -> list[Tensor]:
    """Return random q, k, v, g and beta."""
    q, k, v = (torch.randn(1, tokens, HEADS, SIZE, device=device) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    g = torch.nn.functional.logsigmoid(torch.randn(1, tokens, HEADS, device=device) + 4)
    return [q.to(DTYPE), k.to(DTYPE), v.to(DTYPE), g, torch.rand(1, tokens, HEADS, device=device)]


def run(function: Callable[..., Any], inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    """Return the output and all gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves)]


def check(rank: int, device: Any) -> None:
    """Print the largest errors of every strategy, relative to the largest number of the truth: out, dq, dk, ..."""
    exact = create_recurrent("state-ring", kernel="reference")
    # Several pieces even of short sequences.
    fla_kernels.LEAST_CHUNKS = 4
    local = 1024
    seq = local * exact.comm.size
    for documents in (None, [0, 500, local, local + 70, seq]):
        torch.manual_seed(5)
        own = [exact.shard(x) for x in inputs_of(seq, device)]
        dout = exact.shard(torch.randn(1, seq, HEADS, SIZE, device=device))
        truth = run(partial(exact.gated_delta_rule, cu_seqlens=documents), [x.double() for x in own], dout.double())
        for name in STRATEGIES:
            strategy = create_recurrent(name, kernel="fla")
            result = run(partial(strategy.gated_delta_rule, cu_seqlens=documents), own, dout.to(DTYPE))
            errors = [float((x.double() - y).abs().max() / y.abs().max()) for x, y in zip(result, truth, strict=True)]
            largest = torch.tensor(errors, device=device)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            if rank == 0:
                kind = "one document" if documents is None else "documents"
                print(f"check {name} {kind}: {' '.join(f'{x:.1e}' for x in largest.tolist())}", flush=True)


def speed(rank: int, device: Any, tokens: int, rounds: int) -> None:
    """Print the times of the kernel alone, every strategy, and fla's own context parallelism."""
    size = dist.get_world_size()
    alone = [dist.new_group([other]) for other in range(size)][rank]
    inputs = inputs_of(tokens, device)
    dout = torch.randn_like(inputs[2])
    context = build_cp_context(torch.tensor([0, tokens * size], device=device), group=dist.group.WORLD)
    competitors: dict[str, Callable[..., Any]] = {
        "kernel alone": chunk_gated_delta_rule,
        "kernel in pieces": create_recurrent("state-ring", group=alone, kernel="fla").gated_delta_rule,
        **{name: create_recurrent(name, kernel="fla").gated_delta_rule for name in STRATEGIES},
        "fla cp": partial(chunk_gated_delta_rule, cp_context=context),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in competitors}
    names = list(competitors)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            for repeat in range(5):
                leaves = [x.detach().requires_grad_() for x in inputs]
                dist.barrier()
                torch.cuda.synchronize()
                events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
                events[0].record()
                out = competitors[name](*leaves)
                out = out[0] if isinstance(out, tuple) else out
                events[1].record()
                out.backward(dout)
                events[2].record()
                torch.cuda.synchronize()
                if repeat:
                    times[name].append((events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2])))
    base = 0.0
    for name, each in times.items():
        slowest = torch.tensor(each, device=device)
        total = slowest.sum(1, keepdim=True)
        slowest = torch.cat([slowest, total], 1)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        forward, backward, whole = slowest.median(0).values.tolist()
        spread = statistics.quantiles(slowest[:, 2].tolist(), n=4)
        base = base or whole
        if rank == 0:
            print(
                f"speed {tokens} {name}: forward {forward:.3f} backward {backward:.3f} both {whole:.3f} ms"
                f" (quartiles {spread[0]:.3f} {spread[2]:.3f}) ratio {whole / base:.3f}"
                f" memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB",
                flush=True,
            )


def main() -> None:
    """Run what the options ask for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tokens", default="")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    if rank == 0:
        print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, flush=True)
    if options.check:
        check(rank, device)
    for tokens in filter(None, options.tokens.split(",")):
        speed(rank, device, int(tokens), options.rounds)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
