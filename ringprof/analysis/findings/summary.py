"""Summary of a run over all ranks: totals, means and shares, ready to be shown without further arithmetic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import Any

import msgspec
import numpy as np

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.time_table import PARTS
from ringprof.analysis.kinds.kinds import COMMUNICATION, KINDS, OTHER_GROUPS
from ringprof.analysis.rank import LinkTotals, Rank
from ringprof.analysis.transfers.hops import gbps, total
from ringprof.analysis.transfers.wait_and_wire import LinkClass
from ringprof.run import Baselines, slowest, slowest_median

MOST_RANKS_LISTED = 16
"""Largest number of ranks that are listed one by one."""


class TimePart(msgspec.Struct, frozen=True):
    """One part of the time over all ranks, in nanoseconds."""

    name: str
    """One of `PARTS`."""
    mean_ns: float
    min_ns: int
    max_ns: int
    share: float
    """Mean as a share of the mean wall time, 0..1."""


class KindRow(msgspec.Struct, frozen=True):
    """Activities of one kind over all ranks."""

    kind: str
    time_ns: float
    """Summed duration of the activities, mean over ranks."""
    share: float
    """Time in which any of the activities runs, as a share of the wall time; shares of several kinds may overlap."""
    calls: float
    """Number of activities, mean over ranks."""
    average_ns: float
    """Mean duration of one activity."""
    hidden: float | None
    """Share of the time with computation beside it; None for kinds other than communication."""


class Communication(msgspec.Struct, frozen=True):
    """Communication of one kind over one class of link, over all ranks: wait and wire of its kernels."""

    kind: str
    link: str
    """``same_host``, ``other_host`` or ``unknown``."""
    kernels: int
    sent_bytes: int | None
    wait_share: float
    wire_share: float
    wire_gbps: float | None
    """All bytes over all wire time, in GB/s."""
    best_gbps: float | None
    """Best rate of one kernel, in GB/s."""


class BaselineMetrics(msgspec.Struct, frozen=True):
    """Metrics from the baselines of a recording: compute-only, communication-only and kernel-only iterations.

    They show what overlap could gain, and how close the run comes to the speed of its attention blocks alone. Times are
    nanoseconds: medians over iterations of the slowest rank's time, as in the achieved rate. The solo time and metrics
    derived from it are means over ranks, so that ranks with less work are not charged for waiting. All baselines are
    compared with ordinary iterations that were interleaved with them, on equally hot devices.
    """

    rounds: int
    """Number of times that all kinds of iteration were run in turn."""
    iterations: int
    """Number of ordinary iterations, the smallest of any rank."""
    iteration_ns: float
    """Time of an ordinary iteration, interleaved with the baselines."""
    compute_only_ns: float | None
    """Time of an iteration that sends nothing; None for a single rank, which communicates nothing."""
    communication_only_ns: float | None
    """Time of an iteration whose attention kernel computes nothing; None for a single rank."""
    ideal_ns: float | None
    """The larger of compute-only and communication-only time, reached with perfect overlap; None for a single rank."""
    ideal_efficiency: float | None
    """ideal_ns / iteration_ns; None for a single rank."""
    solo_ns: float
    """Time of the attention blocks alone (kernel-only baseline): mean over ranks of each rank's median."""
    solo_tflops: float
    """FLOPs of all ranks' blocks over the sum of their solo times, in TFLOP/s."""
    of_solo: float
    """solo_ns / iteration_ns: share of the solo rate that the iteration reaches."""
    flash_slowdown: float | None
    """Attention kernels' time in the profiled run / solo time - 1, over ranks with a trace; None on CPU, and for a
    single rank."""


class Rates(msgspec.Struct, frozen=True):
    """Metrics from the recorder's measurements; each None where the run does not hold it."""

    tflops: float | None = None
    """TFLOP/s per GPU: model FLOPs per device over the median of the slowest rank's time, without the profiler."""
    tflops_quantiles: dict[str, float] | None = None
    """TFLOP/s per GPU at the quantiles ``p10``, ``p50`` and ``p90`` over iterations."""
    iterations_timed: int = 0
    """Number of timed iterations."""
    block_tflops: float | None = None
    """TFLOP/s of the attention blocks over the union of the attention kernels' intervals, mean over ranks."""
    solo_tflops: float | None = None
    """TFLOP/s of the attention blocks alone, see `BaselineMetrics`."""
    slowest_median_ns: float | None = None
    """Median over iterations of the slowest rank's time, without the profiler."""
    profiler_overhead: float | None = None
    """Slow-down of the profiled iterations, as a share of the time without the profiler."""
    peak_memory_bytes: int | None = None
    """Peak memory of the rank that used most."""
    controls: BaselineMetrics | None = None
    """Metrics of the baselines."""


