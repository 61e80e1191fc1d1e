"""``ringprof check``: options to a request, and the answer."""

from __future__ import annotations

from typing import Any

import click
from msgspec.structs import asdict

from ringprof.cli.recording import end_as_rank, mask_of, masks, on_ranks, workload_options
from ringprof.cli.values import Tokens
from ringprof.cli.write import formats, text_style
from ringprof.errors import UsageError
from ringprof.json_object import json_text
from ringprof.record.check.launch import check_here
from ringprof.record.check.result import CALLS, TENSOR_FORMATS, TIME_LIMIT_S, Check, CheckRequest
from ringprof.record.launcher import launcher_rank

_LAYOUTS = ("contiguous", "zigzag", "stripe")


@click.command("check")
@click.argument("target", metavar="MODULE:FUNCTION")
@click.option("--layout", required=True, type=click.Choice(_LAYOUTS), help="Which tokens of the sequence a rank holds.")
@click.option("--seq", type=Tokens(), help="Length over all ranks.  [default: 256 tokens a rank on GPU, 64 on CPU]")
@masks
@workload_options(heads=8, head_dim=64)
@on_ranks
@click.option("--softmax-scale", type=float, help="That the attention uses.  [default: 1/sqrt(head_dim)]")
@click.option("--forward-only", is_flag=True, help="No gradients.")
@click.option("--tensor-format", type=click.Choice(TENSOR_FORMATS), default="bshd", show_default=True,
              help="Order of batch, sequence, heads and head_dim in q, k, v and the output.")  # fmt: skip
@click.option("--calls", default=CALLS, show_default=True, help="Calls, each with other numbers; all are compared.")
@click.option("--time-limit", type=float, default=TIME_LIMIT_S, show_default=True, metavar="SECONDS",
              help="For one call, after which a rank counts as hung.")  # fmt: skip
@formats("json")
def command(**options: Any) -> int:
    """Compare any attention with dense attention.

    Starts its own ranks on this host; under torchrun or srun it is one of theirs. MODULE:FUNCTION is called on each as
    attention(q, k, v) with the rank's own tokens (and the cumulative lengths of --documents as cu_seqlens= or
    documents=, where it has such an argument). That imports the module, from the current folder too: it runs code that
    is not ringprof's. Exit code 0: output and gradients are equal; 1: they are not; 3: a rank failed.

    \b
    ringprof check mypackage.attention:ring --layout zigzag
    ringprof check mine:attention --layout contiguous --dtype fp32 --device cpu --world 4
    ringprof check mine:packed --layout zigzag --seq 512 --documents 100,300,112
    """
    form = options.pop("form")
    if options["documents"] and options["seq"] is None:
        raise UsageError("--documents needs --seq, the length that they fill")
    options |= mask_of(options, options["seq"])
    del options["window_size"]
    request = CheckRequest(backward=not options.pop("forward_only"), **options)
    place = launcher_rank()
    if place is None:
        return _shown(check_here(request), form)
    rank = place.rank

    def work() -> int:
        found = check_here(request)
        return _shown(found, form) if rank == 0 else int(not found.equal)

    end_as_rank(rank, work, lambda error: f"rank {rank} " in str(error))


def _shown(found: Check, form: str) -> int:
    style, document = text_style(None), {"schema": "ringprof.attention-check/1", **asdict(found)}
    click.echo(json_text(document) if form == "json" else style.finish(style.fit(str(found))), nl=False)
    return int(not found.equal)
