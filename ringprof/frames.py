"""Tables of an analysis as pandas frames: their columns, and how each row is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.annotations import ANNOTATION_COLUMNS
from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.memory import MEMORY_COLUMNS, memory_of
from ringprof.analysis.findings.waterfall import WATERFALL_COLUMNS, Waterfall
from ringprof.analysis.kinds.kinds import KINDS
from ringprof.analysis.rank import Rank
from ringprof.analysis.steps.steps import STEP_COLUMNS, Step
from ringprof.analysis.timeline.breakdown import Breakdown
from ringprof.analysis.timeline.kernels import KERNEL_COLUMNS
from ringprof.analysis.transfers.hops import TimedHop
from ringprof.errors import MissingExtraError
from ringprof.frame_columns import meanings_of
from ringprof.json_object import JsonObject
from ringprof.report.text import csv_text
from ringprof.trace.columns import NONE

if TYPE_CHECKING:
    import pandas as pd

_FIGURES = (
    "wall_ns",
    "compute_ns",
    "comm_ns",
    "overlapped_ns",
    "exposed_comm_ns",
    "exposed_memory_ns",
    "idle_ns",
    "overlap_ratio",
    "exposed_other_groups_ns",
    "background_ns",
)

BREAKDOWN_COLUMNS = ("rank", "host", *_FIGURES, *(f"{kind}_ns" for kind in KINDS))
"""Of `ringprof.api.Analysis.breakdown`: a row a rank; times in int64 nanoseconds, missing where not known; the ratio
is 0..1."""

ITERATION_COLUMNS = ("rank", "iteration", "median", *_FIGURES, *(f"{kind}_ns" for kind in KINDS))
"""Of `ringprof.api.Analysis.iterations`: a row a rank and marked iteration; ``median`` marks the iteration whose
slowest rank took the median time; the rest as in `BREAKDOWN_COLUMNS`."""

HOP_COLUMNS = (
    "rank",
    "hop",
    "group",
    "send_to",
    "receive_from",
    "bytes",
    "start_ns",
    "end_ns",
    "ready_ns",
    "wait_ns",
    "wire_ns",
    "exposed_ns",
    "wire_gbps",
    "link",
    "source",
)
"""Of `ringprof.api.Analysis.hops`: a row a hop, by rank and start.

