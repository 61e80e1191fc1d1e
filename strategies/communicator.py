"""The communicator seam: everything that travels between ranks, and the count of it.

A strategy asks for channels: a `Ring` posts one hop at a time, a `Collective` trades between all its members. Every
channel has its own process group, hence its own NCCL stream: two rings of one strategy run at once and are told
apart in a trace.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .annotate import annotate
from .copies import CopyHop, CopyRing, can_copy, owned
from .errors import Unfit
from .groups import process_group
from .merge import wide_type

SAME_HOST, OTHER_HOST = "same_host", "other_host"
HOPS = ("nccl", "copy")
"""What can carry hops: NCCL's send/recv kernels (gloo on CPU), or copy engines (see `copies`)."""


@dataclass(frozen=True)
class Hosts:
    """Which global ranks share a host: ``per_host`` consecutive ones each, or as ``numbers`` says for each rank."""

    per_host: int
    numbers: tuple[int, ...] | None = None

    @classmethod
    def of_run(cls, world_size: int, given: int | None = None, numbers: Sequence[int] | None = None) -> Hosts:
        """From ``given``, else ``numbers``, else the launcher's environment (torchrun, Slurm), else all on one host.

        ``numbers`` holds the host of every global rank, counted from 0 in the order of their first ranks. Raises
        `Unfit` where ``given`` does not divide the world size.
        """
        if given is not None:
            if given < 1 or world_size % given:
                raise Unfit(f"ranks_per_host {given} does not divide the world size {world_size}")
            return cls(given)
        if numbers is not None:
            if len(numbers) != world_size:
                raise Unfit(f"hosts of {len(numbers)} ranks for a world of {world_size}")
            return cls(max(numbers.count(number) for number in numbers), tuple(numbers))
        launched = os.environ.get("LOCAL_WORLD_SIZE", "")
        per_host = int(launched) if launched.isdigit() and int(launched) > 0 else world_size
        return cls(per_host if world_size % per_host == 0 else world_size)

    def number(self, rank: int) -> int:
        """The host of a global rank."""
        return rank // self.per_host if self.numbers is None else self.numbers[rank]

    def link(self, rank: int, other: int) -> str:
        """The class of the link between two global ranks."""
        return SAME_HOST if self.number(rank) == self.number(other) else OTHER_HOST


@dataclass
class Meter:
    """What this rank has sent: (channel, phase, operation, link) -> [count, bytes]."""

    phase: str = "forward"
    sent: dict[tuple[str, str, str, str], list[int]] = field(default_factory=dict)

    def add(self, channel: str, operation: str, link: str, size_bytes: int, count: int = 1) -> None:
        entry = self.sent.setdefault((channel, self.phase, operation, link), [0, 0])
        entry[0] += count
        entry[1] += size_bytes

    def clear(self) -> None:
        self.sent.clear()


class Hop:
    """One transfer under way. `wait` returns what arrived, once."""

    def __init__(
        self, works: list[dist.Work], sent: Sequence[Tensor], received: list[Tensor], channel: str = ""
    ) -> None:
        self._works: list[dist.Work] | None = works
        self._channel = channel
        # The tensors under way must outlive the transfer.
        self._sent = sent
        self._received = received

    def wait(self) -> list[Tensor]:
        """The received tensors, usable by work queued after this call.

        On GPU the host does not block: the current stream waits. Raises RuntimeError when called twice.
        """
        if self._works is None:
            raise RuntimeError("wait called twice on one hop")
        with annotate(f"wait/{self._channel}" if self._channel else "wait"):
            for work in self._works:
                work.wait()
        # Held to here for the transfer's sake; freed before the next hop asks for room.
        self._works, self._sent = None, ()
        return self._received


AnyHop = Hop | CopyHop


