"""``ringprof balance``: compare the load balance of strategies and layouts for a mask."""

from __future__ import annotations

from typing import Any

import click

from ringprof.cli.options import Command, options_set
from ringprof.cli.progress import show_progress
from ringprof.cli.recording import mask_of, masks
from ringprof.cli.values import STRATEGIES, ListOf, Number, StrategyName, Tokens
from ringprof.cli.write import formats, print_or_write, text_style, to_file
from ringprof.common.formatting import percent
from ringprof.common.json_object import Options, rows_json
from ringprof.errors import UsageError
from ringprof.prediction.calibration import read_calibration
from ringprof.prediction.network import Cluster
from ringprof.report.tables import Column, Table
from ringprof.report.text import duration, or_dash
from ringprof.workload.workload import Workload

_COLUMNS = (
    Column("strategy"), Column("", left=True, folds=True), Column("layout", left=True, folds=True),
    Column("busiest rank\nover the mean"),
    Column("with waiting\nin every step"), Column("pairs of ranks\nthat need keys"),
)  # fmt: skip


@click.command("balance", cls=Command)
@click.option("--seq", required=True, type=Tokens(), help="Global sequence length in tokens: 131072 or 128k.")
@masks
@click.option("--world", default=8, show_default=True, type=click.IntRange(min=1), help="Number of ranks.")
@click.option("--heads", default=40, show_default=True, type=click.IntRange(min=1), help="Number of query heads.")
@click.option("--cp-sizes", metavar="N,N,...", type=ListOf(click.IntRange(min=1)),
              help="Dynamic context parallelism: run each of the --documents on the smallest of these numbers of ranks"
              " that holds it.")  # fmt: skip
@click.option("--tokens-per-rank", type=Tokens(), help="With --cp-sizes: largest number of tokens of a rank in a step.")
@click.option("--machine", metavar="FILE_OR_NAME",
              help="With --cp-sizes: also predict the time of one layer's attention on this machine.")  # fmt: skip
@click.option(
    "--kv-heads", type=click.IntRange(min=1), help="With --machine: number of key and value heads.  [default: --heads]"
)
@click.option("--strategy", type=StrategyName(STRATEGIES), default="zigzag", show_default=True,
              help="With --machine: strategy of sequences on several ranks.")  # fmt: skip
@click.option("--gpus-per-node", type=click.IntRange(1, 1024), default=8, show_default=True,
              help="With --machine: GPUs per node.")  # fmt: skip
@click.option("--nic", type=Number(min=0, min_open=True), metavar="GBIT",
              help="With --machine: line rate of a GPU's NIC in Gbit/s.")  # fmt: skip
@click.option("--causal/--no-causal", default=True, show_default=True, help="Causal mask or full attention.")
@formats("json")
@to_file
def command(
    seq: int, world: int, heads: int, cp_sizes: list[int] | None, form: str, output: str | None, **options: Any
) -> None:
    """Compare the load balance of strategies and layouts for packed documents or a window. Needs no GPU.

    With --cp-sizes, --seq is the number of tokens in a batch of documents. The table then shows, for each number of
    ranks, the documents that run on it, their steps and balance, and with --machine the predicted time.

    \b
    ringprof balance --seq 512k --documents lognormal:mean=8192,sigma=1.2,seed=7 --world 8
    ringprof balance --seq 8m --documents lengths.txt --world 8 --cp-sizes 1,2,4,8 --tokens-per-rank 64k --machine h200
    """
    if cp_sizes:
        _balance_sizes(seq, world, heads, cp_sizes, form, output, options)
        return
    unused = next((shown for name, shown in options_set().items() if name in _OF_SIZES), None)
    if unused:
        raise UsageError(f"{unused} goes with --cp-sizes")
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


_OF_SIZES = ("tokens_per_rank", "machine", "kv_heads", "strategy", "gpus_per_node", "nic")
_SIZE_COLUMNS = (
    Column("ranks"), Column("documents"), Column("share"), Column("tokens"), Column("FLOPs"), Column("sequences"),
    Column("steps"), Column("filled"), Column("busiest rank\nover the mean"),
)  # fmt: skip


def _balance_sizes(
    seq: int, world: int, heads: int, sizes: list[int], form: str, output: str | None, options: Options
) -> None:
    """Print the plan of dynamic context parallelism. Raises `UsageError` and what a prediction raises."""
    mask = mask_of(options, seq)
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
            cluster = Cluster(1, options["gpus_per_node"], nic_gbit=options["nic"])
            time_of = times_on(read_calibration(options["machine"]), workload, options["strategy"], cluster)
        plans = plan(mask["documents"], world, sizes, options["tokens_per_rank"], time_of)
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
