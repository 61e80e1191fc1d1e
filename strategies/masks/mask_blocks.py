"""A block that is neither full nor one triangle: parts of it, each a full rectangle, a triangle or a band.

A band is aligned as flash-attn aligns its windows, to the last query and the last key: query i of a part sees its keys
from i + keys - queries - left to i + keys - queries + right, -1 being no limit. Every query of a part sees a key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ringprof.mask import NO_LIMIT, band_area


@dataclass(frozen=True)
class AttnRectangle:
    """Some consecutive queries of a block against some consecutive keys; all four count from the block's own first."""

    q_first: int
    q_end: int
    kv_first: int
    kv_end: int
    left: int = NO_LIMIT
    right: int = NO_LIMIT

    @property
    def q(self) -> slice:
        return slice(self.q_first, self.q_end)

    @property
    def kv(self) -> slice:
        return slice(self.kv_first, self.kv_end)

    @property
    def queries(self) -> int:
        return self.q_end - self.q_first

    @property
    def keys(self) -> int:
        return self.kv_end - self.kv_first

    @property
    def band(self) -> tuple[int, int]:
        """Its limits."""
        return self.left, self.right

    @property
    def causal(self) -> bool:
        """Whether it is the lower triangle of a square."""
        return self.band == (NO_LIMIT, 0) and self.queries == self.keys

    @property
    def full(self) -> bool:
        """Whether every query sees every key."""
        return self.band == (NO_LIMIT, NO_LIMIT)

    @property
    def area(self) -> int:
        """Pairs of a query and a key that it sees."""
        return band_area(self.queries, self.keys, self.left, self.right)

    def shifted(self, queries: int, keys: int) -> AttnRectangle:
        """The same, counted from further on."""
        return AttnRectangle(
            self.q_first + queries,
            self.q_end + queries,
            self.kv_first + keys,
            self.kv_end + keys,
            self.left,
            self.right,
        )


def band(
    q_first: int, queries: int, kv_first: int, keys: int, low: int | None, high: int | None
) -> AttnRectangle | None:
    """The part in which query i sees key j where i + low <= j <= i + high (None: no limit); None where none sees any.

    Queries and keys at the edges that see nothing, or are not seen, are left out.
    """
    if low is not None and high is not None and low > high:
        return None
    # Query i reaches down to i + low and up to i + high.
    top = 0 if high is None else min(max(-high, 0), queries)
    bottom = queries if low is None else min(max(keys - low, 0), queries)
    if top >= bottom:
        return None
    left_out = 0 if low is None else max(top + low, 0)
    end = keys if high is None else min(bottom - 1 + high + 1, keys)
    if left_out >= end:
        return None
    count, width = bottom - top, end - left_out
    # In the new coordinates query 0 is the old ``top``, key 0 the old ``left_out``.
    moved = top - left_out
    shift = width - count
    left = NO_LIMIT if low is None else shift - (low + moved)
    right = NO_LIMIT if high is None else high + moved - shift
    if left != NO_LIMIT and left >= width - 1:
        left = NO_LIMIT
    if right != NO_LIMIT and right >= count - 1:
        right = NO_LIMIT
    return AttnRectangle(q_first + top, q_first + bottom, kv_first + left_out, kv_first + end, left, right)


def split_rows(part: AttnRectangle) -> list[AttnRectangle]:
    """A part with more queries than keys as several: those queries that see all of its keys apart from the others.

    For so many queries flash-attn means something else: it reads a limit of as many keys as there are as none, and none
    as a limit of as many keys, beside a limit on the other side.
    """
    shift = part.keys - part.queries
    if part.full or shift >= 0:
        return [part]
    low = None if part.left == NO_LIMIT else shift - part.left
    high = None if part.right == NO_LIMIT else shift + part.right
    first = 0 if high is None else max(0, part.keys - 1 - high)
    end = part.queries if low is None else min(part.queries, 1 - low)
    if first >= end:
        return [part]
    found = [AttnRectangle(part.q_first + first, part.q_first + end, part.kv_first, part.kv_end)]
    for top, bottom in ((0, first), (end, part.queries)):
        limits = (None if limit is None else limit + top for limit in (low, high))
        rest = band(part.q_first + top, bottom - top, part.kv_first, part.keys, *limits) if top < bottom else None
        found += [rest] if rest else []
    return sorted(found, key=lambda one: one.q_first)


def band_mask(part: AttnRectangle, device: torch.device) -> Tensor:
    """Which keys each query of a part sees: bool (queries, keys)."""
    place = torch.arange(part.keys, device=device) - torch.arange(part.queries, device=device)[:, None]
    place -= part.keys - part.queries
    seen = torch.ones_like(place, dtype=torch.bool)
    if part.left != NO_LIMIT:
        seen &= place >= -part.left
    if part.right != NO_LIMIT:
        seen &= place <= part.right
    return seen


