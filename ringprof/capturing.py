"""Profile a part of one's own program."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ringprof.record.request import need
from ringprof.run import Workload
from ringprof.trace.reduced import reduce_file

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ringprof.strategies.base import Strategy


def capture(
    folder: str | os.PathLike[str],
    workload: Workload | None = None,
    *,
    name: str | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    strategy: Strategy | Sequence[Strategy] | None = None,
) -> AbstractContextManager[None]:
    """Profile a block of your own program on every rank that runs it; see `ringprof.record.capture.capture`.

    Every rank also reduces its own trace, so that reports of many ranks are quick. Raises `MissingExtraError` without
    torch.
    """
    need("torch")
    from ringprof.record.capture import capture as profile  # here, because it imports torch

    return profile(folder, workload, name=name, group=group, strategy=strategy, reduce=reduce_file)
