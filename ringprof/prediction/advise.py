"""Choose a strategy, its degrees and its transport for a workload on a cluster, by predicting every candidate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from shlex import quote
from statistics import NormalDist

import msgspec
import numpy as np

from ringprof.common.formatting import percent, rounded_percent, rounded_time, significant
from ringprof.common.json_object import JsonObject
from ringprof.errors import RingprofError, UnknownStrategyError, UnsupportedWorkloadError, nearest
from ringprof.prediction.calibration import Calibration
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import (
    DRAWS,
    MAX_SIMULATED_RANKS,
    PredictionResult,
    ScheduleOf,
    predict,
    prediction_dict,
    warnings_of,
)
from ringprof.prediction.query import Query
from ringprof.scale.workers import Notify, ignore_progress
from ringprof.strategies.catalog import canonical_name
from ringprof.workload.workload import Workload

_SCHEMA = "ringprof.advice/1"
HIDDEN = 0.02
"""Largest fraction of the time spent waiting for transfers that still counts as hidden communication."""
_TIE = 0.005
"""Largest difference of log times that always counts as equal."""
_Z = 1.28
"""Standard deviations on each side of the middle that hold four of five cases."""
_MAX_COMPARED = 3
"""Number of strategies that are compared over lengths, hosts and NICs."""
_DRAWS, _FIRST_PASS_DRAWS = 4000, 1
"""Monte Carlo draws: for ranking all choices, and for the first, cheap pass over each."""
_NEAR, _FEW_RANKS_ERROR = 1.1, 1.12
"""Multiple of the fastest time up to which a choice is predicted with the usual number of draws, and the largest factor
by which a time from few ranks was too short (double rings, whose ranks wait for each other)."""
_FAR_BEHIND = 2.0
"""Multiple of the fastest time from which a choice is far behind: it keeps the prediction from few ranks, and is not
compared over lengths, hosts and NICs."""
_LENGTH_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
_NIC_FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
_HOST_FACTORS = (0.25, 0.5, 1, 2, 4)
_SHARED_INPUTS = ("forward kernel", "backward kernel", "memory", "unexplained", "host")
"""Uncertain inputs that two strategies on one machine share: an error moves both alike.

