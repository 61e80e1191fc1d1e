"""Hand-over of a KV cache from one strategy to another, such as from prefill to decode.

Every rank sends each other rank the keys and values that it holds and the other needs: one all-to-all per layer, of
which a rank sends its own share of the cache once. The layouts of both sides are known to all ranks, so no positions
travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import Unsupported
from ..kernels.uncompiled import uncompiled
from ..masks.cache_layout import CacheLayout
from .cached import Cached, lengths_of

_LayoutRanks = tuple[int, ...]
"""The number in a `CacheLayout` of each rank of a group."""


@torch.no_grad()
@uncompiled
def redistribute_cache(
    source: Cached, target: Cached, k: Tensor, v: Tensor, *, kv_length: int | None = None, new_tokens: int = 0,
    kv_chunks: Sequence[int] | Literal["contiguous"] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return this rank's keys and values where ``target`` needs them, from where ``source`` has left them.

    k: (B, keys, Hkv, D), v: (B, keys, Hkv, E), as ``source`` holds them; the results are as ``target`` holds them, in
    the order of the sequence. ``kv_chunks``: the lengths of the chunks in which ring-prefill has computed the sequence,
    whose keys stayed where they were computed. Without it, give ``kv_length``, the number of keys of all ranks; in
    ring-prefill the last ``new_tokens`` of them are one chunk, and the others are in contiguous shares.

    Both strategies are of the same ranks, and each rank holds all kv heads in ``source``. Collective: one all-to-all.
    Raises `Unsupported`, on every rank, where a rank does not hold its part or the arguments differ.
    """
    kv_length, chunks = lengths_of(kv_length, kv_chunks)
    if kv_length is None or new_tokens > kv_length:
        raise Unsupported(f"give kv_length, at least new_tokens={new_tokens}, or kv_chunks: got kv_length={kv_length}")
    comm, ranks = source.comm, range(source.comm.size)
    if tuple(map(comm.global_rank, ranks)) != tuple(map(target.comm.global_rank, range(target.comm.size))):
        raise Unsupported("both strategies must be of the same ranks in the same order")
    layouts = [
        x.cache_layout(kv_length, new_tokens, chunks if x.phase == "prefill" else None) for x in (source, target)
    ]
    kv_heads = k.shape[2]
    (source_ranks, source_heads), (target_ranks, target_heads) = (
        zip(*x.shares_of_ranks(kv_heads), strict=True) for x in (source, target)
    )
    if set(source_heads) != {range(kv_heads)}:
        raise Unsupported(
            "the source's ranks must hold all kv heads: redistribute from ring-prefill or one group of dcp"
        )
    keys, problem = layouts[0].key_count(source_ranks[comm.rank]), None
    if k.shape[1] != keys or k.shape[:3] != v.shape[:3] or k.dtype != v.dtype:
        problem = (
            f"kv_length={kv_length} ({layouts[0]}) makes {keys} keys per sequence on rank "
            f"{comm.global_rank(comm.rank)}, which has k {tuple(k.shape)}, {k.dtype}, and v {tuple(v.shape)}, {v.dtype}"
        )
    elif len(set(map(len, target_heads))) > 1:
        problem = f"the target's groups of ranks cannot share out {kv_heads} kv heads"
    kind = "redistribute", k.shape[0], k.shape[2:], v.shape[3], k.dtype

    def describe() -> str:
        return (
            f"redistribute_cache from {layouts[0]}; to {layouts[1]}; batch {k.shape[0]}; {kv_heads} heads of "
            f"{k.shape[3]} and {v.shape[3]}; type {k.dtype}"
        )

    source.agree(kind, " to ".join(map(str, layouts)), problem, describe)
    send, receive = _routes(*layouts, source_ranks, target_ranks, comm.rank, k.device)
    both = torch.cat((k, v), -1)
    if not keys:
        both = pad(both, (0, 0, 0, 0, 0, 1))
    pieces = torch.stack([
        both[:, :, heads.start : heads.stop].index_select(1, rows)
        for rows, heads in zip(send.unbind(), target_heads, strict=True)
    ])  # fmt: skip
    channel = next(x.out_channel for x in (source, target) if x.out_channel.size == comm.size)
    (received,) = channel.all_to_all(pieces).wait()
    rows = received.transpose(0, 1).flatten(1, 2).index_select(1, receive)
    moved_k, moved_v = rows.split((k.shape[3], v.shape[3]), -1)
    return moved_k.contiguous(), moved_v.contiguous()


@lru_cache(maxsize=8)
def _routes(
    source: CacheLayout, target: CacheLayout, source_ranks: _LayoutRanks, target_ranks: _LayoutRanks, rank: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return which rows ``rank`` sends, and where its rows are in what arrives.

    The first result (ranks, most) has the local rows that go to each rank, filled up with row 0: pieces have equal
    sizes. The second (keys) has the row of each key of the rank among all pieces that arrive.
    """
    wanted_by = torch.empty(target.kv_length, dtype=torch.int64, device="cpu")
    for number in range(target.size):
        wanted_by[target.positions(number)] = number
    positions = [source.positions(number) for number in source_ranks]
    most = max(int(torch.bincount(wanted_by[x], minlength=target.size).max()) for x in positions)
    send = torch.zeros(len(target_ranks), most, dtype=torch.int64, device="cpu")
    for row, number in zip(send, target_ranks, strict=True):
        rows = (wanted_by[positions[rank]] == number).nonzero().flatten()
        row[: len(rows)] = rows
    arrives = torch.empty_like(wanted_by)
    for sender, held in enumerate(positions):
        needed = held[wanted_by[held] == target_ranks[rank]]
        arrives[needed] = sender * most + torch.arange(len(needed), device="cpu")
    return send.to(device), arrives[target.positions(target_ranks[rank])].to(device)
