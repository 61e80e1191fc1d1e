"""Every strategy on this machine's GPUs, the solo rate of its blocks, and peers on the same kernels, in one table.

    torchrun --nproc-per-node 8 benchmarks/strategy_speed.py --config 131072:40:40 --config 65536:32:8
    torchrun --nproc-per-node 8 benchmarks/strategy_speed.py --config 524288:40:40 --ours zigzag,burst --kernels cudnn
    torchrun --nproc-per-node 2 benchmarks/strategy_speed.py --grid --ours zigzag --no-solo --seconds-in-all 500

Forward alone, and forward and backward, bf16, head_dim 128, causal. All competitors of a configuration are timed in
turns, round after round, because a hot GPU is several percent slower than a cool one; solo is the strategy's own blocks
back to back, nothing merged, nothing sent. Peers: ring-flash-attn and yunchang, where they and flash-attn can be
imported, and torch's own context parallelism; before anything is timed their results are held against ours. Speed
counts the model's FLOPs (docs/definitions.md), the slowest rank's time each iteration; memory is the peak above what
was there before, inputs included. A configuration is SEQ:HEADS:KV_HEADS; the grid has 1,024 to 65,536 tokens a GPU and
four ratios of heads, small ones first. With --seconds-in-all no configuration is begun that is not likely to end in
time; with --out every configuration is written when it is done.

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
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peers import Peer, peers

from ringprof.record.clock import clock_for
from ringprof.record.control_times import Replay
from ringprof.record.measure import Problem
from ringprof.record.memory import ran_out
from ringprof.run import Workload
from ringprof.strategies import create
from ringprof.strategies.copies import held_bytes

OURS = "zigzag,burst,ring,stripe,ulysses,usp,double-ring,megatron,allgather"
TOKENS = (1024, 2048, 4096, 8192, 16384, 65536)
HEADS = ((40, 40), (32, 8), (24, 4), (64, 1))


@dataclass
class Competitor:
    """One row: what runs an iteration, and what it took."""

    system: str
    name: str
    kernel: str
    body: Callable[[], Any]
    forward: Callable[[], Any]
    inputs: tuple[torch.Tensor, ...]
    """q, k, v, dout: the same for all."""
    solo: Callable[[], Any] | None = None
    strategy: Any = None
    times_ns: list[int] = field(default_factory=list)
    forward_ns: list[int] = field(default_factory=list)
    solo_ns: list[int] = field(default_factory=list)
    peak_mib: float | None = None
    crossing_mb: float | None = None
    """Most bytes that a rank sends to other hosts in an iteration."""
    problem: str = ""


def main() -> int:
    options = _options()
    begun = time.monotonic()
    device = _start()
    found, missing = peers(_degrees(options)) if not options.no_peers else ([], [])
    _say(*missing)
    if found and not options.no_check:
        _check(found, device, options)
    rows: list[dict[str, Any]] = []
    longest = 0.0
    for config in _configs(options):
        start = time.monotonic()
        if not _in_time(start - begun + longest, options.seconds_in_all, device):
            _say(f"{config}: left out, no time for it")
            continue
        rows += _measure(config, found, device, options)
        longest = max(longest, time.monotonic() - start)
        if dist.get_rank() == 0 and options.out:
            Path(options.out).write_text(json.dumps(rows, indent=1))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", action="append", default=[], help="SEQ:HEADS:KV_HEADS, repeatable")
    parser.add_argument("--grid", action="store_true", help="lengths and ratios of heads, from small to large")
    parser.add_argument("--seconds-in-all", type=float, help="begin no configuration that is not likely to end by then")
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


def _configs(options: argparse.Namespace) -> list[str]:
    world = int(os.environ["WORLD_SIZE"])
    grid = [f"{tokens * world}:{heads}:{kv_heads}" for tokens in TOKENS for heads, kv_heads in HEADS]
    return [*options.config, *(grid if options.grid else [])]


def _in_time(seconds: float, limit: float | None, device: torch.device) -> bool:
    """Whether all ranks find that there is time."""
    if limit is None:
        return True
    late = torch.tensor([int(seconds > limit)], device=device)
    dist.all_reduce(late, op=dist.ReduceOp.MAX)
    return not int(late)


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
        ours = create(peer.like, kernel=peer.kernel, ranks_per_host=options.ranks_per_host, **peer.params)
        workload = Workload(batch=1, seq=4096, heads=8, kv_heads=8, head_dim=128, causal=True, dtype="bf16")
        problem = Problem.of(ours, workload, device)
        inputs = (problem.q, problem.k, problem.v)
        results = []
        try:
            for attention in (lambda q, k, v, ours=ours: ours.attention(q, k, v, causal=True), peer.function):
                out = attention(*inputs)
                results.append([out.detach(), *torch.autograd.grad(out, inputs, problem.dout)])
        except Exception as error:
            _say(f"{peer.system} {peer.name}: {type(error).__name__}: {error}")
            continue
        worst = max(float((a - b).norm() / a.norm()) for a, b in zip(*results, strict=True))
        total = torch.tensor([worst], device=device)
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
        verdict = "agrees" if float(total) < 0.02 else "DIFFERS"
        _say(f"{peer.system} {peer.name}: {verdict} with our {peer.like} (relative difference {float(total):.1e})")


# --- measuring --------------------------------------------------------------------------------------


def _measure(config: str, found: list[Peer], device: torch.device, options: argparse.Namespace) -> list[dict[str, Any]]:
    seq, heads, kv_heads = map(int, config.split(":"))
    workload = Workload(batch=1, seq=seq, heads=heads, kv_heads=kv_heads, head_dim=128, causal=True, dtype="bf16")
    candidates = _competitors(workload, found, device, options)
    competitors = [one for one in candidates if _prepare(one, device, solo=not options.no_solo)]
    counts = [max(1, round(options.seconds * 1e9 / one.times_ns.pop())) for one in competitors]
    for _ in range(options.rounds):
        for one, count in zip(competitors, counts, strict=True):
            one.times_ns += _timed(one.body, device, count)
            with torch.no_grad():
                one.forward_ns += _timed(one.forward, device, count)
            if one.solo is not None:
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
                forward = partial(strategy.attention, *inputs[:3], causal=True)
                body = problem.iteration
                rows.append(Competitor("ringprof", label, kernel, body, forward, inputs, strategy=strategy))
    assert inputs is not None
    for one in [one for one in found if one.kernel in options.kernels]:
        forward = partial(one.function, *inputs[:3])
        rows.append(Competitor(one.system, one.name, one.kernel, _peer_body(one, inputs), forward, inputs))
    return rows


def _value(text: str) -> Any:
    return {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)


def _peer_body(peer: Peer, inputs: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    q, k, v, dout = inputs

    def body() -> None:
        torch.autograd.grad(peer.function(q, k, v), (q, k, v), dout)

    return body


def _prepare(one: Competitor, device: torch.device, *, solo: bool) -> bool:
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
            if solo:
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
    forward = sorted(one.forward_ns)
    return {
        "system": one.system, "strategy": one.name, "kernel": one.kernel,
        "seq": workload.seq, "heads": workload.heads, "kv_heads": workload.kv_heads,
        "ms": median / 1e6, "p10_ms": _quantile(times, 0.1) / 1e6, "p90_ms": _quantile(times, 0.9) / 1e6,
        "forward_ms": statistics.median(forward) / 1e6,
        "forward_p10_ms": _quantile(forward, 0.1) / 1e6, "forward_p90_ms": _quantile(forward, 0.9) / 1e6,
        "world": dist.get_world_size(), "iterations": len(times), "tflops": flops / median / 1e3,
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
        f"{'system':<16}{'strategy':<34}{'kernel':<11}{'fwd ms':>9}{'f+b ms':>9}{'p10':>9}{'p90':>9}{'TFLOP/s':>9}"
        f"{'solo':>8}{'of solo':>9}{'peak MiB':>10}" + (f"{'MB to other hosts':>19}" if crossing else ""),
    ]  # fmt: skip
    for row in sorted(rows, key=lambda row: (row["kernel"], -row["tflops"])):
        solo = f"{row['solo_tflops']:>8.1f}{row['of_solo']:>9.1%}" if row["solo_tflops"] else f"{'-':>8}{'-':>9}"
        sent = (
            "" if not crossing else f"{'-' if row['crossing_mb'] is None else format(row['crossing_mb'], ',.0f'):>19}"
        )
        lines.append(
            f"{row['system']:<16}{row['strategy']:<34}{row['kernel']:<11}{row['forward_ms']:>9.3f}{row['ms']:>9.3f}"
            f"{row['p10_ms']:>9.3f}{row['p90_ms']:>9.3f}{row['tflops']:>9.1f}{solo}{row['peak_mib']:>10.0f}{sent}"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
