"""The library's front door: load a run or traces, and ask where the time went."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ringprof import frames
from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.measurements import measurement_of_run
from ringprof.analysis.findings.metric import Measurement
from ringprof.analysis.findings.summary import Summary
from ringprof.analysis.transfers.clocks import Clocks
from ringprof.errors import InputError, KernelTableError, MissingExtraError, NoKernelTableError
from ringprof.files import exists, folder_of, is_url, read_whole, size_of, within
from ringprof.limits import MemoryBudget
from ringprof.log_lines import TEXT_SHARE
from ringprof.options import LoadOptions
from ringprof.report import as_json, terminal
from ringprof.report.page.document import Report
from ringprof.report.tables import Listing
from ringprof.report.text import TextStyle, shell_words
from ringprof.run import RankTrace, Run, read_run
from ringprof.scale.pipeline import explain_stored, explain_traces
from ringprof.scale.trace_set import Notify, TraceSet
from ringprof.scale.workers import LocalProcesses
from ringprof.trace.columns import Notice
from ringprof.trace.formats import REDUCED, format_at, is_newest_reduced, parse_bytes
from ringprof.trace.inputs import Input, detect, detect_bytes
from ringprof.trace.ranks import json_bytes, read_traces

if TYPE_CHECKING:
    import pandas as pd

    from ringprof.kernel_tables.table_analysis import TableAnalysis
    from ringprof.report.notebook import View
    from ringprof.report.plots import Plots

# What only some need is imported where they need it: a report of a small trace takes as long as its imports.

MOST_IN_MEMORY = 64
"""Ranks up to which all traces are held in memory."""
MOST_BYTES_IN_MEMORY = 8 << 30
"""Bytes of JSON, all traces together, up to which they are: as columns that is a thirtieth."""


MOST_PATHS_SHOWN = 3


class Analysis:
    """One run, or the traces of one, explained. Made by `load`."""

    def __init__(self, findings: Findings, source: Input) -> None:
        self.findings = findings
        """Steps, waterfall and verdict, as values."""
        self.given: tuple[str, ...] = source.paths
        """The paths that it was loaded from, as they were given."""
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
    def name(self) -> str:
        """The run's name, else that of the trace or of the folder that the traces are in."""
        paths = [Path(path) for path in self._source.paths]
        return self.run.name if self.run else (paths[0] if len(paths) == 1 else paths[0].resolve().parent).name

    @property
    def summary(self) -> Summary:
        """The run as a whole."""
        return self.findings.summary

    @property
    def verdict(self) -> list[str]:
        """What is missing, if anything; what communication cost, what the cost came from, what could be gained."""
        return list(self.findings.verdict)

    @property
    def ranks(self) -> list[int]:
        """The ranks that there are traces of, ascending."""
        return [rank.rank for rank in self.attribution.ranks]

    @property
    def warnings(self) -> list[Notice]:
        """What was odd in the input, and what could not be told and why."""
        return list(self.attribution.warnings)

    @frames.tells_columns
    def breakdown(self) -> pd.DataFrame:
        """Where each rank's time went: a row a rank."""
        return frames.frame_of(self.findings, "breakdown")

    @frames.tells_columns
    def iterations(self) -> pd.DataFrame:
        """Where each iteration's time went: a row a rank and iteration."""
        return frames.frame_of(self.findings, "iterations")

    @frames.tells_columns
    def hops(self) -> pd.DataFrame:
        """Every neighbour transfer: a row a hop, by rank and start."""
        return frames.frame_of(self.findings, "hops")

    @frames.tells_columns
    def steps(self) -> pd.DataFrame:
        """Every ring step: a row a rank and step; may be empty."""
        return frames.frame_of(self.findings, "steps")

    @frames.tells_columns
    def kernels(self) -> pd.DataFrame:
        """What ran, a row a kernel, copy or set by name and kind, longest first; empty on CPU."""
        return frames.frame_of(self.findings, "kernels")

    @frames.tells_columns
    def idle(self) -> pd.DataFrame:
        """Idle time by cause: a row per rank, cause, class and name, the longest of each rank first; empty on CPU."""
        return frames.frame_of(self.findings, "idle")

    @frames.tells_columns
    def annotations(self) -> pd.DataFrame:
        """The user's own ranges, a row a name; empty on CPU."""
        return frames.frame_of(self.findings, "annotations")

    @frames.tells_columns
    def waterfall(self) -> pd.DataFrame:
        """From the device's peak to the speed achieved: a row a part, which sum to the slowest rank's wall."""
        return frames.frame_of(self.findings, "waterfall")

    @frames.tells_columns
    def memory(self) -> pd.DataFrame:
        """What the allocators held over time; empty where the profiler was not told to ``profile_memory``."""
        return frames.frame_of(self.findings, "memory")

    def figures(self) -> dict[str, float]:
        """Every figure of the report by name, for conditions; see `ringprof.analysis.findings.conditions`."""
        (entry,) = self.entries(self.name)
        return entry.values()

    def entries(self, label: str) -> list[Measurement]:
        """The run as one side of a comparison."""
        return [measurement_of_run(label, self.findings)]

    def clocks(self) -> Clocks:
        """What was added to each rank's times to put all hosts on one clock, and how sure that is."""
        return self.attribution.clocks

    def hta(self) -> Any:
        """HolisticTraceAnalysis's ``TraceAnalysis`` of the same traces, for its deeper analyses.

        Raises `MissingExtraError` where it is not installed, `InputError` where it does not read these traces.
        """
        return trace_analysis({rank.rank: rank.path for rank in self.attribution.ranks})

    def report(self) -> Report:
        """The report of ``--format json``, schema ``ringprof.report/1``."""
        return as_json.as_dict(self.findings, source=self._source.type, paths=self._read())

    def _read(self) -> list[str]:
        return [self._source.run] if self._source.run else list(self._source.paths)

    def to_terminal(
        self, style: TextStyle | None = None, sections: Sequence[str] = (), listing: Listing | None = None
    ) -> str:
        """The report for people, as text; ``sections``: what to add of `ringprof.report.sections.OPTIONAL`."""
        return terminal.render(self.findings, style, sections, listing, self._path())

    def _path(self) -> str:
        """What was given, as a command takes it."""
        shown = [os.path.relpath(path) if os.path.isabs(path) and _is_below_here(path) else path for path in self.given]
        return shell_words(shown) if 0 < len(shown) <= MOST_PATHS_SHOWN else "PATH..."

    @cached_property
    def plot(self) -> Plots:
        """Plots with matplotlib: ``run.plot.timeline()`` and others, see `ringprof.report.plots.Plots`."""
        from ringprof.report.plots import Plots

        return Plots(self.findings)

    def to_html(self) -> str:
        """The report as one HTML page that needs nothing else. Raises `MissingExtraError` without Bokeh."""
        from ringprof.report.page import html
        from ringprof.report.page.pages import run_document

        return html.render(run_document(self.findings, self._read(), self.name))

    def view(self, *sections: str, height: int | None = None) -> View:
        """Sections of the page in a notebook's cell, to zoom and hover: ``run.view()``, ``run.view("steps", "hops")``.

        Without names timeline and waterfall; any section of the page by its name otherwise. ``height``: in pixels.
        Raises `UsageError` for a section that the run's page does not have, `MissingExtraError` without Bokeh.
        """
        from ringprof.report.notebook import View
        from ringprof.report.page.pages import part_document

        return View(part_document(self.findings, self._read(), self.name, sections), height)

    def __repr__(self) -> str:
        return f"<ringprof.Analysis of {self.name}, {len(self.ranks)} ranks>"

    def _repr_html_(self) -> str:
        """Header, verdict and breakdown, for notebooks."""
        from ringprof.report import notebook

        return notebook.findings_html(self.findings)


