"""Layouts: which tokens a rank holds, and what one rank's queries see of another rank's keys.

With world size 4 and a causal mask (rows: queries in the order of the ranks, one letter a chunk):

    contiguous  rank 0 holds a, 1 b, 2 c, 3 d            rank 3 sees everything, rank 0 almost nothing
    zigzag      rank 0 holds a h, 1 b g, 2 c f, 3 d e    every pair of ranks shares half a square of work
    stripe      rank i holds tokens i, i+4, i+8, ...     every pair of ranks shares a triangle

Sources: zigzag and the case table, zhuzilin/ring-flash-attention (issue 2); stripe, Striped Attention
(arXiv 2311.09431).

A `Grid` of Ulysses groups and rings turns any of them into the layout of a hybrid: `Grouped`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from ringprof.strategies.errors import Unsupported
from ringprof.strategies.masks.mask_blocks import AttnRectangle, MaskBlocks

ALL = slice(None)


def part(x: Tensor, rows: slice, dim: int = -3) -> Tensor:
    """A view of some rows of a tensor (..., S, H, D), or itself: what indexing gives, for half of its price."""
    if rows is ALL or rows == ALL:
        return x
    size = x.size(dim)
    first, last, _ = rows.indices(size)
    return x if last - first == size else x.narrow(dim, first, last - first)


def as_contiguous(x: Tensor) -> Tensor:
    """The tensor, copied where there are gaps in it: what `contiguous` gives, for less where there is nothing to do."""
    return x if x.is_contiguous() else x.contiguous()


@dataclass(frozen=True)
class Block:
    """One attention call: some local queries against some local keys and values of one rank."""

    q: slice = field(default_factory=lambda: ALL)
    kv: slice = field(default_factory=lambda: ALL)
    causal: bool = False
    """Lower triangle of a square block; otherwise every query sees every key."""
    parts: MaskBlocks | None = None
    """What alone of the block is computed, where that is neither of the two."""


WHOLE = {causal: Block(causal=causal) for causal in (False, True)}


def block_of(parts: list[AttnRectangle], queries: int, keys: int) -> Block | None:
    """The parts as one block of ``queries`` x ``keys``, no larger than it must be; None where there are none."""
    if not parts:
        return None
    q = slice(min(one.q_first for one in parts), max(one.q_end for one in parts))
    kv = slice(min(one.kv_first for one in parts), max(one.kv_end for one in parts))
    rows, columns = (ALL if (x.start, x.stop) == (0, whole) else x for x, whole in ((q, queries), (kv, keys)))
    if len(parts) == 1 and (parts[0].full or parts[0].causal):
        return Block(rows, columns, causal=parts[0].causal)
    inside = tuple(one.shifted(-q.start, -kv.start) for one in parts)
    return Block(rows, columns, parts=MaskBlocks(inside, q.stop - q.start, kv.stop - kv.start))


class Layout(ABC):
    """A split of the sequence over ranks: a permutation, cut into equal pieces."""

    name: str

    @abstractmethod
    def divisor(self, size: int) -> int:
        """The sequence length must be a multiple of this for ``size`` ranks."""

    @abstractmethod
    def positions(self, seq: int, size: int, rank: int) -> Tensor:
        """Global positions (int64, CPU, length ``seq / size``) of the tokens that ``rank`` holds, in local order."""

    @abstractmethod
    def causal_block(self, q_rank: int, kv_rank: int, local_seq: int) -> Block | None:
        """What ``q_rank``'s queries see of ``kv_rank``'s keys under a causal mask; None for nothing."""

    @lru_cache(maxsize=1024)  # noqa: B019 - layouts are few and small
    def block(self, q_rank: int, kv_rank: int, local_seq: int, *, causal: bool) -> Block | None:
        """The block that ``q_rank`` owes ``kv_rank``'s keys; None where the mask leaves nothing."""
        return self.causal_block(q_rank, kv_rank, local_seq) if causal else WHOLE[False]

    def stride(self, size: int) -> int:
        """How far apart neighbouring tokens of a rank are in the sequence, but where a new chunk begins."""
        return 1

    def per_document(self, documents: tuple[int, ...]) -> Layout:
        """The same split of every document by itself. Raises `Unsupported` where there is none."""
        raise Unsupported(f"the {self.name} layout is not made for each document by itself: documents_layout=packed")

    def order(self, seq: int, size: int) -> Tensor:
        """Positions in the order of the ranks: ``x[order]`` cut into ``size`` pieces gives every rank's share."""
        return torch.cat([self.positions(seq, size, rank) for rank in range(size)])


