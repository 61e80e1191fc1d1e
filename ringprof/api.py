"""The library's front door: load a run or traces, and ask where the time went.

import ringprof
run = ringprof.load("traces/run.json")
run.breakdown()      # one row a rank
run.hops()           # one row a neighbour transfer
run.steps()          # one row a rank and ring step
run.waterfall()      # from the peak to the speed achieved
run.report()         # the JSON report as a dict
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringprof import frames
from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.comparison import Comparison
from ringprof.analysis.findings.figures import figures_of, figures_of_table
from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.summary import Summary
from ringprof.analysis.kinds.rules import Rule
from ringprof.analysis.timeline.focus import Focus, parse_between
from ringprof.analysis.transfers.clocks import Clocks
from ringprof.errors import InputError, KernelTableError, UsageError
from ringprof.files import exists, folder_of, is_url, read_whole, size_of, within
from ringprof.report import as_json, terminal
from ringprof.run import RankTrace, Run, Workload, read_run
from ringprof.scale.pipeline import explain_stored, explain_traces
from ringprof.scale.trace_set import Notify, TraceSet
from ringprof.scale.workers import DaskCluster, LocalProcesses
from ringprof.trace.columns import Caveat
from ringprof.trace.detect import Input, detect, detect_bytes
from ringprof.trace.kineto import parse_trace
from ringprof.trace.nsys import SQLITE_MAGIC
from ringprof.trace.ranks import json_bytes, read_traces, starts_with
from ringprof.trace.reduced import MAGIC

if TYPE_CHECKING:
    import pandas as pd

    from ringprof.analysis.findings.comparison import Entry
    from ringprof.kernel_tables.analyse import TableReport
    from ringprof.report.plots import Plots


MOST_IN_MEMORY = 64
"""Ranks up to which all traces are held in memory."""
MOST_BYTES_IN_MEMORY = 8 << 30
"""Bytes of JSON, all traces together, up to which they are: as columns that is a thirtieth."""


class Analysis:
    """One run, or the traces of one, explained. Made by `load`."""

    def __init__(self, findings: Findings, source: Input) -> None:
        self.findings = findings
        """Steps, waterfall and verdict, as values."""
        self._source = source

    @property
    def attribution(self) -> Attribution:
        """Every rank's figures, as values."""
        return self.findings.attribution

    @property
    def run(self) -> Run | None:
        """What the recorder wrote, or None for traces from elsewhere."""
        return self.attribution.run

    @property
    def summary(self) -> Summary:
        """The run as a whole."""
        return self.findings.summary

    @property
    def verdict(self) -> list[str]:
        """At most three lines: what communication cost, what the cost came from, what could be gained."""
        return list(self.findings.verdict)

    @property
    def ranks(self) -> list[int]:
        """The ranks that there are traces of, ascending."""
        return [rank.rank for rank in self.attribution.ranks]

    @property
    def warnings(self) -> list[Caveat]:
        """What was odd in the input, and what could not be told and why."""
        return list(self.attribution.warnings)

    def breakdown(self) -> pd.DataFrame:
        """Where each rank's time went; columns `ringprof.frames.BREAKDOWN_COLUMNS`."""
        return frames.breakdown_frame(self.attribution)

    def iterations(self) -> pd.DataFrame:
        """The same for each iteration alone; columns `ringprof.frames.ITERATION_COLUMNS`."""
        return frames.iteration_frame(self.attribution)

    def hops(self) -> pd.DataFrame:
        """Every neighbour transfer; columns `ringprof.frames.HOP_COLUMNS`."""
        return frames.hop_frame(self.attribution)

    def steps(self) -> pd.DataFrame:
        """Every ring step of every rank; columns `ringprof.analysis.steps.steps.STEP_COLUMNS`. May be empty."""
        return frames.step_frame(self.findings.steps)

    def waterfall(self) -> pd.DataFrame:
        """From the device's peak to the speed achieved; `ringprof.analysis.findings.waterfall.WATERFALL_COLUMNS`."""
        return frames.waterfall_frame(self.findings.waterfall)

    def figures(self) -> dict[str, float]:
        """Every figure of the report by name, for conditions; see `ringprof.analysis.findings.figures`."""
        return figures_of(self.findings)

    def clocks(self) -> Clocks:
        """What was added to each rank's times to put all hosts on one clock, and how sure that is."""
        return self.attribution.clocks

    def hta(self) -> Any:
        """HolisticTraceAnalysis's ``TraceAnalysis`` of the same traces, for its deeper analyses.

        Raises `MissingExtraError` where it is not installed, `InputError` where it does not read these traces.
        """
        from ringprof.hta import trace_analysis

        return trace_analysis({rank.rank: rank.path for rank in self.attribution.ranks})

    def report(self) -> dict[str, Any]:
        """The report of ``--format json``, schema ``ringprof.report/1``."""
        paths = [self._source.run] if self._source.run else list(self._source.paths)
        return as_json.as_dict(self.findings, source=self._source.type, paths=paths)

    def to_terminal(self, look: terminal.Look | None = None, sections: Sequence[str] = ()) -> str:
        """The report for people, as text; ``sections``: what to add of `ringprof.report.sections.SECTIONS`."""
        return terminal.render(self.findings, look, sections)

    @cached_property
    def plot(self) -> Plots:
        """Plots with matplotlib: ``run.plot.timeline()`` and others, see `ringprof.report.plots.Plots`."""
        from ringprof.report.plots import Plots

        return Plots(self.findings)

    def to_html(self) -> str:
        """The report as one HTML page that needs nothing else. Raises `MissingExtraError` without Bokeh."""
        from ringprof.report.page.document import render
        from ringprof.report.page.run import run_document

        paths = [Path(path) for path in self._source.paths]
        name = self.run.name if self.run else (paths[0] if len(paths) == 1 else paths[0].resolve().parent).name
        return render(run_document(self.findings, self.report(), name))

    def __repr__(self) -> str:
        name = self.run.name if self.run else f"{len(self.ranks)} traces"
        return f"<ringprof.Analysis of {name}>"

    def _repr_html_(self) -> str:
        """Header, verdict and breakdown, for notebooks."""
        from ringprof.report.notebook import findings_html

        return findings_html(self.findings)


