"""``ringprof predict``: predict the performance of a run on a given cluster."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from ringprof.cli.options import Advanced, Command, OneOf, all_of, options_set
from ringprof.cli.progress import show_progress
from ringprof.cli.recording import (
    masks,
    params_of,
    phases,
    recurrences,
    scores_and_heads,
    workload_of,
    workload_options,
)
from ringprof.cli.values import FOR_RECURRENCES, KERNEL_NAMES, STRATEGIES, Known, Number, StrategyName, Tokens
from ringprof.cli.write import OutputFile, formats, say, text_style, write_text
from ringprof.common.json_object import Options, json_text
from ringprof.errors import UsageError
from ringprof.prediction.as_run import write_prediction
from ringprof.prediction.calibration import read_calibration
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import predict, prediction_dict
from ringprof.prediction.query import Query, find_run
from ringprof.prediction.score import check_rows, check_text, read_rows, unknown_columns
from ringprof.prediction.text import document, prediction_text, step_text
from ringprof.prediction.whole_steps import predict_step, step_dict
from ringprof.report.page.html import render as page
from ringprof.report.text import shell_words
from ringprof.workload.workload import Workload

DOES_NOT_FIT = 1
"""Exit code of a prediction, or of advice, of which nothing fits into memory."""

prediction_options = all_of(
    click.option("--seq", type=Tokens(), help="Global sequence length in tokens: 131072 or 128k."),
    workload_options(),
    masks,
    scores_and_heads,
    click.option("--forward-only", is_flag=True, help="Skip the backward pass."),
    click.option("--kernel", default="auto", show_default=True, type=Known(KERNEL_NAMES),
                 help="Attention kernel; the calibration must have its curves."),
    click.option("--nodes", "hosts", type=click.IntRange(1, 1 << 16), default=1, show_default=True,
                 help="Number of nodes."),
    click.option("--gpus-per-node", "gpus_per_host", type=click.IntRange(1, 1024), default=8, show_default=True,
                 help="GPUs per node."),
    click.option("--nic", "nic_gbit", type=Number(min=0, min_open=True), metavar="GBIT",
                 help="Line rate of a NIC in Gbit/s; one NIC per GPU unless --gpus-per-nic is set."),
    click.option("--gpus-per-nic", cls=Advanced, type=click.IntRange(min=1), default=1, show_default=True,
                 help="GPUs per NIC."),
    click.option("--oversubscription", cls=Advanced, type=Number(min=1), default=1.0, show_default=True,
                 help="Ratio of a node's NIC bandwidth to its up-link bandwidth."),
    click.option("--net-channels", cls=Advanced, type=click.IntRange(1, 64),
                 help="Value of NCCL_NCHANNELS_PER_NET_PEER, if it is set."),
    click.option("--machine", required=True, metavar="FILE_OR_NAME",
                 help="Calibration: h200, h100, b200, a800, or a file of `ringprof calibrate`."),
    formats("json"),
)  # fmt: skip
"""Decorator that adds the options of a prediction: the workload, the cluster and the machine."""


def predicted_workload(options: Options) -> Workload:
    """Build the workload from `prediction_options`. Raises `UsageError` without a sequence length."""
    if options["seq"] is None and options.get("phase") != "decode":
        raise UsageError("--seq: the sequence length is needed, in tokens")
    return workload_of(options, options["seq"] or 1, backward=not options["forward_only"])


def cluster_of(options: Options) -> Cluster:
    """Build the cluster from `prediction_options`."""
    return Cluster(**{field.name: options[field.name] for field in fields(Cluster) if field.name in options})


@click.command("predict", cls=Command)
@click.option("--strategy", metavar="NAME", type=StrategyName(STRATEGIES + FOR_RECURRENCES),
              help="Context-parallel strategy: a name from `ringprof strategies`, or package.module:Class."
              )  # fmt: skip
@recurrences
@prediction_options
@phases
@click.option("-p", "--param", "params", multiple=True, metavar="KEY=VALUE", help="Parameter of the strategy.")
@click.option("--layer", type=OneOf(["ddp", "fsdp2"]),
              help="Also predict a step of whole layers, with gradients reduced by DDP or FSDP2; the machine's file"
              " must have a model (ringprof calibrate --model).")  # fmt: skip
@click.option("--layers", type=int, help="With --layer: number of layers.  [default: 1]")
@click.option("--hops", type=OneOf(["auto", "nccl", "copy"]), default="auto", show_default=True,
              help="Intra-node transport: NCCL or CUDA copy engines (auto: copy engines if supported).")  # fmt: skip
@click.option(
    "--like", type=click.Path(), metavar="RUN", help="Predict this recorded run instead of the options above."
)
@click.option("--check", type=click.Path(), metavar="CSV", help="Compare published measurements with predictions.")
@click.option("-o", "--output", type=click.Path(file_okay=False), metavar="FOLDER",
              help="Also write the prediction as run.json and traces, which every other command reads.")  # fmt: skip
@click.option("--html", type=OutputFile(), help="Also write the prediction as one HTML page.")
def command(**options: Any) -> int:
    """Predict the performance of a run on a given cluster: time with an interval, memory, exposed communication.

    \b
    ringprof predict --strategy burst --seq 8388608 --heads 64 --kv-heads 8 --nodes 128 --machine h100 --nic 400
    ringprof predict --like traces/h200x4-zigzag-262144 --machine h200 -o traces/predicted
    ringprof predict --operator gdn --strategy state-scan --seq 1m --heads 16 --machine h200
    """
    _refuse_conflicts(options)
    machine = read_calibration(options["machine"])
    style = text_style(None)
    if options["check"]:
        rows = read_rows(options["check"])
        with show_progress("predicting") as notify:
            from ringprof.prediction.schedules import schedule_of

            scores = check_rows(rows, machine, schedule_of, cluster_of(options), notify)
        click.echo(check_text(scores, unknown_columns(rows), options["form"], style), nl=False)
        return 0
    query = _query(options)
    if query.workload.layer and (options["output"] or options["html"]):
        raise UsageError("--output and --html hold the attention of one layer: leave --layer out")
    with show_progress("predicting"):
        from ringprof.prediction.schedules import ScheduleCache  # imports torch, which takes seconds

        cached_schedule_of = ScheduleCache().of
        step = predict_step(query, machine, cached_schedule_of) if query.workload.layer else None
        prediction = predict(query, machine, cached_schedule_of) if step is None else step.attention
    if options["form"] == "json":
        whole_step = {} if step is None else {"step": step_dict(step)}
        click.echo(json_text({**prediction_dict(prediction), **whole_step}), nl=False)
    else:
        click.echo(prediction_text(prediction, style) if step is None else step_text(step, style), nl=False)
    if options["html"]:
        write_text(options["html"], page(document(prediction)))
    if options["output"]:
        write_prediction(prediction, Path(options["output"]), ["ringprof", *sys.argv[1:]])
        say(f"Wrote {options['output']}: ringprof report {shell_words([options['output']])}")
    return 0 if prediction.fits else DOES_NOT_FIT


_NETWORK = ("nic_gbit", "gpus_per_nic", "oversubscription", "net_channels")
_ALWAYS_ALLOWED = {"machine", "form", "output", "html", *_NETWORK}


def _refuse_conflicts(options: Options) -> None:
    """Raise `UsageError` for an option whose value comes from the run of --like or the table of --check."""
    for source, allowed in (("like", set()), ("check", {"gpus_per_host"})):
        for name, shown in options_set().items() if options[source] else ():
            if name not in _ALWAYS_ALLOWED | allowed | {source}:
                raise UsageError(f"{shown} beside --{source}: leave one of them out")


def _query(options: Options) -> Query:
    """Build the query from the recorded run of --like, or from the options."""
    if options["like"]:
        query = Query.of_run(find_run(options["like"]))
        network = {name: options[name] for name in _NETWORK}
        return replace(query, cluster=replace(query.cluster, **network))
    if not options["strategy"]:
        raise UsageError("--strategy NAME or --like RUN: say what to predict")
    return Query(
        options["strategy"], predicted_workload(options), cluster_of(options), options["kernel"], options["hops"],
        params_of(options["params"], "KEY=VALUE"),
    )  # fmt: skip
