"""The tapes of a problem that is to be foreseen: which can be, and the programs of its ranks on a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ringprof.errors import UnfitWorkloadError, UsageError
from ringprof.foresee.links import Cluster
from ringprof.foresee.older import make_older
from ringprof.foresee.question import Question
from ringprof.json_object import JsonObject, Params
from ringprof.record.resolve import fits, load_strategy, strategy_errors, typed_params
from ringprof.record.tape.program import Tape
from ringprof.record.tape.rank import refusals, tape_rank
from ringprof.record.tape.recorder import Recorder
from ringprof.record.tape.seams import RecordingCommunicator
from ringprof.run import MOST_RANKS, Workload
from ringprof.strategies import find
from ringprof.strategies.base import Context
from ringprof.strategies.kernels import KERNELS

MOST_PACKED = 64
"""Ranks that documents are foreseen on: on more, fewer ranks stand for all, and these hold other documents."""
_MOST_ELEMENTS = 1 << 58
_LIKE = {"flash-attn-3": "flash-attn", "flash-attn-4": "flash-attn", "ffa": "flash-attn"}
"""Kernels of calibrations that others made, and which of ringprof's own takes and gives the like."""


def tape(
    strategy: str, workload: Workload, size: int, *, ranks_per_host: int | None = None, kernel: str = "cudnn",
    hops: str = "nccl", params: Params | None = None, ranks: Iterable[int] | None = None,
    older: bool = False,
) -> Tape:  # fmt: skip
    """The programs of ``ranks`` (all where None) of ``size``, of which ``ranks_per_host`` share a host.

    ``strategy`` is a bundled one's name or ``package.module:Class``; ``older`` is for `older.make_older`. Raises
    `UnknownStrategyError`, `UsageError` and `UnfitWorkloadError`; the last also where its course depends on values.
    """
    behaves = _LIKE.get(kernel, kernel)
    if behaves not in KERNELS:
        raise UsageError(f"no kernel {kernel!r}; there are: {', '.join(dict.fromkeys((*KERNELS, *_LIKE)))}")
    _refuse_unforeseen(workload)
    if workload.batch * workload.seq * workload.heads * workload.head_dim > _MOST_ELEMENTS:
        raise UnfitWorkloadError("a tensor of so many heads and tokens has more bytes than 64 bits count")
    per_host = ranks_per_host or size
    if size % per_host:
        raise UnfitWorkloadError(f"{per_host} ranks a host do not divide {size} ranks")
    kind = load_strategy(strategy)
    if kind.phase != "training":
        raise UnfitWorkloadError(f"strategy {strategy!r} is for {kind.phase}; training's attention alone is foreseen")
    given = kind.placed(size, per_host, **typed_params(kind, strategy, params or {}))
    with strategy_errors():
        reason = fits(kind, workload, size, given)
    if reason:
        raise UnfitWorkloadError(f"strategy {strategy!r} cannot run this: {reason}")
    programs, made = [], None
    for rank in range(size) if ranks is None else ranks:
        with refusals(strategy), strategy_errors():
            place, prepare = (rank, size, per_host), make_older if older else None
            program, made = tape_rank(kind, given, workload, place, behaves, hops, prepare=prepare)
        programs.append(program)
    assert made is not None
    return Tape(
        target=find(strategy).target, params=dict(made.parameters), layout=made.layout.name, workload=workload,
        programs=programs,
    )  # fmt: skip


def _refuse_unforeseen(workload: Workload) -> None:
    if workload.kv_length is not None or workload.layer is not None or workload.sequences is not None:
        raise UnfitWorkloadError(
            "training's attention alone is foreseen: no prefill, decode, whole layers and changing sizes"
        )
    if workload.softcap:
        raise UnfitWorkloadError("a softcap cannot be foreseen: no kernel is calibrated with one")


def tape_of(question: Question, cluster: Cluster, ranks: Sequence[int] | None) -> Tape:
    """For `predict`: a question's programs on its own cluster, or on a smaller one that stands for it."""
    return tape_shared(question, cluster, *shared(question, cluster), ranks)


def tape_shared(
    question: Question, cluster: Cluster, workload: Workload, params: Params, ranks: Sequence[int] | None
) -> Tape:
    """As `tape_of`, of what `shared` returned."""
    return tape(
        question.strategy, workload, cluster.size, ranks_per_host=cluster.gpus_per_host, kernel=question.kernel,
        hops=question.hops, params=params, ranks=ranks, older=question.older,
    )  # fmt: skip


def shared(question: Question, cluster: Cluster) -> tuple[Workload, Params]:
    """The problem and the parameters on the question's own cluster, or on a smaller one that stands for it.

    There every rank has the same share of the sequence, and the parameters that the whole cluster gave the strategy are
    kept, as far as they fit.
    """
    size, params, workload = question.cluster.size, dict(question.params), question.workload
    _refuse_unforeseen(workload)
    if size > MOST_RANKS:
        raise UnfitWorkloadError(f"{size} ranks cannot be foreseen: at most {MOST_RANKS}")
    if workload.seq < size:
        raise UnfitWorkloadError(f"{workload.seq} tokens on {size} ranks are less than one each")
    if cluster.size != size:
        if workload.documents is not None:
            raise UnfitWorkloadError(f"packed documents on {size} ranks cannot be foreseen: on {MOST_PACKED} at most")
        workload = msgspec.structs.replace(workload, seq=workload.seq // size * cluster.size)
        params = _fitting(question, workload, cluster)
    return workload, params


def _fitting(question: Question, workload: Workload, cluster: Cluster) -> JsonObject:
    """The whole cluster's parameters, without a number that follows from its size: a ring degree, a window of all.

    Raises `UnfitWorkloadError` where fewer ranks cannot have those, or would have rings and groups that lie otherwise
    over the hosts.
    """
    kind = load_strategy(question.strategy)
    typed = typed_params(kind, question.strategy, dict(question.params))
    made, spread = _arranged(question, question.cluster, typed)
    derived = (name for name, value in made.items() if type(value) is int and name not in typed)
    numbers = sorted(derived, key=lambda name: int(made[name]))
    # The largest number is the likeliest to follow from the number of ranks; what the user gave stays.
    without = [{key: value for key, value in made.items() if key != name} for name in reversed(numbers)]
    for params in (typed, made, *without):
        placed = kind.placed(cluster.size, cluster.gpus_per_host, **params)
        if fits(kind, workload, cluster.size, placed) is None and _arranged(question, cluster, placed)[1] == spread:
            return dict(params)
    given = ", ".join(f"{name}={value}" for name, value in made.items())
    raise UnfitWorkloadError(
        f"strategy {question.strategy!r}: {cluster.size} ranks cannot stand for {question.cluster.size} with {given}"
    )


def _arranged(question: Question, cluster: Cluster, params: JsonObject) -> tuple[JsonObject, dict[str, int]]:
    """The parameters that a strategy takes on a cluster, and how its channels lie over the hosts."""
    comm = RecordingCommunicator(Recorder(), 0, cluster.size, cluster.gpus_per_host, question.hops)
    with strategy_errors():
        made = load_strategy(question.strategy)(Context(comm, question.kernel), **params)
    return made.parameters, comm.spread