class TableAnalysis:
    """Printed kernel tables, explained: what a table alone can prove. Made by `load` from a log."""

    run = None
    ranks: tuple[int, ...] = ()
    """A table does not say which ranks it sums."""

    def __init__(self, name: str, reports: Sequence[TableReport]) -> None:
        self.name, self.reports = name, tuple(reports)

    @property
    def warnings(self) -> list[Caveat]:
        """What was odd in the tables."""
        return [warning for report in self.reports for warning in report.warnings]

    def report(self) -> dict[str, Any]:
        """The JSON report (schema ``ringprof.report/1``) of the largest table."""
        from ringprof.kernel_tables import show as table

        return table.whole_report(self.reports, [self.name])

    def figures(self) -> dict[str, float]:
        """The figures of the largest table by name, for conditions; see `ringprof.analysis.findings.figures`."""
        from ringprof.kernel_tables import show as table

        return figures_of_table(table.largest_of(self.reports))

    def to_terminal(self, look: terminal.Look | None = None, sections: Sequence[str] = ()) -> str:
        """The report of all tables as text; a table has none of the further ``sections``."""
        from ringprof.kernel_tables import show as table

        return table.render_all(self.reports, ascii_only=bool(look and look.ascii_only))

    def _repr_html_(self) -> str:
        """The terminal report, for notebooks."""
        return f'<pre style="line-height: 1.2">{html.escape(self.to_terminal())}</pre>'


