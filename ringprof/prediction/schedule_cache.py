"""Schedule cache: every rank's program is created once per workload and cluster.

`ringprof.prediction.advise` asks for the same program with other links, other machines, fewer ranks, or as many tokens
per rank on more hosts. Another length needs a new program: the merge kernels and the division into blocks depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ringprof.prediction.network import Cluster
from ringprof.prediction.query import Query
from ringprof.prediction.schedules import stand_in_schedule, stand_in_workload
from ringprof.record.dryrun.schedule import Program, Schedule


class ScheduleCache:
    """Cached equivalent of `ringprof.prediction.schedules.schedule_of`, for one recommendation."""

    def __init__(self) -> None:
        self._schedules: dict[Any, tuple[Schedule, dict[int, Program]]] = {}

    def of(self, query: Query, cluster: Cluster, ranks: Sequence[int] | None) -> Schedule:
        """Return the programs of ``ranks`` (all if None). Raises like `schedule_of`."""
        workload, params = stand_in_workload(query, cluster)
        key = (
            query.strategy, workload, cluster.size, cluster.gpus_per_host, query.kernel, query.hops,
            tuple(sorted(params.items())), query.legacy_schedule,
        )  # fmt: skip
        wanted_ranks = range(cluster.size) if ranks is None else ranks
        known, programs = self._schedules.get(key, (None, {}))
        missing_ranks = [rank for rank in wanted_ranks if rank not in programs]
        if missing_ranks or known is None:
            known = stand_in_schedule(query, cluster, workload, params, missing_ranks)
            programs |= {program.rank: program for program in known.programs}
            self._schedules[key] = known, programs
        return msgspec.structs.replace(known, programs=[programs[rank] for rank in wanted_ranks])
