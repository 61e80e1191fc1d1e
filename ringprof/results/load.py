"""Main entry of the library: `load` reads a run or traces and returns an `Analysis`."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ringprof.common.files import exists, folder_of, is_url, read_whole, size_of, within
from ringprof.common.limits import MemoryBudget
from ringprof.common.log_lines import TEXT_SHARE
from ringprof.errors import InputError, KernelTableError
from ringprof.printed.communication.read import find_comm_logs
from ringprof.results.options import LoadOptions
from ringprof.run import RankTrace, Run, read_run
from ringprof.scale.pipeline import explain_stored, explain_traces
from ringprof.scale.workers import LocalProcesses, Notify, TraceSet
from ringprof.trace.columns import Notice
from ringprof.trace.formats import REDUCED, format_at, parse_bytes
from ringprof.trace.inputs import Input, detect, detect_bytes
from ringprof.trace.ranks import checked_traces, json_bytes, read_traces

if TYPE_CHECKING:
    from ringprof.printed.benchmarks.logs import BenchmarkLogs
    from ringprof.printed.benchmarks.rows import LogSettings
    from ringprof.printed.tables.table_analysis import TableAnalysis
from ringprof.results.analysis import Analysis

MOST_IN_MEMORY = 64
"""Maximum number of ranks whose traces are all held in memory."""
MOST_BYTES_IN_MEMORY = 8 << 30
"""Maximum total bytes of JSON of traces that are all held in memory; as columns they take a thirtieth of that."""


def load(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    window: str | None = None,
    between: str | None = None,
    group: str | None = None,
    rules: str | os.PathLike[str] | None = None,
    machine: str | os.PathLike[str] | None = None,
    mixed_runs: bool = False,
    ranks_per_host: int | None = None,
    memory_bytes: int | None = None,
    limit_bytes: int | None = None,
    jobs: int | None = None,
    scheduler: str | None = None,
    notify: Notify | None = None,
) -> Analysis:
    """Load a ``run.json``, the folder of a run, Kineto traces of one run, or a folder of traces.

    - ``window``: name of the ranges to analyse, with ``*`` and ``?`` as wildcards; ``trace`` for the whole trace.
    - ``between``: two times from the start of the trace, such as ``10ms,20ms``; activities are cut at both.
    - ``group``: process groups whose communication to analyse: names or descriptions separated by commas, with ``*``
      and ``?`` as wildcards, or the ranks of a group (``0,1,2,3``). Semicolons separate several of these.
    - ``rules``: file of your own rules for the kinds of kernels, see `ringprof.analysis.kinds.user_rules`.
    - ``machine``: calibration of the device, to compare its kernels with the run's (default: the bundled one).
    - ``mixed_runs``: accept traces that do not overlap in time, such as those of two runs.
    - ``ranks_per_host``: ranks per host, used if neither the run nor the traces name the hosts.
    - ``memory_bytes``: maximum memory per process for reading and analysing, in bytes (default 1 GiB).
    - ``limit_bytes``: maximum size of a compressed trace after expansion, in bytes (default 16 GiB).
    - ``jobs``: number of processes for a run of many ranks (default: the number of CPUs).
    - ``scheduler``: address of a Dask scheduler whose workers read the traces.
    - ``notify``: callback for the progress of reading many ranks: phase, number done, total number.

    Raises `InputError` if something cannot be read or is not of one run. Raises `KernelTableError` for text; printed
    kernel tables are read by `load_tables`.
    """
    loaded = load_any(paths, LoadOptions(
        window=window, between=between, group=group, rules=rules, machine=machine, mixed_runs=mixed_runs,
        ranks_per_host=ranks_per_host, memory_bytes=memory_bytes, limit_bytes=limit_bytes, jobs=jobs,
        scheduler=scheduler, notify=notify,
    ))  # fmt: skip
    if not isinstance(loaded, Analysis):
        tables = hasattr(loaded, "reports")
        content, reader = ("printed kernel tables", "load_tables") if tables else ("rows of a benchmark", "logs")
        raise KernelTableError(f"{loaded.name}: text with {content}: read it with ringprof.{reader}")
    return loaded


def load_any(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    reading: LoadOptions,
    **printed: Any,
) -> Analysis | TableAnalysis | BenchmarkLogs:
    """Load runs, traces or text, depending on the input: `load`, `load_tables` or `ringprof.logs`.

    ``printed`` are arguments of `load_text`.
    """
    names = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    try:
        source = detect(names)
    except InputError:
        if find_comm_logs(names):
            text = "Flight Recorder dumps or NCCL Inspector files: read them with 'ringprof report'"
            raise InputError(f"{names[0]}: {text} or ringprof.load_comm_logs") from None
        raise
    if source.type == "text":
        return load_text(read_whole(source.paths[0], reading.limits(), TEXT_SHARE), source.paths[0], **printed)
    calibration = reading.calibration()
    analysis = _load_run(source.run, source, reading) if source.run else _load_traces(source, reading)
    analysis.findings = replace(analysis.findings, calibration=calibration)
    analysis.given = tuple(names)
    return analysis


def parse_any(
    data: bytes, name: str, reading: LoadOptions, **printed: Any
) -> Analysis | TableAnalysis | BenchmarkLogs:  # fmt: skip
    """Parse one trace or log that came through a pipe, as `load_any` does for paths."""
    kind = detect_bytes(data, name)
    if kind == "run":
        raise InputError(f"{name}: a run names its traces relative to its own file: give the path of the run.json")
    if kind == "text":
        return load_text(data, name, **printed)
    trace = parse_bytes(data, name, MemoryBudget(reading.limits()))
    traces = checked_traces([trace])
    return Analysis(explain_traces(traces, None, reading.ranks_per_host, reading.focus()), Input("trace", (name,)))


def load_text(
    data: bytes, name: str, *, wall_ns: int | None = None, iterations: int | None = None,
    settings: LogSettings | None = None, spread: float | None = None, rows: bool = False,
) -> TableAnalysis | BenchmarkLogs:  # fmt: skip
    """Read printed kernel tables or, in a text without them or with ``rows``, the rows of a benchmark.

    ``wall_ns`` and ``iterations`` are those of `load_tables`, ``settings`` and ``spread`` those of `ringprof.logs`.
    Raises `KernelTableError` for a text that holds neither.
    """
    from ringprof.printed.benchmarks.logs import BenchmarkLogs  # these are imported here, since few inputs are text
    from ringprof.printed.benchmarks.read import has_rows, parse_log
    from ringprof.printed.tables.table_analysis import analyse_tables

    if not rows:
        try:
            return analyse_tables(data, name, wall_ns, iterations)
        except KernelTableError:
            if not has_rows(data):
                raise
    return BenchmarkLogs([parse_log(data, name)], settings, spread)


def _load_traces(source: Input, reading: LoadOptions) -> Analysis:
    if _are_many(source.paths, reading):
        absolute = [_absolute(name) for name in source.paths]
        many = TraceSet(
            absolute, [None] * len(absolute), source.paths, in_folder=source.in_folder, left_out=source.left_out
        )
        return _load_stored(many, source, reading)
    traces = read_traces(
        source.paths, jobs=reading.jobs, limits=reading.limits(), in_folder=source.in_folder, left_out=source.left_out
    )
    return Analysis(explain_traces(traces, None, reading.ranks_per_host, reading.focus()), source)


def _load_run(path: str, source: Input, reading: LoadOptions) -> Analysis:
    """Load a recorded run with its traces or, for each rank, its reduced trace."""
    run = read_run(path, reading.limits())
    if not run.traces:
        raise InputError(f"{path}: the run names no traces: record it again")
    folder = folder_of(path)
    shown = [within(folder, trace.path) for trace in run.traces]
    ranks = [trace.rank for trace in run.traces]
    paths = [_quickest(folder, trace) for trace in run.traces]
    if _are_many(paths, reading):
        analysis = _load_stored(
            TraceSet([_absolute(name) for name in paths], ranks, shown, run, _absolute(path)), source, reading
        )
    else:
        path_of = dict(zip(ranks, shown, strict=True))
        read = read_traces(paths, jobs=reading.jobs, limits=reading.limits(), ranks=ranks)
        traces = [replace(trace, path=path_of[trace.rank or 0]) for trace in read]
        analysis = Analysis(explain_traces(traces, run, reading.ranks_per_host, reading.focus()), source)
    if newer := _newer_beside(path, run):
        notice = Notice("newer_run", f"{newer} is newer; a capture writes there if {folder_of(path)} is not empty")
        attribution = replace(analysis.attribution, warnings=(notice, *analysis.attribution.warnings))
        analysis.findings = replace(analysis.findings, attribution=attribution)
    return analysis


def _newer_beside(path: str, run: Run) -> Path | None:
    """Return the newest folder beside the run's, with its name and a number, whose run is newer; local ones only."""
    folder = Path(folder_of(path)).absolute()
    newest, when = None, run.created
    for file in () if is_url(path) else folder.parent.glob(f"{glob.escape(folder.name)}-*/run.json"):
        with suppress(InputError):
            is_numbered = re.fullmatch("-[0-9]{1,3}", file.parent.name[len(folder.name) :])
            if is_numbered and (created := read_run(file).created) > when:
                newest, when = Path(folder_of(path)).with_name(file.parent.name), created
    return newest