@dataclass(frozen=True)
class Reading:
    """How to read what was given; None leaves it to the input."""

    ranks_per_host: int | None = None
    """Names the hosts where neither run nor traces do."""
    limit_bytes: int | None = None
    """How far a compressed trace may expand (16 GiB), and how large a log may be (1 GiB)."""
    wall_ns: int | None = None
    """Kernel tables: wall time of the window."""
    iterations: int | None = None
    """Kernel tables: iterations in the window."""
    group: str | None = None
    """The process group whose communication is the ring's: name, description or ranks (``0,1,2,3``)."""
    window: str | None = None
    """Name of the ranges to look at, with ``*`` and ``?`` as wildcards; ``trace`` for the whole trace."""
    between: str | None = None
    """Two times from the start of the trace, such as ``10ms,20ms``; activities are cut at both."""
    rules: str | os.PathLike[str] | None = None
    """A file of rules of one's own, see `ringprof.analysis.kinds.user_rules`."""
    jobs: int | None = None
    """Processes for a run of many ranks; by default as many as there are CPUs."""
    scheduler: str | None = None
    """Address of a Dask scheduler whose workers read the traces."""
    notify: Notify | None = None
    """Told how far the reading of a run of many ranks is: what is done, how much, of how many."""

    def focus(self) -> Focus:
        """What part to look at. Reads the file of rules."""
        return Focus(
            window=self.window,
            between_ns=parse_between(self.between) if self.between else None,
            group=self.group,
            rules=_read_rules(self.rules) if self.rules else (),
        )


def _read_rules(path: str | os.PathLike[str]) -> tuple[Rule, ...]:
    from ringprof.analysis.kinds.user_rules import parse_rules

    try:
        return parse_rules(Path(path).read_text("utf-8"), os.fspath(path))
    except OSError as error:
        raise InputError(f"{os.fspath(path)}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InputError(f"{os.fspath(path)}: not UTF-8 text: write the rules as plain text") from None


def load(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], **how: Any) -> Analysis | TableAnalysis:
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
    if _are_many(source.paths, reading):
        many = TraceSet([_anywhere(name) for name in source.paths], [None] * len(source.paths), source.paths)
        return _load_stored(many, source, reading)
    traces = read_traces(source.paths, jobs=reading.jobs, limit_bytes=reading.limit_bytes)
    return Analysis(explain_traces(traces, None, reading.ranks_per_host, reading.focus()), source)


def load_bytes(data: bytes, name: str = "-", **how: Any) -> Analysis | TableAnalysis:
    """As `load`, for one trace or log that came through a pipe."""
    reading = Reading(**how)
    kind = detect_bytes(data, name)
    if kind == "run":
        raise InputError(f"{name}: a run names its traces relative to its own file: give the path of the run.json")
    if kind == "text":
        return _load_text(name, data, reading)
    trace = parse_trace(data, name, limit_bytes=reading.limit_bytes)
    return Analysis(explain_traces([trace], None, reading.ranks_per_host, reading.focus()), Input("trace", (name,)))


def _load_run(path: str, source: Input, reading: Reading) -> Analysis:
    run = read_run(path)
    if not run.traces:
        raise InputError(f"{path}: the run names no traces: record it again")
    folder = folder_of(path)
    shown = [within(folder, trace.path) for trace in run.traces]
    ranks = [trace.rank for trace in run.traces]
    paths = [_quickest(folder, trace) for trace in run.traces]
    if _are_many(paths, reading):
        return _load_stored(
            TraceSet([_anywhere(name) for name in paths], ranks, shown, run, _anywhere(path)), source, reading
        )
    path_of = dict(zip(ranks, shown, strict=True))
    read = read_traces(paths, jobs=reading.jobs, limit_bytes=reading.limit_bytes, ranks=ranks)
    traces = [replace(trace, path=path_of[trace.rank or 0]) for trace in read]
    return Analysis(explain_traces(traces, run, reading.ranks_per_host, reading.focus()), source)


def _quickest(folder: str, trace: RankTrace) -> str:
    """The reduced trace where there is one that this version reads and the trace is still the same; else the trace."""
    path = within(folder, trace.path)
    if trace.reduced and starts_with(within(folder, trace.reduced), MAGIC) and not _changed(path, trace.size_bytes):
        return within(folder, trace.reduced)
    return path


def _changed(path: str, size_bytes: int | None) -> bool:
    """Whether the trace is there and of another size. Elsewhere each look costs a request: no."""
    return size_bytes is not None and not is_url(path) and exists(path) and size_of(path) != size_bytes


def _anywhere(path: str) -> str:
    """As another process finds the file, wherever it was started."""
    return path if is_url(path) else os.path.abspath(path)


def _are_many(paths: Sequence[str], reading: Reading) -> bool:
    """Whether memory might not hold all traces at once, or others are to read them."""
    if any(starts_with(name, SQLITE_MAGIC) for name in paths):
        return False
    return bool(reading.scheduler) or len(paths) > MOST_IN_MEMORY or json_bytes(paths) > MOST_BYTES_IN_MEMORY


