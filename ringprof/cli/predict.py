"""``ringprof predict``: what a strategy will take on a cluster that nobody here has."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec

from ringprof.cli.asking import asked_cluster, asked_workload, asks
from ringprof.cli.recording import params_of
from ringprof.cli.values import STRATEGIES, Known
from ringprof.cli.write import say
from ringprof.errors import UsageError
from ringprof.foresee.calibration import read_calibration
from ringprof.foresee.check import check_rows, check_text, read_rows
from ringprof.foresee.predict import predict, prediction_dict
from ringprof.foresee.question import Question, run_at
from ringprof.foresee.show import prediction_text
from ringprof.foresee.traces import write_prediction
from ringprof.json_object import Options


@click.command("predict")
@click.option("--strategy", metavar="NAME", type=Known(STRATEGIES),
              help="A name from `ringprof strategies`, or package.module:Class.")  # fmt: skip
@asks
@click.option("-p", "--param", "params", multiple=True, metavar="KEY=VALUE", help="A parameter of the strategy.")
@click.option("--hops", type=click.Choice(["auto", "nccl", "copy"]), default="auto", show_default=True,
              help="What carries hops within a host; auto: copy engines where there are any.")  # fmt: skip
@click.option("--like", type=click.Path(), metavar="RUN", help="What this recorded run did, in place of the above.")
@click.option("--check", type=click.Path(), metavar="CSV", help="Hold published measurements against the machine.")
@click.option("-o", "--output", type=click.Path(file_okay=False), metavar="FOLDER",
              help="Write run.json and traces, which every other command reads.")  # fmt: skip
def command(**options: Any) -> int:
    """Predict time, memory and exposed communication, with an interval.

    \b
    ringprof predict --strategy burst --seq 8388608 --heads 64 --kv-heads 8 --hosts 128 --machine h100 --nic 400
    ringprof predict --like traces/h200x4-zigzag-262144 --machine h200 -o traces/predicted
    """
    from ringprof.foresee.tape import tape_of

    machine = read_calibration(options["machine"])
    if options["check"]:
        found = check_rows(read_rows(options["check"]), machine, tape_of, asked_cluster(options))
        click.echo(check_text(found, options["form"]), nl=False)
        return 0
    question = _question(options)
    prediction = predict(question, machine, tape_of)
    if options["form"] == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(prediction_dict(prediction)), indent=1).decode())
    else:
        click.echo(prediction_text(prediction), nl=False)
    if options["output"]:
        write_prediction(prediction, Path(options["output"]), ["ringprof", *sys.argv[1:]])
        say(f"Wrote {options['output']}: ringprof report {shlex.quote(options['output'])}")
    return 0


def _question(options: Options) -> Question:
    if options["like"]:
        question = Question.like(run_at(options["like"]))
        return replace(question, cluster=replace(question.cluster, nic_gbit=options["nic"]))
    if not options["strategy"]:
        raise UsageError("--strategy NAME or --like RUN: say what is to be foreseen")
    return Question(
        options["strategy"], asked_workload(options), asked_cluster(options), options["kernel"], options["hops"],
        params_of(options["params"], "KEY=VALUE"),
    )  # fmt: skip
