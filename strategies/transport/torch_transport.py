"""Transports of channels: process groups of torch.distributed (NCCL or gloo), and copy engines."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ..annotate import annotate
from ..kernels.merge import wide_type
from .copy_engine import copy_if_in_other_slot, copy_ring
from .groups import process_group, uses_nccl
from .hop_comparison import hop_comparison
from .message import Message, MessageLayout
from .ring_channel import AnyHop, Channel, Hop, RankGroup, Transport

_MOST_NAMED = 30
"""Largest ring, in members, whose hops are sent as all-to-alls. Up to this size torch's profiler records how much goes
to each member; beyond it a trace does not tell such a hop from a real all-to-all."""


def _async_options(kind: str) -> Any:
    """Return a collective's options of the class ``kind``, as `torch.distributed` makes them for ``async_op=True``."""
    options = getattr(c10d, kind)()
    options.asyncOp = True
    return options


_ALL_TO_ALL, _GATHER, _REDUCE = map(_async_options, ("AllToAllOptions", "AllgatherOptions", "ReduceScatterOptions"))


def torch_transport(channel: Channel, comm: RankGroup, shares: Transport | None, keeps: bool) -> Transport:
    """Connect a channel by copy engines where they may and can carry its hops, else by its process group alone."""
    group = getattr(shares, "group", None)
    if shares is None and channel.size > 1:
        group = process_group(channel.channel, channel.ranks, comm.token, comm.group)
    same_host = len({comm.hosts.number(rank) for rank in channel.ranks}) == 1
    may_copy = comm.hops == "copy" or (comm.hops == "auto" and comm.can_copy)
    if may_copy and group is not None and same_host and not keeps:
        return CopyTransport(channel, group, comm)
    return TorchTransport(channel, group, comm)


