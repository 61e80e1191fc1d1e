"""Tables of an analysis as pandas frames: their columns, the meaning of each column, and the rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.memory import memory_timelines
from ringprof.analysis.findings.time_table import TIMES
from ringprof.analysis.kinds.kinds import KINDS
from ringprof.analysis.timeline.breakdown import Breakdown
from ringprof.analysis.transfers.hops import TimedHop
from ringprof.common.json_object import JsonObject
from ringprof.errors import MissingExtraError, install_command
from ringprof.report.sections import by_shape, idle, layers
from ringprof.report.terms import LABELS
from ringprof.report.text import csv_text
from ringprof.trace.columns import NONE

if TYPE_CHECKING:
    import pandas as pd

_RANK = {"rank": "rank in the world"}
_ITERATION = {"iteration": "number of the profiled iteration, from 0"}
_OWN_CLOCK = "unix time by the rank's own clock"
_SPAN = {"start_ns": _OWN_CLOCK, "end_ns": _OWN_CLOCK}
_INTERVAL = {
    "low_ms": "predicted milliseconds per iteration, 10th percentile",
    "middle_ms": "predicted milliseconds per iteration, median",
    "high_ms": "predicted milliseconds per iteration, 90th percentile",
}
_CHOICE = {"choice": "strategy, degrees, placement and hop engine"}

PARTS_OF_TIME = {
    **{f"{row.name}_ns": row.meaning for row in TIMES if not row.optional},
    "overlap_ratio": "overlapped_ns / comm_ns, 0..1; missing without communication and on CPU",
    **{f"{row.name}_ns": row.meaning for row in TIMES if row.optional},
}
"""Columns of the time breakdown with their meaning; the names are fields of `Breakdown`."""
_KIND_COLUMNS = {f"{kind}_ns": f"sum of the durations of kind {LABELS[kind]}; kinds may overlap" for kind in KINDS}

FRAMES: dict[str, dict[str, str]] = {
    "breakdown": {
        **_RANK,
        "host": "host that the rank ran on; missing where nothing names it",
        **PARTS_OF_TIME,
        **_KIND_COLUMNS,
    },
    "iterations": {
        **_RANK,
        **_ITERATION,
        "median": "whether this iteration's slowest rank took the median time",
        **PARTS_OF_TIME,
        **_KIND_COLUMNS,
    },
    "steps": {
        **_RANK,
        **_ITERATION,
        "phase": "fwd or bwd",
        "call": "which attention call of the iteration and phase, from 0",
        "step": "number of the ring step in its pass, from 0",
        **_SPAN,
        "block_ns": "union of the step's attention kernels",
        "compute_ns": "time in the step in which anything computes",
        "hops": "exchanges that the block should hide",
        "bytes": "bytes that these send",
        "wait_ns": "sum of their waits; missing where one's is not known",
        "wire_ns": "sum of their wires; missing where one's is not known",
        "exposed_ns": "communication within the step with no computation beside it",
        "exposed_wire_ns": "of exposed_ns, with something on the wire",
        "bound": "what the step's length came from: compute, wire or peer",
        "source": "what tells the steps: ringprof, annotation or order",
    },
    "kernels": {
        "name": "name of the kernel, copy or set",
        "kind": "kind of activity",
        "time_ns": "sum of its durations over all ranks",
        "share": "share of the sum over all kernels, 0..1",
        "calls": "number of calls over all ranks",
        "mean_ns": "mean duration of a call",
        "hidden": "share of its time that other activities hide, 0..1; missing for computation",
        "exposed_ns": "time that is not hidden; missing for computation",
        "worst_rank": "rank that spends most time in it",
        "worst_ns": "time of that rank",
    },
    "idle": {
        **_RANK,
        "cause": "host: next activity not launched yet; gap: launched, starts within 5 µs; blocked: starts later",
        "class": "for host time, what the launching thread did; else the cause",
        "name": "innermost host event; for blocked time, what it waited for, if known; may be empty",
        "time_ns": "idle time with this cause, class and name; all rows of a rank sum to its idle_ns",
        "share": "share of the rank's idle_ns, 0..1",
    },
    "gemms": {
        "batch": "products of (m, k) by (k, n) per call; missing, like m, n and k, where no shape is recorded",
        "m": "rows of the left factor",
        "n": "columns of the right factor",
        "k": "columns of the left factor",
        "dtype": "data type of the factors; missing where it is not recorded",
        "calls": "operator calls over all ranks; kernels where no shape is recorded",
        "time_ns": "sum of the durations of their matrix-product kernels over all ranks; on CPU, of the calls",
        "share": "share of the time of all matrix products, 0..1",
        "flops": "floating-point operations of all calls",
        "tflops": "TFLOP/s per device while the kernels ran",
        "peak_share": "tflops over the device's peak, 0..1; missing where the peak is not known",
    },
    "collectives": {
        "kind": "kind of communication",
        "group": "description or name of the process group; empty where it is not recorded",
        "ranks": "number of ranks of the group",
        "size_bytes": "size of one operation as nccl-tests count it: of an all-gather, the whole output",
        "link": "slowest link used: same_host, other_host or unknown",
        "calls": "kernels or copies over all ranks",
        "time_ns": "sum of their durations over all ranks, waiting included",
        "wait_ns": "part of time_ns until the last rank of each operation had begun; missing where that is not known",
        "busbw_gbps": "bus bandwidth of nccl-tests over time_ns, GB/s; missing where the size is not known",
        "wire_busbw_gbps": "bus bandwidth without waiting, GB/s; missing where waiting is not known",
    },
    "layers": {
        **_RANK,
        "layer": "name of the module or range; missing for what no layer launched",
        "attention_ns": "time of attention kernels; the rows of a rank sum to its flash time",
        "communication_ns": "time of communication; of transfers that overlap, the first has the time",
        "exposed_ns": "exposed communication; the rows of a rank sum to its exposed_comm_ns",
        "exposed_backward_ns": "part of exposed_ns that the backward pass launched",
        "wait_ns": "part of exposed_ns spent waiting for a peer; missing where that is not known",
        "wire_ns": "part of exposed_ns with bytes on the wire; missing where that is not known",
        "compute_ns": "time of all computation, attention included; the rows of a rank sum to its compute_ns",
    },
    "annotations": {
        "name": "name of the ranges",
        "calls": "ranges in which something was launched, over all ranks",
        "busy_ns": "time in which anything runs that was launched in them, sum over ranks",
        "compute_ns": "part of busy_ns in which anything computes",
        "communication_ns": "part of busy_ns in which any communication runs",
        "exposed_ns": "part of communication_ns with no computation beside it, from this range or any other",
        "hidden": "share of communication_ns that is hidden, 0..1; missing without communication",
    },
    "hops": {
        **_RANK,
        "hop": "number among the rank's hops, by start",
        "group": "process group",
        "send_to": "ranks that it sends to",
        "receive_from": "ranks that it receives from",
        "bytes": "bytes sent",
        **_SPAN,
        "ready_ns": "when the last rank that it depends on had started, by the rank's own clock",
        "wait_ns": "until its peers had started; missing where that is not known",
        "wire_ns": "rest of its time; missing where that is not known",
        "exposed_ns": "part of its time with no computation beside it",
        "wire_gbps": "bytes / wire_ns, GB/s",
        "link": "same_host, other_host or unknown",
        "source": "where peers and bytes come from",
    },
    "waterfall": {
        "part": "part of the slowest rank's wall",
        "time_ns": "mean over ranks; all parts sum to the wall",
        "share": "share of the wall, 0..1",
        "tflops": "TFLOP/s per device if only this part and the parts before it took time",
        "evidence": "figures from which the part was computed, in words",
        "remedy": "change that would shorten it; empty where that is not known",
    },
    "memory": {
        **_RANK,
        "memory": "memory pool: cuda and the device's number, or host",
        "time_ns": "unix time by the rank's own clock, from which on the values hold",
        "allocated_bytes": "bytes in use",
        "reserved_bytes": "bytes in use or kept for later use; missing for the host",
    },
}
"""Columns of the frames of an analysis with their meaning, by the method that returns the frame.

