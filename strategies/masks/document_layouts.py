"""Layouts of packed documents: the sequence as one, each document by itself, or whole documents dealt to the ranks.

With 2 ranks, documents of 8, 3, 3 and 2 tokens, one letter a document:

    packed          rank 0: a0-a3 c1 c2 d0 d1             rank 1: a4-a7 b0-b2 c0
    per_document    rank 0: a0 a1 a6 a7 b0 b2 c2 d1       rank 1: a2-a5 b1 c0 c1 d0
    dealt           rank 0: a0-a7                         rank 1: b0-b2 c0-c2 d0 d1

The choice of ``auto`` follows from the lengths and the number of ranks alone, so that all ranks choose alike, in all
calls for the same documents.
"""

from __future__ import annotations

from functools import lru_cache
from heapq import heappop, heappush, heapreplace
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .layouts import LAYOUTS, Block, Grouped, Layout, zigzag_chunks

DocumentsLayout = Literal["auto", "packed", "per_document", "dealt"]
"""Layout of packed documents: over the whole sequence, each document by itself, whole documents dealt to the ranks, or
the one of them whose ranks are estimated to be done first."""
BALANCED_ENOUGH = 1.03
"""Estimated time, over the least possible, up to which ``auto`` is content with a layout.

Less is not worth more pieces, and keys that travel."""
_TILE = 128
"""Rows of a kernel's tile. Pieces of other lengths fill some tiles only in part."""
_ROW_COST = 2.0
"""Time in which a kernel begins and ends a row of tiles, in tiles."""