Candidates of one strategy share the error of their family, too.
"""
_MOST_RIVALS = 5
"""Number of choices behind the first one that an experiment may put first."""
_SURE = 0.8
"""Probability from which one of two choices is said to be faster."""


@dataclass(frozen=True)
class Choice:
    """One way to run the workload."""

    prediction: PredictionResult
    best: float
    """Probability that no other choice is faster."""
    on_front: bool
    """Whether no other choice is faster with at most as much memory (Pareto front)."""
    fits: bool
    """Whether the peak memory fits into a GPU."""

    @property
    def label(self) -> str:
        """Strategy with its parameters, as shown in tables."""
        return label_of(self.prediction.query)


Point = tuple[float, Sequence[PredictionResult]]
"""Tokens, Gbit/s or number of hosts, and the predictions of the `compared` choices there, in their order."""


@dataclass(frozen=True)
class Advice:
    """All choices ordered by time, and what would change the first of them."""

    choices: tuple[Choice, ...]
    refused: tuple[tuple[str, str], ...]
    """Pairs of (label, reason) of candidates that cannot be predicted."""
    points: Mapping[str, Sequence[Point]]
    """Points by number of ``tokens``, by NIC rate in Gbit/s (``nic``; none on one host) and by number of ``hosts`` for
    the same workload (none where only one host can be predicted)."""

    @property
    def first(self) -> Choice:
        """The fastest choice that fits into memory."""
        return self.choices[0]

    def hidden_from(self, axis: str) -> float | None:
        """Return the value of an axis of `points` from which the first choice's transfers are hidden; None if the last
        one does not hide them."""
        points = self.points[axis]
        excess = [predictions[0].exposed_share - HIDDEN for _, predictions in points]
        if not points or excess[-1] > 0:
            return None
        last = max((index for index, share in enumerate(excess) if share > 0), default=None)
        if last is None:
            return points[0][0]
        return _zero_crossing(points[last][0], points[last + 1][0], excess[last], excess[last + 1])

    def undecided(self) -> list[Choice]:
        """Return the choices that fit and are not slower than the first one in four of five cases."""
        first = self.first.prediction
        return [
            choice
            for choice in self.choices[1:]
            if choice.fits == self.first.fits and probability_faster(first, choice.prediction) < _SURE
        ]

    def why_not_the_second(self) -> str:
        """Say how much longer the runner-up takes, by part of its slowest rank's time, largest first."""
        if len(self.choices) < 2:
            return "there is no other"
        first, second = (choice.prediction for choice in self.choices[:2])
        excess = {
            part: second.breakdown.total(part) - first.breakdown.total(part)
            for part in ("kernel", "memory", "same_host", "other_host", "peers", "host")
        }
        difference = second.median_ns - first.median_ns
        largest_first = sorted(excess, key=lambda part: -abs(excess[part]))
        behind = f"{rounded_percent(difference / first.median_ns)} ({rounded_time(difference)})"
        parts = ", ".join(
            f"{'+' if excess[part] > 0 else ''}{rounded_time(excess[part])} of {_PART_NAMES[part]}"
            for part in largest_first
            if abs(excess[part]) >= _SHOWN_NS
        )
        return f"{self.choices[1].label} takes {behind} longer: {parts}"

    def commands(self) -> dict[str, str]:
        """Return the command that runs the first choice, and other programs' flags for their best choice."""
        own = record_command(self.first.prediction.query)
        commands = {"ringprof": own} if own else {}
        done: set[str] = set()
        for choice in self.choices if self.first.fits else ():
            for program, flags in framework_flags(choice.prediction.query).items() if choice.fits else ():
                if program not in done:
                    slower = choice.prediction.median_ns / self.first.prediction.median_ns - 1
                    behind = f", {rounded_percent(slower)} longer than the first" if choice is not self.first else ""
                    commands[f"{program}'s {choice.label}{behind}"] = flags
                    done.add(program)
        return commands

    def experiment(self) -> str:
        """Describe the measurement on one or two GPUs that most likely puts another choice first."""
        first = self.first.prediction
        rivals = [choice for choice in self.choices[1:] if choice.fits == self.first.fits][:_MOST_RIVALS]
        experiments = [
            (experiment, rival)
            for rival in rivals
            if (experiment := deciding_experiment(first, rival.prediction)) is not None
        ]
        if not experiments:
            record_them = " (ringprof bench --until-decided records the choices on one node)"
            here = record_them if first.query.cluster.hosts == 1 else ""
            return f"no input that one or two GPUs can measure is likely to change the order{here}"
        (_, sentence), rival = max(experiments, key=lambda pair: pair[0][0])
        return f"{rival.label} may be faster: {sentence}"

    def what_to_measure(self) -> str:
        """Name the input whose measurement would narrow the first choice's interval most."""
        variances = self.first.prediction.variance_by_input
        largest = max(variances, key=lambda name: variances[name])
        remaining = math.sqrt(sum(variances.values()) - variances[largest]) / math.sqrt(sum(variances.values()))
        return f"{_HOW_TO_MEASURE.get(largest, largest)}: the interval would be {percent(remaining, 0)} as wide"


_SHOWN_NS = 5_000
"""Shortest time of a part that two decimals of a millisecond show."""
_PART_NAMES = {
    "kernel": "attention", "memory": "merges and copies", "same_host": "bytes inside nodes",
    "other_host": "bytes between nodes", "peers": "waiting for peers", "host": "launching",
}  # fmt: skip
_HOW_TO_MEASURE = {
    "forward kernel": "calibrate the kernel's forward pass at these shapes (ringprof calibrate on one GPU)",
    "backward kernel": "calibrate the kernel's backward pass at these shapes (ringprof calibrate on one GPU)",
    "unexplained": "record one run on such a machine, and calibrate from it",
    "other_host": "measure the rate between two nodes with all GPUs sending",
    "family": "record one run of this strategy on such nodes, and calibrate from it",
    "same_host": "calibrate the links on two GPUs", "chance": "nothing: it is the chance of one run against another",
}  # fmt: skip


