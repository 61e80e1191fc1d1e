"""``ringprof settle``: score a saved prediction against what was measured."""

from __future__ import annotations

from typing import Any

import click

from ringprof.cli.options import Command
from ringprof.cli.write import formats, text_style
from ringprof.common.json_object import json_text
from ringprof.prediction.settle import read_forecasts, settle, settlement_dict, settlement_text


@click.command("settle", cls=Command)
@click.argument("forecast", type=click.Path())
@click.argument("measured", nargs=-1, required=True, type=click.Path())
@formats("json")
def command(forecast: str, measured: tuple[str, ...], **options: Any) -> int:
    """Score a saved prediction against recorded runs or a table of measurements.

    FORECAST is what `predict` or `advise` printed with --format json, the folder of `predict -o`, or the file of
    `tune`, which is also a measurement. Runs and rows of another workload, strategy or cluster are named, not scored.

    \b
    ringprof predict --like traces/mine --machine h200 --format json > forecast.json
    ringprof settle forecast.json traces/mine measurements.csv
    """
    settlement = settle(read_forecasts(forecast), measured)
    as_json = options["form"] == "json"
    click.echo(
        json_text(settlement_dict(settlement)) if as_json else settlement_text(settlement, text_style(None)), nl=False
    )
    return 0
