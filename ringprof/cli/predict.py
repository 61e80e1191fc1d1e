"""``ringprof predict``: predict the performance of a run on a given cluster."""

from __future__ import annotations

import sys
from collections.abc import Container
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from ringprof.cli.options import Advanced, Command, OneOf, all_of, options_set, refuse_unused
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
from ringprof.cli.values import FOR_RECURRENCES, KERNEL_NAMES, STRATEGIES, Known, Number, StrategyName, Tokens, Whole
from ringprof.cli.write import OutputFile, formats, say, text_style, write_text
from ringprof.common.formatting import percent
from ringprof.common.json_object import Options, json_text
from ringprof.common.validation import whole
from ringprof.errors import UsageError
from ringprof.prediction.as_run import write_prediction
from ringprof.prediction.calibration import base_for, read_calibration
from ringprof.prediction.fit import observed_run
from ringprof.prediction.measured import read_rows, unknown_columns
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import predict, prediction_dict
from ringprof.prediction.query import Query, find_run
from ringprof.prediction.score import check_rows, check_text
from ringprof.prediction.text import PART_LABELS, document, prediction_text, step_text
from ringprof.prediction.what_if import Changes, WhatIf, what_if
from ringprof.prediction.whole_steps import predict_step, step_dict
from ringprof.report.page.html import render as page
from ringprof.report.text import clean, duration, shell_words
from ringprof.workload.workload import Workload

DOES_NOT_FIT = 1
"""Exit code of a prediction, or of advice, of which nothing fits into memory."""

