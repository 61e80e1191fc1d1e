"""Measure every strategy on this machine's GPUs, its kernel-only rate, and third-party strategies on the same kernels.

    torchrun --nproc-per-node 8 dev/benchmarks/strategy_speed.py --config 131072:40:40 --config 65536:32:8
    torchrun --nproc-per-node 8 dev/benchmarks/strategy_speed.py --config 524288:40:40 --ours zigzag --kernels cudnn
    torchrun --nproc-per-node 2 dev/benchmarks/strategy_speed.py --grid --ours zigzag --no-solo --seconds-in-all 500

Forward alone, and forward and backward, bf16, head_dim 128, causal. All competitors of a configuration are timed
interleaved, because a hot GPU is several percent slower than a cool one. Every round begins with another competitor.
The first call of each is not counted unless it takes 0.2 s: it suffers from the heat of its predecessor. Solo is the
kernel-only baseline: the strategy's own blocks back to back, without merging and communication. Peers are third-party
strategies (`ringprof strategies` lists them) that are installed.

Before the timing, the output and gradients of every competitor are verified against float64; a wrong one is not timed.
A rate above the device's peak is marked, since it cannot be the whole work. Speed is the model FLOPs (docs/metrics.md)
over the time of the slowest rank in each iteration. Memory is the peak above the memory in use before, inputs included.
A configuration is SEQ:HEADS:KV_HEADS. The grid has 1,024 to 65,536 tokens per GPU and four ratios of heads, small ones
first. With --layers 8 a pass makes 8 calls, each with the output of the one before as its queries, and times are per
call: as in a model, autograd's thread is woken once, not once per call. With --seconds-in-all, no configuration is
started that is not likely to finish in time. With --out, every configuration is written when it is done.

Two emulated nodes, halves that communicate over sockets:

    torchrun --no-python --nproc-per-node 8 bash -c \\
        'NCCL_HOSTID=h$((LOCAL_RANK/4)) exec python3 dev/benchmarks/strategy_speed.py --ranks-per-host 4 ...'
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from on_gpus import leave, say, start, timed
from ring_flash_attn_3 import point_at_flash_attn_3

from ringprof.errors import VerificationError
from ringprof.iteration.baselines import Replay
from ringprof.iteration.shard import WorkloadShard
from ringprof.proof.verify import verify
from ringprof.ranks.rank_errors import ran_out
from ringprof.strategies import Unsupported, create, find
from ringprof.strategies.transport.copy_engine import slots_in_use
from ringprof.workload.devices import peak_of
from ringprof.workload.workload import Workload

OURS = "zigzag,burst,ring,stripe,ulysses,usp,double-ring,megatron,allgather"
PEERS = (
    "torch-cp,torch-cp+rotate=alltoall,ring-flash-attn/zigzag,ring-flash-attn/stripe,ring-flash-attn/ring,"
    "ring-flash-attn/llama3,yunchang/ulysses,yunchang/usp,transformer-engine/p2p,transformer-engine/a2a,"
    "transformer-engine/all_gather,transformer-engine/a2a+p2p"
)
REPOINTED = "ring-flash-attn/zigzag", "flash-attn-3"
"""Peer that calls flash-attn 2, and the kernel that it is measured with as well (`ring_flash_attn_3`)."""
LONG_NS = 200_000_000
"""Time of an iteration from which every call counts."""
TOKENS = (1024, 2048, 4096, 8192, 16384, 65536)
HEADS = ((40, 40), (32, 8), (24, 4), (64, 1))


@dataclass
class Competitor:
    """One row: an implementation and its measured times."""

    name: str
    kernel: str
    strategy: Any
    problem: WorkloadShard
    """Workload of this rank, with the same q, k, v and dout for all competitors."""
    is_peer: bool
    solo: Callable[[], Any] | None = None
    times_ns: list[int] = field(default_factory=list)
    forward_ns: list[int] = field(default_factory=list)
    solo_ns: list[int] = field(default_factory=list)
    peak_mib: float | None = None
    crossing_mb: float | None = None
    """MB that a rank sends to other nodes in an iteration, maximum over the ranks."""


def main() -> NoReturn:
    options = _options()
    begun = time.monotonic()
    device = start()
    entries = _verified(_entries(options), device, options)
    rows: list[dict[str, Any]] = []
    longest = 0.0
    for config in _configs(options):
        before = time.monotonic()
        if not _in_time(before - begun + longest, options.seconds_in_all, device):
            say(f"{config}: left out, no time for it")
            continue
        rows += _measure(config, entries, device, options)
        longest = max(longest, time.monotonic() - before)
        if dist.get_rank() == 0 and options.out:
            Path(options.out).write_text(json.dumps(rows, indent=1))
    leave()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", action="append", default=[], help="SEQ:HEADS:KV_HEADS, repeatable")
    parser.add_argument("--grid", action="store_true", help="lengths and ratios of heads, from small to large")
    parser.add_argument("--seconds-in-all", type=float, help="start no configuration that is not likely to end in time")
    parser.add_argument("--ours", default=OURS, help="names, with parameters and kernel as burst+ring_window=4:cudnn")
    parser.add_argument("--peers", default=PEERS, help="names, as --ours; none: leave them out")
    parser.add_argument("--kernels", default="cudnn,flash-attn")
    parser.add_argument("--hops", default="copy,nccl", help="intra-node transports of our strategies, one row each")
    parser.add_argument("--ranks-per-host", type=int)
    parser.add_argument("--graphs", action="store_true", help="a row more for each of ours by NCCL: as a CUDA graph")
    parser.add_argument("--layers", type=int, default=1, help="calls per pass, like the layers of a model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="timed per competitor and round, about")
    parser.add_argument("--least", type=int, default=2, help="fewest calls that are timed per competitor and round")
    parser.add_argument("--no-forward", action="store_true", help="time no forward pass by itself")
    parser.add_argument("--no-solo", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--out", help="write the rows as JSON, too")
    return parser.parse_args()


def _configs(options: argparse.Namespace) -> list[str]:
    world = int(os.environ["WORLD_SIZE"])
    grid = [f"{tokens * world}:{heads}:{kv_heads}" for tokens in TOKENS for heads, kv_heads in HEADS]
    return [*options.config, *(grid if options.grid else [])]


def _in_time(seconds: float, limit: float | None, device: torch.device) -> bool:
    """Return whether all ranks agree that the time limit is not exceeded."""
    if limit is None:
        return True
    late = torch.tensor([int(seconds > limit)], device=device)
    dist.all_reduce(late, op=dist.ReduceOp.MAX)
    return not int(late)


# --- who competes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A strategy with its parameters, kernel and transport."""

    text: str
    """Name and parameters, such as ``burst+ring_window=4``."""
    kernel: str
    hops: str
    is_peer: bool
    graph: bool = False
    """Whether the timed iterations are replays of a captured CUDA graph."""

    @property
    def label(self) -> str:
        notes = ["copied hops"] * (self.hops == "copy") + ["CUDA graph"] * self.graph
        return f"{self.text} ({', '.join(notes)})" if notes else self.text

    def create(self, options: argparse.Namespace) -> Any:
        name, items = _name_and_items(self.text)
        params = {key: _value(value) for key, value in (item.split("=") for item in items)}
        repointed = (name, self.kernel) == REPOINTED
        kernel = "flash-attn" if repointed else self.kernel
        strategy = create(name, kernel=kernel, ranks_per_host=options.ranks_per_host, hops=self.hops, **params)
        if repointed:
            point_at_flash_attn_3(strategy)
        return strategy


