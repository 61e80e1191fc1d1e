"""Layouts of packed documents: the sequence as one, each document by itself, or whole documents dealt to the ranks.

A layout that follows the documents is chosen from their lengths and the number of ranks alone, so that all ranks, and
all calls for the same documents, choose alike.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from .layouts import Block, Grouped, Layout, ZigzagLayout, zigzag_chunks

DocumentsLayout = Literal["auto", "packed", "per_document", "dealt"]
"""Layout of packed documents: chosen by balance, over the whole sequence, each document by itself, or dealt whole."""
BALANCED_ENOUGH = 1.03
"""Estimated time, over the least of all layouts, up to which ``auto`` keeps the packed layout, or cuts fewer documents."""
_TILE = 128
"""Rows of a kernel's tile: shorter pieces, and the ends of longer ones, fill only a part of one."""
_ROW_COST = 2.0
"""Time of a kernel to begin and end a row of tiles, in tiles."""


class DealtLayout(Layout):
    """A layout that deals whole documents to the ranks, except the ``cut`` longest, which it cuts in zigzag.

    Documents go, longest first, to the rank with the least work that has room for them. What fits no rank is cut to
    fill up what is left, so that all ranks hold equally many tokens.
    """

    def __init__(self, documents: tuple[int, ...], cut: int) -> None:
        self.name = "dealt documents" if not cut else f"dealt documents, the longest {cut} cut in zigzag"
        self.documents, self.cut = documents, cut

    def divisor(self, size: int) -> int:
        return 2 * size

    def positions(self, seq: int, size: int, rank: int) -> Tensor:
        return torch.cat([torch.arange(*span, device="cpu") for span in sorted(self._deal(seq, size)[rank])])

    def causal_block(self, q_rank: int, kv_rank: int, local_seq: int) -> Block | None:
        raise NotImplementedError("a layout for documents is cut by them")

    @lru_cache(maxsize=4)  # noqa: B019 - layouts are few
    def _deal(self, seq: int, size: int) -> list[list[tuple[int, int]]]:
        """Return the spans (first, end) of global positions that each rank holds."""
        spans: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        room, work, turn = [seq // size] * size, [0] * size, 0

        def give(rank: int, first: int, end: int, begin: int) -> None:
            if first < end:
                spans[rank].append((first, end))
                room[rank] -= end - first
                # Pairs of a query and a key, twice.
                work[rank] += (end - begin) * (end - begin + 1) - (first - begin) * (first - begin + 1)

        longest_first = sorted(pairwise(self.documents), key=lambda span: (span[0] - span[1], span))
        for first, end in longest_first[: self.cut]:
            for chunk, (start, stop) in enumerate(zigzag_chunks(first, end, size, turn)):
                give(min(chunk, 2 * size - 1 - chunk), start, stop, first)
            turn = (turn + (end - first) % (2 * size)) % size
        left = []
        for first, end in longest_first[self.cut :]:
            rank = min((r for r in range(size) if room[r] >= end - first), key=lambda r: (work[r], r), default=None)
            if rank is None:
                left.append((first, end))
            else:
                give(rank, first, end, first)
        for first, end in left:
            start = first
            # The first tokens see fewest keys: the busiest rank gets them.
            for rank in sorted(range(size), key=lambda r: (-work[r], r)):
                stop = min(end, start + room[rank])
                give(rank, start, stop, first)
                start = stop
        return spans


dealt_layout = lru_cache(maxsize=16)(DealtLayout)
"""Return the layout that deals these documents, cached: all layers of a model use the same one."""


def layout_for_documents(layout: Layout, kind: str, documents: tuple[int, ...], size: int) -> Layout:
    """Return the layout of a sequence that packs ``documents`` (cumulative lengths), from that of one document.

    ``kind`` is a `DocumentsLayout`. Layouts other than zigzag are only ``packed``, which ``auto`` takes for them; the
    other kinds raise `Unsupported`.
    """
    if kind == "packed":
        return layout
    if isinstance(layout, Grouped):
        ring = layout_for_documents(layout.ring, kind, documents, layout.grid.ring_degree)
        return layout if ring is layout.ring else Grouped(ring, layout.grid)
    if not isinstance(layout, ZigzagLayout):
        return layout if kind == "auto" else layout.per_document(documents)
    if kind == "per_document":
        return layout.per_document(documents)
    return dealt_layout(documents, 0) if kind == "dealt" else dealt_layout(documents, len(documents) // 2)
