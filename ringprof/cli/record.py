"""``ringprof record``: record a run and print its time and rate."""

from __future__ import annotations

from typing import Any

import click

from ringprof.cli.options import Advanced, Command
from ringprof.cli.progress import reporter
from ringprof.cli.recording import (
    layers,
    masks,
    params_of,
    phases,
    records,
    recurrences,
    request_of,
    run_on_ranks,
    scores_and_heads,
)
from ringprof.cli.values import (
    FOR_RECURRENCES,
    INFERENCE,
    KERNEL_NAMES,
    STRATEGIES,
    Known,
    ListOf,
    StrategyName,
    Tokens,
    Whole,
)
from ringprof.errors import RecordError
from ringprof.recording import record
from ringprof.report.text import duration, rate, shell_words
from ringprof.run import Run


@click.command("record", cls=Command)
@click.option(
    "--strategy", required=True, metavar="NAME", type=StrategyName(STRATEGIES + INFERENCE + FOR_RECURRENCES),
    help="Context-parallel strategy: a name from `ringprof strategies`, or package.module:Class for your own. The"
    " latter imports the module, which runs code that is not part of ringprof.",
)  # fmt: skip
@click.option(
    "--seq", type=Tokens(), help="Global sequence length in tokens: 131072 or 128k; for inference, the new tokens."
)
@recurrences
@phases
@click.option("--cp-sizes", cls=Advanced, type=ListOf(Whole(min=1)), metavar="N,N,...",
              help="Dynamic context parallelism: an iteration has one step per size N, in which each group of N ranks"
              " shares one sequence. All sequences of a step together have --seq tokens.")  # fmt: skip
@masks
@layers
@scores_and_heads
@records
@click.option("-p", "--param", "params", multiple=True, metavar="KEY=VALUE",
              help="Parameter of the strategy (see `ringprof strategies NAME`); repeatable.")  # fmt: skip
@click.option("--kernel", default="auto", show_default=True, type=Known(KERNEL_NAMES),
              help=f"Attention kernel: {', '.join(KERNEL_NAMES[1:])}; auto: the fastest supported one. For"
              " recurrences: fla, reference.")  # fmt: skip
@click.option("--cuda-graph", cls=Advanced, is_flag=True,
              help="Capture an iteration in a CUDA graph and time its replays, without host overhead.")  # fmt: skip
@click.option("--profile-iters", cls=Advanced, default=1, show_default=True, help="Number of profiled iterations.")
@click.option("-o", "--output", default="traces/run.json", show_default=True, type=click.Path(),
              help="File for the newest run; each run also keeps its own folder next to it.")  # fmt: skip
@click.option("--force", cls=Advanced, is_flag=True, help="Run even if the estimate exceeds available memory or time.")
@click.option("--time-limit", cls=Advanced, type=float, metavar="SECONDS",
              help="Time limit, after which a hanging run is ended.  [default: from the estimate]")  # fmt: skip
def command(**options: Any) -> int:
    """Run a strategy, check its result, time it and profile it.

    Starts its own ranks on this node; under torchrun or srun, each process is one of their ranks.

    \b
    ringprof record --strategy burst --seq 512k
    ringprof record --strategy zigzag --seq 8192 --heads 4 --head-dim 64 --device cpu
    ringprof record --operator gdn --strategy state-scan --seq 128k --heads 16 --conv-width 4
    ringprof record --strategy dcp --phase decode --kv-length 1m --batch 32 --kv-heads 8
    torchrun --nnodes 2 --nproc-per-node 8 ... -m ringprof record --strategy burst --seq 1048576
    """
    seq = 1 if options["seq"] is None and options["phase"] == "decode" else options["seq"]
    if seq is None:
        raise click.UsageError("Missing option '--seq'.")
    same_names = ("kernel", "cuda_graph", "profile_iters", "output", "force", "time_limit")
    request = request_of(
        options, seq=seq, strategy=options["strategy"], backward=not options["forward_only"],
        params=params_of(options["params"], "KEY=VALUE"), cp_sizes=tuple(options["cp_sizes"] or ()),
        **{name: options[name] for name in same_names},
    )  # fmt: skip

    def work(rank: int) -> int:
        with reporter() as progress:
            run = record(request, progress)
            if run is not None:
                click.echo(headline(run))
                click.echo(f"next: ringprof report {shell_words([request.output])}")
        return 0

    return run_on_ranks(work, lambda error, _: type(error) is RecordError)


def headline(run: Run) -> str:
    """Describe the time and the rate of a run in one line."""
    time_ns = run.timings.median_ns() if run.timings else None
    tflops = run.tflops(time_ns)
    assert time_ns is not None and tflops is not None
    kernel = (run.kernel or "a kernel of its own") + ("" if run.verification else ", not verified")
    return f"{run.name}: {duration(time_ns)} per iteration, {rate(tflops)} per device ({kernel})"
