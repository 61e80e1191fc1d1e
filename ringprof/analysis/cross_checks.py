"""Checks of one rank's figures against what must hold: what a stream can run, and what ``run.json`` counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from ringprof.analysis.kinds.kinds import KIND, KINDS
from ringprof.analysis.timeline.rows import TimedActivities
from ringprof.analysis.timeline.window import Window
from ringprof.analysis.transfers.hops import total
from ringprof.analysis.transfers.transfers import Transfer
from ringprof.run import Run, Sent
from ringprof.trace.columns import CUT_OFF, NONE, Notice, Trace, distinct

_BLOCK = re.compile(r"ringprof::(fwd|bwd)/(?:.*/)?block")
_PASS = {"fwd": "forward", "bwd": "backward"}
_OWN_STRATEGIES = "ringprof.strategies."
_INCOMPLETE = CUT_OFF | {"damaged_events"}


def busier_than_the_window(rows: TimedActivities, trace: Trace, rank: int) -> list[Notice]:
    """Warn of kinds whose activities on one stream last longer than the window: they overlap, or are repeated."""
    wall_ns = int(rows.end_ns.max() - rows.start_ns.min())
    length = rows.end_ns - rows.start_ns
    stream = trace.activities.stream[rows.activity]
    warnings = []
    for kind in KINDS:
        mine = rows.of(kind) & (stream != NONE)
        if int(length[mine].sum()) <= wall_ns:
            continue
        for number in distinct(stream[mine]).tolist():
            time_ns = int(length[mine & (stream == number)].sum())
            if time_ns > wall_ns:
                message = (
                    f"{KIND[kind].label} on stream {number} adds up to {time_ns / max(wall_ns, 1):.1%} of the window, "
                    "though a stream runs one kernel after another: its events may be repeated or their times damaged"
                )
                warnings.append(Notice("stream_overlap", message, rank))
    return warnings


def unlike_the_run(
    run: Run | None, rank: int, trace: Trace, window: Window, transfers: Sequence[Transfer]
) -> list[Notice]:
    """Warn where a recorded run's trace holds other hops or attention blocks than ``run.json`` counted."""
    work = run.work_of(rank) if run else None
    incomplete = _INCOMPLETE & {warning.code for warning in trace.warnings}
    if (
        run is None
        or run.predicted
        or work is None
        or incomplete
        or window.source != "ringprof"
        or window.between_ns is not None
    ):
        return []
    profiled = dict(zip(run.ranks(), run.profiled.iterations_ns, strict=False)) if run.profiled else {}
    iterations = len(profiled.get(rank, window.span_ns))
    # Traces of the CPU hold no transfers.
    hops_known = work.sent is not None and len(trace.activities.start_ns)
    differing = _hops(work.sent or (), transfers, iterations) if hops_known else []
    if run.strategy and run.strategy.target.startswith(_OWN_STRATEGIES):
        differing += _blocks(work.block_calls, trace, window, iterations)
    return [
        Notice(
            "run_counts_differ",
            f"the trace has {in_trace}, run.json counts {counted} in {iterations} profiled "
            f"iteration{'s' if iterations > 1 else ''}: events may be repeated or missing, or be of another run",
            rank,
        )
        for in_trace, counted in differing
    ]


def _hops(sent: Sequence[Sent], transfers: Sequence[Transfer], iterations: int) -> list[tuple[str, str]]:
    """Return what the trace and the run say of hops, where they differ.

    A hop may be several kernels or copies, so that their bytes count where they are known.
    """
    found = []
    for kind, operation in (("send_recv", "send_recv"), ("copy_engine", "copy")):
        hops = [entry for entry in sent if entry.operation == operation]
        receivers = {entry.to for entry in hops}
        mine = [one for one in transfers if one.kind == kind and _goes_to(one, receivers)]
        counted, counted_bytes = (
            iterations * sum(getattr(one, name) for one in hops) for name in ("count", "sent_bytes")
        )
        size = total([one.sent_bytes for one in mine])
        alike = len(mine) == counted if size is None else size == counted_bytes
        if not counted or alike or (size is None and kind == "copy_engine"):
            continue
        label = f"{len(mine)} {KIND[kind].label}"
        found.append(
            (label if size is None else f"{label} ({size:,} bytes)", f"{counted} hops ({counted_bytes:,} bytes)")
        )
    return found


def _goes_to(transfer: Transfer, receivers: set[int | None]) -> bool:
    """Return whether a transfer may be a hop to one of the ``receivers``; None among them stands for any rank."""
    if None in receivers or not (transfer.sends or transfer.receives):
        return True
    return any(message.peer in receivers for message in transfer.sends)


def _blocks(calls: dict[str, int], trace: Trace, window: Window, iterations: int) -> list[tuple[str, str]]:
    """Return what the trace and the run say of attention blocks, where they differ. CUDA graphs replay no ranges."""
    ranges = trace.annotations
    phase = {index: match[1] for index, name in enumerate(trace.names) if (match := _BLOCK.fullmatch(name))}
    inside = np.zeros(len(ranges.start_ns), np.bool_)
    for first, last in window.span_ns:
        inside |= (ranges.start_ns >= first) & (ranges.start_ns < last)
    found = Counter(_PASS[phase[index]] for index in ranges.name[inside].tolist() if index in phase)
    if not found:
        return []
    return [
        (f"{found[name]} {name} blocks", str(iterations * count))
        for name, count in calls.items()
        if found[name] != iterations * count
    ]
