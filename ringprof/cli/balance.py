"""``ringprof balance``: compare the load balance of strategies and layouts for a mask."""

from __future__ import annotations

from typing import Any

import click

from ringprof.cli.options import Command
from ringprof.cli.progress import show_progress
from ringprof.cli.recording import mask_of, masks
from ringprof.cli.values import Tokens
from ringprof.cli.write import formats, print_or_write, text_style, to_file
from ringprof.common.json_object import rows_json
from ringprof.report.tables import Column, Table
from ringprof.report.text import or_dash
from ringprof.run import Workload

_COLUMNS = (
    Column("strategy"), Column("", left=True, folds=True), Column("layout", left=True, folds=True),
    Column("busiest rank\nover the mean"),
    Column("with waiting\nin every step"), Column("pairs of ranks\nthat need keys"),
)  # fmt: skip


@click.command("balance", cls=Command)
@click.option("--seq", required=True, type=Tokens(), help="Global sequence length in tokens: 131072 or 128k.")
@masks
@click.option("--world", default=8, show_default=True, type=click.IntRange(min=1), help="Number of ranks.")
@click.option("--heads", default=40, show_default=True, type=click.IntRange(min=1), help="Query heads.")
@click.option("--causal/--no-causal", default=True, show_default=True, help="Causal mask or full attention.")
@formats("json")
@to_file
def command(seq: int, world: int, heads: int, form: str, output: str | None, **options: Any) -> None:
    """Compare the load balance of strategies and layouts for packed documents or a window. Needs no GPU.

    \b
    ringprof balance --seq 512k --documents lognormal:mean=8192,sigma=1.2,seed=7 --world 8
    """
    workload = Workload(seq=seq, heads=heads, kv_heads=heads, head_dim=128, **mask_of(options, seq))
    with show_progress("balancing"):
        from ringprof.record.balance import balances  # imports torch, which takes seconds

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
