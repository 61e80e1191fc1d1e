"""Tapes that are asked for several times: every rank's program is made once for each problem and cluster.

What `ringprof.prediction.advise` asks of a strategy again and again, with other links, other machines, fewer ranks, or
as many tokens a rank on more hosts, is the same program. At another length it is not: which kernels merge, and which
blocks are cut, depends on how long they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ringprof.prediction.network import Cluster
from ringprof.prediction.query import Query
from ringprof.prediction.schedules import shared, stand_in_schedule
from ringprof.record.dryrun.schedule import Program, Schedule


class ScheduleCache:
    """For `predict`, as `ringprof.prediction.schedules.tape_of`, over and over: for one look at a problem."""

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[Schedule, dict[int, Program]]] = {}

    def of(self, query: Query, cluster: Cluster, ranks: Sequence[int] | None) -> Schedule:
        """The programs of ``ranks``. Raises as `schedule_of`."""
        workload, params = shared(query, cluster)
        key = (
            query.strategy, workload, cluster.size, cluster.gpus_per_host, query.kernel, query.hops,
            tuple(sorted(params.items())), query.older,
        )  # fmt: skip
        asked = range(cluster.size) if ranks is None else ranks
        made, programs = self._kept.get(key, (None, {}))
        missing = [rank for rank in asked if rank not in programs]
        if missing or made is None:
            made = stand_in_schedule(query, cluster, workload, params, missing)
            programs |= {program.rank: program for program in made.programs}
            self._kept[key] = made, programs
        return msgspec.structs.replace(made, programs=[programs[rank] for rank in asked])
