"""Attribution of one run's time from its traces: the figures of every rank, and warnings about what is uncertain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice

import msgspec

from ringprof.analysis.rank import Rank
from ringprof.analysis.timeline.kernels import RunKernel
from ringprof.analysis.timeline.window import Focus
from ringprof.analysis.transfers.clocks import UNKNOWN_NS, Clocks, one_clock
from ringprof.analysis.transfers.hops import EMULATED, HostOfRank
from ringprof.analysis.transfers.wait_and_wire import LinkClass
from ringprof.analysis.workload_checks import counted_over_needed, workload_fits, workload_problems
from ringprof.errors import InputError
from ringprof.run import Run
from ringprof.trace.checks import RANKS_LIMIT
from ringprof.trace.columns import CUT_OFF, NO_DEVICE_ACTIVITIES, Notice
from ringprof.trace.one_run import RUN_WARNINGS, TraceFacts, rank_sort_key, split_recordings

MOST_OF_OTHER = 5
"""Largest number of kernels of kind ``other`` that a report lists."""


class Attribution(msgspec.Struct, frozen=True, dict=True):
    """Analysis of the traces of one run."""

    ranks: tuple[Rank, ...]
    """Ranks that have a trace, in ascending order."""
    run: Run | None
    """Contents of ``run.json``; None where there is none."""
    best_gbps: dict[LinkClass, float]
    """Best measured rate in GB/s, by (kind, link class)."""
    warnings: tuple[Notice, ...]
    clocks: Clocks = msgspec.field(default_factory=lambda: one_clock(()))
    """Clock offsets of the ranks' hosts, with their uncertainty."""
    world_size: int = 0
    """Number of ranks of the run, as far as is known. Ranks without a trace are not in ``ranks``."""
    kernels: tuple[RunKernel, ...] = ()
    """Device activities by name, summed over all ranks, longest first."""

    @property
    def slowest_iterations_ns(self) -> list[int]:
        """Time of each iteration on its slowest rank; empty where the ranks have different numbers of iterations."""
        if len({len(rank.iteration_ns) for rank in self.ranks}) != 1:
            return []
        return [max(walls) for walls in zip(*(rank.iteration_ns for rank in self.ranks), strict=True)]

    @property
    def median_iteration(self) -> int | None:
        """Index of the iteration whose slowest rank took the median time (the lower of two middle ones).

        None where only one iteration is marked, or the ranks have different numbers of iterations.
        """
        slowest = self.slowest_iterations_ns
        if len(slowest) < 2:
            return None
        return sorted(range(len(slowest)), key=lambda number: (slowest[number], number))[(len(slowest) - 1) // 2]

    @property
    def partial_window(self) -> bool:
        """Whether the user chose a part of the iterations: a range of another name, or times."""
        return any(rank.partial_window for rank in self.ranks)

    @cached_property
    def window_iterations(self) -> int | None:
        """Number of iterations in the window; None where it is not known, and for a part of an iteration.

        In a block that `capture` recorded, iterations are the training steps that all traces show, or else those that
        the workload states.
        """
        ranks, run = self.ranks, self.run
        sources = {rank.window_source for rank in ranks}
        if self.partial_window or len(sources) > 1:
            return None
        counted = _counted_steps(ranks)
        if run is None or "ringprof" not in sources:
            return counted
        if not run.captured:
            marked = {len(rank.iteration_ns) for rank in ranks}
            return marked.pop() if len(marked) == 1 else None
        stated = run.workload.steps if run.workload is not None and workload_fits(run) else None
        if counted is None or stated is None:
            return counted or stated
        # Several optimizers may step in one iteration: the counted FLOPs then confirm the stated number.
        return min(counted, stated) if counted_over_needed(run) is not None else counted

    @cached_property
    def times_are_of(self) -> str:
        """Unit that the window's times stand for after division: ``one iteration``, ``the captured block`` ..."""
        sources, count, run = {rank.window_source for rank in self.ranks}, self.window_iterations, self.run
        recorded_here = "ringprof" in sources
        if count is not None:
            captured = recorded_here and (run is None or run.captured) and count > 1
            return f"one iteration ({count} captured)" if captured else "one iteration"
        if self.partial_window:
            return "one chosen range" if max(len(rank.iteration_ns) for rank in self.ranks) > 1 else "the chosen window"
        if sources == {"trace"}:
            return "the whole trace"
        if not recorded_here or len(sources) > 1:
            return "each rank's window"
        return "the captured block" if run is not None else "one ringprof::iteration range"

    @property
    def recurrent(self) -> bool:
        """Whether the run is a recorded recurrence, which has no attention."""
        return self.run is not None and self.run.workload is not None and self.run.workload.recurrent

    @cached_property
    def on_cpu(self) -> bool:
        """Whether every rank ran on CPU."""
        return all(rank.on_cpu for rank in self.ranks)

    @property
    def lacks_device(self) -> bool:
        """Whether the run used GPUs but no trace holds any GPU activity."""
        return self.on_cpu and any(warning.code == NO_DEVICE_ACTIVITIES for warning in self.warnings)

    @property
    def largest_of_other(self) -> tuple[RunKernel, ...]:
        """Longest kernels of kind ``other``, which no classification rule matches; at most `MOST_OF_OTHER`."""
        return tuple(kernel for kernel in self.kernels if kernel.kind == "other")[:MOST_OF_OTHER]


# --- before any trace is analysed ----------------------------------------------------------------------


_MOST_LISTED = 8


class RunInfo(msgspec.Struct, frozen=True):
    """Ranks, hosts and clocks of a run, known before any activity is analysed."""

    trace_index: dict[int, int]
    """Rank -> index of its trace in the given order; ascending by rank."""
    hosts: HostOfRank
    clock_of: dict[int, str]
    """Rank -> name of the clock that its times are by."""
    warnings: tuple[Notice, ...]
    world_size: int
    expected: Collection[int]
    """Ranks that should have a trace, ascending."""
    starts_ns: dict[int, int]
    """Rank -> start of its trace, by its own clock."""
    chosen_ns: tuple[int, int] | None
    """Start and end that the user chose, counted from the earliest start of any trace; None for all times."""
    offset_ns: Mapping[int, int] = msgspec.field(default_factory=dict)
    """Rank -> offset to add to its times for one common clock; empty until clocks are fitted, and for a single one."""

    @property
    def needs_clocks(self) -> bool:
        """Whether clocks must be fitted before the chosen times apply to every rank."""
        return self.chosen_ns is not None and len(set(self.clock_of.values())) > 1

    def chosen_by_rank(self) -> dict[int, tuple[int, int]]:
        """Map every rank to the chosen times as Unix times by its own clock; empty where no times are chosen."""
        if self.chosen_ns is None:
            return {}
        first, last = self.chosen_ns
        # The earliest start of any rank's trace, on the common clock.
        earliest = min((start + self.offset_ns.get(rank, 0) for rank, start in self.starts_ns.items()), default=0)
        starts = {rank: earliest - self.offset_ns.get(rank, 0) for rank in self.trace_index}
        return {rank: (start + first, start + last) for rank, start in starts.items()}

    def missing(self) -> list[Notice]:
        """Return a warning where ranks have no trace; else an empty list."""
        count = len(self.expected) - sum(rank in self.expected for rank in self.trace_index)
        if not count:
            return []
        first = islice((rank for rank in self.expected if rank not in self.trace_index), _MOST_LISTED)
        shown = ", ".join(map(str, first)) + (" ..." if count > _MOST_LISTED else "")
        return [Notice("missing_ranks", f"{count} of {self.world_size} ranks have no trace: {shown}")]


_EXCLUDED = (
    (CUT_OFF, "is cut off"),
    ({NO_DEVICE_ACTIVITIES}, "has no device activities, which others have"),
)
"""Warning codes for which a trace is excluded if others lack them, each with the reason.

Means over complete and incomplete traces would mislead.
"""


def read_run_info(facts: Sequence[TraceFacts], run: Run | None, ranks_per_host: int | None, focus: Focus) -> RunInfo:
    """Determine the ranks, hosts and clocks of one run's traces. Raises `InputError` for traces of several runs."""
    # Each warning gets its trace's rank unless it concerns the whole run.
    warnings = [
        warning
        if warning.rank is not None or warning.code in RUN_WARNINGS
        else msgspec.structs.replace(warning, rank=trace.rank)
        for trace in facts
        for warning in trace.warnings
    ]
    trace_index = _trace_index_by_rank(facts, warnings)
    mixed = [warning for warning in warnings if warning.code == "mixed_runs"]
    if mixed and run is None and not focus.mixed_runs:
        # Means over several runs would describe neither.
        raise InputError(f"{mixed[0].message} Give those of one, or take them together with --mixed-runs")
    if run is not None:
        # Traces named by a run.json are of one run, although one rank may end before another begins.
        warnings = [warning for warning in warnings if warning.code != "mixed_runs"]
    ranks_with_trace = tuple(trace_index)
    for codes, reason in _EXCLUDED:
        excluded = {
            rank for rank, index in trace_index.items() if codes & {warning.code for warning in facts[index].warnings}
        }
        if excluded < trace_index.keys():
            trace_index = {rank: index for rank, index in trace_index.items() if rank not in excluded}
            warnings += [
                Notice("left_out", f"the trace {reason}: the rank is left out", rank) for rank in sorted(excluded)
            ]
    if run is not None:
        warnings += workload_problems(run)
    trace_by_rank = {rank: facts[index] for rank, index in trace_index.items()}
    hosts = hosts_of(trace_by_rank, run, ranks_per_host)
    stated_sizes = [trace.world_size for trace in facts if trace.world_size]
    # A single trace that states no world size is a run of one rank, even if its file is called rank2.
    fallback_size = 1 if len(ranks_with_trace) == 1 else max(ranks_with_trace) + 1
    world_size = run.topology.world_size if run else max(stated_sizes, default=fallback_size)
    expected: Collection[int] = ranks_with_trace
    if run and run.topology.ranks:
        expected = dict.fromkeys(run.topology.ranks)
    elif run or stated_sizes or len(ranks_with_trace) > 1:
        expected = range(world_size)
    return RunInfo(
        trace_index=trace_index,
        hosts=hosts,
        clock_of=clock_of(trace_by_rank, hosts),
        warnings=tuple(warnings),
        world_size=world_size,
        expected=expected,
        starts_ns={rank: trace.span_ns[0] for rank, trace in trace_by_rank.items() if trace.span_ns},
        chosen_ns=focus.between_ns,
    )


def _trace_index_by_rank(facts: Sequence[TraceFacts], warnings: list[Notice]) -> dict[int, int]:
    """Map each rank to the index of its trace, ascending by rank.

    A trace that names no rank takes a free one, in the given order. Raises `InputError` for two traces of one rank.
    """
    if not facts:
        raise InputError("no trace to analyse")
    index_by_rank: dict[int, int] = {}
    for index, trace in enumerate(facts):
        if trace.rank is None:
            continue
        if trace.rank in index_by_rank:
            raise InputError(_same_rank_message(facts[index_by_rank[trace.rank]], trace, facts))
        index_by_rank[trace.rank] = index
    without_rank = [index for index, trace in enumerate(facts) if trace.rank is None]
    free_ranks = (rank for rank in range(len(facts) * 2 + 1) if rank not in index_by_rank)
    for index, rank in zip(without_rank, free_ranks, strict=False):
        index_by_rank[rank] = index
        if len(facts) > 1:
            warnings.append(Notice("unknown_rank", f"{facts[index].path} names no rank: taken as rank {rank}", rank))
    sizes: dict[int, TraceFacts] = {}
    for trace in facts:
        if trace.world_size is not None:
            sizes.setdefault(trace.world_size, trace)
    if len(sizes) > 1:
        (a, first), (b, second) = list(sizes.items())[:2]
        raise InputError(f"{first.path} is of a run of {a} ranks, {second.path} of {b}: give the traces of one run")
    return dict(sorted(index_by_rank.items()))


def _same_rank_message(first: TraceFacts, second: TraceFacts, facts: Sequence[TraceFacts]) -> str:
    """Say that two traces are of the same rank, and which traces to give instead."""
    message = f"{second.path} and {first.path} are both of rank {first.rank}: give the traces of one run"
    recordings = split_recordings(facts)
    if not recordings:
        return message
    last_paths = " ".join(trace.path for trace in sorted(recordings[-1], key=rank_sort_key))
    return (
        f"{message}; these are of {len(recordings)}, one after another (a profiler's schedule?). The last: {last_paths}"
    )


# --- all ranks --------------------------------------------------------------------------------------


def judge_matching(
    ranks: Sequence[Rank], clocks: Clocks, unmatched: Mapping[str, int], inconclusive: int, *, disagree: bool
) -> tuple[bool, list[Notice]]:
    """Decide whether wait and wire times can be separated, and collect the warnings about matched transfers.

    ``unmatched``: number of transfers without a partner, by reason. ``inconclusive``: number of transfers whose wait is
    shorter than the uncertainty of the clocks. ``disagree``: whether the clocks contradict a transfer.
    """
    warnings = [Notice(*_UNMATCHED[reason], count=count) for reason, count in sorted(unmatched.items())]
    if clocks.pairs:
        residual = "is not known" if clocks.residual_ns >= UNKNOWN_NS else f"is {clocks.residual_ns / 1e3:.1f} us"
        largest = max(abs(offset) for offset in clocks.offset_ns.values())
        message = (
            f"the clocks of {len(set(clocks.host.values()))} hosts are aligned by their transfers, not known to agree: "
            f"offsets up to {largest / 1e3:.1f} us, the largest residual {residual}"
        )
        warnings.append(Notice("clocks_fitted", message))
    problem = None
    latest_start = max(rank.breakdown.start_ns + clocks.offset_ns[rank.rank] for rank in ranks)
    earliest_end = min(rank.breakdown.end_ns + clocks.offset_ns[rank.rank] for rank in ranks)
    # Times of CPU ranks are not compared with each other.
    if latest_start > earliest_end and not all(rank.on_cpu for rank in ranks):
        problem = Notice("mixed_runs", "the traces do not overlap in time: they are of different runs or clocks")
    elif disagree:
        # Where no host is named, all ranks are assumed to share one clock.
        fit = (
            ""
            if all(rank.host for rank in ranks)
            else ": if these ranks are of several nodes, --ranks-per-node has their clocks fitted"
        )
        problem = Notice("clocks_disagree", f"a transfer ends before its partner begins: no wait and wire{fit}")
    if problem:
        return False, [*warnings, problem]
    if inconclusive:
        warnings.append(Notice("clocks_inconclusive", _INCONCLUSIVE, count=inconclusive))
    return True, warnings


_INCONCLUSIVE = "kernels wait less than the clocks of their hosts can tell: no wait and wire for them"

_UNMATCHED = {
    "rank_missing": ("peer_missing", "transfers whose peers' traces are not here: no wait and wire for them"),
    "counts_differ": ("counts_differ", "transfers that two ranks count differently: no wait and wire for them"),
    "bytes_differ": ("bytes_differ", "transfers whose bytes two ranks record differently: no wait and wire for them"),
    "no_record": ("no_record", "communication kernels without a record of peers and bytes: no wait and wire for them"),
}


def all_warnings(
    info: RunInfo, input_warnings: Sequence[Notice], matching_warnings: Sequence[Notice]
) -> tuple[Notice, ...]:
    """Return input warnings, missing ranks, then matching warnings; `mixed_runs` is not repeated."""
    input_codes = {warning.code for warning in input_warnings}
    new_warnings = [
        warning for warning in matching_warnings if warning.code != "mixed_runs" or warning.code not in input_codes
    ]
    return merge_warnings([*input_warnings, *info.missing(), *new_warnings])


def merge_warnings(warnings: Iterable[Notice]) -> tuple[Notice, ...]:
    """Merge equal warnings of several ranks into one, and add up their counts."""
    merged: dict[tuple[str, str], Notice] = {}
    for warning in warnings:
        key = warning.code, warning.message
        earlier = merged.get(key)
        merged[key] = (
            warning
            if earlier is None
            else msgspec.structs.replace(earlier, rank=None, count=earlier.count + warning.count)
        )
    return tuple(merged.values())


def steps_warning(ranks: Sequence[Rank], run: Run | None) -> list[Notice]:
    """Warn where a captured block has more steps than its workload states, and no counted FLOPs check that."""
    if run is None or run.workload is None or not run.captured or counted_over_needed(run) is not None:
        return []
    counted, stated = _counted_steps(ranks), run.workload.steps
    if counted is None or counted <= stated:
        return []
    message = (
        f"the workload states {stated} step{'s' if stated > 1 else ''}, the captured block has {counted} optimizer "
        f"steps: unless several of them share an iteration, state Workload(steps={counted}), or TFLOP/s are too low"
    )
    return [Notice("workload_steps_differ", message)]


def _counted_steps(ranks: Sequence[Rank]) -> int | None:
    """Return the training steps that all traces show; None where they differ or none is shown."""
    counts = {rank.steps for rank in ranks}
    return counts.pop() if len(counts) == 1 else None


# --- hosts ---------------------------------------------------------------------------------------


def hosts_of(facts: Mapping[int, TraceFacts], run: Run | None, ranks_per_host: int | None) -> HostOfRank:
    """Return each rank's host: grouped by ``ranks_per_host``, else named by the run, else named by the traces."""
    if ranks_per_host:
        size = min(max([*facts, *(rank_facts.largest_peer for rank_facts in facts.values())]) + 1, RANKS_LIMIT)
        return {rank: f"host{rank // ranks_per_host}" for rank in range(size)}
    if run and run.topology.hosts:
        names, per_host = run.topology.hosts, run.topology.ranks_per_host
        if max(Counter(names).values()) <= per_host:
            return dict(zip(run.ranks(), names, strict=True))
        return {
            rank: f"{name}{EMULATED}{index // per_host}"
            for index, (rank, name) in enumerate(zip(run.ranks(), names, strict=True))
        }
    return {rank: rank_facts.host for rank, rank_facts in facts.items()}


def clock_of(ranks: Iterable[int], hosts: HostOfRank) -> dict[int, str]:
    """Return the host whose clock each rank reads.

    Hosts emulated on one real host share its clock. Where no host has a name, all ranks count as one host.
    """
    named = {rank: (hosts.get(rank) or "").partition(EMULATED)[0] for rank in ranks}
    if not any(named.values()):
        return named
    return {rank: name or f"unknown host of rank {rank}" for rank, name in named.items()}
