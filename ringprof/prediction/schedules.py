"""Dry runs for a prediction: the schedule of a query on its own cluster, or on a smaller one that stands for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MethodType
from typing import Any

import msgspec
from torch import Tensor

from ringprof.common.json_object import JsonObject, Params
from ringprof.dryrun.dispatch import Recorder
from ringprof.dryrun.fakes import DryRunNetwork, dry_run_communicator
from ringprof.dryrun.recurrences import dry_run_recurrence
from ringprof.dryrun.run import dry_run_rank, refuse_on_failure
from ringprof.dryrun.schedule import CommStart, Program, Schedule
from ringprof.errors import UnsupportedWorkloadError, UsageError, nearest
from ringprof.iteration.resolve import layout_options, load_strategy, strategy_errors, typed_params, why_unsupported
from ringprof.prediction.network import Cluster
from ringprof.prediction.query import Query
from ringprof.strategies import find
from ringprof.strategies.algorithms.ring import Ring
from ringprof.strategies.annotate import ring_step
from ringprof.strategies.base import AttentionCall, Context, Rows, Strategy, wire_type
from ringprof.strategies.kernels.kernel import Gradients
from ringprof.strategies.kernels.merge import Sum
from ringprof.strategies.kernels.registry import KERNELS
from ringprof.strategies.masks.layouts import ALL
from ringprof.strategies.recurrent.registry import STRATEGIES
from ringprof.strategies.recurrent.state_strategies import RecurrentStrategy
from ringprof.strategies.transport.gradient_ring import LocalGrads, add_and_cast_all, forward_grads
from ringprof.workload.workload import MOST_RANKS, Workload

MOST_PACKED = 64
"""Largest number of ranks for packed documents. Fewer ranks cannot stand for more, because their documents differ."""
_MOST_ELEMENTS = 1 << 58
_SIMILAR_KERNELS = {"ffa": "flash-attn"}
"""Kernels that only calibrations name, with ringprof's kernel of the same inputs and outputs."""


def schedule(
    strategy: str, workload: Workload, size: int, *, ranks_per_host: int | None = None, kernel: str = "cudnn",
    hops: str = "nccl", params: Params | None = None, ranks: Iterable[int] | None = None,
    legacy_schedule: bool = False,
) -> Schedule:  # fmt: skip
    """Dry-run the ``ranks`` (all if None) of ``size`` ranks, of which ``ranks_per_host`` share a host.

    ``strategy`` is the name of a bundled strategy or ``package.module:Class``; ``legacy_schedule`` applies
    `_use_legacy_schedule`. Raises `UnknownStrategyError`, `UsageError` and `UnsupportedWorkloadError`, the last also if
    the strategy's operations depend on tensor values.
    """
    if workload.recurrent:
        return _recurrence_schedule(strategy, workload, size, ranks_per_host or size, hops, params or {}, ranks)
    dry_run_kernel = _SIMILAR_KERNELS.get(kernel, kernel)
    if dry_run_kernel not in KERNELS:
        known = dict.fromkeys((*KERNELS, *_SIMILAR_KERNELS))
        raise UsageError(f"no kernel {kernel!r}{nearest(kernel, known)}; there are: {', '.join(known)}")
    _refuse_unsupported(workload)
    if workload.batch * workload.seq * workload.heads * workload.head_dim > _MOST_ELEMENTS:
        raise UnsupportedWorkloadError("a tensor of so many heads and tokens has more bytes than 64 bits count")
    per_host = ranks_per_host or size
    if size % per_host:
        raise UnsupportedWorkloadError(f"{per_host} ranks a host do not divide {size} ranks")
    strategy_class = load_strategy(strategy)
    if strategy_class.phase != workload.phase:
        raise UnsupportedWorkloadError(f"strategy {strategy!r} is for {strategy_class.phase}, not {workload.phase}")
    placed_params = strategy_class.with_placement(
        size, per_host, **typed_params(strategy_class, strategy, params or {})
    )
    with strategy_errors():
        reason = why_unsupported(strategy_class, workload, size, placed_params)
    if reason:
        raise UnsupportedWorkloadError(f"strategy {strategy!r} cannot run this: {reason}")
    programs, instance = [], None
    for rank in range(size) if ranks is None else ranks:
        with refuse_on_failure(strategy), strategy_errors():
            rank_position, prepare = (rank, size, per_host), _use_legacy_schedule if legacy_schedule else None
            program, instance = dry_run_rank(
                strategy_class, placed_params, workload, rank_position, dry_run_kernel, hops, prepare=prepare
            )
        programs.append(program)
    assert instance is not None
    return Schedule(
        target=find(strategy).target, params=dict(instance.parameters),
        layout=instance.layout_of(**layout_options(workload)).name, workload=workload, programs=programs,
    )  # fmt: skip


