"""Memory over time: bytes held by each rank's allocators, where the trace records them (``profile_memory=True``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ringprof.analysis.attribution import Attribution
from ringprof.trace.columns import NONE, Int64, distinct


class MemoryTimeline(NamedTuple):
    """Bytes held by one allocator of one rank over time; three arrays of equal length."""

    rank: int
    memory: str
    """Memory that the allocator manages: ``cuda 0``, or ``host``."""
    time_ns: Int64
    """Unix times by the rank's own clock, from which on the bytes are held."""
    allocated_bytes: Int64
    reserved_bytes: Int64
    """Bytes that the allocator reserves; `NONE` where they are not recorded, as for the host."""

    def peak(self) -> int:
        """Return the index of the largest allocated amount."""
        return int(np.argmax(self.allocated_bytes))


def memory_timelines(attribution: Attribution) -> Iterator[MemoryTimeline]:
    """Yield the memory timeline of every allocator, by rank; nothing where the traces record no memory."""
    for rank in attribution.ranks:
        events = rank.classified.trace.memory
        for device in distinct(events.device).tolist():
            of_device = events.device == device
            reserved = events.reserved_bytes[of_device]
            yield MemoryTimeline(
                rank.rank,
                "host" if device == NONE else f"cuda {device}",
                events.start_ns[of_device],
                events.allocated_bytes[of_device],
                # The host's allocator reserves nothing; the trace records 0.
                np.full_like(reserved, NONE) if device == NONE else reserved,
            )
