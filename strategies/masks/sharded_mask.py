"""A mask sharded by a layout: which of another rank's keys a rank's queries see, for any mask and layout.

A rank's tokens are runs of evenly spaced positions. Within a document, a run of queries and a run of keys have the same
spacing. They see each other in a band (or completely, or not at all), which is an `AttnRectangle`. Full rectangles that
touch are joined. For a packed sequence, a block of two ranks therefore holds only the few documents that lie on both. A
rank's own block has one triangle per document.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch import Tensor

from ringprof.workload.mask import NO_LIMIT, Mask

from .cache_layout import CacheLayout
from .layouts import Block, Layout, block_of
from .mask_blocks import AttnRectangle, band, joined, split_rows


class _Piece(NamedTuple):
    """A run of a rank's rows within one document: row ``row`` + i is at position ``first`` + i · stride."""

    row: int
    first: int
    tokens: int


class ShardedMask:
    """A mask over ``seq`` tokens that ``size`` ranks hold by a layout.

    With a ``cache``, it says which keys each rank holds; only those of its last stretch have queries.
    """

    def __init__(self, mask: Mask, layout: Layout, size: int, seq: int, cache: CacheLayout | None = None) -> None:
        self.mask, self.layout, self.seq, self.size, self.cache = mask, layout, seq, size, cache
        self.stride = layout.stride(size)
        self.queries = self.keys = seq // size
        """Number of queries, and of keys, of the rank that has most."""
        self.routings: dict[tuple[int, bool], Any] = {}
        """Row routings of this mask, kept by `row_routing.routing_of`."""
        if cache is None:
            self._queries = [self._pieces(layout.positions(seq, size, rank)) for rank in range(size)]
            self._keys = self._queries
        else:
            self.queries, self.keys = max(cache.new_counts), max(cache.key_counts)
            self._queries = [self._pieces(cache.positions(rank, new=True)) for rank in range(size)]
            self._keys = [self._pieces(cache.positions(rank)) for rank in range(size)]
        self._blocks: dict[tuple[int, int], Block | None] = {}

    def block(self, q_rank: int, kv_rank: int) -> Block | None:
        """Return the block of ``q_rank``'s queries with ``kv_rank``'s keys; None where they see none."""
        key = q_rank, kv_rank
        if key not in self._blocks:
            self._blocks[key] = block_of(self.parts(*key), self.queries, self.keys)
        return self._blocks[key]

    def parts(self, q_rank: int, kv_rank: int) -> list[AttnRectangle]:
        """Return the parts of the block of ``q_rank``'s queries with ``kv_rank``'s keys.

        Rows count from each rank's first row.
        """
        kv_pieces = self._keys[kv_rank]
        parts: list[AttnRectangle] = []
        bounds = self.mask.documents or (0, self.seq)
        for document, q_pieces in self._queries[q_rank].items():
            if document in kv_pieces:
                parts += self._in_document(q_pieces, kv_pieces[document], bounds[document], own=q_rank == kv_rank)
        return parts

    def block_with_others(self, q_rank: int) -> tuple[Block | None, list[tuple[int, int]]]:
        """Return the block of ``q_rank``'s queries with the others' keys that they see, and where these keys lie.

        The block counts the keys of a document in the order of their positions, so that consecutive ones make one part
        however many ranks hold them. They lie in the rows (first, end) of all ranks' keys, one rank's after another's.
        """
        local, count = self.seq // self.size, 0
        parts: list[AttnRectangle] = []
        ranges: list[tuple[int, int]] = []
        bounds = self.mask.documents or (0, self.seq)
        for document, q_pieces in self._queries[q_rank].items():
            held = sorted(
                (piece.first, rank * local + piece.row, piece.tokens)
                for rank in range(self.size) if rank != q_rank
                for piece in self._keys[rank].get(document, ())
            )  # fmt: skip
            rows = list(accumulate((tokens for *_, tokens in held), initial=0))
            kv_pieces: list[_Piece] = []
            for (first, _, tokens), row in zip(held, rows, strict=False):
                if kv_pieces and sum(kv_pieces[-1][1:]) == first:
                    kv_pieces[-1] = kv_pieces[-1]._replace(tokens=kv_pieces[-1].tokens + tokens)
                else:
                    kv_pieces.append(_Piece(row, first, tokens))
            seen = self._in_document(q_pieces, kv_pieces, bounds[document], own=False)
            for first, end in _union([(x.kv_first, x.kv_end) for x in seen]):
                parts += [x.shifted(0, count - first) for x in seen if first <= x.kv_first < end]
                count += end - first
                for (_, source, tokens), row in zip(held, rows, strict=False):
                    if max(first, row) < min(end, row + tokens):
                        ranges.append((source + max(first - row, 0), source + min(end - row, tokens)))
        return block_of(parts, local, count), ranges

    @cached_property
    def steps(self) -> int:
        """Ring steps, the local block's included, after which no rank needs another's keys any more."""
        ranks = range(self.size)
        needed = (
            step for step in reversed(ranks) if any(self.block(rank, (rank - step) % self.size) for rank in ranks)
        )
        return 1 + next(needed, 0)

    @cached_property
    def shares_keys(self) -> bool:
        """Whether gradients of some key are added within a block of two different ranks."""
        ranks = range(self.size)
        blocks = (self.block(q_rank, kv_rank) for q_rank in ranks for kv_rank in ranks if q_rank != kv_rank)
        return any(block is not None and block.parts is not None and block.parts.share_keys for block in blocks)

    def area(self, q_rank: int, kv_rank: int) -> int:
        """Count the (query, key) pairs of these two ranks that are computed."""
        return sum(part.area for part in self.parts(q_rank, kv_rank))

    def areas(self) -> list[list[int]]:
        """Return the `area` of every rank's queries (rows) with every rank's keys (columns)."""
        return [[self.area(q_rank, kv_rank) for kv_rank in range(self.size)] for q_rank in range(self.size)]

    def _in_document(
        self, q_pieces: list[_Piece], kv_pieces: list[_Piece], begin: int, *, own: bool
    ) -> list[AttnRectangle]:
        """Return the parts within a document that begins at ``begin``; ``own``: queries and keys are of one rank."""
        if own and self.cache is None and (self.mask.left, self.mask.right, self.mask.prefix) == (NO_LIMIT, 0, 0):
            # In every layout, a rank's own rows lie in the order of their positions.
            first, end = q_pieces[0].row, q_pieces[-1].row + q_pieces[-1].tokens
            # A single row, too, is called a triangle: one call of a varlen kernel then computes all documents.
            return [AttnRectangle(first, end, first, end, right=0)]
        parts = (part for q in q_pieces for kv in kv_pieces for part in self._pair(q, kv, begin))
        return joined([piece for part in parts if part for piece in split_rows(part)])

    def _pair(self, q: _Piece, kv: _Piece, begin: int) -> Iterator[AttnRectangle | None]:
        """Yield the parts of two pieces: the window, and the prefix of the document outside the window.

        The document begins at position ``begin``. Empty parts are None.
        """
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
        """Split a rank's rows into pieces, by the number of their document."""
        bounds, stride = self.mask.documents or (0, self.seq), self.stride
        pieces: dict[int, list[_Piece]] = {}
        # The rank's rows are runs of positions ``stride`` apart.
        breaks = (positions.diff() != stride).nonzero().flatten().add(1).tolist()
        for row, end in pairwise([0, *breaks, len(positions)]):
            position, left = int(positions[row]) if end > row else 0, end - row
            document = bisect_right(bounds, position) - 1
            while left:
                # Rows up to the end of the document.
                count = min(left, -((position - bounds[document + 1]) // stride))
                if count > 0:
                    pieces.setdefault(document, []).append(_Piece(row, position, count))
                    row, position, left = row + count, position + count * stride, left - count
                document += 1
        return pieces


def _union(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the rows of all spans (first, end), as spans that do not touch each other."""
    result: list[tuple[int, int]] = []
    for first, end in sorted(spans):
        if result and first <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((first, end))
    return result


@lru_cache(maxsize=16)
def sharded_mask_of(mask: Mask, layout: Layout, size: int, seq: int, cache: CacheLayout | None = None) -> ShardedMask:
    """Return the `ShardedMask`, cached: all layers of a model use the same one."""
    return ShardedMask(mask, layout, size, seq, cache)


def busiest_over_mean(areas: list[list[int]]) -> float:
    """Return the work of the busiest rank over the mean, from `ShardedMask.areas`."""
    work = [sum(row) for row in areas]
    return max(work) * len(work) / sum(work)


def steps_over_mean(areas: list[list[int]]) -> float:
    """Return the load imbalance of a ring in which every step ends with its slowest rank, from `ShardedMask.areas`.

    Hops tie the ranks of a ring together in this way.
    """
    size = len(areas)
    steps = ([areas[rank][(rank - step) % size] for rank in range(size)] for step in range(size))
    return sum(map(max, steps)) * size / sum(map(sum, areas))