class Ring:
    """A ring of ranks in which every hop goes from each member to the next."""

    def __init__(
        self, channel: str, members: Sequence[int], group: dist.ProcessGroup | None, comm: Communicator,
        *, keeps: bool = False,
    ) -> None:  # fmt: skip
        self.channel = channel
        self.size = len(members)
        self.rank = list(members).index(comm.rank)
        self.group = group
        self._meter = comm.meter
        self._next = comm.global_rank(members[(self.rank + 1) % self.size])
        self._previous = comm.global_rank(members[(self.rank - 1) % self.size])
        self._link = comm.hosts.link(comm.global_rank(comm.rank), self._next)
        self._copies = None
        links = {comm.hosts.link(comm.global_rank(members[0]), comm.global_rank(other)) for other in members}
        if comm.hops == "copy" and group is not None and links == {SAME_HOST} and not keeps:
            self._copies = CopyRing(channel, group, self._next, self._previous)

    def post(self, tensors: Sequence[Tensor], *, into: Sequence[Tensor] | None = None) -> AnyHop:
        """Start sending ``tensors`` to the next member and receiving the like from the previous one.

        All tensors of a hop travel in one batch: one kernel with NCCL. They must not be written to before `Hop.wait`.
        ``into`` gives contiguous tensors to receive in; otherwise they are made, and may be used until the second next
        hop is posted.
        """
        sent = [owned(tensor.contiguous(), self._copies) for tensor in tensors]
        if self._copies is not None and into is None:
            self._meter.add(self.channel, "copy", self._link, sum(_size_bytes(tensor) for tensor in sent))
            return self._copies.post(sent)
        received = [torch.empty_like(tensor) for tensor in sent] if into is None else list(into)
        if self.size == 1:
            return Hop([], sent, list(sent))
        operations = []
        for out, arriving in zip(sent, received, strict=True):
            operations.append(dist.P2POp(dist.isend, out, self._next, group=self.group))
            operations.append(dist.P2POp(dist.irecv, arriving, self._previous, group=self.group))
            self._meter.add(self.channel, "send_recv", self._link, out.numel() * out.element_size(), count=0)
        self._meter.add(self.channel, "send_recv", self._link, 0)
        with annotate(f"send/{self.channel}"):
            works = dist.batch_isend_irecv(operations)
        return Hop(works, sent, received, self.channel)

    def tour(self, tensors: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield (position, tensors) of every member, this rank's own first, then the previous member's, and so on.

        Each hop is posted before the tensors that it carries on are handed out, so that what the caller computes with
        them hides it. A list that was handed out is empty when the next one comes: whoever still held the tensors then
        would hold a third set beside the two of the next hop.
        """
        current = list(tensors)
        for step in range(self.size):
            hop = self.post(current) if step + 1 < self.size else None
            yield (self.rank - step) % self.size, current
            if hop is not None:
                passed, current = current, list(hop.wait())
                passed.clear()
                hop = None


class DoubleRing:
    """A ring of rings: windows of ``window`` consecutive ranks, and rings of the ranks with the same place in each.

    With as many ranks in a window as there are, it is the plain ring. ``members`` are all ranks where not given.
    """

    def __init__(self, comm: Communicator, channel: str, window: int, members: Sequence[int] | None = None) -> None:
        members = list(range(comm.size)) if members is None else list(members)
        if window < 1 or len(members) % window:
            whole = "the world size" if len(members) == comm.size else "the ring of"
            raise Unfit(f"ring_window {window} does not divide {whole} {len(members)}")
        self.window = window
        self.size, self.rank = len(members), members.index(comm.rank)
        first, place = self.rank // window * window, self.rank % window
        self.inner = comm.ring(f"{channel}_inner", members[first : first + window])
        self.outer = comm.ring(f"{channel}_outer", members[place::window])

    def tour(self, tensors: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """As `Ring.tour` over all ranks: each window's hops on the inner ring, one hop a window on the outer ring.

        The outer hop carries what the window began with and has the whole window to arrive.
        """
        windows = self.size // self.window
        current = list(tensors)
        for turn in range(windows):
            hop = self.outer.post(current) if turn + 1 < windows else None
            home_window = (self.outer.rank - turn) % windows
            for place, travelled in self.inner.tour(current):
                yield home_window * self.window + place, travelled
            if hop is not None:
                current = hop.wait()


class Collective:
    """A channel in which every member trades with all others at once."""

    def __init__(
        self, channel: str, members: Sequence[int], group: dist.ProcessGroup | None, comm: Communicator
    ) -> None:
        self.channel = channel
        self.size = len(members)
        self.rank = list(members).index(comm.rank)
        self._group = group
        self.meter = comm.meter
        me = comm.global_rank(comm.rank)
        others = [comm.global_rank(members[(self.rank + step) % self.size]) for step in range(1, self.size)]
        # In the order of a ring, the next member first.
        self._links = [comm.hosts.link(me, other) for other in others]
        self._nccl = group is not None and "nccl" in dist.get_backend(group)

    def all_to_all(self, tensor: Tensor) -> Hop:
        """Start trading: ``tensor[i]`` goes to member i, and the one tensor that arrives holds its piece there."""
        tensor = tensor.contiguous()
        if self.size == 1:
            return Hop([], [tensor], [tensor])
        self._count("all_to_all", self._links, _size_bytes(tensor) // self.size)
        return self._trade(tensor, Hop)

    def all_gather(self, tensor: Tensor) -> Hop:
        """Start gathering: the one tensor that arrives is (size, *shape), piece i from member i.

        Counted as NCCL's ring sends it: size - 1 pieces to the next member.
        """
        tensor = tensor.contiguous()
        if self.size == 1:
            return Hop([], [tensor], [tensor.unsqueeze(0)])
        received = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        self._count("all_gather", self._links[:1] * (self.size - 1), _size_bytes(tensor))
        with annotate(f"send/{self.channel}"):
            if self._nccl:
                work = _all_gather_single(received, tensor, group=self._group, async_op=True)
            else:
                pieces = list(_as_bytes(received).unbind(0))
                work = dist.all_gather(pieces, _as_bytes(tensor[None])[0], group=self._group, async_op=True)
        return Hop([work], [tensor], [received], self.channel)

    def reduce_scatter(self, tensor: Tensor) -> Hop:
        """Start summing: what arrives is the sum over all members of their ``tensor[i]``, i this rank's place.

        The sum has the tensor's type; NCCL rounds to it at every addition, other backends once. Counted as NCCL's ring
        sends it: size - 1 pieces to the next member.
        """
        tensor = tensor.contiguous()
        if self.size == 1:
            return Hop([], [tensor], [tensor[0]])
        self._count("reduce_scatter", self._links[:1] * (self.size - 1), _size_bytes(tensor) // self.size)
        if not self._nccl:
            # gloo sums in an order of its own and lacks types: trade the pieces and add them in rank order.
            return self._trade(tensor, _SummedHop)
        received = torch.empty_like(tensor[0])
        with annotate(f"send/{self.channel}"):
            work = _reduce_scatter_single(received, tensor, group=self._group, async_op=True)
        return Hop([work], [tensor], [received], self.channel)

    def _trade(self, tensor: Tensor, kind: type[Hop]) -> Hop:
        received = torch.empty_like(tensor)
        # gloo knows few types, but bytes are bytes.
        into, out = (received, tensor) if self._nccl else (_as_bytes(received), _as_bytes(tensor))
        with annotate(f"send/{self.channel}"):
            work = dist.all_to_all_single(into, out, group=self._group, async_op=True)
        return kind([work], [tensor], [received], self.channel)

    def _count(self, operation: str, links: Sequence[str], piece_bytes: int) -> None:
        """Count one collective, under its slowest link, and its bytes by link."""
        for link in links:
            self.meter.add(self.channel, operation, link, piece_bytes, count=0)
        self.meter.add(self.channel, operation, OTHER_HOST if OTHER_HOST in links else SAME_HOST, 0)


class _SummedHop(Hop):
    """A trade whose pieces are added on arrival."""

    def wait(self) -> list[Tensor]:
        (pieces,) = super().wait()
        return [pieces.sum(0, dtype=wide_type(pieces)).to(pieces.dtype)]


# Newer releases of torch renamed them and warn about the old names.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or getattr(
    dist, "reduce_scatter_tensor", None
)


def _size_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes, with the first dimension kept."""
    return tensor.reshape(tensor.shape[0], -1).view(torch.uint8)


class Communicator:
    """One rank's access to a group of ranks. Ranks below are positions in that group."""

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, ranks_per_host: int | None = None, hops: str = "nccl",
        hosts: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """``hops``: what carries the hops of rings within a host, of `HOPS`. Raises `Unfit` where it cannot here.

        ``hosts`` numbers the host of every global rank where the launcher's variables do not tell (see `Hosts`).
        """
        if hops not in HOPS:
            raise Unfit(f"hops {hops!r}: write one of {', '.join(HOPS)}")
        problem = can_copy() if hops == "copy" else None
        if problem:
            raise Unfit(f"hops by copy engine {problem}")
        self.hops = hops
        self._parent = group
        initialised = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if initialised else 0
        self.size = dist.get_world_size(group) if initialised else 1
        self.hosts = Hosts.of_run(dist.get_world_size() if initialised else 1, ranks_per_host, hosts)
        self.meter = Meter()

    def global_rank(self, rank: int) -> int:
        """The global rank of a position in this group."""
        if self._parent is None or self.size == 1:
            return rank
        return dist.get_global_rank(self._parent, rank)

    def ranks_per_host(self) -> int:
        """How many ranks of this group share a host, if every host has as many and they are neighbours; else all."""
        hosts = [self.hosts.number(self.global_rank(rank)) for rank in range(self.size)]
        per_host = hosts.count(hosts[0])
        regular = self.size % per_host == 0 and hosts == sorted(hosts)
        even = all(hosts.count(host) == per_host for host in hosts)
        return per_host if regular and even else self.size

    def ring(
        self, channel: str, members: Sequence[int] | None = None, *, shares: Ring | None = None, keeps: bool = False
    ) -> Ring:
        """A ring over ``members`` (all ranks of the group where None).

        ``shares`` names a ring of the same members whose process group this one uses: their hops then follow each
        other. With ``keeps``, what arrives may be used for as long as it is wanted, also on other streams. Every rank
        of the group must ask for its own rings in the same order.
        """
        members = list(range(self.size)) if members is None else list(members)
        group = self._group_of(channel, members) if shares is None else shares.group
        return Ring(channel, members, group, self, keeps=keeps)

    def collective(self, channel: str, members: Sequence[int] | None = None) -> Collective:
        """A channel for collectives over ``members``, as `ring` makes one for hops."""
        members = list(range(self.size)) if members is None else list(members)
        return Collective(channel, members, self._group_of(channel, members, hops=False), self)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The ``tensor`` of every rank, in rank order (for checks and `unshard`: not counted as traffic)."""
        if self.size == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor.contiguous(), group=self._parent)
        return gathered

    def any_rank(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank of the group."""
        if self.size == 1:
            return flag
        device = "cuda" if "nccl" in dist.get_backend(self._parent) else "cpu"
        total = torch.tensor([int(flag)], device=device)
        dist.all_reduce(total, group=self._parent)
        return bool(total.item())

    def _group_of(self, channel: str, members: Sequence[int], *, hops: bool = True) -> dist.ProcessGroup | None:
        if len(members) == 1 or self.size == 1:
            return None
        ranks = tuple(self.global_rank(member) for member in members)
        return process_group(channel, ranks, hops)
