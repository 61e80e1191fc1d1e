"""``ringprof compare``: compare runs, traces and logs, or score a saved prediction."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import click

from ringprof.cli.gate import gate, gated
from ringprof.cli.options import Command, refuse_unused
from ringprof.cli.progress import show_progress
from ringprof.cli.reading import reads_traces, refuse_unread
from ringprof.cli.write import OutputFile, formats, print_or_write, text_style, to_file, write_text
from ringprof.common.json_object import json_text
from ringprof.errors import RingprofError, UsageError
from ringprof.prediction.measured import read_rows
from ringprof.prediction.score import (
    Scored,
    is_prediction,
    is_saved_prediction,
    read_forecasts,
    score,
    scores_dict,
    scores_text,
)
from ringprof.report import comparison as shown
from ringprof.results.comparison import compare
from ringprof.results.options import LoadOptions
from ringprof.trace.inputs import detect

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

    If the first path is a saved prediction, the measured times of the others are scored with it: its error, and whether
    its interval holds them. It is what `predict` or `advise` printed with --format json, the folder of `predict -o`, or
    the file of `bench --until-decided`, which is also a measurement. The others are recorded runs or tables (CSV);
    those of another workload, strategy or cluster are named, not scored.

    \b
    ringprof compare traces/a traces/b
    ringprof compare traces/main-1 traces/main-2 traces/main-3 vs traces/branch-*
    ringprof compare traces/main traces/branch --fail-if 'tflops < 0.95 * base'
    ringprof compare forecast.json traces/mine measurements.csv
    """
    conditional = gate(conditions, undecided)
    base, *others = (path for path in paths if path != "vs")
    saved = is_saved_prediction(base)
    if saved or (is_prediction(base) and any(map(_is_table, others))):
        _print_scores(base, others, form, output)
        return 0
    sides: list[str | list[str]] = [*paths]
    if "vs" in paths:
        sides = [list(side) for is_vs, side in groupby(paths, lambda path: path == "vs") if not is_vs]
    with show_progress("reading") as notify:
        comparison = compare(*sides, reading=replace(reading, notify=notify), same_work=same_work)
    refuse_unread(entry.source for entry in comparison.entries)
    scores = _scores_of_run(base, others)
    if form == "json":
        text = shown.render_json(comparison, **({} if scores is None else {"scores": scores_dict(scores)}))
    elif form in _FORMATS:
        text = _FORMATS[form](comparison)
    else:
        style = text_style(output)
        text = comparison.to_terminal(style) + ("" if scores is None else "\n" + scores_text(scores, style))
    print_or_write(text, output)
    if page:
        write_text(page, comparison.to_html())
    failed = 0
    for index, entry in enumerate(comparison.entries[1:], 1):
        differences = [difference for difference in comparison.differences if difference.entry == index]
        failed |= conditional.fails(entry, comparison.entries[0], differences)
    return int(failed)


def _print_scores(forecast: str, measured: Sequence[str], form: str, output: str | None) -> None:
    """Print the scores of a saved prediction. Raises `UsageError` for options that they cannot use."""
    words = ": not for a saved prediction, which is scored by the measured times"
    refuse_unused(words, used=("paths", "form", "output"))
    if form not in ("terminal", "json"):
        raise UsageError(f"--format {form}: a saved prediction is scored as text or json")
    if not measured:
        raise UsageError(f"{forecast}: a saved prediction: add recorded runs or tables of measurements to score it")
    scores = score(read_forecasts(forecast), measured)
    text = json_text(scores_dict(scores)) if form == "json" else scores_text(scores, text_style(output))
    print_or_write(text, output)


def _is_table(path: str) -> bool:
    """Return whether a path is a table of measurements or a tuning, which only scores can use."""
    if is_saved_prediction(path):
        return True
    try:
        return os.path.isfile(path) and detect([path]).type == "text" and bool(read_rows(path))
    except RingprofError:
        return False


def _scores_of_run(base: str, others: Sequence[str]) -> list[Scored] | None:
    """Return the scores of a prediction that was written as a run; None for other runs, or if nothing matches it."""
    try:
        return score(read_forecasts(base), others) if is_prediction(base) else None
    except RingprofError:
        return None