class RankRow(msgspec.Struct, frozen=True):
    """Times of one rank, or one statistic over all ranks; times in nanoseconds, shares 0..1."""

    label: str
    wall_ns: float
    compute_ns: float
    exposed_comm_ns: float
    exposed_memory_ns: float
    idle_ns: float
    overlap_ratio: float | None
    wait_share: float | None
    """Waiting as a share of the hops' time."""
    wire_gbps: float | None


class Summary(msgspec.Struct, frozen=True):
    """Summary of a run over all ranks."""

    parts: tuple[TimePart, ...]
    """Parts of the time in the order of `PARTS`; the wall time is last."""
    kinds: tuple[KindRow, ...]
    """Kinds of activity that occur, longest first."""
    communication: tuple[Communication, ...]
    """Communication with known wait and wire, longest first."""
    rates: Rates
    iterations: int
    """Number of marked ranges in the window; 1 where nothing is marked."""
    exposed_mean: float
    """Mean exposed communication as a share of the mean wall time, as in ``parts``."""
    exposed_worst: float
    """Largest share of exposed communication of any rank."""
    exposed_worst_rank: int
    overlap_ratio: float | None
    """Overlapped communication time of all ranks over all communication time."""
    slowest_rank: int
    """Rank with the longest wall time."""
    slowest_wall_ns: int
    slowest_excess: float
    """Excess of the slowest rank's wall time over the mean, as a share of the mean."""
    other_share: float
    """Time of kind ``other`` as a share of the wall time."""
    ranks: tuple[RankRow, ...]
    """One row per rank; for more than `MOST_RANKS_LISTED` ranks their ``mean``, ``min`` and ``max``."""
    devices: tuple[str, ...]
    hosts: tuple[str, ...]
    """Names of the hosts; empty where none is known."""
    attention: tuple[str, ...]
    """Families of the attention kernels."""
    window_iterations: int | None = None
    """Number of iterations in the window, including those inside a captured block; None where it is not known."""

    @property
    def times_divisor(self) -> int:
        """Divisor of times over the window: the number of iterations or, if that is not known, of marked ranges."""
        return self.window_iterations or max(1, self.iterations)


def summarise(attribution: Attribution) -> Summary:
    """Summarise a run with at least one rank."""
    ranks = attribution.ranks
    mean_wall_ns = fmean(rank.breakdown.wall_ns for rank in ranks)
    parts = []
    for name in PARTS:
        values = [getattr(rank.breakdown, f"{name}_ns") for rank in ranks]
        if name == "exposed_other_groups" and not any(OTHER_GROUPS in rank.breakdown.kinds for rank in ranks):
            continue
        if name == "background" and not any(values):
            continue
        mean_ns = fmean(values)
        parts.append(TimePart(name, mean_ns, min(values), max(values), _ratio(mean_ns, mean_wall_ns)))
    slowest = max(ranks, key=lambda rank: rank.breakdown.wall_ns)
    shares = [rank.breakdown.exposed_comm_share for rank in ranks]
    worst_index = int(np.argmax(shares))
    kinds = _kind_rows(ranks, mean_wall_ns)
    overlapped_ns = total([rank.breakdown.overlapped_ns for rank in ranks])
    communication_ns = sum(rank.breakdown.comm_ns for rank in ranks)
    return Summary(
        parts=tuple(parts),
        kinds=kinds,
        communication=_communication_rows(attribution),
        rates=_rates(attribution),
        iterations=max(len(rank.iteration_ns) for rank in ranks),
        window_iterations=attribution.window_iterations,
        exposed_mean=next(part.share for part in parts if part.name == "exposed_comm"),
        exposed_worst=shares[worst_index],
        exposed_worst_rank=ranks[worst_index].rank,
        overlap_ratio=None if overlapped_ns is None or not communication_ns else overlapped_ns / communication_ns,
        slowest_rank=slowest.rank,
        slowest_wall_ns=slowest.breakdown.wall_ns,
        slowest_excess=_ratio(slowest.breakdown.wall_ns, mean_wall_ns) - 1.0,
        other_share=next((row.share for row in kinds if row.kind == "other"), 0.0),
        ranks=_rank_rows(ranks),
        devices=_distinct(rank.device for rank in ranks),
        hosts=_distinct(rank.host for rank in ranks),
        attention=_distinct(family for rank in ranks for family in rank.attention),
    )


