"""``ringprof advise``: the strategy and degrees for a problem and a cluster."""

from __future__ import annotations

import re
from typing import Any

import click

from ringprof.cli.predict import asked_cluster, asked_workload, asks
from ringprof.cli.progress import loading_progress
from ringprof.cli.write import text_style, write_text
from ringprof.errors import UsageError
from ringprof.json_object import json_text
from ringprof.prediction.advise import advice_dict, advise
from ringprof.prediction.calibration import read_calibration
from ringprof.prediction.recommendation_text import advice_text, document
from ringprof.report.page.html import render as page
from ringprof.scale.trace_set import ignore_progress

_UNITS = {"GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20}


@click.command("advise")
@asks
@click.option("--memory", metavar="SIZE", help="What a GPU has for this, such as 80GB.  [default: all of it]")
@click.option("--strategy", "strategies", multiple=True, metavar="NAME", help="Only this strategy; repeatable.")
@click.option("--html", type=click.Path(dir_okay=False), help="Write a page with plots.")
def command(**options: Any) -> int:
    """Foresee every strategy, degree, placement, window and hop engine, and choose.

    \b
    ringprof advise --seq 1048576 --heads 40 --hosts 16 --gpus-per-host 8 --machine h100 --nic 400
    """
    from ringprof.prediction.schedule_cache import ScheduleCache

    machine, cluster = read_calibration(options["machine"]), asked_cluster(options)
    with loading_progress() as tell:
        found = advise(
            asked_workload(options), cluster, machine, ScheduleCache().of, kernel=options["kernel"],
            memory_bytes=_size(options["memory"]) if options["memory"] else None, strategies=options["strategies"],
            notify=tell or ignore_progress,
        )  # fmt: skip
    click.echo(
        json_text(advice_dict(found)) if options["form"] == "json" else advice_text(found, text_style(None)), nl=False
    )
    if options["html"]:
        write_text(options["html"], page(document(found)))
    return 0


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(GB|GiB|MB|MiB)", text)
    if match is None:
        raise UsageError(f"--memory {text!r}: write a size such as 80GB or 40GiB")
    return int(float(match[1]) * _UNITS[match[2]])
