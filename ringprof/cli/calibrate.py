"""``ringprof calibrate``: a machine's figures, from its GPUs or from recorded runs."""

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
from ringprof.errors import UsageError
from ringprof.files import write_atomically
from ringprof.prediction.calibration import (
    TIME_SHARES,
    Calibration,
    assumed,
    base_for,
    calibration_json,
    read_calibration,
)
from ringprof.prediction.fit import calibrate_from, observed_run
from ringprof.prediction.query import run_at
from ringprof.prediction.text import calibration_text
from ringprof.record.launcher import launcher_rank
from ringprof.report.text import clean, shell_words


@click.command("calibrate")
@click.argument("runs", nargs=-1, type=click.Path(), metavar="[RUN]...")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="The calibration file to write.")
@click.option("--name", help="What to call the machine.  [default: the device]")
@click.option(
    "--base", metavar="FILE_OR_NAME", help="Where what is not measured is taken from.  [default: by the device]"
)
@click.option("--kernels", metavar="NAMES", help="Kernels to measure, by commas.  [default: all that run here]")
@click.option(
    "--parts",
    metavar="NAMES",
    help=f"What to measure, by commas: {', '.join(TIME_SHARES)}; the base keeps the rest.  [default: all]",
)
@click.option("--seconds", type=Number(min=5), default=400.0, show_default=True,
              help="About how long to measure on GPUs.")  # fmt: skip
def command(
    runs: tuple[str, ...], output: str, name: str | None, base: str | None, kernels: str | None, parts: str | None,
    seconds: float,
) -> None:  # fmt: skip
    """Measure a machine on all GPUs of this host, or take its figures from recorded runs.

    With two GPUs or more links are measured, too. What is known is written as it comes.

    \b
    ringprof calibrate -o machine.json
    ringprof calibrate traces/h200x4-* -o machine.json
    """
    path = Path(output)
    if runs:
        known = read_calibration(base) if base else base_for(run_at(runs[0]).environment.devices[0])
        _save(calibrate_from([observed_run(run, known) for run in runs], known), name, path)
    else:
        _refuse_unwritable(path)
        _measured(path, name, base, kernels, parts, seconds)
    click.echo(calibration_text(read_calibration(path), text_style(None)), nl=False)
    say(f"Wrote {output}: ringprof predict --machine {shell_words([output])}")


def _measured(
    path: Path, name: str | None, base: str | None, kernels: str | None, parts: str | None, seconds: float
) -> None:
    import torch

    asked = _named(parts or ",".join(TIME_SHARES), TIME_SHARES, "--parts")
    if not torch.cuda.is_available():
        raise UsageError("calibrate measures GPUs and there is none here: name recorded runs instead")
    place = launcher_rank()
    if place is None and torch.cuda.device_count() > 1:
        # Ranks of our own: the same command on every GPU.
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
        known = assumed(properties.name, properties.name, properties.multi_processor_count, properties.total_memory)

    def run(bench: Bench) -> None:
        usable = usable_kernels(bench.device)
        chosen = _named(kernels, usable, "--kernels") if kernels else usable
        measure_machine(known, bench, chosen, seconds, lambda found: _save(found, name, path), asked)

    if place is None:
        run(Bench(device))
        return
    with world_group(place, "cuda", seconds + 300) as mine:
        run(Bench(mine, place.rank, place.world_size))
    if place.rank != 0:
        sys.exit(0)


def _refuse_unwritable(path: Path) -> None:
    """Raise OSError where the file cannot be written: before minutes of measuring, not after them."""
    if path.exists() and os.access(path, os.W_OK):
        return
    try:
        tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(path))).close()
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def _named(given: str, known: Collection[str], option: str) -> list[str]:
    names = given.split(",")
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise UsageError(f"{option}: no {clean(unknown)!r}; there are: {', '.join(known)}")
    return names


def _save(found: Calibration, name: str | None, path: Path) -> None:
    write_atomically(path, calibration_json(msgspec.structs.replace(found, name=name or found.name)))
