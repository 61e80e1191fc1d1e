"""``ringprof bench``: sweeps over strategies, sequence lengths and kernels."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ringprof.cli.options import Command
from ringprof.cli.progress import reporter
from ringprof.cli.recording import masks, params_of, records, request_of, scores_and_heads
from ringprof.cli.values import KERNEL_NAMES, STRATEGIES, Known, ListOf, StrategyName, Tokens
from ringprof.cli.write import OutputFile, formats, text_style, write_text
from ringprof.report import sweep as shown
from ringprof.report.page import html
from ringprof.report.page.pages import sweep_document
from ringprof.workload.documents import document_lengths

_FORMATS = {"json": shown.render_json, "csv": shown.render_csv, "markdown": shown.render_markdown}


@click.command(name="bench", cls=Command)
@click.option("--strategies", required=True, type=ListOf(StrategyName(STRATEGIES)),
              help="Strategies to record, such as burst,zigzag,usp.")  # fmt: skip
@click.option("--seq", "seqs", required=True, type=ListOf(Tokens()), help="Sequence lengths in tokens: 128k,256k.")
@click.option("--kernel", "kernels", default="auto", show_default=True, type=ListOf(Known(KERNEL_NAMES)),
              help="Attention kernels.")  # fmt: skip
@masks
@scores_and_heads
@records
@click.option("-p", "--param", "params", multiple=True, metavar="[NAME.]KEY=VALUE",
              help="Parameter of all strategies, or of strategy NAME only; repeatable.")  # fmt: skip
@formats(*_FORMATS)
@click.option("-o", "--output", default="traces/bench/sweep.json", show_default=True, type=click.Path(dir_okay=False),
              help="File of the sweep; its runs are stored next to it. An existing sweep is resumed.")  # fmt: skip
@click.option("--html", "page", type=OutputFile(), help="Also write the sweep as one HTML page.")
def command(
    strategies: list[str], seqs: list[int], kernels: list[str], form: str, output: str, page: str | None, **options: Any
) -> int:
    """Record every combination of strategies, sequence lengths and kernels, and print one row for each as it finishes.

    A row that is unsupported, runs out of memory or fails shows the reason, and the sweep continues. The exit code is 3
    if a row failed or none could be recorded. After an interruption, the same command resumes the sweep.

    \b
    ringprof bench --strategies burst,zigzag,usp --seq 128k,256k -p usp.ulysses_degree=2
    ringprof bench --strategies zigzag,ulysses --seq 128k --documents lognormal:mean=8192,sigma=1.2,seed=7
    """
    from ringprof.trials.sweep import row_figures, run_sweep, sweep_requests

    params = params_of(options["params"], "[NAME.]KEY=VALUE")
    packed = options.pop("documents")
    documents = {seq: document_lengths(packed, seq) for seq in seqs} if packed else {}
    requests = sweep_requests(request_of(options, seq=1, strategy=""), strategies, seqs, kernels, params, documents)
    rows = []
    table = shown.SweepTable(text_style(None), [request.workload.mask_in_short() for request in requests])
    if form == "terminal":
        click.echo(table.header)
    with reporter() as progress:
        for row, analysis in run_sweep(requests, Path(output), progress):
            rows.append(row_figures(row, analysis))
            if form == "terminal":
                click.echo(table.line(rows[-1]))
                sys.stdout.flush()
    if form != "terminal":
        click.echo(_FORMATS[form](rows), nl=False)
    if page:
        write_text(page, html.render(sweep_document(rows, Path(output).name)))
    statuses = {row["status"] for row in rows}
    return 3 if "failed" in statuses or "ok" not in statuses else 0
