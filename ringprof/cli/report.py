"""``ringprof report``: where the time of a run or trace went."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click

from ringprof.analysis.findings.conditions import Condition, parse_condition
from ringprof.api import Analysis, load_any, parse_any
from ringprof.cli.progress import loading_progress
from ringprof.cli.reading import NEWEST, reads_traces
from ringprof.cli.write import NARROWEST, emit, text_style, write_text
from ringprof.errors import UsageError
from ringprof.files import read_within
from ringprof.options import LoadOptions
from ringprof.report import as_json
from ringprof.report.sections import OPTIONAL
from ringprof.trace.columns import NOTES, Caveat

PIPE_LIMIT = 4 << 30


def _sections(function: Callable[..., Any]) -> Callable[..., Any]:
    for name, section in reversed(OPTIONAL.items()):
        function = click.option(f"--{name}", is_flag=True, help=section.option)(function)
    return function


@click.command(name="report")
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option("--format", "form", type=click.Choice(["terminal", "json"]), default="terminal", show_default=True)
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write to this file instead of the terminal.")
@click.option("--width", type=click.IntRange(min=NARROWEST), help="Columns to use.  [default: the terminal's]")
@click.option("--html", "page", type=click.Path(dir_okay=False), help="Also write the report as one HTML page.")
@_sections
@click.option("--fail-if", "conditions", multiple=True, metavar="CONDITION",
              help="Exit with 1 where it holds: 'exposed_comm > 5%', 'max(idle) > 1%'; repeatable.")  # fmt: skip
@click.option("--strict", is_flag=True, help="Exit with 2 where the report has warnings.")
@reads_traces
@click.option(
    "--wall", type=click.FloatRange(min=0, min_open=True), help="Kernel table: wall time of the window in ms."
)
@click.option("--iters", type=click.IntRange(min=1), help="Kernel table: iterations in the window.")
def command(
    paths: tuple[str, ...],
    reading: LoadOptions,
    wall: float | None,
    iters: int | None,
    form: str,
    output: str | None,
    width: int | None,
    page: str | None,
    conditions: tuple[str, ...],
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
    of_table = {"wall_ns": round(wall * 1e6) if wall else None, "iterations": iters}
    if paths == ("-",):
        piped = read_within(sys.stdin.buffer, reading.limit_bytes or PIPE_LIMIT, "-")
        analysis = parse_any(piped, "-", reading, **of_table)
    elif "-" in paths:
        raise click.UsageError("- stands for one trace or log from a pipe and cannot go with other paths")
    else:
        with loading_progress() as notify:
            analysis = load_any(paths or [NEWEST], replace(reading, notify=notify), **of_table)
    if form == "json":
        text = as_json.render(analysis.report())
    elif isinstance(analysis, Analysis):
        text = analysis.to_terminal(text_style(output, width), [name for name, shown in sections.items() if shown])
    else:
        text = analysis.to_terminal(text_style(output, width))
    emit(text, output)
    if page:
        if not isinstance(analysis, Analysis):
            raise UsageError("--html: a printed table has no page yet: give a run or traces")
        write_text(page, analysis.to_html())
    return (_strictly(analysis.warnings) if strict else 0) or (_failed(parsed, analysis.figures()) if parsed else 0)


def _condition(text: str) -> Condition:
    condition = parse_condition(text)
    if condition.of_base:
        raise UsageError(f"--fail-if {text!r}: one report has no base: set two side by side with 'ringprof compare'")
    return condition


def _failed(conditions: list[Condition], figures: dict[str, float]) -> int:
    held = [condition for condition in conditions if condition.holds(figures, {})]
    for condition in held:
        click.echo(f"ringprof: {condition.figure} is {figures[condition.figure]:.6g}: {condition.text}", err=True)
    return 1 if held else 0


def _strictly(warnings: list[Caveat]) -> int:
    serious = [warning for warning in warnings if warning.code not in NOTES]
    if not serious:
        return 0
    count, first = len(serious), serious[0]
    counted = "1 warning" if count == 1 else f"{count} warnings, the first"
    click.echo(f"ringprof: {counted}: {' '.join(first.message.split())} [{first.code}]", err=True)
    return 2
