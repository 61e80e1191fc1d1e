"""The table of the controls in the terminal report."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from ringprof.analysis.findings.controls import ControlFigures
from ringprof.report.sections import table
from ringprof.report.text import in_unit, percent, rate, slower_or_faster, unit_for


def controls_section(controls: ControlFigures) -> RenderableType:
    """A row a control, each with its share of an ordinary iteration, and what follows from them."""
    c = controls
    unit_ns, unit = unit_for(c.iteration_ns)
    made = table("controls", ["time", "of an\niteration"])
    made.add_column("", no_wrap=True)
    on = "compute only" if c.ideal_ns == c.compute_only_ns else "communication only"
    rows = (
        ("an iteration, in turns with these", c.iteration_ns, ""),
        ("compute only: nothing sent", c.compute_only_ns, ""),
        ("communication only: nothing computed", c.communication_only_ns, ""),
        ("ideal: the larger of the two", c.ideal_ns, on),
        ("the same blocks alone", c.solo_ns, rate(c.solo_tflops)),
    )
    for name, time, note in rows:
        if time is not None:
            made.add_row(name, f"{in_unit(time, unit_ns)} {unit}", percent(time / c.iteration_ns), note)
    times = f"{c.iterations} of each in {c.rounds} round{'s' if c.rounds > 1 else ''}"
    ideal = f"{percent(c.ideal_efficiency)} of its ideal and " if c.ideal_efficiency is not None else ""
    lines = [f"The run reaches {ideal}{percent(c.of_solo)} of the solo rate"]
    if c.flash_slowdown is not None:
        lines.append(f"its attention kernels are {slower_or_faster(c.flash_slowdown)} beside communication than alone")
    return Group(made, Text(), Text("; ".join(lines) + f" ({times})."))
