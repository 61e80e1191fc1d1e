"""Blocks of a mask that are neither full nor one triangle: parts, each a full rectangle, a triangle or a band.

A band is aligned to the last query and the last key, as the windows of flash-attn are. Query i of a part sees the
part's keys from i + keys - queries - left to i + keys - queries + right; a limit of -1 is none. Every query of a part
sees at least one key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ringprof.workload.mask import NO_LIMIT, band_area


@dataclass(frozen=True)
class AttnRectangle:
    """Consecutive queries of a block against consecutive keys.

    All four bounds count from the block's first query and key. ``left`` and ``right`` are the limits of the band.
    """

    q_first: int
    q_end: int
    kv_first: int
    kv_end: int
    left: int = NO_LIMIT
    right: int = NO_LIMIT

    @property
    def q(self) -> slice:
        """The queries, as a slice of the block's rows."""
        return slice(self.q_first, self.q_end)

    @property
    def kv(self) -> slice:
        """The keys, as a slice of the block's keys."""
        return slice(self.kv_first, self.kv_end)

    @property
    def queries(self) -> int:
        """Number of queries."""
        return self.q_end - self.q_first

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.kv_end - self.kv_first

    @property
    def band(self) -> tuple[int, int]:
        """The limits (left, right)."""
        return self.left, self.right

    @property
    def causal(self) -> bool:
        """Whether the part is the lower triangle of a square."""
        return self.band == (NO_LIMIT, 0) and self.queries == self.keys

    @property
    def full(self) -> bool:
        """Whether every query sees every key."""
        return self.band == (NO_LIMIT, NO_LIMIT)

    @property
    def area(self) -> int:
        """Number of (query, key) pairs that are computed."""
        return band_area(self.queries, self.keys, self.left, self.right)

    def shifted(self, queries: int, keys: int) -> AttnRectangle:
        """Return the part with its bounds moved by so many ``queries`` and ``keys``."""
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
    """Return the part in which query i sees key j if i + low <= j <= i + high (None: no limit); None if it is empty.

    Queries at the edges that see no key, and keys that no query sees, are left out.
    """
    if low is not None and high is not None and low > high:
        return None
    # Query i reaches down to i + low and up to i + high.
    top = 0 if high is None else min(max(-high, 0), queries)
    bottom = queries if low is None else min(max(keys - low, 0), queries)
    if top >= bottom:
        return None
    first_key = 0 if low is None else max(top + low, 0)
    end = keys if high is None else min(bottom - 1 + high + 1, keys)
    if first_key >= end:
        return None
    count, width = bottom - top, end - first_key
    # In the part's coordinates query 0 is the old ``top``, key 0 the old ``first_key``.
    moved = top - first_key
    shift = width - count
    left = NO_LIMIT if low is None else shift - (low + moved)
    right = NO_LIMIT if high is None else high + moved - shift
    if left != NO_LIMIT and left >= width - 1:
        left = NO_LIMIT
    if right != NO_LIMIT and right >= count - 1:
        right = NO_LIMIT
    return AttnRectangle(q_first + top, q_first + bottom, kv_first + first_key, kv_first + end, left, right)


