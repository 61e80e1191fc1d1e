"""Every strategy on this machine's GPUs, the solo rate of its blocks, and two peers on the same kernel, in one table.

    torchrun --nproc-per-node 8 benchmarks/strategy_speed.py --config 131072:40:40 --config 65536:32:8
    torchrun --nproc-per-node 8 benchmarks/strategy_speed.py --config 524288:40:40 --ours zigzag,burst --kernels cudnn

Forward and backward, bf16, head_dim 128, causal. All competitors of a configuration are timed in turns, round after
round, because a hot GPU is several percent slower than a cool one; solo is the strategy's own blocks back to back,
nothing merged, nothing sent. Peers: ring-flash-attn and yunchang, where they and flash-attn can be imported; before
anything is timed their results are held against ours. Speed counts the model's FLOPs (docs/definitions.md), the
slowest rank's time each iteration; memory is the peak above what was there before, inputs included.

Two emulated hosts, halves that talk over sockets:

    torchrun --no-python --nproc-per-node 8 bash -c \\
        'NCCL_HOSTID=h$((LOCAL_RANK/4)) exec python3 benchmarks/strategy_speed.py --ranks-per-host 4 ...'
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peers import Peer, peers

from ringprof.record.clock import clock_for
from ringprof.record.controls import Replay
from ringprof.record.measure import Problem
from ringprof.record.memory import ran_out
from ringprof.run import Workload
from ringprof.strategies import create
from ringprof.strategies.copies import held_bytes

OURS = "zigzag,burst,ring,stripe,ulysses,usp,double-ring,megatron,allgather"


@dataclass
class Competitor:
    """One row: what runs an iteration, and what it took."""

    system: str
    name: str
    kernel: str
    body: Callable[[], Any]
    inputs: tuple[torch.Tensor, ...]
    """q, k, v, dout: the same for all."""
    solo: Callable[[], Any] | None = None
    strategy: Any = None
    times_ns: list[int] = field(default_factory=list)
    solo_ns: list[int] = field(default_factory=list)
    peak_mib: float | None = None
    crossing_mb: float | None = None
    """Most bytes that a rank sends to other hosts in an iteration."""
    problem: str = ""


def main() -> int:
    options = _options()
    device = _start()
    found, missing = peers(_degrees(options)) if not options.no_peers else ([], [])
    _say(*missing)
    if found and not options.no_check:
        _check(found, device, options)
    rows: list[dict[str, Any]] = []
    for config in options.config:
        rows += _measure(config, found, device, options)
        if dist.get_rank() == 0 and options.out:
            Path(options.out).write_text(json.dumps(rows, indent=1))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", action="append", required=True, help="SEQ:HEADS:KV_HEADS, repeatable")
    parser.add_argument("--ours", default=OURS, help="names, with parameters as burst+ring_window=4")
    parser.add_argument("--kernels", default="cudnn,flash-attn")
    parser.add_argument("--hops", default="copy,nccl", help="what carries our hops; both are rows of their own")
    parser.add_argument("--ranks-per-host", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="timed per competitor and round, about")
    parser.add_argument("--no-solo", action="store_true")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--out", help="write the rows as JSON, too")
    return parser.parse_args()


def _start() -> torch.device:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def _degrees(options: argparse.Namespace) -> list[tuple[int, int]]:
    world = dist.get_world_size()
    hybrid = [(2, world // 2)] + ([(world // 2, 2)] if world > 4 else [])
    return hybrid if options.ranks_per_host else [(world, 1), *hybrid]


def _say(*lines: str) -> None:
    if dist.get_rank() == 0:
        for line in lines:
            print(line, flush=True)


# --- the check --------------------------------------------------------------------------------------


def _check(found: list[Peer], device: torch.device, options: argparse.Namespace) -> None:
    """Hold each peer's output and gradients against ours on a small problem; bf16 kernels differ by their rounding."""
    for peer in found:
        ours = create(peer.like, kernel="flash-attn", ranks_per_host=options.ranks_per_host, **peer.params)
        workload = Workload(batch=1, seq=4096, heads=8, kv_heads=8, head_dim=128, causal=True, dtype="bf16")
        problem = Problem.of(ours, workload, device)
        inputs = (problem.q, problem.k, problem.v)
        results = []
        for attention in (lambda q, k, v, ours=ours: ours.attention(q, k, v, causal=True), peer.function):
            out = attention(*inputs)
            results.append([out.detach(), *torch.autograd.grad(out, inputs, problem.dout)])
        worst = max(float((a - b).norm() / a.norm()) for a, b in zip(*results, strict=True))
        total = torch.tensor([worst], device=device)
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
        verdict = "agrees" if float(total) < 0.02 else "DIFFERS"
        _say(f"{peer.system} {peer.name}: {verdict} with our {peer.like} (relative difference {float(total):.1e})")


# --- measuring --------------------------------------------------------------------------------------


def _measure(config: str, found: list[Peer], device: torch.device, options: argparse.Namespace) -> list[dict[str, Any]]:
    seq, heads, kv_heads = map(int, config.split(":"))
    workload = Workload(batch=1, seq=seq, heads=heads, kv_heads=kv_heads, head_dim=128, causal=True, dtype="bf16")
    competitors = [one for one in _competitors(workload, found, device, options) if _prepare(one, device)]
    counts = [max(1, round(options.seconds * 1e9 / one.times_ns.pop())) for one in competitors]
    for _ in range(options.rounds):
        for one, count in zip(competitors, counts, strict=True):
            one.times_ns += _timed(one.body, device, count)
            if one.solo is not None and not options.no_solo:
                one.solo_ns += _timed(one.solo, device, count)
    rows = [_row(one, workload, device) for one in competitors]
    _say(*_lines(rows, workload))
    torch.cuda.empty_cache()
    return rows


