"""Memory over time: what each rank's allocators held, where the trace says so (``profile_memory=True``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ringprof.analysis.attribution import Attribution
from ringprof.trace.columns import NONE, Int64, distinct


class Held(NamedTuple):
    """What one allocator of one rank held, from each time on."""

    rank: int
    memory: str
    """``cuda 0``, or ``host``."""
    time_ns: Int64
    """Unix time by the rank's own clock."""
    allocated_bytes: Int64
    reserved_bytes: Int64
    """`NONE` where it is not told, as of the host."""

    def peak(self) -> int:
        """Place of the largest amount allocated."""
        return int(np.argmax(self.allocated_bytes))


def memory_of(attribution: Attribution) -> Iterator[Held]:
    """By rank; nothing where the traces do not say."""
    for rank in attribution.ranks:
        events = rank.classified.trace.memory
        for device in distinct(events.device).tolist():
            mine = events.device == device
            reserved = events.reserved_bytes[mine]
            yield Held(
                rank.rank,
                "host" if device == NONE else f"cuda {device}",
                events.start_ns[mine],
                events.allocated_bytes[mine],
                # The host's allocator keeps nothing, and is recorded with 0.
                np.full_like(reserved, NONE) if device == NONE else reserved,
            )