def _quickest(folder: str, trace: RankTrace) -> str:
    """Choose the reduced trace if the trace is unchanged or missing, else the trace."""
    path = within(folder, trace.path)
    reduced = within(folder, trace.reduced) if trace.reduced else None
    return reduced if reduced and format_at(reduced) is REDUCED and not _changed(path, trace.size_bytes) else path


def _changed(path: str, size_bytes: int | None) -> bool:
    """Return whether a local trace exists with another size. Remote traces are not checked: it costs a request each."""
    return size_bytes is not None and not is_url(path) and exists(path) and size_of(path) != size_bytes


def _absolute(path: str) -> str:
    """Return a path or URL that other processes can open from any current folder."""
    return path if is_url(path) else os.path.abspath(path)


def _are_many(paths: Sequence[str], reading: LoadOptions) -> bool:
    """Return whether the traces may not fit in memory together, or Dask workers are to read them."""
    if not all(format_at(name).one_rank for name in paths):
        return False
    return bool(reading.scheduler) or len(paths) > MOST_IN_MEMORY or json_bytes(paths) > MOST_BYTES_IN_MEMORY


def _load_stored(traces: TraceSet, source: Input, reading: LoadOptions) -> Analysis:
    """Load the traces of many ranks with several processes or Dask workers, and intermediate results on disk."""
    cluster = None
    if reading.scheduler:
        from ringprof.scale.dask_cluster import DaskCluster

        cluster = DaskCluster(reading.scheduler)
    try:
        findings = explain_stored(
            traces,
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
    return Analysis(findings, source)
