"""Measure packed documents and sliding windows on this machine's GPUs, and compare with ring-flash-attn's kernels.

    torchrun --nproc-per-node 2 dev/benchmarks/documents_speed.py --tokens 16384,65536
    torchrun --nproc-per-node 2 dev/benchmarks/documents_speed.py --tokens 65536 --documents none --window 4096

Forward and backward, bf16, head_dim 128, causal; tokens are per GPU. All competitors are timed interleaved, round by
round; the time of an iteration is that of the slowest rank. Each of ringprof's strategies is first verified against
float64 with the same mask, at a short length. The output and gradients of a peer must equal those of the ringprof
strategy that holds the same tokens. Lengths are rounded to what the peers support: multiples of twice the number of
GPUs. The last columns are shares of the measured time: the time that the mask's exact area would take at the rate of
plain zigzag on the same GPUs, and the time of the kernel alone, one call per pass over the same mask with each GPU's
share of the heads and nothing sent.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from on_gpus import leave, say, start, timed
from torch import Tensor

from ringprof.errors import RingprofError
from ringprof.iteration.shard import WorkloadShard
from ringprof.proof.verify import verify
from ringprof.strategies import create
from ringprof.strategies.algorithms.zigzag import Zigzag
from ringprof.workload.documents import document_lengths
from ringprof.workload.workload import Workload

ALONE = "kernel alone"
OURS = (
    "zigzag,zigzag+documents_layout=packed,zigzag+documents_layout=per_document,stripe,ring,allgather,"
    "allgather+layout=zigzag+documents_layout=per_document,ulysses"
)
SAME_TOKENS = {
    "ring-flash-attn zigzag varlen": "zigzag+documents_layout=per_document",
    "ring-flash-attn llama3": "allgather",
}


@dataclass
class Competitor:
    """One implementation and its measured times."""

    name: str
    body: Callable[[], list[Tensor]]
    """Function that runs an iteration and returns output, dq, dk and dv of this rank."""
    times_ns: list[int] = field(default_factory=list)


def main() -> NoReturn:
    options = _options()
    device = start()
    rows: list[dict[str, Any]] = []
    for tokens in map(int, options.tokens.split(",")):
        for heads in options.heads.split(","):
            rows += _measure(_workload(tokens, heads, options), options, device)
            if dist.get_rank() == 0 and options.out:
                Path(options.out).write_text(json.dumps(rows, indent=1))
    leave()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="16384,65536")
    parser.add_argument("--heads", default="32:8", help="HEADS:KV_HEADS, several with commas")
    parser.add_argument(
        "--documents", default="lognormal:mean=8192,sigma=1.2,seed=7", help="as record takes it, or none"
    )
    parser.add_argument("--window", type=int)
    parser.add_argument("--ours", default=OURS)
    parser.add_argument("--kernel", default="flash-attn")
    parser.add_argument("--hops", default="nccl")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.3, help="timed per competitor and round, about")
    parser.add_argument("--out", help="write the rows as JSON, too")
    return parser.parse_args()


def _workload(tokens: int, heads: str, options: argparse.Namespace) -> Workload:
    seq = tokens * dist.get_world_size()
    query, kv = map(int, heads.split(":"))
    documents = None
    if options.documents != "none":
        unit = 2 * dist.get_world_size()
        drawn = document_lengths(options.documents, seq // unit if options.documents[:1].isdigit() else seq)
        rounded = [max(unit, length // unit * unit) for length in drawn]
        rounded[rounded.index(max(rounded))] += seq - sum(rounded)
        documents = tuple(rounded)
    return Workload(
        seq=seq, heads=query, kv_heads=kv, head_dim=128, dtype="bf16", documents=documents, window=options.window
    )


def _measure(workload: Workload, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    say(f"\n{workload.seq} tokens on {dist.get_world_size()} GPUs, {workload.heads}/{workload.kv_heads} heads, "
         f"{workload.mask()}: {workload.mask().area(workload.seq) / workload.seq**2:.3%} of the square")  # fmt: skip
    plain = Workload(seq=workload.seq, heads=workload.heads, kv_heads=workload.kv_heads, head_dim=128, dtype="bf16")
    competitors = [
        Competitor("zigzag, plain causal", _iteration("zigzag", plain, options, device)),
        Competitor(ALONE, _kernel_alone(workload, options, device)),
    ]
    for name in options.ours.split(","):
        body = _verified_iteration(name, workload, options, device)
        if body is not None:
            competitors.append(Competitor(name, body))
    if workload.documents and workload.window is None:
        competitors += _peers(competitors, workload, device)
    counts = [max(1, round(options.seconds * 1e9 / timed(item.body, device, 2)[-1])) for item in competitors]
    for _ in range(options.rounds):
        for competitor, count in zip(competitors, counts, strict=True):
            competitor.times_ns += timed(competitor.body, device, count)
    rate = plain.exact_flops() / statistics.median(competitors[0].times_ns)
    alone_ns = statistics.median(competitors[1].times_ns)
    return [_row(item, plain if item is competitors[0] else workload, rate, alone_ns) for item in competitors]


def _row(competitor: Competitor, workload: Workload, rate: float, alone_ns: float) -> dict[str, Any]:
    times = sorted(competitor.times_ns)
    median = statistics.median(times)
    share = workload.exact_flops() / rate / median
    of_alone = alone_ns / median if workload.documents or workload.window else None
    shares = f"{share:>8.1%}" + ("" if of_alone is None else f"{of_alone:>8.1%}")
    say(f"{competitor.name:<58}{median / 1e6:>9.3f} ms{times[0] / 1e6:>9.3f} to {times[-1] / 1e6:<9.3f}{shares}")
    return {
        "name": competitor.name, "seq": workload.seq, "heads": workload.heads, "kv_heads": workload.kv_heads,
        "mask": str(workload.mask()), "ms": median / 1e6, "least_ms": times[0] / 1e6, "most_ms": times[-1] / 1e6,
        "of_plain_rate": share, "of_kernel_alone": of_alone, "iterations": len(times),
    }  # fmt: skip


def _verified_iteration(
    name: str, workload: Workload, options: argparse.Namespace, device: torch.device
) -> Callable[[], list[Tensor]] | None:
    """Verify a strategy and return the function that runs an iteration; None if it fails on any rank."""
    reason = ""
    try:
        verify(_strategy(name, options), workload, device)
        body = _iteration(name, workload, options, device)
        body()
    except (RingprofError, ValueError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
    failed = torch.tensor([int(bool(reason))], device=device)
    dist.all_reduce(failed)
    if int(failed):
        say(f"{name}: NOT TIMED: {reason[:300] or 'failed on another rank'}")
        return None
    return body


def _strategy(text: str, options: argparse.Namespace) -> Any:
    name, *params = text.split("+")
    hops = options.hops if name not in ("ulysses", "allgather") else "nccl"
    return create(name, kernel=options.kernel, hops=hops, **dict(item.split("=") for item in params))


def _iteration(
    text: str, workload: Workload, options: argparse.Namespace, device: torch.device
) -> Callable[[], list[Tensor]]:
    problem = WorkloadShard.create(_strategy(text, options), workload, device)
    return lambda: [tensor for tensor in vars(problem.run_iteration()).values() if tensor is not None]


def _kernel_alone(workload: Workload, options: argparse.Namespace, device: torch.device) -> Callable[[], list[Tensor]]:
    """Return the function that computes the whole mask in one call per pass, for this rank's share of the heads."""
    size, block = dist.get_world_size(), Zigzag.sharded_mask(workload.mask(), workload.seq, 1).block(0, 0)
    assert block is not None
    counts = workload.heads // size, workload.kv_heads // size, workload.kv_heads // size, workload.heads // size
    q, k, v, dout = (torch.randn(1, workload.seq, heads, 128, device=device).bfloat16() for heads in counts)
    kernel = _strategy("zigzag", options).kernel_for(q, windows=workload.window is not None, documents=True)
    mask: dict[str, Any] = {"scale": 128**-0.5, "causal": block.causal, "parts": block.parts}

    def body() -> list[Tensor]:
        out, lse = kernel.forward(q, k, v, **mask)
        return [out, *kernel.backward(dout, q, k, v, lse, out=out, **mask)]

    return body


