"""``ringprof report``: show where the time of a run or trace went."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import click

from ringprof.analysis.findings.metric import Measurement
from ringprof.cli.benchmark_logs import (
    LOG_SETTINGS,
    flag_implausible_rows,
    is_benchmark,
    log_settings,
    read_logs,
    settings_of,
)
from ringprof.cli.gate import gate, gated
from ringprof.cli.options import Advanced, Command, OneOf, options_set
from ringprof.cli.progress import show_progress
from ringprof.cli.reading import newest_or, reads_traces
from ringprof.cli.runs import list_runs, runs_csv, runs_frame, runs_text
from ringprof.cli.values import ListOf, Number, Whole
from ringprof.cli.write import (
    OutputFile,
    formats,
    print_or_write,
    say,
    text_style,
    to_file,
    with_width,
    write_text,
    written,
)
from ringprof.common.files import is_file, read_within, within
from ringprof.common.json_object import JsonObject, json_text
from ringprof.common.scratch import abandon, scratch_folder
from ringprof.errors import UsageError, nearest
from ringprof.printed.communication.read import find_comm_logs
from ringprof.report.sections import OPTIONAL
from ringprof.report.tables import Listing
from ringprof.report.text import shell_words
from ringprof.results.analysis import Analysis
from ringprof.results.frames import FRAMES, as_csv, require_pyarrow, write_parquet
from ringprof.results.load import load_any, parse_any
from ringprof.results.options import LoadOptions
from ringprof.trace.columns import NOTES
from ringprof.trace.inputs import detect

if TYPE_CHECKING:
    from ringprof.printed.benchmarks.logs import BenchmarkLogs
    from ringprof.printed.communication.comm_log_report import CommLogAnalysis
    from ringprof.printed.tables.table_analysis import TableAnalysis  # loaded only where there is a printed table

_Loaded: TypeAlias = "Analysis | TableAnalysis | BenchmarkLogs | CommLogAnalysis"
_SORTED = ", ".join(name for name, section in OPTIONAL.items() if section.columns)
"""Names of the sections whose rows can be sorted."""
_ROWS, _RUNS = "rows", "runs"
"""Tables of a benchmark log and of a folder of several runs, beside the frames of a run or traces."""
_TABLES = OneOf([*FRAMES, _ROWS, _RUNS])
_PAGE_STAYS_S = 3600.0
"""Least age in seconds of a temporary page that a later ``--open`` removes."""
_OF_TEXT = {"form", "output", "width", "strict", "memory_bytes", "limit_bytes"}
_USED_BY = {
    "TableAnalysis": ("a printed kernel table", {*_OF_TEXT, "conditions", "undecided", "wall", "iters"}),
    "CommLogAnalysis": ("communication logs", {*_OF_TEXT, "conditions", "undecided"}),
    "BenchmarkLogs": (
        "a benchmark log", {*_OF_TEXT, "frame", "parquet", "show", "machine", "settings", "spread"}
    ),
}  # fmt: skip
"""Name of an input other than a run or traces, and the options that its report has, by the class of its analysis."""
_OF_TEXT_ALONE = {"wall", "iters", "settings", "spread"}
_SECTIONS_HELP = "; ".join(
    f"{name} ({section.option.removeprefix('Also show ').removesuffix('.')})" for name, section in OPTIONAL.items()
)


@click.command(name="report", cls=Command)
@click.argument("paths", nargs=-1, type=click.Path(), metavar="[PATH]...")
@formats("json")
@click.option("--csv", "frame", metavar="TABLE", type=_TABLES, help="Write one table as CSV instead of the report.")
@click.option("--parquet", metavar="TABLE", type=_TABLES, help="Write one table as Parquet to -o.")
@to_file
@with_width
@click.option("--html", "page", type=OutputFile(), help="Also write the report as one HTML page.")
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser (without --html, a temporary file).")
@click.option("--show", metavar="SECTION,...", type=ListOf(OneOf([*OPTIONAL, _ROWS])),
              help=f"Also show sections: {_SECTIONS_HELP}; {_ROWS} (of a benchmark, in a log with kernel tables)."
              )  # fmt: skip
@click.option("--sort", metavar="COLUMN", default="", help=f"Sort {_SORTED} by this column, largest first.")
@click.option("--top", type=Whole(min=1), help="Maximum number of rows of each of these sections.")
@click.option("--all", "everything", is_flag=True, help="Show all rows of these sections, for every rank.")
@gated("'exposed_comm > 5%', 'max(idle) > 1%'")
@click.option("--strict", is_flag=True,
              help="Exit with code 2 if the report has warnings, or the audit of a benchmark log has errors."
              )  # fmt: skip
@reads_traces
@click.option("--wall", cls=Advanced, type=Number(min=0, min_open=True), metavar="MS",
              help="Kernel table: wall time of the window in ms.")  # fmt: skip
@click.option("--iters", cls=Advanced, type=Whole(min=1), help="Kernel table: iterations in the window.")
@click.option("--setting", "settings", cls=Advanced, multiple=True, metavar="KEY=VALUE",
              help=f"Benchmark log: setting that it does not state: {', '.join(LOG_SETTINGS)}; repeatable."
              )  # fmt: skip
@click.option("--spread", cls=Advanced, type=Number(min=0), default=10.0, show_default=True, metavar="PERCENT",
              help="Benchmark logs: largest difference of one configuration between logs that is not flagged."
              )  # fmt: skip
def command(
    paths: tuple[str, ...], reading: LoadOptions, conditions: tuple[str, ...], undecided: str, *, strict: bool,
    **options: Any,
) -> int:  # fmt: skip
    """Show where the time of a run or trace went.

    PATH is a run.json, the folder of a run, a Kineto trace (.json, .json.gz), a folder of traces, several traces of one
    run, or - for a trace or log from a pipe. A folder of several runs gets their list and the report of the newest one.
    A log with printed kernel tables gets a report of them; logs of benchmarks get one table of all rows, whose TFLOP/s
    are computed again; a folder of Flight Recorder dumps or of NCCL Inspector files gets a report of its communication.
    PATH may be a URL that fsspec supports (s3://...). The default is traces/run.json, the newest run.

    \b
    ringprof report traces/run.json
    ringprof report rank0.json.gz rank1.json.gz --format json
    ringprof report traces/run.json --fail-if 'exposed_comm > 5%'
    ringprof report results/*.txt --setting heads=40 --setting world=32 --csv rows
    """
    conditional = gate(conditions, undecided)
    if condition := next((condition for condition in conditional.conditions if condition.of_base), None):
        text = f"--fail-if {condition.text!r}: one report has no base: set two side by side with 'ringprof compare'"
        raise UsageError(text)
    options["show"] = options["show"] or []
    sections = [name for name in options["show"] if name != _ROWS]
    _refuse_unused_order(options, sections)
    if options["parquet"] and (options["frame"] or not options["output"]):
        raise UsageError("--parquet writes one table to a file: give --output FILE, and no --csv")
    if options["parquet"]:
        require_pyarrow()
    runs = list_runs(paths)
    if _RUNS in (options["frame"], options["parquet"]):
        _write_table(_RUNS, runs, options)
        return 0
    analysis = _load((runs[0]["path"],) if runs else paths, reading, options)
    _refuse_unused(analysis, options["show"])
    if options["frame"] or options["parquet"]:
        _write_table(options["frame"] or options["parquet"], analysis, options)
    else:
        print_or_write(_text(analysis, runs, sections, options), options["output"])
    if options["page"] or options["opens"]:
        assert isinstance(analysis, Analysis)
        _write_page(analysis, options["page"], opens=options["opens"])
    failed = False
    if conditional.conditions and isinstance(analysis, Analysis):
        failed = conditional.fails(analysis.entries(analysis.name)[0])
    elif conditional.conditions:
        figures = cast("TableAnalysis | CommLogAnalysis", analysis).figures()
        failed = conditional.fails(Measurement(analysis.name, "table", {}, others=figures))
    return (_strict_exit_code(analysis) if strict else 0) or (1 if failed else 0)


def _load(paths: Sequence[str], reading: LoadOptions, options: Mapping[str, Any]) -> _Loaded:
    """Load the paths, the newest run if there are none, or a pipe for ``-``. Raises `UsageError`, `InputError`."""
    settings = settings_of(options["settings"])
    text_options = {
        "wall_ns": round(options["wall"] * 1e6) if options["wall"] else None, "iterations": options["iters"],
        "settings": log_settings(settings), "spread": options["spread"] / 100,
        "rows": bool(settings) or _ROWS in (*options["show"], options["frame"], options["parquet"]),
    }  # fmt: skip
    if "-" in paths and len(paths) > 1:
        raise click.UsageError("- stands for one trace or log from a pipe and cannot go with other paths")
    if len(paths) > 1 and all(is_file(within(path, "run.json")) or path.endswith("run.json") for path in paths):
        raise UsageError(
            f"these are {len(paths)} runs: set them side by side with: ringprof compare {shell_words(paths)}"
        )
    loaded: _Loaded
    if paths == ("-",):
        loaded = parse_any(read_within(sys.stdin.buffer, "-", reading.limits()), "-", reading, **text_options)
    elif paths and (logs := find_comm_logs(paths)):
        from ringprof.printed.communication.comm_log_report import (
            analyse_comm_logs,  # imported here, since few inputs are logs
        )

        loaded = analyse_comm_logs(paths, logs, reading.limits())
    elif len(paths) > 1 and all(is_file(path) and detect([path]).type == "text" for path in paths):
        loaded = read_logs(paths, reading.limits(), text_options["settings"], text_options["spread"])
    else:
        with show_progress("reading") as notify:
            loaded = load_any(newest_or(paths), replace(reading, notify=notify), **text_options)
    if is_benchmark(loaded):
        flag_implausible_rows(loaded, reading.machine, settings)
    return loaded


def _refuse_unused(analysis: _Loaded, sections: Sequence[str]) -> None:
    """Raise `UsageError` for options that would change nothing in the report of this input."""
    name, used = _USED_BY.get(type(analysis).__name__, ("", None))
    unused = [
        shown for option, shown in options_set().items()
        if option not in ("paths", "show") and (option in _OF_TEXT_ALONE if used is None else option not in used)
    ]  # fmt: skip
    sections_of = {*OPTIONAL} if used is None else {_ROWS} if "show" in used else set()
    unused += [f"--show {section}" for section in sections if section not in sections_of]
    if unused:
        raise UsageError(f"{', '.join(unused)}: not for {name or 'a run or traces'}")


def _text(
    analysis: _Loaded, runs: Sequence[JsonObject] | None, sections: Sequence[str], options: Mapping[str, Any]
) -> str:
    if options["form"] == "json":
        return json_text(analysis.report() | ({"runs": runs} if runs else {}))
    style = text_style(options["output"], options["width"])
    if isinstance(analysis, Analysis):
        listing = Listing(options["sort"], options["top"], options["everything"])
        return (runs_text(runs, style) if runs else "") + analysis.to_terminal(style, sections, listing)
    return analysis.to_terminal(style)


def _write_table(name: str, source: Any, options: Mapping[str, Any]) -> None:
    """Write the table ``name`` of an analysis or of a list of runs as CSV or Parquet. Raises `UsageError`."""
    if name == _RUNS and source is None:
        raise UsageError(f"no table {_RUNS}: give a folder of several runs")
    if name != _RUNS and (name == _ROWS) is isinstance(source, Analysis):
        kind = "a run or traces" if name == _ROWS else "a benchmark log"
        raise UsageError(f"no table {name} of {kind}")
    if options["frame"] and name in (_ROWS, _RUNS):
        # Written without pandas, whose import takes longer than reading most logs.
        print_or_write(runs_csv(source) if name == _RUNS else source.to_csv(), options["output"])
        return
    frame = runs_frame(source) if name == _RUNS else source.frame() if name == _ROWS else getattr(source, name)()
    if frame.empty:
        say(f"ringprof: {name}: no rows, only column names: the traces hold nothing of the kind")
    if options["frame"]:
        print_or_write(as_csv(frame), options["output"])
        return
    with written(options["output"]) as temporary:
        write_parquet(frame, temporary)


def _write_page(analysis: Analysis, page: str | None, *, opens: bool) -> None:
    import webbrowser  # imported here, since few reports are opened

    folder = None if page else scratch_folder("page", _PAGE_STAYS_S)
    path = page or os.path.join(str(folder), "report.html")
    write_text(path, analysis.to_html())
    if folder is not None:
        abandon(folder)  # the browser reads the page after this process has ended
    if opens and not webbrowser.open(Path(path).resolve().as_uri()):
        say(f"ringprof: no browser is available here: open {path}")


def _refuse_unused_order(options: Mapping[str, Any], sections: Sequence[str]) -> None:
    """Raise `UsageError` if no shown section has the column of --sort, or rows for --top and --all."""
    columns = {column.name: None for section in sections for column in OPTIONAL[section].columns if column.name}
    name, top = options["sort"], options["top"]
    if not columns:
        for option, verb in ((f"--sort {name}" * bool(name), "orders"), (f"--top {top}" * bool(top), "limits"),
                             ("--all" * options["everything"], "completes")):  # fmt: skip
            if option:
                raise UsageError(f"{option}: {verb} {_SORTED}: add one of them with --show")
    if not name or name in columns:
        return
    raise UsageError(f"--sort {name}: no such column{nearest(name, columns)}; there are: {', '.join(columns)}")


def _strict_exit_code(analysis: _Loaded) -> int:
    """Return 2 for warnings other than notes, of which the first is printed, or for errors of an audit; else 0."""
    if is_benchmark(analysis):
        return 2 if any(flag.severity == "error" for flag in analysis.flags) else 0
    notices = cast("Analysis | TableAnalysis | CommLogAnalysis", analysis).warnings
    serious = [warning for warning in notices if warning.code not in NOTES]
    if not serious:
        return 0
    count, first = len(serious), serious[0]
    counted = "1 warning" if count == 1 else f"{count} warnings, the first"
    say(f"ringprof: {counted}: {first.message} [{first.code}]")
    return 2
