"""``ringprof compare``: compare runs, traces, kernel tables and benchmark logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import click

from ringprof.cli.gate import gate, gated
from ringprof.cli.options import Command
from ringprof.cli.progress import show_progress
from ringprof.cli.reading import reads_traces
from ringprof.cli.write import OutputFile, formats, print_or_write, text_style, to_file, write_text
from ringprof.report import comparison as shown
from ringprof.results.comparison import compare
from ringprof.results.options import LoadOptions

_FORMATS = {"json": shown.render_json, "csv": shown.render_csv, "markdown": shown.render_markdown}


@click.command(name="compare", cls=Command)
@click.argument("paths", nargs=-1, type=click.Path(), required=True, metavar="BASE OTHER...")
@formats(*_FORMATS)
@to_file
@click.option("--html", "page", type=OutputFile(), help="Also write the comparison as one HTML page.")
@click.option("--same-work", is_flag=True,
              help="Assume that all did the same work: compare times and memory, too.")  # fmt: skip
@gated("'tflops < 0.95 * base'")
@reads_traces
def command(
    paths: tuple[str, ...], reading: LoadOptions, form: str, output: str | None, page: str | None,
    conditions: tuple[str, ...], undecided: str, *, same_work: bool,
) -> int:  # fmt: skip
    """Compare runs, traces, printed kernel tables and benchmark logs, in any mix, with the first.

    Differences in settings and hardware come first. A difference that the repeated timings do not prove is called
    noise. Times and memory are compared only if the work is the same: if both sides state the same workload, or if the
    traces show equal computation calls and bytes. The word vs separates several recordings of one run from those of
    another.

    \b
    ringprof compare traces/a traces/b
    ringprof compare traces/main-1 traces/main-2 traces/main-3 vs traces/branch-*
    ringprof compare traces/main traces/branch --fail-if 'tflops < 0.95 * base'
    """
    conditional = gate(conditions, undecided)
    with show_progress("reading") as notify:
        comparison = compare(*_sides(paths), reading=replace(reading, notify=notify), same_work=same_work)
    text = _FORMATS[form](comparison) if form in _FORMATS else comparison.to_terminal(text_style(output))
    print_or_write(text, output)
    if page:
        write_text(page, comparison.to_html())
    failed = 0
    for index, entry in enumerate(comparison.entries[1:], 1):
        differences = [difference for difference in comparison.differences if difference.entry == index]
        failed |= conditional.fails(entry, comparison.entries[0], differences)
    return int(failed)


def _sides(paths: Sequence[str]) -> list[str | list[str]]:
    """Group the paths between the words ``vs``; without the word, each path is a side of its own."""
    if "vs" not in paths:
        return [*paths]
    return [list(side) for is_vs, side in groupby(paths, lambda path: path == "vs") if not is_vs]
