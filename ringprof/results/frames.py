"""Tables of an analysis as pandas frames: their columns, the meaning of each column, and the rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.time_table import TIMES
from ringprof.analysis.kinds.kinds import KINDS
from ringprof.analysis.timeline.breakdown import Breakdown
from ringprof.common.json_object import JsonObject
from ringprof.errors import MissingExtraError, install_command
from ringprof.report.listing import ITERATION, RANK, Field, FieldTable
from ringprof.report.sections.hops import HOPS
from ringprof.report.sections.idle import IDLE
from ringprof.report.sections.listings import ANNOTATIONS, COLLECTIVES, GEMMS, KERNELS, LAYERS
from ringprof.report.sections.memory import MEMORY
from ringprof.report.sections.steps import STEPS
from ringprof.report.sections.waterfall import WATERFALL
from ringprof.report.terms import LABELS
from ringprof.report.text import csv_text

if TYPE_CHECKING:
    import pandas as pd

PARTS_OF_TIME = {
    **{f"{row.name}_ns": row.meaning for row in TIMES if not row.optional},
    "overlap_ratio": "overlapped_ns / comm_ns, 0..1; missing without communication and on CPU",
    **{f"{row.name}_ns": row.meaning for row in TIMES if row.optional},
}
"""Columns of the time breakdown with their meaning; the names are fields of `Breakdown`."""
_KIND_COLUMNS = {f"{kind}_ns": f"sum of the durations of kind {LABELS[kind]}; kinds may overlap" for kind in KINDS}


def _figures(breakdown: Breakdown) -> JsonObject:
    """Return the columns `PARTS_OF_TIME` and the time of each kind of a breakdown."""
    kinds = {f"{kind}_ns": breakdown.kinds[kind].time_ns if kind in breakdown.kinds else 0 for kind in KINDS}
    return {**{column: getattr(breakdown, column) for column in PARTS_OF_TIME}, **kinds}


_FIGURES = [Field(key, meaning) for key, meaning in (PARTS_OF_TIME | _KIND_COLUMNS).items()]
_BREAKDOWN = FieldTable(
    "breakdown",
    lambda findings: [
        {"rank": rank.rank, "host": rank.host, **_figures(rank.breakdown)} for rank in findings.attribution.ranks
    ],
    (RANK, Field("host", "host that the rank ran on; missing where nothing names it"), *_FIGURES),
)
_ITERATIONS = FieldTable(
    "iterations",
    lambda findings: [
        {"rank": rank.rank, "iteration": number, "median": number == findings.attribution.median_iteration,
         **_figures(part)}
        for rank in findings.attribution.ranks
        for number, part in enumerate(rank.iterations)
    ],
    (RANK, ITERATION, Field("median", "whether this iteration's slowest rank took the median time"), *_FIGURES),
)  # fmt: skip

FRAMES = {
    table.name: table
    for table in (
        _BREAKDOWN, _ITERATIONS, STEPS, KERNELS, IDLE, GEMMS, COLLECTIVES, LAYERS, ANNOTATIONS, HOPS, WATERFALL, MEMORY
    )
}  # fmt: skip
"""Data frames of an analysis by the method that returns them."""


Method = TypeVar("Method", bound=Callable[..., Any])


def documents_columns(method: Method) -> Method:
    """Add the columns of a frame to the docstring of the method that returns it; both have the same name."""
    if method.__doc__:
        listed = "".join(f"\n- ``{column}``: {meaning}" for column, meaning in FRAMES[method.__name__].meanings.items())
        method.__doc__ += f'\n\nColumns, in ``frame.attrs["columns"]`` too; ``_ns`` are nanoseconds:\n{listed}\n'
    return method


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

    table = FRAMES[name]
    frame = pd.DataFrame((table.rows_of_frame or table.rows)(findings), columns=list(table.meanings))
    for column in frame.columns:
        if (column.endswith("_ns") and column != "mean_ns") or column.endswith("bytes") or column in _WHOLE_COLUMNS:
            frame[column] = frame[column].astype("Int64")
    frame.attrs["columns"] = table.meanings
    return frame
