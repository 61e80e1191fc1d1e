"""The two checks of `ringprof.record.verify` and `verify_timed` for prefill and decode: fewer queries than keys.

Before timing, a short cache against dense attention in float64. After timing, what the last timed iteration returned,
in places: some rows of a rank, of `SEQUENCES` sequences for every kv head that it returns heads of, against float64
attention over all keys of that sequence and head, brought together from all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ringprof.json_object import JsonObject, Params
from ringprof.record.measure import Results, WorkloadShard, drawn_sinks
from ringprof.record.process_group import gather_tensor
from ringprof.record.resolve import fits, kernel_of, mask_options, shape_of, torch_dtype
from ringprof.record.verify import (
    MOST_TOKENS,
    SEED,
    TOKENS_PER_RANK,
    draw_inputs,
    of_ranks,
    refuse_wrong,
    relative_rms,
    worst,
)
from ringprof.record.verify_timed import PLACES, by_head, same_as_first, softmax_rows
from ringprof.run import TimedVerification, Verification, Workload
from ringprof.strategies.algorithms.cached import Cached
from ringprof.strategies.base import AttentionCall
from ringprof.strategies.kernels.builtin import KeyStretches, ReferenceKernel
from ringprof.strategies.kernels.merge import with_sinks
from ringprof.strategies.masks.layouts import Block

SEQUENCES = 2


def verify_cached(strategy: Cached, workload: Workload, device: torch.device) -> Verification:
    """As `ringprof.record.verify.verify`, for a strategy over a cache. Raises `VerificationError`."""
    workload = shortened(type(strategy), workload, strategy.comm.size, device.type, strategy.parameters)
    keys, new = workload.kv_length, workload.seq
    assert keys is not None
    full = draw_inputs(msgspec.structs.replace(workload, phase="training", kv_length=None, seq=keys), device)
    q = full.q[:, keys - new :]
    local = (strategy.shard_cache(x, new, workload.heads).contiguous() for x in (full.k, full.v))
    sinks = drawn_sinks(workload, device)
    own = None if sinks is None else sinks[strategy.heads(workload.heads, workload.kv_heads).returned]
    options = mask_options(workload, own)
    with torch.no_grad():
        out = strategy.attention(strategy.shard(q).contiguous(), *local, causal=workload.causal, **options)
    common = keys - new + 1 if workload.causal else keys
    wide_k, wide_v = (x.repeat_interleave(workload.heads // workload.kv_heads, 2) for x in (full.k, full.v))
    scale, reference = workload.head_dim**-0.5, ReferenceKernel(softcap=workload.softcap or 0.0)
    everything = torch.arange(keys, device=device)
    seen = KeyStretches.of(workload.mask(), everything[keys - new :], keys).shown(everything)
    exact, lse = reference.forward_masked(q.double(), wide_k, wide_v, scale, seen)
    if sinks is not None:
        exact, _ = with_sinks(exact, lse, sinks)
    # One call of the kernel over what all new tokens may see: its own error.
    call = AttentionCall(kernel_of(strategy, q, workload).again(), scale, causal=False)
    alone, _ = call.forward(q, full.k[:, :common], full.v[:, :common], Block())
    there, _ = reference.forward_masked(q.double(), wide_k[:, :common], wide_v[:, :common], scale, None)
    share, kernel_error = strategy.shard_output(exact), relative_rms(alone.double() - there, there)
    difference = out.double() - share
    errors = _judged(
        [difference.abs().max().item(), relative_rms(difference, share), kernel_error], strategy, workload, device
    )
    refuse_wrong(errors, f"with {new} new tokens over {keys} keys; nothing was timed")
    return Verification(passed=True, seq=keys, errors=errors)


def shortened(strategy: type[Cached], workload: Workload, world: int, device_type: str, params: Params) -> Workload:
    """The workload of the check: no more new tokens, and no more that are cached, than the check of training has."""
    assert workload.kv_length is not None
    most = min(TOKENS_PER_RANK[device_type] * world, MOST_TOKENS)
    new, cached = workload.seq, workload.kv_length - workload.seq
    divisor = int(strategy.layout.divisor(world)) if workload.phase == "prefill" else 1
    if new > most:
        new = most // divisor * divisor or divisor
    if cached > most:
        # As even over the ranks as it is.
        cached = most // world * world + cached % world
    short = workload.at(new, new + cached)
    assert fits(strategy, short, world, params) is None
    return short


def verify_cached_timed(
    problem: WorkloadShard, first_rows: Tensor, last: Results, workload: Workload, before: Verification
) -> Verification:
    """As `ringprof.record.verify_timed.verify_timed`, for a strategy over a cache. Raises `VerificationError`."""
    begin = time.perf_counter_ns()
    device = problem.q.device
    assert workload.kv_length is not None
    same = same_as_first(problem, first_rows, last, workload.kv_length)
    pairs = list(_places(problem, last.out, workload))
    measured, expected = (torch.cat([pair[i].flatten() for pair in pairs]) for i in range(2))
    unit = torch.finfo(torch_dtype(workload)).eps / 2
    difference = measured - expected
    row = [
        float(difference.abs().max()),
        relative_rms(difference, expected),
        max(before.errors["out"].kernel_rms, unit),
    ]
    errors = _judged(row, problem.strategy, workload, device)
    where = f"with {workload.seq} new tokens over {workload.kv_length} keys"
    refuse_wrong(errors, f"in the last timed iteration, {where}; nothing was recorded")
    timed = TimedVerification(
        seq=workload.kv_length, places=len(pairs), kv_head=0, same_output=same, errors=errors,
        took_ns=time.perf_counter_ns() - begin,
    )  # fmt: skip
    return msgspec.structs.replace(before, timed=timed)


def _judged(row: list[float], strategy: Cached, workload: Workload, device: torch.device) -> JsonObject:
    """The errors of the output on all ranks; sinks round it once more than the kernel. Collective."""
    roundings = strategy.out_roundings + int(workload.sinks is not None)
    return {"out": worst(of_ranks(row, device), torch_dtype(workload), roundings)}


class _Cache:
    """Keys and values of all ranks, a head of a sequence at a time, and the heads that this rank has."""

    def __init__(self, problem: WorkloadShard, workload: Workload) -> None:
        self.problem, self.workload = problem, workload
        strategy, shape = problem.strategy, shape_of(workload)
        mine, device = strategy.heads(shape.heads, shape.kv_heads), problem.q.device
        self.given, self.returned = (range(*one.indices(shape.heads)) for one in (mine.queries, mine.returned))
        self.held = range(*mine.kv.indices(shape.kv_heads))
        positions = strategy.key_positions(shape.kv_length, shape.seq)
        ranks = of_ranks([self.held.start, len(positions)], device)
        self.most = int(max(count for _, count in ranks))
        padded = functional.pad(positions.to(device), (0, self.most - len(positions)), value=-1)
        # Other ranks have other heads in the same places.
        self.places = {
            rank: place[place >= 0]
            for rank, place in enumerate(gather_tensor(padded))
            if ranks[rank][0] == self.held.start
        }

    def whole(self, x: Tensor, batch: int, head: int) -> Tensor:
        """Keys or values (kv_length, D) of the rank's ``head``-th in the order of the sequence. Collective."""
        mine = functional.pad(x[batch, :, head], (0, 0, 0, self.most - x.shape[1]))
        # gloo does not know every type, but bytes are bytes.
        pieces = gather_tensor(mine.contiguous().view(torch.uint8))
        found = mine.new_full((self.workload.kv_length or 0, mine.shape[1]), float("nan"))
        for rank, place in self.places.items():
            found[place] = pieces[rank].view(mine.dtype)[: len(place)]
        return found

    def queries(self) -> Tensor:
        """All heads (B, S, H, D) of the queries of this rank's tokens. Collective."""
        q = self.problem.q
        if list(self.returned) == list(self.given):
            return q
        # Ranks that are given the same heads are given the same queries.
        full = q.new_zeros((*q.shape[:2], self.workload.heads, q.shape[3]), dtype=torch.float64)
        count = q.new_zeros(self.workload.heads, dtype=torch.float64)
        full[:, :, self.given.start : self.given.stop], count[self.given.start : self.given.stop] = q.double(), 1
        dist.all_reduce(full)
        dist.all_reduce(count)
        return (full / count[:, None])[:, :, self.returned.start : self.returned.stop]


