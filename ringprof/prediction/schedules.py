"""The tapes of a problem that is to be foreseen: which can be, and the programs of its ranks on a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ringprof.errors import UnsupportedWorkloadError, UsageError
from ringprof.json_object import JsonObject, Params
from ringprof.prediction.legacy_schedules import use_legacy_schedule
from ringprof.prediction.network import Cluster
from ringprof.prediction.query import Query
from ringprof.record.dryrun.dispatch import Recorder
from ringprof.record.dryrun.fakes import RecordingCommunicator
from ringprof.record.dryrun.run import dry_run_rank, refusals
from ringprof.record.dryrun.schedule import Schedule
from ringprof.record.resolve import load_strategy, strategy_errors, typed_params, why_unsupported
from ringprof.run import MOST_RANKS, Workload
from ringprof.strategies import find
from ringprof.strategies.base import Context
from ringprof.strategies.kernels.builtin import KERNELS

MOST_PACKED = 64
"""Ranks that documents are foreseen on: on more, fewer ranks stand for all, and these hold other documents."""
_MOST_ELEMENTS = 1 << 58
_LIKE = {"flash-attn-3": "flash-attn", "flash-attn-4": "flash-attn", "ffa": "flash-attn"}
"""Kernels of calibrations that others made, and which of ringprof's own takes and gives the like."""


def schedule(
    strategy: str, workload: Workload, size: int, *, ranks_per_host: int | None = None, kernel: str = "cudnn",
    hops: str = "nccl", params: Params | None = None, ranks: Iterable[int] | None = None,
    older: bool = False,
) -> Schedule:  # fmt: skip
    """The programs of ``ranks`` (all where None) of ``size``, of which ``ranks_per_host`` share a host.

    ``strategy`` is a bundled one's name or ``package.module:Class``; ``older`` is for `older.make_older`. Raises
    `UnknownStrategyError`, `UsageError` and `UnsupportedWorkloadError`; the last also where its course depends on
    values.
    """
    behaves = _LIKE.get(kernel, kernel)
    if behaves not in KERNELS:
        raise UsageError(f"no kernel {kernel!r}; there are: {', '.join(dict.fromkeys((*KERNELS, *_LIKE)))}")
    _refuse_unforeseen(workload)
    if workload.batch * workload.seq * workload.heads * workload.head_dim > _MOST_ELEMENTS:
        raise UnsupportedWorkloadError("a tensor of so many heads and tokens has more bytes than 64 bits count")
    per_host = ranks_per_host or size
    if size % per_host:
        raise UnsupportedWorkloadError(f"{per_host} ranks a host do not divide {size} ranks")
    kind = load_strategy(strategy)
    if kind.phase != "training":
        raise UnsupportedWorkloadError(
            f"strategy {strategy!r} is for {kind.phase}; training's attention alone is foreseen"
        )
    given = kind.with_placement(size, per_host, **typed_params(kind, strategy, params or {}))
    with strategy_errors():
        reason = why_unsupported(kind, workload, size, given)
    if reason:
        raise UnsupportedWorkloadError(f"strategy {strategy!r} cannot run this: {reason}")
    programs, made = [], None
    for rank in range(size) if ranks is None else ranks:
        with refusals(strategy), strategy_errors():
            place, prepare = (rank, size, per_host), use_legacy_schedule if older else None
            program, made = dry_run_rank(kind, given, workload, place, behaves, hops, prepare=prepare)
        programs.append(program)
    assert made is not None
    return Schedule(
        target=find(strategy).target, params=dict(made.parameters), layout=made.layout.name, workload=workload,
        programs=programs,
    )  # fmt: skip


def _refuse_unforeseen(workload: Workload) -> None:
    if workload.kv_length is not None or workload.layer is not None or workload.sequences is not None:
        raise UnsupportedWorkloadError(
            "training's attention alone is foreseen: no prefill, decode, whole layers and changing sizes"
        )
    if workload.softcap:
        raise UnsupportedWorkloadError("a softcap cannot be foreseen: no kernel is calibrated with one")


def schedule_of(query: Query, cluster: Cluster, ranks: Sequence[int] | None) -> Schedule:
    """For `predict`: a question's programs on its own cluster, or on a smaller one that stands for it."""
    return stand_in_schedule(query, cluster, *shared(query, cluster), ranks)


def stand_in_schedule(
    query: Query, cluster: Cluster, workload: Workload, params: Params, ranks: Sequence[int] | None
) -> Schedule:
    """As `schedule_of`, of what `shared` returned."""
    return schedule(
        query.strategy, workload, cluster.size, ranks_per_host=cluster.gpus_per_host, kernel=query.kernel,
        hops=query.hops, params=params, ranks=ranks, older=query.older,
    )  # fmt: skip


def shared(query: Query, cluster: Cluster) -> tuple[Workload, Params]:
    """The problem and the parameters on the question's own cluster, or on a smaller one that stands for it.

    There every rank has the same share of the sequence, and the parameters that the whole cluster gave the strategy are
    kept, as far as they fit.
    """
    size, params, workload = query.cluster.size, dict(query.params), query.workload
    _refuse_unforeseen(workload)
    if size > MOST_RANKS:
        raise UnsupportedWorkloadError(f"{size} ranks cannot be foreseen: at most {MOST_RANKS}")
    if workload.seq < size:
        raise UnsupportedWorkloadError(f"{workload.seq} tokens on {size} ranks are less than one each")
    if cluster.size != size:
        if workload.documents is not None:
            raise UnsupportedWorkloadError(
                f"packed documents on {size} ranks cannot be foreseen: on {MOST_PACKED} at most"
            )
        workload = msgspec.structs.replace(workload, seq=workload.seq // size * cluster.size)
        params = _fitting(query, workload, cluster)
    return workload, params


def _fitting(query: Query, workload: Workload, cluster: Cluster) -> JsonObject:
    """The whole cluster's parameters, without a number that follows from its size: a ring degree, a window of all.

    Raises `UnsupportedWorkloadError` where fewer ranks cannot have those, or would have rings and groups that lie
    otherwise
    over the hosts.
    """
    kind = load_strategy(query.strategy)
    typed = typed_params(kind, query.strategy, dict(query.params))
    made, spread = _arranged(query, query.cluster, typed)
    derived = (name for name, value in made.items() if type(value) is int and name not in typed)
    numbers = sorted(derived, key=lambda name: int(made[name]))
    # The largest number is the likeliest to follow from the number of ranks; what the user gave stays.
    without = [{key: value for key, value in made.items() if key != name} for name in reversed(numbers)]
    for params in (typed, made, *without):
        placed = kind.with_placement(cluster.size, cluster.gpus_per_host, **params)
        if (
            why_unsupported(kind, workload, cluster.size, placed) is None
            and _arranged(query, cluster, placed)[1] == spread
        ):
            return dict(params)
    given = ", ".join(f"{name}={value}" for name, value in made.items())
    raise UnsupportedWorkloadError(
        f"strategy {query.strategy!r}: {cluster.size} ranks cannot stand for {query.cluster.size} with {given}"
    )


def _arranged(query: Query, cluster: Cluster, params: JsonObject) -> tuple[JsonObject, dict[str, int]]:
    """The parameters that a strategy takes on a cluster, and how its channels lie over the hosts."""
    comm = RecordingCommunicator(Recorder(), 0, cluster.size, cluster.gpus_per_host, query.hops)
    with strategy_errors():
        made = load_strategy(query.strategy)(Context(comm, query.kernel), **params)
    return made.parameters, comm.spread
