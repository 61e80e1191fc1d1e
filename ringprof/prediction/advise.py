"""Which strategy, degrees and hops for a problem on a cluster: all that fit, foreseen, and the choice among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import msgspec
import numpy as np

from ringprof.errors import RingprofError, UnknownStrategyError, UnsupportedWorkloadError
from ringprof.json_object import JsonObject
from ringprof.prediction.calibration import Calibration
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import PredictionResult, TapeOf, predict, prediction_dict
from ringprof.prediction.query import Query
from ringprof.run import Workload
from ringprof.scale.trace_set import Notify, ignore_progress

_SCHEMA = "ringprof.advice/1"
HIDDEN = 0.02
"""Part of the time up to which waiting for transfers counts as hidden."""
_EQUAL = 0.005
"""Times that are no further apart are equal: which is the shorter, chance says."""
_COMPARED = 3
"""Strategies that are looked at over lengths, hosts and NICs."""
_DRAWS, _DRAWS_FIRST, _NEAR = 4000, 1, 1.1
"""Of all choices' times against each other; of every choice, before those that take up to so many times as long as the
fastest are drawn as often as any prediction."""
_LENGTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
_NICS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
_HOSTS = (0.25, 0.5, 1, 2, 4)
_SHARED = ("forward kernel", "backward kernel", "memory", "unexplained", "host")
"""What two strategies on one machine have in common: it moves both alike."""


@dataclass(frozen=True)
class Choice:
    """One way of running the problem."""

    prediction: PredictionResult
    best: float
    """Probability that no other is faster."""
    on_front: bool
    """Whether no other is faster with as little memory."""
    fits: bool

    @property
    def label(self) -> str:
        return _label(self.prediction.query)


@dataclass(frozen=True)
class Point:
    """The `compared` choices at another length, NIC or number of hosts."""

    at: float
    predictions: tuple[PredictionResult, ...]
    """In the order of those."""


@dataclass(frozen=True)
class Advice:
    """The choices by time, and what would change the first of them."""

    choices: tuple[Choice, ...]
    refused: tuple[tuple[str, str], ...]
    """(what, why)."""
    lengths: tuple[Point, ...]
    """By tokens."""
    nics: tuple[Point, ...]
    """By Gbit/s; empty on one host."""
    hosts: tuple[Point, ...]
    """By hosts, of the same problem; empty where only one can be foreseen."""

    @property
    def first(self) -> Choice:
        return self.choices[0]

    def hidden_from_tokens(self) -> float | None:
        """The length from which on the first choice's transfers are hidden; None where they are at none looked at."""
        return _first_hidden(self.lengths)

    def hidden_from_gbit(self) -> float | None:
        """The rate of a NIC from which on they are."""
        return _first_hidden(self.nics)

    def why_not_the_second(self) -> str:
        """What the runner-up loses most by, and what it gains where that is more than the difference."""
        if len(self.choices) < 2:
            return "there is no other"
        one, other = (choice.prediction for choice in self.choices[:2])
        more = {
            part: other.spans.total(part) - one.spans.total(part)
            for part in ("kernel", "memory", "same_host", "other_host", "peers", "host")
        }
        most, least = max(more, key=lambda name: more[name]), min(more, key=lambda name: more[name])
        longer = other.median_ns - one.median_ns
        named = [most, least] if more[least] < 0 and more[most] > longer else [most]
        apart = f"{100 * longer / one.median_ns:.1f} % ({longer / 1e6:.2f} ms)"
        parts = ", ".join(f"{more[part] / 1e6:+.2f} ms of {_PARTS[part]}" for part in named)
        return f"{self.choices[1].label} takes {apart} longer: {parts}"

    def what_to_measure(self) -> str:
        """The input whose measurement would narrow the first choice's interval most."""
        parts = self.first.prediction.parts
        most = max(parts, key=lambda name: parts[name])
        left = math.sqrt(sum(parts.values()) - parts[most]) / math.sqrt(sum(parts.values()))
        return f"{_MEASURES.get(most, most)}: the interval would be {100 * left:.0f} % as wide"


_PARTS = {
    "kernel": "attention", "memory": "merges and copies", "same_host": "bytes inside hosts",
    "other_host": "bytes between hosts", "peers": "waiting for peers", "host": "launching",
}  # fmt: skip
_MEASURES = {
    "forward kernel": "calibrate the kernel's forward pass at these shapes (ringprof calibrate on one GPU)",
    "backward kernel": "calibrate the kernel's backward pass at these shapes (ringprof calibrate on one GPU)",
    "unexplained": "record one run on such a machine, and calibrate from it",
    "other_host": "measure the rate between two hosts with all GPUs sending",
    "same_host": "calibrate the links on two GPUs", "chance": "nothing: it is the chance of one run against another",
}  # fmt: skip