class ContiguousLayout(Layout):
    """Rank r holds the r-th piece of the sequence."""

    name = "contiguous"

    def divisor(self, size: int) -> int:
        return size

    def positions(self, seq: int, size: int, rank: int) -> Tensor:
        local = seq // size
        return torch.arange(rank * local, (rank + 1) * local, device="cpu")

    def causal_block(self, q_rank: int, kv_rank: int, local_seq: int) -> Block | None:
        if kv_rank > q_rank:
            return None
        return Block(causal=kv_rank == q_rank)


class ZigzagLayout(Layout):
    """The sequence in 2·N chunks; rank r holds chunks r and 2N-1-r, in this order."""

    name = "zigzag"

    def divisor(self, size: int) -> int:
        return 2 * size

    def positions(self, seq: int, size: int, rank: int) -> Tensor:
        chunks = torch.arange(seq, device="cpu").chunk(2 * size)
        return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])

    def causal_block(self, q_rank: int, kv_rank: int, local_seq: int) -> Block | None:
        half = local_seq // 2
        if kv_rank == q_rank:
            return Block(causal=True)
        if kv_rank < q_rank:
            # Their early chunk lies before both of ours, their late chunk after both.
            return Block(kv=slice(0, half))
        # Both of their chunks lie before our late chunk and after our early one.
        return Block(q=slice(half, local_seq))

    def per_document(self, documents: tuple[int, ...]) -> Layout:
        return zigzag_per_document(documents)


class ZigzagPerDocumentLayout(Layout):
    """Each document by itself in 2·N chunks; rank r holds chunks r and 2N-1-r of every one.

    Chunks are as even as they can be. What a document has over is dealt to the ranks in turn, from where the document
    before stopped, so that all ranks hold as many tokens whatever the lengths: nothing is padded.
    """

    def __init__(self, documents: tuple[int, ...]) -> None:
        self.name = "zigzag per document"
        self.documents = documents

    def divisor(self, size: int) -> int:
        return 2 * size

    def positions(self, seq: int, size: int, rank: int) -> Tensor:
        return self._all_positions(seq, size)[rank]

    def causal_block(self, q_rank: int, kv_rank: int, local_seq: int) -> Block | None:
        raise NotImplementedError("a layout for documents is cut by them")

    @lru_cache(maxsize=4)  # noqa: B019 - layouts are few
    def _all_positions(self, seq: int, size: int) -> list[Tensor]:
        pieces: list[list[Tensor]] = [[] for _ in range(size)]
        turn = 0
        for first, end in pairwise(self.documents):
            even, over = divmod(end - first, 2 * size)
            lengths = [even] * (2 * size)
            for extra in range(over):
                # A rank's first extra token makes its late chunk longer, its second the early one.
                rank = (turn + extra) % size
                lengths[2 * size - 1 - rank if extra < size else rank] += 1
            turn = (turn + over) % size
            start = first
            for chunk, length in enumerate(lengths):
                pieces[min(chunk, 2 * size - 1 - chunk)].append(torch.arange(start, start + length, device="cpu"))
                start += length
        return [torch.cat(piece) for piece in pieces]


zigzag_per_document = lru_cache(maxsize=16)(ZigzagPerDocumentLayout)
"""Kept, as the layers of a model ask for the same one."""


class StripeLayout(Layout):
    """Token i lies on rank i mod N."""

    name = "stripe"

    def divisor(self, size: int) -> int:
        return size

    def stride(self, size: int) -> int:
        return size

    def positions(self, seq: int, size: int, rank: int) -> Tensor:
        return torch.arange(rank, seq, size, device="cpu")

    def causal_block(self, q_rank: int, kv_rank: int, local_seq: int) -> Block | None:
        if kv_rank <= q_rank:
            return Block(causal=True)
        # Their token i lies after our token i, so the mask shifts by one: query i sees keys 0 .. i-1.
        if local_seq == 1:
            return None
        return Block(q=slice(1, local_seq), kv=slice(0, local_seq - 1), causal=True)


LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (ContiguousLayout(), ZigzagLayout(), StripeLayout())}


