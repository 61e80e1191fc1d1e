"""Tables of an analysis as pandas frames: their columns, what each means, and how each row is made."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.memory import memory_timelines
from ringprof.analysis.kinds.kinds import KINDS
from ringprof.analysis.timeline.breakdown import Breakdown
from ringprof.analysis.transfers.hops import TimedHop
from ringprof.errors import MissingExtraError
from ringprof.json_object import JsonObject
from ringprof.report.sections import idle
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
    "low_ms": "predicted milliseconds an iteration; in one of ten cases less",
    "middle_ms": "predicted milliseconds an iteration; in half of the cases less",
    "high_ms": "predicted milliseconds an iteration; in nine of ten cases less",
}
_CHOICE = {"choice": "strategy, degrees, placement and hop engine"}

PARTS_OF_TIME = {
    "wall_ns": "from the start of the first activity to the end of the last",
    "compute_ns": "time in which anything computes",
    "comm_ns": "time in which any communication runs",
    "overlapped_ns": "of comm_ns, with computation beside it; missing on CPU",
    "exposed_comm_ns": "communication with no computation beside it",
    "exposed_memory_ns": "copies and sets with neither computation nor communication beside them",
    "idle_ns": "nothing runs",
    "overlap_ratio": "overlapped_ns / comm_ns, 0..1; missing without communication and on CPU",
    "exposed_other_groups_ns": "exposed communication of process groups that were not asked for",
    "background_ns": "only what is not of the chosen range runs",
    "blocked_on_peer_ns": "of exposed_comm_ns: nothing runs because of a peer's copy",
}
"""Of a breakdown, by its fields' names."""
_OF_KINDS = {f"{kind}_ns": f"sum of the durations of kind {LABELS[kind]}; kinds may overlap" for kind in KINDS}

FRAMES: dict[str, dict[str, str]] = {
    "breakdown": {
        **_RANK,
        "host": "host that the rank ran on; missing where nothing names it",
        **PARTS_OF_TIME,
        **_OF_KINDS,
    },
    "iterations": {
        **_RANK,
        **_ITERATION,
        "median": "whether this iteration's slowest rank took the median time",
        **PARTS_OF_TIME,
        **_OF_KINDS,
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
        "name": "of the kernel, copy or set",
        "kind": "what it counts as",
        "time_ns": "sum of its durations over all ranks",
        "share": "of the sum over all kernels, 0..1",
        "calls": "how often it ran, over all ranks",
        "mean_ns": "of one call",
        "hidden": "share of its time with something beside it that hides it, 0..1; missing for computation",
        "exposed_ns": "the rest of its time; missing for computation",
        "worst_rank": "the rank that spends most in it",
        "worst_ns": "its time there",
    },
    "idle": {
        **_RANK,
        "cause": "host: next activity not launched yet; gap: launched, starts within 5 µs; blocked: starts later",
        "class": "of host time: what the launching thread did; else the cause",
        "name": "of the innermost host event; of blocked time: what it waited for, as far as known; may be empty",
        "time_ns": "idle time with this cause, class and name; all rows of a rank sum to its idle_ns",
        "share": "of the rank's idle_ns, 0..1",
    },
    "annotations": {
        "name": "of the ranges",
        "calls": "ranges in which something was launched, over all ranks",
        "busy_ns": "time in which anything runs that was launched in them, sum over ranks",
        "compute_ns": "of it, in which anything computes",
        "communication_ns": "of it, in which any communication runs",
        "exposed_ns": "of the communication, with no computation beside it, whoever launched that",
        "hidden": "share of the communication that is hidden, 0..1; missing without any",
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
        "wire_ns": "the rest of it; missing where that is not known",
        "exposed_ns": "time of it with no computation beside it",
        "wire_gbps": "bytes / wire_ns, GB/s",
        "link": "same_host, other_host or unknown",
        "source": "where peers and bytes come from",
    },
    "waterfall": {
        "part": "of the slowest rank's wall",
        "time_ns": "mean over ranks; all parts sum to the wall",
        "share": "of the wall, 0..1",
        "tflops": "what the speed would be if this part and those before it were all, per device",
        "evidence": "the figures that it comes from, in words",
        "remedy": "what would shorten it; empty where that is not known",
    },
    "memory": {
        **_RANK,
        "memory": "whose memory: cuda and the device's number, or host",
        "time_ns": "unix time by the rank's own clock, from which on it is so",
        "allocated_bytes": "in use",
        "reserved_bytes": "in use or kept for later use; missing for the host",
    },
}
"""Tables that can be had of an analysis, by the method that makes them: their columns, each with what it means and its
unit where the name does not hold it."""

PREDICTION_COLUMNS: dict[str, dict[str, str]] = {
    "choices": {
        **_CHOICE,
        "best": "probability that no other is faster, 0..1",
        **_INTERVAL,
        "tflops": "TFLOP/s per device; missing where the work is not known",
        "exposed": "part of the time that waits for transfers, mean over ranks, 0..1",
        "peak_bytes": "most memory that a rank holds",
        "fits": "whether that is there",
        "on_front": "whether nothing is faster with as little memory",
    },
    "over": {**_CHOICE, "at": "tokens, hosts, or Gbit/s of a NIC", **_INTERVAL},
    "parts": {
        "phase": "forward or backward",
        "part": "what the time goes to",
        "time_ms": "of the slowest rank, predicted",
    },
}
"""The same of a prediction and of advice."""


