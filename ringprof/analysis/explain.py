"""One rank's trace explained by itself: its window, its breakdown, and what its communication kernels carried."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from ringprof.analysis import intervals
from ringprof.analysis.cross_checks import busier_than_the_window
from ringprof.analysis.exposure import exposure_of
from ringprof.analysis.kinds import groups
from ringprof.analysis.kinds.classify import Classified, classify
from ringprof.analysis.kinds.kinds import COMPUTE
from ringprof.analysis.rank import Detail, ExposedTime, Moved, Rank, carried_by
from ringprof.analysis.timeline.breakdown import break_down
from ringprof.analysis.timeline.cpu import (
    blocked_by_channel,
    break_down_cpu,
    exposed_ranges,
    is_cpu_trace,
    marks_waiting,
)
from ringprof.analysis.timeline.idle import idle_causes
from ringprof.analysis.timeline.kernels import RankKernel, rank_kernels
from ringprof.analysis.timeline.launches import launch_statistics
from ringprof.analysis.timeline.rows import DeviceActivities, timed_activities
from ringprof.analysis.timeline.window import Focus, Window, find_window
from ringprof.analysis.timeline.work import cpu_work, device_work
from ringprof.analysis.transfers.hops import PeerBlock, Split, TimedHop, group_into_hops, hop_totals, spans_of, total
from ringprof.analysis.transfers.transfers import Transfer, transfers_of
from ringprof.errors import TraceFormatError, UsageError
from ringprof.trace.columns import MEMCPY, NONE, Int64, Notice, Trace


class Explained(msgspec.Struct, frozen=True):
    """What one trace says without the others."""

    rank: Rank
    """Nothing of it about communication yet."""
    detail: Detail
    transfers: list[Transfer]
    warnings: tuple[Notice, ...]
    in_group: bool
    """Whether the chosen group communicates here; true where none was chosen."""
    kernels: Sequence[RankKernel] = ()
    """What ran on its device by name; none on CPU."""


def explain(
    rank: int, host: str | None, trace: Trace, focus: Focus, between_ns: tuple[int, int] | None = None
) -> Explained:
    """Explain one trace as that of ``rank``; ``between_ns`` are the chosen times as unix times.

    Raises `TraceFormatError` where it holds nothing to analyse, `UsageError` where a chosen range is not there.
    """
    warnings: list[Notice] = []
    classified, found = _classified(rank, trace, focus, warnings)
    window = msgspec.structs.replace(find_window(trace, classified.launch, focus.window), between_ns=between_ns)
    if is_cpu_trace(trace):
        return Explained(*_explain_cpu(rank, host, classified, window, warnings), [], tuple(warnings), found)
    if not len(trace.activities.start_ns):
        raise TraceFormatError(f"{trace.path}: the trace holds no GPU activity and no CPU operator: nothing to report")
    if window.source == "trace" and window.marked:
        warnings.append(
            Notice("window_empty", "no activity was launched in the marked iterations: the whole trace is shown", rank)
        )
    everything = window.activities()
    device = _device(classified, window, everything, rank, warnings)
    rows = timed_activities(classified, everything, device, between_ns)
    warnings += busier_than_the_window(rows, trace, rank)
    background = DeviceActivities(classified, device).background(rows)
    # Hops are matched over the whole window: cut at times, the ranks would not count the same ones.
    on_device = everything[trace.activities.device[everything] == device]
    transfers = transfers_of(classified, on_device, rank)
    explained = Rank(
        rank=rank,
        host=host,
        device=next((one.name for one in trace.devices if one.index == device), None),
        on_cpu=False,
        path=trace.path,
        world_size=trace.world_size,
        attention=classified.attention,
        partial_window=_is_cut(window),
        window_source=window.source,
        steps=window.steps,
        breakdown=break_down(rows, background),
        iteration_ns=tuple(int(part.end_ns.max() - part.start_ns.min()) for part in window.by_iteration(rows)),
        launches=launch_statistics(classified, rows),
        moved=Moved(total([transfer.sent_bytes for transfer in transfers]), _from_host_bytes(trace, on_device)),
        part_work=device_work(classified, rows),
    )
    detail, kernels = Detail(classified, window, device), rank_kernels(rows, background, trace)
    return Explained(explained, detail, transfers, tuple(warnings), found, kernels)


_FROM_HOST = re.compile("HtoD|H2D|HostToDevice", re.IGNORECASE)


def _from_host_bytes(trace: Trace, activities: Int64) -> int | None:
    """Sum the bytes copied from the host; None where the trace does not give the size of a copy."""
    names = [number for number, name in enumerate(trace.names) if _FROM_HOST.search(name)]
    columns = trace.activities
    copies = (columns.category[activities] == MEMCPY) & np.isin(columns.name[activities], names)
    sizes = columns.size_bytes[activities[copies]]
    return None if np.any(sizes == NONE) else int(sizes.sum())


def _classified(rank: int, trace: Trace, focus: Focus, warnings: list[Notice]) -> tuple[Classified, bool]:
    classified = classify(trace, focus.rules)
    replayed = int(np.count_nonzero(trace.activities.graph_node != NONE))
    if replayed:
        warnings.append(Notice("cuda_graph", f"{replayed} {_CUDA_GRAPH}", rank))
    if focus.group is None:
        return classified, True
    kept = groups.keep_group(classified, focus.group)
    if kept.unknown:
        warnings.append(Notice("group_unknown", _GROUP_UNKNOWN, rank, kept.unknown))
    return kept.classified, kept.in_group


_CUDA_GRAPH = (
    "activities were replayed by CUDA graphs, whose launches are not recorded one by one: not known are the operators "
    "that they belong to and, of communication, peers and bytes"
)
_GROUP_UNKNOWN = "communication kernels without a record of their group do not count as the chosen group's"


def _is_cut(window: Window) -> bool:
    return window.between_ns is not None or window.source == "range"


_CPU_NO_MARKS = "no ringprof::wait or gloo range: what communication cost is not in the trace"
_CPU_TIMES = "on CPU a transfer's own time is not recorded: no overlap, wait and wire"


def _explain_cpu(
    rank: int, host: str | None, classified: Classified, window: Window, warnings: list[Notice]
) -> tuple[Rank, Detail]:
    trace = classified.trace
    whole = break_down_cpu(trace, window)
    if whole is None:
        raise TraceFormatError(f"{trace.path}: its CPU operators span no time: nothing to report")
    parts = [break_down_cpu(trace, window, number) for number in range(len(window.span_ns))]
    kept = tuple(part for part in parts if part) or (whole,)
    several = (trace.world_size or 1) > 1 and not trace.lacks_device
    if several or marks_waiting(trace):
        warnings.append(Notice("cpu_no_transfer_times", _CPU_TIMES, rank))
    exposed = exposed_ranges(trace, window)
    if several and not marks_waiting(trace) and not whole.comm_ns:
        warnings.append(Notice("cpu_no_wait_marks", _CPU_NO_MARKS, rank))
    explained = Rank(
        rank=rank,
        host=host,
        device=None,
        on_cpu=True,
        path=trace.path,
        world_size=trace.world_size,
        attention=classified.attention,
        partial_window=_is_cut(window),
        window_source=window.source,
        steps=window.steps,
        breakdown=whole,
        iteration_ns=tuple(part.wall_ns for part in kept),
        blocked_ns=blocked_by_channel(trace, window),
        exposed=ExposedTime(by_group=exposed),
        part_work=cpu_work(trace, window),
    )
    return explained, Detail(classified, window, cpu_iterations=kept)


def _device(classified: Classified, window: Window, activities: Int64, rank: int, warnings: list[Notice]) -> int:
    """The device that did most: a breakdown is of one device. Raises `UsageError` where none did anything."""
    trace = classified.trace
    rows = timed_activities(classified, activities, None, window.between_ns)
    if not len(rows.activity):
        raise UsageError(
            f"--between: nothing ran in {trace.path} at that time; times count from the start of the trace"
        )
    devices, counts = np.unique(trace.activities.device[rows.activity], return_counts=True)
    chosen = int(devices[np.argmax(counts)])
    if len(devices) > 1:
        others = f"{int(counts.sum() - counts.max())} activities ran on others"
        told = f"{trace.path}: of {len(devices)} devices only {chosen} is reported; {others}"
        warnings.append(Notice("several_devices", told, rank))
    return chosen


# --- with what the other ranks tell -------------------------------------------------------------------


def with_splits(detail: Detail, splits: list[Split], rank: int, blocks: Sequence[PeerBlock] = ()) -> Detail:
    """Add the rank's communication and its hops, of those that begin in the chosen times.

    ``blocks`` are the times in which the device ran nothing because of peers; each belongs to one hop.
    """
    hops, between_ns = group_into_hops(splits, rank), detail.window.between_ns
    if between_ns:
        first, last = between_ns
        splits = [part for part in splits if first <= part.transfer.start_ns < last]
        hops = [hop for hop in hops if first <= hop.start_ns < last]
    activities, compute = detail.classified.trace.activities, detail.classified.of(*COMPUTE)
    computing = intervals.union(activities.start_ns[compute], activities.end_ns[compute])
    # All hops at once: one question to the spans of computation, however many hops there are.
    pieces = [(number, start, end) for number, hop in enumerate(hops) for start, end in hop.busy_ns()]
    place, start, end = np.array(pieces, np.int64).reshape(-1, 3).T
    exposed = np.zeros(len(hops), np.int64)
    np.add.at(exposed, place, end - start - intervals.covered_ns(computing, start, end))
    blocked: dict[int, list[PeerBlock]] = defaultdict(list)
    for block in blocks:
        blocked[block.hop].append(block)
    finished = []
    for number, (hop, ns) in enumerate(zip(hops, exposed.tolist(), strict=True)):
        mine = tuple(block for part in hop.parts for block in blocked.get(part.transfer.activity, ()))
        finished.append(TimedHop(hop.parts, rank, number, ns + sum(block.time_ns for block in mine), mine))
    return msgspec.structs.replace(detail, splits=tuple(splits), hops=tuple(finished), blocks=tuple(blocks))


def with_communication(rank: Rank, detail: Detail, waited_for: Mapping[int, int]) -> Rank:
    """Add the figures of the rank's communication, which ``detail`` holds, and the causes of its idle time.

    ``waited_for``: peer -> nanoseconds that kernels of the rank waited for it.
    """
    exposed, breakdown, idle = rank.exposed, rank.breakdown, None
    if not rank.on_cpu:
        found = exposure_of(detail, detail.rows())
        breakdown = breakdown.with_blocked(spans_of(detail.blocks))
        idle = idle_causes(detail.idle_parts(), detail.classified.trace.names)
        exposed = ExposedTime(
            wire_ns=intervals.length_ns(found.wire),
            wait_ns=intervals.length_ns(found.wait),
            on_wire_ns=found.wire_ns,
            by_group=found.by_group,
            waited_for=_waited_for(waited_for, detail.blocks),
        )
    sends = [message.peer for hop in detail.hops for part in hop.parts for message in part.transfer.sends]
    return replace(
        rank,
        breakdown=breakdown,
        idle=idle,
        hop_totals=hop_totals(detail.hops),
        carried=carried_by(detail.splits, detail.blocks),
        exposed=exposed,
        hop_peers=frozenset(sends),
    )


def _waited_for(kernels: Mapping[int, int], blocks: Sequence[PeerBlock]) -> dict[int, int]:
    """Peer -> waiting for it, of kernels and of the device without a kernel."""
    times = defaultdict(int, kernels)
    for block in blocks:
        if block.part == "wait" and block.peer is not None:
            times[block.peer] += block.time_ns
    return dict(times)
