"""Predict a run: simulate the schedule's programs on several draws of a machine; give an interval and the bound of each
phase."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist, median, pstdev, pvariance

import msgspec

from ringprof.common.json_object import JsonObject
from ringprof.dryrun.schedule import (
    AttentionOp,
    CommStart,
    CommWait,
    ComputeOp,
    MemoryOp,
    Op,
    Program,
    RecurrenceOp,
    Schedule,
    StreamWait,
)
from ringprof.errors import UnsupportedWorkloadError
from ringprof.prediction.calibration import Calibration, KernelFigures, KernelSample, Origin, RecurrenceCurve, Value
from ringprof.prediction.host_model import host_ns, times_us
from ringprof.prediction.kernel_model import Estimate, OutsideCalibration
from ringprof.prediction.machine import (
    MASKED_OVER_PLAIN,
    AnyCurves,
    CalibratedMachine,
    curves_of,
    estimate,
)
from ringprof.prediction.network import GPUS_PER_SWITCH, Cluster, Links
from ringprof.prediction.query import Query, stand_in
from ringprof.prediction.recurrence_curves import recurrence_curves_of
from ringprof.prediction.simulator import Timeline, simulate
from ringprof.report.text import binary_size

_SCHEMA = "ringprof.prediction/1"
MAX_SIMULATED_RANKS = 64
"""Number of ranks up to which every rank is simulated."""
MAX_SAMPLED_RANKS = 8192
"""Largest number of ranks of which a few are simulated where no smaller cluster can stand for it: their programs have a
step per rank, and take half a minute."""
DRAWS = 15
"""Largest number of Monte Carlo draws of the machine by default."""
_HOST_DRAWS = 101
"""Monte Carlo draws of the variation between hosts."""
SMALL_RANKS, LARGE_RANKS = 16, 32
"""Approximate sizes of the two smaller clusters that stand for a larger one.

A ring's time grows by the same amount with every additional host, so two sizes determine it.
"""
MAX_EXTRAPOLATED_SHARE = 0.1
"""Largest share of a pass that may rest on extrapolated kernel times."""
ScheduleOf = Callable[[Query, Cluster, "Sequence[int] | None"], Schedule]
"""Function that returns the programs of some ranks (all if None) of a query, on its own cluster or a smaller one."""


@dataclass(frozen=True)
class _Breakdown:
    """Nanoseconds of one rank per part, for each phase."""

    forward: dict[str, float]
    backward: dict[str, float]

    @property
    def phases(self) -> dict[str, dict[str, float]]:
        """Nanoseconds per part, by the phases that were run."""
        phases = {"forward": self.forward, "backward": self.backward}
        return {name: parts for name, parts in phases.items() if parts}

    @property
    def whole_ns(self) -> float:
        """Nanoseconds of all parts of all phases."""
        return sum(sum(parts.values()) for parts in self.phases.values())

    def total(self, *parts: str) -> float:
        return sum(phase.get(part, 0.0) for phase in (self.forward, self.backward) for part in parts)


_PHASES = ("backward", "forward")
_PARTS = ("kernel", "memory", "same_host", "other_host", "peers", "host")
"""Parts of a rank's time, in order of precedence.

