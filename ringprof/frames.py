"""Tables of an analysis as pandas frames: their columns, and how each row is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.memory import memory_of
from ringprof.analysis.findings.waterfall import Waterfall
from ringprof.analysis.kinds.kinds import KINDS
from ringprof.analysis.rank import Rank
from ringprof.analysis.steps.steps import Step
from ringprof.analysis.timeline.breakdown import Breakdown
from ringprof.analysis.transfers.hops import TimedHop
from ringprof.errors import MissingExtraError
from ringprof.frame_columns import FRAMES, PARTS_OF_TIME
from ringprof.json_object import JsonObject
from ringprof.report.text import csv_text
from ringprof.trace.columns import NONE

if TYPE_CHECKING:
    import pandas as pd

Method = TypeVar("Method", bound=Callable[..., Any])


def tells_columns(method: Method) -> Method:
    """Adds to a method's documentation what each column of its frame means; ``method`` bears the frame's name."""
    if method.__doc__:
        listed = "".join(f"\n- ``{column}``: {meaning}" for column, meaning in FRAMES[method.__name__].items())
        method.__doc__ += f'\n\nColumns, in ``frame.attrs["columns"]`` too; ``_ns`` are nanoseconds:\n{listed}\n'
    return method


def breakdown_frame(attribution: Attribution) -> pd.DataFrame:
    """A row a rank."""
    return _frame([_breakdown_row(rank) for rank in attribution.ranks], "breakdown")


def iteration_frame(attribution: Attribution) -> pd.DataFrame:
    """A row a rank and iteration."""
    median = attribution.median_iteration
    rows = [
        {"rank": rank.rank, "iteration": number, "median": number == median, **_figures(part)}
        for rank in attribution.ranks
        for number, part in enumerate(rank.iterations)
    ]
    return _frame(rows, "iterations")


def hop_frame(attribution: Attribution) -> pd.DataFrame:
    """A row a hop."""
    return _frame([_hop_row(hop) for rank in attribution.ranks for hop in rank.hops], "hops")


def step_frame(steps: Iterable[Step]) -> pd.DataFrame:
    """A row a rank and ring step."""
    return _frame([msgspec.structs.asdict(step) for step in steps], "steps")


def kernel_frame(attribution: Attribution) -> pd.DataFrame:
    """A row a name and kind."""
    whole = sum(one.time_ns for one in attribution.kernels) or 1
    rows = [
        {**one._asdict(), "share": one.time_ns / whole, "mean_ns": one.mean_ns, "hidden": one.hidden}
        for one in attribution.kernels
    ]
    return _frame(rows, "kernels")


def annotation_frame(findings: Findings) -> pd.DataFrame:
    """A row a name."""
    return _frame([{**one._asdict(), "hidden": one.hidden} for one in findings.annotations], "annotations")


def waterfall_frame(waterfall: Waterfall) -> pd.DataFrame:
    """A row a part."""
    return _frame([msgspec.structs.asdict(part) for part in waterfall.parts], "waterfall")


def memory_frame(attribution: Attribution) -> pd.DataFrame:
    """A row an allocation or release."""
    rows = [
        dict(zip(FRAMES["memory"], (held.rank, held.memory, time, allocated, None if reserved == NONE else reserved),
                 strict=True))
        for held in memory_of(attribution)
        for time, allocated, reserved in zip(
            held.time_ns.tolist(), held.allocated_bytes.tolist(), held.reserved_bytes.tolist(), strict=True
        )
    ]  # fmt: skip
    return _frame(rows, "memory")


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


def _frame(rows: list[JsonObject], name: str) -> pd.DataFrame:
    import pandas as pd  # here, because it takes longer to import than most reports to make

    frame = pd.DataFrame(rows, columns=list(FRAMES[name]))
    for column in frame.columns:
        if (column.endswith("_ns") and column != "mean_ns") or column.endswith("bytes"):
            frame[column] = frame[column].astype("Int64")
    frame.attrs["columns"] = dict(FRAMES[name])
    return frame


def _breakdown_row(rank: Rank) -> JsonObject:
    return {"rank": rank.rank, "host": rank.host, **_figures(rank.breakdown)}


def _figures(breakdown: Breakdown) -> JsonObject:
    row = {column: getattr(breakdown, column) for column in PARTS_OF_TIME}
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
