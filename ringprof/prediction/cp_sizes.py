"""Plan of dynamic context parallelism: the number of ranks of each document of a batch, with steps, balance and time.

Every rank takes at most ``capacity`` tokens in a step. A document runs on the smallest allowed number of ranks that
holds it. The documents of one number of ranks are packed into sequences by first-fit decreasing. A step runs one
sequence on each group of so many ranks; sequences with similar work share a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ringprof.errors import UnsupportedWorkloadError, UsageError
from ringprof.prediction.calibration import Calibration
from ringprof.prediction.kernel_model import OutsideCalibration
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import MAX_EXTRAPOLATED_SHARE, predict
from ringprof.prediction.query import Query
from ringprof.prediction.schedules import schedule_of
from ringprof.workload.workload import Workload

Documents = tuple[int, ...]
TimeOf = Callable[[Documents, int], float]
"""Function that returns the predicted nanoseconds of a sequence of documents on a number of ranks."""
TIMED_STEPS = 6
"""Largest number of steps of one size whose time is predicted; the others are interpolated by their work."""


@dataclass(frozen=True)
class SizePlan:
    """The documents that run on one number of ranks; shares are of the whole batch."""

    size: int
    documents: int
    documents_share: float
    tokens_share: float
    flops_share: float
    sequences: int
    """Number of packed sequences, each on ``size`` ranks."""
    steps: int
    filled: float
    """Tokens over the capacity of all ranks in these steps, 0 to 1."""
    busiest: float
    """Work of the busiest group of each step, summed over the steps, over the mean group's sum; 1 is balanced."""
    time_ns: float | None = None
    """Nanoseconds of attention in these steps, one layer; None without a machine, or if it cannot be predicted."""
    reason: str | None = None
    """Why the time cannot be predicted."""


def plan(
    lengths: Sequence[int], world: int, sizes: Sequence[int], capacity: int, time_of: TimeOf | None = None
) -> dict[str, SizePlan]:
    """Plan a batch of documents of these ``lengths`` on ``world`` ranks of ``capacity`` tokens.

    The keys are the sizes that have documents, ``all`` for them together, and ``all on N`` for the same batch with
    every sequence on the largest size.

    ``sizes`` are the allowed numbers of ranks per document, in any order. Without ``time_of``, times are None.
    Raises `UsageError` for a size that does not divide the world, and for a document longer than the largest size
    holds.
    """
    wrong = next((size for size in sizes if size < 1 or world % size), None)
    if wrong is not None:
        raise UsageError(f"--cp-sizes: groups of {wrong} ranks do not divide {world}")
    if max(lengths) > max(sizes) * capacity:
        raise UsageError(
            f"a document of {max(lengths)} tokens does not fit on {max(sizes)} ranks of {capacity} tokens: give a"
            " larger size, or more --tokens-per-rank"
        )
    ordered = sorted(set(sizes))
    by_size: dict[int, list[int]] = {size: [] for size in ordered}
    for length in lengths:
        by_size[next(size for size in ordered if length <= size * capacity)].append(length)
    plans = [
        _size_plan(size, documents, lengths, world, capacity, time_of)
        for size, documents in by_size.items() if documents
    ]  # fmt: skip
    largest = max(sizes)
    alone = _size_plan(largest, list(lengths), lengths, world, capacity, time_of)
    return {**{str(row.size): row for row in plans}, "all": _total(plans, world), f"all on {largest}": alone}


def packed(documents: Sequence[int], capacity: int) -> list[Documents]:
    """Pack documents into sequences of at most ``capacity`` tokens: longest first, into the first that has room."""
    sequences: list[list[int]] = []
    shortest = min(documents)
    # Sequences that still have room for the shortest document, with that room.
    room: dict[int, int] = {}
    for length in sorted(documents, reverse=True):
        index = next((index for index, left in room.items() if left >= length), len(sequences))
        if index == len(sequences):
            sequences.append([])
        sequences[index].append(length)
        room[index] = room.get(index, capacity) - length
        if room[index] < shortest:
            del room[index]
    return [tuple(sequence) for sequence in sequences]