# --- ring-flash-attn --------------------------------------------------------------------------------


def _peers(ours: list[Competitor], workload: Workload, device: torch.device) -> list[Competitor]:
    """Verify ring-flash-attn's functions against ringprof's strategies, and return those that are right."""
    verified = []
    for name, make in (("ring-flash-attn zigzag varlen", _zigzag_varlen), ("ring-flash-attn llama3", _llama3)):
        reference = next((item for item in ours if item.name == SAME_TOKENS[name]), None)
        reason = "" if reference else f"{SAME_TOKENS[name]} is not among ours"
        try:
            body = make(workload, device)
            if reference is not None:
                tensors = zip(body(), reference.body(), strict=True)
                pairs = [(peer.detach().double(), own.detach().double()) for peer, own in tensors]
                worst = max(float((peer - own).norm() / own.norm()) for peer, own in pairs)
                # Not "worst > 0.02", so that NaN fails.
                reason = "" if worst < 0.02 else f"output or gradients are {worst:.2g} off ours"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        failed = torch.tensor([int(bool(reason))], device=device)
        dist.all_reduce(failed)
        if int(failed):
            say(f"{name}: NOT TIMED: {reason[:300] or 'failed on another rank'}")
        else:
            verified.append(Competitor(name, body))
    return verified