def _load_stored(given: TraceSet, source: Input, reading: Reading) -> Analysis:
    cluster = DaskCluster(reading.scheduler) if reading.scheduler else None
    try:
        found = explain_stored(
            given,
            reading.ranks_per_host,
            reading.focus(),
            workers=LocalProcesses(reading.jobs),
            readers=cluster,
            limit_bytes=reading.limit_bytes,
            notify=reading.notify,
        )
    finally:
        if cluster is not None:
            cluster.close()
    return Analysis(found, source)


def _load_text(name: str, data: bytes | None, reading: Reading) -> TableAnalysis:
    from ringprof.benchmark_logs.read import LIMIT_BYTES
    from ringprof.kernel_tables.analyse import analyse_table
    from ringprof.kernel_tables.read import read_tables

    raw = read_whole(name, reading.limit_bytes or LIMIT_BYTES) if data is None else data
    tables = read_tables(raw.decode("utf-8-sig", errors="replace"), name)
    return TableAnalysis(name, [analyse_table(table, reading.wall_ns, reading.iterations) for table in tables])


class SideBySide(Comparison):
    """What `compare` returns: a `Comparison` with a frame, plots, and a look in notebooks."""

    def frame(self) -> pd.DataFrame:
        """A row an entry: its label, its settings as text, its figures in their own units."""
        import pandas as pd

        rows = [
            {"label": entry.label, **entry.settings, **{name: one.value for name, one in entry.figures.items()}}
            for entry in self.entries
        ]
        return pd.DataFrame(rows).set_index("label")

    def plot(self, kind: str = "comparison", ax: Any = None) -> Any:
        """``comparison`` (a bar an entry) or ``scaling`` (a line a strategy over tokens), with matplotlib."""
        from ringprof.report import plots

        draw = {"comparison": plots.comparison, "scaling": plots.scaling}
        if kind not in draw:
            raise UsageError(f"plot {kind!r}: there are {', '.join(draw)}")
        return draw[kind](self, ax=ax)

    def _repr_html_(self) -> str:
        from ringprof.report.notebook import comparison_html

        return comparison_html(self)


def compare(*sources: str | os.PathLike[str] | Analysis | TableAnalysis) -> SideBySide:
    """Set runs, traces, printed tables and benchmark logs side by side, in any mix, against the first.

    A log stands for as many entries as it has rows. Raises `UsageError` for fewer than two entries, and what `load`
    raises.
    """
    from ringprof.analysis.findings import comparison
    from ringprof.analysis.findings.entries import labels_of

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
    found = comparison.compare(entries)
    return SideBySide(found.entries, found.differing, found.figures, found.differences)


def _entries_at(label: str, path: str | os.PathLike[str]) -> list[Entry]:
    from ringprof.analysis.findings.entries import entry_of_row
    from ringprof.benchmark_logs.read import read_log

    try:
        return _entries_of(label, load(path))
    except KernelTableError:
        rows = read_log(path).rows
        if not rows:
            raise
        return [entry_of_row(row) for row in rows if not row.missing]


def _entries_of(label: str, source: Analysis | TableAnalysis) -> list[Entry]:
    from ringprof.analysis.findings.entries import entry_of_run, entry_of_table

    if isinstance(source, Analysis):
        return [entry_of_run(label, source.findings)]
    several = len(source.reports) > 1
    return [
        entry_of_table(f"{label} table {index + 1}" if several else label, report)
        for index, report in enumerate(source.reports)
    ]


def capture(
    folder: str | os.PathLike[str],
    workload: Workload | None = None,
    *,
    name: str | None = None,
    group: Any = None,
    strategy: Any = None,
) -> AbstractContextManager[None]:
    """Profile a block of your own program on every rank that runs it; see `ringprof.record.capture.capture`.

    Every rank also reduces its own trace, so that reports of many ranks are quick. Raises `MissingExtraError` without
    torch.
    """
    from ringprof.record.resolve import need

    need("torch")
    from ringprof.record.capture import capture as profile
    from ringprof.trace.reduced import reduce_file

    return profile(folder, workload, name=name, group=group, strategy=strategy, reduce=reduce_file)
