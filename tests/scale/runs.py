"""Rings of many ranks built from the real ranks of a small one, whose figures are known."""

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
    """Read the ranks of a small recorded ring."""
    return [read_trace(path) for path in sorted(RING.glob("rank*.json.gz"))]


def as_rank(trace: Trace, rank: int, world: int, host: str | None = None, delay_ns: int = 0) -> Trace:
    """Return a trace as that of ``rank`` in a ring of ``world`` ranks, its clock ahead by ``delay_ns``."""
    small_world, own_rank = trace.world_size or 1, trace.rank or 0
    everyone = tuple(range(world))

    def peer(number: int | None) -> int | None:
        # One step around the small ring is one step around the large one.
        step = 0 if number is None else (number - own_rank + small_world // 2) % small_world - small_world // 2
        return None if number is None else (rank + step) % world

    def record(call: CommRecord) -> CommRecord:
        return replace(
            call,
            group_ranks=everyone if call.group_ranks else None,
            group_size=world if call.group_size else None,
            source_rank=peer(call.source_rank),
            destination_rank=peer(call.destination_rank),
        )

    shifted_columns: dict[str, Any] = {name: _shifted(getattr(trace, name), delay_ns) for name in _TIMED}
    return replace(
        trace,
        rank=rank,
        world_size=world,
        host=host,
        groups=dict.fromkeys(trace.groups, everyone),
        collectives=[record(call) for call in trace.collectives],
        **shifted_columns,
    )


_TIMED = ("activities", "launches", "annotations", "device_annotations", "operators", "comm_records")


def _shifted(columns: Any, by_ns: int) -> Any:
    return msgspec.structs.replace(columns, start_ns=columns.start_ns + by_ns, end_ns=columns.end_ns + by_ns)


def write_ring(folder: Path, world: int, per_host: int | None = None, late_ns: int = 0) -> list[Path]:
    """Write a ring of ``world`` ranks as reduced traces; each host's clock is ``late_ns`` ahead of the previous one."""
    ranks, paths = real_ring(), []
    for rank in range(world):
        host = None if per_host is None else f"host{rank // per_host}"
        late = 0 if per_host is None else late_ns * (rank // per_host)
        trace = as_rank(ranks[rank % len(ranks)], rank, world, host, late)
        paths.append(folder / f"rank{rank}.ringprof")
        paths[-1].write_bytes(reduce_trace(trace))
    return paths
