"""``ringprof predict --replay``: replay a recorded run with changes."""

from __future__ import annotations

from collections.abc import Container

import click

from ringprof.cli.options import Advanced, all_of
from ringprof.cli.progress import show_progress
from ringprof.cli.recording import params_of
from ringprof.cli.values import Whole
from ringprof.common.formatting import percent
from ringprof.common.json_object import Options, json_text
from ringprof.common.validation import whole
from ringprof.errors import UsageError
from ringprof.prediction.calibration import base_for, read_calibration
from ringprof.prediction.fit import observed_run
from ringprof.prediction.query import find_run
from ringprof.prediction.text import PART_LABELS
from ringprof.prediction.what_if import Changes, WhatIf, what_if
from ringprof.report.text import clean, duration

_LINKS = {"intra-node": "same_host", "inter-node": "other_host"}
"""Classes of links by their names on the command line; a calibration's own names work, too."""
_NOTABLE = 0.05
"""Share of the whole change from which the change of a part is named."""


replay_options = all_of(
    click.option("--replay", type=click.Path(), metavar="RUN",
                 help="Replay the measured blocks and hops of this recorded run, with changes: --link, --slow,"
                 " --kernel-speed, --ranks-per-node, --kernel, --hops, --kv-heads, -p."),
    click.option("--link", "links", cls=Advanced, multiple=True, metavar="LINK=FACTOR",
                 help="With --replay: speed up the links within nodes (intra-node=2x) or between nodes"
                 " (inter-node=2x)."),
    click.option("--slow", cls=Advanced, multiple=True, metavar="RANK=FACTOR",
                 help="With --replay: slow the blocks of a rank down, such as 3=1.25."),
    click.option("--kernel-speed", cls=Advanced, default="1x", show_default=True, metavar="FACTOR",
                 help="With --replay: speed up attention kernels."),
    click.option("--ranks-per-node", "ranks_per_host", cls=Advanced, type=Whole(min=1),
                 help="With --replay: number of neighbouring ranks per node."),
)  # fmt: skip
"""Decorator that adds the options of a replay with changes, beside those of a prediction."""
REPLAY_ALONE = ("links", "slow", "kernel_speed", "ranks_per_host")
REPLAY_ALLOWED = {*REPLAY_ALONE, "replay", "kernel", "hops", "kv_heads", "params", "machine", "form"}
"""Options that a replay has by themselves, and all that go with it."""


def print_replay(options: Options, chosen: Container[str]) -> None:
    """Replay the run of --replay with the changes and print the result; ``chosen`` are the options that are set."""
    for name in ("kernel", "hops"):
        if options[name] == "auto" and name in chosen:
            raise UsageError(f"--{name} auto: does not go with --replay: name one, or leave the option out")
    run = find_run(options["replay"])
    machine = read_calibration(options["machine"]) if options["machine"] else base_for(run.environment.devices[0])
    changes = Changes(
        links={_LINKS.get(name, name): _factor("--link", value) for name, value in _pairs(options["links"], "--link")},
        slow={_rank(name): _factor("--slow", value) for name, value in _pairs(options["slow"], "--slow")},
        kernel_speed=_factor("--kernel-speed", options["kernel_speed"]), hosts_of=options["ranks_per_host"],
        kernel=None if options["kernel"] == "auto" else options["kernel"],
        hops=None if options["hops"] == "auto" else options["hops"],
        kv_heads=options["kv_heads"], params=params_of(options["params"], "KEY=VALUE"),
    )  # fmt: skip
    with show_progress("replaying"):
        result = what_if(observed_run(options["replay"], machine), machine, changes)
    text = (
        json_text(result.as_dict()) if options["form"] == "json" else _text(clean(options["replay"]), result, changes)
    )
    click.echo(text, nl=False)


def _text(name: str, result: WhatIf, changes: Changes) -> str:
    changed = " with changes" if changes != Changes() else ""
    lines = [
        f"REPLAYED: the measured blocks and hops of {name}{changed}",
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
