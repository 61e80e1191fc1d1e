"""``ringprof advise``: recommend a strategy and its degrees for a workload and a cluster."""

from __future__ import annotations

import re
from typing import Any

import click

from ringprof.cli.options import Command
from ringprof.cli.predict import DOES_NOT_FIT, cluster_of, predicted_workload, prediction_options
from ringprof.cli.progress import show_progress
from ringprof.cli.write import OutputFile, text_style, write_text
from ringprof.common.json_object import json_text
from ringprof.errors import UsageError
from ringprof.prediction.advise import advice_dict, advise
from ringprof.prediction.calibration import read_calibration
from ringprof.prediction.recommendation_text import advice_text, document
from ringprof.report.page.html import render as page

_UNITS = {"GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20}


@click.command("advise", cls=Command)
@prediction_options
@click.option("--memory", metavar="SIZE", help="Available memory per GPU, such as 80GB.  [default: all of it]")
@click.option("--strategy", "strategies", multiple=True, metavar="NAME",
              help="Consider only this strategy (or p2p, a2a, all_gather, a2a+p2p); repeatable.")  # fmt: skip
@click.option("--html", type=OutputFile(), help="Also write an HTML page with plots.")
def command(**options: Any) -> int:
    """Predict every bundled strategy with its degrees, placements and transports, and recommend the fastest.

    \b
    ringprof advise --seq 1048576 --heads 40 --nodes 16 --gpus-per-node 8 --machine h100 --nic 400
    """
    machine, cluster = read_calibration(options["machine"]), cluster_of(options)
    workload = predicted_workload(options)
    memory_bytes = _size(options["memory"]) if options["memory"] else None
    with show_progress("strategies") as notify:
        from ringprof.prediction.schedules import ScheduleCache  # imports torch, which takes seconds

        advice = advise(
            workload, cluster, machine, ScheduleCache().of, kernel=options["kernel"], memory_bytes=memory_bytes,
            strategies=options["strategies"], notify=notify,
        )  # fmt: skip
    as_json = options["form"] == "json"
    click.echo(json_text(advice_dict(advice)) if as_json else advice_text(advice, text_style(None)), nl=False)
    if options["html"]:
        write_text(options["html"], page(document(advice)))
    return 0 if advice.first.fits else DOES_NOT_FIT


def _size(text: str) -> int:
    """Parse a memory size such as ``80GB`` into bytes."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(GB|GiB|MB|MiB)", text)
    if match is None:
        raise UsageError(f"--memory {text!r}: write a size such as 80GB or 40GiB")
    return int(float(match[1]) * _UNITS[match[2]])