def _entries(options: argparse.Namespace) -> list[Entry]:
    entries = []
    for text, kernels in _with_kernels(options.ours, options):
        # Only rings have hops that copy engines can carry; Megatron's hops keep the received buffers.
        ring = text.split("+")[0] not in ("ulysses", "megatron", "allgather")
        for kernel in kernels:
            entries += [Entry(text, kernel, hops, False) for hops in (options.hops.split(",") if ring else ["nccl"])]
            entries += [Entry(text, kernel, "nccl", False, graph=True)] if options.graphs else []
    for text, wanted in _with_kernels(options.peers, options) if options.peers != "none" else []:
        spec = find(_name_and_items(text)[0])
        missing = spec.missing()
        if missing:
            say(f"{spec.name} is not measured: it {missing}")
            continue
        supported = {*spec.load().KERNELS, *REPOINTED[1:] * (spec.name == REPOINTED[0])}
        kernels = [kernel for kernel in wanted if kernel in supported]
        entries += [Entry(text, kernel, "nccl", True) for kernel in kernels]
    return entries


def _with_kernels(texts: str, options: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Return every strategy in a list with its kernels: those after a colon, as ``zigzag:cudnn``, or all."""
    split = [text.partition(":") for text in texts.split(",")]
    return [(text, [only] if only else options.kernels.split(",")) for text, _, only in split]


def _name_and_items(text: str) -> tuple[str, list[str]]:
    """Return the name of a strategy, which may contain a plus sign, and its parameters as KEY=VALUE."""
    parts = text.split("+")
    return "+".join(part for part in parts if "=" not in part), [part for part in parts if "=" in part]


def _value(text: str) -> Any:
    return {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)


def _verified(entries: list[Entry], device: torch.device, options: argparse.Namespace) -> list[Entry]:
    """Return the entries with right results on a small workload; prints the errors of the others."""
    if options.no_check:
        return entries
    # A number of heads that every degree divides.
    heads = 8 * dist.get_world_size()
    workload = Workload(batch=1, seq=4096, heads=heads, kv_heads=heads, head_dim=128, causal=True, dtype="bf16")
    right = []
    for entry in entries:
        reason = ""
        try:
            errors = verify(entry.create(options), workload, device).errors
            worst = max(errors, key=lambda name: errors[name].rms / errors[name].allowed_rms)
            if entry.is_peer:
                detail = f"{worst} off by {errors[worst].rms:.1e}, {errors[worst].allowed_rms:.1e} allowed"
                say(f"{entry.label} ({entry.kernel}): right, {detail}")
        except VerificationError as error:
            reason = f"NOT TIMED: {error}"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if _on_all_ranks(not reason, device):
            right.append(entry)
        else:
            say(f"{entry.label} ({entry.kernel}): {reason or 'failed on another rank'}")
    return right


def _on_all_ranks(succeeded: bool, device: torch.device) -> bool:
    """Return whether all ranks succeeded."""
    failed = torch.tensor([int(not succeeded)], device=device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    return not int(failed)


# --- measuring --------------------------------------------------------------------------------------


def _measure(config: str, entries: list[Entry], device: torch.device, options: argparse.Namespace) -> list[Any]:
    seq, heads, kv_heads = map(int, config.split(":"))
    workload = Workload(batch=1, seq=seq, heads=heads, kv_heads=kv_heads, head_dim=128, causal=True, dtype="bf16")
    candidates = _competitors(workload, entries, device, options)
    competitors = [competitor for competitor in candidates if _prepare(competitor, device, solo=not options.no_solo)]
    turns = []
    for competitor in competitors:
        layers = 1 if competitor.problem.cuda_graph else options.layers
        calls = _calls(competitor.times_ns.pop() * layers, options)
        turns.append((competitor, layers, _pass(competitor.problem, layers), calls))
    for number in range(options.rounds):
        first = number * len(turns) // options.rounds
        for competitor, layers, body, calls in turns[first:] + turns[:first]:
            times = _warmed(body, device, *calls)
            competitor.times_ns += [time_ns // layers for time_ns in times]
            if not options.no_forward and not competitor.problem.cuda_graph:
                with torch.no_grad():
                    competitor.forward_ns += _warmed(partial(_forward, competitor.problem), device, *calls)
            if competitor.solo is not None:
                competitor.solo_ns += _warmed(competitor.solo, device, *calls)
    rows = [_row(competitor, workload, device) for competitor in competitors]
    say(*_lines(rows, workload))
    torch.cuda.empty_cache()
    return rows


def _calls(first_ns: int, options: argparse.Namespace) -> tuple[int, int]:
    """Return the numbers of calls per round that are counted, and of those before them that are not.

    The first call suffers from the caches and the heat that its predecessor left, but by little where it is long.
    """
    return max(options.least, round(options.seconds * 1e9 / first_ns)), int(first_ns < LONG_NS)


def _warmed(body: Callable[[], Any], device: torch.device, count: int, uncounted: int) -> list[int]:
    """Return the times of ``count`` calls after those that are not counted."""
    return timed(body, device, count + uncounted)[uncounted:]


def _pass(problem: WorkloadShard, layers: int) -> Callable[[], Any]:
    """Return a function that runs an iteration, or forward and backward of ``layers``, each with its own k and v."""
    if layers == 1:
        return problem.run_iteration
    kv = [x.detach().clone().requires_grad_() for _ in range(layers) for x in (problem.k, problem.v)]

    def run() -> Any:
        out = problem.q
        for k, v in zip(kv[::2], kv[1::2], strict=True):
            out = problem.strategy.attention(out, k, v, causal=True)
        return torch.autograd.grad(out, (problem.q, *kv), problem.dout)

    return run


def _forward(problem: WorkloadShard) -> None:
    problem.strategy.attention(problem.q, problem.k, problem.v, causal=True)


def _competitors(
    workload: Workload, entries: list[Entry], device: torch.device, options: argparse.Namespace
) -> list[Competitor]:
    inputs, rows = None, []
    for entry in entries:
        strategy = entry.create(options)
        problem = (
            WorkloadShard.create(strategy, workload, device)
            if inputs is None
            else WorkloadShard(strategy, True, *inputs)
        )
        problem.cuda_graph = entry.graph
        inputs = inputs or (problem.q, problem.k, problem.v, problem.dout)
        rows.append(Competitor(entry.label, entry.kernel, strategy, problem, entry.is_peer))
    return rows


def _prepare(competitor: Competitor, device: torch.device, *, solo: bool) -> bool:
    """Warm a competitor up and measure its memory; returns False and prints the reason if it cannot run."""
    reason = ""
    try:
        slots = slots_in_use()
        timed(competitor.problem.run_iteration, device, 1)
        # Strategies share the slots of a ring, so slots count for the strategy that used them, not for their creator.
        held = sum(used[0] for address, used in slots_in_use().items() if used != slots.get(address))
        tensors = (competitor.problem.q, competitor.problem.k, competitor.problem.v, competitor.problem.dout)
        inputs = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        competitor.strategy.comm.meter.clear()
        competitor.times_ns = timed(competitor.problem.run_iteration, device, 1)
        competitor.peak_mib = (torch.cuda.max_memory_allocated(device) - before + inputs + held) / 2**20
        if not competitor.is_peer:
            sent = competitor.strategy.comm.meter.sent.items()
            competitor.crossing_mb = sum(size for key, (_, size) in sent if key[3] == "other_host") / 1e6
            if solo:
                replay = Replay.record(competitor.problem)
                competitor.solo = replay.run
                timed(replay.run, device, 1)
            if competitor.problem.cuda_graph:
                competitor.problem.capture_graph()
                timed(competitor.problem.run_iteration, device, 1)
                competitor.times_ns = timed(competitor.problem.run_iteration, device, 1)
    except Unsupported as error:
        reason = str(error)
    except Exception as error:
        reason = "out of memory" if ran_out(error) else f"{type(error).__name__}: {error}"
    if not _on_all_ranks(not reason, device):
        say(f"{competitor.name} ({competitor.kernel}): {reason or 'failed on another rank'}")
        torch.cuda.empty_cache()
        return False
    return True


# --- the table --------------------------------------------------------------------------------------


def _row(competitor: Competitor, workload: Workload, device: torch.device) -> dict[str, Any]:
    flops = workload.model_flops() / dist.get_world_size()
    times = sorted(competitor.times_ns)
    median = statistics.median(times)
    most = torch.tensor([competitor.crossing_mb or 0.0, competitor.peak_mib or 0.0], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    crossing, peak = most.tolist()
    solo = statistics.median(competitor.solo_ns) if competitor.solo_ns else None
    forward = sorted(competitor.forward_ns)
    peak_rate = peak_of(torch.cuda.get_device_name(device), workload.dtype)
    return {
        "strategy": competitor.name, "kernel": competitor.kernel, "peer": competitor.is_peer,
        "seq": workload.seq, "heads": workload.heads, "kv_heads": workload.kv_heads,
        "ms": median / 1e6, "p10_ms": _quantile(times, 0.1) / 1e6, "p90_ms": _quantile(times, 0.9) / 1e6,
        "forward_ms": statistics.median(forward) / 1e6 if forward else None,
        "forward_p10_ms": _quantile(forward, 0.1) / 1e6 if forward else None,
        "forward_p90_ms": _quantile(forward, 0.9) / 1e6 if forward else None,
        "world": dist.get_world_size(), "iterations": len(times), "tflops": flops / median / 1e3,
        "above_peak": peak_rate is not None and flops / _quantile(times, 0.1) / 1e3 > peak_rate.tflops,
        "solo_ms": solo / 1e6 if solo else None, "solo_tflops": flops / solo / 1e3 if solo else None,
        "of_solo": solo / median if solo else None, "peak_mib": peak,
        "crossing_mb": None if competitor.is_peer else crossing,
    }  # fmt: skip


def _quantile(ordered: list[int], share: float) -> float:
    return ordered[round(share * (len(ordered) - 1))]


def _lines(rows: list[dict[str, Any]], workload: Workload) -> list[str]:
    crossing = any(row["crossing_mb"] for row in rows)
    heads = f"{workload.heads} heads" + (f" / {workload.kv_heads} kv" if workload.kv_heads != workload.heads else "")
    lines = [
        "", f"{workload.seq} tokens, {heads}, {dist.get_world_size()} GPUs",
        f"{'strategy':<40}{'kernel':<13}{'fwd ms':>9}{'f+b ms':>9}{'p10':>9}{'p90':>9}{'TFLOP/s':>9}"
        f"{'solo':>8}{'of solo':>9}{'peak MiB':>10}" + (f"{'MB to other hosts':>19}" if crossing else ""),
    ]  # fmt: skip
    for row in sorted(rows, key=lambda row: (row["kernel"], -row["tflops"])):
        solo = f"{row['solo_tflops']:>8.1f}{row['of_solo']:>9.1%}" if row["solo_tflops"] else f"{'-':>8}{'-':>9}"
        sent = (
            "" if not crossing else f"{'-' if row['crossing_mb'] is None else format(row['crossing_mb'], ',.0f'):>19}"
        )
        lines.append(
            f"{row['strategy']:<40}{row['kernel']:<13}{format(row['forward_ms'] or 0.0, '9.3f')}{row['ms']:>9.3f}"
            f"{row['p10_ms']:>9.3f}{row['p90_ms']:>9.3f}{row['tflops']:>9.1f}{solo}{row['peak_mib']:>10.0f}{sent}"
            + ("  IMPOSSIBLE: above the device's peak" if row["above_peak"] else "")
        )
    return lines


if __name__ == "__main__":
    main()
