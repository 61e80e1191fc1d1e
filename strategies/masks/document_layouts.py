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
from typing import Literal

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
        return torch.cat([torch.arange(*span, device="cpu") for span in self.deal(size)[0][rank]])

    def causal_block(self, q_rank: int, kv_rank: int, local_seq: int) -> Block | None:
        raise NotImplementedError("a layout for documents is cut by them")

    @lru_cache(maxsize=4)  # noqa: B019 - layouts are few
    def deal(self, size: int) -> tuple[list[list[tuple[int, int]]], float]:
        """Deal the documents to ``size`` ranks.

        Return the global positions that each rank holds, (first, end) of each piece in local order, and the estimated
        time of the slowest rank, in tiles.
        """
        longest_first = sorted(pairwise(self.documents), key=lambda span: (span[0] - span[1], span))
        longest, cut = longest_first[0], longest_first[1 : self.cut]
        length = longest[1] - longest[0] if self.cut else 0
        # The shares of the longest document are what the others leave, so that few others must be cut.
        hands = _Hands(size, self.documents[-1] // size - length // size, slack=length // size // 8)
        for document in cut:
            hands.cut_in_zigzag(document)
        rest = [document for document in longest_first[self.cut :] if not hands.give_whole(document)]
        steps = hands.steps()
        for document in rest:
            hands.fill_up(document, steps)
        if self.cut:
            shares = [room + length // size for room in hands.room]
            chunks = [*(tokens // 2 for tokens in shares), *(tokens - tokens // 2 for tokens in reversed(shares))]
            for chunk, span in enumerate(pairwise(accumulate(chunks, initial=longest[0]))):
                hands.cut[min(chunk, 2 * size - 1 - chunk)].append(span)
            # Work is spread over the steps: ranks with more tokens delay the others in each.
            in_longest = _time_in_zigzag(length, size)
            for rank, tokens in enumerate(shares):
                for step in range(size):
                    steps.add(step, rank, in_longest * tokens / length)
        in_zigzag = sum(_time_in_zigzag(end - first, size) for first, end in cut)
        return hands.spans(), in_zigzag + steps.time()


class _Hands:
    """The documents that ranks have been dealt so far."""

    def __init__(self, size: int, room: int, slack: int) -> None:
        """Begin with ``room`` for so many tokens on each rank, and ``slack`` for more of a document that fits none."""
        self.room, self.slack = [room] * size, slack
        self.cut: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        """Global positions (first, end) of the parts of documents that each rank holds."""
        self._whole: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        self._least_work = [(0.0, rank) for rank in range(size)]
        self._turn = 0

    def cut_in_zigzag(self, document: tuple[int, int]) -> None:
        """Give every rank its two chunks."""
        size, (first, end) = len(self.room), document
        for chunk, span in enumerate(zigzag_chunks(first, end, size, self._turn)):
            self._give(self.cut, min(chunk, 2 * size - 1 - chunk), span)
        self._turn = (self._turn + (end - first) % (2 * size)) % size

    def give_whole(self, document: tuple[int, int]) -> bool:
        """Give the document to the rank with the least work that has room for it; return False if there is none."""
        length, full = document[1] - document[0], []
        while self._least_work and self.room[self._least_work[0][1]] < length:
            full.append(heappop(self._least_work))
        fits = bool(self._least_work)
        if fits:
            work, rank = self._least_work[0]
            self._give(self._whole, rank, document)
            heapreplace(self._least_work, (work + _time(length, length, triangle=True), rank))
        for entry in full:
            heappush(self._least_work, entry)
        return fits

    def steps(self) -> _Steps:
        """Return the estimated time of what was given whole."""
        return _Steps(len(self.room), {rank: work for work, rank in self._least_work})

    def fill_up(self, document: tuple[int, int], steps: _Steps) -> None:
        """Give a document that fits no rank to the roomiest one with the slack, or cut it to fill the ranks' room."""
        (first, end), ranks = document, range(len(self.room))
        roomiest = max(ranks, key=lambda rank: (self.room[rank], rank))
        if self.room[roomiest] + self.slack >= end - first:
            self._give(self._whole, roomiest, document)
            steps.add(0, roomiest, _time(end - first, end - first, triangle=True))
            return
        pieces = []
        # The first tokens of a document see fewest keys: the busiest rank gets them.
        for _, rank in sorted(self._least_work, key=lambda entry: (-entry[0], entry[1])):
            stop = min(end, first + max(self.room[rank], 0))
            if first < stop:
                pieces.append((rank, stop - first))
                self._give(self.cut, rank, (first, stop))
                first = stop
        steps.add_document(pieces)

    def spans(self) -> list[list[tuple[int, int]]]:
        """Return the global positions of each rank in local order.

        What is cut comes first, in one order on all ranks, so that a block with another rank spans few rows.
        """
        return [
            sorted(span for span in cut if span[0] < span[1]) + sorted(whole)
            for cut, whole in zip(self.cut, self._whole, strict=True)
        ]

    def _give(self, spans: list[list[tuple[int, int]]], rank: int, span: tuple[int, int]) -> None:
        if span[0] < span[1]:
            spans[rank].append(span)
            self.room[rank] -= span[1] - span[0]


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
    lengths = sorted((end - first for first, end in pairwise(documents)), reverse=True)
    least = sum(_time(length, length, triangle=True) for length in lengths) / size
    best, best_time, cut, cutting = packed, float("inf"), 0, 0.0
    while cut < len(lengths) and best_time > BALANCED_ENOUGH * least and best_time > least + cutting:
        layout = dealt_layout(documents, cut)
        if (time := layout.deal(size)[1]) < best_time:
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
