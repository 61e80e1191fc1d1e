"""``ringprof calibrate``: measure a machine on its GPUs, or take its figures from recorded runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from ringprof.cli.options import Advanced, Command, OneOf, all_of, options_set, refuse_unused
from ringprof.cli.progress import show_progress
from ringprof.cli.values import ListOf, Number, Tokens, Whole, refuse_missing_module
from ringprof.cli.write import OutputFile, formats, print_or_write, refuse_unwritable, say, text_style
from ringprof.common.files import write_atomically
from ringprof.common.json_object import JsonObject, json_text
from ringprof.errors import UsageError, nearest
from ringprof.iteration.request import DTYPES
from ringprof.prediction.calibration import (
    OPTIONAL_SHARES,
    PART_SHARES,
    TIME_SHARES,
    Calibration,
    assumed_calibration,
    base_for,
    calibration_json,
    read_calibration,
)
from ringprof.prediction.fit import calibrate_from, observed_run
from ringprof.prediction.machine import with_rates
from ringprof.prediction.nccl_tests import calibrate_from_tables, is_log, read_tables
from ringprof.prediction.query import find_run
from ringprof.prediction.text import calibration_text
from ringprof.proof.launch import load_function
from ringprof.ranks.launcher import launcher_rank
from ringprof.report.tables import Column, Table
from ringprof.report.text import clean, shell_words
from ringprof.workload.workload import Workload

if TYPE_CHECKING:
    from ringprof.prediction.measured_rates import MaskRate

_OUTPUT = "machine.json"
"""File that is written if the command line names none."""


_rate_options = all_of(
    click.option("--seq", cls=Advanced, type=Tokens(),
                 help="With --rates: length in tokens.  [default: 16384 on GPU, 512 on CPU]"),
    click.option("--heads", cls=Advanced, default=16, show_default=True, type=Whole(min=1),
                 help="With --rates: query heads."),
    click.option("--kv-heads", cls=Advanced, type=Whole(min=1),
                 help="With --rates: key and value heads.  [default: --heads]"),
    click.option("--head-dim", cls=Advanced, default=128, show_default=True, type=Whole(min=1),
                 help="With --rates: head size."),
    click.option("--dtype", cls=Advanced, type=OneOf(list(DTYPES)), default="bf16", show_default=True,
                 help="With --rates: data type of the inputs."),
    click.option("--device", cls=Advanced, type=OneOf(["auto", "cuda", "cpu"]), default="auto", show_default=True,
                 help="With --rates: device."),
)  # fmt: skip


@click.command("calibrate", cls=Command)
@click.argument("runs", nargs=-1, type=click.Path(), metavar="[RUN]...")
@click.option("-o", "--output", type=OutputFile(),
              help=f"Calibration file to write.  [default: {_OUTPUT}; with --rates: the terminal]")  # fmt: skip
@click.option("--name", help="Name of the machine.  [default: the device]")
@click.option("--base", metavar="FILE_OR_NAME",
              help="Calibration that supplies the other figures.  [default: by the device]")  # fmt: skip
@click.option("--kernels", metavar="NAMES", help="Kernels to measure, separated by commas.  [default: all that run]")
@click.option("--parts", metavar="NAMES",
              help=f"Parts to measure, separated by commas: {', '.join(PART_SHARES)}; the base supplies the rest."
              f"  [default: all but {', '.join(OPTIONAL_SHARES)}]")  # fmt: skip
@click.option("--seconds", type=Number(min=5), default=400.0, show_default=True,
              help="Approximate duration of the measurement on GPUs.")  # fmt: skip
@click.option("--model", metavar="MODULE:FUNCTION",
              help="Measure the layers of a model instead: FUNCTION(layers) returns the model and a function that turns"
              " a number of tokens into the model's keyword arguments.")  # fmt: skip
@click.option("--tokens", type=ListOf(Tokens()), default="8k,32k", show_default=True,
              help="With --model: tokens per GPU, separated by commas.")  # fmt: skip
@click.option("--rates", is_flag=True,
              help="Instead of a calibration, time every kernel on every mask, on one GPU or CPU.")  # fmt: skip
@_rate_options
@formats("json", cls=Advanced)
def command(
    runs: tuple[str, ...], output: str | None, name: str | None, base: str | None, kernels: str | None,
    parts: str | None, seconds: float, model: str | None, tokens: list[int], form: str, *, rates: bool, **sizes: Any,
) -> None:  # fmt: skip
    """Measure a machine on all GPUs of this node, or take its figures from recorded runs.

    With two or more GPUs, the links are measured, too. Every result is written as soon as it is available. RUN may also
    be what sendrecv_perf, all_gather_perf, reduce_scatter_perf or alltoall_perf of nccl-tests printed on one node.

    With --model, training steps of a model with one and with two layers are timed on one GPU. Their times outside
    attention are added to --base; `ringprof predict --layer` then predicts whole steps. The module is imported, also
    from the current folder: this runs code that is not part of ringprof.

    \b
    ringprof calibrate
    ringprof calibrate traces/h200x4-* -o machine.json
    ringprof calibrate sendrecv.txt --base h100 -o machine.json
    ringprof calibrate --model mine:layers --base h200 -o machine.json
    ringprof calibrate --rates
    """
    others = {option: shown for option, shown in options_set().items() if option not in ("output", "rates")}
    unused = next((shown for option, shown in others.items() if (option in (*sizes, "form")) is not rates), None)
    if unused:
        raise UsageError(f"{unused}: {'not with' if rates else 'goes with'} --rates")
    if model:
        words = ": not with --model, which measures layers alone"
        refuse_unused(words, unused=("runs", "kernels", "parts", "seconds"))
    else:
        refuse_unused(" goes with --model", unused=("tokens",))
    if runs:
        refuse_unused(": not with recorded runs, which are not measured again", unused=("kernels", "parts", "seconds"))
    if rates:
        print_or_write(_rates_text(form, output, **sizes), output)
        return
    path = Path(output or _OUTPUT)
    if runs:
        with show_progress("runs") as notify:
            logs = [run for run in runs if is_log(run)]
            tables = [table for log in logs for table in read_tables(log)]
            recorded = [run for run in runs if run not in logs]
            device = find_run(recorded[0]).environment.devices[0] if recorded else tables[0].device
            known = read_calibration(base) if base else base_for(device)
            observed = []
            for number, run in enumerate(recorded):
                notify("runs", number, len(runs))
                observed.append(observed_run(run, known))
            known = calibrate_from(observed, known) if recorded else known
            _save(calibrate_from_tables(tables, known) if tables else known, name, path)
    elif model:
        refuse_unwritable(str(path))
        _measure_model(path, name, base, model, tokens)
    else:
        refuse_unwritable(str(path))
        _measure(path, name, base, kernels, parts, seconds)
    write_atomically(path, calibration_json(with_rates(read_calibration(path))))
    output = str(path)
    click.echo(calibration_text(read_calibration(path), text_style(None)), nl=False)
    say(f"Wrote {output}: ringprof predict --machine {shell_words([output])}")


def _measure(
    path: Path, name: str | None, base: str | None, kernels: str | None, parts: str | None, seconds: float
) -> None:
    """Measure on all GPUs of this host: one process per GPU, started with torchrun if there are several."""
    import torch

    chosen_parts = _split_names(parts or ",".join(TIME_SHARES), PART_SHARES, "--parts")
    if not torch.cuda.is_available():
        raise UsageError("calibrate measures GPUs and there is none here: name recorded runs, or --rates of kernels")
    rank = launcher_rank()
    if rank is None and torch.cuda.device_count() > 1:
        # Start this command again on every GPU.
        sys.stdout.flush()
        count = str(torch.cuda.device_count())
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]
        os.execv(sys.executable, [sys.executable, *launcher, "-m", "ringprof", *sys.argv[1:]])
    from ringprof.prediction.measure import measure_machine, usable_kernels
    from ringprof.prediction.microbenchmark import Bench
    from ringprof.ranks.process_group import world_group

    device = torch.device("cuda", 0)
    properties = torch.cuda.get_device_properties(device)
    known = read_calibration(base) if base else base_for(properties.name)
    if known.device != properties.name:
        known = assumed_calibration(
            properties.name, properties.name, properties.multi_processor_count, properties.total_memory
        )

    def run(bench: Bench) -> None:
        usable = usable_kernels(bench.device)
        chosen = _split_names(kernels, usable, "--kernels") if kernels else usable
        with show_progress(f"measuring for about {seconds:.0f} s") if bench.rank == 0 else nullcontext():
            measure_machine(known, bench, chosen, seconds, lambda result: _save(result, name, path), chosen_parts)

    if rank is None:
        run(Bench(device))
        return
    with world_group(rank, "cuda", seconds + 300) as own_device:
        run(Bench(own_device, rank.rank, rank.world_size))
    if rank.rank != 0:
        sys.exit(0)


def _measure_model(path: Path, name: str | None, base: str | None, target: str, tokens: list[int]) -> None:
    """Measure the layers of a model on this process's device, and write them with the figures of the base."""
    import torch

    from ringprof.prediction.measure_model import measure_model

    if min(tokens) < 1:
        raise UsageError("--tokens 0: steps over at least one token are timed")
    refuse_missing_module(target)
    function = load_function(target)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    known = read_calibration(base) if base else base_for(device_name)
    if known.device != device_name:
        raise UsageError(f"--base {base}: of {known.device}, and this device is {device_name}")
    with show_progress("measuring layers") as notify:
        figures = measure_model(function, target, device, sorted(set(tokens)), notify=notify)
    _save(msgspec.structs.replace(known, model=figures), name, path)


