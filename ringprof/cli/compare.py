"""``ringprof compare``: runs, traces, tables and logs side by side."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ringprof.analysis.findings.comparison import Comparison
from ringprof.analysis.findings.conditions import Condition, parse_condition
from ringprof.analysis.findings.entries import flat
from ringprof.cli.reading import reads_traces
from ringprof.cli.write import print_or_write, text_style, write_text
from ringprof.options import LoadOptions
from ringprof.report import comparison as shown
from ringprof.side_by_side import compare


@click.command(name="compare")
@click.argument("paths", nargs=-1, type=click.Path(), required=True, metavar="BASE OTHER...")
@click.option("--format", "form", type=click.Choice(["terminal", "json", "csv"]), default="terminal", show_default=True)
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write to this file instead of the terminal.")
@click.option("--html", "page", type=click.Path(dir_okay=False), help="Also write the comparison as one HTML page.")
@click.option("--fail-if", "conditions", multiple=True, metavar="CONDITION",
              help="Exit with 1 where it holds for an entry: 'tflops < 0.95 * base'; repeatable.")  # fmt: skip
@click.option("--same-work", is_flag=True,
              help="Set times and memory against each other, too: you know that the work was the same.")  # fmt: skip
@reads_traces
def command(
    paths: tuple[str, ...],
    reading: LoadOptions,
    form: str,
    output: str | None,
    page: str | None,
    conditions: tuple[str, ...],
    same_work: bool,
) -> int:
    """Set runs, traces, printed tables and benchmark logs side by side, in any mix, against the first.

    What differs in settings and hardware comes first. A difference within the spread of repeated timings is called
    noise; times of different work are not set against each other.

    \b
    ringprof compare traces/a traces/b
    ringprof compare traces/main traces/branch --fail-if 'tflops < 0.95 * base'
    """
    parsed = [parse_condition(text) for text in conditions]
    found = compare(*paths, reading=reading, same_work=same_work)
    print_or_write(_text(found, form, output), output)
    if page:
        write_text(page, found.to_html())
    return 1 if _failed(found, parsed) else 0


def _failed(found: Comparison, conditions: Sequence[Condition]) -> bool:
    """Whether a condition holds for an entry; says which."""
    base, failed = flat(found.entries[0].figures), False
    for entry in found.entries[1:]:
        figures = flat(entry.figures)
        shares = {name for name, one in entry.figures.items() if one.unit == "share"}
        for condition in conditions:
            if condition.holds(figures, base, shares):
                failed = True
                of_base = f" (base {base[condition.figure]:.6g})" if condition.figure in base else ""
                message = f"{entry.label}: {condition.figure} is {figures[condition.figure]:.6g}{of_base}"
                click.echo(f"ringprof: {message}: {condition.text}", err=True)
    return failed


def _text(found: Comparison, form: str, output: str | None) -> str:
    if form == "json":
        return shown.render_json(found)
    if form == "csv":
        return shown.render_csv(found)
    return shown.render(found, text_style(output))