def _competitors(
    workload: Workload, found: list[Peer], device: torch.device, options: argparse.Namespace
) -> list[Competitor]:
    inputs = None
    rows = []
    for kernel in options.kernels.split(","):
        for text in options.ours.split(","):
            name, *given = text.split("+")
            for hops in options.hops.split(",") if name not in ("ulysses", "megatron", "allgather") else ["nccl"]:
                params = {key: _value(value) for key, value in (item.split("=") for item in given)}
                strategy = create(name, kernel=kernel, ranks_per_host=options.ranks_per_host, hops=hops, **params)
                problem = Problem.of(strategy, workload, device) if inputs is None else Problem(strategy, True, *inputs)
                inputs = inputs or (problem.q, problem.k, problem.v, problem.dout)
                label = text if hops == "nccl" else f"{text} (copied hops)"
                rows.append(Competitor("ringprof", label, kernel, problem.iteration, inputs, strategy=strategy))
    assert inputs is not None
    if "flash-attn" in options.kernels:
        rows += [Competitor(one.system, one.name, "flash-attn", _peer_body(one, inputs), inputs) for one in found]
    return rows


def _value(text: str) -> Any:
    return {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)


def _peer_body(peer: Peer, inputs: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    q, k, v, dout = inputs

    def body() -> None:
        torch.autograd.grad(peer.function(q, k, v), (q, k, v), dout)

    return body


def _prepare(one: Competitor, device: torch.device) -> bool:
    """Warm up, and measure memory; False, with the reason shown, where it cannot run."""
    reason = ""
    try:
        held = held_bytes()
        _timed(one.body, device, 1)
        held = held_bytes() - held
        inputs = sum(tensor.numel() * tensor.element_size() for tensor in one.inputs)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        if one.strategy is not None:
            one.strategy.comm.meter.clear()
        one.times_ns = _timed(one.body, device, 1)
        one.peak_mib = (torch.cuda.max_memory_allocated(device) - before + inputs + held) / 2**20
        if one.strategy is not None:
            sent = one.strategy.comm.meter.sent.items()
            one.crossing_mb = sum(size for key, (_, size) in sent if key[3] == "other_host") / 1e6
            replay = Replay.of(Problem(one.strategy, True, *one.inputs))
            one.solo = replay.run
            _timed(replay.run, device, 1)
    except Exception as error:
        reason = "out of memory" if ran_out(error) else f"{type(error).__name__}: {error}"
    failed = torch.tensor([int(bool(reason))], device=device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if int(failed):
        _say(f"{one.system} {one.name} ({one.kernel}): {reason or 'failed on another rank'}")
        torch.cuda.empty_cache()
        return False
    return True


def _timed(body: Callable[[], Any], device: torch.device, count: int) -> list[int]:
    """The slowest rank's time of every iteration."""
    clock = clock_for(device)
    for _ in range(count):
        clock.run(body)
    times = torch.tensor(clock.times_ns(), device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return [int(time) for time in times.tolist()]


# --- the table --------------------------------------------------------------------------------------


def _row(one: Competitor, workload: Workload, device: torch.device) -> dict[str, Any]:
    flops = workload.model_flops() / dist.get_world_size()
    times = sorted(one.times_ns)
    median = statistics.median(times)
    most = torch.tensor([one.crossing_mb or 0.0, one.peak_mib or 0.0], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    crossing, peak = most.tolist()
    solo = statistics.median(one.solo_ns) if one.solo_ns else None
    return {
        "system": one.system, "strategy": one.name, "kernel": one.kernel,
        "seq": workload.seq, "heads": workload.heads, "kv_heads": workload.kv_heads,
        "ms": median / 1e6, "p10_ms": _quantile(times, 0.1) / 1e6, "p90_ms": _quantile(times, 0.9) / 1e6,
        "iterations": len(times), "tflops": flops / median / 1e3,
        "solo_ms": solo / 1e6 if solo else None, "solo_tflops": flops / solo / 1e3 if solo else None,
        "of_solo": solo / median if solo else None, "peak_mib": peak,
        "crossing_mb": crossing if one.strategy is not None else None,
    }  # fmt: skip


def _quantile(ordered: list[int], share: float) -> float:
    return ordered[round(share * (len(ordered) - 1))]


def _lines(rows: list[dict[str, Any]], workload: Workload) -> list[str]:
    crossing = any(row["crossing_mb"] for row in rows)
    heads = f"{workload.heads} heads" + (f" / {workload.kv_heads} kv" if workload.kv_heads != workload.heads else "")
    lines = [
        "", f"{workload.seq} tokens, {heads}, {dist.get_world_size()} GPUs",
        f"{'system':<16}{'strategy':<34}{'kernel':<11}{'f+b ms':>9}{'p10':>9}{'p90':>9}{'TFLOP/s':>9}"
        f"{'solo':>8}{'of solo':>9}{'peak MiB':>10}" + (f"{'MB to other hosts':>19}" if crossing else ""),
    ]  # fmt: skip
    for row in sorted(rows, key=lambda row: (row["kernel"], -row["tflops"])):
        solo = f"{row['solo_tflops']:>8.1f}{row['of_solo']:>9.1%}" if row["solo_tflops"] else f"{'-':>8}{'-':>9}"
        sent = (
            "" if not crossing else f"{'-' if row['crossing_mb'] is None else format(row['crossing_mb'], ',.0f'):>19}"
        )
        lines.append(
            f"{row['system']:<16}{row['strategy']:<34}{row['kernel']:<11}{row['ms']:>9.2f}{row['p10_ms']:>9.2f}"
            f"{row['p90_ms']:>9.2f}{row['tflops']:>9.1f}{solo}{row['peak_mib']:>10.0f}{sent}"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
