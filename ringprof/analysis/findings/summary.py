"""The run as a whole: what the ranks' figures come to, ready to be shown without further arithmetic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import Any

import msgspec
import numpy as np

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.baselines import BaselineMetrics, baseline_metrics
from ringprof.analysis.kinds.kinds import COMMUNICATION, KINDS, OTHER_GROUPS
from ringprof.analysis.rank import LinkTotals, Rank
from ringprof.analysis.transfers.hops import gbps, total
from ringprof.analysis.transfers.wait_and_wire import LinkClass
from ringprof.run import Run, slowest

MOST_RANKS_LISTED = 16
PARTS = ("compute", "exposed_comm", "exposed_other_groups", "exposed_memory", "background", "idle", "wall")
"""The parts of a rank's time and, last, the wall that they sum to; ``exposed_other_groups`` only where a group was
asked for, ``background`` only where more ran than the window."""


class _Part(msgspec.Struct, frozen=True):
    """One part of the time over all ranks, in nanoseconds."""

    name: str
    mean_ns: float
    min_ns: int
    max_ns: int
    share: float
    """Of the mean wall, 0..1."""


class KindRow(msgspec.Struct, frozen=True):
    """One kind over all ranks."""

    kind: str
    time_ns: float
    """Mean over ranks of the sum of its activities."""
    share: float
    """Of the mean wall; kinds may overlap, so shares need not sum to 1."""
    calls: float
    """Mean over ranks."""
    average_ns: float
    hidden: float | None
    """Share of its time beside computation; of communication kinds only."""


class Communication(msgspec.Struct, frozen=True):
    """One communication kind over all ranks: how its kernels' time splits."""

    kind: str
    link: str
    """``same_host``, ``other_host`` or ``unknown``."""
    kernels: int
    sent_bytes: int | None
    wait_share: float
    wire_share: float
    wire_gbps: float | None
    """All bytes over all wire time."""
    best_gbps: float | None
    """The best rate of one kernel."""


class Rates(msgspec.Struct, frozen=True):
    """Figures that need what the recorder measured; each None where the run does not hold it."""

    tflops: float | None = None
    """Per GPU: model FLOPs per device over the median of the slowest rank's time, without the profiler."""
    tflops_quantiles: dict[str, float] | None = None
    """``p10``, ``p50`` and ``p90`` over iterations."""
    iterations_timed: int = 0
    block_tflops: float | None = None
    """FLOPs of the attention blocks over the union of the attention kernels' intervals, mean over ranks."""
    solo_tflops: float | None = None
    """The same blocks alone, see `ringprof.analysis.findings.baselines`."""
    slowest_median_ns: float | None = None
    profiler_overhead: float | None = None
    """Slow-down of the profiled iterations, as a share of the time without the profiler."""
    peak_memory_bytes: int | None = None
    """Of the rank that used most."""
    controls: BaselineMetrics | None = None


class RankRow(msgspec.Struct, frozen=True):
    """One rank, or one statistic over all; times in nanoseconds, shares 0..1."""

    label: str
    wall_ns: float
    compute_ns: float
    exposed_comm_ns: float
    exposed_memory_ns: float
    idle_ns: float
    overlap_ratio: float | None
    wait_share: float | None
    """Of the hops' time."""
    wire_gbps: float | None


class Summary(msgspec.Struct, frozen=True):
    """The run as a whole."""

    parts: tuple[_Part, ...]
    kinds: tuple[KindRow, ...]
    """Longest first."""
    communication: tuple[Communication, ...]
    rates: Rates
    iterations: int
    """Marked ranges in the window; one where nothing is marked."""
    exposed_mean: float
    """Mean exposed communication over mean wall, as in ``parts``."""
    exposed_worst: float
    exposed_worst_rank: int
    overlap_ratio: float | None
    """All overlapped over all communication time."""
    slowest_rank: int
    slowest_wall_ns: int
    slowest_excess: float
    """How much longer the slowest rank's wall is than the mean, as a share."""
    other_share: float
    """Time of kind ``other`` as a share of the wall."""
    ranks: tuple[RankRow, ...]
    """One a rank; ``mean``, ``min`` and ``max`` over them where they are many."""
    devices: tuple[str, ...]
    hosts: tuple[str, ...]
    """Empty where no host is named."""
    attention: tuple[str, ...]
    """Families of the attention kernels."""
    window_iterations: int | None = None
    """Iterations in the window, those inside a captured block counted; None where that is not known."""

    @property
    def times_divisor(self) -> int:
        """Number by which times over the window are divided: its iterations or, if not known, its marked ranges."""
        return self.window_iterations or max(1, self.iterations)


