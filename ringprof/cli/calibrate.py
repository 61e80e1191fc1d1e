"""``ringprof calibrate``: measure a machine on its GPUs, or take its figures from recorded runs."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

import click
import msgspec

from ringprof.cli.values import Number
from ringprof.cli.write import say, text_style
from ringprof.common.files import write_atomically
from ringprof.errors import UsageError
from ringprof.prediction.calibration import (
    TIME_SHARES,
    Calibration,
    assumed_calibration,
    base_for,
    calibration_json,
    read_calibration,
)
from ringprof.prediction.fit import calibrate_from, observed_run
from ringprof.prediction.query import find_run
from ringprof.prediction.rates import with_rates
from ringprof.prediction.text import calibration_text
from ringprof.record.launcher import launcher_rank
from ringprof.report.text import clean, shell_words


@click.command("calibrate")
@click.argument("runs", nargs=-1, type=click.Path(), metavar="[RUN]...")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="Calibration file to write.")
@click.option("--name", help="Name of the machine.  [default: the device]")
@click.option("--base", metavar="FILE_OR_NAME",
              help="Calibration that supplies the other figures.  [default: by the device]")  # fmt: skip
@click.option("--kernels", metavar="NAMES", help="Kernels to measure, separated by commas.  [default: all that run]")
@click.option("--parts", metavar="NAMES",
              help=f"Parts to measure, separated by commas: {', '.join(TIME_SHARES)}; the base supplies the rest."
              "  [default: all]")  # fmt: skip
@click.option("--seconds", type=Number(min=5), default=400.0, show_default=True,
              help="Approximate duration of the measurement on GPUs.")  # fmt: skip
def command(
    runs: tuple[str, ...], output: str, name: str | None, base: str | None, kernels: str | None, parts: str | None,
    seconds: float,
) -> None:  # fmt: skip
    """Measure a machine on all GPUs of this host, or take its figures from recorded runs.

    With two or more GPUs, the links are measured, too. Every result is written as soon as it is available.

    \b
    ringprof calibrate -o machine.json
    ringprof calibrate traces/h200x4-* -o machine.json
    """
    path = Path(output)
    if runs:
        known = read_calibration(base) if base else base_for(find_run(runs[0]).environment.devices[0])
        _save(calibrate_from([observed_run(run, known) for run in runs], known), name, path)
    else:
        _refuse_unwritable(path)
        _measure(path, name, base, kernels, parts, seconds)
    write_atomically(path, calibration_json(with_rates(read_calibration(path))))
    click.echo(calibration_text(read_calibration(path), text_style(None)), nl=False)
    say(f"Wrote {output}: ringprof predict --machine {shell_words([output])}")


def _measure(
    path: Path, name: str | None, base: str | None, kernels: str | None, parts: str | None, seconds: float
) -> None:
    """Measure on all GPUs of this host: one process per GPU, started with torchrun if there are several."""
    import torch

    chosen_parts = _split_names(parts or ",".join(TIME_SHARES), TIME_SHARES, "--parts")
    if not torch.cuda.is_available():
        raise UsageError("calibrate measures GPUs and there is none here: name recorded runs instead")
    rank = launcher_rank()
    if rank is None and torch.cuda.device_count() > 1:
        # Start this command again on every GPU.
        sys.stdout.flush()
        count = str(torch.cuda.device_count())
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]
        os.execv(sys.executable, [sys.executable, *launcher, "-m", "ringprof", *sys.argv[1:]])
    from ringprof.prediction.measure import measure_machine, usable_kernels
    from ringprof.prediction.microbenchmark import Bench
    from ringprof.record.process_group import world_group

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
        measure_machine(known, bench, chosen, seconds, lambda result: _save(result, name, path), chosen_parts)

    if rank is None:
        run(Bench(device))
        return
    with world_group(rank, "cuda", seconds + 300) as own_device:
        run(Bench(own_device, rank.rank, rank.world_size))
    if rank.rank != 0:
        sys.exit(0)


def _refuse_unwritable(path: Path) -> None:
    """Raise OSError if the file cannot be written, to fail before minutes of measuring rather than after them."""
    if path.exists() and os.access(path, os.W_OK):
        return
    try:
        tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(path))).close()
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def _split_names(text: str, known: Collection[str], option: str) -> list[str]:
    """Split names at commas. Raises `UsageError` for an unknown name."""
    names = text.split(",")
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise UsageError(f"{option}: no {clean(unknown)!r}; there are: {', '.join(known)}")
    return names


def _save(calibration: Calibration, name: str | None, path: Path) -> None:
    write_atomically(path, calibration_json(msgspec.structs.replace(calibration, name=name or calibration.name)))