``start_ns`` and ``end_ns`` are unix time; ``bytes`` are those sent; ``exposed_ns`` is time with no computation beside
it; ``link`` is ``same_host``, ``other_host`` or ``unknown``; ``source`` says where peers and bytes come from.
"""


FRAMES: dict[str, Sequence[str]] = {
    "breakdown": BREAKDOWN_COLUMNS, "iterations": ITERATION_COLUMNS, "steps": STEP_COLUMNS, "kernels": KERNEL_COLUMNS,
    "annotations": ANNOTATION_COLUMNS, "hops": HOP_COLUMNS, "waterfall": WATERFALL_COLUMNS, "memory": MEMORY_COLUMNS,
}  # fmt: skip
"""Tables that can be had of an analysis, by the method that makes them: their columns."""

Method = TypeVar("Method", bound=Callable[..., Any])


def tells_columns(method: Method) -> Method:
    """Adds to a method's documentation what each column of its frame means; ``method`` bears the frame's name."""
    if method.__doc__:
        meanings = meanings_of(method.__name__, FRAMES[method.__name__])
        listed = "".join(f"\n- ``{column}``: {meaning}" for column, meaning in meanings.items())
        method.__doc__ += f'\n\nColumns, in ``frame.attrs["columns"]`` too; ``_ns`` are nanoseconds:\n{listed}\n'
    return method


def breakdown_frame(attribution: Attribution) -> pd.DataFrame:
    """A row a rank."""
    return _frame([_breakdown_row(rank) for rank in attribution.ranks], BREAKDOWN_COLUMNS, "breakdown")


def iteration_frame(attribution: Attribution) -> pd.DataFrame:
    """A row a rank and iteration."""
    median = attribution.median_iteration
    rows = [
        {"rank": rank.rank, "iteration": number, "median": number == median, **_figures(part)}
        for rank in attribution.ranks
        for number, part in enumerate(rank.iterations)
    ]
    return _frame(rows, ITERATION_COLUMNS, "iterations")


def hop_frame(attribution: Attribution) -> pd.DataFrame:
    """A row a hop."""
    return _frame([_hop_row(hop) for rank in attribution.ranks for hop in rank.hops], HOP_COLUMNS, "hops")


def step_frame(steps: Iterable[Step]) -> pd.DataFrame:
    """A row a rank and ring step."""
    return _frame([msgspec.structs.asdict(step) for step in steps], STEP_COLUMNS, "steps")


def kernel_frame(attribution: Attribution) -> pd.DataFrame:
    """A row a name and kind."""
    whole = sum(one.time_ns for one in attribution.kernels) or 1
    rows = [
        {**one._asdict(), "share": one.time_ns / whole, "mean_ns": one.mean_ns, "hidden": one.hidden}
        for one in attribution.kernels
    ]
    return _frame(rows, KERNEL_COLUMNS, "kernels")


def annotation_frame(findings: Findings) -> pd.DataFrame:
    """A row a name."""
    return _frame(
        [{**one._asdict(), "hidden": one.hidden} for one in findings.annotations], ANNOTATION_COLUMNS, "annotations"
    )


def waterfall_frame(waterfall: Waterfall) -> pd.DataFrame:
    """A row a part."""
    return _frame([msgspec.structs.asdict(part) for part in waterfall.parts], WATERFALL_COLUMNS, "waterfall")


def memory_frame(attribution: Attribution) -> pd.DataFrame:
    """A row an allocation or release."""
    rows = [
        dict(zip(MEMORY_COLUMNS, (held.rank, held.memory, time, allocated, None if reserved == NONE else reserved),
                 strict=True))
        for held in memory_of(attribution)
        for time, allocated, reserved in zip(
            held.time_ns.tolist(), held.allocated_bytes.tolist(), held.reserved_bytes.tolist(), strict=True
        )
    ]  # fmt: skip
    return _frame(rows, MEMORY_COLUMNS, "memory")


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


def _frame(rows: list[JsonObject], columns: Sequence[str], name: str) -> pd.DataFrame:
    import pandas as pd  # here, because it takes longer to import than most reports to make

    frame = pd.DataFrame(rows, columns=list(columns))
    for column in columns:
        if (column.endswith("_ns") and column != "mean_ns") or column.endswith("bytes"):
            frame[column] = frame[column].astype("Int64")
    frame.attrs["columns"] = meanings_of(name, columns)
    return frame


def _breakdown_row(rank: Rank) -> JsonObject:
    return {"rank": rank.rank, "host": rank.host, **_figures(rank.breakdown)}


def _figures(breakdown: Breakdown) -> JsonObject:
    row = {column: getattr(breakdown, column) for column in _FIGURES}
    for kind in KINDS:
        figures = breakdown.kinds.get(kind)
        row[f"{kind}_ns"] = figures.time_ns if figures else 0
    return row


def _hop_row(hop: TimedHop) -> JsonObject:
    first, ready = hop.parts[0], [part.ready_ns for part in hop.parts]
    return {
        "rank": hop.rank,
        "hop": hop.number,
        "group": first.transfer.group[0],
        "send_to": hop.sent_to,
        "receive_from": hop.received_from,
        "bytes": hop.sent_bytes,
        "start_ns": hop.start_ns,
        "end_ns": hop.end_ns,
        "ready_ns": None if None in ready else max(moment for moment in ready if moment is not None),
        "wait_ns": hop.wait_ns,
        "wire_ns": hop.wire_ns,
        "exposed_ns": hop.exposed_ns,
        "wire_gbps": hop.wire_gbps,
        "link": first.link,
        "source": first.transfer.source,
    }
