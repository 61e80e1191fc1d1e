"""``ringprof balance``: which layout deals out a mask's work most evenly."""

from __future__ import annotations

from typing import Any

import click

from ringprof.cli.recording import mask_of, masks
from ringprof.cli.values import Tokens
from ringprof.cli.write import formats, print_or_write, text_style, to_file
from ringprof.json_object import rows_json
from ringprof.report.tables import Column, Table
from ringprof.report.text import or_dash
from ringprof.run import Workload

_COLUMNS = (
    Column("strategy"), Column("", left=True, folds=True), Column("busiest rank\nover the mean"),
    Column("with waiting\nin every step"), Column("pairs of ranks\nthat need keys"),
)  # fmt: skip


@click.command("balance")
@click.option("--seq", required=True, type=Tokens(), help="Global sequence length in tokens: 131072 or 128k.")
@masks
@click.option("--world", default=8, show_default=True, type=click.IntRange(min=1), help="Ranks.")
@click.option("--heads", default=40, show_default=True, type=click.IntRange(min=1), help="Query heads.")
@click.option("--causal/--no-causal", default=True, show_default=True, help="Causal mask, or full attention.")
@formats("json")
@to_file
def command(seq: int, world: int, heads: int, form: str, output: str | None, **options: Any) -> None:
    """Compare how evenly strategies and layouts deal out the work of packed documents or a window. Needs no GPU.

    \b
    ringprof balance --seq 512k --documents lognormal:mean=8192,sigma=1.2,seed=7 --world 8
    """
    from ringprof.record.balance import balances

    workload = Workload(seq=seq, heads=heads, kv_heads=heads, head_dim=128, **mask_of(options, seq))
    found = balances(workload, world)
    if form == "json":
        print_or_write(rows_json("ringprof.balance/1", found), output)
        return
    rows = [
        [
            one.strategy, " ".join(f"{key}={value}" for key, value in one.params.items()),
            *(or_dash(x, ".3f") for x in (one.busiest, one.steps)), or_dash(one.needed, ".0%"),
        ]
        for one in found
        if one.reason is None
    ]  # fmt: skip
    style = text_style(output)
    heading = (
        f"{seq} tokens on {world} ranks, {workload.mask()}: {workload.mask().area(seq) / seq**2:.2%} of the square"
    )
    left_out = [f"{one.strategy} left out: {one.reason}" for one in found if one.reason]
    text = "\n".join([heading, "", Table("", _COLUMNS, rows).text(style), *left_out])
    print_or_write(text + "\n", output)
