"""``ringprof record``: options to a request, and the run's headline."""

from __future__ import annotations

from typing import Any

import click

from ringprof.cli.progress import reporter
from ringprof.cli.recording import end_as_rank, layers, masks, params_of, phases, records, request_of, scores_and_heads
from ringprof.cli.values import INFERENCE, KERNEL_NAMES, STRATEGIES, Known, ListOf, Tokens
from ringprof.errors import RecordError
from ringprof.json_object import Options
from ringprof.record import RecordRequest, record
from ringprof.record.launcher import launcher_rank
from ringprof.report.text import duration, rate, shell_words
from ringprof.run import Run
from ringprof.trace.reduced import reduce_file


@click.command("record")
@click.option(
    "--strategy", required=True, metavar="NAME", type=Known(STRATEGIES + INFERENCE),
    help="A name from `ringprof strategies`, or package.module:Class for your own. That imports the module: it runs"
    " code that is not ringprof's.",
)  # fmt: skip
@click.option(
    "--seq", type=Tokens(), help="Global sequence length in tokens: 131072 or 128k; with --phase, new tokens."
)
@phases
@click.option("--cp-sizes", type=ListOf(click.IntRange(min=1)), metavar="N,N,...",
              help="Dynamic context parallelism: an iteration has a step for each size, in which so many ranks share"
              " a sequence of their share of --seq.")  # fmt: skip
@masks
@layers
@scores_and_heads
@records
@click.option("--forward-only", is_flag=True, help="No backward pass.")
@click.option("-p", "--param", "params", multiple=True, metavar="KEY=VALUE",
              help="A parameter of the strategy, see `ringprof strategies NAME`; repeatable.")  # fmt: skip
@click.option("--kernel", default="auto", show_default=True, type=Known(KERNEL_NAMES),
              help=f"One of {', '.join(KERNEL_NAMES[1:])}; auto: the fastest that fits.")  # fmt: skip
@click.option("--cuda-graph", is_flag=True,
              help="Capture an iteration in a CUDA graph, and time its replays: the host costs nothing.")  # fmt: skip
@click.option("--profile-iters", default=1, show_default=True, help="Profiled iterations.")
@click.option("-o", "--output", default="traces/run.json", show_default=True, type=click.Path(),
              help="Names the newest run; each run keeps its own folder beside it.")  # fmt: skip
@click.option("--force", is_flag=True, help="Run even where memory or time will not do by the estimate.")
@click.option("--time-limit", type=float, metavar="SECONDS",
              help="End a run that hangs.  [default: from the estimate]")  # fmt: skip
def command(**options: Any) -> None:
    """Run a strategy, check its result, time it, profile it.

    Starts its own ranks on this host; under torchrun or srun it is one of theirs.

    \b
    ringprof record --strategy burst --seq 512k
    ringprof record --strategy zigzag --seq 8192 --heads 4 --head-dim 64 --device cpu
    ringprof record --strategy dcp --phase decode --kv-length 1m --batch 32 --kv-heads 8
    torchrun --nnodes 2 --nproc-per-node 8 ... -m ringprof record --strategy burst --seq 1048576
    """
    request, place = _request(options), launcher_rank()

    def work() -> int:
        with reporter() as shown:
            _show(record(request, shown, reduce_file if place else None), request)
        return 0

    if place is None:
        work()
    else:
        end_as_rank(place.rank, work, lambda error: type(error) is RecordError)


def _show(run: Run | None, request: RecordRequest) -> None:
    if run is not None:
        click.echo(headline(run))
        click.echo(f"next: ringprof report {shell_words([request.output])}")


def headline(run: Run) -> str:
    """Time and rate of a run in a line."""
    time_ns = run.timings.median_ns() if run.timings else None
    tflops = run.tflops(time_ns)
    assert time_ns is not None and tflops is not None
    by = (run.kernel or "a kernel of its own") + ("" if run.verification else ", not verified")
    return f"{run.name}: {duration(time_ns)} an iteration, {rate(tflops)} per device ({by})"


def _request(options: Options) -> RecordRequest:
    seq = 1 if options["seq"] is None and options["phase"] == "decode" else options["seq"]
    if seq is None:
        raise click.UsageError("Missing option '--seq'.")
    own = ("kernel", "cuda_graph", "profile_iters", "output", "force", "time_limit")
    return request_of(
        options, seq=seq, strategy=options["strategy"], backward=not options["forward_only"],
        params=params_of(options["params"], "KEY=VALUE"), cp_sizes=tuple(options["cp_sizes"] or ()),
        **{name: options[name] for name in own},
    )  # fmt: skip