def advise(
    workload: Workload, cluster: Cluster, machine: Calibration, schedule_of: ScheduleOf, *, kernel: str = "auto",
    memory_bytes: int | None = None, strategies: Sequence[str] = (), notify: Notify = ignore_progress,
) -> Advice:  # fmt: skip
    """Order all candidates, or those of ``strategies`` only, by time, and find what would change the order.

    Raises the errors of `ranked_choices`.
    """
    choices, refusals = ranked_choices(
        workload, cluster, machine, schedule_of, kernel=kernel, memory_bytes=memory_bytes, strategies=strategies,
        notify=notify,
    )  # fmt: skip
    to_compare = [choice.prediction for choice in compared(choices)]
    gbit = cluster.nic_gbit
    sweeps: dict[str, Sequence[float]] = {
        "tokens": [
            int(workload.seq * factor) for factor in _LENGTH_FACTORS if factor >= 1 or workload.documents is None
        ],
        "nic": [gbit * factor for factor in _NIC_FACTORS] if gbit is not None and cluster.hosts > 1 else [],
        "hosts": sorted({round(cluster.hosts * factor) for factor in _HOST_FACTORS} - {0})
        if gbit is not None or cluster.hosts > 1 else [],
    }  # fmt: skip
    points = {
        axis: tuple(_sweep(axis, values, to_compare, machine, schedule_of, notify)) for axis, values in sweeps.items()
    }
    return Advice(choices, refusals, points)


def ranked_choices(
    workload: Workload, cluster: Cluster, machine: Calibration, schedule_of: ScheduleOf, *, kernel: str = "auto",
    memory_bytes: int | None = None, strategies: Sequence[str] = (), notify: Notify = ignore_progress,
) -> tuple[tuple[Choice, ...], tuple[tuple[str, str], ...]]:  # fmt: skip
    """Predict all candidates, or those of ``strategies`` only; return them ordered by time, and (label, reason) of
    those that cannot be predicted.

    Raises `UnsupportedWorkloadError` if none can run and `UnknownStrategyError` for a name that no candidate has.
    """
    if workload.recurrent:
        raise UnsupportedWorkloadError("only strategies for attention are compared: predict those for recurrences")
    available_bytes = memory_bytes or machine.memory_bytes

    def order(prediction: PredictionResult) -> tuple[bool, float]:
        return prediction.peak_bytes > available_bytes, prediction.median_ns

    def limit(factor: float) -> tuple[bool, float]:
        exceeds_memory, fastest_ns = min(map(order, predictions))
        return exceeds_memory, factor * fastest_ns

    queries = chosen_queries(candidates(workload, cluster, machine, kernel), strategies)
    predictions: list[PredictionResult] = []
    over_nccl: dict[str, PredictionResult] = {}
    refusals = []
    for number, query in enumerate(sorted(queries, key=lambda query: query.hops == "copy")):
        notify("strategies", number, len(queries))
        with_nccl = over_nccl.get(label_of(replace(query, hops="nccl")))
        if with_nccl is not None and with_nccl.median_ns > limit(_FAR_BEHIND)[1]:
            refusals.append((label_of(query), "not tried, as it is far behind with hops over NCCL"))
            continue
        try:
            prediction = predict(query, machine, schedule_of, draws=_FIRST_PASS_DRAWS, few_ranks=True)
        except RingprofError as error:
            refusals.append((label_of(query), str(error)))
        else:
            over_nccl[label_of(query)] = prediction
            predictions.append(prediction)
    if not predictions:
        reasons = dict.fromkeys(why for _, why in refusals)
        raise UnsupportedWorkloadError(f"no strategy can run this: {'; '.join(list(reasons)[:3])}")
    from_few_ranks = cluster.size > MAX_SIMULATED_RANKS
    near, far_behind = limit(_NEAR * (_FEW_RANKS_ERROR if from_few_ranks else 1.0)), limit(_FAR_BEHIND)
    for index, prediction in enumerate(predictions):
        is_near = order(prediction) < near
        if is_near or (from_few_ranks and order(prediction) < far_behind):
            draws = DRAWS if is_near else _FIRST_PASS_DRAWS
            predictions[index] = predict(prediction.query, machine, schedule_of, draws=draws)
    predictions.sort(key=order)
    probabilities = probabilities_of_being_best(
        [prediction for prediction in predictions if prediction.peak_bytes <= available_bytes]
    )
    choices = tuple(
        Choice(
            prediction,
            probabilities[index] if index < len(probabilities) else 0.0,
            _on_front(prediction, predictions),
            prediction.peak_bytes <= available_bytes,
        )
        for index, prediction in enumerate(predictions)
    )
    return choices, tuple(refusals)


