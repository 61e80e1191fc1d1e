"""Consistency checks of one rank's trace: stream times against the window, and counts against ``run.json``."""

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
from ringprof.run import Run
from ringprof.trace.columns import CUT_OFF, NONE, Notice, Trace, distinct
from ringprof.workload.workload import Workload

_BLOCK = re.compile(r"ringprof::(fwd|bwd)/(?:.*/)?block")
_PASS = {"fwd": "forward", "bwd": "backward"}
_OWN_STRATEGIES = "ringprof.strategies."
_INCOMPLETE = CUT_OFF | {"damaged_events"}


def warn_of_overfull_streams(rows: TimedActivities, trace: Trace, rank: int) -> list[Notice]:
    """Warn of kinds whose activities on one stream last longer than the window: they overlap or are repeated."""
    wall_ns = int(rows.end_ns.max() - rows.start_ns.min())
    duration_ns = rows.end_ns - rows.start_ns
    stream = trace.activities.stream[rows.activity]
    warnings = []
    for kind in KINDS:
        of_kind = rows.of(kind) & (stream != NONE)
        if int(duration_ns[of_kind].sum()) <= wall_ns:
            continue
        for number in distinct(stream[of_kind]).tolist():
            time_ns = int(duration_ns[of_kind & (stream == number)].sum())
            if time_ns > wall_ns:
                message = (
                    f"{KIND[kind].label} on stream {number} adds up to {time_ns / max(wall_ns, 1):.1%} of the window, "
                    "though a stream runs one kernel after another: its events may be repeated or their times damaged"
                )
                warnings.append(Notice("stream_overlap", message, rank))
    return warnings


_COMMUNICATES = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|send_?recv", re.IGNORECASE)
_COMPUTES = re.compile(r"gemm|matmul|attn|attention|fmha|norm|residual|fusion_?kernel", re.IGNORECASE)
_BASE_NAME = re.compile(r"(?:.{0,1000}[ :])?([A-Za-z_][A-Za-z0-9_]{0,200})")


def warn_of_fused_kernels(rows: TimedActivities, trace: Trace, rank: int) -> list[Notice]:
    """Warn of kernels that communicate and compute, by their names: a trace cannot split the time within a kernel.

    A half of such a pair of kernels, which says so at the end of its name (``..._comm``), is none.
    """
    used = distinct(trace.activities.name[rows.activity]).tolist()
    names = [match[1] for index in used if (match := _BASE_NAME.match(re.split(r"[<(]", trace.names[index])[0]))]
    fused = [
        name
        for name in names
        if _COMMUNICATES.search(name) and _COMPUTES.search(name) and not name.lower().endswith("_comm")
    ]
    if not fused:
        return []
    listed = ", ".join(dict.fromkeys(name[:80] for name in fused[:3]))
    message = (
        f"by their names, kernels communicate and compute at once ({listed}): a trace shows each as one bar, so what of"
        " it is waiting, wire and computing is not known, and all of it counts as one kind"
    )
    return [Notice("fused_communication", message, rank)]


def warn_of_other_counts(
    run: Run | None, rank: int, trace: Trace, window: Window, transfers: Sequence[Transfer]
) -> list[Notice]:
    """Warn where a trace of a recorded run holds other hops or attention blocks than ``run.json`` counts."""
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
    # One hop may be several kernels or copies, so bytes are compared instead of counts where they are known.
    differences = []
    recorded_sends = work.sent or ()
    if not len(trace.activities.start_ns):
        recorded_sends = ()  # traces of CPU ranks hold no transfers
    for kind, operation in (("send_recv", "send_recv"), ("copy_engine", "copy")):
        sent_hops = [sent_entry for sent_entry in recorded_sends if sent_entry.operation == operation]
        receivers = {sent_entry.to for sent_entry in sent_hops}
        matching = [
            transfer
            for transfer in transfers
            if transfer.kind == kind
            and (
                None in receivers  # None stands for any rank
                or not (transfer.sends or transfer.receives)
                or any(message.peer in receivers for message in transfer.sends)
            )
        ]
        counted, counted_bytes = (
            iterations * sum(getattr(transfer, column) for transfer in sent_hops) for column in ("count", "sent_bytes")
        )
        sent_bytes = total([transfer.sent_bytes for transfer in matching])
        equal = len(matching) == counted if sent_bytes is None else sent_bytes == counted_bytes
        if not counted or equal or (sent_bytes is None and kind == "copy_engine"):
            continue
        label = f"{len(matching)} {KIND[kind].label}"
        differences.append(
            (
                label if sent_bytes is None else f"{label} ({sent_bytes:,} bytes)",
                f"{counted} hops ({counted_bytes:,} bytes)",
            )
        )
    if run.strategy and run.strategy.target.startswith(_OWN_STRATEGIES):
        recurrences = _recurrences(run.workload)
        calls = {phase: count + recurrences.get(phase, 0) for phase, count in work.block_calls.items()}
        differences += _block_differences(calls, trace, window, iterations)
    return [
        Notice(
            "run_counts_differ",
            f"the trace has {in_trace}, run.json counts {in_run} in {iterations} profiled "
            f"iteration{'s' if iterations > 1 else ''}: events may be repeated or missing, or be of another run",
            rank,
        )
        for in_trace, in_run in differences
    ]


def _recurrences(workload: Workload | None) -> dict[str, int]:
    """Return the calls of recurrences in a hybrid model's iteration by pass: ``run.json`` counts attention alone."""
    if workload is None or workload.layer is None:
        return {}
    layers = sum(operator != "attention" for operator in workload.pattern) * workload.layers // len(workload.pattern)
    calls = layers * workload.steps
    # Checkpointing repeats the forward pass.
    return {"forward": calls * (2 if workload.layer.checkpoint and workload.backward else 1), "backward": calls}


def _block_differences(calls: dict[str, int], trace: Trace, window: Window, iterations: int) -> list[tuple[str, str]]:
    """Return the counts of attention blocks in the trace and in ``run.json``, as two texts each, where they differ.

    Empty for a trace without block ranges, since CUDA graphs replay none.
    """
    ranges = trace.annotations
    phase = {index: match[1] for index, direction in enumerate(trace.names) if (match := _BLOCK.fullmatch(direction))}
    inside = np.zeros(len(ranges.start_ns), np.bool_)
    for first, last in window.span_ns:
        inside |= (ranges.start_ns >= first) & (ranges.start_ns < last)
    counted = Counter(_PASS[phase[index]] for index in ranges.name[inside].tolist() if index in phase)
    if not counted:
        return []
    return [
        (f"{counted[direction]} {direction} blocks", str(iterations * count))
        for direction, count in calls.items()
        if counted[direction] != iterations * count
    ]
