"""Verification before and after timing for prefill and decode, which have fewer queries than keys.

Before timing, a short cache is compared with dense attention in float64. After timing, a sample of the last timed
output is verified: some rows of each rank, of `SEQUENCES` sequences, for every kv head whose query heads the rank
returns. The reference is float64 attention over all keys of that sequence and head, gathered from all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ringprof.common.json_object import JsonObject, Params
from ringprof.record.measure import Results, WorkloadShard, drawn_sinks
from ringprof.record.process_group import gather_tensor
from ringprof.record.resolve import attention_options, kernel_of, shape_of, torch_dtype, why_unsupported
from ringprof.record.verify import (
    MOST_TOKENS,
    SEED,
    TOKENS_PER_RANK,
    draw_inputs,
    gather_rows,
    raise_if_wrong,
    relative_rms,
    worst_error,
)
from ringprof.record.verify_timed import SAMPLED_ROWS, by_head, same_as_first, softmax_rows
from ringprof.run import TimedVerification, Verification, Workload
from ringprof.strategies.algorithms.cached import Cached
from ringprof.strategies.base import AttentionCall
from ringprof.strategies.kernels.merge import with_sinks
from ringprof.strategies.kernels.reference import KeyStretches, ReferenceKernel
from ringprof.strategies.masks.layouts import Block

SEQUENCES = 2


def verify_cached(strategy: Cached, workload: Workload, device: torch.device) -> Verification:
    """Verify a strategy over a cache before it is timed; see `ringprof.record.verify`. Collective.

    Raises `VerificationError` if a result is wrong.
    """
    workload = shortened(type(strategy), workload, strategy.comm.size, device.type, strategy.parameters)
    keys, new = workload.kv_length, workload.seq
    assert keys is not None
    full = draw_inputs(msgspec.structs.replace(workload, phase="training", kv_length=None, seq=keys), device)
    q = full.q[:, keys - new :]
    local = (strategy.shard_cache(x, new, workload.heads).contiguous() for x in (full.k, full.v))
    sinks = drawn_sinks(workload, device)
    own_sinks = None if sinks is None else sinks[strategy.heads(workload.heads, workload.kv_heads).returned]
    options = attention_options(workload, own_sinks)
    with torch.no_grad():
        out = strategy.attention(strategy.shard(q).contiguous(), *local, causal=workload.causal, **options)
    common_keys = keys - new + 1 if workload.causal else keys
    wide_k, wide_v = (x.repeat_interleave(workload.heads // workload.kv_heads, 2) for x in (full.k, full.v))
    scale, reference = workload.head_dim**-0.5, ReferenceKernel(softcap=workload.softcap or 0.0)
    all_positions = torch.arange(keys, device=device)
    attended = KeyStretches.of(workload.mask(), all_positions[keys - new :], keys).shown(all_positions)
    exact, lse = reference.forward_masked(q.double(), wide_k, wide_v, scale, attended)
    if sinks is not None:
        exact, _ = with_sinks(exact, lse, sinks)
    # The kernel's own error: one call over the keys that all new tokens attend.
    call = AttentionCall(kernel_of(strategy, q, workload).again(), scale, causal=False)
    kernel_out, _ = call.forward(q, full.k[:, :common_keys], full.v[:, :common_keys], Block())
    kernel_reference, _ = reference.forward_masked(
        q.double(), wide_k[:, :common_keys], wide_v[:, :common_keys], scale, None
    )
    share = strategy.shard_output(exact)
    kernel_error = relative_rms(kernel_out.double() - kernel_reference, kernel_reference)
    difference = out.double() - share
    errors = _output_errors(
        [difference.abs().max().item(), relative_rms(difference, share), kernel_error], strategy, workload, device
    )
    raise_if_wrong(errors, f"with {new} new tokens over {keys} keys; nothing was timed")
    return Verification(passed=True, seq=keys, errors=errors)


def shortened(strategy: type[Cached], workload: Workload, world: int, device_type: str, params: Params) -> Workload:
    """Return the workload of the verification: its new and its cached tokens are each limited as for training."""
    assert workload.kv_length is not None
    limit = min(TOKENS_PER_RANK[device_type] * world, MOST_TOKENS)
    new, cached = workload.seq, workload.kv_length - workload.seq
    divisor = int(strategy.layout.divisor(world)) if workload.phase == "prefill" else 1
    if new > limit:
        new = limit // divisor * divisor or divisor
    if cached > limit:
        # Keep the remainder over the ranks, so that the cache is divided as evenly as the workload's.
        cached = limit // world * world + cached % world
    short = workload.at(new, new + cached)
    assert why_unsupported(strategy, short, world, params) is None
    return short


def verify_cached_timed(
    shard: WorkloadShard, first_rows: Tensor, last: Results, workload: Workload, before: Verification
) -> Verification:
    """Add the verification of the last timed output over a cache; see `ringprof.record.verify_timed`. Collective.

    Raises `VerificationError` if a result is wrong.
    """
    begin = time.perf_counter_ns()
    device = shard.q.device
    assert workload.kv_length is not None
    same = same_as_first(shard, first_rows, last, workload.kv_length)
    pairs = list(_sampled_rows(shard, last.out, workload))
    measured, expected = (torch.cat([pair[i].flatten() for pair in pairs]) for i in range(2))
    unit = torch.finfo(torch_dtype(workload)).eps / 2
    difference = measured - expected
    row = [
        float(difference.abs().max()),
        relative_rms(difference, expected),
        max(before.errors["out"].kernel_rms, unit),
    ]
    errors = _output_errors(row, shard.strategy, workload, device)
    where = f"with {workload.seq} new tokens over {workload.kv_length} keys"
    raise_if_wrong(errors, f"in the last timed iteration, {where}; nothing was recorded")
    timed = TimedVerification(
        seq=workload.kv_length, places=len(pairs), kv_head=0, same_output=same, errors=errors,
        took_ns=time.perf_counter_ns() - begin,
    )  # fmt: skip
    return msgspec.structs.replace(before, timed=timed)


def _output_errors(row: list[float], strategy: Cached, workload: Workload, device: torch.device) -> JsonObject:
    """Return the output's worst error of all ranks, by name. Sinks add a rounding. Collective."""
    roundings = strategy.out_roundings + int(workload.sinks is not None)
    return {"out": worst_error(gather_rows(row, device), torch_dtype(workload), roundings)}