def chosen_queries(queries: Iterable[Query], strategies: Sequence[str]) -> list[Query]:
    """Return the queries of the named strategies, all if none is named. Raises `UnknownStrategyError`."""
    selected = [canonical_name(name) for name in ((strategies,) if isinstance(strategies, str) else strategies)]
    all_queries = [*queries]
    known_names = dict.fromkeys(query.strategy for query in all_queries)
    for name in selected:
        if name not in known_names:
            hint = nearest(name, known_names)
            raise UnknownStrategyError(f"no strategy {name!r} to choose{hint}; there are: {', '.join(known_names)}")
    return [query for query in all_queries if not selected or query.strategy in selected]


def candidates(workload: Workload, cluster: Cluster, machine: Calibration, kernel: str) -> Iterator[Query]:
    """Yield every strategy with the degrees, placements and transports that differ on this cluster."""
    world_size, per_host = cluster.size, cluster.gpus_per_host
    engines = ("nccl", "copy") if machine.same_host.copy_gb_s is not None and per_host > 1 else ("nccl",)
    multi_host = cluster.hosts > 1
    options: list[tuple[str, JsonObject, bool]] = [("zigzag", {}, not multi_host), ("stripe", {}, not multi_host)]
    options += [("ring", {}, not multi_host)] if not workload.causal else []
    options += [("burst", {"double_ring": False}, not multi_host), ("megatron", {}, False), ("ulysses", {}, False)]
    options += [("allgather", {"layout": "zigzag" if workload.causal else "contiguous"}, False)]
    if multi_host:
        options += [("burst", {"double_ring": True}, True), ("double-ring", {}, True)]
    for degree in (degree for degree in range(2, world_size) if world_size % degree == 0 and degree <= workload.heads):
        options.append(("usp", {"ulysses_degree": degree}, not multi_host))
        if multi_host and degree == per_host:
            options.append(("double-ring", {"ulysses_degree": degree}, False))
            options.append(("usp", {"ulysses_degree": degree, "placement": "ring-first"}, False))
    for name, params, copy_engines_apply in options:
        for hops in engines if copy_engines_apply else engines[:1]:
            yield Query(name, workload, cluster, kernel, hops, params)


def probabilities_of_being_best(predictions: Sequence[PredictionResult]) -> list[float]:
    """Return per prediction the fraction of draws in which it is fastest; shared inputs are drawn once for all."""
    if not predictions:
        return []
    generator = np.random.default_rng(0)
    shared = {name: generator.standard_normal(_DRAWS) for name in _SHARED_INPUTS}
    families = dict.fromkeys(prediction.query.strategy for prediction in predictions)
    by_family = {family: generator.standard_normal(_DRAWS) for family in families}
    times = []
    for prediction in predictions:
        variances = prediction.device_variance
        shared["family"] = by_family[prediction.query.strategy]
        shared_shift = sum(math.sqrt(variance) * shared[name] for name, variance in variances.items() if name in shared)
        own_spread = math.sqrt(sum(variance for name, variance in variances.items() if name not in shared))
        device = prediction.time.device.median_ns * np.exp(
            shared_shift + own_spread * generator.standard_normal(_DRAWS)
        )
        times.append(
            np.maximum(device, prediction.time.host.median_ns * np.exp(prediction.time.host.spread * shared["host"]))
        )
    best = np.argmin(np.array(times), axis=0)
    return [float(np.mean(best == index)) for index in range(len(predictions))]


def _on_front(prediction: PredictionResult, predictions: Sequence[PredictionResult]) -> bool:
    """Return whether no prediction is faster with at most as much memory."""
    return not any(
        other.median_ns < prediction.median_ns and other.peak_bytes <= prediction.peak_bytes for other in predictions
    )


