"""``ringprof report``: where the time of a run or trace went."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import click

from ringprof.api import Analysis, TableAnalysis, load, load_bytes
from ringprof.errors import InputError
from ringprof.report import as_json
from ringprof.report.terminal import Look

NARROWEST = 78
"""Below this a table would lose digits."""


@click.command(name="report")
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option("--format", "form", type=click.Choice(["terminal", "json"]), default="terminal", show_default=True)
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write to this file instead of the terminal.")
@click.option("--ranks-per-host", type=click.IntRange(min=1), help="Name the hosts where no trace does.")
@click.option("--width", type=click.IntRange(min=NARROWEST), help="Columns to use.  [default: the terminal's]")
@click.option(
    "--max-bytes", type=click.IntRange(min=1), help="How far a compressed trace may expand.  [default: 16 GiB]"
)
@click.option(
    "--wall", type=click.FloatRange(min=0, min_open=True), help="Kernel table: wall time of the window in ms."
)
@click.option("--iters", type=click.IntRange(min=1), help="Kernel table: iterations in the window.")
@click.option("--strict", is_flag=True, help="Exit with 2 where the report has warnings.")
def command(
    paths: tuple[str, ...],
    form: str,
    output: str | None,
    ranks_per_host: int | None,
    width: int | None,
    max_bytes: int | None,
    wall: float | None,
    iters: int | None,
    strict: bool,
) -> int:
    """Show where the time of a run or trace went.

    PATH is a run.json, a run's folder, a Kineto trace (.json, .json.gz), a folder of them, several traces of one run,
    a log with printed kernel tables, or - for a trace or log from a pipe.
    Without PATH: traces/run.json, the newest run.

    \b
    ringprof report traces/run.json
    ringprof report rank0.json.gz rank1.json.gz --format json
    """
    wall_ns = round(wall * 1e6) if wall else None
    analysis = _load(paths, ranks_per_host=ranks_per_host, limit_bytes=max_bytes, wall_ns=wall_ns, iterations=iters)
    if form == "json":
        text = as_json.render(analysis.report())
    else:
        text = analysis.to_terminal(_look(width, output))
    if output:
        _write(Path(output), text)
    else:
        click.echo(text, nl=False)
    return _strictly(analysis) if strict else 0


def _load(paths: tuple[str, ...], **how: int | None) -> Analysis | TableAnalysis:
    if paths == ("-",):
        return load_bytes(sys.stdin.buffer.read(), "-", **how)
    if "-" in paths:
        raise click.UsageError("- stands for one trace or log from a pipe and cannot go with other paths")
    return load(paths or ("traces/run.json",), **how)


def _look(width: int | None, output: str | None) -> Look:
    """How to write: colour only to a terminal that wants it, ASCII where the output knows no more."""
    to_terminal = output is None and sys.stdout.isatty()
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    columns = width or max(NARROWEST, shutil.get_terminal_size((80, 24)).columns)
    encoding = "utf-8" if output else (sys.stdout.encoding or "ascii")
    try:
        "█▏·µ…".encode(encoding)
        ascii_only = False
    except (UnicodeEncodeError, LookupError):
        ascii_only = True
    return Look(width=columns, color=to_terminal and not plain, ascii_only=ascii_only)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None
    click.echo(f"Wrote {path}", err=True)


def _strictly(analysis: Analysis | TableAnalysis) -> int:
    if not analysis.warnings:
        return 0
    count = len(analysis.warnings)
    first = analysis.warnings[0]
    click.echo(f"ringprof: {count} warnings, the first: {' '.join(first.message.split())} [{first.code}]", err=True)
    return 2