def split_rows(part: AttnRectangle) -> list[AttnRectangle]:
    """Split a part with more queries than keys: the queries that see all keys become a part of their own.

    flash-attn would misread such a part if the other side has a limit, too. It would read a limit equal to the number
    of keys as no limit, and no limit as that limit.
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
    parts = [AttnRectangle(part.q_first + first, part.q_first + end, part.kv_first, part.kv_end)]
    for top, bottom in ((0, first), (end, part.queries)):
        limits = (None if limit is None else limit + top for limit in (low, high))
        rest = band(part.q_first + top, bottom - top, part.kv_first, part.keys, *limits) if top < bottom else None
        parts += [rest] if rest else []
    return sorted(parts, key=lambda x: x.q_first)


def band_mask(part: AttnRectangle, device: torch.device) -> Tensor:
    """Return the mask of a part: bool (queries, keys), True where the query sees the key."""
    offset = torch.arange(part.keys, device=device) - torch.arange(part.queries, device=device)[:, None]
    offset -= part.keys - part.queries
    seen = torch.ones_like(offset, dtype=torch.bool)
    if part.left != NO_LIMIT:
        seen &= offset >= -part.left
    if part.right != NO_LIMIT:
        seen &= offset <= part.right
    return seen


def joined(parts: Sequence[AttnRectangle]) -> list[AttnRectangle]:
    """Join full rectangles that lie side by side, or one above the other."""
    result: list[AttnRectangle] = []
    for part in parts:
        while result and (both := _join_pair(result[-1], part)):
            part = both
            result.pop()
        result.append(part)
    return result


def _join_pair(a: AttnRectangle, b: AttnRectangle) -> AttnRectangle | None:
    if not (a.full and b.full):
        return None
    if a.kv == b.kv and a.q_end == b.q_first:
        return AttnRectangle(a.q_first, b.q_end, a.kv_first, a.kv_end)
    if a.q == b.q and a.kv_end == b.kv_first:
        return AttnRectangle(a.q_first, a.q_end, a.kv_first, b.kv_end)
    return None


@dataclass(frozen=True)
class MaskBlocks:
    """The parts of one block of ``queries`` x ``keys``, computed and counted together."""

    parts: tuple[AttnRectangle, ...]
    queries: int
    keys: int
    kernel_cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """Data prepared for these parts: by a kernel, by device, and their ``halves``."""

    def __iter__(self) -> Iterator[AttnRectangle]:
        return iter(self.parts)

    @cached_property
    def area(self) -> int:
        """Number of (query, key) pairs that are computed."""
        return sum(part.area for part in self.parts)

    @cached_property
    def bands(self) -> bool:
        """Whether some part is neither full nor a triangle: only kernels that support windows compute it."""
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
        """The parts in groups, each of which one call of a varlen kernel computes."""
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
    """Parts with the same band limits and no row or key in common, in the order of their queries and keys."""

    def __init__(self, parts: tuple[AttnRectangle, ...]) -> None:
        self.parts = parts
        self.left, self.right = parts[0].band
        self.causal = (self.left, self.right) == (NO_LIMIT, 0)
        self.most_queries = max(part.queries for part in parts)
        self.most_keys = max(part.keys for part in parts)
        self._lengths: dict[tuple[torch.device, int], Lengths] = {}

    @torch.inference_mode(False)
    def lengths_on(self, device: torch.device, batch: int, queries: int, keys: int) -> Lengths:
        """Return the rows and lengths on a device, for ``batch`` entries of ``queries`` and ``keys`` each.

        The entries of the batch are packed one after another.
        """
        key = device, batch
        if key not in self._lengths:
            self._lengths[key] = Lengths(
                _rows([(part.q_first, part.q_end) for part in self.parts], batch, queries, device),
                _rows([(part.kv_first, part.kv_end) for part in self.parts], batch, keys, device),
                _cumulative([part.queries for part in self.parts], batch, device),
                _cumulative([part.keys for part in self.parts], batch, device),
            )
        return self._lengths[key]


@dataclass(frozen=True)
class Lengths:
    """The rows and cumulative lengths that a varlen kernel takes."""

    q: Tensor | slice
    """Rows of the queries: a slice, or indices (int64) where there are gaps between them."""
    kv: Tensor | slice
    """Rows of the keys, like ``q``."""
    cumulative_q: Tensor
    """Cumulative numbers of queries (int32), from 0."""
    cumulative_kv: Tensor
    """Cumulative numbers of keys (int32), from 0."""


def _rows(spans: list[tuple[int, int]], batch: int, count: int, device: torch.device) -> Tensor | slice:
    """Return the rows of all spans in a batch of entries of ``count`` rows: a slice where they have no gaps."""
    first, end = spans[0][0], spans[-1][1]
    if (batch == 1 or (first, end) == (0, count)) and all(a[1] == b[0] for a, b in pairwise(spans)):
        return slice(first, end + (batch - 1) * count)
    rows = torch.cat([torch.arange(*span, device="cpu") for span in spans])
    return (count * torch.arange(batch, device="cpu")[:, None] + rows).flatten().to(device, non_blocking=True)


def _cumulative(lengths: list[int], batch: int, device: torch.device) -> Tensor:
    # Not blocking: the host would wait for the device. CUDA has read pageable memory when the call returns.
    cumulative = torch.tensor([0, *lengths * batch], device="cpu").cumsum(0)
    return cumulative.to(dtype=torch.int32).to(device, non_blocking=True)


def _overlap(spans: list[tuple[int, int]]) -> bool:
    ordered = sorted(spans)
    return any(before[1] > after[0] for before, after in pairwise(ordered))