class _GatheredCache:
    """Keys and values of all ranks, gathered per head and sequence, and the heads that this rank has."""

    def __init__(self, shard: WorkloadShard, workload: Workload) -> None:
        self.shard, self.workload = shard, workload
        strategy, shape = shard.strategy, shape_of(workload)
        own_heads, device = strategy.heads(shape.heads, shape.kv_heads), shard.q.device
        self.query_heads, self.returned_heads = (
            range(*heads.indices(shape.heads)) for heads in (own_heads.queries, own_heads.returned)
        )
        self.kv_heads = range(*own_heads.kv.indices(shape.kv_heads))
        positions = strategy.key_positions(shape.kv_length, shape.seq)
        ranks = gather_rows([self.kv_heads.start, len(positions)], device)
        self.max_keys = int(max(count for _, count in ranks))
        padded = functional.pad(positions.to(device), (0, self.max_keys - len(positions)), value=-1)
        # Keep only ranks with the same kv heads: others hold the same positions of other heads.
        self.positions_by_rank = {
            rank: rank_positions[rank_positions >= 0]
            for rank, rank_positions in enumerate(gather_tensor(padded))
            if ranks[rank][0] == self.kv_heads.start
        }

    def gather_head(self, x: Tensor, batch: int, head: int) -> Tensor:
        """Gather keys or values (kv_length, D) of this rank's head number ``head``, in sequence order. Collective."""
        own_rows = functional.pad(x[batch, :, head], (0, 0, 0, self.max_keys - x.shape[1]))
        # gloo does not support every dtype, so the bytes are gathered.
        pieces = gather_tensor(own_rows.contiguous().view(torch.uint8))
        gathered = own_rows.new_full((self.workload.kv_length or 0, own_rows.shape[1]), float("nan"))
        for rank, positions in self.positions_by_rank.items():
            gathered[positions] = pieces[rank].view(own_rows.dtype)[: len(positions)]
        return gathered

    def queries(self) -> Tensor:
        """Return the queries (B, S, H, D) of all heads that this rank returns, for its tokens. Collective."""
        q = self.shard.q
        if list(self.returned_heads) == list(self.query_heads):
            return q
        # Ranks with the same query heads have the same queries, so their sum is divided by their number.
        full = q.new_zeros((*q.shape[:2], self.workload.heads, q.shape[3]), dtype=torch.float64)
        count = q.new_zeros(self.workload.heads, dtype=torch.float64)
        (
            full[:, :, self.query_heads.start : self.query_heads.stop],
            count[self.query_heads.start : self.query_heads.stop],
        ) = q.double(), 1
        dist.all_reduce(full)
        dist.all_reduce(count)
        return (full / count[:, None])[:, :, self.returned_heads.start : self.returned_heads.stop]


def _sampled_rows(shard: WorkloadShard, out: Tensor, workload: Workload) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield sampled rows of this rank's output with those of dense attention, for each kv head and some sequences.

    Collective: every rank must consume the whole iterator.
    """
    cache, keys, group = _GatheredCache(shard, workload), workload.kv_length or 0, workload.heads // workload.kv_heads
    generator = torch.Generator().manual_seed(SEED)
    rows = torch.randperm(out.shape[1], generator=generator)[:SAMPLED_ROWS].sort().values.to(out.device)
    positions = keys - workload.seq + shard.strategy.query_positions(workload.seq).to(out.device)[rows]
    seen = KeyStretches.of(workload.mask(), positions, keys)
    queries = cache.queries()
    for number, kv_head in enumerate(cache.kv_heads):
        heads = [index for index, head in enumerate(cache.returned_heads) if head // group == kv_head]
        for batch in torch.randperm(workload.batch, generator=generator)[:SEQUENCES].tolist():
            k, v = (cache.gather_head(x, batch, number) for x in (shard.k, shard.v))
            if not heads:
                continue
            q, own_rows = (by_head(x[batch][rows][:, heads].double()) for x in (queries, out))
            sinks = None if shard.sinks is None else shard.sinks[heads].repeat_interleave(len(rows))
            scores = workload.head_dim**-0.5, torch.float64, workload.softcap or 0.0, sinks
            yield own_rows, softmax_rows(q, k, v, seen.repeated(len(heads)), *scores)[0]