def _recurrence_schedule(
    name: str, workload: Workload, size: int, per_host: int, hops: str, params: Params, ranks: Iterable[int] | None
) -> Schedule:  # fmt: skip
    """Dry-run the ranks of a workload with a recurrence; the arguments are those of `schedule`."""
    _refuse_unsupported(workload)
    strategy_class = recurrent_strategy(name)
    if size % per_host:
        raise UnsupportedWorkloadError(f"{per_host} ranks a host do not divide {size} ranks")
    if params:
        raise UsageError(f"strategy {name!r} has no parameters: leave out {next(iter(params))}")
    if reason := strategy_class.why_unsupported(workload.seq, workload.heads, size):
        raise UnsupportedWorkloadError(f"strategy {name!r} cannot run this: {reason}")
    programs = []
    for rank in range(size) if ranks is None else ranks:
        with refuse_on_failure(name), strategy_errors():
            programs.append(dry_run_recurrence(strategy_class, workload, (rank, size, per_host), hops))
    if len(programs) < size and any(
        isinstance(op, CommStart) and op.operation == "chain" for program in programs for op in program.ops
    ):
        raise UnsupportedWorkloadError(
            f"strategy {name!r} on {size} ranks cannot be predicted: a rank waits for all before it, and some ranks"
            " cannot stand for all"
        )
    return Schedule(
        target=find(name).target, params={}, layout=strategy_class.layout.name, workload=workload, programs=programs
    )


def recurrent_strategy(name: str) -> type[RecurrentStrategy]:
    """Return the strategy for recurrences of this name. Raises `UsageError` if there is none."""
    if name not in STRATEGIES:
        listed = f"{nearest(name, STRATEGIES)}; there are: {', '.join(STRATEGIES)}"
        raise UsageError(f"no strategy {name!r} for recurrences{listed}")
    return STRATEGIES[name]


def _refuse_unsupported(workload: Workload) -> None:
    """Refuse workloads that cannot be predicted. Raises `UnsupportedWorkloadError`."""
    if workload.layer is not None or workload.sequences is not None:
        raise UnsupportedWorkloadError("whole layers of a recording and changing sizes cannot be predicted")
    if workload.softcap:
        raise UnsupportedWorkloadError("a softcap cannot be predicted: no kernel is calibrated with one")


def schedule_of(query: Query, cluster: Cluster, ranks: Sequence[int] | None) -> Schedule:
    """Return a query's schedule on its own cluster, or on a smaller one that stands for it; input of `predict`."""
    return ScheduleCache().of(query, cluster, ranks)


