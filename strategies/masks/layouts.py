"""Layouts: which tokens a rank holds, and which of another rank's keys its queries see.

With world size 4 and a causal mask (rows: queries in the order of the ranks, one letter per chunk):

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
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..errors import Unsupported
from .mask_blocks import AttnRectangle, MaskBlocks

ALL = slice(None)


def part(x: Tensor, rows: slice, dim: int = -3) -> Tensor:
    """Return a view of some rows of a tensor (..., S, H, D), or the tensor itself for all of them.

    Indexing gives the same view, and takes the host twice as long.
    """
    if rows is ALL or rows == ALL:
        return x
    size = x.size(dim)
    first, last, _ = rows.indices(size)
    return x if last - first == size else x.narrow(dim, first, last - first)


def as_contiguous(x: Tensor) -> Tensor:
    """Return the tensor, copied if it is not contiguous. `Tensor.contiguous` costs more where nothing is to be done."""
    return x if x.is_contiguous() else x.contiguous()


@dataclass(frozen=True)
class Block:
    """Some of a rank's queries against some keys and values of one rank: the work of one kernel call."""

    q: slice = field(default_factory=lambda: ALL)
    kv: slice = field(default_factory=lambda: ALL)
    causal: bool = False
    """Whether only the lower triangle of a square block is computed; otherwise every query sees every key."""
    parts: MaskBlocks | None = None
    """The parts of the block that are computed, where that is neither the triangle nor everything."""
    kv_heads: slice = field(default_factory=lambda: ALL)
    """The kv heads, each with all its query heads."""


WHOLE = {causal: Block(causal=causal) for causal in (False, True)}
"""Blocks of all local queries and keys, by whether they are causal."""


def block_of(parts: list[AttnRectangle], queries: int, keys: int) -> Block | None:
    """Return the smallest block of ``queries`` x ``keys`` that holds the parts; None where there are none."""
    if not parts:
        return None
    q = slice(min(x.q_first for x in parts), max(x.q_end for x in parts))
    kv = slice(min(x.kv_first for x in parts), max(x.kv_end for x in parts))
    rows, columns = (ALL if (x.start, x.stop) == (0, whole) else x for x, whole in ((q, queries), (kv, keys)))
    if len(parts) == 1 and (parts[0].full or parts[0].causal):
        return Block(rows, columns, causal=parts[0].causal)
    inside = tuple(x.shifted(-q.start, -kv.start) for x in parts)
    return Block(rows, columns, parts=MaskBlocks(inside, q.stop - q.start, kv.stop - kv.start))


class Layout(ABC):
    """A split of the sequence over ranks: a permutation of the tokens, split into equal pieces."""

    name: str
    """The name in options and messages."""

    @abstractmethod
    def divisor(self, size: int) -> int:
        """Return the number that the sequence length must be a multiple of, for ``size`` ranks."""

    def ranges(self, seq: int, size: int, rank: int) -> list[range]:
        """Return the global positions of the tokens of ``rank`` as ranges, in local order.

        ``seq`` need not be a multiple of the divisor: pieces then differ by one token.
        """
        raise NotImplementedError(f"the {self.name} layout has no ranges")

    def positions(self, seq: int, size: int, rank: int) -> Tensor:
        """Return the global positions (int64, CPU, length ``seq / size``) of the tokens of ``rank``, in local order."""
        ranges = self.ranges(seq, size, rank)
        return torch.cat([torch.arange(x.start, x.stop, x.step, device="cpu") for x in ranges])

    @abstractmethod
    def causal_block(self, q_rank: int, kv_rank: int, local_seq: int) -> Block | None:
        """Return the block of ``q_rank``'s queries with ``kv_rank``'s keys under a causal mask; None if it is empty."""

    @lru_cache(maxsize=1024)  # noqa: B019 - layouts are few and small
    def block(self, q_rank: int, kv_rank: int, local_seq: int, *, causal: bool) -> Block | None:
        """Return the block of ``q_rank``'s queries with ``kv_rank``'s keys; None where they see none."""
        return self.causal_block(q_rank, kv_rank, local_seq) if causal else WHOLE[False]

    def stride(self, size: int) -> int:
        """Return how many positions apart consecutive tokens of a rank are, within a chunk."""
        return 1

    def per_document(self, documents: tuple[int, ...]) -> Layout:
        """Return the layout that splits every document by itself. Raises `Unsupported` where there is none."""
        raise Unsupported(f"the {self.name} layout is not made for each document by itself: documents_layout=packed")

    def order(self, seq: int, size: int) -> Tensor:
        """Return all positions in rank order: ``x[order]`` split into ``size`` pieces gives every rank's shard."""
        return torch.cat([self.positions(seq, size, rank) for rank in range(size)])