``kernel`` is attention and ``memory`` the kernels between attention blocks. ``same_host`` and ``other_host`` wait for
bytes on links inside and between hosts, ``peers`` for ranks that came later, and ``host`` for launches.
"""


@dataclass(frozen=True)
class PredictionResult:
    """Predicted time, memory and bounds of one run."""

    query: Query
    """The query with kernel and transport resolved."""
    machine: Calibration
    time: MaxLognormal
    device_variance: dict[str, float]
    """Log-variance of the device time by uncertain input (kernels, memory, links, noise, family of strategies)."""
    breakdown: _Breakdown
    """Time of the slowest rank by phase and part."""
    exposed_share: float
    """Fraction of the time that waits for transfers, averaged over the ranks."""
    peak_bytes: int
    peak_label: str
    lead_ns: float
    """How long before the devices the host starts an iteration when the host is the bound; else infinite."""
    schedule: Schedule
    """Programs of the ranks that were simulated last."""
    timelines: list[Timeline]
    few_ranks: bool = False
    """Whether fewer ranks were simulated than usual: see `predict`. Such a time is a little too short."""

    def representative_of(self, rank: int) -> int:
        """Return the simulated rank that stands for ``rank``: the nearest one, if possible with the same local rank."""
        simulated = [program.rank for program in self.schedule.programs]
        per_host = self.query.cluster.gpus_per_host
        same_local_rank = [candidate for candidate in simulated if (candidate - rank) % per_host == 0]
        return min(same_local_rank or simulated, key=lambda candidate: abs(candidate - rank))

    @property
    def median_ns(self) -> float:
        return self.time.median_ns

    @property
    def fits(self) -> bool:
        """Whether the peak memory fits into a GPU."""
        return self.peak_bytes <= self.machine.memory_bytes

    @property
    def host_bound(self) -> bool:
        return self.lead_ns < math.inf

    @property
    def variance_by_input(self) -> dict[str, float]:
        """Log-variance of the time by uncertain input, weighted by how likely the device or the host is the bound."""
        host_share = self.time.host_share
        variances = {name: variance * (1 - host_share) ** 2 for name, variance in self.device_variance.items()}
        return {**variances, "host": (host_share * self.time.host.spread) ** 2}

    @cached_property
    def interval_ns(self) -> tuple[float, float, float]:
        """Nanoseconds per iteration as 10th, 50th and 90th percentile."""
        low, middle, high = map(self.time.quantile_ns, (0.1, 0.5, 0.9))
        return low, middle, high

    @property
    def interval_ms(self) -> tuple[float, float, float]:
        low, middle, high = self.interval_ns
        return low / 1e6, middle / 1e6, high / 1e6

    def tflops(self, time_ns: float) -> float:
        """Return TFLOP/s per GPU by model FLOPs, for a time in nanoseconds."""
        return self.query.workload.model_flops() / self.query.cluster.size / time_ns / 1e3

    @property
    def bound_by(self) -> dict[str, str]:
        """The part that takes most of the slowest rank's time, per phase."""
        return {name: max(parts, key=lambda part: parts[part]) for name, parts in self.breakdown.phases.items()}

    @cached_property
    def evidence(self) -> str:
        """Weakest origin among the inputs that decide: ``measured``, ``published`` or ``assumed``."""
        origins = {value.origin for value in inputs(self).values()}
        return next(origin for origin in ("assumed", "published", "measured") if origin in origins)


def predict(
    query: Query, machine: Calibration, schedule_of: ScheduleOf, *, draws: int = DRAWS, few_ranks: bool = False
) -> PredictionResult:
    """Predict one run from at most ``draws`` Monte Carlo draws.

    With ``few_ranks``, smaller clusters that stand for a larger one are simulated by four of their ranks each, whose
    peers are taken to be ready when they are. This takes a fifth of the time.

    Raises `UnsupportedWorkloadError` if the strategy cannot run this way, `OutsideCalibration` if the machine's file
    does not cover it.
    """
    query, cluster = stand_in(query), query.cluster
    refuse_unsupported(query, machine)
    query = replace(query, kernel=query.kernel_on(machine), hops=query.hops_on(machine))
    if query.workload.phase == "decode" and machine.kernel(query.kernel).cache_gb_s is None:
        raise UnsupportedWorkloadError(
            f"machine {machine.name!r} has no rate at which kernel {query.kernel!r} reads a cache of keys: decode"
            " cannot be predicted with it"
        )
    curves = _curves(query, machine)
    if cluster.size <= MAX_SIMULATED_RANKS:
        return _simulate_draws(query, machine, curves, schedule_of(query, cluster, None), draws)
    small, large = _resized(cluster, SMALL_RANKS), _resized(cluster, LARGE_RANKS)
    if not query.workload.recurrent and _gains_ring_steps(query, schedule_of, small, large):
        return _extrapolate(query, machine, curves, schedule_of, (small, large), draws, few_ranks=few_ranks)
    return _simulate_draws(query, machine, curves, schedule_of(query, cluster, _sample_ranks(cluster)), draws)


