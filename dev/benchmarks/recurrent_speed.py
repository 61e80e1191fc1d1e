"""Verify and time recurrences over this machine's GPUs, beside flash-linear-attention's context parallelism.

    torchrun --nproc-per-node 2 dev/benchmarks/recurrent_speed.py --check
    torchrun --nproc-per-node 2 dev/benchmarks/recurrent_speed.py --tokens 16384,65536 --operators gated_delta_rule,gla

Needs flash-linear-attention (fla), which compiles and tunes its kernels for minutes at their first use; Triton keeps
them in TRITON_CACHE_DIR. bf16, 16 heads of 128; Mamba-2 with one group. With --check, outputs and gradients of every
operator and strategy are compared with float64. Times are medians of the slowest rank over competitors that take turns;
a ratio is to fla's kernel alone, on as many tokens per GPU and without communication. The memory is the most that a
pass allocates beyond its inputs. Five passes follow each other without a wait. For lines `speed` the GPU is kept busy
before them, so that the host runs ahead, as in a step with much other work: these are times of the GPU. For lines
`queued` the GPU is idle before, so that the time to launch short kernels counts, too. For lines `graph` each pass is
the replay of a CUDA graph, in which the host launches nothing; --graph asks for them, fla/cp is left out.

fla refuses backward passes on Hopper with Triton 3.4 to 3.7.0, except of GLA. Its issue 640 tells of wrong gradients
for tiles of 64 key channels; heads of 128 have tiles of 128. --allow-triton removes the refusal, for --check to verify.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import triton
from fla.ops.common import chunk_o
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gla import chunk_gla
from fla.ops.simple_gla import chunk_simple_gla
from torch import Tensor

from ringprof.strategies.recurrent import pieces
from ringprof.strategies.recurrent.registry import PEERS, STRATEGIES, create_recurrent

HEADS, SIZE = 16, 128
DTYPE = torch.bfloat16
HOST_LEAD = 80_000_000
"""Clock cycles for which the GPU is busy before the passes, about 45 ms."""
OPERATORS = "gated_delta_rule", "simple_gla", "gla", "mamba2"


def inputs_of(operator: str, tokens: int, device: Any) -> list[Tensor]:
    """Return random q, k, v, g, and beta for the delta rule; for Mamba-2 x, dt, a, b and c."""
    q, k, v = (torch.randn(1, tokens, HEADS, SIZE, device=device) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    shape = (1, tokens, HEADS, SIZE) if operator == "gla" else (1, tokens, HEADS)
    g = torch.nn.functional.logsigmoid(torch.randn(shape, device=device) + 4)
    if operator == "mamba2":
        a = -torch.ones(HEADS, device=device)
        return [v.to(DTYPE), -g, a, k[:, :, :1].to(DTYPE), q[:, :, :1].to(DTYPE)]
    beta = [torch.rand(1, tokens, HEADS, device=device)] if operator == "gated_delta_rule" else []
    return [q.to(DTYPE), k.to(DTYPE), v.to(DTYPE), g, *beta]


def alone(operator: str) -> Callable[..., Any]:
    """Return fla's own function for the operator."""
    if operator == "mamba2":

        def mamba2(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Any:
            q, k = (y.expand(-1, -1, HEADS, -1) for y in (c, b))
            return chunk_simple_gla(q, k, (x * dt.unsqueeze(-1)).to(DTYPE), dt * a, scale=1.0)

        return mamba2
    functions: dict[str, Callable[..., Any]] = {
        "gated_delta_rule": chunk_gated_delta_rule, "simple_gla": chunk_simple_gla, "gla": chunk_gla,
    }  # fmt: skip
    return functions[operator]


def run(function: Callable[..., Any], inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    """Return the output, a final state where there is one, and all gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    result = function(*leaves)
    out, *last = result if isinstance(result, tuple) else (result,)
    loss = (out * dout).sum()
    # All ranks have the final state, and its gradients are summed over them.
    for state in last:
        loss = loss + (state * state.detach().double().cos()).sum() / dist.get_world_size()
    loss.backward()
    if last and leaves[-1].grad is not None:
        dist.all_reduce(leaves[-1].grad)  # every rank has a share of the initial state's gradient
    return [out.detach(), *(x.detach() for x in last), *(x.grad for x in leaves)]


def competitors_of(operator: str, strategies: dict[str, Any]) -> dict[str, Any]:
    """Return those of the strategies that compute the operator."""
    return {name: x for name, x in strategies.items() if name not in PEERS or operator == "gated_delta_rule"}


def check(rank: int, device: Any, operators: list[str], strategies: dict[str, Any]) -> None:
    """Print the largest errors of every strategy, relative to the largest number of the truth: out, gradients.

    With states, the initial state is the last result, and the final state the second.
    """
    exact = create_recurrent("state-ring", kernel="reference")
    # Several pieces even of short sequences.
    pieces.LEAST_CHUNKS = 4
    local = 1024
    seq = local * exact.comm.size
    documents = sorted({0, 500, local, min(local + 70, seq), seq})
    cases = {"one document": (None, False), "documents": (documents, False), "states": (None, True),
             "documents and states": (sorted({*documents} - {local} | {seq}), True)}  # fmt: skip
    for operator in operators:
        for case, (bounds, states) in cases.items():
            torch.manual_seed(5)
            own = [x if x.dim() == 1 else exact.shard(x) for x in inputs_of(operator, seq, device)]
            dout = exact.shard(torch.randn(1, seq, HEADS, SIZE, device=device))
            if states:
                own.append(torch.randn(1, HEADS, SIZE, SIZE, device=device))

            def call(
                strategy: Any, *x: Tensor, bounds: Any = bounds, states: bool = states, name: str = operator
            ) -> Any:
                options = {"initial_state": x[-1], "return_final_state": True} if states else {}
                return getattr(strategy, name)(*(x[:-1] if states else x), cu_seqlens=bounds, **options)

            truth = run(partial(call, exact), [x.double() for x in own], dout.double())
            for name, strategy in competitors_of(operator, strategies).items():
                if states and name in PEERS:
                    continue
                result = run(partial(call, strategy), own, dout.to(DTYPE))
                errors = [
                    float((x.double() - y).abs().max() / y.abs().max().clamp(min=1e-12))
                    for x, y in zip(result, truth, strict=True)
                ]
                largest = torch.tensor(errors, device=device)
                dist.all_reduce(largest, dist.ReduceOp.MAX)
                if rank == 0:
                    print(
                        f"check {operator} {name} {case}: {' '.join(f'{x:.1e}' for x in largest.tolist())}", flush=True
                    )


class Replay:
    """Passes of one competitor as replays of a CUDA graph, which the first call captures."""

    def __init__(self, function: Callable[..., Any], inputs: list[Tensor], dout: Tensor) -> None:
        self.function, self.inputs, self.dout = function, inputs, dout
        self.graph: Any = None

    def __call__(self) -> None:
        if self.graph is None:
            leaves = [x.detach().requires_grad_() for x in self.inputs]
            self.graph = torch.cuda.CUDAGraph()
            # NCCL's watchdog thread queries events meanwhile, which the global capture mode would refuse.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                out = self.function(*leaves)
                torch.autograd.grad(out[0] if isinstance(out, tuple) else out, leaves, self.dout)
            torch.cuda.synchronize()
        self.graph.replay()


def run_passes(
    function: Callable[..., Any], inputs: list[Tensor], dout: Tensor, replay: Replay | None
) -> list[tuple[float, float, float]]:
    """Run five passes, and return the times of the last four: forward and backward (0 for a replay), and both, ms."""
    passes = []
    for _ in range(5):
        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(3)]  # type: ignore[no-untyped-call]
        leaves = [] if replay else [x.detach().requires_grad_() for x in inputs]
        events[0].record()
        if replay:
            replay()
        else:
            out = function(*leaves)
            out = out[0] if isinstance(out, tuple) else out
            events[1].record()
            out.backward(dout)
            del out, leaves
        events[2].record()
        passes.append(events)
    torch.cuda.synchronize()
    return [
        (0.0, 0.0, a.elapsed_time(c)) if replay else (a.elapsed_time(b), b.elapsed_time(c), a.elapsed_time(c))
        for a, b, c in passes[1:]
    ]


def speed(
    rank: int, device: Any, operator: str, strategies: dict[str, Any], tokens: int, rounds: int, *, graph: bool
) -> None:
    """Print the times of the kernel alone, every strategy, and fla's own context parallelism."""
    inputs = inputs_of(operator, tokens, device)
    dout = torch.randn(1, tokens, HEADS, SIZE, device=device, dtype=DTYPE)
    competitors: dict[str, Callable[..., Any]] = {
        "kernel alone": alone(operator),
        **{name: getattr(strategy, operator) for name, strategy in competitors_of(operator, strategies).items()},
    }
    times: dict[tuple[str, str], list[tuple[float, float, float]]] = {
        (kind, name): [] for kind in ("speed", "queued") for name in competitors
    }
    replays = {name: Replay(function, inputs, dout) for name, function in competitors.items() if name not in PEERS}
    replays = replays if graph else {}
    times |= {("graph", name): [] for name in replays}
    memory = dict.fromkeys(competitors, 0)
    started = time.monotonic()
    for name, function in competitors.items():
        run_passes(function, inputs, dout, None)
        if rank == 0:
            print(f"ready {operator} {tokens} {name}: {time.monotonic() - started:.0f} s", flush=True)
    order = list(times)
    for turn in range(rounds):
        for kind, name in order[turn % len(order) :] + order[: turn % len(order)]:
            dist.barrier()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            if kind == "speed":
                torch.cuda._sleep(HOST_LEAD)  # type: ignore[no-untyped-call]
            times[kind, name] += run_passes(competitors[name], inputs, dout, replays[name] if kind == "graph" else None)
            if kind != "graph":
                memory[name] = torch.cuda.max_memory_allocated() - before
    bases: dict[str, float] = {}
    for (kind, name), each in times.items():
        slowest = torch.tensor(each, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        forward, backward, whole = slowest.median(0).values.tolist()
        spread = statistics.quantiles(slowest[:, 2].tolist(), n=4)
        base = bases.setdefault(kind, whole)
        parts = "" if kind == "graph" else f" forward {forward:.3f} backward {backward:.3f}"
        if rank == 0:
            print(
                f"{kind} {operator} {tokens} {name}:{parts} both {whole:.3f} ms"
                f" (quartiles {spread[0]:.3f} {spread[2]:.3f}) ratio {whole / base:.3f}"
                f" memory {memory[name] / 2**30:.2f} GiB",
                flush=True,
            )


def main() -> None:
    """Run what the options ask for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare every strategy with float64")
    parser.add_argument("--tokens", default="", help="tokens per GPU to time, separated by commas")
    parser.add_argument("--operators", default=",".join(OPERATORS))
    parser.add_argument("--strategies", default=",".join([*STRATEGIES, *PEERS]))
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds of five passes per competitor, four of them timed"
    )
    parser.add_argument("--graph", action="store_true", help="also time replays of a CUDA graph")
    parser.add_argument("--allow-triton", action="store_true")
    options = parser.parse_args()
    if options.allow_triton:
        chunk_o.TRITON_ABOVE_3_7_1 = True
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    operators = options.operators.split(",")
    single = [dist.new_group([other]) for other in range(dist.get_world_size())][rank]
    strategies = {name: create_recurrent(name, kernel="fla") for name in options.strategies.split(",")}
    in_pieces = {"kernel in pieces": create_recurrent("state-ring", group=single, kernel="fla")}
    if rank == 0:
        print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, flush=True)
    for tokens in filter(None, options.tokens.split(",")):
        for operator in operators:
            speed(rank, device, operator, in_pieces | strategies, int(tokens), options.rounds, graph=options.graph)
    if options.check:
        check(rank, device, operators, strategies)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