def joined(parts: Sequence[AttnRectangle]) -> list[AttnRectangle]:
    """The same with full rectangles side by side, or one above the other, made one."""
    found: list[AttnRectangle] = []
    for part in parts:
        while found and (both := _as_one(found[-1], part)):
            part = both
            found.pop()
        found.append(part)
    return found


def _as_one(a: AttnRectangle, b: AttnRectangle) -> AttnRectangle | None:
    if not (a.full and b.full):
        return None
    if a.kv == b.kv and a.q_end == b.q_first:
        return AttnRectangle(a.q_first, b.q_end, a.kv_first, a.kv_end)
    if a.q == b.q and a.kv_end == b.kv_first:
        return AttnRectangle(a.q_first, a.q_end, a.kv_first, b.kv_end)
    return None


@dataclass(frozen=True)
class MaskBlocks:
    """The parts of one block of ``queries`` x ``keys``, computed and counted as one."""

    parts: tuple[AttnRectangle, ...]
    queries: int
    keys: int
    kernel_cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What a kernel has made of it, by device."""

    def __iter__(self) -> Iterator[AttnRectangle]:
        return iter(self.parts)

    @cached_property
    def area(self) -> int:
        """Pairs of a query and a key that it sees."""
        return sum(part.area for part in self.parts)

    @cached_property
    def bands(self) -> bool:
        """Whether some part is neither full nor a triangle: what only kernels with windows compute."""
        return any(not part.full and not part.causal for part in self.parts)

    @cached_property
    def share_queries(self) -> bool:
        """Whether a query is in several parts: their results must be merged."""
        return _overlap([(part.q_first, part.q_end) for part in self.parts])

    @cached_property
    def share_keys(self) -> bool:
        """Whether a key is in several parts: gradients must be added."""
        return _overlap([(part.kv_first, part.kv_end) for part in self.parts])

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """The parts by what one call of a kernel for sequences of several lengths computes."""
        waiting: dict[tuple[int, int], list[list[AttnRectangle]]] = {}
        for part in self.parts:
            groups = waiting.setdefault(part.band, [])
            for group in groups:
                if group[-1].q_end <= part.q_first and group[-1].kv_end <= part.kv_first:
                    group.append(part)
                    break
            else:
                groups.append([part])
        return tuple(Batch(tuple(group)) for groups in waiting.values() for group in groups)


class Batch:
    """Parts with the same limits and no row in common, in the order of their queries and of their keys."""

    def __init__(self, parts: tuple[AttnRectangle, ...]) -> None:
        self.parts = parts
        self.left, self.right = parts[0].band
        self.causal = (self.left, self.right) == (NO_LIMIT, 0)
        self.most_queries = max(part.queries for part in parts)
        self.most_keys = max(part.keys for part in parts)
        self._on: dict[tuple[torch.device, int], Lengths] = {}

    def on(self, device: torch.device, batch: int, queries: int, keys: int) -> Lengths:
        """Its rows and lengths on a device, for ``batch`` sequences of ``queries`` and ``keys`` in a row."""
        key = device, batch
        if key not in self._on:
            self._on[key] = Lengths(
                _rows([(part.q_first, part.q_end) for part in self.parts], batch, queries, device),
                _rows([(part.kv_first, part.kv_end) for part in self.parts], batch, keys, device),
                _cumulative([part.queries for part in self.parts], batch, device),
                _cumulative([part.keys for part in self.parts], batch, device),
            )
        return self._on[key]


@dataclass(frozen=True)
class Lengths:
    """What a kernel for sequences of several lengths is told."""

    q: Tensor | slice
    """Of the queries: one stretch of rows, or indices (int64) where there are gaps between them."""
    kv: Tensor | slice
    cumulative_q: Tensor
    """int32, from 0."""
    cumulative_kv: Tensor


def _rows(spans: list[tuple[int, int]], batch: int, count: int, device: torch.device) -> Tensor | slice:
    first, end = spans[0][0], spans[-1][1]
    if (batch == 1 or (first, end) == (0, count)) and all(a[1] == b[0] for a, b in pairwise(spans)):
        return slice(first, end + (batch - 1) * count)
    one = torch.cat([torch.arange(*span, device="cpu") for span in spans])
    return (count * torch.arange(batch, device="cpu")[:, None] + one).flatten().to(device)


def _cumulative(lengths: list[int], batch: int, device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths * batch], device="cpu").cumsum(0).to(device=device, dtype=torch.int32)


def _overlap(spans: list[tuple[int, int]]) -> bool:
    ordered = sorted(spans)
    return any(before[1] > after[0] for before, after in pairwise(ordered))
