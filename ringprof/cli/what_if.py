"""``ringprof what-if``: replay a recorded run with changes."""

from __future__ import annotations

from typing import Any

import click

from ringprof.cli.recording import params_of
from ringprof.cli.values import KERNEL_NAMES, Known
from ringprof.cli.write import formats
from ringprof.common.formatting import percent
from ringprof.common.json_object import json_text
from ringprof.common.validation import whole
from ringprof.errors import UsageError
from ringprof.prediction.calibration import base_for, read_calibration
from ringprof.prediction.fit import observed_run
from ringprof.prediction.query import find_run
from ringprof.prediction.what_if import Changes, WhatIf, what_if
from ringprof.report.text import duration


@click.command("what-if")
@click.argument("run", type=click.Path())
@click.option(
    "--link", "links", multiple=True, metavar="LINK=FACTOR",
    help="Speed up intra-node links (same_host=2x) or inter-node links (other_host=2x).",
)  # fmt: skip
@click.option("--slow", multiple=True, metavar="RANK=FACTOR", help="Slow the blocks of a rank down, such as 3=1.25.")
@click.option("--kernel-speed", default="1x", show_default=True, metavar="FACTOR", help="Speed up attention kernels.")
@click.option("--kernel", type=Known(tuple(name for name in KERNEL_NAMES if name != "auto")),
              help="Attention kernel; the calibration must have its curves and those of the run's kernel.")  # fmt: skip
@click.option("--hops", type=click.Choice(["nccl", "copy"]), help="Intra-node transport: NCCL or CUDA copy engines.")
@click.option("--ranks-per-host", type=click.IntRange(min=1), help="Number of neighbouring ranks per node.")
@click.option("--kv-heads", type=click.IntRange(min=1), help="Number of key and value heads.")
@click.option("-p", "--param", "params", multiple=True, metavar="KEY=VALUE", help="Change a parameter of the strategy.")
@click.option("--machine", metavar="FILE_OR_NAME",
              help="Calibration for figures that the run does not have.  [default: by its device]")  # fmt: skip
@formats("json")
def command(**options: Any) -> int:
    """Replay the blocks and hops of a recorded run, then replay them with changes.

    \b
    ringprof what-if traces/h200x4-zigzag-262144 --hops copy
    ringprof what-if traces/h200x4-burst-65536-two-hosts --link other_host=10x --slow 3=1.25
    """
    run = find_run(options["run"])
    machine = read_calibration(options["machine"]) if options["machine"] else base_for(run.environment.devices[0])
    changes = Changes(
        links={name: _factor("--link", value) for name, value in _pairs(options["links"], "--link")},
        slow={_rank(name): _factor("--slow", value) for name, value in _pairs(options["slow"], "--slow")},
        kernel_speed=_factor("--kernel-speed", options["kernel_speed"]), kernel=options["kernel"],
        hops=options["hops"], hosts_of=options["ranks_per_host"],
        kv_heads=options["kv_heads"], params=params_of(options["params"], "KEY=VALUE"),
    )  # fmt: skip
    result = what_if(observed_run(options["run"], machine), machine, changes)
    click.echo(json_text(result.as_dict()) if options["form"] == "json" else _text(result, changes), nl=False)
    return 0


def _text(result: WhatIf, changes: Changes) -> str:
    lines = [
        f"recorded  {duration(result.recorded_ns)}, the profiled iteration's slowest rank",
        f"replayed  {duration(result.replayed_ns)}: off by {percent(result.replay_error)}",
    ]
    if changes == Changes():
        lines.append("nothing changed: name --link, --slow, --kernel-speed, --kernel, --hops or --ranks-per-host")
    else:
        word = "less" if result.gain >= 0 else "more"
        lines.append(f"PREDICTED {duration(result.changed_ns)}: {percent(abs(result.gain))} {word} than the replay")
        if abs(result.gain) < abs(result.replay_error):
            lines.append("the change is smaller than what the replay is off by")
    return "\n".join(lines) + "\n"


def _pairs(texts: tuple[str, ...], option: str) -> list[tuple[str, str]]:
    """Split values of an option at ``=``. Raises `UsageError`."""
    pairs = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"{option} {text!r}: write NAME=FACTOR")
        pairs.append((name, value))
    return pairs


def _rank(text: str) -> int:
    rank = whole(text)
    if rank is None:
        raise UsageError(f"--slow {text!r}: write RANK=FACTOR, such as 3=1.25")
    return rank


def _factor(option: str, text: str) -> float:
    try:
        factor = float(text.removesuffix("x"))
    except ValueError:
        factor = 0.0
    if not 0.001 <= factor <= 1000:
        raise UsageError(f"{option}: {text!r} is not a factor: write 2x, or 0.5x")
    return factor
