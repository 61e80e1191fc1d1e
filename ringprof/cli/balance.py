"""``ringprof advise`` without a machine or with ``--cp-sizes``: the load balance of layouts for a mask."""

from __future__ import annotations

from ringprof.cli.progress import show_progress
from ringprof.cli.recording import mask_of
from ringprof.cli.values import STRATEGIES, StrategyName
from ringprof.cli.write import print_or_write, text_style
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


def print_balance(options: Options, world: int) -> None:
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


def print_sizes(options: Options, cluster: Cluster) -> None:
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
        result = plan(mask["documents"], world, options["cp_sizes"], options["tokens_per_rank"], time_of)
    labelled = [
        *((str(row.size), row) for row in result.sizes), ("all", result.total),
        (f"all on {result.largest_alone.size}", result.largest_alone),
    ]  # fmt: skip
    if form == "json":
        rows = [{"ranks": label, **vars(row)} for label, row in labelled]
        print_or_write(rows_json("ringprof.cp-sizes/1", rows), output)
        return
    timed = options["machine"] is not None
    table = [
        [
            label, f"{row.documents:,}", percent(row.documents_share), percent(row.tokens_share),
            percent(row.flops_share), f"{row.sequences:,}", f"{row.steps:,}", percent(row.filled),
            f"{row.busiest:.3f}", *(["-" if row.time_ns is None else duration(row.time_ns)] if timed else []),
        ]
        for label, row in labelled
    ]  # fmt: skip
    columns = (*_SIZE_COLUMNS, Column("predicted\nattention")) if timed else _SIZE_COLUMNS
    lengths = mask["documents"]
    heading = (
        f"{len(lengths):,} documents of {min(lengths):,} to {max(lengths):,} tokens, {sum(lengths):,} together, on"
        f" {world} ranks of {options['tokens_per_rank']:,} tokens"
    )
    reasons = [f"no time on {label}: {row.reason}" for label, row in labelled if row.reason]
    text = "\n".join([heading, "", Table("", columns, table).text(text_style(output)), *reasons])
    print_or_write(text + "\n", output)
