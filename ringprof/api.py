"""The library's front door: load a run or traces, and ask where the time went.

import ringprof
run = ringprof.load("traces/run.json")
run.breakdown()      # one row a rank
run.hops()           # one row a neighbour transfer
run.report()         # the JSON report as a dict
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringprof.analysis.attribution import Attribution, Rank, attribute
from ringprof.analysis.hops import Hop
from ringprof.analysis.rules import KINDS
from ringprof.analysis.summary import Summary, summarise
from ringprof.errors import InputError, KernelTableError, UsageError
from ringprof.report import as_json, terminal
from ringprof.run import Run, read_run
from ringprof.trace.columns import Trace, Warning
from ringprof.trace.detect import Input, detect, detect_bytes
from ringprof.trace.kineto import parse_trace
from ringprof.trace.ranks import read_traces

if TYPE_CHECKING:
    import pandas as pd

    from ringprof.analysis.comparison import Comparison, Entry
    from ringprof.analysis.table import TableReport

BREAKDOWN_COLUMNS = (
    "rank",
    "host",
    "wall_ns",
    "compute_ns",
    "comm_ns",
    "overlapped_ns",
    "exposed_comm_ns",
    "exposed_memory_ns",
    "idle_ns",
    "overlap_ratio",
    *(f"{kind}_ns" for kind in KINDS),
)
"""Of `Analysis.breakdown`: a row a rank; times in int64 nanoseconds, missing where not known; the ratio is 0..1."""

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
"""Of `Analysis.hops`: a row a hop, by rank and start.

``start_ns`` and ``end_ns`` are unix time; ``bytes`` are those sent; ``exposed_ns`` is time with no computation beside
it; ``link`` is ``same_host``, ``other_host`` or ``unknown``; ``source`` says where peers and bytes come from.
"""


class Analysis:
    """One run, or the traces of one, explained. Made by `load`."""

    def __init__(self, traces: Sequence[Trace], run: Run | None, source: Input, ranks_per_host: int | None) -> None:
        self._traces = tuple(traces)
        self._source = source
        self._ranks_per_host = ranks_per_host
        self.run = run
        """What the recorder wrote, or None for traces from elsewhere."""

    @cached_property
    def attribution(self) -> Attribution:
        """Every rank's figures, as values."""
        return attribute(self._traces, self.run, self._ranks_per_host)

    @cached_property
    def summary(self) -> Summary:
        """The run as a whole."""
        return summarise(self.attribution)

    @property
    def ranks(self) -> list[int]:
        """The ranks that there are traces of, ascending."""
        return [rank.rank for rank in self.attribution.ranks]

    @property
    def warnings(self) -> list[Warning]:
        """What was odd in the input, and what could not be told and why."""
        return list(self.attribution.warnings)

    def breakdown(self) -> pd.DataFrame:
        """Where each rank's time went; columns `BREAKDOWN_COLUMNS`."""
        return _frame([_breakdown_row(rank) for rank in self.attribution.ranks], BREAKDOWN_COLUMNS)

    def hops(self) -> pd.DataFrame:
        """Every neighbour transfer; columns `HOP_COLUMNS`."""
        rows = [_hop_row(hop) for rank in self.attribution.ranks for hop in rank.hops]
        return _frame(rows, HOP_COLUMNS)

    def report(self) -> dict[str, Any]:
        """The report of ``--format json``, schema ``ringprof.report/1``."""
        paths = [self._source.run] if self._source.run else list(self._source.paths)
        return as_json.as_dict(self.attribution, self.summary, source=self._source.type, paths=paths)

    def to_terminal(self, look: terminal.Look | None = None) -> str:
        """The report for people, as text."""
        return terminal.render(self.attribution, self.summary, look)

    def __repr__(self) -> str:
        name = self.run.name if self.run else f"{len(self._traces)} traces"
        return f"<ringprof.Analysis of {name}>"

    def _repr_html_(self) -> str:
        """The terminal report, for notebooks."""
        text = self.to_terminal(terminal.Look(width=110))
        return f'<pre style="line-height: 1.2">{html.escape(text)}</pre>'


class TableAnalysis:
    """Printed kernel tables, explained: what a table alone can prove. Made by `load` from a log."""

    run = None
    ranks: tuple[int, ...] = ()
    """A table does not say which ranks it sums."""

    def __init__(self, name: str, reports: Sequence[TableReport]) -> None:
        self.name, self.reports = name, tuple(reports)

    @property
    def warnings(self) -> list[Warning]:
        """What was odd in the tables."""
        return [warning for report in self.reports for warning in report.warnings]

    def report(self) -> dict[str, Any]:
        """The JSON report (schema ``ringprof.report/1``) of the largest table."""
        from ringprof.report import table

        return table.whole_report(self.reports, [self.name])

    def to_terminal(self, look: terminal.Look | None = None) -> str:
        """The report of all tables as text."""
        from ringprof.report import table

        return table.render_all(self.reports, ascii_only=bool(look and look.ascii_only))


@dataclass(frozen=True)
class Reading:
    """How to read what was given; None leaves it to the input."""

    ranks_per_host: int | None = None
    """Names the hosts where neither run nor traces do."""
    limit_bytes: int | None = None
    """How far a compressed trace may expand (16 GiB)."""
    wall_ns: int | None = None
    """Kernel tables: wall time of the window."""
    iterations: int | None = None
    """Kernel tables: iterations in the window."""