prediction_options = all_of(
    click.option("--seq", type=Tokens(), help="Global sequence length in tokens: 131072 or 128k."),
    workload_options(),
    masks,
    scores_and_heads,
    click.option("--kernel", default="auto", show_default=True, type=Known(KERNEL_NAMES),
                 help="Attention kernel; the calibration must have its curves."),
    click.option("--nodes", "hosts", type=Whole(1, 1 << 16), default=1, show_default=True,
                 help="Number of nodes."),
    click.option("--gpus-per-node", "gpus_per_host", type=Whole(1, 1024), default=8, show_default=True,
                 help="GPUs per node."),
    click.option("--nic", "nic_gbit", type=Number(min=0, min_open=True), metavar="GBIT",
                 help="Line rate of a NIC in Gbit/s; one NIC per GPU unless --gpus-per-nic is set."),
    click.option("--gpus-per-nic", cls=Advanced, type=Whole(min=1), default=1, show_default=True,
                 help="GPUs per NIC."),
    click.option("--oversubscription", cls=Advanced, type=Number(min=1), default=1.0, show_default=True,
                 help="Ratio of a node's NIC bandwidth to its up-link bandwidth."),
    click.option("--net-channels", cls=Advanced, type=Whole(1, 64),
                 help="Value of NCCL_NCHANNELS_PER_NET_PEER, if it is set."),
    click.option("--machine", metavar="FILE_OR_NAME",
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


_replay_options = all_of(
    click.option("--replay", type=click.Path(), metavar="RUN",
                 help="Replay the measured blocks and hops of this recorded run, with changes: --link, --slow,"
                 " --kernel-speed, --ranks-per-node, --kernel, --hops, --kv-heads, -p."),
    click.option("--link", "links", cls=Advanced, multiple=True, metavar="LINK=FACTOR",
                 help="With --replay: speed up the links within nodes (intra-node=2x) or between nodes"
                 " (inter-node=2x)."),
    click.option("--slow", cls=Advanced, multiple=True, metavar="RANK=FACTOR",
                 help="With --replay: slow the blocks of a rank down, such as 3=1.25."),
    click.option("--kernel-speed", cls=Advanced, default="1x", show_default=True, metavar="FACTOR",
                 help="With --replay: speed up attention kernels."),
    click.option("--ranks-per-node", "ranks_per_host", cls=Advanced, type=Whole(min=1),
                 help="With --replay: number of neighbouring ranks per node."),
)  # fmt: skip
"""Decorator that adds the options of a replay with changes, beside those of a prediction."""
_REPLAY_ALONE = ("links", "slow", "kernel_speed", "ranks_per_host")
_REPLAY = {*_REPLAY_ALONE, "replay", "kernel", "hops", "kv_heads", "params", "machine", "form"}
"""Options that a replay has by themselves, and all that go with it."""


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
@_replay_options
@click.option("--against", type=click.Path(), metavar="CSV", help="Compare published measurements with predictions.")
@click.option("-o", "--output", type=click.Path(file_okay=False), metavar="FOLDER",
              help="Also write the prediction as run.json and traces, which every other command reads.")  # fmt: skip
@click.option("--html", type=OutputFile(), help="Also write the prediction as one HTML page.")
def command(**options: Any) -> int:
    """Predict the performance of a run on a given cluster: time with an interval, memory, exposed communication.

    The times come from the calibration of a machine. With --replay, they come from a recorded run instead: its own
    blocks and hops in their order, changed as the options say.

    \b
    ringprof predict --strategy burst --seq 8388608 --heads 64 --kv-heads 8 --nodes 128 --machine h100 --nic 400
    ringprof predict --like traces/h200x4-zigzag-262144 --machine h200 -o traces/predicted
    ringprof predict --operator gdn --strategy state-scan --seq 1m --heads 16 --machine h200
    ringprof predict --replay traces/h200x4-burst-65536-two-hosts --link inter-node=10x --slow 3=1.25
    """
    _refuse_conflicts(options)
    if options["replay"]:
        _print_replay(options, options_set())
        return 0
    if not options["machine"]:
        raise UsageError("Missing option '--machine': a calibration, such as h200, or a file of `ringprof calibrate`")
    machine = read_calibration(options["machine"])
    style = text_style(None)
    if options["against"]:
        rows = read_rows(options["against"])
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
        if options["like"]:
            run = clean(options["like"])
            note = f"Predicted from the calibration {clean(machine.name)} for the workload of {run}, not replayed"
            click.echo(style.fit(f"{note} (--replay uses its measured blocks)."))
        click.echo(prediction_text(prediction, style) if step is None else step_text(step, style), nl=False)
    if options["html"]:
        write_text(options["html"], page(document(prediction)))
    if options["output"]:
        write_prediction(prediction, Path(options["output"]), ["ringprof", *sys.argv[1:]])
        say(f"Wrote {options['output']}: ringprof report {shell_words([options['output']])}")
    return 0 if prediction.fits else DOES_NOT_FIT


_NETWORK = ("nic_gbit", "gpus_per_nic", "oversubscription", "net_channels")
_ALLOWED = {
    "replay": _REPLAY, "like": {"like", "machine", "form", "output", "html", *_NETWORK},
    "against": {"against", "machine", "form", "gpus_per_host", *_NETWORK},
}  # fmt: skip
"""Options that go with each source of a prediction other than the options of a workload."""


def _refuse_conflicts(options: Options) -> None:
    """Raise `UsageError` for an option that the run of --like or --replay or the table of --against does not use."""
    for source, allowed in _ALLOWED.items():
        if options[source]:
            refuse_unused(f" beside --{source}: leave one of them out", used=allowed)
    if not options["replay"]:
        refuse_unused(" goes with --replay RUN", unused=_REPLAY_ALONE)


def _query(options: Options) -> Query:
    """Build the query from the recorded run of --like, or from the options."""
    if options["like"]:
        query = Query.of_run(find_run(options["like"]))
        network = {name: options[name] for name in _NETWORK}
        return replace(query, cluster=replace(query.cluster, **network))
    if not options["strategy"]:
        raise UsageError("--strategy NAME, --like RUN or --replay RUN: say what to predict")
    return Query(
        options["strategy"], predicted_workload(options), cluster_of(options), options["kernel"], options["hops"],
        params_of(options["params"], "KEY=VALUE"),
    )  # fmt: skip


# --- replaying a recorded run with changes ------------------------------------------------------------

_LINKS = {"intra-node": "same_host", "inter-node": "other_host"}
"""Classes of links by their names on the command line; a calibration's own names work, too."""
_NOTABLE = 0.05
"""Share of the whole change from which the change of a part is named."""


def _print_replay(options: Options, chosen: Container[str]) -> None:
    """Replay the run of --replay with the changes and print the result; ``chosen`` are the options that are set."""
    for name in ("kernel", "hops"):
        if options[name] == "auto" and name in chosen:
            raise UsageError(f"--{name} auto: does not go with --replay: name one, or leave the option out")
    run = find_run(options["replay"])
    machine = read_calibration(options["machine"]) if options["machine"] else base_for(run.environment.devices[0])
    slow = {}
    for name, value in _pairs(options["slow"], "--slow"):
        rank = whole(name)
        if rank is None:
            raise UsageError(f"--slow {name!r}: write RANK=FACTOR, such as 3=1.25")
        slow[rank] = _factor("--slow", value)
    changes = Changes(
        links={_LINKS.get(name, name): _factor("--link", value) for name, value in _pairs(options["links"], "--link")},
        slow=slow, kernel_speed=_factor("--kernel-speed", options["kernel_speed"]), hosts_of=options["ranks_per_host"],
        kernel=None if options["kernel"] == "auto" else options["kernel"],
        hops=None if options["hops"] == "auto" else options["hops"],
        kv_heads=options["kv_heads"], params=params_of(options["params"], "KEY=VALUE"),
    )  # fmt: skip
    with show_progress("replaying"):
        result = what_if(observed_run(options["replay"], machine), machine, changes)
    text = (
        json_text(result.as_dict()) if options["form"] == "json" else _text(clean(options["replay"]), result, changes)
    )
    click.echo(text, nl=False)


def _text(name: str, result: WhatIf, changes: Changes) -> str:
    changed = " with changes" if changes != Changes() else ""
    lines = [
        f"REPLAYED: the measured blocks and hops of {name}{changed}",
        f"recorded  {duration(result.recorded_ns)}, the profiled iteration's slowest rank",
        f"replayed  {duration(result.replayed_ns)}: off by {percent(result.replay_error)}",
    ]
    if changes == Changes():
        lines.append("nothing changed: name --link, --slow, --kernel-speed, --kernel, --hops or --ranks-per-node")
    else:
        word = "less" if result.gain >= 0 else "more"
        low, high = map(duration, result.range_ns)
        lines += [
            f"PREDICTED {duration(result.changed_ns)} ({low} to {high}): {percent(abs(result.gain))} {word} than the"
            " replay",
            f"change    {_change(result)}",
            f"range     {_range(result, changes)}",
        ]
        if abs(result.gain) < abs(result.replay_error):
            lines.append("the change is smaller than the replay's error")
    return "\n".join(lines) + "\n"


def _range(result: WhatIf, changes: Changes) -> str:
    """Say what the range of a prediction holds, and why it is no 80 % interval where it is none."""
    if result.is_interval:
        return "80 % interval, by three recorded pairs that differ in the transport of hops"
    kernels = ", and by the spread of both kernels' curves" if changes.kernel else ""
    return (
        "no 80 % interval: such a change was not checked against pairs of recorded runs, so the model's error for it is"
        " unknown. This is the middle 80 % over draws of the machine's figures, widened by the replay's error" + kernels
    )


def _change(result: WhatIf) -> str:
    """Name the parts of the slowest rank's time that change most, largest first."""
    changed = sorted(result.parts_ns.items(), key=lambda part: -abs(part[1]))
    least_ns = _NOTABLE * abs(result.changed_ns - result.replayed_ns)
    shown = [f"{PART_LABELS[part]} {'-' if ns < 0 else '+'}{duration(abs(ns))}" for part, ns in changed
             if abs(ns) > least_ns]  # fmt: skip
    return f"{'; '.join(shown) or 'none'}; on the slowest rank"


def _pairs(texts: tuple[str, ...], option: str) -> list[tuple[str, str]]:
    """Split values of an option at ``=``. Raises `UsageError`."""
    pairs = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"{option} {text!r}: write NAME=FACTOR")
        pairs.append((name, value))
    return pairs


def _factor(option: str, text: str) -> float:
    try:
        factor = float(text.removesuffix("x"))
    except ValueError:
        factor = 0.0
    if not 0.001 <= factor <= 1000:
        raise UsageError(f"{option}: {text!r} is not a factor: write 2x, or 0.5x")
    return factor
