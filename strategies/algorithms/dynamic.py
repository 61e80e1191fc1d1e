"""Dynamic context parallelism: a strategy over subgroups of the ranks, whose size changes from batch to batch.

Long sequences need many ranks, short ones few: with equal tokens per rank, many small groups compute a batch of short
sequences in parallel. The process group and the strategy of a subgroup are created at its first use, and cached. Going
back to a size costs nothing and creates no communicator. Subgroups are neighbours: with 4 ranks and size 2, they are
ranks 0 and 1, and ranks 2 and 3, as in Megatron's hybrid context parallelism. Subgroups of different sizes may be used
at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ..errors import Unsupported
from ..registry import create
from ..transport.communicator import Communicator
from ..transport.groups import SUBGROUP, process_group


class Dynamic:
    """Strategies of one name over subgroups of a group of ranks, created on first use."""

    def __init__(self, name: str, group: Any = None, kernel: str = "auto", hops: str = "auto", **params: Any) -> None:
        """Prepare strategies with the arguments of `ringprof.strategies.create`; collective over ``group``.

        Later calls are collective only over the ranks of a subgroup, and only at its first use.
        """
        self.comm = Communicator(group, hops=hops, request=f"parts for {name} with kernel {kernel}, {sorted(params)}")
        self._create = partial(create, name, kernel=kernel, hops=hops, **params)
        self._strategies: dict[tuple[int, ...], Any] = {}

    def of(self, size: int) -> Any:
        """Return the strategy over this rank's subgroup of ``size`` ranks.

        Raises `Unsupported` unless it divides all ranks.
        """
        if size < 1 or self.comm.size % size:
            raise Unsupported(f"parts of {size} ranks do not divide {self.comm.size}")
        first = self.comm.rank // size * size
        return self.over(range(first, first + size))

    def over(self, ranks: Sequence[int]) -> Any:
        """Return the strategy over given ranks of the group, which must include this rank. Raises `Unsupported`."""
        members = tuple(ranks)
        if self.comm.rank not in members or len(set(members)) < len(members):
            raise Unsupported(f"ranks {list(members)}: each once, and rank {self.comm.rank} among them")
        if members not in self._strategies:
            group, global_ranks = self.comm.group, tuple(map(self.comm.global_rank, members))
            if members != tuple(range(self.comm.size)):
                group = process_group(SUBGROUP, global_ranks, self.comm.token, group)
            self._strategies[members] = self._create(group=group)
        return self._strategies[members]

    @property
    def made(self) -> list[Any]:
        """Strategies that this rank has created so far."""
        return list(self._strategies.values())
