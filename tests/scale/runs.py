"""Rings of many ranks, made of the real ranks of a small one: what is true of each is known from the small run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from ringprof.trace.columns import CommRecord, Trace
from ringprof.trace.kineto import read_trace
from ringprof.trace.reduced import reduce_trace
from tests.paths import TRACES

RING = TRACES / "h200x4-zigzag-65536"


def real_ring() -> list[Trace]:
    """The ranks of a small recorded ring."""
    return [read_trace(path) for path in sorted(RING.glob("rank*.json.gz"))]


def as_rank(trace: Trace, rank: int, world: int, host: str | None = None, later_ns: int = 0) -> Trace:
    """The trace of one rank of a ring, as that of ``rank`` in a ring of ``world``; its clock ``later_ns`` late."""
    small, own = trace.world_size or 1, trace.rank or 0
    everyone = tuple(range(world))

    def peer(number: int | None) -> int | None:
        # One step round the small ring is one step round the large one.
        step = 0 if number is None else (number - own + small // 2) % small - small // 2
        return None if number is None else (rank + step) % world

    def record(one: CommRecord) -> CommRecord:
        return replace(
            one,
            group_ranks=everyone if one.group_ranks else None,
            group_size=world if one.group_size else None,
            source_rank=peer(one.source_rank),
            destination_rank=peer(one.destination_rank),
        )

    moved: dict[str, Any] = {name: _later(getattr(trace, name), later_ns) for name in _TIMED}
    return replace(
        trace,
        rank=rank,
        world_size=world,
        host=host,
        groups=dict.fromkeys(trace.groups, everyone),
        collectives=[record(one) for one in trace.collectives],
        **moved,
    )


_TIMED = ("activities", "launches", "annotations", "device_annotations", "operators", "comm_records")


def _later(part: Any, by_ns: int) -> Any:
    return msgspec.structs.replace(part, start_ns=part.start_ns + by_ns, end_ns=part.end_ns + by_ns)


def write_ring(folder: Path, world: int, per_host: int | None = None, late_ns: int = 0) -> list[Path]:
    """A ring of ``world`` ranks as reduced traces; every host's clock is ``late_ns`` later than the one's before."""
    ranks, paths = real_ring(), []
    for rank in range(world):
        host = None if per_host is None else f"host{rank // per_host}"
        late = 0 if per_host is None else late_ns * (rank // per_host)
        trace = as_rank(ranks[rank % len(ranks)], rank, world, host, late)
        paths.append(folder / f"rank{rank}.ringprof")
        paths[-1].write_bytes(reduce_trace(trace))
    return paths