The meaning includes the unit, if the name of the column does not."""

PREDICTION_COLUMNS: dict[str, dict[str, str]] = {
    "choices": {
        **_CHOICE,
        "best": "probability that no other choice is faster, 0..1",
        **_INTERVAL,
        "tflops": "TFLOP/s per device; missing where the work is not known",
        "exposed": "share of the time that waits for transfers, mean over ranks, 0..1",
        "peak_bytes": "peak memory of a rank",
        "fits": "whether peak_bytes fits in the memory of a device",
        "on_front": "whether no faster choice needs as little memory",
    },
    "balance": {
        "strategy": "name of the strategy",
        "params": "parameters of the strategy",
        "reason": "why the strategy cannot run this; empty if it can",
        "busiest": "work of the busiest rank over the mean of the ranks",
        "steps": "work of the busiest rank of each ring step, summed over the steps, over the mean rank's total;"
        " missing where ranks do not wait for each other in every step",
        "needed": "share of the ordered pairs of ranks of which the first needs keys of the second, 0..1",
    },
    "over": {**_CHOICE, "at": "tokens, hosts, or Gbit/s per NIC", **_INTERVAL},
    "parts": {
        "phase": "forward or backward",
        "part": "part of the time",
        "time_ms": "predicted time of the slowest rank",
    },
}
"""Columns of the frames of a prediction, of advice and of `ringprof.balance` with their meaning, by what returns the
frame."""


Method = TypeVar("Method", bound=Callable[..., Any])


def documents_columns(method: Method) -> Method:
    """Add the columns of a frame to the docstring of the method that returns it; both have the same name."""
    if method.__doc__:
        listed = "".join(f"\n- ``{column}``: {meaning}" for column, meaning in FRAMES[method.__name__].items())
        method.__doc__ += f'\n\nColumns, in ``frame.attrs["columns"]`` too; ``_ns`` are nanoseconds:\n{listed}\n'
    return method


def _iteration_rows(findings: Findings) -> list[JsonObject]:
    median = findings.attribution.median_iteration
    return [
        {"rank": rank.rank, "iteration": number, "median": number == median, **_figures(part)}
        for rank in findings.attribution.ranks
        for number, part in enumerate(rank.iterations)
    ]


def _kernel_rows(findings: Findings) -> list[JsonObject]:
    kernels = findings.attribution.kernels
    total_ns = sum(kernel.time_ns for kernel in kernels) or 1
    return [
        {
            **kernel._asdict(),
            "share": kernel.time_ns / total_ns,
            "mean_ns": kernel.mean_ns,
            "hidden": kernel.hidden,
        }
        for kernel in kernels
    ]


def _memory_rows(findings: Findings) -> list[JsonObject]:
    return [
        dict(zip(FRAMES["memory"], (timeline.rank, timeline.memory, time, allocated,
                 None if reserved == NONE else reserved), strict=True))
        for timeline in memory_timelines(findings.attribution)
        for time, allocated, reserved in zip(
            timeline.time_ns.tolist(), timeline.allocated_bytes.tolist(), timeline.reserved_bytes.tolist(), strict=True
        )
    ]  # fmt: skip


_ROWS: dict[str, Callable[[Findings], list[JsonObject]]] = {
    "breakdown": lambda findings: [
        {"rank": rank.rank, "host": rank.host, **_figures(rank.breakdown)} for rank in findings.attribution.ranks
    ],
    "iterations": _iteration_rows,
    "steps": lambda findings: [msgspec.structs.asdict(step) for step in findings.steps],
    "kernels": _kernel_rows,
    "idle": idle.rows,
    "gemms": by_shape.gemm_items,
    "collectives": by_shape.collective_items,
    "layers": layers.frame_rows,
    "annotations": lambda findings: [{**row._asdict(), "hidden": row.hidden} for row in findings.annotations],
    "hops": lambda findings: [_hop_row(hop) for rank in findings.attribution.ranks for hop in rank.hops],
    "waterfall": lambda findings: [msgspec.structs.asdict(part) for part in findings.waterfall.parts],
    "memory": _memory_rows,
}


def as_csv(frame: pd.DataFrame) -> str:
    """Format a frame as CSV; unknown values are empty, and several ranks are separated by spaces."""
    plain = frame.astype(object).where(frame.notna(), None)
    rows = (
        [" ".join(map(str, value)) if isinstance(value, tuple) else value for value in row]
        for row in plain.itertuples(index=False)
    )
    return csv_text(list(frame.columns), rows)


def require_pyarrow() -> None:
    """Raise `MissingExtraError` if pyarrow, which writes Parquet files, cannot be imported."""
    try:
        import pyarrow  # noqa: F401  (the error of pandas would be a paragraph long)
    except ImportError:
        raise MissingExtraError(f"Parquet files need pyarrow: {install_command('parquet')}") from None


def write_parquet(frame: pd.DataFrame, path: str | os.PathLike[str]) -> None:
    """Write a frame and the meaning of its columns to a Parquet file. Raises `MissingExtraError` without pyarrow."""
    require_pyarrow()
    frame.to_parquet(path, engine="pyarrow", index=False)


_WHOLE_COLUMNS = ("batch", "m", "n", "k", "flops", "ranks")
"""Columns of whole numbers beside times and bytes."""


def frame_of(findings: Findings, name: str) -> pd.DataFrame:
    """Build the frame ``name`` of `FRAMES`."""
    import pandas as pd  # imported here, because the import takes longer than most reports

    frame = pd.DataFrame(_ROWS[name](findings), columns=list(FRAMES[name]))
    for column in frame.columns:
        if (column.endswith("_ns") and column != "mean_ns") or column.endswith("bytes") or column in _WHOLE_COLUMNS:
            frame[column] = frame[column].astype("Int64")
    frame.attrs["columns"] = dict(FRAMES[name])
    return frame


def _figures(breakdown: Breakdown) -> JsonObject:
    """Return the columns `PARTS_OF_TIME` and the time of each kind of a breakdown."""
    row = {column: getattr(breakdown, column) for column in PARTS_OF_TIME}
    for kind in KINDS:
        figures = breakdown.kinds.get(kind)
        row[f"{kind}_ns"] = figures.time_ns if figures else 0
    return row


_HOP_FIELDS = ("start_ns", "end_ns", "wait_ns", "wire_ns", "exposed_ns", "wire_gbps")


def _hop_row(hop: TimedHop) -> JsonObject:
    """Build the row of a hop, with the columns of ``FRAMES["hops"]``."""
    first, ready = hop.parts[0], [part.ready_ns for part in hop.parts]
    return {
        "rank": hop.rank,
        "hop": hop.number,
        "group": first.transfer.group[0],
        "send_to": hop.sent_to,
        "receive_from": hop.received_from,
        "bytes": hop.sent_bytes,
        "ready_ns": None if None in ready else max(moment for moment in ready if moment is not None),
        **{name: getattr(hop, name) for name in _HOP_FIELDS},
        "link": first.link,
        "source": first.transfer.source,
    }