def _pairs(documents: Sequence[int]) -> int:
    """Count the pairs of a query and a key under a causal mask of each document."""
    return sum(length * (length + 1) // 2 for length in documents)


def _size_plan(
    size: int, documents: Sequence[int], lengths: Sequence[int], world: int, capacity: int, time_of: TimeOf | None
) -> SizePlan:
    """Return the plan of the documents that run on ``size`` ranks, of a batch of ``lengths``."""
    # The sequences of each step, the most work first.
    sequences, at_once = sorted(packed(documents, size * capacity), key=_pairs, reverse=True), world // size
    steps = [sequences[first : first + at_once] for first in range(0, len(sequences), at_once)]
    busiest = [step[0] for step in steps]
    pairs = _pairs(documents)
    time_ns = reason = None
    try:
        time_ns = None if time_of is None else _time_ns(busiest, size, time_of)
    except (UnsupportedWorkloadError, OutsideCalibration) as error:
        reason = str(error)
    return SizePlan(
        size=size, documents=len(documents), documents_share=len(documents) / len(lengths),
        tokens_share=sum(documents) / sum(lengths), flops_share=pairs / _pairs(lengths),
        sequences=len(sequences), steps=len(steps), filled=sum(documents) / (len(steps) * world * capacity),
        busiest=sum(map(_pairs, busiest)) * at_once / pairs,
        time_ns=time_ns, reason=reason,
    )  # fmt: skip


def _total(plans: Sequence[SizePlan], world: int) -> SizePlan:
    """Return all sizes together."""
    steps = sum(plan.steps for plan in plans)
    times = [plan.time_ns for plan in plans if plan.time_ns is not None]
    return SizePlan(
        size=world, documents=sum(plan.documents for plan in plans), documents_share=1.0, tokens_share=1.0,
        flops_share=1.0, sequences=sum(plan.sequences for plan in plans), steps=steps,
        filled=sum(plan.filled * plan.steps for plan in plans) / steps,
        busiest=sum(plan.busiest * plan.flops_share for plan in plans),
        time_ns=sum(times) if len(times) == len(plans) else None,
    )  # fmt: skip


def _time_ns(busiest: Sequence[Documents], size: int, time_of: TimeOf) -> float:
    """Return the nanoseconds of the steps whose busiest sequences these are, most work first.

    At most `TIMED_STEPS` sequences are predicted; the others are interpolated by their pairs. Sequences of documents
    too short for the curves count as the shortest one that could be predicted, if they hold at most
    `MAX_EXTRAPOLATED_SHARE` of the work. Raises what ``time_of`` raises.
    """
    count = min(len(busiest), TIMED_STEPS)
    chosen = sorted({round(index * (len(busiest) - 1) / max(1, count - 1)) for index in range(count)})
    work, points = [_pairs(sequence) for sequence in busiest], []
    for number, index in enumerate(chosen):
        try:
            points.append((work[index], time_of(busiest[index], size)))
        except OutsideCalibration:
            if not points or sum(work[chosen[number - 1] + 1 :]) > MAX_EXTRAPOLATED_SHARE * sum(work):
                raise
            break
    return sum(_interpolate(pairs, points[::-1]) for pairs in work)


def _interpolate(pairs: int, points: Sequence[tuple[int, float]]) -> float:
    """Interpolate nanoseconds between ``points`` of (pairs, ns) in ascending order; beyond them the nearest counts."""
    low = max((point for point in points if point[0] <= pairs), default=points[0])
    high = min((point for point in points if point[0] >= pairs), default=points[-1])
    if low[0] == high[0]:
        return low[1]
    share = (pairs - low[0]) / (high[0] - low[0])
    return (1 - share) * low[1] + share * high[1]


def times_on(machine: Calibration, workload: Workload, strategy: str, cluster: Cluster) -> TimeOf:
    """Return a function that predicts the median time of one layer's attention on neighbouring ranks of ``cluster``.

    ``workload`` has the heads and the passes. The first document is lengthened until the strategy can divide the
    sequence. The function raises like `ringprof.prediction.predict.predict`.
    """

    def time_of(documents: Documents, size: int) -> float:
        hosts, rest = divmod(size, cluster.gpus_per_host)
        if size > cluster.gpus_per_host and rest:
            raise UnsupportedWorkloadError(
                f"groups of {size} ranks are not whole nodes of {cluster.gpus_per_host} GPUs"
            )
        of_group = Cluster(
            hosts=max(1, hosts), gpus_per_host=min(size, cluster.gpus_per_host), nic_gbit=cluster.nic_gbit
        )
        fields: dict[str, Any] = {"documents": None}
        filled = -sum(documents) % (2 * size)
        longest = (documents[0] + filled, *documents[1:])
        if len(documents) > 1:
            fields["documents"] = longest
        sequence = msgspec.structs.replace(workload, seq=sum(longest), **fields)
        return predict(Query(strategy, sequence, of_group, hops="auto"), machine, schedule_of, draws=3).median_ns

    return time_of
