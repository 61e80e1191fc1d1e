"""``ringprof bench``: record several strategies, each once or in turns until one is faster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ringprof.cli.options import Advanced, Command, refuse_unused
from ringprof.cli.progress import reporter
from ringprof.cli.recording import masks, params_of, records, request_of, scores_and_heads
from ringprof.cli.values import KERNEL_NAMES, STRATEGIES, Known, ListOf, Number, StrategyName, Tokens, Whole
from ringprof.cli.write import OutputFile, formats, say, text_style, write_text
from ringprof.common.json_object import Options, json_text
from ringprof.errors import UsageError
from ringprof.report import sweep as shown
from ringprof.report.page import html
from ringprof.report.page.pages import sweep_document
from ringprof.report.text import shell_words
from ringprof.workload.documents import document_lengths

_FORMATS = {"json": shown.render_json, "csv": shown.render_csv, "markdown": shown.render_markdown}
_SWEEP, _TUNING = "traces/bench/sweep.json", "traces/bench/tuning.json"
"""Files of the outcome that are written if the command line names none."""
_OF_TUNING = ("machine", "top", "rounds", "minutes")


@click.command(name="bench", cls=Command)
@click.option("--strategies", type=ListOf(StrategyName(STRATEGIES)),
              help="Strategies to record, such as burst,zigzag,usp.  [default with --until-decided: the best predicted]"
              )  # fmt: skip
@click.option("--seq", "seqs", required=True, type=ListOf(Tokens()), help="Sequence lengths in tokens: 128k,256k.")
@click.option("--kernel", "kernels", default="auto", show_default=True, type=ListOf(Known(KERNEL_NAMES)),
              help="Attention kernels.")  # fmt: skip
@masks
@scores_and_heads
@records
@click.option("-p", "--param", "params", multiple=True, metavar="[NAME.]KEY=VALUE",
              help="Parameter of all strategies, or of strategy NAME only; repeatable.")  # fmt: skip
@click.option("--until-decided", is_flag=True,
              help="Record the best predicted choices in turns until one is significantly faster.")  # fmt: skip
@click.option("--machine", cls=Advanced, metavar="FILE_OR_NAME",
              help="With --until-decided: calibration that orders the choices.  [default: by the device; on CPU: none]"
              )  # fmt: skip
@click.option("--top", cls=Advanced, default=3, show_default=True, type=Whole(min=2),
              help="With --until-decided: number of choices (strategies with parameters and transport).")  # fmt: skip
@click.option("--rounds", cls=Advanced, default=8, show_default=True, type=Whole(min=3),
              help="With --until-decided: largest number of recordings of each choice; they are compared from the third"
              " on.")  # fmt: skip
@click.option("--minutes", cls=Advanced, default=10.0, show_default=True, type=Number(min=0, min_open=True),
              help="With --until-decided: begin no further round after this time.")  # fmt: skip
@formats(*_FORMATS)
@click.option("-o", "--output", type=click.Path(dir_okay=False),
              help="File of the outcome; the runs are stored next to it. An existing sweep is resumed."
              f"  [default: {_SWEEP}; with --until-decided: {_TUNING}]")  # fmt: skip
@click.option("--html", "page", type=OutputFile(), help="Also write the sweep as one HTML page.")
def command(
    strategies: list[str] | None, seqs: list[int], kernels: list[str], form: str, output: str | None, page: str | None,
    **options: Any,
) -> int:  # fmt: skip
    """Record every combination of strategies, sequence lengths and kernels, and print one row for each as it finishes.

    A row that is unsupported, runs out of memory or fails shows the reason, and the sweep continues. The exit code is 3
    if a row failed or none could be recorded. After an interruption, the same command resumes the sweep.

    With --until-decided, find the fastest choice at one length. On GPUs, `advise` orders the choices. Each is verified
    in the first round, and dropped once it is significantly slower than the fastest (95 % interval). The exit code is 1
    if more than one is left, and 3 if a recording failed.

    \b
    ringprof bench --strategies burst,zigzag,usp --seq 128k,256k -p usp.ulysses_degree=2
    ringprof bench --strategies zigzag,ulysses --seq 128k --documents lognormal:mean=8192,sigma=1.2,seed=7
    ringprof bench --until-decided --seq 128k --heads 32 --kv-heads 8
    """
    _refuse_unused(strategies, seqs, kernels, form, until_decided=options["until_decided"])
    if options["until_decided"]:
        return _until_decided(strategies or (), seqs[0], kernels[0], form, output or _TUNING, options)
    from ringprof.trials.sweep import row_figures, run_sweep, sweep_requests

    params = params_of(options["params"], "[NAME.]KEY=VALUE")
    packed, path = options.pop("documents"), Path(output or _SWEEP)
    documents = {seq: document_lengths(packed, seq) for seq in seqs} if packed else {}
    base = request_of(options, seq=1, strategy="", backward=not options["forward_only"])
    requests = sweep_requests(base, strategies or (), seqs, kernels, params, documents)
    rows = []
    table = shown.SweepTable(text_style(None), [request.workload.mask_in_short() for request in requests])
    if form == "terminal":
        click.echo(table.header)
    with reporter() as progress:
        for row, analysis in run_sweep(requests, path, progress):
            rows.append(row_figures(row, analysis))
            if form == "terminal":
                click.echo(table.line(rows[-1]))
                sys.stdout.flush()
    if form != "terminal":
        click.echo(_FORMATS[form](rows), nl=False)
    if page:
        write_text(page, html.render(sweep_document(rows, path.name)))
    statuses = {row["status"] for row in rows}
    return 3 if "failed" in statuses or "ok" not in statuses else 0


def _refuse_unused(
    strategies: Sequence[str] | None, seqs: Sequence[int], kernels: Sequence[str], form: str, *, until_decided: bool
) -> None:
    """Raise `UsageError` for what the chosen way to record lacks or does not use."""
    if not until_decided:
        if strategies is None:
            raise UsageError("--strategies: name those to record, or let --until-decided choose")
        refuse_unused(" goes with --until-decided", unused=_OF_TUNING)
        return
    refuse_unused(": not with --until-decided", unused=("params", "page"))
    if form not in ("terminal", "json"):
        raise UsageError(f"--format {form}: --until-decided has text or json")
    if len(seqs) > 1 or len(kernels) > 1:
        raise UsageError("--until-decided compares strategies at one --seq with one --kernel")


def _until_decided(
    strategies: Sequence[str], seq: int, kernel: str, form: str, output: str, options: Options
) -> int:  # fmt: skip
    """Record choices in turns until one is faster, print the outcome and return the exit code."""
    from ringprof.prediction.calibration import read_calibration
    from ringprof.trials.tune import tune, tuning_dict, tuning_text

    machine = read_calibration(options["machine"]) if options["machine"] else None
    base = request_of(options, seq=seq, strategy="", backward=not options["forward_only"], kernel=kernel, output=output)
    with reporter() as progress:
        tuning = tune(
            base, machine=machine, strategies=strategies, top=options["top"], rounds=options["rounds"],
            minutes=options["minutes"], reporter=progress,
        )  # fmt: skip
    click.echo(json_text(tuning_dict(tuning)) if form == "json" else tuning_text(tuning, text_style(None)), nl=False)
    scored = f"; were the predictions right? ringprof compare {shell_words([output, output])}" if tuning.machine else ""
    say(f"Wrote {output}{scored}")
    if any(trial.failure for trial in tuning.trials):
        return 3
    return 0 if len(tuning.undecided) == 1 else 1