def load(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    window: str | None = None,
    between: str | None = None,
    group: str | None = None,
    rules: str | os.PathLike[str] | None = None,
    mixed_runs: bool = False,
    ranks_per_host: int | None = None,
    memory_bytes: int | None = None,
    limit_bytes: int | None = None,
    jobs: int | None = None,
    scheduler: str | None = None,
    notify: Notify | None = None,
) -> Analysis:
    """Load a ``run.json``, a run's folder, Kineto traces of one run, or a folder of them.

    - ``window``: name of the ranges to look at, with ``*`` and ``?`` as wildcards; ``trace`` for the whole trace.
    - ``between``: two times from the start of the trace, such as ``10ms,20ms``; activities are cut at both.
    - ``group``: the process groups whose communication is the ring's: names or descriptions with commas between, ``*``
      and ``?`` as wildcards, or a group's ranks (``0,1,2,3``); semicolons stand between several of these.
    - ``rules``: a file of rules of one's own for what kernels are, see `ringprof.analysis.kinds.user_rules`.
    - ``mixed_runs``: take traces together though they have no moment in common, as those of two runs.
    - ``ranks_per_host``: names the hosts where neither run nor traces do.
    - ``memory_bytes``: memory that one process may take to read and analyse (1 GiB).
    - ``limit_bytes``: how far a compressed trace may expand (16 GiB).
    - ``jobs``: processes for a run of many ranks; by default as many as there are CPUs.
    - ``scheduler``: address of a Dask scheduler whose workers read the traces.
    - ``notify``: told how far the reading of many ranks is: what is done, how much, of how many.

    Raises `InputError` where something cannot be read or is not of one run; `KernelTableError` for text, whose
    printed kernel tables `load_tables` reads.
    """
    loaded = load_any(paths, LoadOptions(
        window=window, between=between, group=group, rules=rules, mixed_runs=mixed_runs, ranks_per_host=ranks_per_host,
        memory_bytes=memory_bytes, limit_bytes=limit_bytes, jobs=jobs, scheduler=scheduler, notify=notify,
    ))  # fmt: skip
    if not isinstance(loaded, Analysis):
        raise KernelTableError(f"{loaded.name}: text with printed kernel tables: read it with ringprof.load_tables")
    return loaded


