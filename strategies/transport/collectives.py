"""Channels for collectives, in which every member exchanges data with all others at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..annotate import annotate
from ..kernels.merge import wide_type
from .groups import uses_nccl
from .hosts import OTHER_HOST, SAME_HOST
from .ring_channel import ALL_TO_ALL_OPTIONS, Hop, RankGroup, async_options


class Collective:
    """A channel for collectives among its members, with a process group of its own."""

    def __init__(self, channel: str, members: Sequence[int], group: dist.ProcessGroup | None, comm: RankGroup) -> None:
        self.channel = channel
        self.size = len(members)
        self.rank = list(members).index(comm.rank)
        self._group = group
        self.meter = comm.meter
        me = comm.global_rank(comm.rank)
        others = [comm.global_rank(members[(self.rank + step) % self.size]) for step in range(1, self.size)]
        # In ring order, the next member first.
        self._links = [comm.hosts.link(me, other) for other in others]
        # The group's methods are called directly: the argument checks of `torch.distributed` double the host's time.
        self._calls: Any = group
        self._has_nccl = group is not None and uses_nccl(group)

    def all_to_all(self, tensor: Tensor) -> Hop:
        """Start an all-to-all: ``tensor[i]`` goes to member i; piece i of the tensor that arrives is from member i."""
        tensor = tensor.contiguous()
        if self.size == 1:
            return Hop([], [tensor], [tensor])
        self._count("all_to_all", self._links, tensor.nbytes // self.size)
        return self._exchange(tensor, Hop)

    def all_gather(self, tensor: Tensor) -> Hop:
        """Start an all-gather: the one tensor that arrives is (size, *shape), with piece i from member i.

        The meter counts what NCCL's ring sends: size - 1 pieces to the next member.
        """
        tensor = tensor.contiguous()
        if self.size == 1:
            return Hop([], [tensor], [tensor.unsqueeze(0)])
        received = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        self._count("all_gather", self._links[:1] * (self.size - 1), tensor.nbytes)
        with annotate("send", self.channel):
            if self._uses_nccl(tensor):
                work = self._calls._allgather_base(received, tensor, _GATHER)
            else:
                pieces = list(_as_bytes(received).unbind(0))
                work = dist.all_gather(pieces, _as_bytes(tensor[None])[0], group=self._group, async_op=True)
        return Hop([work], [tensor], [received], self.channel)

    def reduce_scatter(self, tensor: Tensor) -> Hop:
        """Start a reduce-scatter: what arrives is the sum over all members of their ``tensor[i]``, i this rank's index.

        The sum has the tensor's type; NCCL rounds to it at every addition, other backends once. The meter counts what
        NCCL's ring sends: size - 1 pieces to the next member.
        """
        tensor = tensor.contiguous()
        if self.size == 1:
            return Hop([], [tensor], [tensor[0]])
        self._count("reduce_scatter", self._links[:1] * (self.size - 1), tensor.nbytes // self.size)
        if not self._uses_nccl(tensor):
            # gloo sums in its own order and lacks some types: exchange the pieces and add them in rank order.
            return self._exchange(tensor, _SummedHop)
        received = torch.empty_like(tensor[0])
        with annotate("send", self.channel):
            work = self._calls._reduce_scatter_base(received, tensor, _REDUCE)
        return Hop([work], [tensor], [received], self.channel)

    def _uses_nccl(self, tensor: Tensor) -> bool:
        return self._has_nccl and tensor.is_cuda

    def _exchange(self, tensor: Tensor, kind: type[Hop]) -> Hop:
        received = torch.empty_like(tensor)
        # gloo supports few types, so it sends bytes.
        into, out = (received, tensor) if self._uses_nccl(tensor) else (_as_bytes(received), _as_bytes(tensor))
        with annotate("send", self.channel):
            work = self._calls.alltoall_base(into, out, [], [], ALL_TO_ALL_OPTIONS)
        return kind([work], [tensor], [received], self.channel)

    def _count(self, operation: str, links: Sequence[str], piece_bytes: int) -> None:
        """Count one collective under its slowest link, and its bytes under the link that they take."""
        for link in links:
            self.meter.add(self.channel, operation, link, piece_bytes, count=0)
        self.meter.add(self.channel, operation, OTHER_HOST if OTHER_HOST in links else SAME_HOST, 0)


class _SummedHop(Hop):
    """An all-to-all whose pieces are summed on arrival."""

    def wait(self) -> list[Tensor]:
        (pieces,) = super().wait()
        return [pieces.sum(0, dtype=wide_type(pieces)).to(pieces.dtype)]


_GATHER = async_options("AllgatherOptions")
_REDUCE = async_options("ReduceScatterOptions")


def _as_bytes(tensor: Tensor) -> Tensor:
    """View ``tensor`` as bytes, with its first dimension unchanged."""
    return tensor.reshape(tensor.shape[0], -1).view(torch.uint8)
