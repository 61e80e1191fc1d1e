"""Process groups of the channels: made once each, with NCCL's settings for hops."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

_groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
_groups_world: dist.ProcessGroup | None = None


def process_group(channel: str, ranks: tuple[int, ...], hops: bool) -> dist.ProcessGroup:
    """The process group of a channel, made once: communicators are costly, and many strategies may come and go."""
    global _groups_world
    if _groups_world is not dist.group.WORLD:
        # torch.distributed was shut down and started again: the old groups are dead.
        _groups.clear()
        _groups_world = dist.group.WORLD
    key = (channel, ranks)
    if key not in _groups:
        _groups[key] = dist.new_group(
            list(ranks),
            use_local_synchronization=True,
            pg_options=_options(hops),
            timeout=_timeout(),
            group_desc=f"ringprof:{channel}",
        )
    return _groups[key]


def _timeout() -> timedelta | None:
    """The default group's own, so that a hanging hop ends when the user said, not earlier; None where it hides it."""
    world = dist.group.WORLD
    device = torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")
    try:
        found = world._get_backend(device).options._timeout if world is not None else None
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, timedelta) else None


def _options(hops: bool) -> object | None:
    """NCCL settings of a channel's communicator; None for other backends."""
    if "nccl" not in dist.get_backend():
        return None
    options = dist.ProcessGroupNCCL.Options()
    # A hop posted while a flash kernel fills the device must not queue behind the rest of its blocks.
    options.is_high_priority_stream = True
    ctas = os.environ.get("RINGPROF_HOP_CTAS", "")
    if hops and ctas.isdigit() and int(ctas):
        options.config.max_ctas = int(ctas)
    return options