def load(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], **how: int | None
) -> Analysis | TableAnalysis:
    """Load a ``run.json``, a run's folder, Kineto traces of one run, a folder of them, or a log with kernel tables.

    ``how``: the fields of `Reading`. Raises `InputError` where something cannot be read or is not of one run.
    """
    reading = Reading(**how)
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    source = detect(given)
    if source.type == "run":
        assert source.run is not None
        return _load_run(source.run, source, reading)
    if source.type == "text":
        return _load_text(source.paths[0], None, reading)
    traces = read_traces(source.paths, limit_bytes=reading.limit_bytes)
    return Analysis(traces, None, source, reading.ranks_per_host)


def load_bytes(data: bytes, name: str = "-", **how: int | None) -> Analysis | TableAnalysis:
    """As `load`, for one trace or log that came through a pipe."""
    reading = Reading(**how)
    kind = detect_bytes(data, name)
    if kind == "run":
        raise InputError(f"{name}: a run names its traces relative to its own file: give the path of the run.json")
    if kind == "text":
        return _load_text(name, data, reading)
    trace = parse_trace(data, name, limit_bytes=reading.limit_bytes)
    return Analysis([trace], None, Input("trace", (name,)), reading.ranks_per_host)


def _load_run(path: str, source: Input, reading: Reading) -> Analysis:
    run = read_run(path)
    if not run.traces:
        raise InputError(f"{path}: the run names no traces: record it again")
    rank_of = {str(Path(path).parent / trace.path): trace.rank for trace in run.traces}
    read = read_traces(list(rank_of), limit_bytes=reading.limit_bytes)
    traces = [replace(trace, rank=rank_of[trace.path]) for trace in read]
    return Analysis(traces, run, source, reading.ranks_per_host)


def _load_text(name: str, data: bytes | None, reading: Reading) -> TableAnalysis:
    from ringprof.analysis.table import analyse_table
    from ringprof.trace.kernel_table import read_tables

    try:
        raw = Path(name).read_bytes() if data is None else data
    except OSError as error:
        raise InputError(f"{name}: {error.strerror or error}") from None
    tables = read_tables(raw.decode("utf-8-sig", errors="replace"), name)
    return TableAnalysis(name, [analyse_table(table, reading.wall_ns, reading.iterations) for table in tables])


def compare(*sources: str | os.PathLike[str] | Analysis | TableAnalysis) -> Comparison:
    """Set runs, traces, printed tables and benchmark logs side by side, in any mix, against the first.

    A log stands for as many entries as it has rows. Raises `UsageError` for fewer than two entries, and what `load`
    raises.
    """
    from ringprof.analysis import comparison
    from ringprof.analysis.entries import labels_of

    paths = [str(source) for source in sources if isinstance(source, (str, os.PathLike))]
    labels = iter(labels_of(paths) if paths else [])
    entries: list[Entry] = []
    for index, source in enumerate(sources):
        if isinstance(source, (Analysis, TableAnalysis)):
            entries += _entries_of(f"object {index + 1}", source)
        else:
            entries += _entries_at(next(labels), source)
    if len(entries) < 2:
        raise UsageError("a comparison needs two measurements or more: name another run, trace, table or log")
    return comparison.compare(entries)


def _entries_at(label: str, path: str | os.PathLike[str]) -> list[Entry]:
    from ringprof.analysis.entries import entry_of_row
    from ringprof.trace.benchmark_log import read_log

    try:
        return _entries_of(label, load(path))
    except KernelTableError:
        rows = read_log(path).rows
        if not rows:
            raise
        return [entry_of_row(row) for row in rows if not row.missing]


def _entries_of(label: str, source: Analysis | TableAnalysis) -> list[Entry]:
    from ringprof.analysis.entries import entry_of_run, entry_of_table

    if isinstance(source, Analysis):
        return [entry_of_run(label, source.run, source.summary)]
    several = len(source.reports) > 1
    return [
        entry_of_table(f"{label} table {index + 1}" if several else label, report)
        for index, report in enumerate(source.reports)
    ]


# --- frames -----------------------------------------------------------------------------------------


def _frame(rows: list[dict[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    import pandas as pd  # here, because it takes longer to import than most reports to make

    frame = pd.DataFrame(rows, columns=list(columns))
    for column in columns:
        if column.endswith("_ns") or column == "bytes":
            frame[column] = frame[column].astype("Int64")
    return frame


def _breakdown_row(rank: Rank) -> dict[str, Any]:
    row: dict[str, Any] = {"rank": rank.rank, "host": rank.host}
    for column in BREAKDOWN_COLUMNS[2:10]:
        row[column] = getattr(rank.breakdown, column)
    for kind in KINDS:
        figures = rank.breakdown.kinds.get(kind)
        row[f"{kind}_ns"] = figures.time_ns if figures else 0
    return row


def _hop_row(hop: Hop) -> dict[str, Any]:
    wire, size = hop.wire_ns, hop.sent_bytes
    ready = [part.ready_ns for part in hop.parts]
    transfers = [part.transfer for part in hop.parts]
    return {
        "rank": hop.rank,
        "hop": hop.number,
        "group": transfers[0].group[0],
        "send_to": tuple(dict.fromkeys(m.peer for t in transfers for m in t.sends)),
        "receive_from": tuple(dict.fromkeys(m.peer for t in transfers for m in t.receives)),
        "bytes": size,
        "start_ns": hop.start_ns,
        "end_ns": hop.end_ns,
        "ready_ns": None if None in ready else max(moment for moment in ready if moment is not None),
        "wait_ns": hop.wait_ns,
        "wire_ns": wire,
        "exposed_ns": hop.exposed_ns,
        "wire_gbps": size / wire if size is not None and wire else None,
        "link": hop.parts[0].link,
        "source": transfers[0].source,
    }
