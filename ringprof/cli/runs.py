"""List of the runs of a folder, one line each, which ``ringprof report`` prints before the newest one's report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ringprof.cli.write import say
from ringprof.common.json_object import JsonObject
from ringprof.errors import InputError
from ringprof.report.listing import Field
from ringprof.report.tables import Column, Table
from ringprof.report.text import TextStyle, clean, csv_text, duration, rate
from ringprof.run import Run, read_run
from ringprof.trace.inputs import GROUP_FOLDER

if TYPE_CHECKING:
    import pandas as pd

_FIELDS = (
    Field("path", column=Column("run", folds=True), shown=clean),
    Field("created", column=Column("recorded (UTC)", drop=3), shown=lambda time: clean(time[:16].replace("T", " "))),
    Field("strategy", column=Column("strategy"), shown=lambda name: clean(name or "own program")),
    Field("seq", column=Column("tokens", "count")),
    Field("world_size", column=Column("ranks", "count")),
    Field("ranks_per_host"),
    Field("kernel", column=Column("kernel", drop=4), shown=lambda name: clean(name or "-")),
    Field("dtype", column=Column("type", drop=2), shown=lambda name: name or "-"),
    Field(
        "iteration_ms", column=Column("iteration", drop=1), shown=lambda ms: "-" if ms is None else duration(ms * 1e6)
    ),
    Field("tflops", column=Column("per device"), shown=lambda value: "-" if value is None else rate(value)),
    Field("verified", column=Column("verified", drop=5), shown={True: "yes", False: "WRONG", None: "no"}.get),
)
RUN_COLUMNS = tuple(field.key for field in _FIELDS)
"""Fields in JSON and CSV; null or empty if a run does not have the value."""


def list_runs(folders: Sequence[str]) -> list[JsonObject] | None:
    """List the runs one level below the folders, the newest first; None if a path is not a folder of runs.

    A folder of the groups of one job (`GROUP_FOLDER`) holds one run. A run that cannot be read is left out with a
    message. Raises `InputError` where none can be read.
    """
    paths = [sorted(Path(folder).glob("*/run.json")) if os.path.isdir(folder) else [] for folder in folders]
    files = [path for of_folder in paths for path in of_folder]
    if not all(paths) or all(GROUP_FOLDER.fullmatch(path.parent.name) for path in files):
        return None
    rows, problems = [], []
    for path in files:
        try:
            rows.append(_fields(str(path.parent), read_run(path)))
        except InputError as error:
            problems.append(error)
    if not rows:
        raise problems[0]
    for problem in problems:
        say(f"ringprof: left out: {problem}")
    return sorted(rows, key=lambda row: row["created"], reverse=True)


def runs_csv(rows: Sequence[JsonObject]) -> str:
    """Format a list of runs as CSV with a header."""
    return csv_text(RUN_COLUMNS, ([row[name] for name in RUN_COLUMNS] for row in rows))


def runs_frame(rows: Sequence[JsonObject]) -> pd.DataFrame:
    """Return a list of runs as a data frame."""
    import pandas as pd

    return pd.DataFrame(list(rows), columns=list(RUN_COLUMNS))


def runs_text(rows: Sequence[JsonObject], style: TextStyle) -> str:
    """Format a list of runs as a table, and say which is the newest."""
    newest = f"the newest of these {len(rows)} runs" if len(rows) > 1 else "the only run here"
    fields = [field for field in _FIELDS if field.column]
    cells = [[field.shown(row[field.key]) if field.shown else row[field.key] for field in fields] for row in rows]
    table = Table("", [field.column for field in fields if field.column], cells).text(style)
    return f"{table}\n\n{newest}: {clean(rows[0]['path'])}\n\n"


def _fields(path: str, run: Run) -> JsonObject:
    """Collect the values of one run by the names of `RUN_COLUMNS`."""
    time_ns = run.timings.median_ns() if run.timings else None
    work, size = run.workload, run.topology.world_size
    values = (
        path, run.created, run.strategy.name if run.strategy else None, work.seq if work else None, size,
        run.topology.ranks_per_host, run.kernel, work.dtype if work else None,
        time_ns / 1e6 if time_ns else None, run.tflops(time_ns),
        run.verification.passed if run.verification else None,
    )  # fmt: skip
    return dict(zip(RUN_COLUMNS, values, strict=True))
