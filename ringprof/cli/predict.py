"""``ringprof predict``: what a strategy will take on a cluster that nobody here has."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ringprof.cli.recording import masks, params_of, scores_and_heads, workload_of, workload_options
from ringprof.cli.values import KERNEL_NAMES, STRATEGIES, Known, Number, Tokens, all_of
from ringprof.cli.write import formats, say, text_style
from ringprof.errors import UsageError
from ringprof.json_object import Options, json_text
from ringprof.prediction.as_run import write_prediction
from ringprof.prediction.calibration import read_calibration
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import predict, prediction_dict
from ringprof.prediction.query import Query, find_run
from ringprof.prediction.score import check_rows, check_text, read_rows, unknown_columns
from ringprof.prediction.text import prediction_text
from ringprof.report.text import shell_words
from ringprof.run import Workload

asks = all_of(
    click.option("--seq", type=Tokens(), help="Global sequence length in tokens: 131072 or 128k."),
    workload_options(),
    masks,
    scores_and_heads,
    click.option("--forward-only", is_flag=True, help="No backward pass."),
    click.option("--kernel", default="auto", show_default=True, type=Known(KERNEL_NAMES),
                 help="A kernel that the machine's file has curves of."),
    click.option("--hosts", type=click.IntRange(1, 1 << 16), default=1, show_default=True, help="Hosts."),
    click.option("--gpus-per-host", type=click.IntRange(1, 1024), default=8, show_default=True, help="GPUs of each."),
    click.option("--nic", "nic_gbit", type=Number(min=0, min_open=True), metavar="GBIT",
                 help="Line rate of a NIC in Gbit/s; one a GPU unless --gpus-per-nic says otherwise."),
    click.option("--gpus-per-nic", type=click.IntRange(min=1), default=1, show_default=True, help="GPUs to a NIC."),
    click.option("--oversubscription", type=Number(min=1), default=1.0, show_default=True,
                 help="A host's NICs over its up-links."),
    click.option("--net-channels", type=click.IntRange(1, 64), help="NCCL_NCHANNELS_PER_NET_PEER, where it is set."),
    click.option("--machine", required=True, metavar="FILE_OR_NAME",
                 help="A calibration: h200, h100, b200, a800, or a file of `ringprof calibrate`."),
    formats("json"),
)  # fmt: skip
"""Gives a command the options that say what is to be foreseen: the problem, the cluster, the machine."""


def asked_workload(options: Options) -> Workload:
    """The problem that `asks` describes. Raises `UsageError` where there is no length."""
    if options["seq"] is None:
        raise UsageError("--seq: the sequence length is needed, in tokens")
    return workload_of(options, options["seq"], backward=not options["forward_only"])


def asked_cluster(options: Options) -> Cluster:
    """The cluster that `asks` describes."""
    return Cluster(**{field.name: options[field.name] for field in fields(Cluster) if field.name in options})


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
    from ringprof.prediction.schedules import schedule_of

    _refuse_beside(options)
    machine = read_calibration(options["machine"])
    style = text_style(None)
    if options["check"]:
        rows = read_rows(options["check"])
        found = check_rows(rows, machine, schedule_of, asked_cluster(options))
        click.echo(check_text(found, unknown_columns(rows), options["form"], style), nl=False)
        return 0
    question = _question(options)
    prediction = predict(question, machine, schedule_of)
    as_json = options["form"] == "json"
    click.echo(json_text(prediction_dict(prediction)) if as_json else prediction_text(prediction, style), nl=False)
    if options["output"]:
        write_prediction(prediction, Path(options["output"]), ["ringprof", *sys.argv[1:]])
        say(f"Wrote {options['output']}: ringprof report {shell_words([options['output']])}")
    return 0


_NETWORK = ("nic_gbit", "gpus_per_nic", "oversubscription", "net_channels")
_OF_ANY = {"machine", "form", "output", *_NETWORK}


def _refuse_beside(options: Options) -> None:
    """Raises `UsageError` for an option that the run or the table decides."""
    context = click.get_current_context()
    for decides, others in (("like", set()), ("check", {"gpus_per_host"})):
        for option in context.command.params if options[decides] else ():
            name = option.name or ""
            given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
            if given and name not in _OF_ANY | others | {decides}:
                raise UsageError(f"{option.opts[0]} beside --{decides}: leave one of them out")


def _question(options: Options) -> Query:
    if options["like"]:
        question = Query.of_run(find_run(options["like"]))
        network = {name: options[name] for name in _NETWORK}
        return replace(question, cluster=replace(question.cluster, **network))
    if not options["strategy"]:
        raise UsageError("--strategy NAME or --like RUN: say what is to be foreseen")
    return Query(
        options["strategy"], asked_workload(options), asked_cluster(options), options["kernel"], options["hops"],
        params_of(options["params"], "KEY=VALUE"),
    )  # fmt: skip