Method = TypeVar("Method", bound=Callable[..., Any])


def tells_columns(method: Method) -> Method:
    """Adds to a method's documentation what each column of its frame means; ``method`` bears the frame's name."""
    if method.__doc__:
        listed = "".join(f"\n- ``{column}``: {meaning}" for column, meaning in FRAMES[method.__name__].items())
        method.__doc__ += f'\n\nColumns, in ``frame.attrs["columns"]`` too; ``_ns`` are nanoseconds:\n{listed}\n'
    return method


def _iteration_rows(found: Findings) -> list[JsonObject]:
    median = found.attribution.median_iteration
    return [
        {"rank": rank.rank, "iteration": number, "median": number == median, **_figures(part)}
        for rank in found.attribution.ranks
        for number, part in enumerate(rank.iterations)
    ]


def _kernel_rows(found: Findings) -> list[JsonObject]:
    kernels = found.attribution.kernels
    whole = sum(one.time_ns for one in kernels) or 1
    return [
        {**one._asdict(), "share": one.time_ns / whole, "mean_ns": one.mean_ns, "hidden": one.hidden} for one in kernels
    ]


def _memory_rows(found: Findings) -> list[JsonObject]:
    return [
        dict(zip(FRAMES["memory"], (held.rank, held.memory, time, allocated, None if reserved == NONE else reserved),
                 strict=True))
        for held in memory_timelines(found.attribution)
        for time, allocated, reserved in zip(
            held.time_ns.tolist(), held.allocated_bytes.tolist(), held.reserved_bytes.tolist(), strict=True
        )
    ]  # fmt: skip


_ROWS: dict[str, Callable[[Findings], list[JsonObject]]] = {
    "breakdown": lambda found: [
        {"rank": rank.rank, "host": rank.host, **_figures(rank.breakdown)} for rank in found.attribution.ranks
    ],
    "iterations": _iteration_rows,
    "steps": lambda found: [msgspec.structs.asdict(step) for step in found.steps],
    "kernels": _kernel_rows,
    "idle": idle.rows,
    "annotations": lambda found: [{**one._asdict(), "hidden": one.hidden} for one in found.annotations],
    "hops": lambda found: [_hop_row(hop) for rank in found.attribution.ranks for hop in rank.hops],
    "waterfall": lambda found: [msgspec.structs.asdict(part) for part in found.waterfall.parts],
    "memory": _memory_rows,
}


def as_csv(frame: pd.DataFrame) -> str:
    """A frame as CSV; what is not known is empty, and spaces stand between several ranks."""
    plain = frame.astype(object).where(frame.notna(), None)
    rows = (
        [" ".join(map(str, value)) if isinstance(value, tuple) else value for value in row]
        for row in plain.itertuples(index=False)
    )
    return csv_text(list(frame.columns), rows)


def write_parquet(frame: pd.DataFrame, path: str | os.PathLike[str]) -> None:
    """A frame as a Parquet file, with what its columns mean. Raises `MissingExtraError` without pyarrow."""
    try:
        import pyarrow  # noqa: F401  (pandas would say it in a paragraph)
    except ImportError:
        raise MissingExtraError("Parquet files need pyarrow: pip install 'ringprof[parquet]'") from None
    frame.to_parquet(path, engine="pyarrow", index=False)


def frame_of(found: Findings, name: str) -> pd.DataFrame:
    """One of `FRAMES`."""
    import pandas as pd  # here, because it takes longer to import than most reports to make

    frame = pd.DataFrame(_ROWS[name](found), columns=list(FRAMES[name]))
    for column in frame.columns:
        if (column.endswith("_ns") and column != "mean_ns") or column.endswith("bytes"):
            frame[column] = frame[column].astype("Int64")
    frame.attrs["columns"] = dict(FRAMES[name])
    return frame


def _figures(breakdown: Breakdown) -> JsonObject:
    row = {column: getattr(breakdown, column) for column in PARTS_OF_TIME}
    for kind in KINDS:
        figures = breakdown.kinds.get(kind)
        row[f"{kind}_ns"] = figures.time_ns if figures else 0
    return row


_OF_HOPS = ("start_ns", "end_ns", "wait_ns", "wire_ns", "exposed_ns", "wire_gbps")


def _hop_row(hop: TimedHop) -> JsonObject:
    first, ready = hop.parts[0], [part.ready_ns for part in hop.parts]
    return {
        "rank": hop.rank,
        "hop": hop.number,
        "group": first.transfer.group[0],
        "send_to": hop.sent_to,
        "receive_from": hop.received_from,
        "bytes": hop.sent_bytes,
        "ready_ns": None if None in ready else max(moment for moment in ready if moment is not None),
        **{name: getattr(hop, name) for name in _OF_HOPS},
        "link": first.link,
        "source": first.transfer.source,
    }