def _leaves(workload: Workload, device: torch.device) -> list[Tensor]:
    """Return q, k, v and dout as `WorkloadShard.create` draws them, packed: (T, H, D)."""
    problem = WorkloadShard.create(create("ring", kernel="flash-attn"), workload, device)
    assert problem.dout is not None
    inputs = (problem.q, problem.k, problem.v)
    return [tensor.detach()[0].requires_grad_() for tensor in inputs] + [problem.dout[0]]


def _zigzag_varlen(workload: Workload, device: torch.device) -> Callable[[], list[Tensor]]:
    from ringprof.strategies.peers.ring_flash_attn import _package

    function = _package().zigzag_ring_flash_attn_varlen_func
    q, k, v, dout = _leaves(workload, device)
    assert workload.documents is not None
    lengths = [length // dist.get_world_size() for length in workload.documents]
    cumulative = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

    def body() -> list[Tensor]:
        out = function(q, k, v, cumulative, max(lengths), causal=True)
        return [out[None], *(grad[None] for grad in torch.autograd.grad(out, (q, k, v), dout))]

    return body


def _llama3(workload: Workload, device: torch.device) -> Callable[[], list[Tensor]]:
    from ringprof.strategies.peers.ring_flash_attn import _package

    package = _package()
    q, k, v, dout = _leaves(workload, device)
    assert workload.documents is not None
    cumulative = torch.tensor([0, *accumulate(workload.documents)], dtype=torch.int32, device=device)
    prepared = package.llama3_flash_attn_prepare_cu_seqlens(cumulative, True, dist.get_rank(), dist.get_world_size())
    *lengths, local_k_slice = prepared

    def body() -> list[Tensor]:
        out = package.llama3_flash_attn_varlen_func(
            q, k, v, *lengths, heads_k_stride=workload.kv_heads, local_k_slice=local_k_slice, causal=True
        )
        return [out[None], *(grad[None] for grad in torch.autograd.grad(out, (q, k, v), dout))]

    return body


if __name__ == "__main__":
    main()
