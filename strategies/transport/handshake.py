"""Handshake of the ranks of a group: they confirm that all ask for the same strategy or call, and learn their hosts.

There is one handshake per group and request. Every rank sends the others what it was asked for, why it cannot do it (if
so), and what its launcher says about its host. All ranks then reach the same result, or all refuse with one line.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ..errors import Unsupported
from .copy_engine import can_copy, sees_peers
from .hosts import int_from_environment


@dataclass(frozen=True)
class HandshakeRequest:
    """The facts that one rank sends to the others. Numbers that its launcher does not provide are None."""

    rank: int
    """Global rank."""
    request: str
    problem: str | None
    """Why this rank cannot do what is asked; None if it can."""
    token: str
    host: str
    """Host name."""
    local_world_size: int | None
    local_rank: int | None
    node: int | None
    """Slurm's number of the host."""
    process: tuple[str, int] | None = None
    """(scope, process ID); the scope is the host's boot and PID namespace, in which the ID is valid."""
    can_copy: bool = False
    """Whether copy engines can carry this rank's hops, and its GPU can access those of the peers."""

    @classmethod
    def of_this_rank(cls, request: str, problem: str | None) -> HandshakeRequest:
        """Collect the facts about this rank."""
        return cls(
            dist.get_rank(), request, problem, uuid.uuid4().hex, socket.gethostname(),
            int_from_environment("LOCAL_WORLD_SIZE"), int_from_environment("LOCAL_RANK"),
            int_from_environment("SLURM_NODEID"), _process(), can_copy() is None and sees_peers(),
        )  # fmt: skip

    def first_on_host(self) -> int | None:
        """Return the first global rank on the host, as torchrun numbers ranks; None where the launcher did not say."""
        if self.local_rank is None or self.local_world_size is None or self.local_rank >= self.local_world_size:
            return None
        return self.rank - self.local_rank


@dataclass(frozen=True)
class Handshake:
    """The result of a handshake, equal on all ranks of the group except for ``processes``."""

    token: str
    """A unique name for this handshake."""
    hosts: dict[int, int]
    """The host of each global rank of the group, numbered from 0."""
    processes: dict[int, int | None]
    """Process ID by global rank; None where this rank cannot see the process."""
    can_copy: bool = False
    """Whether copy engines can carry the hops of every rank."""


WARNED_AFTER_S = 30.0
"""Seconds that a rank waits for the others before it warns: they may be making another call."""

