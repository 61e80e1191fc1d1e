"""Analysis of one rank's trace: its window, its breakdown and, with the other ranks' data, its communication."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from ringprof.analysis import intervals
from ringprof.analysis.cross_checks import warn_of_fused_kernels, warn_of_overfull_streams
from ringprof.analysis.exposure import exposure_of
from ringprof.analysis.kinds import groups
from ringprof.analysis.kinds.classify import Classified, classify
from ringprof.analysis.kinds.kinds import COMMUNICATION, COMPUTE, KINDS, OTHER_GROUPS
from ringprof.analysis.rank import Detail, ExposedTime, Rank, sum_by_link
from ringprof.analysis.timeline.breakdown import break_down
from ringprof.analysis.timeline.cpu import (
    blocked_by_channel,
    break_down_cpu,
    exposed_ranges,
    is_cpu_trace,
    marks_waiting,
)
from ringprof.analysis.timeline.idle import idle_causes
from ringprof.analysis.timeline.kernels import RankKernel, launch_statistics, launched_one_by_one, rank_kernels
from ringprof.analysis.timeline.layers import cpu_layers, device_layers
from ringprof.analysis.timeline.products import cpu_products, device_products
from ringprof.analysis.timeline.recurrence import cpu_recurrence, device_recurrence
from ringprof.analysis.timeline.rows import DeviceActivities, TimedActivities, timed_activities
from ringprof.analysis.timeline.window import Focus, Window, find_window
from ringprof.analysis.timeline.work import cpu_work, device_work
from ringprof.analysis.transfers.collectives import collectives_of
from ringprof.analysis.transfers.hops import PeerBlock, Split, TimedHop, group_into_hops, hop_totals, spans_of, total
from ringprof.analysis.transfers.transfers import Transfer, transfers_of
from ringprof.common.formatting import milliseconds
from ringprof.errors import TraceFormatError, UsageError
from ringprof.trace.columns import MEMCPY, NONE, Notice, Trace


def explain(
    rank: int, host: str | None, trace: Trace, focus: Focus, between_ns: tuple[int, int] | None = None
) -> tuple[Rank, Detail, list[Transfer], tuple[Notice, ...], bool, Sequence[RankKernel]]:
    """Analyse one trace, without the others, as that of ``rank``.

    ``between_ns`` are the chosen start and end as Unix times. Return the rank's metrics without those of communication,
    its detail, transfers and warnings, whether the chosen process group communicates on this rank (true where none was
    chosen), and the device activities by name (empty on CPU).

    Raises `TraceFormatError` where the trace holds nothing to analyse, `UsageError` where it lacks a chosen range.
    """
    warnings: list[Notice] = []
    classified = classify(trace, focus.rules)
    replayed = int(np.count_nonzero(trace.activities.graph_node != NONE))
    if replayed:
        warnings.append(Notice("cuda_graph", f"{replayed} {_CUDA_GRAPH}", rank))
    in_group = True
    if focus.group is not None:
        classified, in_group, unknown = groups.keep_group(classified, focus.group)
        if unknown:
            warnings.append(Notice("group_unknown", _GROUP_UNKNOWN, rank, unknown))
    window = msgspec.structs.replace(find_window(trace, classified.launch, focus.window), between_ns=between_ns)
    if is_cpu_trace(trace):
        metrics, detail = _explain_cpu(rank, host, classified, window, warnings)
        return metrics, detail, [], tuple(warnings), in_group, ()
    if not len(trace.activities.start_ns):
        raise TraceFormatError(f"{trace.path}: the trace holds no GPU activity and no CPU operator: nothing to report")
    if window.source == "trace" and window.marked:
        warnings.append(
            Notice("window_empty", "no activity was launched in the marked iterations: the whole trace is shown", rank)
        )
    in_window = window.activities()
    chosen = timed_activities(classified, in_window, None, between_ns).activity
    if not len(chosen):
        raise UsageError(
            f"--between: nothing ran in {trace.path} at that time; times count from the start of the trace"
        )
    # A breakdown covers one device: the one that is busy longest.
    busy_ns = trace.activities.busy_ns(chosen)
    device = max(busy_ns, key=lambda index: busy_ns[index])
    if len(busy_ns) > 1:
        others = f"others are busy for {milliseconds(sum(busy_ns.values()) - busy_ns[device])}"
        message = f"{trace.path}: of {len(busy_ns)} devices only {device} is reported, the busiest; {others}"
        warnings.append(Notice("several_devices", message, rank))
    rows = timed_activities(classified, in_window, device, between_ns)
    warnings += warn_of_overfull_streams(rows, trace, rank)
    warnings += warn_of_fused_kernels(rows, trace, rank)
    background = DeviceActivities(classified, device).background(rows)
    unlaunched = background.take(np.flatnonzero(classified.launch[background.activity] == NONE))
    if len(unlaunched.activity) and between_ns is None:
        warnings.append(_launched_before(unlaunched, rank))
    all_comm = classified.of(*COMMUNICATION, OTHER_GROUPS)
    all_comm[rows.activity] &= ~rows.of(*COMMUNICATION)
    # Hops are matched over the whole window: within chosen times the ranks would count different hops.
    on_device = in_window[trace.activities.device[in_window] == device]
    transfers = transfers_of(classified, on_device, rank)
    name_indices = [index for index, name in enumerate(trace.names) if _FROM_HOST.search(name)]
    columns = trace.activities
    copies = (columns.category[on_device] == MEMCPY) & np.isin(columns.name[on_device], name_indices)
    sizes = columns.size_bytes[on_device[copies]]
    metrics = Rank(
        rank=rank,
        host=host,
        device=next((device_info.name for device_info in trace.devices if device_info.index == device), None),
        on_cpu=False,
        path=trace.path,
        world_size=trace.world_size,
        attention=classified.attention,
        partial_window=_is_partial(window),
        window_source=window.source,
        steps=window.steps,
        breakdown=break_down(rows, background),
        left_out_comm_ns=intervals.length_ns(
            intervals.union(trace.activities.start_ns[all_comm], trace.activities.end_ns[all_comm])
        ),
        iteration_ns=tuple(int(part.end_ns.max() - part.start_ns.min()) for part in window.by_iteration(rows)),
        launches=launch_statistics(classified, rows),
        producer=trace.producer,
        one_by_one=launched_one_by_one(classified, rows),
        sent_bytes=total([transfer.sent_bytes for transfer in transfers]),
        from_host_bytes=None if np.any(sizes == NONE) else int(sizes.sum()),
        part_work=device_work(classified, rows),
        products=device_products(classified, rows),
    )
    detail, kernels = Detail(classified, window, device), rank_kernels(rows, background, trace)
    return metrics, detail, transfers, tuple(warnings), in_group, kernels


def _launched_before(rows: TimedActivities, rank: int) -> Notice:
    """Return the warning about background without a launch record, with its time and its communication."""
    time_ns, comm_ns = (intervals.length_ns(rows.spans(*kinds)) for kinds in (KINDS, COMMUNICATION))
    message = (
        f"{len(rows.activity)} kernels or copies beside the window have no launch record, as if launched before "
        f"profiling: {milliseconds(time_ns)}, {milliseconds(comm_ns)} of it communication, count as background"
    )
    return Notice("launched_before", message, rank, len(rows.activity))


_FROM_HOST = re.compile("HtoD|H2D|HostToDevice", re.IGNORECASE)


_CUDA_GRAPH = (
    "activities were replayed by CUDA graphs, whose launches are not recorded one by one: not known are the operators "
    "that they belong to and, of communication, peers and bytes"
)
_GROUP_UNKNOWN = "communication kernels without a record of their group do not count as the chosen group's"


def _is_partial(window: Window) -> bool:
    """Return whether the window is a chosen range or cut at times."""
    return window.between_ns is not None or window.source == "range"


_CPU_NO_MARKS = "no ringprof::wait or gloo range: what communication cost is not in the trace"
_CPU_TIMES = "on CPU a transfer's own time is not recorded: no overlap, wait and wire"


def _explain_cpu(
    rank: int, host: str | None, classified: Classified, window: Window, warnings: list[Notice]
) -> tuple[Rank, Detail]:
    """Analyse the trace of a rank on CPU. Raises `TraceFormatError` where its operators span no time."""
    trace = classified.trace
    breakdown = break_down_cpu(trace, window)
    if breakdown is None:
        raise TraceFormatError(f"{trace.path}: its CPU operators span no time: nothing to report")
    by_iteration = [break_down_cpu(trace, window, number) for number in range(len(window.span_ns))]
    iterations = tuple(part for part in by_iteration if part) or (breakdown,)
    distributed = (trace.world_size or 1) > 1 and not trace.lacks_device
    if distributed or marks_waiting(trace):
        warnings.append(Notice("cpu_no_transfer_times", _CPU_TIMES, rank))
    exposed_by_group = exposed_ranges(trace, window)
    if distributed and not marks_waiting(trace) and not breakdown.comm_ns:
        warnings.append(Notice("cpu_no_wait_marks", _CPU_NO_MARKS, rank))
    metrics = Rank(
        rank=rank,
        host=host,
        device=None,
        on_cpu=True,
        path=trace.path,
        world_size=trace.world_size,
        attention=classified.attention,
        partial_window=_is_partial(window),
        window_source=window.source,
        steps=window.steps,
        breakdown=breakdown,
        iteration_ns=tuple(part.wall_ns for part in iterations),
        blocked_ns=blocked_by_channel(trace, window),
        exposed=ExposedTime(by_group=exposed_by_group),
        part_work=cpu_work(trace, window),
        products=cpu_products(trace, window),
        layers=cpu_layers(trace, window),
        recurrence=cpu_recurrence(trace, window),
    )
    return metrics, Detail(classified, window, cpu_iterations=iterations)


# --- with data of the other ranks ---------------------------------------------------------------------


def with_splits(detail: Detail, splits: list[Split], rank: int, blocks: Sequence[PeerBlock] = ()) -> Detail:
    """Return the detail with the rank's communication and hops that begin in the chosen times.

    ``blocks`` are the times in which the device idled because of peers; each belongs to one hop.
    """
    hops, between_ns = group_into_hops(splits, rank), detail.window.between_ns
    if between_ns:
        first, last = between_ns
        splits = [split for split in splits if first <= split.transfer.start_ns < last]
        hops = [hop for hop in hops if first <= hop.start_ns < last]
    activities, compute = detail.classified.trace.activities, detail.classified.of(*COMPUTE)
    computing = intervals.union(activities.start_ns[compute], activities.end_ns[compute])
    # All hops are looked up in the spans of computation at once, since there may be many.
    pieces = [(number, start, end) for number, hop in enumerate(hops) for start, end in hop.busy_ns()]
    hop_index, start, end = np.array(pieces, np.int64).reshape(-1, 3).T
    exposed = np.zeros(len(hops), np.int64)
    np.add.at(exposed, hop_index, end - start - intervals.covered_ns(computing, start, end))
    blocked: dict[int, list[PeerBlock]] = defaultdict(list)
    for block in blocks:
        blocked[block.hop].append(block)
    timed_hops = []
    for number, (hop, exposed_ns) in enumerate(zip(hops, exposed.tolist(), strict=True)):
        hop_blocks = tuple(block for split in hop.parts for block in blocked.get(split.transfer.activity, ()))
        timed_hops.append(
            TimedHop(hop.parts, rank, number, exposed_ns + sum(block.time_ns for block in hop_blocks), hop_blocks)
        )
    return msgspec.structs.replace(detail, splits=tuple(splits), hops=tuple(timed_hops), blocks=tuple(blocks))


def with_communication(rank: Rank, detail: Detail, waited_for: Mapping[int, int]) -> Rank:
    """Return the rank with the metrics of its communication in ``detail`` and the causes of its idle time.

    ``waited_for``: peer -> nanoseconds that the rank's kernels waited for it.
    """
    exposed, breakdown, idle, layers = rank.exposed, rank.breakdown, None, rank.layers
    recurrence = rank.recurrence
    if not rank.on_cpu:
        rows = detail.rows()
        exposure = exposure_of(detail, rows)
        blocked = [(block.hop, block.time_ns, block.part) for block in detail.blocks]
        layers = device_layers(detail.classified, rows, exposure.everything, exposure.wait, exposure.wire, blocked)
        recurrence = device_recurrence(detail.classified, rows, exposure.everything, detail.splits)
        breakdown = breakdown.with_blocked(spans_of(detail.blocks))
        idle = idle_causes(detail.idle_parts(), detail.classified.trace.names)
        # Time waited by kernels, and by the idle device.
        waited_by_peer = defaultdict(int, waited_for)
        for block in detail.blocks:
            if block.part == "wait" and block.peer is not None:
                waited_by_peer[block.peer] += block.time_ns
        exposed = ExposedTime(
            wire_ns=intervals.length_ns(exposure.wire),
            wait_ns=intervals.length_ns(exposure.wait),
            on_wire_ns=exposure.wire_ns,
            by_group=exposure.by_group,
            waited_for=dict(waited_by_peer),
        )
    sends = [message.peer for hop in detail.hops for part in hop.parts for message in part.transfer.sends]
    return replace(
        rank,
        breakdown=breakdown,
        idle=idle,
        hop_totals=hop_totals(detail.hops),
        collectives=collectives_of(detail.classified, detail.splits),
        link_totals=sum_by_link(detail.splits, detail.blocks),
        exposed=exposed,
        hop_peers=frozenset(sends),
        layers=layers,
        recurrence=recurrence,
    )