def advise(
    workload: Workload, cluster: Cluster, machine: Calibration, schedule_of: TapeOf, *, kernel: str = "auto",
    memory_bytes: int | None = None, strategies: Sequence[str] = (), tell: Notify = ignore_progress,
) -> Advice:  # fmt: skip
    """All candidates foreseen, by time; of ``strategies`` alone, where some are named.

    Raises `UnsupportedWorkloadError` where none can run, `UnknownStrategyError` for a name that is none of theirs.
    """
    chosen = (strategies,) if isinstance(strategies, str) else strategies
    every = [*candidates(workload, cluster, machine, kernel)]
    names = dict.fromkeys(query.strategy for query in every)
    for name in chosen:
        if name not in names:
            raise UnknownStrategyError(f"advise has no strategy {name!r} to choose; it has: {', '.join(names)}")
    asked = [query for query in every if not chosen or query.strategy in chosen]
    found, refused = [], []
    for number, query in enumerate(asked):
        tell("strategies", number, len(asked))
        try:
            found.append(predict(query, machine, schedule_of, draws=_DRAWS_FIRST))
        except RingprofError as error:
            refused.append((_label(query), str(error)))
    if not found:
        reasons = dict.fromkeys(why for _, why in refused)
        raise UnsupportedWorkloadError(f"no strategy can run this: {'; '.join(list(reasons)[:3])}")
    room = memory_bytes or machine.memory_bytes

    def order(one: PredictionResult) -> tuple[bool, float]:
        return one.peak_bytes > room, one.median_ns

    least, ns = min(map(order, found))
    near = [order(one) < (least, _NEAR * ns) for one in found]
    found = [predict(one.query, machine, schedule_of) if close else one for one, close in zip(found, near, strict=True)]
    found.sort(key=order)
    chances = chances_of_being_best([one for one in found if one.peak_bytes <= room])
    choices = tuple(
        Choice(one, chances[at] if at < len(chances) else 0.0, _on_front(one, found), one.peak_bytes <= room)
        for at, one in enumerate(found)
    )
    firsts = [choice.prediction for choice in compared(choices)]
    points: list[tuple[Point, ...]] = []
    for what, over in (("lengths", _lengths(workload)), ("NICs", _nics(cluster)), ("hosts", _hosts(cluster))):
        found_at: list[Point] = []
        for number, (at, changed) in enumerate(over):
            tell(what, number, len(over))
            found_at += _point(at, [(one, changed(one.query)) for one in firsts], machine, schedule_of)
        points.append(tuple(found_at))
    return Advice(choices, tuple(refused), *points)


def candidates(workload: Workload, cluster: Cluster, machine: Calibration, kernel: str) -> Iterator[Query]:
    """Every strategy with the degrees, placements, windows and hops that make a difference on this cluster."""
    size, per_host = cluster.size, cluster.gpus_per_host
    engines = ("nccl", "copy") if machine.same_host.copy_gb_s is not None and per_host > 1 else ("nccl",)
    several = cluster.hosts > 1
    sets: list[tuple[str, JsonObject, bool]] = [("zigzag", {}, not several), ("stripe", {}, not several)]
    sets += [("ring", {}, not several)] if not workload.causal else []
    sets += [("burst", {"double_ring": False}, not several), ("megatron", {}, False), ("ulysses", {}, False)]
    sets += [("allgather", {"layout": "zigzag" if workload.causal else "contiguous"}, False)]
    if several:
        sets += [("burst", {"double_ring": True}, True), ("double-ring", {}, True)]
    for degree in (degree for degree in range(2, size) if size % degree == 0 and degree <= workload.heads):
        sets.append(("usp", {"ulysses_degree": degree}, not several))
        if several and degree == per_host:
            sets.append(("double-ring", {"ulysses_degree": degree}, False))
            sets.append(("usp", {"ulysses_degree": degree, "placement": "ring-first"}, False))
    for name, params, copies in sets:
        for hops in engines if copies else engines[:1]:
            yield Query(name, workload, cluster, kernel, hops, params)


def chances_of_being_best(found: Sequence[PredictionResult]) -> list[float]:
    """How often each is the fastest, over draws in which what they share is drawn once for all."""
    if not found:
        return []
    draw = np.random.default_rng(0)
    shared = {name: draw.standard_normal(_DRAWS) for name in _SHARED}
    times = []
    for one in found:
        parts = one.device_parts
        moved = sum(math.sqrt(part) * shared[name] for name, part in parts.items() if name in shared)
        own = math.sqrt(sum(part for name, part in parts.items() if name not in shared))
        device = one.time.device.median_ns * np.exp(moved + own * draw.standard_normal(_DRAWS))
        times.append(np.maximum(device, one.time.host.median_ns * np.exp(one.time.host.spread * shared["host"])))
    best = np.argmin(np.array(times), axis=0)
    return [float(np.mean(best == at)) for at in range(len(found))]


