"""``ringprof runs``: list the runs of a folder, one line each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from ringprof.cli.write import formats, print_or_write, say, text_style, to_file
from ringprof.common.json_object import JsonObject, rows_json
from ringprof.errors import InputError
from ringprof.report.tables import Column, Table
from ringprof.report.text import clean, csv_text, duration, rate
from ringprof.run import Run, read_run

_FIELDS = (
    "path", "created", "strategy", "seq", "world_size", "ranks_per_host", "kernel", "dtype", "iteration_ms", "tflops",
    "verified",
)  # fmt: skip
"""Fields in JSON and CSV; null or empty if a run does not have the value."""
_COLUMNS = (
    Column("run", folds=True), Column("recorded (UTC)", drop=3), Column("strategy"), Column("tokens", "count"),
    Column("ranks", "count"), Column("kernel", drop=4), Column("type", drop=2), Column("iteration", drop=1),
    Column("per device"), Column("verified", drop=5),
)  # fmt: skip


@click.command(name="runs")
@click.argument("folders", nargs=-1, type=click.Path(), metavar="[FOLDER]...")
@formats("json", "csv")
@to_file
def command(folders: tuple[str, ...], form: str, output: str | None) -> int:
    """List the runs in FOLDER (default: traces/), the newest first.

    \b
    ringprof runs
    ringprof runs traces/bench --format csv
    """
    runs = {str(path.parent): _read(path) for path in _run_files(folders or ("traces",))}
    if not runs:
        raise InputError(f"{' '.join(folders) or 'traces'}: no runs here (folders that hold a run.json)")
    rows = [_fields(path, run) for path, run in runs.items() if isinstance(run, Run)]
    rows.sort(key=lambda row: row["created"], reverse=True)
    if form == "json":
        text = rows_json("ringprof.runs/1", rows)
    elif form == "csv":
        text = csv_text(_FIELDS, ([row[name] for name in _FIELDS] for row in rows))
    else:
        text = Table("", _COLUMNS, [_cells(row) for row in rows]).text(text_style(output)) + "\n"
    print_or_write(text, output)
    for problem in runs.values():
        if isinstance(problem, InputError):
            say(f"ringprof: left out: {problem}")
    return 0


def _run_files(folders: Sequence[str]) -> Iterator[Path]:
    """Yield the ``run.json`` of each run in the folders; a folder may be a run itself."""
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder")
        # Next to the folders of runs, traces/run.json is a copy for the newest run, so it is skipped.
        yield from sorted(folder.glob("*/run.json")) or filter(Path.is_file, [folder / "run.json"])


def _read(path: Path) -> Run | InputError:
    try:
        return read_run(path)
    except InputError as error:
        return error


def _fields(path: str, run: Run) -> JsonObject:
    """Collect the values of one run by the names of `_FIELDS`."""
    time_ns = run.timings.median_ns() if run.timings else None
    work, size = run.workload, run.topology.world_size
    values = (
        path, run.created, run.strategy.name if run.strategy else None, work.seq if work else None, size,
        run.topology.ranks_per_host, run.kernel, work.dtype if work else None,
        time_ns / 1e6 if time_ns else None, run.tflops(time_ns),
        run.verification.passed if run.verification else None,
    )  # fmt: skip
    return dict(zip(_FIELDS, values, strict=True))


def _cells(row: JsonObject) -> list[Any]:
    """Format the cells of one run in the order of `_COLUMNS`."""
    time_ms, tflops = row["iteration_ms"], row["tflops"]
    return [
        clean(row["path"]), clean(row["created"][:16].replace("T", " ")), clean(row["strategy"] or "own program"),
        row["seq"], row["world_size"], clean(row["kernel"] or "-"), row["dtype"] or "-",
        "-" if time_ms is None else duration(time_ms * 1e6), "-" if tflops is None else rate(tflops),
        {True: "yes", False: "WRONG", None: "no"}[row["verified"]],
    ]  # fmt: skip