class DealtLayout(Layout):
    """A layout that deals whole documents to the ranks, except the ``cut`` longest, which it cuts in zigzag.

    Documents go, the longest first, to the rank with the least work that has room for them. What fits no rank is cut
    to fill up the room that is left. All ranks hold equally many tokens: of the longest document, if it is cut, they
    hold what makes up for the others.
    """

    def __init__(self, documents: tuple[int, ...], cut: int) -> None:
        self.name = "dealt documents"
        if cut:
            self.name += f", the longest {cut} cut in zigzag" if cut > 1 else ", the longest cut in zigzag"
        self.documents, self.cut = documents, cut

    def divisor(self, size: int) -> int:
        return 2 * size

    def positions(self, seq: int, size: int, rank: int) -> Tensor:
        return torch.cat([torch.arange(*span, device="cpu") for span in self.deal(size).spans[rank]])

    def causal_block(self, q_rank: int, kv_rank: int, local_seq: int) -> Block | None:
        raise NotImplementedError("a layout for documents is cut by them")

    @lru_cache(maxsize=4)  # noqa: B019 - layouts are few
    def deal(self, size: int) -> Deal:
        """Deal the documents to ``size`` ranks."""
        share, longest_first = self.documents[-1] // size, self._longest_first()
        cut: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        whole: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        length = longest_first[0][1] - longest_first[0][0]
        room, slack, turn, in_zigzag = [share] * size, 0, 0, 0.0

        def give(spans: list[list[tuple[int, int]]], rank: int, first: int, end: int) -> None:
            if first < end:
                spans[rank].append((first, end))
                room[rank] -= end - first

        for first, end in longest_first[1 : self.cut]:
            for chunk, span in enumerate(zigzag_chunks(first, end, size, turn)):
                give(cut, min(chunk, 2 * size - 1 - chunk), *span)
            turn = (turn + (end - first) % (2 * size)) % size
            in_zigzag += _time_in_zigzag(end - first, size)
        if self.cut:
            # The shares of the longest document are what the others leave, near an equal share.
            slack = length // size // 8
            room = [tokens - length // size for tokens in room]
        least_work, rest = [(0.0, rank) for rank in range(size)], []
        for first, end in longest_first[self.cut :]:
            full = []
            while least_work and room[least_work[0][1]] < end - first:
                full.append(heappop(least_work))
            if least_work:
                work, rank = least_work[0]
                give(whole, rank, first, end)
                heapreplace(least_work, (work + _time(end - first, end - first, triangle=True), rank))
            else:
                rest.append((first, end))
            for entry in full:
                heappush(least_work, entry)
        work_of = {rank: work for work, rank in least_work}
        steps = _Steps(size, work_of)
        # The first tokens of a document see fewest keys: the busiest rank gets them.
        filling = sorted(range(size), key=lambda rank: (-work_of[rank], rank))
        for first, end in rest:
            roomiest = max(range(size), key=lambda rank: (room[rank], rank))
            if room[roomiest] + slack >= end - first:
                give(whole, roomiest, first, end)
                steps.add(0, roomiest, _time(end - first, end - first, triangle=True))
                continue
            pieces = []
            for rank in filling:
                stop = min(end, first + max(room[rank], 0))
                if first < stop:
                    pieces.append((rank, stop - first))
                    give(cut, rank, first, stop)
                    first = stop
            steps.add_document(pieces)
        if self.cut:
            (first, end), time = longest_first[0], _time_in_zigzag(length, size)
            shares = [tokens + length // size for tokens in room]
            chunks = [*(tokens // 2 for tokens in shares), *(tokens - tokens // 2 for tokens in reversed(shares))]
            for chunk, span in enumerate(pairwise(accumulate(chunks, initial=first))):
                cut[min(chunk, 2 * size - 1 - chunk)].append(span)
            for rank, tokens in enumerate(shares):
                steps.add(0, rank, time * tokens * size / length)
        # What is cut comes first, in one order on all ranks: a block with another rank then spans few rows.
        spans = [sorted(x for x in cut_spans if x[0] < x[1]) + sorted(rows) for cut_spans, rows in zip(cut, whole, strict=True)]
        return Deal(spans, in_zigzag + steps.time())

    def _longest_first(self) -> list[tuple[int, int]]:
        return sorted(pairwise(self.documents), key=lambda span: (span[0] - span[1], span))


class Deal(NamedTuple):
    """Documents dealt to ranks."""

    spans: list[list[tuple[int, int]]]
    """Global positions that each rank holds: (first, end) of each piece, in local order."""
    time: float
    """Estimated time of the slowest rank, in tiles."""


dealt_layout = lru_cache(maxsize=64)(DealtLayout)
"""Return the layout that deals these documents, cached: several kinds of strategies use the same one."""


@lru_cache(maxsize=64)
def layout_for_documents(layout: Layout, kind: str, documents: tuple[int, ...], size: int) -> Layout:
    """Return the layout of a sequence that packs ``documents`` (cumulative lengths), on ``size`` ranks; cached.

    ``layout`` is that of one document, ``kind`` a `DocumentsLayout`. Layouts other than zigzag are always packed:
    ``auto`` returns them as they are, and the other kinds raise `Unsupported`.
    """
    if kind == "packed":
        return layout
    if isinstance(layout, Grouped):
        ring = layout_for_documents(layout.ring, kind, documents, layout.grid.ring_degree)
        return layout if ring is layout.ring else Grouped(ring, layout.grid)
    if layout is not LAYOUTS["zigzag"]:
        return layout if kind == "auto" else layout.per_document(documents)
    if kind == "per_document":
        return layout.per_document(documents)
    return dealt_layout(documents, 0) if kind == "dealt" else _fastest(documents, size)


def _fastest(documents: tuple[int, ...], size: int) -> Layout:
    """Return the layout whose slowest rank is estimated to be done first; of similar ones, that with fewest cuts."""
    packed = LAYOUTS["zigzag"]
    if size == 1 or len(documents) == 2:
        return packed
    count = len(documents) - 1
    least = sum(_time(end - first, 0) for first, end in pairwise(documents)) / size
    lengths = sorted((end - first for first, end in pairwise(documents)), reverse=True)
    least = sum(_time(length, length, triangle=True) for length in lengths) / size
    best, best_time, cut, cutting = packed, float("inf"), 0, 0.0
    while cut < len(lengths) and best_time > BALANCED_ENOUGH * least and best_time > least + cutting:
        layout = dealt_layout(documents, cut)
        if (time := layout.deal(size).time) < best_time:
            best, best_time = layout, time
        following = cut + 1 + cut // 4
        for length in lengths[cut:following]:
            cutting += _time_in_zigzag(length, size) - _time(length, length, triangle=True) / size
        cut = following
    if best_time > BALANCED_ENOUGH * least and least + cutting < best_time and cut >= len(lengths):
        best, best_time = packed.per_document(documents), least + cutting
    return packed if _time_packed(documents, size) <= BALANCED_ENOUGH * best_time else best


class _Steps:
    """Estimated time of each rank in each step of a ring, in tiles. Hops let no rank run ahead of the others."""

    def __init__(self, size: int, local: dict[int, float] | None = None) -> None:
        self._work: list[dict[int, float]] = [local or {}, *({} for _ in range(size - 1))]

    def add_document(self, pieces: list[tuple[int, int]]) -> None:
        """Add a document whose consecutive ``pieces`` (rank, tokens) lie on several ranks."""
        size = len(self._work)
        for index, (rank, tokens) in enumerate(pieces):
            for other, keys in pieces[:index]:
                self.add((rank - other) % size, rank, _time(tokens, keys))
            self.add(0, rank, _time(tokens, tokens, triangle=True))

    def time(self) -> float:
        """Return the sum of the slowest ranks' times over the steps."""
        return sum(max(work.values(), default=0.0) for work in self._work)

    def add(self, step: int, rank: int, time: float) -> None:
        """Add to the time of a rank in a step."""
        self._work[step][rank] = self._work[step].get(rank, 0.0) + time


def _time(queries: int, keys: int, *, triangle: bool = False) -> float:
    """Estimate the time of a rectangle of queries and keys, or of the lower ``triangle`` of a square."""
    rows, columns = -(-queries // _TILE), -(-keys // _TILE)
    return rows * ((columns + 1) / 2 if triangle else columns) + _ROW_COST * rows


def _time_in_zigzag(tokens: int, size: int) -> float:
    """Estimate the time of each rank for a document that is cut in zigzag.

    A rank computes its own two chunks, and two chunks with one, or one with two, for every other rank.
    """
    chunk, both = -(-tokens // (2 * size)), -(-tokens // size)
    others = (_time(chunk, both) + _time(both, chunk)) / 2
    return _time(both, both, triangle=True) + (size - 1) * others


def _time_packed(documents: tuple[int, ...], size: int) -> float:
    """Estimate the time of all ranks where zigzag cuts the packed sequence."""
    chunks, steps, chunk = zigzag_chunks(0, documents[-1], size, 0), _Steps(size), 0
    for begin, end in pairwise(documents):
        pieces, first = [], begin
        while first < end:
            while chunks[chunk][1] <= first:
                chunk += 1
            stop = min(end, chunks[chunk][1])
            pieces.append((min(chunk, 2 * size - 1 - chunk), stop - first))
            first = stop
        steps.add_document(pieces)
    return steps.time()
