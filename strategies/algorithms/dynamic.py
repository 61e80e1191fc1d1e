"""Dynamic context parallelism: a strategy over parts of the ranks, whose size changes from batch to batch.

Long sequences want many ranks and short ones few: with as many tokens a rank, a batch of short sequences is attended by
many small groups at once. Process groups and strategies of a part are made when it is first asked for, and kept: going
back to a size costs nothing, and makes no communicator. Parts are neighbours: with 4 ranks and size 2 these are ranks
0 and 1, and 2 and 3, as Megatron's hybrid context parallelism cuts them; parts may have different sizes at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ringprof.strategies.errors import Unsupported
from ringprof.strategies.registry import create
from ringprof.strategies.transport.communicator import Communicator
from ringprof.strategies.transport.groups import process_group


class Dynamic:
    """The strategies of one name over parts of a group of ranks."""

    def __init__(self, name: str, group: Any = None, kernel: str = "auto", hops: str = "auto", **params: Any) -> None:
        """As `ringprof.strategies.create` takes it; collective over ``group``.

        What is collective later is so over the ranks of a part alone, the first time.
        """
        self.comm = Communicator(group, hops=hops, request=f"parts for {name} with kernel {kernel}, {sorted(params)}")
        self._make = partial(create, name, kernel=kernel, hops=hops, **params)
        self._made: dict[tuple[int, ...], Any] = {}

    def of(self, size: int) -> Any:
        """The strategy over this rank's part of ``size`` ranks. Raises `Unsupported` where that does not divide all."""
        if size < 1 or self.comm.size % size:
            raise Unsupported(f"parts of {size} ranks do not divide {self.comm.size}")
        first = self.comm.rank // size * size
        return self.over(range(first, first + size))

    def over(self, ranks: Sequence[int]) -> Any:
        """The strategy over any ranks, positions in the group and this rank's among them."""
        members = tuple(ranks)
        if self.comm.rank not in members or len(set(members)) < len(members):
            raise Unsupported(f"ranks {list(members)}: each once, and rank {self.comm.rank} among them")
        if members not in self._made:
            self._made[members] = self._make(group=self._group(members))
        return self._made[members]

    @property
    def made(self) -> list[Any]:
        """The strategies that this rank has been asked for so far."""
        return list(self._made.values())

    def _group(self, members: tuple[int, ...]) -> Any:
        if members == tuple(range(self.comm.size)):
            return self.comm.group
        return process_group("cp", tuple(map(self.comm.global_rank, members)), self.comm.token, self.comm.group)