def summarise(attribution: Attribution) -> Summary:
    """The summary of a run with at least one rank."""
    ranks = attribution.ranks
    parts = _parts(ranks)
    wall = parts[-1]
    last = max(ranks, key=lambda rank: rank.breakdown.wall_ns)
    shares = [rank.breakdown.exposed_comm_share for rank in ranks]
    worst = int(np.argmax(shares))
    kinds = _kinds(ranks, wall.mean_ns)
    return Summary(
        parts=parts,
        kinds=kinds,
        communication=_communication(attribution),
        rates=_rates(attribution),
        iterations=max(len(rank.iteration_ns) for rank in ranks),
        window_iterations=attribution.window_iterations,
        exposed_mean=next(part.share for part in parts if part.name == "exposed_comm"),
        exposed_worst=shares[worst],
        exposed_worst_rank=ranks[worst].rank,
        overlap_ratio=_overlap(ranks),
        slowest_rank=last.rank,
        slowest_wall_ns=last.breakdown.wall_ns,
        slowest_excess=_ratio(last.breakdown.wall_ns, wall.mean_ns) - 1.0,
        other_share=next((row.share for row in kinds if row.kind == "other"), 0.0),
        ranks=_rank_rows(ranks),
        devices=_distinct(rank.device for rank in ranks),
        hosts=_distinct(rank.host for rank in ranks),
        attention=_distinct(family for rank in ranks for family in rank.attention),
    )


def _parts(ranks: Sequence[Rank]) -> tuple[_Part, ...]:
    wall = fmean(rank.breakdown.wall_ns for rank in ranks)
    result = []
    for name in PARTS:
        values = [getattr(rank.breakdown, f"{name}_ns") for rank in ranks]
        if name == "exposed_other_groups" and not any(OTHER_GROUPS in rank.breakdown.kinds for rank in ranks):
            continue
        if name == "background" and not any(values):
            continue
        mean = fmean(values)
        result.append(_Part(name, mean, min(values), max(values), _ratio(mean, wall)))
    return tuple(result)


def _rank_rows(ranks: Sequence[Rank]) -> tuple[RankRow, ...]:
    rows = [_rank_row(rank) for rank in ranks]
    if len(rows) <= MOST_RANKS_LISTED:
        return tuple(rows)
    statistics: tuple[tuple[str, Statistic], ...] = (("mean", fmean), ("min", min), ("max", max))
    return tuple(_over_ranks(label, take, rows) for label, take in statistics)


Statistic = Callable[[list[float]], float]


def _over_ranks(label: str, take: Statistic, rows: Sequence[RankRow]) -> RankRow:
    """One statistic of every figure; of those that not every rank has, over the ranks that have it."""
    values: dict[str, Any] = {"label": label}
    for name in RankRow.__struct_fields__[1:]:
        known = [value for row in rows if (value := getattr(row, name)) is not None]
        values[name] = take(known) if known else None
    return RankRow(**values)


def _rank_row(rank: Rank) -> RankRow:
    b, hops = rank.breakdown, rank.hop_totals
    return RankRow(
        label=f"rank {rank.rank}",
        wall_ns=b.wall_ns,
        compute_ns=b.compute_ns,
        exposed_comm_ns=b.exposed_comm_ns,
        exposed_memory_ns=b.exposed_memory_ns,
        idle_ns=b.idle_ns,
        overlap_ratio=b.overlap_ratio,
        wait_share=hops.wait_share,
        wire_gbps=hops.wire_gbps,
    )