_handshakes: WeakKeyDictionary[Any, dict[str, Handshake]] = WeakKeyDictionary()
"""Completed handshakes by group and request."""
_calls: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""Calls that all ranks of a group are known to make alike."""


def perform_handshake(group: dist.ProcessGroup, request: str, problem: str | None = None) -> Handshake:
    """Return the handshake of ``group``'s ranks on ``request``: collective the first time, then from memory.

    ``problem`` is why this rank cannot do what is asked. Raises `Unsupported` on every rank where one rank has a
    problem, where the ranks ask for different things, and where their launchers contradict each other.
    """
    known = _handshakes.setdefault(group, {})
    if request not in known or problem is not None:
        requests = _exchange_requests(group, request, problem)
        known[request] = Handshake(
            requests[0].token, assign_hosts(requests, dist.get_world_size()), _processes(requests),
            all(rank.can_copy for rank in requests),
        )  # fmt: skip
    return known[request]


def check_same_call(group: dist.ProcessGroup, call: str) -> None:
    """Check that all ranks of a group make the same call: collective the first time for a group and ``call``.

    ``call`` describes the call in parts separated by "; ". Raises `Unsupported` where the ranks make different calls,
    and names the parts that differ.
    """
    known = _calls.setdefault(group, set())
    if call not in known:
        require_same_call(group, call)
        known.add(call)


def forget_calls(group: dist.ProcessGroup) -> None:
    """Forget which calls the ranks of a group make alike."""
    _calls.pop(group, None)


def require_same_call(group: dist.ProcessGroup, call: str, problem: str | None = None) -> None:
    """Check that all ranks of a group make the same ``call``, described as for `check_same_call`. Collective.

    ``problem`` is why this rank cannot make the call. Raises `Unsupported` on every rank where one rank has a problem,
    and where the calls differ.
    """
    try:
        _exchange_requests(group, call, problem)
    except RuntimeError as error:
        raise Unsupported(
            "this rank comes with a call that it has not made before, and another rank has not, or has ended: all must"
            f" make the same ({problem or call}; {' '.join(str(error).split())[:200]})"
        ) from error


def _exchange_requests(group: dist.ProcessGroup, request: str, problem: str | None) -> list[HandshakeRequest]:
    """Gather the requests of all ranks. Raises `Unsupported` on every rank where one has a problem or they differ."""
    requests: list[Any] = [None] * dist.get_world_size(group)
    message = f"rank {dist.get_rank()} waits for the others to ask for the same, as all must the first time: {request}"
    warning = threading.Timer(WARNED_AFTER_S, warnings.warn, (message,))
    warning.daemon = True
    warning.start()
    try:
        dist.all_gather_object(requests, HandshakeRequest.of_this_rank(request, problem), group=group)
    finally:
        warning.cancel()
    _refuse_differences(requests)
    return requests


def assign_hosts(ranks: Sequence[HandshakeRequest], world_size: int) -> dict[int, int]:
    """Number the host of each rank from 0: by the launcher where it provides it on all ranks, else by host name.

    torchrun provides each rank's number on the host, or at least the host's number of ranks; Slurm provides the number
    of the host. Raises `Unsupported` where hosts of unequal size cannot be told apart.
    """
    firsts = [rank.first_on_host() for rank in ranks]
    sizes = [rank.local_world_size for rank in ranks]
    nodes = [rank.node for rank in ranks]
    if None not in firsts:
        keys: list[Any] = firsts
    elif None not in sizes:
        keys = _hosts_by_size({rank.rank: size for rank, size in zip(ranks, sizes, strict=True) if size}, world_size)
    else:
        keys = nodes if None not in nodes else [rank.host for rank in ranks]
    return {rank.rank: number for rank, number in zip(ranks, numbered(keys), strict=True)}


def numbered(keys: Sequence[Any]) -> list[int]:
    """Number the distinct keys from 0 in the order of their first occurrence; return the number of each key."""
    order = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [order[key] for key in keys]


def _hosts_by_size(sizes: dict[int, int], world_size: int) -> list[int]:
    """Return the first rank on each rank's host, from how many consecutive ranks share it."""
    if len(set(sizes.values())) == 1:
        (size,) = set(sizes.values())
        return [rank // size * size for rank in sizes]
    firsts: dict[int, int] = {}
    for rank in range(world_size):
        if rank not in sizes:
            raise Unsupported(
                f"the ranks say LOCAL_WORLD_SIZE {' and '.join(map(str, sorted(set(sizes.values()))))}, and some of the"
                " world are not in the group: which share a host cannot be told (give ranks_per_host, or LOCAL_RANK)"
            )
        start = firsts.get(rank - 1, rank)
        firsts[rank] = start if rank - start < sizes[start] else rank
    return [firsts[rank] for rank in sizes]


def _refuse_differences(ranks: Sequence[HandshakeRequest]) -> None:
    for rank in ranks:
        if rank.problem is not None:
            own = rank.rank == dist.get_rank()
            raise Unsupported(rank.problem if own else f"rank {rank.rank} refused: {rank.problem}")
    for rank in ranks:
        if rank.request != ranks[0].request:
            pairs = list(zip(ranks[0].request.split("; "), rank.request.split("; "), strict=False))
            first, other = ("; ".join(pair[i] for pair in pairs if pair[0] != pair[1]) for i in range(2))
            raise Unsupported(
                f"the ranks do not ask for the same: rank {ranks[0].rank} for {first}, rank {rank.rank} for {other}"
            )


def _process() -> tuple[str, int] | None:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return f"{boot} {os.readlink('/proc/self/ns/pid')}", os.getpid()
    except OSError:
        return None


def _processes(ranks: Sequence[HandshakeRequest]) -> dict[int, int | None]:
    own = _process()
    return {
        rank.rank: rank.process[1] if rank.process and own and rank.process[0] == own[0] else None for rank in ranks
    }