def _places(problem: WorkloadShard, out: Tensor, workload: Workload) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's output and dense attention's, in places of every kv head that it returns heads of. Collective."""
    cache, keys, group = _Cache(problem, workload), workload.kv_length or 0, workload.heads // workload.kv_heads
    generator = torch.Generator().manual_seed(SEED)
    rows = torch.randperm(out.shape[1], generator=generator)[:PLACES].sort().values.to(out.device)
    positions = keys - workload.seq + problem.strategy.query_positions(workload.seq).to(out.device)[rows]
    seen = KeyStretches.of(workload.mask(), positions, keys)
    queries = cache.queries()
    for number, kv_head in enumerate(cache.held):
        heads = [place for place, head in enumerate(cache.returned) if head // group == kv_head]
        for batch in torch.randperm(workload.batch, generator=generator)[:SEQUENCES].tolist():
            k, v = (cache.whole(x, batch, number) for x in (problem.k, problem.v))
            if not heads:
                continue
            q, mine = (by_head(x[batch][rows][:, heads].double()) for x in (queries, out))
            sinks = None if problem.sinks is None else problem.sinks[heads].repeat_interleave(len(rows))
            scores = workload.head_dim**-0.5, torch.float64, workload.softcap or 0.0, sinks
            yield mine, softmax_rows(q, k, v, seen.repeated(len(heads)), *scores)[0]
