"""Verify and time recurrences over this machine's GPUs, beside flash-linear-attention's own context parallelism.

    torchrun --nproc-per-node 2 benchmarks/recurrent_speed.py --check --tokens 16384
    torchrun --nproc-per-node 2 benchmarks/recurrent_speed.py --tokens 16384,65536

Needs flash-linear-attention (fla). With --check, the outputs and gradients of every operator and strategy are compared
with float64. Times are medians of the slowest rank, forward and backward, of competitors that take turns; a ratio is
to fla's kernel alone, on as many tokens per GPU and without communication. bf16, heads of 128.

fla refuses gated backward passes on Hopper with Triton 3.4 to 3.7.0, which computes wrong gradients for tiles of 64 key
channels (its issue 640). Heads of 128 have tiles of 128: this script removes the refusal, and verifies the gradients.
Compiling takes minutes, so kernels are tuned among three of their variants, once per kernel and type, at its first use,
which is the kernel alone; --check takes the first variant. --warm I compiles the I-th variant of every kernel of the
--part that is named, for a process per variant and part.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import triton
from fla.ops.common import chunk_o
from fla.ops.cp import build_cp_context
from fla.ops.cp.chunk_bwd import chunk_cp_bwd_dh
from fla.ops.cp.chunk_fwd import chunk_cp_fwd_h
from fla.ops.cp.chunk_merge import chunk_cp_merge
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gla import chunk_gla
from fla.ops.simple_gla import chunk_simple_gla
from torch import Tensor

from ringprof.strategies.recurrent import fla as fla_kernels
from ringprof.strategies.recurrent.state_strategies import STRATEGIES, create_recurrent

HEADS, SIZE = 16, 128
OPERATORS = {"gated_delta_rule": chunk_gated_delta_rule, "simple_gla": chunk_simple_gla, "gla": chunk_gla}
ORIGINAL = triton.runtime.autotuner.Autotuner.prune_configs, triton.runtime.autotuner.Autotuner.run
chunk_o.TRITON_ABOVE_3_7_1 = True


def inputs_of(operator: str, tokens: int, dtype: torch.dtype, device: Any) -> list[Tensor]:
    """Return random q, k, v, g, and beta for the delta rule."""
    shape = (1, tokens, HEADS, SIZE)
    q, k, v = (torch.randn(shape, device=device) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    g = torch.nn.functional.logsigmoid(torch.randn(shape if operator == "gla" else shape[:3], device=device) + 4)
    beta = [torch.rand(shape[:3], device=device)] if operator == "gated_delta_rule" else []
    return [q.to(dtype), k.to(dtype), v.to(dtype), g, *beta]


def run(function: Callable[..., Any], inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    """Return the output and all gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves)]


def call(strategy: Any, operator: str, documents: Any, *x: Tensor) -> Any:
    """Call an operator of a strategy; Mamba-2 with a decay of exp(-dt)."""
    if operator != "mamba2":
        return getattr(strategy, operator)(*x, cu_seqlens=documents)
    a = -torch.ones(HEADS, device=x[1].device, dtype=x[1].dtype)
    return strategy.mamba2(x[0], x[1], a, x[2], x[3], cu_seqlens=documents)


def check(rank: int, device: Any, operators: Sequence[str], dtypes: Sequence[torch.dtype]) -> None:
    """Print the largest error of every operator, strategy and type, relative to the largest number of the truth."""
    exact = create_recurrent("state-ring", kernel="reference")
    strategies = {name: create_recurrent(name, kernel="fla") for name in STRATEGIES}
    least, fla_kernels.LEAST_CHUNKS = fla_kernels.LEAST_CHUNKS, 4
    local = 1024
    seq = local * exact.comm.size
    for operator in operators:
        for dtype in dtypes:
            for documents in (None, [0, 500, local, local + 70, seq]):
                torch.manual_seed(5)
                base = "simple_gla" if operator == "mamba2" else operator
                inputs = inputs_of(base, seq, dtype, device)
                if operator == "mamba2":
                    q, k, v, g = inputs
                    inputs = [v, -g, k[:, :, :1].contiguous(), q[:, :, :1].contiguous()]
                dout = exact.shard(torch.randn(1, seq, HEADS, SIZE, device=device))
                own = [exact.shard(x) for x in inputs]

                exact_inputs = [x.double() for x in own]
                truth = run(partial(call, exact, operator, documents), exact_inputs, dout.double())
                for name, strategy in strategies.items():
                    result = run(partial(call, strategy, operator, documents), own, dout.to(dtype))
                    errors = [
                        float((x.double() - y).abs().max() / y.abs().max()) for x, y in zip(result, truth, strict=True)
                    ]
                    gathered = torch.tensor(errors, device=device)
                    dist.all_reduce(gathered, dist.ReduceOp.MAX)
                    if rank == 0:
                        shown = " ".join(f"{x:.1e}" for x in gathered.tolist())
                        kind = "one document" if documents is None else "documents"
                        print(f"check {operator} {name} {dtype} {kind}: {shown}", flush=True)
    fla_kernels.LEAST_CHUNKS = least


