"""Layouts of a KV cache: which keys of a sequence each rank holds, in which order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from .layouts import Layout


@dataclass(frozen=True)
class CacheLayout:
    """A split of a sequence's keys over ranks: stretches of the sequence, each split by a layout of its own.

    A rank holds its keys of the first stretch, then those of the next one. Shares need not be equal.
    """

    size: int
    """Number of ranks."""
    stretches: tuple[tuple[Layout, int], ...]
    """Layout and number of tokens of each stretch, in the order of the sequence."""

    def __str__(self) -> str:
        return ", ".join(f"{tokens} {layout.name}" for layout, tokens in self.stretches)

    @property
    def kv_length(self) -> int:
        """Number of keys of all ranks."""
        return sum(tokens for _, tokens in self.stretches)

    @cached_property
    def key_counts(self) -> tuple[int, ...]:
        """Number of keys of each rank."""
        return tuple(map(self.key_count, range(self.size)))

    @cached_property
    def new_counts(self) -> tuple[int, ...]:
        """Number of keys of the last stretch on each rank: in prefill, of its queries."""
        return tuple(sum(map(len, self.ranges(rank, new=True))) for rank in range(self.size))

    def ranges(self, rank: int, *, new: bool = False) -> list[range]:
        """Return the positions of the rank's keys as ranges; ``new``: those of the last stretch alone."""
        starts = accumulate((tokens for _, tokens in self.stretches), initial=0)
        stretches = list(zip(starts, self.stretches, strict=False))[-1 if new else 0 :]
        return [
            range(start + x.start, start + x.stop, x.step)
            for start, (layout, tokens) in stretches
            for x in layout.ranges(tokens, self.size, rank)
        ]

    def positions(self, rank: int, *, new: bool = False) -> Tensor:
        """Return the positions (int64, CPU) of the rank's keys in local order; ``new``: of the last stretch alone."""
        ranges = self.ranges(rank, new=new)
        return torch.cat([torch.arange(x.start, x.stop, x.step, device="cpu") for x in ranges])

    def key_count(self, rank: int) -> int:
        """Return the number of the rank's keys."""
        return sum(map(len, self.ranges(rank)))


cache_layout_of = lru_cache(maxsize=64)(CacheLayout)
"""Return the `CacheLayout`, cached: all layers of a model use the same one."""