def _rank_rows(ranks: Sequence[Rank]) -> tuple[RankRow, ...]:
    """Return one row per rank, or statistics over them where they are more than `MOST_RANKS_LISTED`."""
    rows = [
        RankRow(
            label=f"rank {rank.rank}",
            **{name: getattr(rank.breakdown, name) for name in RankRow.__struct_fields__[1:-2]},
            wait_share=rank.hop_totals.wait_share,
            wire_gbps=rank.hop_totals.wire_gbps,
        )
        for rank in ranks
    ]
    if len(rows) <= MOST_RANKS_LISTED:
        return tuple(rows)
    statistics: dict[str, Callable[[list[float]], float]] = {"mean": fmean, "min": min, "max": max}
    rows_of_statistics = []
    for label, statistic in statistics.items():
        values: dict[str, Any] = {}
        for name in RankRow.__struct_fields__[1:]:
            # Fields that some ranks lack are over the other ranks.
            known_values = [value for row in rows if (value := getattr(row, name)) is not None]
            values[name] = statistic(known_values) if known_values else None
        rows_of_statistics.append(RankRow(label, **values))
    return tuple(rows_of_statistics)


def _kind_rows(ranks: Sequence[Rank], wall_ns: float) -> tuple[KindRow, ...]:
    """Return one row per kind that occurs, longest first."""
    rows = []
    for kind in KINDS:
        times = [rank.breakdown.kinds[kind] for rank in ranks if kind in rank.breakdown.kinds]
        if not times:
            continue
        total_ns, calls = sum(kind_time.time_ns for kind_time in times), sum(kind_time.calls for kind_time in times)
        hidden_ns = total([kind_time.hidden_ns for kind_time in times])
        busy_ns = sum(kind_time.busy_ns for kind_time in times)
        rows.append(
            KindRow(
                kind=kind,
                time_ns=total_ns / len(ranks),
                share=_ratio(busy_ns / len(ranks), wall_ns),
                calls=calls / len(ranks),
                average_ns=_ratio(total_ns, calls),
                hidden=None if hidden_ns is None or kind not in COMMUNICATION else _ratio(hidden_ns, total_ns),
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.time_ns))


def _communication_rows(attribution: Attribution) -> tuple[Communication, ...]:
    """Sum up communication with known wait and wire by kind and class of link, longest first."""
    groups: dict[LinkClass, list[LinkTotals]] = defaultdict(list)
    for rank in attribution.ranks:
        for row in rank.link_totals:
            if row.timed:
                groups[row.kind, row.link].append(row)
    rows = []
    for (kind, link), link_totals in groups.items():
        wait_ns, wire_ns = sum(totals.wait_ns for totals in link_totals), sum(totals.wire_ns for totals in link_totals)
        sent_bytes = total([totals.sent_bytes for totals in link_totals])
        communication = Communication(
            kind=kind,
            link=link,
            kernels=sum(totals.timed for totals in link_totals),
            sent_bytes=sent_bytes,
            wait_share=_ratio(wait_ns, wait_ns + wire_ns),
            wire_share=_ratio(wire_ns, wait_ns + wire_ns),
            wire_gbps=gbps(sent_bytes, wire_ns),
            best_gbps=attribution.best_gbps.get((kind, link)),
        )
        rows.append((wait_ns + wire_ns, communication))
    return tuple(row for _, row in sorted(rows, key=lambda item: -item[0]))


# --- what the recorder measured -------------------------------------------------------------------