def _kinds(ranks: Sequence[Rank], wall_ns: float) -> tuple[KindRow, ...]:
    rows = []
    for kind in KINDS:
        times = [rank.breakdown.kinds[kind] for rank in ranks if kind in rank.breakdown.kinds]
        if not times:
            continue
        time, calls = sum(t.time_ns for t in times), sum(t.calls for t in times)
        hidden = total([t.hidden_ns for t in times])
        mean = time / len(ranks)
        rows.append(
            KindRow(
                kind=kind,
                time_ns=mean,
                share=_ratio(mean, wall_ns),
                calls=calls / len(ranks),
                average_ns=_ratio(time, calls),
                hidden=None if hidden is None or kind not in COMMUNICATION else _ratio(hidden, time),
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.time_ns))


def _communication(attribution: Attribution) -> tuple[Communication, ...]:
    """By kind and link class, longest first; only what has wait and wire."""
    groups: dict[LinkClass, list[LinkTotals]] = defaultdict(list)
    for rank in attribution.ranks:
        for row in rank.link_totals:
            if row.timed:
                groups[row.kind, row.link].append(row)
    rows = []
    for (kind, link), parts in groups.items():
        wait, wire = sum(part.wait_ns for part in parts), sum(part.wire_ns for part in parts)
        size = total([part.sent_bytes for part in parts])
        made = Communication(
            kind=kind,
            link=link,
            kernels=sum(part.timed for part in parts),
            sent_bytes=size,
            wait_share=_ratio(wait, wait + wire),
            wire_share=_ratio(wire, wait + wire),
            wire_gbps=gbps(size, wire),
            best_gbps=attribution.best_gbps.get((kind, link)),
        )
        rows.append((wait + wire, made))
    return tuple(row for _, row in sorted(rows, key=lambda item: -item[0]))


def _overlap(ranks: Sequence[Rank]) -> float | None:
    overlapped = total([rank.breakdown.overlapped_ns for rank in ranks])
    communication = sum(rank.breakdown.comm_ns for rank in ranks)
    return None if overlapped is None or not communication else overlapped / communication


# --- what the recorder measured -------------------------------------------------------------------


def _rates(attribution: Attribution) -> Rates:
    run = attribution.run
    if run is None or attribution.partial_window:
        # Rates, memory and controls are of whole iterations: beside a part of one they would be read as its own.
        return Rates()
    timed = slowest(run.timings.iterations_ns) if run.timings else []
    profiled = slowest(run.profiled.iterations_ns) if run.profiled else []
    typical = median(timed) if timed else None
    overhead = median(profiled) / typical - 1.0 if profiled and typical else None
    # A captured block was timed under the profiler only.
    rates = _achieved(run, timed or profiled)
    controls = baseline_metrics(run.controls, attribution.ranks)
    return Rates(
        tflops=rates["p50"] if rates else None,
        tflops_quantiles=rates,
        iterations_timed=len(timed or profiled),
        block_tflops=_block_tflops(attribution, run),
        solo_tflops=controls.solo_tflops if controls else None,
        slowest_median_ns=typical,
        profiler_overhead=overhead,
        peak_memory_bytes=max(run.peak_memory_bytes) if run.peak_memory_bytes else None,
        controls=controls,
    )


def _achieved(run: Run, timed: list[int]) -> dict[str, float] | None:
    """TFLOP/s a GPU by quantile over iterations; the median rate is the rate of the median time."""
    if not timed:
        return None
    times = {"p10": np.quantile(timed, 0.9), "p50": median(timed), "p90": np.quantile(timed, 0.1)}
    return {name: rate for name, time in times.items() if (rate := run.tflops(float(time)))} or None


def _block_tflops(attribution: Attribution, run: Run) -> float | None:
    rates, flops = [], run.block_flops()
    for rank in attribution.ranks:
        flash = rank.breakdown.flash_ns
        if flops and rank.rank in flops and flash:
            rates.append(flops[rank.rank] * len(rank.iteration_ns) / flash / 1e3)
    return fmean(rates) if rates else None


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _distinct(names: Iterable[str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if name))
