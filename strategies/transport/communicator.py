"""The communicator seam: everything that travels between ranks, and the count of it.

A strategy asks for channels: a `HopRing` posts one hop at a time, a `Collective` trades between all its members. Every
channel has its own process group, hence its own NCCL stream: two rings of one strategy run at once and are told
apart in a trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringprof.strategies.errors import Unsupported
from ringprof.strategies.transport.collectives import Collective
from ringprof.strategies.transport.copy_engine import can_copy
from ringprof.strategies.transport.groups import process_group
from ringprof.strategies.transport.handshake import check_same_call, perform_handshake
from ringprof.strategies.transport.hosts import Hosts
from ringprof.strategies.transport.ring_channel import HopRing

HOPS = ("auto", "nccl", "copy")
"""What can carry hops: NCCL's send/recv kernels (gloo on CPU), or copy engines (see `copies`); ``auto`` is copy engines
where all ranks can: on 4 H200 they were faster than NCCL or within 2 % of it, whatever the shape (docs/speed.md)."""


@dataclass
class Meter:
    """What this rank has sent: (channel, phase, operation, link) -> [count, bytes]."""

    phase: str = "forward"
    goes_to: dict[str, int] = field(default_factory=dict)
    """The global rank that the hops of a channel go to."""
    sent: dict[tuple[str, str, str, str], list[int]] = field(default_factory=dict)

    def add(self, channel: str, operation: str, link: str, size_bytes: int, count: int = 1) -> None:
        entry = self.sent.setdefault((channel, self.phase, operation, link), [0, 0])
        entry[0] += count
        entry[1] += size_bytes

    def clear(self) -> None:
        self.sent.clear()


class Communicator:
    """One rank's access to a group of ranks. Ranks below are positions in that group."""

    group: Any = None
    """The process group; None where torch.distributed is not in use."""

    def __init__(
        self, group: Any = None, *, ranks_per_host: int | None = None, hops: str = "nccl",
        hosts: Sequence[int] | None = None, request: str = "a communicator", problem: Exception | None = None,
    ) -> None:  # fmt: skip
        """``group``: a process group or a DeviceMesh of one dimension; None is the world.

        ``hops``: what carries the hops of rings within a host, of `HOPS`. ``hosts`` numbers the host of every global
        rank where the launcher's variables do not tell (see `Hosts`). ``request`` is what this rank was asked for, and
        ``problem`` why it cannot do it: collective, the first time for a group and request. Raises `Unsupported` on
        every
        rank where one rank cannot, or where they do not ask for the same; ``problem`` itself where it is given.
        """
        self.hops = hops
        self.can_copy = False
        """Whether ``auto`` may mean copy engines: all ranks can, and see each other's memory."""
        self.meter = Meter()
        self.rank, self.size, self.token = 0, 1, ""
        self._ranks = [0]
        self.hosts = Hosts({0: 0})
        self.processes: dict[int, int | None] = {}
        self.recipe: Any = None
        """How a strategy over the world is made again, as `object.__reduce__` says it."""
        world_size = dist.get_world_size() if _initialised() else 1
        problem = problem or _problem(world_size, ranks_per_host, hops, hosts)
        if _initialised():
            self.group = found = _process_group(group)
            self.rank, self.size = dist.get_rank(found), dist.get_world_size(found)
            self._ranks = dist.get_process_group_ranks(found)
            self._agree(f"{request}, {ranks_per_host=}, {hops=}, {hosts=}", problem)
            self.hosts = Hosts.from_arguments(world_size, ranks_per_host, hosts) or self.hosts
        elif problem is not None:
            raise problem

    def _agree(self, request: str, problem: Exception | None) -> None:
        try:
            agreed = perform_handshake(self.group, request, None if problem is None else str(problem))
        except Unsupported as refusal:
            raise (problem or refusal) from None
        self.token, self.hosts, self.processes = agreed.token, Hosts(agreed.hosts), agreed.processes
        self.can_copy = agreed.can_copy

    def check_same_call(self, call: str) -> None:
        """As `agreement.agree_on_call`, but while a CUDA graph is captured, in which no rank can ask another."""
        # Not so where CUDA has not begun, nor in a process forked after it has, which may not ask.
        begun: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        captures = begun and torch.cuda.is_current_stream_capturing()
        if self.size > 1 and self.group is not None and not captures:
            check_same_call(self.group, call)

    @property
    def is_world(self) -> bool:
        """Whether these are all ranks that there are."""
        return not _initialised() or self.size == dist.get_world_size()

    @property
    def carried_by(self) -> str:
        """What has carried hops within a host, or will: ``nccl`` or ``copy``; of ``auto``, as far as is known."""
        copied = any(operation == "copy" for _, _, operation, _ in self.meter.sent)
        return "copy" if self.hops == "copy" or copied else "nccl"

    def global_rank(self, rank: int) -> int:
        """The global rank of a position in this group."""
        return self._ranks[rank]

    def ranks_per_host(self) -> int:
        """How many ranks of this group share a host, if every host has as many and they are neighbours; else all."""
        return self.hosts.per_host(self._ranks)

    def ring(
        self, channel: str, members: Sequence[int] | None = None, *, shares: HopRing | None = None, keeps: bool = False
    ) -> HopRing:
        """A ring over ``members`` (all ranks of the group where None).

        ``shares`` names a ring of the same members whose process group this one uses: their hops then follow each
        other. With ``keeps``, what arrives may be used for as long as it is wanted, also on other streams. Every rank
        of the group must ask for its own rings in the same order.
        """
        members = list(range(self.size)) if members is None else list(members)
        group = self._group_of(channel, members) if shares is None else shares.group
        return HopRing(channel, members, group, self, keeps=keeps)

    def collective(self, channel: str, members: Sequence[int] | None = None) -> Collective:
        """A channel for collectives over ``members``, as `ring` makes one for hops."""
        members = list(range(self.size)) if members is None else list(members)
        return Collective(channel, members, self._group_of(channel, members), self)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The ``tensor`` of every rank, in rank order (for checks and `unshard`: not counted as traffic)."""
        if self.size == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(gathered, tensor.contiguous(), group=self.group)
        return gathered

    def _group_of(self, channel: str, members: Sequence[int]) -> dist.ProcessGroup | None:
        if len(members) == 1:
            return None
        return process_group(channel, tuple(self._ranks[member] for member in members), self.token, self.group)


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _process_group(group: Any) -> Any:
    """The process group of ``group``. Raises `Unsupported` on a rank outside it, and for a mesh of several
    dimensions."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = ", ".join(repr(name) for name in group.mesh_dim_names or ())
            raise Unsupported(
                f"a mesh of {group.ndim} dimensions: give one of them, as mesh[NAME] of {names or 'its names'}"
            )
        group = group.get_group() if group.get_coordinate() is not None else dist.GroupMember.NON_GROUP_MEMBER
    if group is not None and dist.get_rank(group) < 0:
        raise Unsupported(f"rank {dist.get_rank()} is not in the group: only its members can have a strategy over it")
    return dist.group.WORLD if group is None else group


def _problem(world_size: int, ranks_per_host: int | None, hops: str, hosts: Sequence[int] | None) -> Unsupported | None:
    """Why this rank cannot do what is asked; None where it can."""
    if hops not in HOPS:
        return Unsupported(f"hops {hops!r}: write one of {', '.join(HOPS)}")
    problem = can_copy() if hops == "copy" else None
    if problem:
        return Unsupported(f"hops by copy engine {problem}")
    try:
        Hosts.from_arguments(world_size, ranks_per_host, hosts)
    except Unsupported as refusal:
        return refusal
    return None
