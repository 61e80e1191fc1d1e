"""Profile a part of one's own program."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

from ringprof.record.capture import capture as profile
from ringprof.run import Workload
from ringprof.trace.reduced import reduce_file


def capture(
    folder: str | os.PathLike[str], workload: Workload | None = None, *, name: str | None = None
) -> AbstractContextManager[None]:
    """Profile a block of your own program on every rank that runs it; see `ringprof.record.capture.capture`.

    Every rank also reduces its own trace, so that reports of many ranks are quick.
    """
    return profile(folder, workload, name=name, reduce=reduce_file)