def load_any(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    reading: LoadOptions,
    *,
    wall_ns: int | None = None,
    iterations: int | None = None,
) -> Analysis | TableAnalysis:
    """What `load` or `load_tables` makes of it, whichever fits."""
    given = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    source = detect(given)
    if source.type == "text":
        return _load_text(
            read_whole(source.paths[0], reading.limits(), TEXT_SHARE), source.paths[0], wall_ns, iterations
        )
    analysis = _load_run(source.run, source, reading) if source.run else _load_traces(source, reading)
    analysis.given = tuple(given)
    return analysis


def parse_any(
    data: bytes, name: str, reading: LoadOptions, *, wall_ns: int | None = None, iterations: int | None = None
) -> Analysis | TableAnalysis:
    """As `load_any`, for one trace or log that came through a pipe."""
    kind = detect_bytes(data, name)
    if kind == "run":
        raise InputError(f"{name}: a run names its traces relative to its own file: give the path of the run.json")
    if kind == "text":
        return _load_text(data, name, wall_ns, iterations)
    trace = parse_bytes(data, name, MemoryBudget(reading.limits()))
    return Analysis(explain_traces([trace], None, reading.ranks_per_host, reading.focus()), Input("trace", (name,)))


def _load_text(data: bytes, name: str, wall_ns: int | None, iterations: int | None) -> TableAnalysis:
    from ringprof.benchmark_logs.read import has_rows  # both here, since few inputs are text
    from ringprof.kernel_tables.table_analysis import analyse_tables

    try:
        return analyse_tables(data, name, wall_ns, iterations)
    except NoKernelTableError:
        if has_rows(data):
            raise KernelTableError(f"{name}: benchmark rows but no kernel table: ringprof logs {name}") from None
        raise


