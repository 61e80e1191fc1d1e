"""The further tables of the terminal report: ring steps, hops and the waterfall."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.waterfall import Waterfall, WaterfallPart
from ringprof.analysis.steps.steps import Step
from ringprof.analysis.transfers.hops import Hop
from ringprof.report.terms import WATERFALL as PARTS
from ringprof.report.text import clean, duration, in_unit, percent, rate, rounded_to_sum, unit_for

SECTIONS = ("steps", "hops", "waterfall")
"""What can be asked for beside the report."""
MOST_STEPS_LISTED = 100
"""Rows up to which every rank's step is shown; beyond, one row a step over all ranks."""
MOST_HOPS_LISTED = 200

_SOURCES = {
    "ringprof": "as ringprof's strategies named them",
    "annotation": "as the trace names them",
    "order": "from the order of hops and attention kernels",
}

Bar = Callable[[float, int], str]


def table(title: str, columns: Iterable[str]) -> Table:
    """A table as every part of the report has it: names on the left, figures on the right."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    made.add_column(title, no_wrap=True, vertical="bottom")
    for column in columns:
        made.add_column(column, justify="right", no_wrap=True)
    return made


# --- ring steps ---------------------------------------------------------------------------------------


def steps_section(steps: Sequence[Step], on_cpu: bool = False) -> RenderableType:
    """A row a rank and step, or a row a step where they are many."""
    if not steps:
        if on_cpu:
            return Text("ring steps: a CPU trace does not tell when a transfer ran, so none are told")
        return Text("ring steps: none found; neither annotations nor the order of hops and attention tell them")
    unit_ns, unit = unit_for(max(step.end_ns - step.start_ns for step in steps))
    groups: dict[str, list[Step]] = defaultdict(list)
    listed = len(steps) <= MOST_STEPS_LISTED
    for step in steps:
        rank = f"rank {step.rank} " if listed else ""
        call = f"call {step.call} " if listed and any(other.call for other in steps) else ""
        groups[f"{rank}{call}{step.phase} {step.step}"].append(step)
    title = f"ring steps\nin {unit}"
    made = table(title, ["block", "step", "hops", "wait", "wire", "exposed", "of it\nwire", "bound by"])
    for name, mine in groups.items():
        made.add_row(name, *_step_cells(mine, unit_ns))
    notes = [f"steps {_SOURCES[steps[0].source]}"]
    if not listed:
        notes.append("means over ranks and calls; what most are bound by, and how many of them")
    return Group(made, Text("\n".join(notes), style="dim"))


def _step_cells(steps: Sequence[Step], unit_ns: float) -> list[str]:
    times: list[list[int | None]] = [
        [step.block_ns for step in steps],
        [step.end_ns - step.start_ns for step in steps],
        [step.wait_ns for step in steps],
        [step.wire_ns for step in steps],
        [step.exposed_ns for step in steps],
        [step.exposed_wire_ns for step in steps],
    ]
    cells = [_mean_cell(values, unit_ns) for values in times]
    hops = {step.hops for step in steps}
    cells.insert(2, str(hops.pop()) if len(hops) == 1 else f"{min(hops)}-{max(hops)}")
    bounds = [step.bound or "-" for step in steps]
    most = max(dict.fromkeys(bounds), key=bounds.count)
    return [*cells, most if len(set(bounds)) == 1 else f"{most} {bounds.count(most) / len(bounds):.0%}"]


def _mean_cell(values: Sequence[int | None], unit_ns: float) -> str:
    known = [value for value in values if value is not None]
    return in_unit(sum(known) / len(known), unit_ns) if len(known) == len(values) else "-"


# --- hops ---------------------------------------------------------------------------------------------


def hops_section(attribution: Attribution) -> RenderableType:
    """A row a hop, of the ranks' first ones where they are many."""
    hops = [hop for rank in attribution.ranks for hop in rank.hops]
    if not hops and attribution.on_cpu:
        return Text("hops: a CPU trace does not tell when a transfer ran; by kind, above, is what ranks waited for")
    if not hops:
        return Text("hops: none; these ranks exchange nothing with neighbours alone")
    unit_ns, unit = unit_for(max(hop.end_ns - hop.start_ns for hop in hops))
    start = min(hop.start_ns for hop in hops)
    made = table(f"hops\nin {unit}", ["to", "from", "MB", "start", "duration", "wait", "wire", "GB/s", "exposed"])
    for hop in hops[:MOST_HOPS_LISTED]:
        made.add_row(f"rank {hop.rank} hop {hop.number}", *_hop_cells(hop, start, unit_ns))
    left = len(hops) - MOST_HOPS_LISTED
    more = [Text(f"and {left} more: --format json sums them, run.hops() lists them", style="dim")] if left > 0 else []
    return Group(made, *more)


def _hop_cells(hop: Hop, start_ns: int, unit_ns: float) -> list[str]:
    transfers = [part.transfer for part in hop.parts]
    to = dict.fromkeys(str(message.peer) for transfer in transfers for message in transfer.sends)
    source = dict.fromkeys(str(message.peer) for transfer in transfers for message in transfer.receives)
    size, wire = hop.sent_bytes, hop.wire_ns
    times = (hop.start_ns - start_ns, hop.end_ns - hop.start_ns, hop.wait_ns, wire)
    return [
        ",".join(to) or "-",
        ",".join(source) or "-",
        "-" if size is None else f"{size / 1e6:,.1f}",
        *("-" if time is None else in_unit(time, unit_ns) for time in times),
        f"{size / wire:.3g}" if size is not None and wire else "-",
        in_unit(hop.exposed_ns, unit_ns),
    ]


# --- waterfall ----------------------------------------------------------------------------------------


def waterfall_section(waterfall: Waterfall, bar: Bar, width: int) -> RenderableType:
    """The parts from the peak down, each with the speed left after it, and the line that it rests on."""
    unit_ns, unit = unit_for(waterfall.wall_ns)
    rated = waterfall.tflops is not None
    made = table("waterfall", [f"{unit}", "of wall", *(["TFLOP/s\nafter it"] if rated else [])])
    made.add_column("", no_wrap=True, style="cyan")
    times = rounded_to_sum([part.time_ns / unit_ns for part in waterfall.parts], waterfall.wall_ns / unit_ns, 3)
    for part, time in zip(waterfall.parts, times, strict=True):
        made.add_row(*_part_cells(part, f"{time:,.3f}", rated), bar(max(part.share, 0.0), max(0, min(20, width - 70))))
    label = f"wall of rank {waterfall.slowest_rank}, the slowest"
    whole = [label, in_unit(waterfall.wall_ns, unit_ns), percent(1.0)]
    made.add_row(*whole, *([_speed(waterfall.tflops)] if rated else []), "", style="bold")
    lines = [f"{PARTS[part.part]}: {clean(part.evidence)}" for part in waterfall.parts]
    return Group(made, Text(), Text("\n".join([*lines, _bounds_line(waterfall)]), style="dim"))


def _part_cells(part: WaterfallPart, time: str, rated: bool) -> list[str]:
    return [PARTS[part.part], time, percent(part.share), *([_speed(part.tflops)] if rated else [])]


def _speed(tflops: float | None) -> str:
    return "-" if tflops is None else rate(tflops).split(" ")[0] if tflops >= 1 else f"{tflops:.3g}"


def _bounds_line(waterfall: Waterfall) -> str:
    bounds = waterfall.bounds
    return (
        f"bounds: {duration(bounds.free_ns)} if communication were free, {duration(bounds.balanced_ns)} if ranks were "
        f"balanced, {duration(bounds.hidden_ns)} if they were and all were hidden that can be"
    )
