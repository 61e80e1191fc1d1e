"""Process groups of the channels: each is made once, under a name that only its members need to know.

torch names a group that only its members make after its ranks and the number of groups in this process. Members with
different numbers of groups would wait for each other forever. Here the name comes from the channel, the ranks and a
token that the members share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..errors import RankRaised

SUBGROUP = "cp"
"""Name of process groups of some ranks that strategies are created over, beside those of channels."""
waiting: set[object] = set()
"""Transfers that this process waits for."""
stopped: dict[str, str] = {}
"""Why the groups of these names make no call until they have recovered; `passes` keeps it."""
_UNUSED_TAG = 2**30
_AT_ONCE = timedelta(milliseconds=1)

_groups: dict[tuple[str, tuple[int, ...], str], dist.ProcessGroup] = {}
_groups_world: dist.ProcessGroup | None = None


def process_group(channel: str, ranks: tuple[int, ...], token: str, within: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the process group of a channel over global ``ranks``; it is made once, because communicators are costly.

    Strategies over the same group, ``within``, share it. Strategies over different groups do not: different threads
    may call them. Collective over ``ranks`` the first time; all must pass the same ``token``.
    """
    global _groups_world
    if _groups_world is not dist.group.WORLD:
        # torch.distributed was shut down and started again: the old groups are invalid.
        _groups.clear()
        _groups_world = dist.group.WORLD
    key = (channel, ranks, within.group_name)
    if key not in _groups:
        _groups[key] = _make_group(channel, ranks, token)
    return _groups[key]


def raise_if_stopped(group_name: str) -> None:
    """Raise `RankRaised` where a rank of the group has raised in a call: those that wait for it need not any more."""
    if group_name in stopped:
        raise RankRaised(stopped[group_name])


def channel_groups(within: str) -> list[dist.ProcessGroup]:
    """Return the process groups of the channels of the group named ``within``; subgroups of ranks are not channels."""
    return [group for (channel, _, name), group in list(_groups.items()) if name == within and channel != SUBGROUP]


def abort_channels(within: str) -> None:
    """Abort the communicators of the channels of the group named ``within``, so that nothing waits in them."""
    groups = channel_groups(within)
    with _aborting_together(groups):
        for group in groups:
            # A backend may be unable to abort, and an older torch does not offer it.
            with suppress(RuntimeError, AttributeError):
                group.abort()


def close_gloo(within: str) -> None:
    """Close all connections over gloo of the channels of the group named ``within``, so that this rank's waits end.

    gloo cannot abort, but does this where a transfer exceeds its timeout. A connection that a peer closes in the middle
    of a message leaves a wait for it without end, so that nobody may close them who is not waiting.
    """
    for group in channel_groups(within):
        for step in range(1, group.size() if backend_for("cpu", group) == "gloo" else 1):
            with suppress(RuntimeError):  # the timeout, or a peer whose connection is closed already
                never = torch.empty(1, device="cpu")
                group.recv([never], (group.rank() + step) % group.size(), _UNUSED_TAG).wait(_AT_ONCE)


def forget_channels(within: str) -> None:
    """Forget the aborted process groups of the channels of the group named ``within``: the next use makes new ones."""
    for key, group in list(_groups.items()):
        if key[2] == within and key[0] != SUBGROUP:
            del _groups[key]
            with suppress(RuntimeError, ValueError):
                c10d._abort_process_group(group)  # also removes it from torch's tables


@contextmanager
def _aborting_together(groups: list[dist.ProcessGroup]) -> Iterator[None]:
    """Abort NCCL's communicators in one operation: aborting one may wait for a kernel of another that hangs, too."""
    nccl: Any = None
    for group in groups[:1]:
        with suppress(RuntimeError, AttributeError):
            backend: Any = group._get_backend(torch.device("cuda"))
            backend._group_start()
            nccl = backend
    try:
        yield
    finally:
        if nccl is not None:
            nccl._group_end()


def backend_for(device_type: str, group: dist.ProcessGroup | None = None) -> str | None:
    """Return the backend for tensors of a device type; None where there is none.

    The group's own backend name is not enough: it is "undefined" where none was named, as init_device_mesh does.
    """
    pairs = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return pairs.get(device_type)


def uses_nccl(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether NCCL is the backend for GPU tensors."""
    return torch.cuda.is_available() and backend_for("cuda", group) == "nccl"


def _make_group(channel: str, ranks: tuple[int, ...], token: str) -> dist.ProcessGroup:
    # `new_group` is not used, because it chooses the name itself.
    world: Any = dist.group.WORLD
    backend, store = c10d._world.pg_map[world]
    digest = hashlib.sha1(repr((channel, ranks, token)).encode(), usedforsecurity=False).hexdigest()
    with _not_split_from(world):
        make: Any = c10d._new_process_group_helper
        group, _ = make(
            len(ranks), ranks.index(dist.get_rank()), list(ranks), backend, store, f"ringprof:{channel}:{digest}",
            backend_options=_options(), timeout=timeout(), group_desc=f"ringprof:{channel}",
        )  # fmt: skip
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    result: dist.ProcessGroup = group
    return result


@contextmanager
def _not_split_from(world: Any) -> Iterator[None]:
    """Make new groups without splitting the communicator of ``world``, which would need every rank of the world."""
    bound = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


def timeout() -> timedelta:
    """Return the timeout of the default group, so that a hanging hop ends when the user wants, not earlier."""
    world: Any = dist.group.WORLD
    default = timedelta(minutes=10 if uses_nccl() else 30)
    try:
        configured = world._get_backend(torch.device("cuda" if uses_nccl() else "cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return default
    return configured if isinstance(configured, timedelta) else default


def _options() -> object | None:
    """Return the NCCL options of a channel's communicator; None for other backends."""
    if not uses_nccl():
        return None
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout()
    # A hop posted while an attention kernel fills the GPU must not queue behind that kernel's remaining thread blocks.
    options.is_high_priority_stream = True
    return options