def _on_front(one: PredictionResult, found: Sequence[PredictionResult]) -> bool:
    return not any(
        other.median_ns < one.median_ns and other.peak_bytes <= one.peak_bytes for other in found if other is not one
    )


_Over = Sequence[tuple[float, Callable[[Query], Query]]]
"""Places to look at, and what a question is there."""


def _lengths(workload: Workload) -> _Over:
    def at(seq: int) -> Callable[[Query], Query]:
        return lambda one: replace(one, workload=msgspec.structs.replace(one.workload, seq=seq))

    return [(seq, at(seq)) for seq in (int(workload.seq * factor) for factor in _LENGTHS)]


def _nics(cluster: Cluster) -> _Over:
    def at(gbit: float) -> Callable[[Query], Query]:
        return lambda one: replace(one, cluster=replace(one.cluster, nic_gbit=gbit))

    given = cluster.nic_gbit
    return [] if cluster.hosts == 1 or given is None else [(given * factor, at(given * factor)) for factor in _NICS]


def _hosts(cluster: Cluster) -> _Over:
    def at(hosts: int) -> Callable[[Query], Query]:
        return lambda one: replace(one, cluster=replace(one.cluster, hosts=hosts))

    if cluster.hosts == 1 and cluster.nic_gbit is None:
        return []
    return [(hosts, at(hosts)) for hosts in sorted({round(cluster.hosts * factor) for factor in _HOSTS} - {0})]


def _point(
    at: float, asked: Sequence[tuple[PredictionResult, Query]], machine: Calibration, schedule_of: TapeOf
) -> Iterator[Point]:
    try:
        yield Point(at, tuple(
            known if known.query == query else predict(query, machine, schedule_of, draws=_DRAWS_FIRST)
            for known, query in asked
        ))  # fmt: skip
    except RingprofError:
        return


def _first_hidden(points: Sequence[Point]) -> float | None:
    """Where, for good, the exposed part falls to what counts as hidden; None where the last point has more."""
    over = [point.predictions[0].exposed_share - HIDDEN for point in points]
    if not points or over[-1] > 0:
        return None
    last = max((at for at, more in enumerate(over) if more > 0), default=None)
    return points[0].at if last is None else _zero(points[last].at, points[last + 1].at, over[last], over[last + 1])


def compared(choices: Sequence[Choice]) -> list[Choice]:
    """The first, and the best of each of the next other strategies: its like differ from it by little anywhere."""
    best = {choice.prediction.query.strategy: choice for choice in reversed(choices)}
    others = sorted(best.values(), key=choices.index)
    return others[:_COMPARED]


def crossings(points: Sequence[Point]) -> list[tuple[float, int]]:
    """Where one of the `compared` is as fast as the first, and which."""
    found = []
    for other in range(1, _COMPARED):
        ahead = [
            (point.at, math.log(point.predictions[other].median_ns / point.predictions[0].median_ns))
            for point in points if len(point.predictions) > other
        ]  # fmt: skip
        told_apart = [(at, by) for at, by in ahead if abs(by) > _EQUAL]
        found += [
            (_zero(a, b, one, two), other)
            for (a, one), (b, two) in pairwise(told_apart)
            if (one > 0) != (two > 0)
        ]  # fmt: skip
    return sorted(found)


def _zero(a: float, b: float, at_a: float, at_b: float) -> float:
    """Where a straight line over a logarithmic axis is 0."""
    return float(a * (b / a) ** (at_a / (at_a - at_b)))


def _label(query: Query) -> str:
    given = ", ".join(f"{key}={value}" for key, value in query.params.items())
    copied = ", hops copied" if query.hops == "copy" else ""
    return f"{query.strategy}{f' ({given})' if given else ''}{copied}"


def advice_dict(advice: Advice) -> JsonObject:
    """Schema ``ringprof.advice/1``."""
    return {
        "schema": _SCHEMA,
        "predicted": True,
        "choices": [
            {
                "label": choice.label, "probability_best": round(choice.best, 4), "on_front": choice.on_front,
                "fits": choice.fits, **prediction_dict(choice.prediction, whole=False),
            }
            for choice in advice.choices
        ],
        "inputs": prediction_dict(advice.first.prediction)["inputs"],
        "refused": [{"label": label, "reason": reason} for label, reason in advice.refused],
        "hidden_from_tokens": advice.hidden_from_tokens(),
        "hidden_from_gbit": advice.hidden_from_gbit(),
        "why_not_the_second": advice.why_not_the_second(),
        "what_to_measure": advice.what_to_measure(),
    }  # fmt: skip