class TorchTransport:
    """A channel's process group, of NCCL for GPU tensors and gloo for others; None for a channel of one rank."""

    free_slot: Callable[[MessageLayout], list[Tensor]] | None = None

    def __init__(self, channel: Channel, group: dist.ProcessGroup | None, comm: RankGroup) -> None:
        # The group's methods are called directly: the argument checks of `torch.distributed` double the host's time.
        self.group: Any = group
        self._peers = channel.following, channel.previous
        self.all_to_all_device: str | None = None  # Device type whose hops are sent as all-to-alls.
        if group is not None:
            self._to, self._source = (dist.get_group_rank(group, rank) for rank in self._peers)
            self._splits = lru_cache(maxsize=4)(partial(_splits, channel.size, self._source, self._to))
            self.all_to_all_device = "cuda" if uses_nccl() and channel.size <= _MOST_NAMED else None
        self._has_nccl = group is not None and uses_nccl(group)
        if group is not None:
            comparison = hop_comparison(comm.group, comm.processes)
            self._check = partial(comparison.check, comm.group, channel.channel)
            self._wait_for_equal = comparison.wait

    def hop(self, ring: Channel, message: Message, into: Message | None) -> AnyHop:
        """Start a hop. With NCCL that is an all-to-all in which each member sends only to the next.

        An all-to-all is one call and the same kernel; a batch of a send and a receive is four calls.
        """
        # A message of a ring of copies, whose tensors may lie apart, can go on here: this rank's peers may have packed.
        self._check(message.layout, waits=message.buffers[0].is_cpu)
        message = copy_if_in_other_slot(message, None) if message.is_packed else Message.pack(message.tensors)
        arriving = message.empty_like() if into is None else into
        ring.meter.add(ring.channel, "send_recv", ring.link, message.size_bytes)
        with annotate("send", ring.channel):
            pairs = zip(message.buffers, arriving.buffers, strict=True)
            if message.buffers[0].device.type == self.all_to_all_device:
                works = [
                    self.group.alltoall_base(into, out, *self._splits(out.shape[0]), _ALL_TO_ALL) for out, into in pairs
                ]
            else:
                to, source = self._peers
                ops = [
                    (dist.P2POp(dist.isend, x, to, self.group), dist.P2POp(dist.irecv, y, source, self.group))
                    for x, y in pairs
                ]
                works = dist.batch_isend_irecv([op for pair in ops for op in pair])
        return Hop(works, message.buffers, arriving, ring.channel)

    def send(self, chain: Channel, tensor: Tensor) -> Hop:
        """Start to send a tensor to the next rank of a chain."""
        chain.meter.add(chain.channel, "send_recv", chain.link, tensor.nbytes)
        with annotate("send", chain.channel):
            work = self.group.send([tensor], self._to, 0)
        return Hop([work], [tensor], None, chain.channel)

    def receive(self, chain: Channel, like: Tensor) -> Tensor:
        """Receive a tensor from the previous rank of a chain; wait for it."""
        received = torch.empty_like(like, memory_format=torch.contiguous_format)
        work = self.group.recv([received], self._source, 0)
        return Hop([work], [], received, chain.channel).wait()  # type: ignore[no-any-return]

    def collective(self, channel: Channel, operation: str, tensor: Tensor) -> Hop:
        """Start a collective. gloo supports few types, so it sends bytes."""
        piece_bytes = tensor.nbytes if operation == "all_gather" else tensor.nbytes // channel.size
        channel.count_collective(operation, piece_bytes)
        has_nccl, kind = self._has_nccl and tensor.is_cuda, Hop
        if operation == "all_gather":
            received = torch.empty((channel.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
            with annotate("send", channel.channel):
                if has_nccl:
                    work = self.group._allgather_base(received, tensor, _GATHER)
                else:
                    pieces = list(_as_bytes(received).unbind(0))
                    work = dist.all_gather(pieces, _as_bytes(tensor[None])[0], group=self.group, async_op=True)
        elif operation == "reduce_scatter" and has_nccl:
            received = torch.empty_like(tensor[0])
            with annotate("send", channel.channel):
                work = self.group._reduce_scatter_base(received, tensor, _REDUCE)
        else:
            # gloo sums in its own order and lacks some types: exchange the pieces and add them in rank order.
            kind = Hop if operation == "all_to_all" else _SummedHop
            received = torch.empty_like(tensor)
            into, out = (received, tensor) if has_nccl else (_as_bytes(received), _as_bytes(tensor))
            with annotate("send", channel.channel):
                work = self.group.alltoall_base(into, out, [], [], _ALL_TO_ALL)
        return kind([work], [tensor], [received], channel.channel)


class CopyTransport(TorchTransport):
    """The copy engines of the GPUs of one host, between the members of a ring."""

    def __init__(self, channel: Channel, group: dist.ProcessGroup, comm: RankGroup) -> None:
        super().__init__(channel, group, comm)
        peers = {rank: comm.processes[rank] for rank in self._peers}
        self._copies = copy_ring(channel.channel, group, self._to, self._source, peers)
        self.free_slot = self._copies.free_slot
        # A trace of a copy does not record the destination rank, so the range around it names the rank.
        self._copied_to = f"{channel.channel}/to={channel.following}"

    def hop(self, ring: Channel, message: Message, into: Message | None) -> AnyHop:
        """Start a hop, whose message arrives in a slot of this rank."""
        if self._check(message.layout, waits=message.buffers[0].is_cpu) and self._copies.grows_for(message.layout):
            # The members make larger slots together: one that does not need them would leave the others waiting.
            self._wait_for_equal()
        message = copy_if_in_other_slot(message, self._copies)
        assert into is None, "copy engines write where they may, not where they are told"
        ring.meter.add(ring.channel, "copy", ring.link, message.size_bytes)
        with annotate("send", self._copied_to):
            # The hop gets its own message: a tour clears the caller's, which another ring may still be sending.
            return self._copies.post(message.with_buffers(list(message.buffers)))


class _SummedHop(Hop):
    """An all-to-all whose pieces are summed on arrival."""

    def wait(self) -> list[Tensor]:
        (pieces,) = super().wait()
        return [pieces.sum(0, dtype=wide_type(pieces)).to(pieces.dtype)]


def _splits(size: int, source: int, to: int, rows: int) -> list[list[int]]:
    """Return how many ``rows`` come from each member, and how many go to each."""
    return [[rows if member == peer else 0 for member in range(size)] for peer in (source, to)]


def _as_bytes(tensor: Tensor) -> Tensor:
    """View ``tensor`` as bytes, with its first dimension unchanged."""
    return tensor.reshape(tensor.shape[0], -1).view(torch.uint8)
