"""From the traces of one run to where its time went: every rank, every hop, and what could not be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ringprof.analysis import groups, intervals, waiting
from ringprof.analysis.breakdown import Breakdown, break_down
from ringprof.analysis.classify import Classified, classify
from ringprof.analysis.clocks import UNKNOWN_NS, Clocks, fit_clocks, one_clock
from ringprof.analysis.cpu import break_down_cpu, is_cpu_trace, marks_waiting
from ringprof.analysis.focus import EVERYTHING, Focus
from ringprof.analysis.from_run import fill
from ringprof.analysis.hops import EMULATED, Hop, Hosts, Split, group_into_hops
from ringprof.analysis.matching import match
from ringprof.analysis.rules import COMPUTE
from ringprof.analysis.transfers import Transfer, transfers_of
from ringprof.analysis.waiting import Waits
from ringprof.analysis.window import Window, find_window
from ringprof.errors import InputError, TraceFormatError, UsageError
from ringprof.run import Run
from ringprof.trace.columns import NONE, Int64, Trace, Warning


@dataclass(frozen=True)
class Rank:
    """One rank: its breakdown over all profiled iterations, and its communication."""

    rank: int
    host: str | None
    device: str | None
    """What the trace calls the device."""
    on_cpu: bool
    classified: Classified
    window: Window
    breakdown: Breakdown
    iterations: tuple[Breakdown, ...]
    """The same for each marked iteration alone; one where nothing was marked."""
    splits: tuple[Split, ...]
    """Its communication kernels, by start, with wait and wire."""
    hops: tuple[Hop, ...]


@dataclass(frozen=True)
class Attribution:
    """What the traces of one run say."""

    ranks: tuple[Rank, ...]
    """By rank."""
    run: Run | None
    best_gbps: dict[tuple[str, str], float]
    """The best rate seen, by (kind, link class)."""
    warnings: tuple[Warning, ...]
    clocks: Clocks = field(default_factory=lambda: one_clock(()))
    """The clocks of the ranks' hosts, and how far they can be told."""

    @property
    def median_iteration(self) -> int | None:
        """Number of the iteration whose slowest rank took the median time (the lower of two middle ones).

        None where only one is marked, or not all ranks have the same number of them.
        """
        counts = {len(rank.iterations) for rank in self.ranks}
        if len(counts) != 1 or counts == {1}:
            return None
        slowest = [
            max(part.wall_ns for part in parts) for parts in zip(*(r.iterations for r in self.ranks), strict=True)
        ]
        return sorted(range(len(slowest)), key=lambda number: (slowest[number], number))[(len(slowest) - 1) // 2]

    @cached_property
    def on_cpu(self) -> bool:
        return all(rank.on_cpu for rank in self.ranks)


def attribute(
    traces: Sequence[Trace], run: Run | None = None, ranks_per_host: int | None = None, focus: Focus = EVERYTHING
) -> Attribution:
    """Explain the traces of one run, one a rank; ``focus`` chooses what part of them.

    ``ranks_per_host`` names the hosts where neither ``run`` nor the traces do. Raises `InputError` where two traces
    are of the same rank or of runs of different size, `TraceFormatError` where a trace holds nothing to analyse,
    `UsageError` where a chosen range or group is not there.
    """
    warnings = [warning for trace in traces for warning in _with_rank(trace)]
    numbered = _by_rank(traces, warnings)
    hosts, source = _hosts(numbered, run, ranks_per_host)
    between_ns = _between(numbered, focus)
    classified = _classified(numbered, focus, warnings)
    ranks = {rank: _explain(rank, hosts[rank], classified[rank], focus, between_ns, warnings) for rank in numbered}
    _note_missing(numbered, run, warnings)
    transfers = {rank: fill(found, run, rank) for rank, (_, found) in ranks.items()}
    clocks, waits = _split(transfers, hosts, source, [explained for explained, _ in ranks.values()], warnings)
    finished = tuple(_with_hops(explained, waits.by_rank[rank]) for rank, (explained, _) in ranks.items())
    return Attribution(finished, run, waits.best_gbps, tuple(_merged(warnings)), clocks)


# --- one rank -------------------------------------------------------------------------------------


def _between(traces: dict[int, Trace], focus: Focus) -> tuple[int, int] | None:
    """The chosen times as unix times, counted from the earliest moment of any trace."""
    if focus.between_ns is None:
        return None
    rows = [trace.operators if is_cpu_trace(trace) else trace.activities for trace in traces.values()]
    start = min((int(columns.start_ns[0]) for columns in rows if len(columns.start_ns)), default=0)
    return start + focus.between_ns[0], start + focus.between_ns[1]


def _classified(traces: dict[int, Trace], focus: Focus, warnings: list[Warning]) -> dict[int, Classified]:
    result = {rank: classify(trace, focus.rules) for rank, trace in traces.items()}
    for rank, trace in traces.items():
        replayed = int(np.count_nonzero(trace.activities.graph_node != NONE))
        if replayed:
            warnings.append(Warning("cuda_graph", f"{replayed} {_CUDA_GRAPH}", rank))
    if focus.group is None:
        return result
    kept = {rank: groups.keep_group(classified, focus.group) for rank, classified in result.items()}
    if not any(one.found for one in kept.values()):
        groups.refuse_unknown_group(focus.group, traces.values())
    for rank, one in kept.items():
        if one.unknown:
            warnings.append(Warning("group_unknown", _GROUP_UNKNOWN, rank, one.unknown))
    return {rank: one.classified for rank, one in kept.items()}


_CUDA_GRAPH = (
    "activities were replayed by CUDA graphs, whose launches are not recorded one by one: not known are the operators "
    "that they belong to and, of communication, peers and bytes"
)
_GROUP_UNKNOWN = "communication kernels without a record of their group do not count as the chosen group's"


def _explain(
    rank: int,
    host: str | None,
    classified: Classified,
    focus: Focus,
    between_ns: tuple[int, int] | None,
    warnings: list[Warning],
) -> tuple[Rank, list[Transfer]]:
    trace = classified.trace
    window = replace(find_window(trace, classified.launch, focus.window), between_ns=between_ns)
    if is_cpu_trace(trace):
        return _explain_cpu(rank, trace, host, classified, window, warnings), []
    if not len(trace.activities.start_ns):
        raise TraceFormatError(f"{trace.path}: the trace holds no GPU activity and no CPU operator: nothing to report")
    if window.source == "trace" and window.marked:
        warnings.append(
            Warning("window_empty", "no activity was launched in the marked iterations: the whole trace is shown", rank)
        )
    everything = window.activities()
    activities = _one_device(trace, _cut(trace, everything, between_ns), rank, warnings)
    chosen = np.zeros(len(trace.activities.start_ns), np.bool_)
    chosen[activities] = True
    iterations = [part[chosen[part]] for part in window.iterations]
    explained = Rank(
        rank=rank,
        host=host,
        device=_device_name(trace, int(trace.activities.device[activities[0]])),
        on_cpu=False,
        classified=classified,
        window=window,
        breakdown=break_down(classified, activities, between_ns),
        iterations=tuple(break_down(classified, part, between_ns) for part in iterations if len(part)),
        splits=(),
        hops=(),
    )
    # Hops are matched over the whole window: cut at times, the ranks would not count the same ones.
    device = trace.activities.device[activities[0]]
    return explained, transfers_of(classified, everything[trace.activities.device[everything] == device], rank)


def _cut(trace: Trace, activities: Int64, between_ns: tuple[int, int] | None) -> Int64:
    """Those that reach into the chosen times."""
    if between_ns is None:
        return activities
    start, end = trace.activities.start_ns[activities], trace.activities.end_ns[activities]
    inside = activities[(start < between_ns[1]) & (end > between_ns[0])]
    if not len(inside):
        raise UsageError(
            f"--between: nothing ran in {trace.path} at that time; times count from the start of the trace"
        )
    return inside


_CPU_TIMES = "on CPU a transfer's own time is not recorded: no overlap, wait and wire"


def _explain_cpu(
    rank: int, trace: Trace, host: str | None, classified: Classified, window: Window, warnings: list[Warning]
) -> Rank:
    whole = break_down_cpu(trace, window)
    if whole is None:
        raise TraceFormatError(f"{trace.path}: its CPU operators span no time: nothing to report")
    parts = [break_down_cpu(trace, window, number) for number in range(len(window.span_ns))]
    if (trace.world_size or 1) > 1 or marks_waiting(trace):
        warnings.append(Warning("cpu_no_transfer_times", _CPU_TIMES, rank))
    if not marks_waiting(trace) and (trace.world_size or 1) > 1:
        warnings.append(
            Warning("cpu_no_wait_marks", "no ringprof::wait range: what communication cost is not in the trace", rank)
        )
    iterations = tuple(part for part in parts if part) or (whole,)
    return Rank(rank, host, None, True, classified, window, whole, iterations, (), ())


def _one_device(trace: Trace, activities: Int64, rank: int, warnings: list[Warning]) -> Int64:
    """The activities of the device that did most: a breakdown is of one device."""
    devices, counts = np.unique(trace.activities.device[activities], return_counts=True)
    if len(devices) == 1:
        return activities
    chosen = int(devices[np.argmax(counts)])
    left_out = int(counts.sum() - counts.max())
    warnings.append(
        Warning(
            "several_devices",
            f"{trace.path}: of {len(devices)} devices only {chosen} is reported; {left_out} activities ran on others",
            rank,
        )
    )
    kept: Int64 = activities[trace.activities.device[activities] == chosen]
    return kept


def _device_name(trace: Trace, index: int) -> str | None:
    return next((device.name for device in trace.devices if device.index == index), None)


def _with_hops(explained: Rank, splits: list[Split]) -> Rank:
    """The rank with its hops, of those that begin in the chosen times."""
    hops, between_ns = group_into_hops(splits, explained.rank), explained.window.between_ns
    if between_ns:
        first, last = between_ns
        splits = [part for part in splits if first <= part.transfer.start_ns < last]
        hops = [hop for hop in hops if first <= hop.start_ns < last]
    activities, compute = explained.classified.trace.activities, explained.classified.of(*COMPUTE)
    computing = intervals.union(activities.start_ns[compute], activities.end_ns[compute])
    # All hops at once: one question to the spans of computation, however many hops there are.
    pieces = [(number, start, end) for number, hop in enumerate(hops) for start, end in hop.busy_ns()]
    place, start, end = np.array(pieces, np.int64).reshape(-1, 3).T
    exposed = np.zeros(len(hops), np.int64)
    np.add.at(exposed, place, end - start - intervals.covered_ns(computing, start, end))
    finished = [
        Hop(explained.rank, number, hop.parts, ns)
        for number, (hop, ns) in enumerate(zip(hops, exposed.tolist(), strict=True))
    ]
    return replace(explained, splits=tuple(splits), hops=tuple(finished))


# --- all ranks --------------------------------------------------------------------------------------


def _with_rank(trace: Trace) -> list[Warning]:
    return [w if w.rank is not None else replace(w, rank=trace.rank) for w in trace.warnings]


def _by_rank(traces: Sequence[Trace], warnings: list[Warning]) -> dict[int, Trace]:
    """The traces by rank. A trace that names no rank takes a free one, in the order given."""
    if not traces:
        raise InputError("no trace to analyse")
    result: dict[int, Trace] = {}
    for trace in traces:
        if trace.rank is None:
            continue
        if trace.rank in result:
            raise InputError(
                f"{trace.path} and {result[trace.rank].path} are both of rank {trace.rank}: give the traces of one run"
            )
        result[trace.rank] = trace
    nameless = [trace for trace in traces if trace.rank is None]
    free = (rank for rank in range(len(traces) * 2 + 1) if rank not in result)
    for trace, rank in zip(nameless, free, strict=False):
        result[rank] = trace
        if len(traces) > 1:
            warnings.append(Warning("unknown_rank", f"{trace.path} names no rank: taken as rank {rank}", rank))
    _refuse_other_sizes(result)
    return dict(sorted(result.items()))


def _refuse_other_sizes(traces: dict[int, Trace]) -> None:
    sizes: dict[int, Trace] = {}
    for trace in traces.values():
        if trace.world_size is not None:
            sizes.setdefault(trace.world_size, trace)
    if len(sizes) > 1:
        (a, first), (b, second) = list(sizes.items())[:2]
        raise InputError(f"{first.path} is of a run of {a} ranks, {second.path} of {b}: give the traces of one run")


def _note_missing(traces: dict[int, Trace], run: Run | None, warnings: list[Warning]) -> None:
    sizes = [trace.world_size for trace in traces.values() if trace.world_size]
    size = run.topology.world_size if run else max(sizes, default=len(traces))
    missing = [rank for rank in range(size) if rank not in traces]
    if missing and not any(warning.code == "missing_ranks" for warning in warnings):
        shown = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        warnings.append(Warning("missing_ranks", f"{len(missing)} of {size} ranks have no trace: {shown}"))


def _hosts(traces: dict[int, Trace], run: Run | None, ranks_per_host: int | None) -> tuple[Hosts, str]:
    """The host of each rank and who says so: ``run``, ``trace``, ``option`` or ``unknown``."""
    if ranks_per_host:
        size = max([*traces, *(rank for t in traces.values() for g in t.groups.values() for rank in g)]) + 1
        return {rank: f"host{rank // ranks_per_host}" for rank in range(size)}, "option"
    if run and run.topology.hosts:
        return _hosts_of_run(run), "run"
    hosts: Hosts = {rank: trace.host for rank, trace in traces.items()}
    return hosts, "trace" if any(hosts.values()) else "unknown"


def _hosts_of_run(run: Run) -> Hosts:
    """The hosts as the strategy saw them: where ranks of one real host were told apart, ``name/0``, ``name/1`` ..."""
    names, per_host = run.topology.hosts, run.topology.ranks_per_host
    if per_host < 1 or all(names.count(name) <= per_host for name in names):
        return dict(enumerate(names))
    return {rank: f"{name}{EMULATED}{rank // per_host}" for rank, name in enumerate(names)}


def _split(
    transfers: dict[int, list[Transfer]], hosts: Hosts, source: str, ranks: list[Rank], warnings: list[Warning]
) -> tuple[Clocks, Waits]:
    """Wait and wire of every communication kernel, or a warning that says why not."""
    matches = match(transfers)
    clock_of = _clock_of(list(transfers), hosts)
    clocks = fit_clocks(matches, clock_of) if len(set(clock_of.values())) > 1 else one_clock(list(transfers))
    waits = waiting.split(matches, hosts, clocks)
    if not any(transfers.values()):
        return clocks, Waits(waits.by_rank, {})
    reasons = sorted(matches.unmatched().items())
    warnings.extend(Warning(*_UNMATCHED[reason], count=count) for reason, count in reasons)
    if clocks.pairs:
        warnings.append(Warning("clocks_fitted", _fit_in_words(clocks)))
    problem = _no_common_clock(ranks, clocks)
    if problem is None and waiting.clocks_disagree(matches, clocks):
        problem = Warning("clocks_disagree", "a transfer ends before its partner begins: no wait and wire")
    if problem:
        if problem.code not in {warning.code for warning in warnings}:
            warnings.append(problem)
        return clocks, Waits(waiting.without_times(waits.by_rank), {})
    if waits.inconclusive:
        warnings.append(Warning("clocks_inconclusive", _INCONCLUSIVE, count=waits.inconclusive))
    return clocks, waits


def _clock_of(ranks: list[int], hosts: Hosts) -> dict[int, str]:
    """The host whose clock each rank reads. Emulated hosts are one real host; no host named at all is taken as one."""
    named = {rank: (hosts.get(rank) or "").partition(EMULATED)[0] for rank in ranks}
    if not any(named.values()):
        return named
    return {rank: name or f"unknown host of rank {rank}" for rank, name in named.items()}


def _fit_in_words(clocks: Clocks) -> str:
    residual = "is not known" if clocks.residual_ns >= UNKNOWN_NS else f"is {clocks.residual_ns / 1e3:.1f} us"
    largest = max(abs(offset) for offset in clocks.offset_ns.values())
    return (
        f"the clocks of {len(set(clocks.host.values()))} hosts are aligned by their transfers, not known to agree: "
        f"offsets up to {largest / 1e3:.1f} us, the largest residual {residual}"
    )


_INCONCLUSIVE = "kernels wait less than the clocks of their hosts can tell: no wait and wire for them"

_UNMATCHED = {
    "rank_missing": ("peer_missing", "transfers whose peers' traces are not here: no wait and wire for them"),
    "counts_differ": ("counts_differ", "transfers that two ranks count differently: no wait and wire for them"),
    "bytes_differ": ("bytes_differ", "transfers whose bytes two ranks record differently: no wait and wire for them"),
    "no_record": ("no_record", "communication kernels without a record of peers and bytes: no wait and wire for them"),
}


def _no_common_clock(ranks: list[Rank], clocks: Clocks) -> Warning | None:
    latest_start = max(rank.breakdown.start_ns + clocks.offset_ns[rank.rank] for rank in ranks)
    if latest_start > min(rank.breakdown.end_ns + clocks.offset_ns[rank.rank] for rank in ranks):
        return Warning("mixed_runs", "the traces do not overlap in time: they are of different runs or clocks")
    return None


def _merged(warnings: list[Warning]) -> list[Warning]:
    """One warning where several ranks raise the same."""
    merged: dict[tuple[str, str], Warning] = {}
    for warning in warnings:
        key = warning.code, warning.message
        known = merged.get(key)
        merged[key] = warning if known is None else replace(known, rank=None, count=known.count + warning.count)
    return list(merged.values())
