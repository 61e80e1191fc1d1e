"""``ringprof check``: compare a user's attention with dense attention."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import click
from msgspec.structs import asdict

from ringprof.cli.options import Command, OneOf, refuse_unused
from ringprof.cli.progress import show_progress
from ringprof.cli.recording import mask_of, masks, on_ranks, run_on_ranks, workload_options
from ringprof.cli.values import Tokens, refuse_missing_module
from ringprof.cli.write import formats, text_style
from ringprof.common.json_object import json_text
from ringprof.errors import UsageError
from ringprof.proof.launch import run_check
from ringprof.proof.result import CALLS, TENSOR_FORMATS, TIME_LIMIT_S, Check, CheckRequest, ModelCheck
from ringprof.strategies.catalog import LAYOUT_ALIASES

_LAYOUTS = ("contiguous", "zigzag", "stripe", *LAYOUT_ALIASES)


@click.command("check", cls=Command)
@click.argument("target", metavar="MODULE:FUNCTION")
@click.option("--layout", type=OneOf(_LAYOUTS),
              help="Tokens of the sequence that a rank holds (striped: stripe); required without --model.")  # fmt: skip
@click.option("--model", "of_model", is_flag=True,
              help="Check a whole model: the function returns parallel step, reference and batch.")  # fmt: skip
@click.option("--seq", type=Tokens(), help="Global length in tokens.  [default: 256 per rank on GPU, 64 on CPU]")
@masks
@workload_options(heads=None, head_dim=64)
@on_ranks
@click.option("--softmax-scale", type=float, help="Scale that the attention applies.  [default: 1/sqrt(head_dim)]")
@click.option("--tensor-format", type=OneOf(TENSOR_FORMATS), default="bshd", show_default=True,
              help="Order of batch, sequence, heads and head_dim in q, k, v and the output.")  # fmt: skip
@click.option("--calls", default=CALLS, show_default=True,
              help="Number of calls, each with new random inputs; all are compared.")  # fmt: skip
@click.option("--extra-calls/--no-extra-calls", default=True, show_default=True,
              help="Also make a call with large scores, and one in fp32 if the attention takes it.")  # fmt: skip
@click.option("--time-limit", type=float, default=TIME_LIMIT_S, show_default=True, metavar="SECONDS",
              help="Time limit per call, after which a rank counts as hanging.")  # fmt: skip
@formats("json")
def command(**options: Any) -> int:
    """Compare a distributed attention with dense attention.

    Starts its own ranks on this node; under torchrun or srun, each process is one of their ranks. MODULE:FUNCTION is
    called on each rank as attention(q, k, v) with the rank's own tokens. If it has an argument cu_seqlens or documents,
    it also gets the cumulative lengths of --documents. The module is imported, also from the current folder: this runs
    code that is not part of ringprof. Exit code 0: output and gradients are equal; 1: they differ; 3: a rank failed.

    With --model, the function takes no argument and returns what ringprof.check_model takes: a training step over the
    ranks, the same step on one process, and a batch. Their logits, losses and gradients are compared.

    \b
    ringprof check mypackage.attention:ring --layout zigzag
    ringprof check mine:attention --layout contiguous --dtype fp32 --device cpu --world 4
    ringprof check mine:packed --layout zigzag --seq 512 --documents 100,300,112
    ringprof check --model mine:training_step
    """
    form = options.pop("form")
    if options.pop("of_model"):
        kept = ("target", "device", "world", "time_limit")
        words = ": not with --model, whose function brings its own batch and mask"
        refuse_unused(words, used=(*kept, "form", "of_model"))
        return _check(CheckRequest(of_model=True, **{name: options[name] for name in kept}), form)
    if options["layout"] is None:
        raise UsageError(
            "--layout is missing: which tokens each rank holds, such as zigzag (--model finds it by itself)"
        )
    if options["documents"] and options["seq"] is None:
        raise UsageError("--documents needs --seq, the length that they fill")
    options |= mask_of(options, options["seq"])
    del options["window_size"]
    options["layout"] = LAYOUT_ALIASES.get(options["layout"], options["layout"])
    return _check(CheckRequest(backward=not options.pop("forward_only"), **options), form)


def _check(request: CheckRequest, form: str) -> int:
    """Run the check on own ranks, or as one rank of a launcher; print the result and return the exit code."""
    refuse_missing_module(request.target)

    def work(rank: int) -> int:
        with show_progress("checking") if rank == 0 else nullcontext():
            result = run_check(request)
        return _print_result(result, form) if rank == 0 else int(not result.equal)

    return run_on_ranks(work, lambda error, rank: f"rank {rank} " in str(error))


def _print_result(result: Check | ModelCheck, form: str) -> int:
    """Print the result and return the exit code."""
    schema = "ringprof.attention-check/1" if isinstance(result, Check) else "ringprof.model-check/1"
    style, document = text_style(None), {"schema": schema, **asdict(result)}
    click.echo(json_text(document) if form == "json" else style.finish(style.fit(str(result))), nl=False)
    return int(not result.equal)