def _split_names(text: str, known: Collection[str], option: str) -> list[str]:
    """Split names at commas. Raises `UsageError` for an unknown name."""
    names = text.split(",")
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise UsageError(f"{option}: no {clean(unknown)!r}{nearest(unknown, known)}; there are: {', '.join(known)}")
    return names


def _save(calibration: Calibration, name: str | None, path: Path) -> None:
    write_atomically(path, calibration_json(msgspec.structs.replace(calibration, name=name or calibration.name)))


# --- rates of all kernels -----------------------------------------------------------------------------


def _rates_text(
    form: str, output: str | None, *, seq: int | None, heads: int, kv_heads: int | None, head_dim: int, dtype: str,
    device: str,
) -> str:  # fmt: skip
    """Measure all kernels and format their rates. Raises `UsageError` for a device that is not available."""
    with show_progress("kernels") as notify:
        import torch

        from ringprof.iteration.resolve import resolve_device
        from ringprof.prediction.measured_rates import kernel_rates
        from ringprof.ranks.machine import device_name

        target = torch.device(resolve_device(device), *([0] if resolve_device(device) == "cuda" else []))
        seq = seq or (16384 if target.type == "cuda" else 512)
        workload = Workload(seq=seq, heads=heads, kv_heads=kv_heads or heads, head_dim=head_dim, dtype=dtype)
        rates = list(kernel_rates(workload, target, notify))
    if form == "json":
        setting = {"device": device_name(target), "device_type": target.type, "workload": workload}
        return json_text({"schema": "ringprof.kernel-rates/1", **setting, "rates": rates})
    on_cpu = target.type == "cpu"
    reasons = dict.fromkeys((rate.kernel, rate.reason) for rate in rates)
    lines = [
        f"{'GFLOP/s' if on_cpu else 'TFLOP/s'} of one call, forward and backward, on {device_name(target)}"
        + (": a CPU, which says nothing of a GPU" if on_cpu else ""),
        f"{seq} tokens, {workload.heads_in_words()}, {dtype}; by each mask's exact area; softcap is causal",
        "",
        _table(rates, 1e3 if on_cpu else 1.0).text(text_style(output)),
        *(f"{name}: {reason}" for name, reason in reasons if reason),
    ]
    return "\n".join(lines) + "\n"


def _table(rates: Iterable[MaskRate], factor: float) -> Table:
    """Build a table with one row per usable kernel and two columns, forward and backward, per mask."""
    by_kernel: dict[str, JsonObject] = {}
    for rate in rates:
        by_kernel.setdefault(rate.kernel, {})[rate.mask] = rate
    masks = list(next(iter(by_kernel.values())))
    columns = [Column(f"{mask if way == 'fwd' else ''}\n{way}", "rate") for mask in masks for way in ("fwd", "bwd")]
    rows = []
    for kernel, by_mask in by_kernel.items():
        if any(rate.reason is None for rate in by_mask.values()):
            tflops = (value for rate in by_mask.values() for value in (rate.forward_tflops, rate.backward_tflops))
            rows.append([kernel, *(value and value * factor for value in tflops)])
    return Table("", (Column("kernel"), *columns), rows)