def _rates(attribution: Attribution) -> Rates:
    """Compute the metrics that need the recorder's measurements."""
    run = attribution.run
    if run is None or attribution.partial_window:
        # Rates, memory and baselines cover whole iterations: they would be misread beside a part of an iteration.
        return Rates()
    slowest_ns = slowest(run.timings.iterations_ns) if run.timings else []
    profiled_ns = slowest(run.profiled.iterations_ns) if run.profiled else []
    median_ns = median(slowest_ns) if slowest_ns else None
    overhead = median(profiled_ns) / median_ns - 1.0 if profiled_ns and median_ns else None
    # A captured block was timed under the profiler only. The median rate is the rate of the median time.
    times_ns = slowest_ns or profiled_ns
    time_of_quantile = (
        {
            "p10": np.quantile(times_ns, 0.9),
            "p50": median(times_ns),
            "p90": np.quantile(times_ns, 0.1),
        }
        if times_ns
        else {}
    )
    quantiles = {name: rate for name, time in time_of_quantile.items() if (rate := run.tflops(float(time)))} or None
    flops = run.block_flops() or {}
    block_rates = [
        flops[rank.rank] * len(rank.iteration_ns) / rank.breakdown.flash_ns / 1e3
        for rank in attribution.ranks
        if rank.rank in flops and rank.breakdown.flash_ns
    ]
    controls = _baseline_metrics(run.controls, attribution.ranks)
    return Rates(
        tflops=quantiles["p50"] if quantiles else None,
        tflops_quantiles=quantiles,
        iterations_timed=len(times_ns),
        block_tflops=fmean(block_rates) if block_rates else None,
        solo_tflops=controls.solo_tflops if controls else None,
        slowest_median_ns=median_ns,
        profiler_overhead=overhead,
        peak_memory_bytes=max(run.peak_memory_bytes) if run.peak_memory_bytes else None,
        controls=controls,
    )


def _baseline_metrics(controls: Baselines | None, ranks: Sequence[Rank]) -> BaselineMetrics | None:
    """Compute the metrics of the baselines; None where none were recorded, or a time is missing or zero."""
    if controls is None:
        return None
    single_rank = len(controls.solo_ns) == 1
    ordinary_ns, compute_only, communication_only = (
        slowest_median(times or [])
        for times in (controls.ordinary_ns, controls.compute_only_ns, controls.communication_only_ns)
    )
    solo_ns = [median(times) if times else 0.0 for times in controls.solo_ns]
    complete = len(solo_ns) == len(controls.solo_flops) and min(solo_ns, default=0) > 0
    if not (ordinary_ns and complete):
        return None
    ideal_ns, mean_solo_ns = None, fmean(solo_ns)
    if single_rank:
        # Older recordings of a single rank hold these baselines, too, although nothing is communicated.
        compute_only = communication_only = None
    elif compute_only and communication_only:
        ideal_ns = max(compute_only, communication_only)
    else:
        return None
    # How much slower attention kernels are in the profiled run is not known where the window is not whole profiled
    # iterations, which have other blocks; nor on CPU, where communication takes time from other ranks' kernels.
    profiled = [rank for rank in ranks if not rank.on_cpu and rank.iteration_ns and rank.rank < len(solo_ns)]
    in_run_ns = sum(rank.breakdown.flash_ns for rank in profiled)
    solo_total_ns = sum(solo_ns[rank.rank] * len(rank.iteration_ns) for rank in profiled)
    is_known = not single_rank and len(profiled) == len(ranks) and in_run_ns and solo_total_ns
    return BaselineMetrics(
        rounds=controls.rounds,
        iterations=min(len(times) for times in controls.ordinary_ns),
        iteration_ns=ordinary_ns,
        compute_only_ns=compute_only,
        communication_only_ns=communication_only,
        ideal_ns=ideal_ns,
        ideal_efficiency=ideal_ns / ordinary_ns if ideal_ns else None,
        solo_ns=mean_solo_ns,
        solo_tflops=sum(controls.solo_flops) / sum(solo_ns) / 1e3,
        of_solo=mean_solo_ns / ordinary_ns,
        flash_slowdown=in_run_ns / solo_total_ns - 1.0 if is_known else None,
    )


def _ratio(part: float, whole: float) -> float:
    """Return ``part`` / ``whole``; 0 where ``whole`` is 0."""
    return part / whole if whole else 0.0


def _distinct(names: Iterable[str | None]) -> tuple[str, ...]:
    """Return the different names in their order, without empty ones."""
    return tuple(dict.fromkeys(name for name in names if name))