def _sample_ranks(cluster: Cluster) -> list[int]:
    """Return the ranks that stand for all where not all are simulated."""
    return sorted({0, 1, cluster.size // 2, cluster.size - 1})


def _curves(query: Query, machine: Calibration) -> AnyCurves:
    """Return the curves of a query's kernel, whose name is resolved. Raises `UsageError` if there are none."""
    if query.workload.recurrent:
        return recurrence_curves_of(machine, query.kernel)
    return curves_of(machine, query.kernel, pieces=query.workload.documents is not None)


def kernel_figures(machine: Calibration, query: Query) -> KernelFigures:
    """Return a machine's figures of a query's kernel, whose name is resolved. Raises `UsageError` if it has none."""
    return _curves(query, machine).kernel


def _gains_ring_steps(query: Query, schedule_of: ScheduleOf, small: Cluster, large: Cluster) -> bool:
    """Return whether a larger cluster adds ring steps of the same kind.

    Otherwise programs have the same length on any number of ranks, or a smaller cluster cannot have such degrees. Some
    ranks of the full cluster then stand for all. Raises `UnsupportedWorkloadError` where their programs are too long.
    """
    try:
        small_ops, large_ops = (len(schedule_of(query, cluster, [0]).programs[0].ops) for cluster in (small, large))
    except UnsupportedWorkloadError as error:
        if query.cluster.size > MAX_SAMPLED_RANKS:
            raise UnsupportedWorkloadError(
                f"{query.cluster.size} ranks are too many to simulate some of them step by step: {error}"
            ) from None
        return False
    return small_ops < large_ops


def refuse_unsupported(query: Query, machine: Calibration) -> None:
    """Refuse data types, networks and transports that no calibration covers. Raises `UnsupportedWorkloadError`."""
    if query.workload.dtype not in ("bf16", "fp16"):
        raise UnsupportedWorkloadError(f"{query.workload.dtype}: curves are of bf16 and fp16 only")
    if query.cluster.hosts > 1 and query.cluster.nic_gbit is None and machine.other_host.total_gb_s.origin == "assumed":
        raise UnsupportedWorkloadError(
            f"machine {machine.name!r} does not say how nodes are joined: give the NICs' rate (--nic, Gbit/s per GPU)."
            " Sockets cannot be predicted, their rate depends on the pattern of traffic"
        )
    if query.hops == "copy" and machine.same_host.copy_gb_s is None:
        reason = f"machine {machine.name!r} has no rate of copied hops (ringprof calibrate on 2 GPUs)"
        raise UnsupportedWorkloadError(reason)


# --- one simulation, drawn several times ------------------------------------------------------------


def _simulate_draws(
    query: Query, machine: Calibration, curves: AnyCurves, schedule: Schedule, most_draws: int,
    cluster: Cluster | None = None,
) -> PredictionResult:  # fmt: skip
    """Simulate a schedule on several draws of the machine and return the prediction."""
    if query.one_stream:
        replaced = msgspec.structs.replace
        schedule = replaced(schedule, programs=[
            replaced(program, ops=[replaced(op, stream=0) for op in program.ops if not isinstance(op, StreamWait)])
            for program in schedule.programs
        ])  # fmt: skip
    programs, cluster = schedule.programs, cluster or query.cluster
    links = Links(machine, replace(cluster, pairwise=query.pairwise))

    def run(
        utilisation: Mapping[int, float] | None, lead_ns: float = math.inf, *, seed: int = 0, host_factor: float = 1.0
    ) -> list[Timeline]:
        machine_draw = CalibratedMachine(
            machine, links, curves, utilisation, query.busy_s, seed=seed, host_factor=host_factor,
            hops_first=query.pairwise, repacks=query.repacks,
        )  # fmt: skip
        return simulate(programs, machine_draw, lead_ns=lead_ns)

    timelines = run(None)
    end_ns = _latest_end_ns(timelines)
    utilisation = {}
    for program, timeline in zip(programs, timelines, strict=True):
        spans = [timeline.ops[index] for index, op in enumerate(program.ops) if isinstance(op, ComputeOp)]
        utilisation[program.rank] = min(1.0, sum(b - a for a, b in spans) / end_ns) if end_ns else 0.0
    max_draws = DRAWS if len(programs) <= 8 else 7 if len(programs) <= LARGE_RANKS else 3
    draws = [run(utilisation, seed=seed) for seed in range(1, 1 + min(most_draws, max_draws))]
    ends_ns = [_latest_end_ns(drawn) for drawn in draws]
    device_ns, run_variance = median(ends_ns), pvariance([math.log(end_ns) for end_ns in ends_ns])
    timelines = min(draws, key=lambda candidate: abs(_latest_end_ns(candidate) - device_ns))
    issued_ns = [sum(host_ns(machine, curves.kernel, program)) for program in programs]
    host, lead_ns = _host_time(machine, issued_ns), math.inf
    if host.median_ns > device_ns:
        factor = host.median_ns / max(issued_ns)
        # A finished host continues with the next iteration after it has launched the collective between iterations.
        between_ns = 1e3 * times_us(machine, curves.kernel)["collective_us"]
        lead_ns = max(0.0, _latest_end_ns(run(utilisation, 0.0, host_factor=factor)) - host.median_ns - between_ns)
        timelines = run(utilisation, lead_ns, host_factor=factor)
        host = replace(host, median_ns=_latest_end_ns(timelines))
    breakdowns = [
        time_breakdown(program, timeline, cluster) for program, timeline in zip(programs, timelines, strict=True)
    ]
    slowest = max(range(len(programs)), key=lambda index: timelines[index].end_ns)
    breakdown = breakdowns[slowest]
    variances = _variances(machine, curves, programs[slowest], breakdown, timelines[slowest].end_ns)
    variances["chance"] = run_variance
    # Margins below 1 come from runs without documents and windows, whose curves are less well known.
    margin = max(_transfer_margin(machine, "device"), 0.0 if query.workload.mask().plain else 1.0)
    variances = {name: margin**2 * part for name, part in variances.items()}
    variances["family"] = machine.family_variance(query.strategy, query.cluster.hosts)
    device = Lognormal(device_ns, math.sqrt(sum(variances.values())))
    time = MaxLognormal(device, replace(host, spread=host.spread * _transfer_margin(machine, "host")))
    exposed_shares = [
        each.total("same_host", "other_host", "peers") / timeline.end_ns
        for each, timeline in zip(breakdowns, timelines, strict=True)
    ]
    peak = max(programs, key=lambda program: program.peak_bytes)
    return PredictionResult(
        query=query, machine=machine, time=time,
        device_variance=variances, breakdown=breakdown,
        exposed_share=sum(exposed_shares) / len(exposed_shares), peak_bytes=peak.peak_bytes, peak_label=peak.peak_label,
        lead_ns=lead_ns, schedule=schedule, timelines=timelines,
    )  # fmt: skip


def _latest_end_ns(timelines: Sequence[Timeline]) -> float:
    """Return the end of the slowest rank."""
    return max(timeline.end_ns for timeline in timelines)


def _transfer_margin(machine: Calibration, bound: str) -> float:
    """Return the factor by which intervals are widened for a bound; 1 for the calibrated machine itself."""
    return machine.transfer_margin[bound].value if bound in machine.transfer_margin else 1.0


def _host_time(machine: Calibration, issued_ns: Sequence[float]) -> Lognormal:
    """Return the distribution of the slowest host's time, given the mean host's time per rank."""
    host, generator = machine.host, random.Random(0)
    slowest_ns = [
        max(ns * generator.gauss(1.0, host.host_variation.value) for ns in issued_ns) for _ in range(_HOST_DRAWS)
    ]
    median_ns = median(slowest_ns)
    if not median_ns:
        return NO_TIME
    noise = 1e3 * machine.run_to_run_noise_us.value / median_ns
    spread = host.launch_us.spread if host.pass_spread is None else host.pass_spread
    return Lognormal(median_ns, math.hypot(spread, noise, pstdev(slowest_ns) / median_ns))


def time_breakdown(program: Program, timeline: Timeline, cluster: Cluster) -> _Breakdown:
    """Return a rank's time by phase and part; concurrent activities count as the first of `_PARTS`."""
    # At each moment the smallest running key counts: by part, and of equal parts the backward pass.
    keys = {(part, phase): 2 * _PARTS.index(part) + (phase == "forward") for part in _PARTS for phase in _PHASES}
    events: list[tuple[float, int, int]] = []
    for start, end, part, phase in _busy_pieces(program, timeline, cluster):
        if end > start:
            key = keys[part, phase]
            events += [(start, 1, key), (end, -1, key)]
    phases: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
    active = [0] * len(keys)
    last_ns, phase = 0.0, "forward"
    for time_ns, change, key in sorted(events):
        if time_ns > last_ns:
            part = "host"
            for index, count in enumerate(active):
                if count:
                    part, phase = _PARTS[index // 2], _PHASES[index % 2]
                    break
            phases[phase][part] = phases[phase].get(part, 0.0) + time_ns - last_ns
        active[key] += change
        last_ns = time_ns
    return _Breakdown(phases["forward"], phases["backward"])


def _busy_pieces(program: Program, timeline: Timeline, cluster: Cluster) -> Iterator[tuple[float, float, str, str]]:
    """Yield (start, end, part, phase) of everything that takes time on a stream."""
    comm_ops = {op.id: (op_index, op) for op_index, op in enumerate(program.ops) if isinstance(op, CommStart)}
    phase = "forward"
    for op_index, op in enumerate(program.ops):
        start, end = timeline.ops[op_index]
        phase = _phase(op, comm_ops, phase)
        if isinstance(op, CommWait):
            comm_index, comm_op = comm_ops[op.id]
            ready_ns = min(max(timeline.kernels[comm_index][1], start), end)
            yield start, ready_ns, "peers", phase
            yield ready_ns, end, "other_host" if cluster.hosts_of(comm_op.members) > 1 else "same_host", phase
        elif isinstance(op, ComputeOp | MemoryOp):
            yield start, end, "kernel" if isinstance(op, ComputeOp) else "memory", phase


def _phase(op: Op, comm_ops: Mapping[int, tuple[int, CommStart]], current: str) -> str:
    """Return the phase of an operation; ``current`` if the operation does not say."""
    if isinstance(op, ComputeOp | CommStart):
        return op.phase
    if isinstance(op, CommWait):
        return comm_ops[op.id][1].phase
    return "backward" if isinstance(op, MemoryOp) and op.label.startswith("bwd") else current


def _variances(
    machine: Calibration, curves: AnyCurves, program: Program, breakdown: _Breakdown, end_ns: float
) -> dict[str, float]:
    """Return the log-variance of the time by input; an input counts by the share of the time that depends on it."""
    variances = {}
    for phase in ("forward", "backward"):
        estimates = _estimates(curves, program, phase)
        if estimates:
            total_ns = sum(each.ns for each in estimates)
            extrapolated_share = sum(each.ns for each in estimates if each.extrapolated) / total_ns
            if extrapolated_share > MAX_EXTRAPOLATED_SHARE:
                raise OutsideCalibration(
                    f"{extrapolated_share:.0%} of the {phase} pass are parts of the mask shorter than calibrated"
                )
            spread = _spread_of(estimates)
            share = breakdown.phases.get(phase, {}).get("kernel", 0.0) / end_ns
            variances[f"{phase} kernel"] = (share * spread) ** 2
    for part, value in (
        ("memory", machine.memory_gb_s), ("same_host", machine.same_host.hop_gb_s),
        ("other_host", machine.other_host.total_gb_s), ("peers", Value(1.0, 0.1, "assumed", "")),
    ):  # fmt: skip
        variances[part] = (breakdown.total(part) / end_ns * value.spread) ** 2
    variances["unexplained"] = machine.noise.value**2 + (1e3 * machine.run_to_run_noise_us.value / end_ns) ** 2
    return variances


def _estimates(curves: AnyCurves, program: Program, phase: str) -> list[Estimate]:
    """Return the estimate of each of the kernel's calls in a phase."""
    return [estimate(curves, op) for op in program.ops if isinstance(op, ComputeOp) and op.phase == phase]


def _spread_of(estimates: Sequence[Estimate]) -> float:
    """Return the spread of the kernel's time in all calls together, as a share of that time; errors are shared."""
    total_ns = sum(each.ns for each in estimates)
    return sum(each.ns * each.spread for each in estimates) / total_ns if total_ns else 0.0


# --- more ranks than are simulated ------------------------------------------------------------------


def _resized(cluster: Cluster, ranks: int) -> Cluster:
    """Return the cluster with about ``ranks`` ranks: fewer hosts, or fewer GPUs per host if hosts are few or large."""
    if cluster.hosts == 1:
        return replace(cluster, gpus_per_host=ranks)
    if cluster.gpus_per_host > SMALL_RANKS:
        # A ring over two hosts has one hop between them, and holds less than one over more hosts.
        hosts = 4 if cluster.hosts >= 4 else 2
        return replace(cluster, hosts=hosts, gpus_per_host=ranks // hosts)
    return replace(cluster, hosts=max(ranks // cluster.gpus_per_host, ranks // SMALL_RANKS * 2))


def _extrapolate(
    query: Query, machine: Calibration, curves: AnyCurves, schedule_of: ScheduleOf,
    clusters: tuple[Cluster, Cluster], draws: int, *, few_ranks: bool,
) -> PredictionResult:  # fmt: skip
    """Extrapolate from two smaller clusters, where each rank has the same share and messages but fewer ring steps.

    A ring that is long compared with its start-up repeats the same step, so time and memory grow linearly with the
    ranks.
    """
    ranks = query.cluster.size
    small_ranks, large_ranks = (cluster.size for cluster in clusters)
    small, large = (
        _simulate_draws(
            query, machine, curves, schedule_of(query, cluster, _sample_ranks(cluster) if few_ranks else None), draws,
            replace(
                cluster, stretch=ranks / cluster.size,
                host_stretch=query.cluster.gpus_per_host / cluster.gpus_per_host,
            ),
        )
        for cluster in clusters
    )  # fmt: skip

    def extrapolate(a: float, b: float) -> float:
        return b + (b - a) * (ranks - large_ranks) / (large_ranks - small_ranks)

    def phase(name: str) -> dict[str, float]:
        small_parts, large_parts = getattr(small.breakdown, name), getattr(large.breakdown, name)
        return {part: max(0.0, extrapolate(small_parts.get(part, 0.0), ns)) for part, ns in large_parts.items()}

    more_bytes = 0
    if small.peak_bytes != large.peak_bytes:
        # Buffers that one or two hosts do not fill yet grow otherwise than those that have a part per rank.
        programs, cluster = large.schedule.programs, _resized(query.cluster, 2 * LARGE_RANKS)
        before, rank = max((programs[0].peak_bytes, 0), (programs[-1].peak_bytes, cluster.size - 1))
        more_bytes = schedule_of(query, cluster, [rank]).programs[0].peak_bytes - before
    return replace(
        large, few_ranks=few_ranks, time=MaxLognormal(*(
            Lognormal(extrapolate(small_time.median_ns, large_time.median_ns), large_time.spread)
            for small_time, large_time in ((small.time.device, large.time.device), (small.time.host, large.time.host))
        )), breakdown=_Breakdown(phase("forward"), phase("backward")),
        peak_bytes=round(large.peak_bytes + more_bytes * (ranks / large_ranks - 1)),
    )  # fmt: skip


# --- what to know about it ---------------------------------------------------------------------------


def warnings_of(prediction: PredictionResult) -> list[JsonObject]:
    """Return reasons to distrust a prediction, each a code and a message.

    ``does_not_fit``: too little memory; ``stand_in``: a peer's stand-in; ``larger_node``: nodes larger than measured.
    """
    machine, warnings = prediction.machine, list[JsonObject]()
    if not prediction.fits:
        message = f"this does not fit: a GPU has {binary_size(machine.memory_bytes)}"
        warnings.append({"code": "does_not_fit", "message": message})
    query = prediction.query
    if query.stands_for is not None:
        message = f"{query.stands_for} is predicted as ringprof's {query.strategy}: its own code cannot be dry-run"
        warnings.append({"code": "stand_in", "message": message})
    gpus = query.cluster.gpus_per_host
    if gpus > GPUS_PER_SWITCH:
        message = (
            f"nodes of {gpus} GPUs are predicted with the rates of nodes of {GPUS_PER_SWITCH}, which machine"
            f" {machine.name!r} was measured on: its links inside a node are assumed for a larger switch"
        )
        warnings.append({"code": "larger_node", "message": message})
    return warnings


# --- what it rests on -------------------------------------------------------------------------------


def inputs(prediction: PredictionResult) -> dict[str, Value]:
    """Return the figures that a prediction rests on, with their origins."""
    machine, query = prediction.machine, prediction.query
    values = {"memory_gb_s": machine.memory_gb_s, "contention": machine.contention}
    if not query.workload.recurrent:  # a recurrence's kernels are taken not to heat the device
        values["heat"] = machine.kernel(query.kernel).throttling or machine.throttling
    if query.workload.phase == "decode" and (cache_gb_s := machine.kernel(query.kernel).cache_gb_s) is not None:
        values["cache_gb_s"] = cache_gb_s
    phases = ("forward", "backward") if query.workload.backward else ("forward",)
    curves = _curves(query, machine)
    for phase in phases if "cache_gb_s" not in values else ():
        samples = _samples(prediction, phase)
        spread = _spread_of(_estimates(curves, prediction.schedule.programs[0], phase))
        origins: tuple[Origin, ...] = ("assumed", "published", "measured")
        origin = min((sample.origin for sample in samples), key=origins.index)
        sources = sorted({sample.source for sample in samples})
        source = sources[0] if len(sources) == 1 else f"{len(sources)} sources, the first: {sources[0]}"
        counted = "curves" if query.workload.recurrent else "samples"
        values[f"{phase}_kernel_{counted}"] = Value(len(samples), spread, origin, source)
    masked_phases = {
        op.phase for op in prediction.schedule.programs[0].ops if isinstance(op, AttentionOp) and op.pairs is not None
    }
    for phase, ratio in MASKED_OVER_PLAIN.items():
        if phase in masked_phases and not curves_of(machine, query.kernel).has_masked(phase):
            values[f"{phase}_masked_over_plain"] = ratio
    if query.cluster.size > 1:
        values["hop_gb_s"] = machine.same_host.hop_gb_s
        if query.hops == "copy" and machine.same_host.copy_gb_s is not None:
            values["copy_gb_s"] = machine.same_host.copy_gb_s
    if query.cluster.hosts > 1:
        nic = machine.other_host.total_gb_s
        if query.cluster.nic_gbit is not None:
            nic = Value(query.cluster.nic_gbit / 8, nic.spread, "assumed", "given: --nic")
        values["nic_gb_s"] = nic
    if prediction.host_bound:
        values["launch_us"] = machine.host.launch_us
    return values


def _samples(prediction: PredictionResult, phase: str) -> Sequence[KernelSample | RecurrenceCurve]:
    """Return the samples of the kernel, or the curves of the recurrence, that a phase is predicted by."""
    query, machine = prediction.query, prediction.machine
    if query.workload.recurrent:
        ops = prediction.schedule.programs[0].ops
        operator = next(op.operator for op in ops if isinstance(op, RecurrenceOp))
        return recurrence_curves_of(machine, query.kernel).curves(phase, operator)
    shape = phase, query.workload.head_dim
    return [sample for sample in machine.kernel(query.kernel).samples if (sample.phase, sample.head_dim) == shape]


def prediction_dict(prediction: PredictionResult, *, whole: bool = True) -> JsonObject:
    """Return a prediction as a dict of schema ``ringprof.prediction/1``; without ``whole``, its figures only."""
    query = prediction.query
    times = dict(zip(_OPPOSITE_PERCENTILES, prediction.interval_ns, strict=True))
    header = {
        "schema": _SCHEMA,
        "predicted": True,
        "evidence": prediction.evidence,
        "warnings": warnings_of(prediction),
        "fits": prediction.fits,
        "device_memory_mib": round(prediction.machine.memory_bytes / 2**20, 1),
        "inputs": [{"name": name, **msgspec.to_builtins(value)} for name, value in inputs(prediction).items()],
    }
    figures = {
        "question": {
            "strategy": query.strategy, "params": prediction.schedule.params,
            "layout": prediction.schedule.layout,
            "workload": msgspec.to_builtins(query.workload), "kernel": query.kernel, "hops": query.hops,
            "hosts": query.cluster.hosts, "gpus_per_host": query.cluster.gpus_per_host,
            "machine": prediction.machine.name, "device": prediction.machine.device,
        },
        "iteration_ms": {name: round(ns / 1e6, 4) for name, ns in times.items()},
        "tflops": {name: round(prediction.tflops(times[other]), 2) for name, other in _OPPOSITE_PERCENTILES.items()},
        "exposed_comm": round(prediction.exposed_share, 5),
        "peak_memory_mib": round(prediction.peak_bytes / 2**20, 1),
        "peak_memory_at": prediction.peak_label,
        "bound_by": prediction.bound_by,
        "parts_ms": {
            phase: {part: round(ns / 1e6, 4) for part, ns in getattr(prediction.breakdown, phase).items()}
            for phase in ("forward", "backward")
        },
        "uncertainty": {name: round(math.sqrt(part), 5) for name, part in prediction.variance_by_input.items()},
        "host_bound": prediction.host_bound,
        "simulated_ranks": len(prediction.timelines),
    }  # fmt: skip
    return {**header, **figures} if whole else figures


_OPPOSITE_PERCENTILES = {"p10": "p90", "p50": "p50", "p90": "p10"}


# --- the time of an iteration: the maximum of device time and host time ---

_NORMAL = NormalDist()
_HALVINGS = 40


@dataclass(frozen=True)
class Lognormal:
    """A lognormal time; ``spread`` is the standard deviation of its logarithm."""

    median_ns: float
    spread: float

    def below(self, ns: float) -> float:
        """Return the probability that the time is at most ``ns``."""
        if not self.median_ns or not self.spread:
            return float(ns >= self.median_ns)
        return _NORMAL.cdf(math.log(ns / self.median_ns) / self.spread)

    def quantile_ns(self, share: float) -> float:
        """Return the time that is not exceeded with probability ``share``."""
        return self.median_ns * math.exp(_NORMAL.inv_cdf(share) * self.spread)


NO_TIME = Lognormal(0.0, 0.0)


@dataclass(frozen=True)
class MaxLognormal:
    """Time of an iteration: the maximum of device time and host time.

    A host issues an iteration while the devices compute the previous one. Both times are lognormal and independent, so
    P(max < t) is the product of both probabilities.
    """

    device: Lognormal
    host: Lognormal = NO_TIME

    def quantile_ns(self, share: float) -> float:
        """Return the time that is not exceeded with probability ``share``, by bisection.

        The quantile is at least each time's own quantile of ``share``, and at most the larger quantile of
        sqrt(``share``).
        """
        times = (self.device, self.host)
        low = max(time.quantile_ns(share) for time in times)
        high = max(time.quantile_ns(math.sqrt(share)) for time in times)
        for _ in range(_HALVINGS if high > low else 0):
            middle = (low + high) / 2
            if self.device.below(middle) * self.host.below(middle) < share:
                low = middle
            else:
                high = middle
        return high

    def scaled(self, by: MaxLognormal, over: MaxLognormal) -> MaxLognormal:
        """Return the time with both medians multiplied by the ratio of those of ``by`` and ``over``."""
        device, host = (
            replace(time, median_ns=time.median_ns * (a.median_ns / b.median_ns if b.median_ns else 1.0))
            for time, a, b in ((self.device, by.device, over.device), (self.host, by.host, over.host))
        )
        return MaxLognormal(device, host)

    @cached_property
    def median_ns(self) -> float:
        """Median of the iteration's time."""
        return self.quantile_ns(0.5)

    @cached_property
    def host_share(self) -> float:
        """Probability that the host is the bound."""
        if not self.host.median_ns:
            return 0.0
        spread = math.hypot(self.device.spread, self.host.spread)
        log_ratio = math.log(self.host.median_ns / self.device.median_ns)
        return _NORMAL.cdf(log_ratio / spread) if spread else float(log_ratio > 0)
