"""A prediction: the tape's programs on a machine, drawn several times, with an interval and what binds each phase."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median, pstdev, pvariance

import msgspec

from ringprof.errors import UnsupportedWorkloadError
from ringprof.json_object import JsonObject
from ringprof.prediction.calibration import Calibration, Origin, Value
from ringprof.prediction.host_model import host_ns, times_us
from ringprof.prediction.kernel_model import OutsideCalibration
from ringprof.prediction.lognormal import NO_TIME, Lognormal, Longer
from ringprof.prediction.machine import LIKELIEST, CalibratedMachine, Curves, Draw, curves_of
from ringprof.prediction.network import Cluster, Links
from ringprof.prediction.query import Query
from ringprof.prediction.simulator import Timeline, simulate
from ringprof.record.dryrun.schedule import AttentionOp, CommStart, CommWait, MemoryOp, Op, Program, Schedule

_SCHEMA = "ringprof.prediction/1"
DIRECT = 64
"""Ranks up to which every one is simulated."""
_HOSTS = 101
"""Draws of how far hosts are apart."""
SMALL, LARGE = 16, 32
"""About how many ranks stand for more: a ring's time grows by as much with every host more."""
MOST_SHORT = 0.1
"""Of a pass, in parts of a mask whose time the form alone says."""
TapeOf = Callable[[Query, Cluster, "Sequence[int] | None"], Schedule]
"""The programs of some ranks (all where None) of a question, on a cluster of its own or a smaller one."""


@dataclass(frozen=True)
class _Spans:
    """Where one rank's time goes, in nanoseconds, by phase."""

    forward: dict[str, float]
    backward: dict[str, float]

    def total(self, *parts: str) -> float:
        return sum(phase.get(part, 0.0) for phase in (self.forward, self.backward) for part in parts)


_PARTS = ("kernel", "memory", "same_host", "other_host", "peers", "host")
"""Blocks; kernels between them; waiting for bytes on links inside and between hosts; for peers that came later; and
time in which the host had not yet issued anything."""


@dataclass(frozen=True)
class PredictionResult:
    """What a run would take."""

    query: Query
    """With kernel and hops named."""
    machine: Calibration
    time: Longer
    device_parts: dict[str, float]
    """Of the variance of what the devices need, in its logarithm, by what is not known exactly."""
    spans: _Spans
    """Of the slowest rank."""
    exposed_share: float
    """Of the time, the mean over ranks of waiting for transfers."""
    peak_bytes: int
    peak_label: str
    lead_ns: float
    """How long before the devices come to an iteration its host began it, where that is the bound; else infinite."""
    schedule: Schedule
    """Of the ranks that were simulated last."""
    timelines: list[Timeline]

    def stands_for(self, rank: int) -> int:
        """The simulated rank that ``rank`` is taken to be like: the nearest in its place on a host, or of all."""
        known = [program.rank for program in self.schedule.programs]
        like = [one for one in known if (one - rank) % self.query.cluster.gpus_per_host == 0]
        return min(like or known, key=lambda one: abs(one - rank))

    @property
    def median_ns(self) -> float:
        return self.time.median_ns

    @property
    def host_bound(self) -> bool:
        return self.lead_ns < math.inf

    @property
    def parts(self) -> dict[str, float]:
        """Of the variance of the time's logarithm, by what is not known exactly, each as likely as it decides."""
        host = self.time.host_share
        found = {name: part * (1 - host) ** 2 for name, part in self.device_parts.items()}
        return {**found, "host": (host * self.time.host.spread) ** 2}

    @cached_property
    def interval_ns(self) -> tuple[float, float, float]:
        """What the time lies above in nine of ten cases, in half, and in one of ten."""
        low, middle, high = map(self.time.quantile_ns, (0.1, 0.5, 0.9))
        return low, middle, high

    @property
    def interval_ms(self) -> tuple[float, float, float]:
        low, middle, high = self.interval_ns
        return low / 1e6, middle / 1e6, high / 1e6

    def tflops(self, time_ns: float) -> float:
        """Per GPU, model FLOPs as everywhere."""
        return self.query.workload.model_flops() / self.query.cluster.size / time_ns / 1e3

    @property
    def bound_by(self) -> dict[str, str]:
        """By phase, what takes the largest part of the slowest rank's time."""
        phases = {"forward": self.spans.forward, "backward": self.spans.backward}
        return {name: max(parts, key=lambda part: parts[part]) for name, parts in phases.items() if parts}

    @cached_property
    def evidence(self) -> str:
        """The weakest origin among the inputs that decide: ``measured``, ``published`` or ``assumed``."""
        origins = {value.origin for value in inputs(self).values()}
        return next(origin for origin in ("assumed", "published", "measured") if origin in origins)


