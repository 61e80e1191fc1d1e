"""``ringprof tune``: record the best predicted choices in turns until their times separate."""

from __future__ import annotations

from typing import Any

import click

from ringprof.cli.options import Command
from ringprof.cli.progress import reporter
from ringprof.cli.recording import masks, records, request_of, scores_and_heads
from ringprof.cli.values import KERNEL_NAMES, Known, Number, Tokens
from ringprof.cli.write import formats, say, text_style
from ringprof.common.json_object import json_text
from ringprof.prediction.calibration import read_calibration
from ringprof.report.text import shell_words


@click.command("tune", cls=Command)
@click.option("--seq", required=True, type=Tokens(), help="Global sequence length in tokens: 131072 or 128k.")
@click.option("--kernel", default="auto", show_default=True, type=Known(KERNEL_NAMES), help="Attention kernel.")
@masks
@scores_and_heads
@records
@click.option("--forward-only", is_flag=True, help="Skip the backward pass.")
@click.option("--machine", metavar="FILE_OR_NAME",
              help="Calibration that orders the choices.  [default: by the device; on CPU: none]")  # fmt: skip
@click.option("--strategy", "strategies", multiple=True, metavar="NAME",
              help="Consider only this strategy (or p2p, a2a, all_gather, a2a+p2p); repeatable.")  # fmt: skip
@click.option("--top", default=3, show_default=True, type=click.IntRange(min=2),
              help="Number of choices to record: strategies with parameters and transport.")  # fmt: skip
@click.option("--rounds", default=8, show_default=True, type=click.IntRange(min=3),
              help="Largest number of recordings of each choice; they are compared from the third on.")  # fmt: skip
@click.option("--minutes", default=10.0, show_default=True, type=Number(min=0, min_open=True),
              help="Begin no further round after this time.")  # fmt: skip
@formats("json")
@click.option("-o", "--output", default="traces/tune/tune.json", show_default=True, type=click.Path(dir_okay=False),
              help="File for the result; the runs are stored next to it.")  # fmt: skip
def command(seq: int, kernel: str, strategies: tuple[str, ...], form: str, output: str, **options: Any) -> int:
    """Find the fastest strategy on this node: record several in turns until one is significantly faster.

    On GPUs, `advise` chooses which ones. Each is verified in the first round, and dropped once it is significantly
    slower than the fastest (95 % interval). The exit code is 1 if more than one is left, and 3 if a recording failed.

    \b
    ringprof tune --seq 128k --heads 32 --kv-heads 8
    """
    from ringprof.trials.tune import tune, tuning_dict, tuning_text

    machine = read_calibration(options["machine"]) if options["machine"] else None
    base = request_of(options, seq=seq, strategy="", backward=not options["forward_only"], kernel=kernel, output=output)
    with reporter() as progress:
        tuning = tune(
            base, machine=machine, strategies=strategies, top=options["top"], rounds=options["rounds"],
            minutes=options["minutes"], reporter=progress,
        )  # fmt: skip
    click.echo(json_text(tuning_dict(tuning)) if form == "json" else tuning_text(tuning, text_style(None)), nl=False)
    scored = f"; were the predictions right? ringprof settle {shell_words([output, output])}" if tuning.machine else ""
    say(f"Wrote {output}{scored}")
    if any(trial.failure for trial in tuning.trials):
        return 3
    return 0 if len(tuning.undecided) == 1 else 1
