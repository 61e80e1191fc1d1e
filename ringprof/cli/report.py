"""``ringprof report``: show where the time of a run or trace went."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from ringprof.analysis.findings.metric import Measurement
from ringprof.cli.gate import gate, gated
from ringprof.cli.options import Advanced, Command, OneOf, all_of
from ringprof.cli.progress import show_progress
from ringprof.cli.reading import newest_or, reads_traces
from ringprof.cli.values import Number
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
from ringprof.common.json_object import json_text
from ringprof.common.scratch import abandon, scratch_folder
from ringprof.errors import UsageError, nearest
from ringprof.printed.communication.detect import find_comm_logs
from ringprof.report.sections import OPTIONAL
from ringprof.report.tables import Listing
from ringprof.report.text import shell_words
from ringprof.results.analysis import Analysis
from ringprof.results.frames import FRAMES, as_csv, require_pyarrow, write_parquet
from ringprof.results.load import load_any, parse_any
from ringprof.results.options import LoadOptions
from ringprof.trace.columns import NOTES, Notice

if TYPE_CHECKING:
    import pandas as pd

    from ringprof.printed.communication.comm_log_report import CommLogAnalysis
    from ringprof.printed.tables.table_analysis import TableAnalysis  # loaded only where there is a printed table

_Loaded: TypeAlias = "Analysis | TableAnalysis | CommLogAnalysis"
*_MOST, _LAST = (f"--{name}" for name, section in OPTIONAL.items() if section.columns)
_SORTED = f"{', '.join(_MOST)} and {_LAST}"
"""Options of the sections whose rows can be sorted."""
_NO_PAGE = "--html, --open, --csv and --parquet: {} no page and no frames: give a run or traces"
_PAGE_STAYS_S = 3600.0
"""Least age in seconds of a temporary page that a later ``--open`` removes."""


@click.command(name="report", cls=Command)
@click.argument("paths", nargs=-1, type=click.Path(), metavar="[PATH]...")
@formats("json")
@click.option("--csv", "frame", type=OneOf([*FRAMES]), help="Write one table as CSV instead of the report.")
@click.option("--parquet", metavar="TABLE", type=OneOf([*FRAMES]), help="Write one table as Parquet to -o.")
@to_file
@with_width
@click.option("--html", "page", type=OutputFile(), help="Also write the report as one HTML page.")
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser (without --html, a temporary file).")
@all_of(*(click.option(f"--{name}", is_flag=True, help=section.option) for name, section in OPTIONAL.items()))
@click.option("--sort", metavar="COLUMN", default="", help=f"Sort {_SORTED} by this column, largest first.")
@click.option("--top", type=click.IntRange(min=1), help="Maximum number of rows of each of these sections.")
@click.option("--all", "everything", is_flag=True, help="Show all rows of these sections, for every rank.")
@gated("'exposed_comm > 5%', 'max(idle) > 1%'")
@click.option("--strict", is_flag=True, help="Exit with code 2 if the report has warnings.")
@reads_traces
@click.option("--wall", cls=Advanced, type=Number(min=0, min_open=True), metavar="MS",
              help="Kernel table: wall time of the window in ms.")  # fmt: skip
@click.option("--iters", cls=Advanced, type=click.IntRange(min=1), help="Kernel table: iterations in the window.")
def command(
    paths: tuple[str, ...], reading: LoadOptions, conditions: tuple[str, ...], undecided: str, *, strict: bool,
    **options: Any,
) -> int:  # fmt: skip
    """Show where the time of a run or trace went.

    PATH is a run.json, the folder of a run, a Kineto trace (.json, .json.gz), a folder of traces, several traces of one
    run, a log with printed kernel tables, or - for a trace or log from a pipe. A folder of Flight Recorder dumps or of
    NCCL Inspector files gets a report of its communication. PATH may be a URL that fsspec supports (s3://...). The
    default is traces/run.json, the newest run.

    \b
    ringprof report traces/run.json
    ringprof report rank0.json.gz rank1.json.gz --format json
    ringprof report traces/run.json --fail-if 'exposed_comm > 5%'
    """
    conditional = gate(conditions, undecided)
    if condition := next((condition for condition in conditional.conditions if condition.of_base), None):
        text = f"--fail-if {condition.text!r}: one report has no base: set two side by side with 'ringprof compare'"
        raise UsageError(text)
    sections = [name for name, value in options.items() if name in OPTIONAL and value]
    _refuse_unused_order(options, sections)
    if options["parquet"] and (options["frame"] or not options["output"]):
        raise UsageError("--parquet writes one table to a file: give --output FILE, and no --csv")
    if options["parquet"]:
        require_pyarrow()
    analysis = _load(paths, reading, options)
    if options["parquet"]:
        frame = _frame(analysis, options["parquet"])
        with written(options["output"]) as temporary:
            write_parquet(frame, temporary)
    else:
        print_or_write(_text(analysis, sections, options), options["output"])
    if options["page"] or options["opens"]:
        _write_page(_refuse_table(analysis), options["page"], opens=options["opens"])
    failed = False
    if conditional.conditions and isinstance(analysis, Analysis):
        failed = conditional.fails(analysis.entries(analysis.name)[0])
    elif conditional.conditions:
        failed = conditional.fails(Measurement(analysis.name, "table", {}, others=analysis.figures()))
    return (_strict_exit_code(analysis.warnings) if strict else 0) or (1 if failed else 0)


def _load(paths: Sequence[str], reading: LoadOptions, options: Mapping[str, Any]) -> _Loaded:
    """Load the paths, the newest run if there are none, or a pipe for ``-``. Raises `UsageError`, `InputError`."""
    wall_ns = round(options["wall"] * 1e6) if options["wall"] else None
    table_options = {"wall_ns": wall_ns, "iterations": options["iters"]}
    if paths == ("-",):
        piped = read_within(sys.stdin.buffer, "-", reading.limits())
        return parse_any(piped, "-", reading, **table_options)
    if "-" in paths:
        raise click.UsageError("- stands for one trace or log from a pipe and cannot go with other paths")
    if len(paths) > 1 and all(is_file(within(path, "run.json")) or path.endswith("run.json") for path in paths):
        raise UsageError(
            f"these are {len(paths)} runs: set them side by side with: ringprof compare {shell_words(paths)}"
        )
    if paths and (logs := find_comm_logs(paths)):
        from ringprof.printed.communication.comm_log_report import (
            analyse_comm_logs,  # imported here, since few inputs are logs
        )

        _refuse_for_comm_logs(reading, options)
        return analyse_comm_logs(paths, logs, reading.limits())
    with show_progress("reading") as notify:
        return load_any(newest_or(paths), replace(reading, notify=notify), **table_options)


def _refuse_for_comm_logs(reading: LoadOptions, options: Mapping[str, Any]) -> None:
    """Raise `UsageError` for options that would change nothing in a report of communication logs."""
    limiting = {"window": reading.window, "between": reading.between, "group": reading.group, "rules": reading.rules,
                "ranks-per-node": reading.ranks_per_host}  # fmt: skip
    unused = [
        f"--{name}" for name, value in {**limiting, **{name: options[name] for name in OPTIONAL}}.items() if value
    ]
    if unused:
        raise UsageError(f"{', '.join(unused)}: for traces only; communication logs have one report of all operations")
    if options["page"] or options["opens"]:
        raise UsageError(_NO_PAGE.format("communication logs have"))


def _text(analysis: _Loaded, sections: Sequence[str], options: Mapping[str, Any]) -> str:
    if options["frame"]:
        return as_csv(_frame(analysis, options["frame"]))
    if options["form"] == "json":
        return json_text(analysis.report())
    style = text_style(options["output"], options["width"])
    if isinstance(analysis, Analysis):
        return analysis.to_terminal(style, sections, Listing(options["sort"], options["top"], options["everything"]))
    return analysis.to_terminal(style)


def _frame(analysis: _Loaded, name: str) -> pd.DataFrame:
    frame: pd.DataFrame = getattr(_refuse_table(analysis), name)()
    if frame.empty:
        say(f"ringprof: {name}: no rows, only column names: the traces hold nothing of the kind")
    return frame


def _refuse_table(analysis: _Loaded) -> Analysis:
    """Return the analysis. Raises `UsageError` for printed kernel tables and communication logs, which have no page."""
    if not isinstance(analysis, Analysis):
        raise UsageError(
            _NO_PAGE.format("a printed table has" if hasattr(analysis, "reports") else "communication logs have")
        )
    return analysis


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
                raise UsageError(f"{option}: {verb} {_SORTED}: ask for one of them")
    if not name or name in columns:
        return
    raise UsageError(f"--sort {name}: no such column{nearest(name, columns)}; there are: {', '.join(columns)}")


def _strict_exit_code(warnings: list[Notice]) -> int:
    """Return 2 and print the first warning if there are warnings other than notes, else 0."""
    serious = [warning for warning in warnings if warning.code not in NOTES]
    if not serious:
        return 0
    count, first = len(serious), serious[0]
    counted = "1 warning" if count == 1 else f"{count} warnings, the first"
    say(f"ringprof: {counted}: {first.message} [{first.code}]")
    return 2
