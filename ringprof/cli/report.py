"""``ringprof report``: where the time of a run or trace went."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

import click

from ringprof.analysis.findings.conditions import Condition, parse_condition
from ringprof.api import Analysis, load, load_bytes
from ringprof.cli.progress import many_ranks
from ringprof.cli.write import knows_only_ascii, print_or_write, write_text
from ringprof.errors import UsageError
from ringprof.files import read_within
from ringprof.limits import MEMORY_BYTES, Limits
from ringprof.report import as_json
from ringprof.report.terminal import Look
from ringprof.trace.columns import NOTES

if TYPE_CHECKING:
    from ringprof.kernel_tables.table_analysis import TableAnalysis

NARROWEST = 78
"""Below this a table would lose digits."""


@click.command(name="report")
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option("--format", "form", type=click.Choice(["terminal", "json"]), default="terminal", show_default=True)
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write to this file instead of the terminal.")
@click.option("--ranks-per-host", type=click.IntRange(min=1), help="Name the hosts where no trace does.")
@click.option("--width", type=click.IntRange(min=NARROWEST), help="Columns to use.  [default: the terminal's]")
@click.option(
    "--max-bytes",
    type=click.IntRange(min=1),
    help="How far a compressed trace may expand, or how large a log may be.  [default: 16 GiB]",
)
@click.option(
    "--max-memory", type=click.IntRange(min=1), help="Bytes of memory to read and analyse in.  [default: 1 GiB]"
)
@click.option(
    "--wall", type=click.FloatRange(min=0, min_open=True), help="Kernel table: wall time of the window in ms."
)
@click.option("--iters", type=click.IntRange(min=1), help="Kernel table: iterations in the window.")
@click.option("--group", help="Only this process group's communication: its name, description or ranks (0,1,2,3).")
@click.option("--window", help="Look at the ranges of this name (* and ? fit any text), or at the whole 'trace'.")
@click.option("--between", metavar="T1,T2", help="Look between two times from the trace's start, such as 10ms,20ms.")
@click.option("--rules", type=click.Path(dir_okay=False), help="File of your own rules for what kernels are.")
@click.option("--steps", is_flag=True, help="Also show every ring step: block, hops, what was exposed and why.")
@click.option("--hops", is_flag=True, help="Also show every hop: peers, bytes, wait, wire and rate.")
@click.option("--waterfall", is_flag=True, help="Also show every part from the device's peak to the speed achieved.")
@click.option("--fail-if", "conditions", multiple=True, metavar="CONDITION",
              help="Exit with 1 where it holds: 'exposed_comm > 5%', 'max(idle) > 1%'; repeatable.")  # fmt: skip
@click.option("--html", "page", type=click.Path(dir_okay=False), help="Also write the report as one HTML page.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes for many ranks.  [default: one a CPU]")
@click.option("--scheduler", metavar="ADDRESS", help="Have the workers of a Dask cluster read the traces (tcp://...).")
@click.option("--strict", is_flag=True, help="Exit with 2 where the report has warnings.")
def command(
    paths: tuple[str, ...],
    form: str,
    output: str | None,
    ranks_per_host: int | None,
    width: int | None,
    max_bytes: int | None,
    max_memory: int | None,
    wall: float | None,
    iters: int | None,
    group: str | None,
    window: str | None,
    between: str | None,
    rules: str | None,
    jobs: int | None,
    scheduler: str | None,
    conditions: tuple[str, ...],
    page: str | None,
    strict: bool,
    **sections: bool,
) -> int:
    """Show where the time of a run or trace went.

    PATH is a run.json, a run's folder, a Kineto trace (.json, .json.gz), a folder of them, several traces of one run,
    a log with printed kernel tables, or - for a trace or log from a pipe. It may be a URL that fsspec reads (s3://...).
    Without PATH: traces/run.json, the newest run.

    \b
    ringprof report traces/run.json
    ringprof report rank0.json.gz rank1.json.gz --format json
    ringprof report traces/run.json --fail-if 'exposed_comm > 5%'
    """
    parsed = [_condition(text) for text in conditions]
    wall_ns = round(wall * 1e6) if wall else None
    analysis = _load(
        paths,
        ranks_per_host=ranks_per_host,
        limit_bytes=max_bytes,
        memory_bytes=max_memory,
        wall_ns=wall_ns,
        iterations=iters,
        group=group,
        window=window,
        between=between,
        rules=rules,
        jobs=jobs,
        scheduler=scheduler,
    )
    if form == "json":
        text = as_json.render(analysis.report())
    else:
        text = analysis.to_terminal(_look(width, output), [name for name, shown in sections.items() if shown])
    print_or_write(text, output)
    if page:
        if not isinstance(analysis, Analysis):
            raise UsageError("--html: a printed table has no page yet: give a run or traces")
        write_text(page, analysis.to_html())
    return (_strictly(analysis) if strict else 0) or (_failed(parsed, analysis) if parsed else 0)


def _load(paths: tuple[str, ...], **how: Any) -> Analysis | TableAnalysis:
    if paths == ("-",):
        return load_bytes(read_within(sys.stdin.buffer, "-", Limits(how["memory_bytes"] or MEMORY_BYTES)), "-", **how)
    if "-" in paths:
        raise click.UsageError("- stands for one trace or log from a pipe and cannot go with other paths")
    with many_ranks() as notify:
        return load(paths or ("traces/run.json",), notify=notify, **how)


def _look(width: int | None, output: str | None) -> Look:
    """How to write: colour only to a terminal that wants it, ASCII where the output knows no more."""
    to_terminal = output is None and sys.stdout.isatty()
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    columns = width or max(NARROWEST, shutil.get_terminal_size((80, 24)).columns)
    return Look(width=columns, color=to_terminal and not plain, ascii_only=knows_only_ascii(output))


def _condition(text: str) -> Condition:
    condition = parse_condition(text)
    if condition.of_base:
        raise UsageError(f"--fail-if {text!r}: one report has no base: set two side by side with 'ringprof compare'")
    return condition


def _failed(conditions: list[Condition], analysis: Analysis | TableAnalysis) -> int:
    figures = analysis.figures()
    held = [condition for condition in conditions if condition.holds(figures, {})]
    for condition in held:
        click.echo(f"ringprof: {condition.figure} is {figures[condition.figure]:.6g}: {condition.text}", err=True)
    return 1 if held else 0


def _strictly(analysis: Analysis | TableAnalysis) -> int:
    serious = [warning for warning in analysis.warnings if warning.code not in NOTES]
    if not serious:
        return 0
    count, first = len(serious), serious[0]
    counted = "1 warning" if count == 1 else f"{count} warnings, the first"
    click.echo(f"ringprof: {counted}: {' '.join(first.message.split())} [{first.code}]", err=True)
    return 2