def _load_traces(source: Input, reading: LoadOptions) -> Analysis:
    if _are_many(source.paths, reading):
        absolute = [_anywhere(name) for name in source.paths]
        many = TraceSet(
            absolute, [None] * len(absolute), source.paths, in_folder=source.in_folder, left_out=source.left_out
        )
        return _load_stored(many, source, reading)
    traces = read_traces(
        source.paths, jobs=reading.jobs, limits=reading.limits(), in_folder=source.in_folder, left_out=source.left_out
    )
    return Analysis(explain_traces(traces, None, reading.ranks_per_host, reading.focus()), source)


def _load_run(path: str, source: Input, reading: LoadOptions) -> Analysis:
    run = read_run(path, reading.limits())
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
    read = read_traces(paths, jobs=reading.jobs, limits=reading.limits(), ranks=ranks)
    traces = [msgspec.structs.replace(trace, path=path_of[trace.rank or 0]) for trace in read]
    return Analysis(explain_traces(traces, run, reading.ranks_per_host, reading.focus()), source)


def _quickest(folder: str, trace: RankTrace) -> str:
    """Choose the reduced trace where the trace is still the same, or is gone; else the trace.

    A reduced trace of an older version lacks what the trace tells of the host: it is read only where the trace is gone.
    """
    path = within(folder, trace.path)
    reduced = within(folder, trace.reduced) if trace.reduced else None
    if reduced and is_newest_reduced(reduced) and not _changed(path, trace.size_bytes):
        return reduced
    old = reduced and format_at(reduced) is REDUCED and not exists(path)
    return reduced if reduced and old else path


def _changed(path: str, size_bytes: int | None) -> bool:
    """Whether the trace is there and of another size. Elsewhere each look costs a request: no."""
    return size_bytes is not None and not is_url(path) and exists(path) and size_of(path) != size_bytes


def _is_below_here(path: str) -> bool:
    return os.path.abspath(path).startswith(os.path.join(os.getcwd(), ""))


def _anywhere(path: str) -> str:
    """As another process finds the file, wherever it was started."""
    return path if is_url(path) else os.path.abspath(path)


def _are_many(paths: Sequence[str], reading: LoadOptions) -> bool:
    """Whether memory might not hold all traces at once, or others are to read them."""
    if not all(format_at(name).one_rank for name in paths):
        return False
    return bool(reading.scheduler) or len(paths) > MOST_IN_MEMORY or json_bytes(paths) > MOST_BYTES_IN_MEMORY


def _load_stored(given: TraceSet, source: Input, reading: LoadOptions) -> Analysis:
    cluster = None
    if reading.scheduler:
        from ringprof.scale.dask_cluster import DaskCluster

        cluster = DaskCluster(reading.scheduler)
    try:
        found = explain_stored(
            given,
            reading.ranks_per_host,
            reading.focus(),
            workers=LocalProcesses(reading.jobs),
            readers=cluster,
            limits=reading.limits(),
            notify=reading.notify,
        )
    finally:
        if cluster is not None:
            cluster.close()
    return Analysis(found, source)


_READS = (".json", ".json.gz")


def trace_analysis(paths: Mapping[int, str]) -> Any:
    """A ``hta.trace_analysis.TraceAnalysis`` over the trace of each rank.

    Raises `MissingExtraError` where it cannot be imported, `InputError` where a trace is none that it reads.
    """
    for path in paths.values():
        if not path.lower().endswith(_READS) or not Path(path).is_file():
            raise InputError(f"{path}: HolisticTraceAnalysis reads Kineto files only ({', '.join(_READS)})")
    try:
        from hta.trace_analysis import TraceAnalysis
    except ImportError as error:
        raise MissingExtraError(
            f"HolisticTraceAnalysis cannot be imported ({error}): pip install 'ringprof[hta]' 'pandas<3'"
        ) from None
    # It joins each path to its folder, which leaves whole paths as they are.
    return TraceAnalysis(trace_files={rank: str(Path(path).resolve()) for rank, path in paths.items()}, trace_dir="/")
