"""``ringprof logs``: read benchmark logs of ring-attention systems into one audited table."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import click

from ringprof.cli.options import Advanced, Command
from ringprof.cli.progress import show_progress
from ringprof.cli.values import Number
from ringprof.cli.write import formats, print_or_write, text_style, to_file, with_width
from ringprof.common.files import read_within
from ringprof.common.json_object import json_text
from ringprof.common.limits import EXPANDED_BYTES, MEMORY_BYTES, Limits
from ringprof.common.log_lines import TEXT_SHARE
from ringprof.printed.benchmarks.audit import SPREAD
from ringprof.printed.benchmarks.logs import BenchmarkLogs
from ringprof.printed.benchmarks.read import parse_log, read_log
from ringprof.printed.benchmarks.rows import BenchmarkLog, Flag, LogSettings

_SETTINGS = ("batch", "heads", "head_dim", "world_size", "causal", "device")
"""Options for settings that a log does not state: fields of `LogSettings`."""


@click.command(name="logs", cls=Command)
@click.argument("files", nargs=-1, type=click.Path(), required=True, metavar="FILE...")
@formats("json", "csv")
@to_file
@with_width
@click.option("--batch", type=click.IntRange(min=1), help="Batch size, if a log does not state it.")
@click.option("--heads", type=click.IntRange(min=1), help="Number of query heads, if a log does not state it.")
@click.option("--head-dim", type=click.IntRange(min=1), help="Head dimension, if a log does not state it.")
@click.option("--world", "world_size", type=click.IntRange(min=1), help="Number of GPUs, if a log does not state it.")
@click.option("--causal/--no-causal", default=None, help="Causal mask or full attention, if a log does not state it.")
@click.option("--device", help="GPU model (such as A800), if a log does not state it.")
@click.option(
    "--spread", type=Number(min=0), default=100 * SPREAD, show_default=True,
    help="Percent by which the same configuration may differ between logs.",
)  # fmt: skip
@click.option("--machine", metavar="FILE_OR_NAME",
              help="Also compare rows with a prediction for this machine: h100, a800, or a file of"
              " `ringprof calibrate`.")  # fmt: skip
@click.option("--gpus-per-node", "gpus_per_host", cls=Advanced, type=click.IntRange(1, 1024), default=8,
              show_default=True, help="With --machine: GPUs per node.")  # fmt: skip
@click.option("--nic", cls=Advanced, type=Number(min=0, min_open=True), metavar="GBIT",
              help="With --machine: line rate of each GPU's NIC in Gbit/s.")  # fmt: skip
@click.option(
    "--max-bytes",
    cls=Advanced,
    type=click.IntRange(min=1),
    help="Maximum log size in bytes.  [default: a tenth of --max-memory]",
)
@click.option(
    "--max-memory", cls=Advanced, type=click.IntRange(min=1), help="Memory for reading in bytes.  [default: 1 GiB]"
)
@click.option("--strict", is_flag=True, help="Exit with code 2 if a flag is an error.")
def command(files: tuple[str, ...], **options: Any) -> int:
    """Read benchmark logs into one table and audit them.

    The TFLOP/s of every row are recomputed from its time and settings. Settings that a log does not state are never
    assumed: pass them as options. FILE may be - for a log from a pipe.

    \b
    ringprof logs bench.log
    ringprof logs results/*.txt --heads 40 --head-dim 128 --world 32 --format csv
    """
    settings = LogSettings(**{name: options[name] for name in _SETTINGS})
    limits = Limits(options["max_memory"] or MEMORY_BYTES, options["max_bytes"] or EXPANDED_BYTES)
    logs = BenchmarkLogs([_read(file, limits) for file in dict.fromkeys(files)], settings, options["spread"] / 100)
    if options["machine"]:
        with show_progress("predicting"):
            logs.add(_implausible_rows(logs, options["machine"], options["gpus_per_host"], options["nic"]))
    output = options["output"]
    if options["form"] == "terminal":
        text = logs.to_terminal(text_style(output, options["width"]))
    else:
        text = json_text(logs.report()) if options["form"] == "json" else logs.to_csv()
    print_or_write(text, output)
    errors = [flag for flag in logs.flags if flag.severity == "error"]
    return 2 if options["strict"] and errors else 0


def _implausible_rows(logs: BenchmarkLogs, machine: str, gpus_per_host: int, nic: float | None) -> Iterator[Flag]:
    """Yield flags of rows whose times a prediction for the machine contradicts."""
    from ringprof.prediction.calibration import read_calibration
    from ringprof.prediction.network import Cluster
    from ringprof.prediction.schedules import schedule_of
    from ringprof.prediction.score import check_log_rows

    cluster = Cluster(gpus_per_host=gpus_per_host, nic_gbit=nic)
    return check_log_rows(logs.rows, read_calibration(machine), schedule_of, cluster)


def _read(file: str, limits: Limits) -> BenchmarkLog:
    if file == "-":
        return parse_log(read_within(sys.stdin.buffer, "-", limits, TEXT_SHARE), "-")
    return read_log(file, limits)
