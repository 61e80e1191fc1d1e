"""Tapes that are asked for several times: every rank's program is made once for each problem and cluster.

What `ringprof.foresee.advise` asks of a strategy again and again, with other links, other machines, fewer ranks, or
as many tokens a rank on more hosts, is the same program. At another length it is not: which kernels merge, and which
blocks are cut, depends on how long they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ringprof.foresee.links import Cluster
from ringprof.foresee.question import Question
from ringprof.foresee.tape import shared, tape_shared
from ringprof.record.tape.program import Program, Tape


class Tapes:
    """For `predict`, as `ringprof.foresee.tape.tape_of`, over and over: for one look at a problem."""

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[Tape, dict[int, Program]]] = {}

    def of(self, question: Question, cluster: Cluster, ranks: Sequence[int] | None) -> Tape:
        """The programs of ``ranks``. Raises as `tape_of`."""
        workload, params = shared(question, cluster)
        key = (
            question.strategy, workload, cluster.size, cluster.gpus_per_host, question.kernel, question.hops,
            tuple(sorted(params.items())), question.older,
        )  # fmt: skip
        asked = range(cluster.size) if ranks is None else ranks
        made, programs = self._kept.get(key, (None, {}))
        missing = [rank for rank in asked if rank not in programs]
        if missing or made is None:
            made = tape_shared(question, cluster, workload, params, missing)
            programs |= {program.rank: program for program in made.programs}
            self._kept[key] = made, programs
        return msgspec.structs.replace(made, programs=[programs[rank] for rank in asked])
