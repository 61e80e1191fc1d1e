"""``ringprof check``: compare a user's attention with dense attention."""

from __future__ import annotations

from typing import Any

import click
from msgspec.structs import asdict

from ringprof.cli.recording import end_as_rank, mask_of, masks, on_ranks, workload_options
from ringprof.cli.values import Tokens
from ringprof.cli.write import formats, text_style
from ringprof.common.json_object import json_text
from ringprof.errors import UsageError
from ringprof.record.check.launch import check_here
from ringprof.record.check.result import CALLS, TENSOR_FORMATS, TIME_LIMIT_S, Check, CheckRequest
from ringprof.record.launcher import launcher_rank
from ringprof.strategies.catalog import LAYOUT_ALIASES

_LAYOUTS = ("contiguous", "zigzag", "stripe", *LAYOUT_ALIASES)


@click.command("check")
@click.argument("target", metavar="MODULE:FUNCTION")
@click.option("--layout", required=True, type=click.Choice(_LAYOUTS),
              help="Tokens of the sequence that a rank holds (striped is stripe).")  # fmt: skip
@click.option("--seq", type=Tokens(), help="Global length in tokens.  [default: 256 per rank on GPU, 64 on CPU]")
@masks
@workload_options(heads=8, head_dim=64)
@on_ranks
@click.option("--softmax-scale", type=float, help="Scale that the attention applies.  [default: 1/sqrt(head_dim)]")
@click.option("--forward-only", is_flag=True, help="Do not check gradients.")
@click.option("--tensor-format", type=click.Choice(TENSOR_FORMATS), default="bshd", show_default=True,
              help="Order of batch, sequence, heads and head_dim in q, k, v and the output.")  # fmt: skip
@click.option("--calls", default=CALLS, show_default=True,
              help="Number of calls, each with new random inputs; all are compared.")  # fmt: skip
@click.option("--time-limit", type=float, default=TIME_LIMIT_S, show_default=True, metavar="SECONDS",
              help="Time limit per call, after which a rank counts as hanging.")  # fmt: skip
@formats("json")
def command(**options: Any) -> int:
    """Compare a distributed attention with dense attention.

    Starts its own ranks on this host; under torchrun or srun, each process is one of their ranks. MODULE:FUNCTION is
    called on each rank as attention(q, k, v) with the rank's own tokens. If it has an argument cu_seqlens or documents,
    it also gets the cumulative lengths of --documents. The module is imported, also from the current folder: this runs
    code that is not part of ringprof. Exit code 0: output and gradients are equal; 1: they differ; 3: a rank failed.

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
    options["layout"] = LAYOUT_ALIASES.get(options["layout"], options["layout"])
    request = CheckRequest(backward=not options.pop("forward_only"), **options)
    launched = launcher_rank()
    if launched is None:
        return _print_result(check_here(request), form)
    rank = launched.rank

    def work() -> int:
        result = check_here(request)
        return _print_result(result, form) if rank == 0 else int(not result.equal)

    end_as_rank(rank, work, lambda error: f"rank {rank} " in str(error))


def _print_result(result: Check, form: str) -> int:
    """Print the result and return the exit code."""
    style, document = text_style(None), {"schema": "ringprof.attention-check/1", **asdict(result)}
    click.echo(json_text(document) if form == "json" else style.finish(style.fit(str(result))), nl=False)
    return int(not result.equal)