def predict(
    query: Query, machine: Calibration, schedule_of: TapeOf, *, draws: int = 15
) -> PredictionResult:  # fmt: skip
    """Foresee one run, drawn ``draws`` times at most.

    Raises `UnsupportedWorkloadError` where the strategy cannot run so, `OutsideCalibration` where the machine's file
    does not
    tell.
    """
    cluster = query.cluster
    refuse_unknown(query, machine)
    kernel = query.kernel_on(machine)
    query = replace(query, kernel=kernel, hops=query.hops_on(machine))
    curves = curves_of(machine, query.kernel)
    if cluster.size <= DIRECT:
        return _simulated(query, machine, curves, schedule_of(query, cluster, None), draws)
    small, large = _smaller(cluster, SMALL), _smaller(cluster, LARGE)
    if _grows(query, schedule_of, small, large):
        return _continued(query, machine, curves, schedule_of, (small, large), draws)
    some = sorted({0, 1, cluster.size // 2, cluster.size - 1})
    return _simulated(query, machine, curves, schedule_of(query, cluster, some), draws)


def _grows(query: Query, schedule_of: TapeOf, small: Cluster, large: Cluster) -> bool:
    """Whether more ranks are more ring steps of the same kind.

    If not, programs are as long on however many ranks, or fewer cannot have such degrees: then some ranks, as they are,
    stand for all.
    """
    try:
        first, second = (len(schedule_of(query, to, [0]).programs[0].ops) for to in (small, large))
    except UnsupportedWorkloadError:
        return False
    return first < second


def refuse_unknown(query: Query, machine: Calibration) -> None:
    """Raises `UnsupportedWorkloadError` for what no calibration speaks of."""
    if query.workload.dtype not in ("bf16", "fp16"):
        raise UnsupportedWorkloadError(f"{query.workload.dtype}: curves are of bf16 and fp16 only")
    if query.cluster.hosts > 1 and query.cluster.nic_gbit is None and machine.other_host.total_gb_s.origin == "assumed":
        raise UnsupportedWorkloadError(
            f"machine {machine.name!r} does not say how hosts are joined: give the NICs' rate (--nic, Gbit/s a GPU)."
            " Sockets cannot be foreseen, their rate depends on the pattern of traffic"
        )
    if query.hops == "copy" and machine.same_host.copy_gb_s is None:
        raise UnsupportedWorkloadError(
            f"machine {machine.name!r} has no rate of copied hops (ringprof calibrate on 2 GPUs)"
        )


# --- one simulation, drawn several times ------------------------------------------------------------


def _simulated(
    query: Query, machine: Calibration, curves: Curves, schedule: Schedule, most_draws: int,
    cluster: Cluster | None = None,
) -> PredictionResult:  # fmt: skip
    programs, cluster = schedule.programs, cluster or query.cluster
    links = Links(machine, cluster)

    def run(draw: Draw, duty: Mapping[int, float] | None, lead_ns: float = math.inf) -> list[Timeline]:
        drawn = CalibratedMachine(machine, links, curves, draw, duty, query.busy_s)
        return simulate(programs, drawn, lead_ns=lead_ns)

    timelines = run(LIKELIEST, None)
    end = _end(timelines)
    duty = {program.rank: busy_share(program, one, end) for program, one in zip(programs, timelines, strict=True)}
    draws = [run(Draw(seed=seed), duty) for seed in range(1, 1 + min(most_draws, _draws(len(programs))))]
    ends = [_end(drawn) for drawn in draws]
    device_ns, chance = median(ends), pvariance([math.log(end) for end in ends])
    timelines = min(draws, key=lambda drawn: abs(_end(drawn) - device_ns))
    issued = [sum(host_ns(machine, curves.kernel, program)) for program in programs]
    host, lead_ns = _host(machine, issued), math.inf
    if host.median_ns > device_ns:
        slower = Draw(host=host.median_ns / max(issued))
        # A host that is done goes on to the next iteration, once it has told the ranks to meet.
        between_ns = 1e3 * times_us(machine, curves.kernel)["collective_us"]
        lead_ns = max(0.0, _end(run(slower, duty, 0.0)) - host.median_ns - between_ns)
        timelines = run(slower, duty, lead_ns)
        host = replace(host, median_ns=_end(timelines))
    slowest = max(range(len(programs)), key=lambda at: timelines[at].end_ns)
    spans = spans_of(programs[slowest], timelines[slowest], cluster)
    parts = _variances(machine, curves, programs[slowest], spans, timelines[slowest].end_ns) | {"chance": chance}
    wider = _elsewhere(machine, "device")
    device = Lognormal(device_ns, wider * math.sqrt(sum(parts.values())))
    time = Longer(device, replace(host, spread=host.spread * _elsewhere(machine, "host")))
    waits = [
        spans_of(program, one, cluster).total("same_host", "other_host", "peers") / one.end_ns
        for program, one in zip(programs, timelines, strict=True)
    ]
    peak = max(programs, key=lambda program: program.peak_bytes)
    return PredictionResult(
        query=query, machine=machine, time=time,
        device_parts={name: wider**2 * part for name, part in parts.items()}, spans=spans,
        exposed_share=sum(waits) / len(waits), peak_bytes=peak.peak_bytes, peak_label=peak.peak_label,
        lead_ns=lead_ns, schedule=schedule, timelines=timelines,
    )  # fmt: skip


def _end(timelines: Sequence[Timeline]) -> float:
    return max(one.end_ns for one in timelines)


def _elsewhere(machine: Calibration, bound: str) -> float:
    return machine.elsewhere[bound].value if bound in machine.elsewhere else 1.0


def _host(machine: Calibration, issued_ns: Sequence[float]) -> Lognormal:
    """What the slowest of the ranks' hosts takes, each of which takes so long where it is one like the mean."""
    figures, chance = machine.host, random.Random(0)
    slowest = [max(ns * chance.gauss(1.0, figures.unlike.value) for ns in issued_ns) for _ in range(_HOSTS)]
    middle = median(slowest)
    if not middle:
        return NO_TIME
    unsteady = 1e3 * machine.unsteady_us.value / middle
    spread = figures.launch_us.spread if figures.pass_spread is None else figures.pass_spread
    return Lognormal(middle, math.hypot(spread, unsteady, pstdev(slowest) / middle))


def _draws(ranks: int) -> int:
    return 15 if ranks <= 8 else 7 if ranks <= LARGE else 3


def busy_share(program: Program, timeline: Timeline, end: float) -> float:
    """The part of an iteration of ``end`` nanoseconds in which a rank computes blocks."""
    spans = (timeline.ops[place] for place, op in enumerate(program.ops) if isinstance(op, AttentionOp))
    return min(1.0, sum(stop - start for start, stop in spans) / end) if end else 0.0


def spans_of(program: Program, timeline: Timeline, cluster: Cluster) -> _Spans:
    """A rank's time by phase and part; where streams run beside each other, a moment is the first's of `_PARTS`."""
    marks: list[tuple[float, int, tuple[int, str]]] = []
    for start, end, part, phase in _pieces(program, timeline, cluster):
        if end > start:
            marks += [(start, 1, (_PARTS.index(part), phase)), (end, -1, (_PARTS.index(part), phase))]
    phases: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
    active: Counter[tuple[int, str]] = Counter()
    last, phase = 0.0, "forward"
    for time_ns, change, key in sorted(marks):
        if time_ns > last:
            index, phase = min((one for one, count in active.items() if count), default=(_PARTS.index("host"), phase))
            phases[phase][_PARTS[index]] = phases[phase].get(_PARTS[index], 0.0) + time_ns - last
        active[key] += change
        last = time_ns
    return _Spans(phases["forward"], phases["backward"])


def _pieces(program: Program, timeline: Timeline, cluster: Cluster) -> Iterator[tuple[float, float, str, str]]:
    """(start, end, part, phase) of what took time on a stream."""
    posts = {op.id: (place, op) for place, op in enumerate(program.ops) if isinstance(op, CommStart)}
    phase = "forward"
    for place, op in enumerate(program.ops):
        start, end = timeline.ops[place]
        phase = _phase(op, posts, phase)
        if isinstance(op, CommWait):
            at, post = posts[op.id]
            ready = min(max(timeline.kernels[at][1], start), end)
            yield start, ready, "peers", phase
            yield ready, end, "other_host" if cluster.hosts_of(post.members) > 1 else "same_host", phase
        elif isinstance(op, AttentionOp | MemoryOp):
            yield start, end, "kernel" if isinstance(op, AttentionOp) else "memory", phase


def _phase(op: Op, posts: Mapping[int, tuple[int, CommStart]], before: str) -> str:
    if isinstance(op, AttentionOp | CommStart):
        return op.phase
    if isinstance(op, CommWait):
        return posts[op.id][1].phase
    return "backward" if isinstance(op, MemoryOp) and op.label.startswith("bwd") else before


def _variances(
    machine: Calibration, curves: Curves, program: Program, spans: _Spans, end_ns: float
) -> dict[str, float]:
    """Variance of the logarithm of the time, by input: what takes a part of the time moves it by as much."""
    parts = {}
    for phase in ("forward", "backward"):
        blocks = [curves.at(op) for op in program.ops if isinstance(op, AttentionOp) and op.phase == phase]
        if blocks:
            whole = sum(one.ns for one in blocks)
            short = sum(one.ns for one in blocks if one.by_form) / whole
            if short > MOST_SHORT:
                raise OutsideCalibration(
                    f"{short:.0%} of the {phase} pass are parts of the mask shorter than calibrated"
                )
            spread = sum(one.ns * one.spread for one in blocks) / whole
            share = (spans.forward if phase == "forward" else spans.backward).get("kernel", 0.0) / end_ns
            parts[f"{phase} kernel"] = (share * spread) ** 2
    for part, value in (
        ("memory", machine.memory_gb_s), ("same_host", machine.same_host.hop_gb_s),
        ("other_host", machine.other_host.total_gb_s), ("peers", Value(1.0, 0.1, "assumed", "")),
    ):  # fmt: skip
        parts[part] = (spans.total(part) / end_ns * value.spread) ** 2
    parts["unexplained"] = machine.noise.value**2 + (1e3 * machine.unsteady_us.value / end_ns) ** 2
    return parts


# --- more ranks than are simulated ------------------------------------------------------------------


def _smaller(cluster: Cluster, about: int) -> Cluster:
    """The same with about so many ranks: fewer hosts, or fewer GPUs where there are not two hosts."""
    if cluster.hosts == 1:
        return replace(cluster, gpus_per_host=about)
    return replace(cluster, hosts=max(about // cluster.gpus_per_host, about // SMALL * 2))


def _continued(
    query: Query, machine: Calibration, curves: Curves, schedule_of: TapeOf,
    clusters: tuple[Cluster, Cluster], draws: int,
) -> PredictionResult:  # fmt: skip
    """By two smaller clusters: every rank's share, messages and communicators as they are, only fewer ring steps.

    A ring that is long compared with what it takes to fill goes on as it has begun, so time and memory grow by as much
    with every rank more.
    """
    ranks = query.cluster.size
    few, many = (to.size for to in clusters)
    small, large = (
        _simulated(query, machine, curves, schedule_of(query, to, None), draws, replace(to, stretch=ranks / to.size))
        for to in clusters
    )

    def onward(a: float, b: float) -> float:
        return b + (b - a) * (ranks - many) / (many - few)

    def spans(name: str) -> dict[str, float]:
        one, other = getattr(small.spans, name), getattr(large.spans, name)
        return {part: max(0.0, onward(one.get(part, 0.0), ns)) for part, ns in other.items()}

    held = [
        max(program.peak_bytes for program in schedule_of(query, to, [0, to.size - 1]).programs)
        for to in (clusters[1], _smaller(clusters[1], 2 * LARGE))
    ]
    return replace(
        large, time=Longer(*(
            Lognormal(onward(one.median_ns, other.median_ns), other.spread)
            for one, other in ((small.time.device, large.time.device), (small.time.host, large.time.host))
        )), spans=_Spans(spans("forward"), spans("backward")),
        peak_bytes=round(large.peak_bytes + (held[1] - held[0]) * (ranks / many - 1)),
    )  # fmt: skip


# --- what it rests on -------------------------------------------------------------------------------


def inputs(prediction: PredictionResult) -> dict[str, Value]:
    """The figures that a prediction rests on, with their origins."""
    machine, query = prediction.machine, prediction.query
    kernel = machine.kernel(query.kernel)
    found = {"memory_gb_s": machine.memory_gb_s, "contention": machine.contention, "heat": machine.heat}
    for phase in ("forward", "backward") if query.workload.backward else ("forward",):
        of = phase, query.workload.head_dim
        samples = [sample for sample in kernel.samples if (sample.phase, sample.head_dim) == of]
        spread = math.sqrt(prediction.parts.get(f"{phase} kernel", 0.0))
        origin: Origin = "measured" if all(sample.origin == "measured" for sample in samples) else "published"
        sources = sorted({sample.source for sample in samples})
        found[f"{phase}_kernel_samples"] = Value(len(samples), spread, origin, _shortened(sources))
    if query.cluster.size > 1:
        found["hop_gb_s"] = machine.same_host.hop_gb_s
        if query.hops == "copy" and machine.same_host.copy_gb_s is not None:
            found["copy_gb_s"] = machine.same_host.copy_gb_s
    if query.cluster.hosts > 1:
        given = query.cluster.nic_gbit
        line = machine.other_host.total_gb_s
        found["nic_gb_s"] = line if given is None else Value(given / 8, line.spread, "assumed", "given: --nic")
    if prediction.host_bound:
        found["launch_us"] = machine.host.launch_us
    return found


def _shortened(sources: Sequence[str]) -> str:
    return sources[0] if len(sources) == 1 else f"{len(sources)} sources, such as {sources[0]}"


def prediction_dict(prediction: PredictionResult, *, whole: bool = True) -> JsonObject:
    """Schema ``ringprof.prediction/1``; without ``whole`` its figures alone, as a part of something larger."""
    query = prediction.query
    times = dict(zip(_OPPOSITE, prediction.interval_ns, strict=True))
    about = {
        "schema": _SCHEMA,
        "predicted": True,
        "evidence": prediction.evidence,
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
        "tflops": {name: round(prediction.tflops(times[other]), 2) for name, other in _OPPOSITE.items()},
        "exposed_comm": round(prediction.exposed_share, 5),
        "peak_memory_mib": round(prediction.peak_bytes / 2**20, 1),
        "peak_memory_at": prediction.peak_label,
        "bound_by": prediction.bound_by,
        "parts_ms": {
            phase: {part: round(ns / 1e6, 4) for part, ns in parts.items()}
            for phase, parts in (("forward", prediction.spans.forward), ("backward", prediction.spans.backward))
        },
        "uncertainty": {name: round(math.sqrt(part), 5) for name, part in prediction.parts.items()},
        "host_bound": prediction.host_bound,
        "simulated_ranks": len(prediction.timelines),
    }  # fmt: skip
    return {**about, **figures} if whole else figures


_OPPOSITE = {"p10": "p90", "p50": "p50", "p90": "p10"}
