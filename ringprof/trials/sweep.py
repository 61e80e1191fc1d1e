"""Resumable sweeps: recordings for several strategies, sequence lengths and kernels, one row each.

Every row is a run on disk. The sweep's file lists the finished rows and is written after each row, so an interrupted
sweep resumes where it stopped. A row that runs out of memory or fails holds the reason, and the sweep continues.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from ringprof.analysis.kinds.kinds import ATTENTION, COMMUNICATION
from ringprof.common.decoding import decode_file, refuse_deep
from ringprof.common.files import leading_out
from ringprof.common.json_object import JsonObject, Params
from ringprof.errors import InputError, UnsupportedWorkloadError, UsageError
from ringprof.iteration.resolve import kernel_class, load_strategy, resolve, typed_params
from ringprof.ranks.progress import Reporter
from ringprof.recording import RecordRequest
from ringprof.results.analysis import Analysis
from ringprof.results.load import load
from ringprof.run import read_run, slowest
from ringprof.strategies import find
from ringprof.trials.turns import record_request, refuse_launcher, save, take_turns
from ringprof.workload.workload import Workload

_SCHEMA = "ringprof.sweep/1"

WHERE = ("hops", "device", "world", "ranks_per_host")
"""Options that identify a measurement: if they differ, the row is recorded again."""
HOW = ("warmup", "iters", "verify")
"""Options that change only the precision of a measurement: an earlier row is kept, and the sweep reports them."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One recording of a sweep, and its outcome."""

    strategy: str
    params: Params
    """Parameters from the command line; the run holds all parameters, including defaults."""
    kernel: str
    """Kernel from the command line: ``auto`` or a name."""
    workload: Workload
    status: str
    """Outcome: ``ok``, ``oom``, ``unfit`` or ``failed``."""
    reason: str | None = None
    """Error message if the status is not ``ok``."""
    run: str | None = None
    """Folder of the run, relative to the sweep's file."""
    forward_ns: float | None = None
    """Time of the forward pass alone, from a separate recording: median over iterations of the slowest rank's time."""
    options: JsonObject = {}
    """Options `WHERE` and `HOW` of the recording; empty in sweeps written before this field existed."""

    def __post_init__(self) -> None:
        refuse_deep([self.params, self.options])

    @property
    def key(self) -> tuple[Any, ...]:
        """Values that identify the row in a sweep."""
        return self.strategy, self.params, self.kernel, self.workload, *(self.options.get(name) for name in WHERE)


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """All rows so far (schema ``ringprof.sweep/1``)."""

    schema: str = _SCHEMA
    rows: list[Row] = []


def sweep_requests(
    base: RecordRequest, strategies: Sequence[str], seqs: Sequence[int], kernels: Sequence[str],
    params: Mapping[str, str], documents: Mapping[int, tuple[int, ...]] | None = None,
) -> list[RecordRequest]:  # fmt: skip
    """Build a request for every combination. A parameter ``NAME.key`` goes to strategy NAME, ``key`` to all.

    ``documents`` maps a sequence length to the lengths of its packed documents; without an entry it is one document.
    Raises `UsageError` for a parameter of a strategy that is not in the sweep.
    """
    for name in params:
        owner, dot, _ = name.rpartition(".")
        if dot and owner not in strategies:
            raise UsageError(f"parameter {name!r} is of a strategy that is not swept: {', '.join(strategies)}")
    requests = []
    for strategy, kernel, seq in itertools.product(strategies, kernels, seqs):
        own = {
            key.rpartition(".")[2]: value for key, value in params.items() if key.rpartition(".")[0] in ("", strategy)
        }
        workload = replace(base.workload, seq=seq, documents=(documents or {}).get(seq))
        requests.append(replace(base, strategy=strategy, kernel=kernel, params=own, workload=workload))
    return requests


def run_sweep(
    requests: Sequence[RecordRequest], path: Path, reporter: Reporter
) -> Iterator[tuple[Row, Analysis | None]]:
    """Record the missing rows, and yield every row with its run as soon as it is available.

    Rows that an earlier sweep with the same ``path`` finished are not recorded again; failed rows are. Raises
    `UsageError` under a launcher, and errors that stop every recording: `Interrupted`, `MissingExtraError`.
    """
    refuse_launcher()
    for request in requests:
        # A name or an option that no recording accepts is refused before the sweep spends hours on others.
        try:
            typed_params(load_strategy(request.strategy), request.strategy, request.params)
        except UnsupportedWorkloadError as error:
            raise UsageError(str(error)) from None
        with suppress(UnsupportedWorkloadError):  # unsupported at this length or on this machine: the row reports it
            kernel_class(resolve(request, None))
    # Third-party strategies have no baselines: ringprof cannot leave out their computation or communication.
    requests = [replace(request, controls=request.controls and not is_peer(request.strategy)) for request in requests]
    folder = path.parent
    folder.mkdir(parents=True, exist_ok=True)
    sweep = read_sweep(path) if path.exists() else Sweep()
    for _, request in take_turns(requests, lambda number: True):
        row = _finished_row(sweep, request, folder)
        if row is None:
            row = _record_row(replace(request, output=str(folder / "run.json")), reporter)
            sweep.rows[:] = [*(old for old in sweep.rows if old.key != row.key), row]
            save(path, sweep)
        else:
            _report_other_options(row, request, path, reporter)
        yield row, analysis_of(row, folder)


def is_peer(strategy: str) -> bool:
    """Return whether a strategy is third-party code that ringprof calls unchanged."""
    return ".strategies.peers." in find(strategy).target