def _piece(seq: int, pieces: int, index: int) -> range:
    """Return the tokens of one of ``pieces`` consecutive pieces, as equal as possible."""
    return range(seq * index // pieces, seq * (index + 1) // pieces)


class ContiguousLayout(Layout):
    """A layout in which rank r holds the r-th piece of the sequence."""

    name = "contiguous"

    def divisor(self, size: int) -> int:
        return size

    def ranges(self, seq: int, size: int, rank: int) -> list[range]:
        return [_piece(seq, size, rank)]

    def causal_block(self, q_rank: int, kv_rank: int, local_seq: int) -> Block | None:
        if kv_rank > q_rank:
            return None
        return Block(causal=kv_rank == q_rank)


class ZigzagLayout(Layout):
    """A layout of 2·N chunks, of which rank r holds chunks r and 2N-1-r, in this order."""

    name = "zigzag"

    def divisor(self, size: int) -> int:
        return 2 * size

    def ranges(self, seq: int, size: int, rank: int) -> list[range]:
        return [_piece(seq, 2 * size, chunk) for chunk in (rank, 2 * size - 1 - rank)]

    def causal_block(self, q_rank: int, kv_rank: int, local_seq: int) -> Block | None:
        half = local_seq // 2
        if kv_rank == q_rank:
            return Block(causal=True)
        if kv_rank < q_rank:
            # The other rank's early chunk lies before both of this rank's chunks, its late chunk after both.
            return Block(kv=slice(0, half))
        # Both chunks of the other rank lie before this rank's late chunk and after its early one.
        return Block(q=slice(half, local_seq))

    def per_document(self, documents: tuple[int, ...]) -> Layout:
        return zigzag_per_document(documents)


def zigzag_chunks(first: int, end: int, size: int, turn: int) -> list[tuple[int, int]]:
    """Cut the tokens from ``first`` to ``end`` into 2 * ``size`` chunks (first, end), as equal as possible.

    What does not divide goes to the ranks in turn, from rank ``turn`` on. Rank r holds chunks r and 2N-1-r.
    """
    even, remainder = divmod(end - first, 2 * size)
    lengths = [even] * (2 * size)
    for extra in range(remainder):
        # A rank's first extra token makes its late chunk longer, its second the early one.
        rank = (turn + extra) % size
        lengths[2 * size - 1 - rank if extra < size else rank] += 1
    return list(pairwise(accumulate(lengths, initial=first)))


class ZigzagPerDocumentLayout(Layout):
    """A layout of 2·N chunks per document, of which rank r holds chunks r and 2N-1-r.

    Chunks are as equal as possible. The remaining tokens of a document go to the ranks in turn, starting after the rank
    at which the previous document stopped. So all ranks hold equally many tokens whatever the lengths, without padding.
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
    @torch.inference_mode(False)
    def _all_positions(self, seq: int, size: int) -> list[Tensor]:
        pieces: list[list[Tensor]] = [[] for _ in range(size)]
        turn = 0
        for first, end in pairwise(self.documents):
            for chunk, span in enumerate(zigzag_chunks(first, end, size, turn)):
                pieces[min(chunk, 2 * size - 1 - chunk)].append(torch.arange(*span, device="cpu"))
            turn = (turn + (end - first) % (2 * size)) % size
        return [torch.cat(piece) for piece in pieces]


zigzag_per_document = lru_cache(maxsize=16)(ZigzagPerDocumentLayout)
"""Return the layout for these documents, cached: all layers of a model use the same one."""


class StripeLayout(Layout):
    """A layout in which rank r holds the tokens i with i mod N = r."""

    name = "stripe"

    def divisor(self, size: int) -> int:
        return size

    def stride(self, size: int) -> int:
        return size

    def ranges(self, seq: int, size: int, rank: int) -> list[range]:
        return [range(min(rank, seq), seq, size)]

    def causal_block(self, q_rank: int, kv_rank: int, local_seq: int) -> Block | None:
        if kv_rank <= q_rank:
            return Block(causal=True)
        # The other rank's token i lies after this rank's token i, so the mask shifts: query i sees keys 0 .. i-1.
        if local_seq == 1:
            return None
        return Block(q=slice(1, local_seq), kv=slice(0, local_seq - 1), causal=True)


LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (ContiguousLayout(), ZigzagLayout(), StripeLayout())}


@dataclass(frozen=True)
class Grid:
    """An arrangement of ranks as Ulysses groups (rows) times rings (columns). With 2 x 4 ranks:

        head first   0 1      ring first   0 4
                     2 3                   1 5
                     4 5                   2 6
                     6 7                   3 7

    The kind named first consists of consecutive ranks, which share a host where possible.
    """

    ulysses_degree: int
    ring_degree: int
    head_first: bool

    @classmethod
    def of(cls, size: int, ulysses_degree: int | None, ring_degree: int | None, *, head_first: bool) -> Grid:
        """Return the grid of ``size`` ranks.

        A degree that is None follows from the other one; with both None, the ring degree is ``size``.
        Raises `Unsupported` where the product of the degrees is not ``size``.
        """
        degrees = [degree for degree in (ulysses_degree, ring_degree) if degree is not None]
        if any(degree < 1 or size % degree for degree in degrees):
            names = {"ulysses_degree": ulysses_degree, "ring_degree": ring_degree}
            wrong = next(f"{n} {d}" for n, d in names.items() if d is not None and (d < 1 or size % d))
            raise Unsupported(f"{wrong} does not divide the world size {size}")
        ulysses = ulysses_degree or size // (ring_degree or size)
        ring = ring_degree or size // ulysses
        if ulysses * ring != size:
            raise Unsupported(f"ulysses_degree {ulysses} x ring_degree {ring} is not the world size {size}")
        return cls(ulysses, ring, head_first)

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Return (position in the Ulysses group, position in the ring) of a rank."""
        if self.head_first:
            return rank % self.ulysses_degree, rank // self.ulysses_degree
        return rank // self.ring_degree, rank % self.ring_degree

    def rank(self, ulysses_position: int, ring_position: int) -> int:
        """Return the rank at these positions."""
        if self.head_first:
            return ring_position * self.ulysses_degree + ulysses_position
        return ulysses_position * self.ring_degree + ring_position

    def ulysses_group(self, rank: int) -> list[int]:
        """Return the ranks of the Ulysses group of ``rank``, itself included."""
        return [self.rank(position, self.coordinates(rank)[1]) for position in range(self.ulysses_degree)]

    def ring(self, rank: int) -> list[int]:
        """Return the ranks on the ring of ``rank``, itself included."""
        return [self.rank(self.coordinates(rank)[0], position) for position in range(self.ring_degree)]


class Grouped(Layout):
    """The layout of a hybrid: a ring's layout in which each position on the ring is a whole Ulysses group.

    The group holds the tokens that one rank of the ring's layout would hold, split into consecutive pieces in the order
    of the group's ranks. After the all-to-all every rank of the group has these tokens in the order of the ring's
    layout, whichever placement the grid has. Ranks and local length in `causal_block` are those of the ring.
    """

    def __init__(self, ring: Layout, grid: Grid) -> None:
        self.name = ring.name
        self.ring, self.grid = ring, grid

    def divisor(self, size: int) -> int:
        return math.lcm(size, self.ring.divisor(self.grid.ring_degree))

    def positions(self, seq: int, size: int, rank: int) -> Tensor:
        ulysses_position, ring_position = self.grid.coordinates(rank)
        group = self.ring.positions(seq, self.grid.ring_degree, ring_position)
        return group.chunk(self.grid.ulysses_degree)[ulysses_position]

    def per_document(self, documents: tuple[int, ...]) -> Layout:
        return Grouped(self.ring.per_document(documents), self.grid)

    def causal_block(self, q_rank: int, kv_rank: int, local_seq: int) -> Block | None:
        return self.ring.causal_block(q_rank, kv_rank, local_seq)


def split_in_place(block: Block, kv_heads: int) -> list[Block]:
    """Split a local block into two halves with no gradient in common; one block where there are no such halves.

    The halves are half of the kv heads each, or of packed documents the first ones and the others.
    """
    if block.parts is not None:
        # Kept with the parts: each half keeps its lengths on the device, and a new one would copy them there again.
        kept = block.parts.kernel_cache
        if "halves" not in kept:
            kept["halves"] = _halves(block.parts)
        return kept["halves"] or [block]
    if kv_heads > 1:
        half = kv_heads // 2
        return [replace(block, kv_heads=heads) for heads in (slice(0, half), slice(half, kv_heads))]
    return [block]


def _halves(parts: MaskBlocks) -> list[Block]:
    """Return the first parts and the others, of about equal area, as two blocks; an empty list where they overlap."""
    ordered, area, first = sorted(parts, key=lambda x: x.q_first), 0, 0
    while first < len(ordered) and area + ordered[first].area / 2 < parts.area / 2:
        area += ordered[first].area
        first += 1
    below, above = (block_of(half, parts.queries, parts.keys) for half in (ordered[:first], ordered[first:]))
    return [below, above] if len(parts.batches) == 1 and below is not None and above is not None else []


def split_local_block(local_seq: int, *, causal: bool) -> tuple[Block, list[Block]]:
    """Split the local block (a rank's queries with its own keys) into (first block, blocks for the end).

    A backward pass computes the first block while the first hop travels. It keeps the others to the end, where they
    overlap the last hops of the gradients. There are two of these, because a double ring has two last hops.
    """
    half = local_seq // 2
    if local_seq < 4:
        return WHOLE[causal], []
    first, second = slice(0, half), slice(half, local_seq)
    if not causal:
        middle = half + (local_seq - half) // 2
        return Block(q=first), [Block(q=slice(half, middle)), Block(q=slice(middle, local_seq))]
    return Block(q=second, kv=first), [Block(first, first, causal=True), Block(second, second, causal=True)]
