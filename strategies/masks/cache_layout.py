"""Layouts of a KV cache: which keys of a sequence each rank holds, in which order."""

from __future__ import annotations

from dataclasses import dataclass
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

    @property
    def new_tokens(self) -> int:
        """Number of tokens of the last stretch: in prefill, of the chunk that is computed."""
        return self.stretches[-1][1]

    def ranges(self, rank: int) -> list[list[range]]:
        """Return the positions of the rank's keys as ranges, for each stretch."""
        starts = accumulate((tokens for _, tokens in self.stretches), initial=0)
        return [
            [range(start + x.start, start + x.stop, x.step) for x in layout.ranges(tokens, self.size, rank)]
            for start, (layout, tokens) in zip(starts, self.stretches, strict=False)
        ]

    def positions(self, rank: int, *, new: bool = False) -> Tensor:
        """Return the positions (int64, CPU) of the rank's keys in local order; ``new``: of the last stretch alone."""
        ranges = self.ranges(rank)[-1:] if new else self.ranges(rank)
        return torch.cat([torch.arange(x.start, x.stop, x.step, device="cpu") for part in ranges for x in part])

    def key_count(self, rank: int, *, new: bool = False) -> int:
        """Return the number of the rank's keys; ``new``: of the last stretch alone."""
        ranges = self.ranges(rank)[-1:] if new else self.ranges(rank)
        return sum(len(x) for part in ranges for x in part)

    def largest_count(self, *, new: bool = False) -> int:
        """Return the number of keys of the rank that has most; ``new``: of the last stretch alone."""
        return max(self.key_count(rank, new=new) for rank in range(self.size))