def _report_other_options(row: Row, request: RecordRequest, path: Path, reporter: Reporter) -> None:
    """Report that an earlier row is kept although it was recorded with other options `HOW`."""
    requested = _requested_row(request).options
    if not row.options:
        reporter.say(f"{row.strategy} {row.workload.seq}: taken from {path}; how it was recorded is not known")
        return
    others = [
        f"--{name.replace('_', '-')} {_shown(row.options.get(name))}, not {_shown(requested[name])}"
        for name in HOW
        if row.options.get(name) != requested[name]
    ]
    if others:
        text = f"{row.strategy} {row.workload.seq}: taken from {path}, recorded with {'; '.join(others)}"
        reporter.say(f"{text} (give another --output to record it again)")


def _shown(value: Any) -> str:
    return "as by default" if value is None else str(value).lower()


def read_sweep(path: str | os.PathLike[str]) -> Sweep:
    """Read the file of a sweep. Raises `InputError` if it is not one, or if a run lies outside its folder."""
    sweep = decode_file(os.fspath(path), Sweep, "a sweep of ringprof bench")
    if sweep.schema != _SCHEMA:
        raise InputError(f"{path}: schema {sweep.schema!r} is not {_SCHEMA!r}")
    runs = {f"{row.run}/run.json": row.run for row in sweep.rows if row.run is not None}
    for outside, _ in leading_out(os.fspath(path), runs):
        raise InputError(f"{path}: run {runs[outside]!r} is not inside the folder of the sweep")
    return sweep


def analysis_of(row: Row, folder: Path) -> Analysis | None:
    """Load the run of a row; None if it has none."""
    if row.run is None:
        return None
    return load(folder / row.run / "run.json")


def row_figures(row: Row, analysis: Analysis | None) -> JsonObject:
    """Compute the figures of one table row: times in ms, memory in MiB, shares 0..1; None for missing figures.

    All shares except ``of_kernel_rate`` are of the profiled iteration. ``forward_backward_ms`` was timed without the
    profiler: the median of ``iterations_ms``, the times of the slowest rank.
    """
    values: JsonObject = {
        "dtype": row.workload.dtype, "batch": row.workload.batch, "seq": row.workload.seq, "strategy": row.strategy,
        "params": " ".join(f"{key}={value}" for key, value in row.params.items()), "kernel": row.kernel,
        "mask": row.workload.mask_in_short(), "status": row.status, "reason": row.reason, "peer": is_peer(row.strategy),
        "forward_ms": None if row.forward_ns is None else row.forward_ns / 1e6,
    }  # fmt: skip
    if analysis is None or analysis.run is None:
        return values
    summary, rates, timings = analysis.summary, analysis.summary.rates, analysis.run.timings
    parts = {part.name: part for part in summary.parts}
    wall = parts["wall"].mean_ns
    times = {kind.kind: kind.time_ns for kind in summary.kinds}
    # Without baselines, the rate is divided by that of the run's attention kernels.
    of_kernel_rate = rates.tflops / rates.block_tflops if rates.tflops and rates.block_tflops else None
    of_kernel_rate = of_kernel_rate if rates.controls is None else rates.controls.of_solo
    return values | {
        "kernel": analysis.run.kernel,
        "forward_backward_ms": None if rates.slowest_median_ns is None else rates.slowest_median_ns / 1e6,
        "iterations_ms": [time / 1e6 for time in slowest(timings.iterations_ns)] if timings else [],
        "memory_mib": None if rates.peak_memory_bytes is None else rates.peak_memory_bytes / (1 << 20),
        "tflops": rates.tflops,
        "flash_share": sum(times.get(kind, 0.0) for kind in ATTENTION) / wall,
        "comm_share": sum(times.get(kind, 0.0) for kind in COMMUNICATION) / wall,
        "overlap_ratio": summary.overlap_ratio,
        "compute_share": parts["compute"].share,
        "exposed_comm_share": parts["exposed_comm"].share,
        "exposed_comm_ms": parts["exposed_comm"].mean_ns / max(1, summary.iterations) / 1e6,
        "of_kernel_rate": of_kernel_rate,
    }


def _requested_row(request: RecordRequest) -> Row:
    """Build the row that a successful recording of the request would have, without its run."""
    return Row(
        strategy=request.strategy, params=dict(request.params), kernel=request.kernel, workload=request.workload,
        status="ok", options={name: getattr(request, name) for name in (*WHERE, *HOW)},
    )  # fmt: skip


def _record_row(request: RecordRequest, reporter: Reporter) -> Row:
    """Record a forward pass alone, if the request has a backward pass, and then the request itself."""
    row = _requested_row(request)
    forward_ns = None
    try:
        if request.workload.backward:
            forward_only = replace(
                request, workload=replace(request.workload, backward=False), verify=False, controls=False
            )
            forward, status, reason = record_request(forward_only, reporter)
            if forward is None:
                return replace(row, status=status, reason=reason)
            forward_ns = forward.timings.median_ns() if forward.timings else None
        run, status, reason = record_request(request, reporter)
    except UsageError as error:
        return replace(row, status="unfit", reason=str(error))
    if run is None:
        return replace(row, status=status, reason=reason)
    return replace(row, run=run.name, forward_ns=forward_ns)


def _finished_row(sweep: Sweep, request: RecordRequest, folder: Path) -> Row | None:
    """Find the row of an earlier sweep for a request; None if there is none, it failed, or its run is gone."""
    wanted = _requested_row(request)
    for row in sweep.rows:
        known = row if row.options else replace(row, options=wanted.options)
        if known.key != wanted.key or row.status == "failed":
            continue
        if row.run is None or _satisfies(folder / row.run / "run.json", request):
            return row
    return None


def _satisfies(path: Path, request: RecordRequest) -> bool:
    """Return whether a run can be read and has the requested baselines."""
    try:
        return read_run(path).controls is not None or not request.controls
    except InputError:
        return False