def speed(rank: int, device: Any, operator: str, tokens: int, rounds: int) -> None:
    """Print the times of the kernel alone, every strategy, and fla's own context parallelism."""
    kernel, size = OPERATORS[operator], dist.get_world_size()
    alone = [dist.new_group([other]) for other in range(size)][rank]
    inputs = inputs_of(operator, tokens, torch.bfloat16, device)
    dout = torch.randn_like(inputs[2])
    competitors: dict[str, Callable[..., Any]] = {"kernel alone": kernel}
    own = create_recurrent("state-ring", group=alone, kernel="fla")
    competitors["kernel in pieces"] = getattr(own, operator)
    for name in STRATEGIES if operator == "gated_delta_rule" else ("state-ring", "state-scan"):
        competitors[name] = getattr(create_recurrent(name, kernel="fla"), operator)
    if operator == "gated_delta_rule":
        bounds = torch.tensor([0, tokens * size], device=device)
        context = build_cp_context(bounds, group=dist.group.WORLD)
        competitors["fla cp"] = lambda *x: kernel(*x, cp_context=context)
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
                if rank == 0 and not turn + repeat:
                    print(f"first call of {name}: {events[0].elapsed_time(events[2]) / 1e3:.1f} s", flush=True)
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
                f"speed {operator} {tokens} {name}: forward {forward:.3f} backward {backward:.3f} both {whole:.3f} ms"
                f" (quartiles {spread[0]:.3f} {spread[2]:.3f}) ratio {whole / base:.3f}"
                f" memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB",
                flush=True,
            )


def tune(index: int | None) -> None:
    """Take variant ``index`` of three of every kernel where it fits the GPU, else the first; None: the fastest."""
    tuner = triton.runtime.autotuner.Autotuner
    choose, run_tuned = ORIGINAL
    round_of_tuning = object()

    def prune(self: Any, kwargs: Any) -> Any:
        configs = choose(self, kwargs)
        some = [0, len(configs) // 2, len(configs) - 1]
        if index is None:
            return [configs[choice] for choice in dict.fromkeys(some)]
        return [configs[0 if getattr(self, "first", False) else some[index % len(some)]]]

    def run_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        every = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        types = [str(x.dtype) for name, x in every.items() if name in self.arg_names and hasattr(x, "dtype")]
        values = [every[name] for name in self.keys if name in every]
        sizes = [every[name] for name in self.keys if name in every and name not in ("H", "HV")]
        if self.__dict__.get("tuned_in") is not round_of_tuning:
            self.tuned_in, self.known = round_of_tuning, {}
            self.cache.clear()
        known = self.known
        key, short = (*values, *types), (*sizes, types[0])
        if short in known:
            self.cache.setdefault(key, known[short])
        try:
            result = run_tuned(self, *args, **kwargs)
        except Exception:
            if index is None:
                raise
            self.first = True
            self.cache.clear()
            result = run_tuned(self, *args, **kwargs)
        if key in self.cache:
            known[short] = self.cache[key]
        return result

    tuner.prune_configs, tuner.run = prune, run_once


def warm(index: int, operator: str, dtype: torch.dtype, part: str) -> None:
    """Compile one variant of the kernels of an operator: ``alone``, ``phases``, ``half`` the heads, or fla's ``cp``."""
    device = torch.device("cuda", index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    tune(index)
    fla_kernels.LEAST_CHUNKS = 1
    if part == "cp":
        flat = torch.zeros(1, 256, HEADS, SIZE, dtype=dtype, device=device)
        maps = torch.zeros(2, HEADS, SIZE, 2 * SIZE, device=device)
        g, bounds = flat[..., 0].float(), torch.tensor([0, 256], device=device)
        chunk_cp_fwd_h(flat, flat, flat, maps[0], g=g, cu_seqlens=bounds)
        chunk_cp_bwd_dh(flat, flat, flat, flat, flat, maps[0], g=g, scale=1.0, cu_seqlens=bounds)
        chunk_cp_merge(torch.zeros(HEADS, SIZE, SIZE, device=device), maps, 1, 1)
        return
    inputs = inputs_of(operator, 256, dtype, device)
    if part == "alone":
        run(OPERATORS[operator], inputs, torch.randn_like(inputs[2]))
        return
    if part == "half":
        inputs = [x[:, :, : HEADS // 2].contiguous() for x in inputs]
    own = getattr(create_recurrent("state-ring", kernel="fla"), operator)
    state = torch.zeros(1, inputs[2].shape[2], SIZE, SIZE, device=device)
    for options in ({}, {"cu_seqlens": [0, 100, 256]}, {"initial_state": state, "return_final_state": True}):
        run(partial(own, **options), inputs, torch.randn_like(inputs[2]))


def main() -> None:
    """Run what the options ask for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tokens", default="")
    parser.add_argument("--operators", default="gated_delta_rule")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--part", default="phases")
    options = parser.parse_args()
    begin = time.monotonic()
    if options.warm is not None:
        warm(options.warm, options.operators, getattr(torch, options.dtype), options.part)
        return
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    if rank == 0:
        print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, flush=True)
    timed, half = options.operators.split(","), torch.bfloat16
    if options.check:
        tune(0)
        check(rank, device, timed, [half])
    tune(None)
    for operator in timed:
        for tokens in filter(None, options.tokens.split(",")):
            speed(rank, device, operator, int(tokens), options.rounds)
            if rank == 0:
                print(f"after {time.monotonic() - begin:.0f} s", flush=True)
    if options.check:
        tune(0)
        check(rank, device, [name for name in (*OPERATORS, "mamba2") if name not in timed], [half])
        check(rank, device, (*OPERATORS, "mamba2"), [torch.float32])
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