@dataclass(frozen=True)
class Grid:
    """Ranks as Ulysses groups times rings. With 2 x 4 ranks, one row a Ulysses group, one column a ring:

        head first   0 1      ring first   0 4
                     2 3                   1 5
                     4 5                   2 6
                     6 7                   3 7

    The first named has neighbouring ranks, which share a host as far as they can.
    """

    ulysses_degree: int
    ring_degree: int
    head_first: bool

    @classmethod
    def of(cls, size: int, ulysses_degree: int | None, ring_degree: int | None, *, head_first: bool) -> Grid:
        """The grid of ``size`` ranks; a degree that is not given follows from the other, and is 1 where none is.

        Raises `Unsupported` where the product of the degrees is not ``size``.
        """
        given = [degree for degree in (ulysses_degree, ring_degree) if degree is not None]
        if any(degree < 1 or size % degree for degree in given):
            names = {"ulysses_degree": ulysses_degree, "ring_degree": ring_degree}
            wrong = next(f"{n} {d}" for n, d in names.items() if d is not None and (d < 1 or size % d))
            raise Unsupported(f"{wrong} does not divide the world size {size}")
        ulysses = ulysses_degree or size // (ring_degree or size)
        ring = ring_degree or size // ulysses
        if ulysses * ring != size:
            raise Unsupported(f"ulysses_degree {ulysses} x ring_degree {ring} is not the world size {size}")
        return cls(ulysses, ring, head_first)

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(place in the Ulysses group, place in the ring) of a rank."""
        if self.head_first:
            return rank % self.ulysses_degree, rank // self.ulysses_degree
        return rank // self.ring_degree, rank % self.ring_degree

    def rank(self, ulysses_place: int, ring_place: int) -> int:
        """The rank at these places."""
        if self.head_first:
            return ring_place * self.ulysses_degree + ulysses_place
        return ulysses_place * self.ring_degree + ring_place

    def ulysses_group(self, rank: int) -> list[int]:
        """The ranks that trade heads with ``rank``, itself among them."""
        return [self.rank(place, self.coordinates(rank)[1]) for place in range(self.ulysses_degree)]

    def ring(self, rank: int) -> list[int]:
        """The ranks on the ring of ``rank``."""
        return [self.rank(self.coordinates(rank)[0], place) for place in range(self.ring_degree)]


class Grouped(Layout):
    """A ring's layout in which each place on the ring is a whole Ulysses group.

    The group holds what one rank of the ring's layout would hold, cut into consecutive pieces in the order of the
    group's ranks: after the all-to-all every rank of the group has those tokens in the ring layout's own order,
    whichever placement the grid has. Ranks and local length in `causal_block` are those of the ring.
    """

    def __init__(self, ring: Layout, grid: Grid) -> None:
        self.name = ring.name
        self.ring, self.grid = ring, grid

    def divisor(self, size: int) -> int:
        return math.lcm(size, self.ring.divisor(self.grid.ring_degree))

    def positions(self, seq: int, size: int, rank: int) -> Tensor:
        ulysses_place, ring_place = self.grid.coordinates(rank)
        group = self.ring.positions(seq, self.grid.ring_degree, ring_place)
        return group.chunk(self.grid.ulysses_degree)[ulysses_place]

    def per_document(self, documents: tuple[int, ...]) -> Layout:
        return Grouped(self.ring.per_document(documents), self.grid)

    def causal_block(self, q_rank: int, kv_rank: int, local_seq: int) -> Block | None:
        return self.ring.causal_block(q_rank, kv_rank, local_seq)


def split_local_block(local_seq: int, *, causal: bool) -> tuple[Block, list[Block]]:
    """A rank's block with its own keys, in an early part and a late rest.

    A backward pass computes the early part first, while the first hop travels, and keeps the rest to the end, where
    it hides the last hops: gradients on their way home. It comes in two blocks, as a double ring has two last hops.
    """
    half = local_seq // 2
    if local_seq < 4:
        return WHOLE[causal], []
    first, second = slice(0, half), slice(half, local_seq)
    if not causal:
        middle = half + (local_seq - half) // 2
        return Block(q=first), [Block(q=slice(half, middle)), Block(q=slice(middle, local_seq))]
    return Block(q=second, kv=first), [Block(first, first, causal=True), Block(second, second, causal=True)]
