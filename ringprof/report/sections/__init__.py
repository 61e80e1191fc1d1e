"""The table of report sections: each subject in the terminal, in JSON and on the page.

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
    by_shape,
    hops,
    idle,
    inference,
    kernels,
    layers,
    machine,
    memory,
    rates,
    recurrence,
    run,
    steps,
    warnings,
    waterfall,
)
from ringprof.report.tables import Column, Listing
from ringprof.report.text import TextStyle


class Section(NamedTuple):
    """One subject of a report, in each form that it is available in."""

    name: str
    """Name of the section, of its anchor on the page and of the option that adds it in the terminal."""
    title: str = ""
    """Heading on the page."""
    terminal: Callable[[Findings, TextStyle, Listing], list[str]] | None = None
    """Function that returns blocks of text; none where there is nothing to report."""
    json: Callable[[Findings], ReportParts] | None = None
    """Function that returns the parts that the section adds to the JSON report."""
    html: Callable[[Findings, PageContext], Content | None] | None = None
    """Function that returns the section's content on the page; None where there is nothing to show."""
    option: str = ""
    """Help text of the option; empty where the terminal report always has this section."""
    on_cpu: bool = True
    """Whether the section can be filled from a CPU run."""
    columns: Sequence[Column] = ()
    """Columns of a listing that can be sorted."""


SECTIONS = (
    Section("machine", "State of the GPUs", machine.terminal, html=machine.html),
    Section("communication", terminal=run.communication),
    Section("run", terminal=run.terminal, json=run.json),
    Section("rates", "FLOPs and MFU", rates.terminal, html=rates.html),
    Section("inference", "Prefill and decode", inference.terminal, html=inference.html),
    Section("controls", terminal=run.baselines),
    Section("waterfall", "Waterfall", waterfall.terminal, waterfall.json, waterfall.html,
            "Also show every part from the device's peak to the speed achieved."),
    Section("breakdown", "Breakdown by rank", breakdown.terminal, breakdown.json, breakdown.html),
    Section("recurrence", "Parts of the recurrence", recurrence.terminal, html=recurrence.html),
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
    Section("gemms", "Matrix products by shape", by_shape.gemms_terminal, html=by_shape.gemms_html,
            option="Also show matrix products by shape: time, TFLOP/s, share of peak (needs record_shapes).",
            columns=by_shape.GEMM_COLUMNS),
    Section("collectives", "Communication by size", by_shape.collectives_terminal, html=by_shape.collectives_html,
            option="Also show communication by kind, group and size, with bus bandwidth.", on_cpu=False,
            columns=by_shape.COLLECTIVE_COLUMNS),
    Section("layers", "Layers", layers.terminal, html=layers.html,
            option="Also show the model's layers: whose communication is exposed (needs names in the traces).",
            columns=layers.COLUMNS),
    Section("annotations", "Annotations", annotated.terminal, html=annotated.html,
            option="Also show your own ranges: time, and communication exposed and hidden.", on_cpu=False,
            columns=annotated.COLUMNS),
    Section("hops", "Hops and bandwidth", hops.terminal, html=hops.html,
            option="Also show hops: peers, bytes, wait, wire and rate.", on_cpu=False, columns=hops.COLUMNS),
    Section("settings", "Settings and environment", html=run.html),
    Section("warnings", "Warnings", warnings.terminal, html=warnings.html),
)  # fmt: skip
"""Sections in their order on the page. The terminal shows the machine's state before the verdict, then the sections
that it always has, then those requested, then warnings."""

OPTIONAL = {section.name: section for section in SECTIONS if section.option}
"""Sections that can be added to the terminal report."""