def stand_in_workload(query: Query, cluster: Cluster) -> tuple[Workload, Params]:
    """Return workload and parameters for ``cluster``: the query's own, or a smaller one that stands for it.

    On a smaller cluster every rank keeps its share of the sequence. Parameters that the strategy derived from the whole
    cluster are kept as far as they fit.
    """
    size, params, workload = query.cluster.size, dict(query.params), query.workload
    _refuse_unsupported(workload)
    if size > MOST_RANKS:
        raise UnsupportedWorkloadError(f"{size} ranks cannot be predicted: at most {MOST_RANKS}")
    if workload.seq < size and workload.phase != "decode":
        raise UnsupportedWorkloadError(f"{workload.seq} tokens on {size} ranks are less than one each")
    if cluster.size != size:
        if workload.kv_length is not None:
            raise UnsupportedWorkloadError(f"fewer ranks cannot stand for {workload.phase} on {size}")
        if workload.documents is not None:
            raise UnsupportedWorkloadError(
                f"packed documents on {size} ranks cannot be predicted: on {MOST_PACKED} at most"
            )
        workload = msgspec.structs.replace(workload, seq=workload.seq // size * cluster.size)
        params = _stand_in_params(query, workload, cluster)
    return workload, params


def _stand_in_params(query: Query, workload: Workload, cluster: Cluster) -> JsonObject:
    """Return the whole cluster's parameters, without a number that follows from its size, such as a ring degree.

    Raises `UnsupportedWorkloadError` if fewer ranks cannot have these parameters, or would place rings and groups
    differently over the hosts.
    """
    strategy_class = load_strategy(query.strategy)
    typed = typed_params(strategy_class, query.strategy, dict(query.params))
    resolved, hosts_per_channel = _instantiate(query, query.cluster, typed)
    derived_names = (name for name, value in resolved.items() if type(value) is int and name not in typed)
    largest_last = sorted(derived_names, key=lambda name: int(resolved[name]))
    # The largest number most likely follows from the number of ranks. Parameters set by the user stay.
    without = [{key: value for key, value in resolved.items() if key != name} for name in reversed(largest_last)]
    for params in (typed, resolved, *without):
        placed_params = strategy_class.with_placement(cluster.size, cluster.gpus_per_host, **params)
        if why_unsupported(strategy_class, workload, cluster.size, placed_params) is None:
            small = _instantiate(query, cluster, placed_params)[1]
            # Channels lie over the hosts alike: as many members on each, or as large a part of each.
            if small.keys() == hosts_per_channel.keys() and all(
                count == (large := hosts_per_channel[name])
                or count * query.cluster.gpus_per_host == large * cluster.gpus_per_host
                for name, count in small.items()
            ):
                return dict(params)
    resolved_text = ", ".join(f"{name}={value}" for name, value in resolved.items())
    raise UnsupportedWorkloadError(
        f"strategy {query.strategy!r}: {cluster.size} ranks cannot stand for {query.cluster.size} with {resolved_text}"
    )


def _instantiate(query: Query, cluster: Cluster, params: JsonObject) -> tuple[JsonObject, dict[str, int]]:
    """Return the parameters that a strategy resolves on a cluster, and how its channels lie over the hosts.

    The latter is the largest number of a channel's members on one host, 0 for a channel within a host.
    """
    network = DryRunNetwork(Recorder())
    comm = dry_run_communicator(network.connect, 0, cluster.size, cluster.gpus_per_host, query.hops)
    with strategy_errors():
        instance = load_strategy(query.strategy)(Context(comm, query.kernel), **params)
    return instance.parameters, network.spread


class ScheduleCache:
    """Schedules of queries: every rank's program is created once per workload and cluster.

    `ringprof.prediction.advise` asks for the same program with other links, other machines, fewer ranks, or as many
    tokens per rank on more hosts. Another length needs a new program: the merge kernels and the division into blocks
    depend on it.
    """

    def __init__(self) -> None:
        self._schedules: dict[Any, tuple[Schedule, dict[int, Program]]] = {}
        self._stand_ins: dict[Any, tuple[Workload, Params]] = {}

    def of(self, query: Query, cluster: Cluster, ranks: Sequence[int] | None) -> Schedule:
        """Return the programs of ``ranks`` (all if None). Raises like `schedule_of`."""
        shape = query.cluster.size, query.cluster.gpus_per_host, cluster.size, cluster.gpus_per_host
        question = (query.strategy, query.workload, query.kernel, query.hops, repr(sorted(query.params.items())), shape)
        if question not in self._stand_ins:
            self._stand_ins[question] = stand_in_workload(query, cluster)
        workload, params = self._stand_ins[question]
        key = (
            query.strategy, workload, cluster.size, cluster.gpus_per_host, query.kernel, query.hops,
            repr(sorted(params.items())), query.legacy_schedule,
        )  # fmt: skip
        wanted_ranks = range(cluster.size) if ranks is None else ranks
        known, programs = self._schedules.get(key, (None, {}))
        missing_ranks = [rank for rank in wanted_ranks if rank not in programs]
        if missing_ranks or known is None:
            known = schedule(
                query.strategy, workload, cluster.size, ranks_per_host=cluster.gpus_per_host, kernel=query.kernel,
                hops=query.hops, params=params, ranks=missing_ranks, legacy_schedule=query.legacy_schedule,
            )  # fmt: skip
            programs |= {program.rank: program for program in known.programs}
            self._schedules[key] = known, programs
        return msgspec.structs.replace(known, programs=[programs[rank] for rank in wanted_ranks])


def _use_legacy_schedule(strategy: Strategy) -> None:
    """Replace a plain ring's backward pass with that of runs recorded before November 2026 (`uses_legacy_schedule`)."""
    if isinstance(strategy, Ring) and type(strategy).backward is Ring.backward:
        strategy.backward = MethodType(_backward_with_n_hops, strategy)  # type: ignore[method-assign]


def _backward_with_n_hops(self: Any, call: AttentionCall, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """Run the legacy backward pass, in which dK and dV travel from the first (local) block on, one hop per rank."""
    local_block, deferred_blocks = self.split_local_block(call, q, k)
    wire, dq = wire_type(self.parameters["grad_wire"], k), Sum(q)
    local_grads: LocalGrads = []
    deferred_dq = []
    hop: Any = None
    for step, (kv_rank, kv) in enumerate(self.kv_ring.tour([k, v])):
        block = local_block if step == 0 else self.block(call, kv_rank, q)
        grads = None
        if block is not None:
            with ring_step("bwd", step, "block"):
                grads = call.backward(rows, q, kv[0], kv[1], block)
        arrived = None if hop is None else hop.wait()
        with ring_step("bwd", step, "merge"):
            if block is not None and grads is not None:
                dq.add(grads[0], block.q)
            block_rows = ALL if block is None else block.kv
            dkv = forward_grads(self.dkv_ring, arrived, grads and grads[1:], block_rows, (k, v), wire)
        grads = None
        hop = self.dkv_ring.post(dkv)
    for block in deferred_blocks:
        with ring_step("bwd", self.ring_size, "block"):
            block_dq, *block_dkv = call.backward(rows, q, k, v, block)
        local_grads.append((block.kv, block_dkv))
        deferred_dq.append((block.q, block_dq))
    dkv = hop.wait()
    with ring_step("bwd", self.ring_size, "merge"):
        whole_dq = dq.result(q.dtype, deferred_dq)
        dk, dv = add_and_cast_all(dkv, local_grads, k.dtype)
        return whole_dq, dk, dv
