"""A mask cut by a layout: what one rank's queries see of another rank's keys, for any mask and layout.

A rank's tokens are runs of evenly spaced positions. In every document, a run of queries and a run of keys with the same
spacing see each other in a band (or all, or not at all), which is a `Part`; full parts that touch are joined. So of a
packed sequence the ranks' off-diagonal blocks are those of the few documents that lie on both ranks, and a rank's own
block is one triangle a document.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ringprof.mask import NO_LIMIT, Mask
from ringprof.strategies.masks.layouts import Block, Layout, block_of
from ringprof.strategies.masks.mask_blocks import AttnRectangle, band, joined, split_rows
from ringprof.strategies.masks.row_routing import RowRouting, routing_of


class _Piece(NamedTuple):
    """A run of a rank's rows within one document: row r + i is at position first + i · stride."""

    row: int
    first: int
    tokens: int


class ShardedMask:
    """A mask over ``seq`` tokens that ``size`` ranks hold by a layout.

    Of these the first ``cached`` are keys alone, in even shares before each rank's own.
    """

    def __init__(self, mask: Mask, layout: Layout, size: int, seq: int, cached: int = 0) -> None:
        self.mask, self.seq, self.size, self.cached = mask, seq, size, cached
        self.stride = layout.stride(size)
        self.queries, self.keys = (seq - cached) // size, seq // size
        """Of each rank."""
        new = [cached + layout.positions(seq - cached, size, rank) for rank in range(size)]
        self._queries = [self._pieces(positions) for positions in new]
        self._keys = self._queries
        if cached:
            shares = torch.arange(cached, device="cpu").chunk(size)
            self._keys = [self._pieces(torch.cat(held)) for held in zip(shares, new, strict=True)]
        self._blocks: dict[tuple[int, int], Block | None] = {}
        self._travels: dict[tuple[int, bool], RowRouting | None] = {}

    def block(self, q_rank: int, kv_rank: int) -> Block | None:
        """The block that ``q_rank`` owes ``kv_rank``'s keys; None where the mask leaves nothing."""
        key = q_rank, kv_rank
        if key not in self._blocks:
            self._blocks[key] = block_of(self.parts(*key), self.queries, self.keys)
        return self._blocks[key]

    def parts(self, q_rank: int, kv_rank: int) -> list[AttnRectangle]:
        """What ``q_rank``'s queries see of ``kv_rank``'s keys, all rows counted from the rank's first."""
        theirs = self._keys[kv_rank]
        found: list[AttnRectangle] = []
        bounds = self.mask.documents or (0, self.seq)
        for document, mine in self._queries[q_rank].items():
            if document in theirs:
                found += self._in_document(mine, theirs[document], bounds[document], own=q_rank == kv_rank)
        return found

    def blocks_with_others(self, q_rank: int) -> list[Block]:
        """What ``q_rank``'s queries see of all others' keys, these in the order of the ranks: one block, or none."""
        local = self.seq // self.size
        parts = [
            part.shifted(0, kv_rank * local)
            for kv_rank in range(self.size)
            if kv_rank != q_rank
            for part in self.parts(q_rank, kv_rank)
        ]
        block = block_of(joined(parts), local, self.seq)
        return [] if block is None else [block]

    @cached_property
    def steps(self) -> int:
        """Steps of a ring, the own block's among them, after which no rank needs another's keys any more."""
        ranks = range(self.size)
        needed = (
            step for step in reversed(ranks) if any(self.block(rank, (rank - step) % self.size) for rank in ranks)
        )
        return 1 + next(needed, 0)

    def routing(self, window: int, *, queries: bool = False) -> RowRouting | None:
        """The rows of every rank's keys, or queries, that travel over inner rings of ``window`` ranks.

        ``window`` divides all ranks. None where most rows travel, or none.
        """
        key = window, queries
        if key not in self._travels:
            self._travels[key] = routing_of(self, window, queries=queries)
        return self._travels[key]

    def area(self, q_rank: int, kv_rank: int) -> int:
        """Pairs of a query and a key that it sees, of these two ranks."""
        return sum(part.area for part in self.parts(q_rank, kv_rank))

    def areas(self) -> list[list[int]]:
        """`area` of every rank's queries (rows) with every rank's keys."""
        return [[self.area(q_rank, kv_rank) for kv_rank in range(self.size)] for q_rank in range(self.size)]

    def _in_document(self, mine: list[_Piece], theirs: list[_Piece], begin: int, *, own: bool) -> list[AttnRectangle]:
        if own and not self.cached and (self.mask.left, self.mask.right, self.mask.prefix) == (NO_LIMIT, 0, 0):
            # Whatever the layout, a rank's own rows lie in the order of their positions.
            first, end = mine[0].row, mine[-1].row + mine[-1].tokens
            return [AttnRectangle(first, end, first, end, right=0 if end - first > 1 else NO_LIMIT)]
        pairs = (part for q in mine for kv in theirs for part in self._pair(q, kv, begin))
        return joined([one for part in pairs if part for one in split_rows(part)])

    def _pair(self, q: _Piece, kv: _Piece, begin: int) -> Iterator[AttnRectangle | None]:
        """The window, and what of the prefix of a document that begins at ``begin`` lies before it, or after it."""
        apart, prefix = q.first - kv.first, begin + self.mask.prefix - kv.first
        left, right = self.mask.left, self.mask.right
        low = None if left == NO_LIMIT else -((left - apart) // self.stride)
        high = None if right == NO_LIMIT else (apart + right) // self.stride
        yield band(q.row, q.tokens, kv.row, kv.tokens, low, high)
        keys = min(kv.tokens, max(0, -(-prefix // self.stride))) if self.mask.prefix else 0
        if keys and low is not None:
            yield band(q.row, q.tokens, kv.row, keys, None, low - 1)
        if keys and high is not None and not self.mask.causal:
            yield band(q.row, q.tokens, kv.row, keys, high + 1, None)

    def _pieces(self, positions: Tensor) -> dict[int, list[_Piece]]:
        """A rank's rows by the number of the document."""
        bounds, stride = self.mask.documents or (0, self.seq), self.stride
        found: dict[int, list[_Piece]] = {}
        for row, position, left in _runs(positions, stride):
            document = bisect_right(bounds, position) - 1
            while left:
                # Rows up to the document's end.
                count = min(left, -((position - bounds[document + 1]) // stride))
                if count > 0:
                    found.setdefault(document, []).append(_Piece(row, position, count))
                    row, position, left = row + count, position + count * stride, left - count
                document += 1
        return found


@lru_cache(maxsize=16)
def sharded_mask_of(mask: Mask, layout: Layout, size: int, seq: int, cached: int = 0) -> ShardedMask:
    """The `Cut`, kept: the layers of a model ask for the same one."""
    return ShardedMask(mask, layout, size, seq, cached)


def busiest_over_mean(areas: list[list[int]]) -> float:
    """Work of the rank with most of it over the mean, from every rank's areas with every rank's keys."""
    work = [sum(row) for row in areas]
    return max(work) * len(work) / sum(work)


def steps_over_mean(areas: list[list[int]]) -> float:
    """The same of a ring whose ranks all wait for the busiest one in every step, as they do where hops tie them."""
    size = len(areas)
    steps = ([areas[rank][(rank - step) % size] for rank in range(size)] for step in range(size))
    return sum(map(max, steps)) * size / sum(map(sum, areas))


def _runs(positions: Tensor, stride: int) -> list[_Piece]:
    breaks = (positions.diff() != stride).nonzero().flatten().add(1).tolist()
    bounds = [0, *breaks, len(positions)]
    return [_Piece(row, int(positions[row]), end - row) for row, end in pairwise(bounds) if end > row]
