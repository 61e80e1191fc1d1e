"""The table of report sections: each subject in the terminal, in JSON and on the page.

A new section is a row of `SECTIONS`, and a module of its own or a table in `ringprof.report.sections.listings`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ringprof.analysis.findings.findings import Findings
from ringprof.report import timeline
from ringprof.report.page.document import Content, PageContext, ReportParts
from ringprof.report.sections import (
    breakdown,
    hops,
    idle,
    machine,
    memory,
    rates,
    run,
    steps,
    warnings,
    waterfall,
)
from ringprof.report.sections.listings import (
    ANNOTATIONS,
    COLLECTIVES,
    GEMMS,
    KERNELS,
    LAYERS,
    RECURRENCE,
    kernels_html,
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
    offered: Callable[[Findings], bool] = lambda findings: True
    """Test of whether the run has anything for the section; else the terminal report does not offer its option."""
    meaning: str = ""
    """Explanation below the heading on the page, for readers without the manual."""


MIN_IDLE_SHARE = 0.02
"""Least idle share of the mean wall at which the terminal report offers ``--show idle``."""


SECTIONS = (
    Section("machine", "State of the GPUs", machine.terminal, html=machine.html,
            meaning="What the driver reported while the iterations were timed, some ten times a second: a GPU that "
            "is held back runs every kernel slower, whatever the code does."),
    Section("communication", terminal=run.communication),
    Section("run", terminal=run.terminal, json=run.json),
    Section("rates", "FLOPs and MFU", rates.terminal, html=rates.html,
            meaning="FLOPs of attention and matrix products by the shapes that the profiler recorded, over the time "
            "of their kernels. MFU: these FLOPs over the slowest rank's wall and the device's peak; recomputed work "
            "counts."),
    Section("inference", "Prefill and decode", rates.inference_terminal, html=rates.inference_html),
    Section("controls", terminal=run.baselines),
    Section("waterfall", "Waterfall", waterfall.terminal, waterfall.json, waterfall.html,
            "Also show every part from the device's peak to the speed achieved.",
            meaning="From the device's peak matrix rate down to the speed achieved: what each loss takes of the "
            "slowest rank's wall, mean over ranks. The parts sum to that wall."),
    Section("breakdown", "Breakdown by rank", breakdown.terminal, breakdown.json, breakdown.html,
            meaning="Each rank's time, in parts that sum to its wall: an instant in which anything computes is "
            "compute, else communication if any runs (exposed), else memory operations, else idle."),
    Section("recurrence", "Parts of the recurrence", RECURRENCE.terminal, html=RECURRENCE.html,
            meaning="Local scan: what a rank computes without the states of other ranks. States: combining those of "
            "ranks and passing them on. Output: what needs the incoming state. Work belongs to the part that "
            "launched it, and waiting and wire time may be hidden behind computation."),
    Section("kinds", "By kind", html=breakdown.kinds_html,
            meaning="What ran, by kind, mean over ranks. Kinds may run at the same time, so they need not sum to the "
            "wall."),
    Section("speed", "Speed and controls", html=run.speed_html,
            meaning="Timed without the profiler, unless said otherwise; controls took turns with ordinary "
            "iterations."),
    Section("timeline", "Timeline", html=timeline.html,
            meaning="Every rank's device over time, a lane a stream: computation above, below it communication, "
            "split into waiting for a peer and bytes on the wire where the traces tell. Shaded: every other ring "
            "step, if there are any. Idle stretches that are wide enough to be seen are grey, with their cause. The "
            "overview above marks stretches without computation; the table below lists the longest of them."),
    Section("memory", "Memory over time", html=memory.html,
            meaning="What the allocators of the profiled program held after each allocation and release, by the "
            "clock of its calls, which run ahead of the device."),
    Section("steps", "Ring steps", steps.terminal, steps.json, steps.html,
            "Also show ring steps: block, hops, what was exposed and why.", on_cpu=False, columns=steps.COLUMNS,
            offered=lambda findings: bool(findings.exposed_by_step),
            meaning="A ring step is one block of attention and the hops that it should hide. Exposed is "
            "communication in the step with nothing computing beside it; a step is bound by compute, by the wire or "
            "by a peer."),
    Section("idle", "Idle time by cause", idle.terminal, html=idle.html,
            option="Also show idle time by cause: the host, gaps, blocked; and how activities were launched.",
            on_cpu=False, columns=idle.COLUMNS,
            offered=lambda findings: any(
                part.name == "idle" and part.share >= MIN_IDLE_SHARE for part in findings.summary.parts),
            meaning="What the device waited for while nothing ran on it. Host: the next activity was not launched "
            "yet, by what the launching thread did meanwhile. Gap: launched, and it starts within 5 µs. Blocked: "
            "launched, and it starts later. The three sum to idle. Time blocked on a peer's copy is part of exposed "
            "communication, not of idle."),
    Section("kernels", "Kernels", KERNELS.terminal, html=kernels_html,
            option="Also show kernels by name: time, calls, hidden or exposed.", on_cpu=False, columns=KERNELS.columns,
            meaning="Activities on the device by name, over all ranks, with the kind that they count as."),
    Section("gemms", "Matrix products by shape", GEMMS.terminal, html=GEMMS.html,
            option="Also show matrix products by shape: time, TFLOP/s, share of peak (needs record_shapes).",
            columns=GEMMS.columns,
            offered=lambda findings: bool(findings.gemms),
            meaning="Calls of matrix products by the shape that the profiler recorded, (m, k) by (k, n), mean over "
            "ranks: the time of their kernels, and FLOPs over that time against the device's peak."),
    Section("collectives", "Communication by size", COLLECTIVES.terminal, html=COLLECTIVES.html,
            option="Also show communication by kind, group and size, with bus bandwidth.", on_cpu=False,
            columns=COLLECTIVES.columns,
            # Hops have a section of their own.
            offered=lambda findings: any(
                row.key.kind not in ("send_recv", "copy_engine") for row in findings.collectives),
            meaning="Kernels and copies of communication by kind, process group and size of one operation, mean over "
            "ranks. Sizes and bus bandwidth are those of nccl-tests; waiting for peers counts in the last column "
            "alone."),
    Section("layers", "Layers", LAYERS.terminal, html=LAYERS.html,
            option="Also show the model's layers: whose communication is exposed (needs names in the traces).",
            columns=LAYERS.columns,
            offered=lambda findings: bool(findings.layers),
            meaning="Attention and communication by layer of the model, mean over ranks: work belongs to the layer "
            "that launched it, in the backward pass to the layer of the forward operator. Of transfers that overlap, "
            "the first has the time, so that the rows sum to the run's."),
    Section("annotations", "Annotations", ANNOTATIONS.terminal, html=ANNOTATIONS.html,
            option="Also show your own ranges: time, and communication exposed and hidden.", on_cpu=False,
            columns=ANNOTATIONS.columns),
    Section("hops", "Hops and bandwidth", hops.terminal, html=hops.html,
            option="Also show hops: peers, bytes, wait, wire and rate.", on_cpu=False, columns=hops.COLUMNS,
            offered=lambda findings: any(rank.hop_totals.count for rank in findings.attribution.ranks),
            meaning="A hop is one transfer with neighbours. It waits until its peers have arrived; the rest is wire."),
    Section("settings", "Settings and environment", html=run.html,
            meaning="What was run, where, and with which versions."),
    Section("warnings", "Warnings", warnings.terminal, html=warnings.html),
)  # fmt: skip
"""Sections in their order on the page. The terminal shows the machine's state before the verdict, then the sections
that it always has, then those requested, then warnings."""

OPTIONAL = {section.name: section for section in SECTIONS if section.option}
"""Sections that can be added to the terminal report."""
