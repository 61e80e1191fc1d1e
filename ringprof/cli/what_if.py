"""``ringprof what-if``: replay a recorded run with changes."""

from __future__ import annotations

from typing import Any

import click

from ringprof.cli.options import Advanced, Command, OneOf
from ringprof.cli.progress import show_progress
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
from ringprof.prediction.text import PART_LABELS
from ringprof.prediction.what_if import Changes, WhatIf, what_if
from ringprof.report.text import duration

_LINKS = {"intra-node": "same_host", "inter-node": "other_host"}
"""Classes of links by their names on the command line; a calibration's own names work, too."""
_NOTABLE = 0.05
"""Share of the whole change from which the change of a part is named."""


@click.command("what-if", cls=Command)
@click.argument("run", type=click.Path())
@click.option(
    "--link", "links", multiple=True, metavar="LINK=FACTOR",
    help="Speed up the links within nodes (intra-node=2x) or between nodes (inter-node=2x).",
)  # fmt: skip
@click.option("--slow", multiple=True, metavar="RANK=FACTOR", help="Slow the blocks of a rank down, such as 3=1.25.")
@click.option("--kernel-speed", default="1x", show_default=True, metavar="FACTOR", help="Speed up attention kernels.")
@click.option("--kernel", type=Known(tuple(name for name in KERNEL_NAMES if name != "auto")),
              help="Attention kernel; the calibration must have its curves and those of the run's kernel.")  # fmt: skip
@click.option("--hops", type=OneOf(["nccl", "copy"]), help="Intra-node transport: NCCL or CUDA copy engines.")
@click.option(
    "--ranks-per-node",
    "ranks_per_host",
    cls=Advanced,
    type=click.IntRange(min=1),
    help="Number of neighbouring ranks per node.",
)
@click.option("--kv-heads", type=click.IntRange(min=1), help="Number of key and value heads.")
@click.option("-p", "--param", "params", multiple=True, metavar="KEY=VALUE", help="Change a parameter of the strategy.")
@click.option("--machine", metavar="FILE_OR_NAME",
              help="Calibration for figures that the run does not have.  [default: by its device]")  # fmt: skip
@formats("json")
def command(**options: Any) -> int:
    """Replay the blocks and hops of a recorded run, then replay them with changes.

    \b
    ringprof what-if traces/h200x4-zigzag-262144 --hops copy
    ringprof what-if traces/h200x4-burst-65536-two-hosts --link inter-node=10x --slow 3=1.25
    """
    run = find_run(options["run"])
    machine = read_calibration(options["machine"]) if options["machine"] else base_for(run.environment.devices[0])
    changes = Changes(
        links={_LINKS.get(name, name): _factor("--link", value) for name, value in _pairs(options["links"], "--link")},
        slow={_rank(name): _factor("--slow", value) for name, value in _pairs(options["slow"], "--slow")},
        kernel_speed=_factor("--kernel-speed", options["kernel_speed"]), kernel=options["kernel"],
        hops=options["hops"], hosts_of=options["ranks_per_host"],
        kv_heads=options["kv_heads"], params=params_of(options["params"], "KEY=VALUE"),
    )  # fmt: skip
    with show_progress("replaying"):
        result = what_if(observed_run(options["run"], machine), machine, changes)
    click.echo(json_text(result.as_dict()) if options["form"] == "json" else _text(result, changes), nl=False)
    return 0


def _text(result: WhatIf, changes: Changes) -> str:
    lines = [
        f"recorded  {duration(result.recorded_ns)}, the profiled iteration's slowest rank",
        f"replayed  {duration(result.replayed_ns)}: off by {percent(result.replay_error)}",
    ]
    if changes == Changes():
        lines.append("nothing changed: name --link, --slow, --kernel-speed, --kernel, --hops or --ranks-per-node")
    else:
        word = "less" if result.gain >= 0 else "more"
        low, high = map(duration, result.range_ns)
        lines += [
            f"PREDICTED {duration(result.changed_ns)} ({low} to {high}): {percent(abs(result.gain))} {word} than the"
            " replay",
            f"change    {_change(result)}",
            f"range     {_range(result, changes)}",
        ]
        if abs(result.gain) < abs(result.replay_error):
            lines.append("the change is smaller than the replay's error")
    return "\n".join(lines) + "\n"


def _range(result: WhatIf, changes: Changes) -> str:
    """Say what the range of a prediction holds, and why it is no 80 % interval where it is none."""
    if result.is_interval:
        return "80 % interval, by three recorded pairs that differ in the transport of hops"
    kernels = ", and by the spread of both kernels' curves" if changes.kernel else ""
    return (
        "no 80 % interval: such a change was not checked against pairs of recorded runs, so the model's error for it is"
        " unknown. This is the middle 80 % over draws of the machine's figures, widened by the replay's error" + kernels
    )


def _change(result: WhatIf) -> str:
    """Name the parts of the slowest rank's time that change most, largest first."""
    changed = sorted(result.parts_ns.items(), key=lambda part: -abs(part[1]))
    least_ns = _NOTABLE * abs(result.changed_ns - result.replayed_ns)
    shown = [f"{PART_LABELS[part]} {'-' if ns < 0 else '+'}{duration(abs(ns))}" for part, ns in changed
             if abs(ns) > least_ns]  # fmt: skip
    return f"{'; '.join(shown) or 'none'}; on the slowest rank"


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
