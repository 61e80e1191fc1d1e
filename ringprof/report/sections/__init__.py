"""The one table of what a report holds: each subject in the terminal, in JSON and on the page.

A new section is a row of `SECTIONS` and a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ringprof.analysis.findings.findings import Findings
from ringprof.report import timeline
from ringprof.report.page.document import Content, PageContext, ReportParts
from ringprof.report.sections import (
    annotated,
    breakdown,
    hops,
    idle,
    inference,
    kernels,
    machine,
    memory,
    rates,
    run,
    steps,
    warnings,
    waterfall,
)
from ringprof.report.tables import Column, Listing
from ringprof.report.text import TextStyle


class Section(NamedTuple):
    """One subject of a report, in each form that has it."""

    name: str
    """Also of the option that asks for it in the terminal."""
    title: str = ""
    """On the page."""
    terminal: Callable[[Findings, TextStyle, Listing], list[str]] | None = None
    """Blocks of text; none where there is nothing to say."""
    json: Callable[[Findings], ReportParts] | None = None
    """What it adds to the report."""
    html: Callable[[Findings, PageContext], Content | None] | None = None
    """None where there is nothing to show."""
    option: str = ""
    """What the option says of itself; empty where the terminal report always has this section."""
    on_cpu: bool = True
    """Whether a CPU run can tell it."""
    columns: Sequence[Column] = ()
    """Of a listing that can be sorted."""


SECTIONS = (
    Section("machine", "State of the GPUs", machine.terminal, html=machine.html),
    Section("communication", terminal=run.communication),
    Section("run", terminal=run.terminal, json=run.json),
    Section("rates", "FLOPs and MFU", rates.terminal, html=rates.html),
    Section("inference", "Prefill and decode", inference.terminal, html=inference.html),
    Section("controls", terminal=run.controls),
    Section("waterfall", "Waterfall", waterfall.terminal, waterfall.json, waterfall.html,
            "Also show every part from the device's peak to the speed achieved."),
    Section("breakdown", "Breakdown by rank", breakdown.terminal, breakdown.json, breakdown.html),
    Section("kinds", "By kind", html=breakdown.kinds_html),
    Section("speed", "Speed and controls", html=run.speed_html),
    Section("timeline", "Timeline", html=timeline.html),
    Section("memory", "Memory over time", html=memory.html),
    Section("steps", "Ring steps", steps.terminal, steps.json, steps.html,
            "Also show ring steps: block, hops, what was exposed and why.", on_cpu=False, columns=steps.COLUMNS),
    Section("idle", "Idle time by cause", idle.terminal, html=idle.html,
            option="Also show idle time by cause: the host, gaps, blocked; and how activities were launched.",
            on_cpu=False, columns=idle.COLUMNS),
    Section("kernels", "Kernels", kernels.terminal, html=kernels.html,
            option="Also show kernels by name: time, calls, hidden or exposed.", on_cpu=False, columns=kernels.COLUMNS),
    Section("annotations", "Annotations", annotated.terminal, html=annotated.html,
            option="Also show your own ranges: time, and communication exposed and hidden.", on_cpu=False,
            columns=annotated.COLUMNS),
    Section("hops", "Hops and bandwidth", hops.terminal, html=hops.html,
            option="Also show hops: peers, bytes, wait, wire and rate.", on_cpu=False, columns=hops.COLUMNS),
    Section("settings", "Settings and environment", html=run.html),
    Section("warnings", "Warnings", warnings.terminal, html=warnings.html),
)  # fmt: skip
"""In their order on the page. The terminal shows the machine's state before the verdict, then those that it always has,
then those asked for, then warnings."""

OPTIONAL = {section.name: section for section in SECTIONS if section.option}
"""What can be asked for beside the terminal report."""
