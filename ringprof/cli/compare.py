"""``ringprof compare``: runs, traces, tables and logs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import click

from ringprof.cli.gate import gate, gated
from ringprof.cli.reading import reads_traces
from ringprof.cli.write import formats, print_or_write, text_style, to_file, write_text
from ringprof.comparison import compare
from ringprof.options import LoadOptions
from ringprof.report import comparison as shown

_FORMATS = {"json": shown.render_json, "csv": shown.render_csv, "markdown": shown.render_markdown}


@click.command(name="compare")
@click.argument("paths", nargs=-1, type=click.Path(), required=True, metavar="BASE OTHER...")
@formats(*_FORMATS)
@to_file
@click.option("--html", "page", type=click.Path(dir_okay=False), help="Also write the comparison as one HTML page.")
@click.option("--same-work", is_flag=True,
              help="Compare times and memory, too: you know that all did the same work.")  # fmt: skip
@gated("'tflops < 0.95 * base'")
@reads_traces
def command(
    paths: tuple[str, ...],
    reading: LoadOptions,
    form: str,
    output: str | None,
    page: str | None,
    conditions: tuple[str, ...],
    undecided: str,
    *,
    same_work: bool,
) -> int:
    """Set runs, traces, printed tables and benchmark logs side by side, in any mix, against the first.

    What differs in settings and hardware comes first. A difference that the repeated timings do not prove is called
    noise. Times and memory are compared only where the work is the same: where both sides state the same workload, or
    where the traces show equal computation calls and bytes. With the word vs between them, what stands on each side is
    several recordings of one run.

    \b
    ringprof compare traces/a traces/b
    ringprof compare traces/main-1 traces/main-2 traces/main-3 vs traces/branch-*
    ringprof compare traces/main traces/branch --fail-if 'tflops < 0.95 * base'
    """
    conditional = gate(conditions, undecided)
    found = compare(*_sides(paths), reading=reading, same_work=same_work)
    print_or_write(_FORMATS[form](found) if form in _FORMATS else found.to_terminal(text_style(output)), output)
    if page:
        write_text(page, found.to_html())
    failed = [
        conditional.fails(entry, found.entries[0], [one for one in found.differences if one.entry == index])
        for index, entry in enumerate(found.entries)
        if index
    ]
    return 1 if any(failed) else 0


def _sides(paths: Sequence[str]) -> list[str | list[str]]:
    """The paths one by one or, with ``vs`` among them, what it separates."""
    if "vs" not in paths:
        return [*paths]
    return [list(side) for is_vs, side in groupby(paths, lambda path: path == "vs") if not is_vs]