def _sweep(
    axis: str, values: Sequence[float], predictions: Sequence[PredictionResult], machine: Calibration,
    schedule_of: ScheduleOf, notify: Notify,
) -> Iterator[Point]:  # fmt: skip
    """Yield the predictions at each value of an axis of `Advice.points` that is not refused.

    A prediction from few ranks is multiplied by the ratio of the two kinds at the unchanged query: all ranks, as in
    ``predictions``, over few ranks.
    """

    def changed(query: Query, value: float) -> Query:
        if axis == "tokens":
            workload, documents = query.workload, query.workload.documents
            if documents is not None:
                # A longer batch holds the documents several times.
                documents = documents * (int(value) // workload.seq)
            return replace(query, workload=msgspec.structs.replace(workload, seq=int(value), documents=documents))
        changes: JsonObject = {"nic_gbit": value} if axis == "nic" else {"hosts": int(value)}
        return replace(query, cluster=replace(query.cluster, **changes))

    def predicted(query: Query) -> PredictionResult:
        return predict(query, machine, schedule_of, draws=_FIRST_PASS_DRAWS, few_ranks=True)

    few = [predicted(prediction.query).time if values else prediction.time for prediction in predictions]
    for number, value in enumerate(values):
        notify(axis, number, len(values))
        with suppress(RingprofError):
            points = []
            for prediction, few_ranks_time in zip(predictions, few, strict=True):
                query = changed(prediction.query, value)
                if query == prediction.query:
                    points.append(prediction)
                    continue
                point = predicted(query)
                scaled = point.time.scaled(prediction.time, few_ranks_time)
                points.append(replace(point, time=scaled) if point.few_ranks else point)
            yield value, points


def compared(choices: Sequence[Choice]) -> list[Choice]:
    """Return the first choice and the best choice of each of the next strategies.

    Choices of one strategy differ little from each other, so one of each is enough. Those far behind are left out.
    """
    limit_ns = _FAR_BEHIND * choices[0].prediction.median_ns
    best = {choice.prediction.query.strategy: choice for choice in reversed(choices)}
    near = [choice for choice in best.values() if choice.prediction.median_ns <= limit_ns]
    return sorted(near, key=choices.index)[:_MAX_COMPARED]


def crossings(points: Sequence[Point]) -> list[tuple[float, int]]:
    """Return (value, index) wherever a compared choice becomes as fast as the first one, or stops being so.

    Only points count at which one is faster in four of five cases: between others the order is not known.
    """
    crossing_points = []
    for other in range(1, _MAX_COMPARED):
        log_ratios = [
            (value, math.log(predictions[other].median_ns / predictions[0].median_ns),
             max(_TIE, _Z * _spread_of_ratio(predictions[0], predictions[other])))
            for value, predictions in points if len(predictions) > other
        ]  # fmt: skip
        distinct = [(value, log_ratio) for value, log_ratio, tie in log_ratios if abs(log_ratio) > tie]
        crossing_points += [
            (_zero_crossing(a, b, ratio_a, ratio_b), other)
            for (a, ratio_a), (b, ratio_b) in pairwise(distinct)
            if (ratio_a > 0) != (ratio_b > 0)
        ]  # fmt: skip
    return sorted(crossing_points)


def _spread_of_ratio(first: PredictionResult, second: PredictionResult) -> float:
    """Return the log standard deviation of the ratio of two predictions, whose `_SHARED_INPUTS` move both alike."""
    variances = first.device_variance, second.device_variance
    shared = {*_SHARED_INPUTS, *(["family"] if first.query.strategy == second.query.strategy else [])}
    names = dict.fromkeys(name for of_one in variances for name in of_one)
    pairs = {name: [of_one.get(name, 0.0) for of_one in variances] for name in names}
    return math.sqrt(sum(
        (math.sqrt(pair[0]) - math.sqrt(pair[1])) ** 2 if name in shared else sum(pair)
        for name, pair in pairs.items()
    ))  # fmt: skip


def probability_faster(first: PredictionResult, second: PredictionResult) -> float:
    """Return the probability that the first prediction's time is the shorter one."""
    spread, log_ratio = _spread_of_ratio(first, second), math.log(second.median_ns / first.median_ns)
    return NormalDist().cdf(log_ratio / spread) if spread else float(log_ratio > 0)


def _zero_crossing(a: float, b: float, at_a: float, at_b: float) -> float:
    """Return where a line through two points is 0; the x-axis is logarithmic."""
    return float(a * (b / a) ** (at_a / (at_a - at_b)))


def label_of(query: Query) -> str:
    """Return the strategy with its parameters and its transport."""
    params = ", ".join(f"{key}={value}" for key, value in query.params.items())
    copy_note = ", hops copied" if query.hops == "copy" else ""
    return f"{query.strategy}{f' ({params})' if params else ''}{copy_note}"


def advice_dict(advice: Advice) -> JsonObject:
    """Return advice as a dict of schema ``ringprof.advice/1``."""
    return {
        "schema": _SCHEMA,
        "predicted": True,
        "warnings": warnings_of(advice.first.prediction),
        "choices": [
            {
                "label": choice.label, "probability_best": round(choice.best, 4), "on_front": choice.on_front,
                "fits": choice.fits, **prediction_dict(choice.prediction, whole=False),
            }
            for choice in advice.choices
        ],
        "inputs": prediction_dict(advice.first.prediction)["inputs"],
        "refused": [{"label": label, "reason": reason} for label, reason in advice.refused],
        "hidden_from_tokens": advice.hidden_from("tokens"),
        "hidden_from_gbit": advice.hidden_from("nic"),
        "undecided": [choice.label for choice in advice.undecided()],
        "why_not_the_second": advice.why_not_the_second(),
        "commands": advice.commands(),
        "what_to_measure": advice.what_to_measure(),
        "experiment": advice.experiment(),
    }  # fmt: skip


# --- commands that run a predicted choice: ringprof's recorder, and Megatron-LM's flags where it has the strategy ---

_CP_COMM_TYPES = {"megatron": "p2p", "ulysses": "a2a", "allgather": "all_gather", "usp": "a2a+p2p"}
"""Megatron-LM's and Transformer Engine's ``cp_comm_type`` by strategy."""


def record_command(query: Query) -> str | None:
    """Return the shell command that records a query; None for documents, windows and other masks.

    On several nodes the command runs on each of them, with ``HEAD_NODE`` replaced by the name of the first.
    """
    workload, cluster = query.workload, query.cluster
    if not workload.mask().plain:
        return None
    words = ["ringprof", "record", "--world", str(cluster.size)]
    if cluster.hosts > 1:
        words = [
            "torchrun", "--nnodes", str(cluster.hosts), "--nproc-per-node", str(cluster.gpus_per_host),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "HEAD_NODE:29500", "-m", "ringprof", "record",
        ]  # fmt: skip
    words += ["--strategy", query.strategy]
    for name, value in query.params.items():
        words += ["-p", f"{name}={value}"]
    sizes = (
        ("seq", workload.seq, None), ("batch", workload.batch, 1), ("heads", workload.heads, None),
        ("kv-heads", workload.kv_heads, workload.heads), ("head-dim", workload.head_dim, 128),
    )  # fmt: skip
    for name, size, default in sizes:
        words += [f"--{name}", str(size)] if size != default else []
    words += ["--no-causal"] if not workload.causal else []
    words += ["--forward-only"] if not workload.backward else []
    words += ["--dtype", workload.dtype] if workload.dtype != "bf16" else []
    words += ["--kernel", query.kernel, "--hops", query.hops]
    return " ".join(map(quote, words))


def framework_flags(query: Query) -> dict[str, str]:
    """Return what makes other programs run a query, by program; nothing for programs that lack the strategy.

    Megatron-LM's flags are of its command line. With ``usp`` they give two sizes: of the groups of adjacent GPUs, which
    exchange heads, and of the rings over these groups; there is no ring-first placement. Transformer Engine takes
    arguments of `DotProductAttention.set_context_parallel_group`, for ``usp`` two groups. torchtitan 0.3 gathers keys
    and values, with a zigzag layout (``headtail``) or a contiguous one.
    """
    flags: dict[str, str] = {}
    size, params = query.cluster.size, query.params
    comm_type = _CP_COMM_TYPES.get(query.strategy)
    if comm_type is not None and params.get("placement", "head-first") == "head-first":
        flags["Megatron-LM"] = f"--context-parallel-size {size} --cp-comm-type {comm_type}"
        groups = "group, ranks"
        if query.strategy == "usp":
            degree = int(params["ulysses_degree"])
            flags["Megatron-LM"] += f" --hierarchical-context-parallel-sizes {degree} {size // degree}"
            groups = f"[group_of_{degree}, group_of_{size // degree}], ranks"
        flags["Transformer Engine"] = f'set_context_parallel_group({groups}, stream, cp_comm_type="{comm_type}")'
    balancer = {"zigzag": "headtail", "contiguous": "None"}.get(str(params.get("layout")))
    if query.strategy == "allgather" and balancer and query.workload.documents is None:
        flags["torchtitan"] = (
            f"--parallelism.context_parallel_degree {size} --parallelism.context_parallel_load_balancer {balancer}"
        )
    return flags


# --- the measurement on one or two GPUs that is most likely to overturn the order ---

_LEAST_PROBABILITY = 0.01
"""Probability below which a measurement counts as unable to overturn the order."""
_EQUAL = 1e-6
"""Difference of shifts up to which an input moves both times alike."""


_INPUTS: dict[str, tuple[str, str, int, Callable[[PredictionResult], float | None]]] = {
    "forward kernel": ("the kernel's forward time on the blocks of {}", "kernels", 1, lambda _: None),
    "backward kernel": ("the kernel's backward time on the blocks of {}", "kernels", 1, lambda _: None),
    "memory": ("the rate of merges and copies", "memory", 1, lambda prediction: prediction.machine.memory_gb_s.value),
    "host": ("the host's launch times", "host", 1, lambda _: None),
    "same_host": (
        "the rate of hops inside a node", "links", 2, lambda prediction: prediction.machine.same_host.hop_gb_s.value,
    ),
    "other_host": (
        "the rate between two nodes", "ringprof record --strategy ring on two nodes, then ringprof calibrate RUN", 2,
        lambda prediction: (
            prediction.machine.other_host.total_gb_s.value if prediction.query.cluster.nic_gbit is None
            else prediction.query.cluster.nic_gbit / 8
        ),
    ),
}  # fmt: skip
"""Uncertain inputs that one or two GPUs can measure.

What is measured, where ``{}`` stands for a strategy; the part of `ringprof calibrate` or the command that measures it;
the number of GPUs that it needs; and the assumed rate in GB/s, None for times of kernels and hosts.
"""


def deciding_experiment(first: PredictionResult, second: PredictionResult) -> tuple[float, str] | None:
    """Return the measurement that most likely makes ``second`` the faster one: the probability of such a result, by the
    input's spread, and the measurement as a sentence. None if no input is likely to.

    An input's standard deviation moves both times, each by the share that depends on it. So the log ratio of the times
    shifts by the difference of the two, and a shift as large as the predicted log ratio overturns the order.
    """
    log_ratio = math.log(second.median_ns / first.median_ns)
    variances = first.variance_by_input, second.variance_by_input
    experiments = []
    for name, (measured, part, gpus, gb_s) in _INPUTS.items():
        shifts = [math.sqrt(by_input.get(name, 0.0)) for by_input in variances]
        shift = shifts[1] - shifts[0]
        if abs(shift) < _EQUAL:
            continue
        deviations = -log_ratio / shift
        probability = NormalDist().cdf(-abs(deviations))
        spread = _spread(name, first, second, shifts)
        if probability >= _LEAST_PROBABILITY and spread:
            less_known = (first, second)[shift > 0].query.strategy
            sentence = (
                f"{measured.format(less_known)} (on {'one GPU' if gpus == 1 else 'two GPUs'}:"
                f" {part if ' ' in part else f'ringprof calibrate --parts {part} -o machine.json'}):"
                f" {_result(gb_s(first), math.exp(deviations * spread))} would put it first, with a probability of"
                f" {percent(probability, 0)}"
            )
            experiments.append((gpus, probability, sentence))
    # Of equally likely ones, the one with fewer GPUs is cheaper.
    best = max(experiments, key=lambda item: (round(item[1], 2), -item[0]), default=None)
    return best and best[1:]


def _spread(name: str, first: PredictionResult, second: PredictionResult, shifts: list[float]) -> float:
    """Return the standard deviation of an input's log time: its shift over the share of the time that depends on it."""
    prediction, shift = max(zip((first, second), shifts, strict=True), key=lambda pair: pair[1])
    breakdown = prediction.breakdown
    if name == "host":
        return prediction.time.host.spread
    if name.endswith(" kernel"):
        part = breakdown.phases.get(name.removesuffix(" kernel"), {}).get("kernel", 0.0)
    else:
        part = breakdown.total(name)
    return shift * breakdown.whole_ns / part if part else 0.0


def _result(gb_s: float | None, factor: float) -> str:
    """Describe the measured value that changes a time by ``factor``; a rate changes by its inverse."""
    if gb_s is None:
        return f"a time {rounded_percent(abs(factor - 1))} {'longer' if factor > 1 else 'shorter'} than assumed"
    limit = "at most" if factor > 1 else "at least"
    return f"{limit} {significant(gb_s / factor, 3)} GB/s ({significant(gb_s, 3)} assumed)"
