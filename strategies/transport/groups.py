"""Process groups of the channels: made once each, under names that only their members need to agree on.

torch names a group that only its members make after its ranks and the number of groups that this process knows, and
members that know different numbers wait for each other for ever. Here the name comes from the channel, the ranks and a
token that the members have agreed on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_groups: dict[tuple[str, tuple[int, ...], str], dist.ProcessGroup] = {}
_groups_world: dist.ProcessGroup | None = None


def process_group(channel: str, ranks: tuple[int, ...], token: str, within: dist.ProcessGroup) -> dist.ProcessGroup:
    """The process group of a channel, made once: communicators are costly, and many strategies may come and go.

    Strategies over one group, ``within``, share it; those over another do not, and may be called by another thread.
    Collective over ``ranks``, global ones, the first time; all must give the same ``token``.
    """
    global _groups_world
    if _groups_world is not dist.group.WORLD:
        # torch.distributed was shut down and started again: the old groups are dead.
        _groups.clear()
        _groups_world = dist.group.WORLD
    key = (channel, ranks, within.group_name)
    if key not in _groups:
        _groups[key] = _made(channel, ranks, token)
    return _groups[key]


def backend_for(device_type: str, group: dist.ProcessGroup | None = None) -> str | None:
    """The backend that carries a device's tensors; None where none does.

    A group's own backend is "undefined" where the user named none, as init_device_mesh does not.
    """
    pairs = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return pairs.get(device_type)


def uses_nccl(group: dist.ProcessGroup | None = None) -> bool:
    """Whether NCCL carries the GPU's tensors."""
    return torch.cuda.is_available() and backend_for("cuda", group) == "nccl"


def _made(channel: str, ranks: tuple[int, ...], token: str) -> dist.ProcessGroup:
    # Not new_group: it chooses the name itself.
    world: Any = dist.group.WORLD
    backend, store = c10d._world.pg_map[world]
    digest = hashlib.sha1(repr((channel, ranks, token)).encode(), usedforsecurity=False).hexdigest()
    with _not_split_from(world):
        make: Any = c10d._new_process_group_helper
        group, _ = make(
            len(ranks), ranks.index(dist.get_rank()), list(ranks), backend, store, f"ringprof:{channel}:{digest}",
            backend_options=_options(), timeout=timeout(), group_desc=f"ringprof:{channel}",
        )  # fmt: skip
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    made: dist.ProcessGroup = group
    return made


@contextmanager
def _not_split_from(world: Any) -> Iterator[None]:
    """Make a communicator of its own: splitting the world's would need every rank of the world."""
    bound = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


def timeout() -> timedelta:
    """The default group's own, so that a hanging hop ends when the user said, not earlier."""
    world: Any = dist.group.WORLD
    default = timedelta(minutes=10 if uses_nccl() else 30)
    try:
        found = world._get_backend(torch.device("cuda" if uses_nccl() else "cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return default
    return found if isinstance(found, timedelta) else default


def _options() -> object | None:
    """NCCL settings of a channel's communicator; None for other backends."""
    if not uses_nccl():
        return None
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout()
    # A hop posted while a flash kernel fills the device must not queue behind the rest of its blocks.
    options.is_high_priority_stream = True
    return options
