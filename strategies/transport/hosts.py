"""Hosts of the ranks, and the class of the link between two ranks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import Unsupported

SAME_HOST, OTHER_HOST = "same_host", "other_host"


@dataclass(frozen=True)
class Hosts:
    """The host of each global rank of a group, counted from 0 in the order of their first ranks."""

    numbers: Mapping[int, int]

    @classmethod
    def from_arguments(cls, world_size: int, per_host: int | None, numbers: Sequence[int] | None) -> Hosts | None:
        """Return hosts of ``per_host`` consecutive ranks each, or numbered per rank of the world; None without either.

        Raises `Unsupported` where ``per_host`` does not divide the world, or ``numbers`` are not as many as its ranks.
        """
        if per_host is not None:
            if per_host < 1 or world_size % per_host:
                raise Unsupported(f"ranks_per_host {per_host} does not divide the world size {world_size}")
            return cls({rank: rank // per_host for rank in range(world_size)})
        if numbers is None:
            return None
        if len(numbers) != world_size:
            raise Unsupported(f"hosts of {len(numbers)} ranks for a world of {world_size}")
        return cls(dict(enumerate(numbers)))

    def number(self, rank: int) -> int:
        """Return the host of a global rank."""
        return self.numbers[rank]

    def link(self, rank: int, other: int) -> str:
        """Return the class of the link between two global ranks."""
        return SAME_HOST if self.number(rank) == self.number(other) else OTHER_HOST

    def per_host(self, ranks: Sequence[int]) -> int:
        """Return how many of ``ranks`` each host has, if consecutive and equally many per host; else all of them."""
        hosts = [self.number(rank) for rank in ranks]
        sizes = set(Counter(hosts).values())
        return sizes.pop() if len(sizes) == 1 and hosts == sorted(hosts) else len(ranks)


def int_from_environment(variable: str) -> int | None:
    """Return the integer value of an environment variable; None where it is not set to one."""
    text = os.environ.get(variable, "")
    return int(text) if text.isascii() and text.isdigit() else None
