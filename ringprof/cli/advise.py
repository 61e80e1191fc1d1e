"""``ringprof advise``: recommend a strategy for a workload and a cluster, or compare load balance."""

from __future__ import annotations

import re
from typing import Any

import click

from ringprof.cli.options import Advanced, Command, refuse_unused
from ringprof.cli.predict import DOES_NOT_FIT, cluster_of, predicted_workload, prediction_options
from ringprof.cli.progress import show_progress
from ringprof.cli.recording import mask_of
from ringprof.cli.values import STRATEGIES, ListOf, StrategyName, Tokens, Whole
from ringprof.cli.write import OutputFile, print_or_write, say, text_style, to_file, write_text
from ringprof.common.formatting import percent
from ringprof.common.json_object import Options, json_text, rows_json
from ringprof.errors import UsageError
from ringprof.prediction.advise import advice_dict, advise
from ringprof.prediction.calibration import read_calibration
from ringprof.prediction.network import Cluster
from ringprof.prediction.recommendation_text import advice_text, document
from ringprof.report.page.html import render as page
from ringprof.report.tables import Column, Table
from ringprof.report.text import duration, or_dash
from ringprof.workload.workload import Workload

_UNITS = {"GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20}


@click.command("advise", cls=Command)
@prediction_options
@click.option("--memory", metavar="SIZE", help="Available memory per GPU, such as 80GB.  [default: all of it]")
@click.option("--strategy", "strategies", multiple=True, metavar="NAME",
              help="Consider only this strategy (or p2p, a2a, all_gather, a2a+p2p); repeatable.")  # fmt: skip
@click.option("--cp-sizes", cls=Advanced, metavar="N,N,...", type=ListOf(Whole(min=1)),
              help="Dynamic context parallelism: run each of the --documents on the smallest of these numbers of ranks"
              " that holds it.")  # fmt: skip
@click.option("--tokens-per-rank", cls=Advanced, type=Tokens(),
              help="With --cp-sizes: largest number of tokens of a rank in a step.")  # fmt: skip
@click.option("--html", type=OutputFile(), help="Also write an HTML page with plots.")
@to_file
def command(**options: Any) -> int:
    """Predict every bundled strategy with its degrees, placements and transports, and recommend the fastest.

    Without --machine, compare the load balance of strategies and layouts for packed documents or a window on as many
    ranks. With --cp-sizes, --seq is the number of tokens in a batch of documents: the table shows, for each number of
    ranks, the documents that run on it, their steps and balance, and with --machine the time of one layer's attention.

    \b
    ringprof advise --seq 1048576 --heads 40 --nodes 16 --gpus-per-node 8 --machine h100 --nic 400
    ringprof advise --seq 512k --documents lognormal:mean=8192,sigma=1.2,seed=7
    ringprof advise --seq 8m --documents lengths.txt --cp-sizes 1,2,4,8 --tokens-per-rank 64k --machine h200
    """
    _refuse_unused(options)
    cluster = cluster_of(options)
    if options["cp_sizes"]:
        _print_sizes(options, cluster)
        return 0
    if not options["machine"]:
        _print_balance(options, cluster.size)
        say("ringprof: no --machine: load balance by the mask alone; with one, advise predicts times")
        return 0
    machine = read_calibration(options["machine"])
    workload = predicted_workload(options)
    memory_bytes = _size(options["memory"]) if options["memory"] else None
    with show_progress("strategies") as notify:
        from ringprof.prediction.schedules import ScheduleCache  # imports torch, which takes seconds

        advice = advise(
            workload, cluster, machine, ScheduleCache().of, kernel=options["kernel"], memory_bytes=memory_bytes,
            strategies=options["strategies"], notify=notify,
        )  # fmt: skip
    as_json = options["form"] == "json"
    output = options["output"]
    print_or_write(json_text(advice_dict(advice)) if as_json else advice_text(advice, text_style(output)), output)
    if options["html"]:
        write_text(options["html"], page(document(advice)))
    return 0 if advice.first.fits else DOES_NOT_FIT


_OF_MASK = {"seq", "heads", "causal", "documents", "window_size", "prefix", "hosts", "gpus_per_host", "form", "output"}
_OF_SIZES = {*_OF_MASK, "cp_sizes", "tokens_per_rank", "machine", "kv_heads", "strategies", "nic_gbit"}


def _refuse_unused(options: Options) -> None:
    """Raise `UsageError` without a length, and for an option that changes nothing in the comparison asked for."""
    if options["seq"] is None:
        raise UsageError("--seq: the sequence length is needed, in tokens")
    if options["cp_sizes"]:
        used = _OF_SIZES if options["machine"] else {*_OF_MASK, "cp_sizes", "tokens_per_rank"}
        words = "not with --cp-sizes" + ("" if options["machine"] else " and no --machine")
        refuse_unused(f": {words}", used=used)
    elif options["machine"]:
        refuse_unused(" goes with --cp-sizes", unused=("tokens_per_rank",))
    else:
        refuse_unused(" goes with --machine FILE_OR_NAME; without one, only load balance is compared", used=_OF_MASK)
    if options["cp_sizes"] and len(options["strategies"]) > 1:
        raise UsageError("--strategy: one of them, with --cp-sizes")


def _size(text: str) -> int:
    """Parse a memory size such as ``80GB`` into bytes."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(GB|GiB|MB|MiB)", text)
    if match is None:
        raise UsageError(f"--memory {text!r}: write a size such as 80GB or 40GiB")
    return int(float(match[1]) * _UNITS[match[2]])


# --- load balance by the mask ------------------------------------------------------------------------

_COLUMNS = (
    Column("strategy"), Column("", left=True, folds=True), Column("layout", left=True, folds=True),
    Column("busiest rank\nover the mean"),
    Column("with waiting\nin every step"), Column("pairs of ranks\nthat need keys"),
)  # fmt: skip


def _print_balance(options: Options, world: int) -> None:
    """Compare the load balance of strategies and layouts for a mask and print it. Raises `UsageError`."""
    seq, heads, form, output = (options[name] for name in ("seq", "heads", "form", "output"))
    workload = Workload(seq=seq, heads=heads, kv_heads=heads, head_dim=128, **mask_of(options, seq))
    with show_progress("balancing"):
        from ringprof.prediction.balance import balances  # imports torch, which takes seconds

        results = balances(workload, world)
    if form == "json":
        print_or_write(rows_json("ringprof.balance/1", results), output)
        return
    rows = [
        [
            result.strategy, " ".join(f"{key}={value}" for key, value in result.params.items()), result.layout or "",
            *(or_dash(ratio, ".3f") for ratio in (result.busiest, result.steps)), or_dash(result.needed, ".0%"),
        ]
        for result in results
        if result.reason is None
    ]  # fmt: skip
    style = text_style(output)
    heading = (
        f"{seq} tokens on {world} ranks, {workload.mask()}: {workload.mask().area(seq) / seq**2:.2%} of the square"
    )
    omitted = [f"{result.strategy} left out: {result.reason}" for result in results if result.reason]
    text = "\n".join([heading, "", Table("", _COLUMNS, rows).text(style), *omitted])
    print_or_write(text + "\n", output)


_SIZE_COLUMNS = (
    Column("ranks"), Column("documents"), Column("share"), Column("tokens"), Column("FLOPs"), Column("sequences"),
    Column("steps"), Column("filled"), Column("busiest rank\nover the mean"),
)  # fmt: skip


def _print_sizes(options: Options, cluster: Cluster) -> None:
    """Print the plan of dynamic context parallelism. Raises `UsageError` and what a prediction raises."""
    seq, heads, form, output = (options[name] for name in ("seq", "heads", "form", "output"))
    mask, world = mask_of(options, seq), cluster.size
    if mask["documents"] is None or options["tokens_per_rank"] is None:
        missing = "documents" if mask["documents"] is None else "tokens-per-rank"
        raise UsageError(f"--cp-sizes needs --{missing}")
    if mask["window"] or mask["prefix"] or not mask["causal"]:
        raise UsageError("--cp-sizes: for documents with a causal mask, without a window or a prefix")
    with show_progress("planning"):
        from ringprof.prediction.cp_sizes import plan, times_on  # imports torch, which takes seconds

        time_of = None
        if options["machine"]:
            workload = Workload(seq=seq, heads=heads, kv_heads=options["kv_heads"] or heads, head_dim=128)
            strategy = StrategyName(STRATEGIES).convert((*options["strategies"], "zigzag")[0], None, None)
            time_of = times_on(read_calibration(options["machine"]), workload, strategy, cluster)
        plans = plan(mask["documents"], world, options["cp_sizes"], options["tokens_per_rank"], time_of)
    if form == "json":
        rows = [{"ranks": label, **vars(row)} for label, row in plans.items()]
        print_or_write(rows_json("ringprof.cp-sizes/1", rows), output)
        return
    timed = options["machine"] is not None
    table = [
        [
            label, f"{row.documents:,}", percent(row.documents_share), percent(row.tokens_share),
            percent(row.flops_share), f"{row.sequences:,}", f"{row.steps:,}", percent(row.filled),
            f"{row.busiest:.3f}", *(["-" if row.time_ns is None else duration(row.time_ns)] if timed else []),
        ]
        for label, row in plans.items()
    ]  # fmt: skip
    columns = (*_SIZE_COLUMNS, Column("predicted\nattention")) if timed else _SIZE_COLUMNS
    lengths = mask["documents"]
    heading = (
        f"{len(lengths):,} documents of {min(lengths):,} to {max(lengths):,} tokens, {sum(lengths):,} together, on"
        f" {world} ranks of {options['tokens_per_rank']:,} tokens"
    )
    reasons = [f"no time on {label}: {row.reason}" for label, row in plans.items() if row.reason]
    text = "\n".join([heading, "", Table("", columns, table).text(text_style(output)), *reasons])
    print_or_write(text + "\n", output)
